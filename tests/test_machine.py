"""Facts about this machine."""

import sys

import pytest

from vitruvian import machine


def test_processor_facts_come_from_the_first_entry_of_cpuinfo(monkeypatch):
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"model name": "Xeon", "flags": "avx2 avx512_vnni"})
    assert machine.processor_name() == "Xeon"
    assert machine.processor_flags() == {"avx2", "avx512_vnni"}
    monkeypatch.setattr(machine, "_cpuinfo", lambda: {"features": "asimddp"})
    assert machine.processor_name()
    assert machine.processor_flags() == {"asimddp"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_peak_of_memory_starts_anew_and_sees_new_allocations():
    machine.reset_peak_memory()
    before = machine.resident_megabytes()
    block = bytearray(b"x" * 50_000_000)
    assert machine.peak_megabytes() - before > 40
    assert len(block) == 50_000_000
