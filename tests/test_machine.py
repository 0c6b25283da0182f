"""Facts about this machine."""

import platform
import subprocess
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


FAULTS = """
import resource
import torch
from vitruvian.machine import tune_allocator

layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
images = torch.zeros(160_000, 64)  # activations of 41 MB, which glibc returns by default

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers(images).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with tune_allocator(keep_freed=True):
    print([faults() for _ in range(6)][-1])
print(faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc's allocator")
def test_training_reuses_the_memory_of_freed_tensors_and_returns_it_at_the_end():
    output = subprocess.run([sys.executable, "-c", FAULTS], stdout=subprocess.PIPE, check=True, timeout=120).stdout
    reused, afterwards = map(int, output.split())
    assert reused < afterwards / 3
