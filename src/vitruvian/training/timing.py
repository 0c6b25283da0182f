"""What the steps of a run take in time and memory: measured on a few of them."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitruvian.data.loader import Batch
from vitruvian.errors import DataError
from vitruvian.training.objective import Objective, Place
from vitruvian.training.step import Stepper

MOST_STEPS = 20
SLOW_SECONDS = 5.0
"""A step that would take longer is measured on a part of its batch."""
FIRST_IMAGES = 2
"""Images of the first step in which memory is measured; the second has twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What a step takes."""

    steps: int
    """Measured."""
    step_seconds: float
    """Median: waiting for the batch, and learning from it."""
    step_bytes: int
    """The most that gradients and activations take at one time."""


def measured_steps(stepper: Stepper, batches: Iterator[Batch], *, seconds: float) -> Timing:
    """Take steps for about so long; they change the weights."""
    batch = next(batches, None)
    if batch is None:
        raise DataError("there is no batch to take a step with")
    size = len(batch)
    first = part(batch, FIRST_IMAGES * stepper.recipe.aug_repeats)
    timed(stepper, first)  # the optimizer makes its memory
    step_bytes = measured_bytes(stepper, batch, len(first))
    share, work = len(first), timed(stepper, first)
    while share < size and work < SLOW_SECONDS / 2:
        share = min(size, 2 * share)
        work = timed(stepper, part(batch, share))
    waits, works = [0.0], [work]
    end = time.perf_counter() + seconds
    while len(works) < MOST_STEPS and (time.perf_counter() < end or len(works) < 2):
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        waits.append(time.perf_counter() - before)
        works.append(timed(stepper, part(following, share)))
    whole = statistics.median(works) * size / share
    return Timing(steps=len(works), step_seconds=statistics.median(waits) + whole, step_bytes=step_bytes)


def measured_bytes(stepper: Stepper, batch: Batch, count: int) -> int:
    """What a whole batch would take, from a step with `count` images at once and one with twice as many."""
    parts, device = stepper.recipe.grad_accum_steps, stepper.processes.device
    few, more = part(batch, count * parts), part(batch, 2 * count * parts)
    low, high = (peak_bytes(partial(stepper.take, some, 0), device) for some in (few, more))
    at_few, at_more, at_all = (len(some) / min(parts, len(some)) for some in (few, more, batch))
    if at_more == at_few:
        return high
    return max(high, round(low + (high - low) * (at_all - at_few) / (at_more - at_few)))


def timed(stepper: Stepper, batch: Batch) -> float:
    """Seconds of a step, until its loss is known."""
    before = time.perf_counter()
    stepper.take(batch, 0).tolist()
    return time.perf_counter() - before


def part(batch: Batch, count: int) -> Batch:
    """The first examples of a batch."""
    return replace(
        batch,
        pixels=batch.pixels[:count],
        labels=batch.labels[:count],
        indices=batch.indices[:count],
        weights=batch.weights[:count],
    )


def measured_evaluation(
    model: nn.Module, batches: Iterator[Batch], *, objective: Objective, device: torch.device, most: int = 3
) -> float:
    """Seconds that a held-out image takes, reading included: the least of a few batches, as the first is slow."""
    place = Place(device=device, dtype=None, all_ranks=False)
    found = []
    before = time.perf_counter()
    for batch in islice(batches, most):
        if len(batch):
            objective.measured(model, [batch], len(batch), place)
            now = time.perf_counter()
            found.append((now - before) / len(batch))
            before = now
    return min(found, default=0.0)


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
