"""Facts about this machine: its processor, and the memory of this process.

Linux reports them in /proc; elsewhere the facts that only /proc knows are empty or None.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vitruvian.errors import ConfigError, argument
from vitruvian.progress import print_status

if TYPE_CHECKING:
    import torch


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


def has_fast_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices faster than float32, with AVX-512 BF16 or AMX.

    Some machines announce AMX and do not allow it; libraries that use it there end the process.
    """
    import torch

    flags = processor_flags()
    return bool(torch.cpu._init_amx()) if "amx_bf16" in flags else "avx512_bf16" in flags


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


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # of glibc's malloc.h


@contextmanager
def tune_allocator(*, keep_freed: bool) -> Iterator[None]:
    """In this block, glibc keeps the memory of freed tensors for the next ones, or returns it to the system at once.

    By default it returns blocks of 32 MB and more. Training frees as many with every step and asks for them again,
    and the system clears their pages each time. With gradient checkpointing, however, the gaps between activations add
    up over a step, so that keeping them would take twice the memory of the tensors.
    """
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    kept, returned = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**26}, {M_MMAP_THRESHOLD: 2**20}
    defaults = {M_MMAP_MAX: 2**16, M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**26, M_TOP_PAD: 2**17}
    try:
        for parameter, value in (kept if keep_freed else returned).items():
            mallopt(parameter, value)
        yield
    finally:
        for parameter, value in defaults.items():  # the thresholds that glibc's own adjustment ends at
            mallopt(parameter, value)
        trim_memory()


def reset_peak_memory() -> None:
    """Start a new measurement of the peak, without freed memory that would hide new allocations."""
    trim_memory()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def choose_device(name: str, engine: str = "auto") -> str:
    """The PyTorch device with this name; `auto` is an accelerator (cuda, mps, xpu) if there is one, else the CPU.

    Engines other than torch run on the CPU. Processes of torchrun use one accelerator each. Raises ConfigError if the
    device cannot be used.
    """
    import torch

    if name == "auto":
        has_accelerator = engine.partition(":")[0] in ("auto", "torch") and torch.accelerator.is_available()
        accelerator = torch.accelerator.current_accelerator() if has_accelerator else None
        name = "cpu" if accelerator is None else accelerator.type
    if name in ("cuda", "xpu"):
        name = f"{name}:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it cannot run a model")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        known = name.partition(":")[0] in ("cpu", "cuda", "mps", "xpu", "meta")
        reason = f": {str(error).splitlines()[0]}" if known else ""  # otherwise a list of 20 types
        hint = "" if known else "devices are auto, cpu, cuda (cuda:1 is the second), mps and xpu"
        raise ConfigError(f"{argument('device', name)} cannot be used{reason}", hint=hint) from None
    return name


def choose_precision(name: str, device: str) -> str:
    """The precision with this name; `auto` is a fast one: on a CPU, bf16 with AVX-512 BF16 or AMX."""
    import torch

    kind = device.partition(":")[0]
    if name == "auto" and kind == "cpu":
        return "bf16" if has_fast_bf16() else "float32"
    if name != "auto" or kind not in ("cuda", "xpu", "mps"):
        return "float32" if name == "auto" else name
    has_bf16 = kind == "xpu" or (kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
    return "bf16" if has_bf16 else "fp16"


def device_of(model: "torch.nn.Module") -> "torch.device":
    """The device of a model's weights; the CPU for an exported graph, which has none."""
    import torch

    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def device_name(device: str) -> str:
    """A device with the name of its hardware, if PyTorch knows it: `cuda:0 (NVIDIA A100)`."""
    import torch

    describe = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({describe(device)})" if describe else device


def synchronize(device: "torch.device") -> None:
    """Wait until an accelerator has finished its work, so that it can be timed."""
    if device.type != "cpu":
        import torch

        torch.get_device_module(device).synchronize()


@cache
def announce_device(device: str) -> None:
    """Print which accelerator is used, once per process; nothing for the CPU."""
    if device != "cpu":
        print_status(f"device: {device_name(device)}")
