"""Batches of transformed images: ordered by seed and epoch, made by any number of workers, resumable at any batch.

The transformed sample i of epoch e depends on (seed, e, i) alone, so neither workers nor an interruption change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vitruvian.data.decode import Unreadable, reason
from vitruvian.data.order import IndexArray, generator_for, hash_words
from vitruvian.data.sampling import BatchPlan, Sampling
from vitruvian.data.sources import Source
from vitruvian.data.transform import SampleTransform, seed_globally
from vitruvian.data.workers import Workers
from vitruvian.errors import ConfigError, DataError, ImageError, VitruvianError, argument
from vitruvian.settings import Workers as WorkerCount
from vitruvian.settings import check_range, validate
from vitruvian.text import describe_error, printable

FEW, FEW_SHARE = 10, 0.25
"""This many unreadable images are always accepted, if they are at most this fraction of an epoch."""

MAX_REPLACEMENTS = 100
"""Consecutive unreadable images that stop a run."""

LOOK_AHEAD = 16
"""Minimum number of batches by which reads are announced to a slow source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This process's part of one batch."""

    pixels: Tensor
    """(B, C, H, W) as the transform returns them; (0,) if this process has no part in a short last batch."""
    labels: Tensor
    """int64 (B,)"""
    indices: Tensor
    """int64 (B,): the samples' indices in the source."""
    weights: Tensor
    """float32 (B,)"""
    unreadable: list[Unreadable]
    """Images that could not be read and are not in the batch."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class RawBatch:
    """A batch as a worker sends it: only the pixels are large enough for shared memory."""

    count: int
    pixels: Tensor = field(default_factory=lambda: torch.empty(0))
    labels: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    def add(self, pixels: Tensor, source: Source, index: int) -> None:
        row = len(self.labels)
        if row == 0:
            self.pixels = torch.empty((self.count, *pixels.shape), dtype=pixels.dtype)
            if torch.utils.data.get_worker_info() is not None:
                self.pixels.share_memory_()  # type: ignore[no-untyped-call]
        if pixels.shape != self.pixels.shape[1:]:
            shapes = tuple(pixels.shape), tuple(self.pixels.shape[1:])
            reason = f"transformed to shape {shapes[0]}, the batch has {shapes[1]}"
            raise DataError(reason, where=printable(source.key(index)))
        self.pixels.numpy()[row] = pixels.numpy()  # PyTorch would wake its threads for each image
        self.labels.append(source.label(index))
        self.indices.append(index)
        self.weights.append(source.weight(index))

    def finish(self) -> Batch:
        return Batch(
            pixels=self.pixels[: len(self.labels)],
            labels=torch.tensor(self.labels, dtype=torch.int64),
            indices=torch.tensor(self.indices, dtype=torch.int64),
            weights=torch.tensor(self.weights, dtype=torch.float32),
            unreadable=self.unreadable,
        )


@dataclass(frozen=True)
class BatchMaker:
    """Makes the batch of an epoch and a step, in this process or in a worker."""

    plan: BatchPlan
    transform: SampleTransform
    alternate_flip: bool = False

    def __call__(self, position: tuple[int, int]) -> RawBatch:
        epoch, step = position
        samples, repetitions = self.plan.batch(epoch, step)
        self._announce(epoch, step, samples)
        batch = RawBatch(len(samples))
        for index, repetition in zip(samples.tolist(), repetitions.tolist()):
            self._add(batch, epoch, index, repetition)
        return batch

    def _announce(self, epoch: int, step: int, samples: IndexArray) -> None:
        """Announce to a slow source what this batch and a later one, perhaps of the next epoch, will read."""
        plan, steps = self.plan, self.plan.steps
        if plan.source.blocks is None:
            return
        plan.source.announce(samples)
        later = step + self.look_ahead
        if later < steps:
            plan.source.announce(plan.batch(epoch, later)[0])
        elif plan.training and plan.balanced is None:  # keeping balanced orders of two epochs would be costly
            plan.source.announce(plan.batch(epoch + 1, later - steps)[0])

    @cached_property
    def look_ahead(self) -> int:
        """Number of batches that use up the blocks which are read together; the next ones must be there by then.

        Blocks of equal size end together, so announcing only a few batches ahead would leave no time to fetch them.
        """
        blocks = self.plan.source.blocks
        assert blocks is not None
        together = blocks.lanes if self.plan.training else 1
        batches = -(-together * int(blocks.sizes.max()) // self.plan.batch_size)
        return min(max(LOOK_AHEAD, batches), self.plan.steps)

    def _add(self, batch: RawBatch, epoch: int, index: int, repetition: int) -> None:
        """Add the transformed sample or, in training, the next one in the source that can be read."""
        source = self.plan.source
        for attempt in range(min(MAX_REPLACEMENTS, len(source)) if self.plan.training else 1):
            chosen = (index + attempt) % len(source)
            # A replacement is augmented with another stream than the same sample at its regular position.
            stream = repetition + attempt * self.plan.repeats
            try:
                pixels = self._read(chosen, generator_for(self.plan.seed, epoch, chosen, stream))
            except (ImageError, OSError) as error:
                batch.unreadable.append(Unreadable(source.key(chosen), reason(error)))
            else:
                if self.alternate_flip and self._is_flipped(chosen, epoch + stream):
                    pixels = torch.from_numpy(pixels.numpy()[..., ::-1].copy())
                batch.add(pixels, source, chosen)
                return
        if self.plan.training:
            key, why = batch.unreadable[-1]
            problem = f"{attempt + 1} consecutive images cannot be read, such as {key}: {why}"
            raise DataError(problem, where=source.name)

    def _is_flipped(self, index: int, turn: int) -> bool:
        """Whether a sample is flipped: every other turn, starting with the first for half of the samples."""
        return bool((hash_words(self.plan.seed, index, size=1, purpose=b"flip")[0].item() ^ turn) & 1)

    def _read(self, index: int, generator: np.random.Generator) -> Tensor:
        source = self.plan.source
        try:
            with seed_globally(generator) if source.draws else nullcontext():
                image = source.read(index)
            return self.transform(image, generator)
        except (VitruvianError, OSError):
            raise
        except Exception as error:
            problem = f"the transform failed: {type(error).__name__}: {describe_error(error)}"
            raise DataError(problem, where=printable(source.key(index))) from error


class Loader:
    """The batches of a source, epoch after epoch."""

    def __init__(
        self,
        source: Source,
        *,
        transform: SampleTransform,
        batch_size: int,
        training: bool,
        seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool | None = None,
        sampling: Sampling = "uniform",
        repeats: int = 1,
        max_unreadable: float = 0.01,
        alternate_flip: bool = False,
    ) -> None:
        """Args:
        source: The images.
        transform: Makes a tensor of an image and a random generator.
        batch_size: Samples per batch over all `world` processes; see `BatchPlan` for the order.
        training: Whether to shuffle and to replace unreadable images by the next readable ones; an evaluation
            skips them.
        seed: Seed of the order and of the generators.
        workers: Number of worker processes; 0 makes the batches in this process.
        rank: Index of this process.
        world: Number of processes.
        drop_last: Whether to drop a short last batch; by default in training.
        sampling: `uniform` or `balanced`.
        repeats: Augmented versions of each sample per batch.
        max_unreadable: Share of an epoch's images that may be unreadable before DataError is raised; ten images or
            a quarter are always accepted, whichever is less.
        alternate_flip: Whether to flip every image horizontally in every other epoch.
        """
        validate("workers", WorkerCount, workers)
        check_range("max_unreadable", max_unreadable, 0.0, 1.0)
        self.plan = BatchPlan(
            source=source,
            batch_size=batch_size,
            seed=seed,
            training=training,
            drop_last=training if drop_last is None else drop_last,
            rank=rank,
            world=world,
            sampling=sampling,
            repeats=repeats,
        )
        self.max_unreadable = max_unreadable
        self.unreadable: dict[str, str] = {}
        """Why samples could not be read, by key."""
        self._make = BatchMaker(self.plan, transform, alternate_flip)
        self._workers: Workers[tuple[int, int], RawBatch] | None = Workers(self._make, workers) if workers else None

    @property
    def source(self) -> Source:
        return self.plan.source

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on, identical to those of an uninterrupted epoch.

        A new call ends the iteration of an earlier one.
        """
        if not 0 <= start <= self.steps_per_epoch:
            raise ConfigError(f"start={start} is beyond the {self.steps_per_epoch} batches of an epoch")
        steps = ((epoch, step) for step in range(start, self.steps_per_epoch))
        total = self.plan.rows // self.plan.world  # of the epoch: broken images may all come first
        limit = max(self.max_unreadable * total, min(FEW, FEW_SHARE * total) if self.max_unreadable else 0)
        tried = failed = read = 0
        for batch in map(self._make, steps) if self._workers is None else self._workers.results(steps):
            tried, failed, read = tried + batch.count, failed + len(batch.unreadable), read + len(batch.labels)
            self.unreadable.update(batch.unreadable)
            if failed > limit:
                exceeded = argument("max_unreadable", self.max_unreadable, "g")
                raise DataError(
                    f"{failed} of {tried} images could not be read, {self._examples()}; this exceeds {exceeded} of an "
                    f"epoch's {total:,}",
                    where=self.source.name,
                )
            yield batch.finish()
        if not read and failed:
            raise DataError(f"no image could be read, {self._examples()}", where=self.source.name)

    def _examples(self) -> str:
        some = list(self.unreadable.items())[:3]
        return "such as " + ", ".join(f"{printable(key)} ({printable(why)})" for key, why in some)

    def close(self) -> None:
        """Stop the workers."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
