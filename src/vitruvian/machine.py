"""Facts about this machine: its processor, and the memory of this process.

Linux reports them in /proc; elsewhere the facts that only /proc knows are empty or None.
"""

import ctypes
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def _cpuinfo() -> dict[str, str]:
    """Entries of the first processor in /proc/cpuinfo, by lower-case name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
        return {key.strip().lower(): value.strip() for key, _, value in pairs}
    return {}


def processor_name() -> str:
    """Model name of the processor, as precise as the system reports it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """Instruction set extensions of the processor, as /proc/cpuinfo spells them."""
    return set((_cpuinfo().get("flags") or _cpuinfo().get("features") or "").split())


def has_vnni() -> bool:
    """Whether the processor is known to add 8-bit products in 32 bits, without saturation."""
    return bool({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"} & processor_flags())


def resident_megabytes() -> float | None:
    """Memory that this process uses now."""
    return _memory_entry("VmRSS")


def peak_megabytes() -> float | None:
    """Peak memory of this process since it started, or since `reset_peak_memory`."""
    return _memory_entry("VmHWM")


def _memory_entry(entry: str, file: str = "/proc/self/status") -> float | None:
    with suppress(OSError):
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{entry}:"):
                return int(line.split()[1]) / 1024
    return None


def free_megabytes() -> float | None:
    """Memory that new allocations can use without swapping."""
    return _memory_entry("MemAvailable", "/proc/meminfo")


def trim_memory() -> None:
    """Return freed memory to the system; only glibc keeps it, and offers a call for this."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory() -> None:
    """Start a new measurement of the peak, without freed memory that would hide new allocations."""
    trim_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
