"""The memory that a piece of work needs while it runs."""

from __future__ import annotations

import ctypes
import platform
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD: larger blocks go back to the system as soon as they are freed."""
LARGE_BYTES = 1 << 20


def give_back_freed() -> None:
    """Return large freed tensors on a CPU to the system at once, where the C library is glibc.

    glibc keeps them for later, and over a step with checkpointed activations the gaps between them add up: the
    process then takes twice the memory that its tensors do. Giving back costs a little time.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most that the tensors made during the work take at one time, beside those that were there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with Watch() as watch:
        work()
    return watch.most


class Watch(TorchDispatchMode):
    """Counts the bytes of tensors that come out of operations, for as long as each of them lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs are known before their operation makes anything, so that changing one in place counts nothing.
        self.known.update(leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return made

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.now -= size
