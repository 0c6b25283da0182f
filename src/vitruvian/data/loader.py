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
from vitruvian.data.order import IndexArray, digest, generator_for
from vitruvian.data.sampling import Plan, Sampling
from vitruvian.data.sources import Source
from vitruvian.data.transform import SampleTransform, seed_globally
from vitruvian.data.workers import Workers
from vitruvian.errors import ConfigError, DataError, ImageError, VitruvianError, argument
from vitruvian.settings import Workers as WorkerCount
from vitruvian.settings import check_range, validate
from vitruvian.text import describe_error, printable

FEW, FEW_SHARE = 10, 0.25
"""Up to so many unreadable images pass though they exceed `max_unreadable`, where they are at most this share."""

MAX_REPLACEMENTS = 100
"""Unreadable images in a row that end a run."""

LOOK_AHEAD = 16
"""Batches by which a slow source learns beforehand what is read, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This process's part of one batch."""

    pixels: Tensor
    """(B, C, H, W) as the transform returns them; (0,) if this process has no part in a short last batch."""
    labels: Tensor
    """int64 (B,)"""
    indices: Tensor
    """int64 (B,): the samples' numbers in the source."""
    weights: Tensor
    """float32 (B,)"""
    unreadable: list[Unreadable]
    """Images met on the way that are not in the batch."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class Rows:
    """A batch as it comes from a worker; only the pixels are worth shared memory."""

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
            raise DataError(
                f"{printable(source.key(index))}: transformed to shape {tuple(pixels.shape)}, "
                f"the batch has {tuple(self.pixels.shape[1:])}"
            )
        self.pixels.numpy()[row] = pixels.numpy()  # PyTorch would wake its threads for each image
        self.labels.append(source.label(index))
        self.indices.append(index)
        self.weights.append(source.weight(index))

    def batch(self) -> Batch:
        return Batch(
            pixels=self.pixels[: len(self.labels)],
            labels=torch.tensor(self.labels, dtype=torch.int64),
            indices=torch.tensor(self.indices, dtype=torch.int64),
            weights=torch.tensor(self.weights, dtype=torch.float32),
            unreadable=self.unreadable,
        )


@dataclass(frozen=True)
class Maker:
    """Makes a batch from its epoch and number, in this process or in a worker."""

    plan: Plan
    transform: SampleTransform
    alternate_flip: bool = False

    def __call__(self, place: tuple[int, int]) -> Rows:
        epoch, number = place
        samples, repetitions = self.plan.batch(epoch, number)
        self._announce(epoch, number, samples)
        rows = Rows(len(samples))
        for index, repetition in zip(samples.tolist(), repetitions.tolist()):
            self._add(rows, epoch, index, repetition)
        return rows

    def _announce(self, epoch: int, number: int, samples: IndexArray) -> None:
        """Tell a slow source what this batch reads, and what a later one does, perhaps of the next epoch."""
        plan, steps = self.plan, self.plan.steps
        if plan.source.blocks is None:
            return
        plan.source.announce(samples)
        later = number + self.look_ahead
        if later < steps:
            plan.source.announce(plan.batch(epoch, later)[0])
        elif plan.training and plan.balanced is None:  # whose orders of two epochs are costly to have at once
            plan.source.announce(plan.batch(epoch + 1, later - steps)[0])

    @cached_property
    def look_ahead(self) -> int:
        """Batches in which the blocks that are read together are used up: then the next ones must be there.

        Blocks of one size end together, so that the time of a few batches would not do to fetch all of the next.
        """
        blocks = self.plan.source.blocks
        assert blocks is not None
        together = blocks.lanes if self.plan.training else 1
        batches = -(-together * int(blocks.sizes.max()) // self.plan.batch_size)
        return min(max(LOOK_AHEAD, batches), self.plan.steps)

    def _add(self, rows: Rows, epoch: int, index: int, repetition: int) -> None:
        """Add the transformed sample or, in training, the next one in the source that can be read."""
        source = self.plan.source
        for attempt in range(min(MAX_REPLACEMENTS, len(source)) if self.plan.training else 1):
            chosen = (index + attempt) % len(source)
            # A replacement is augmented with another stream than the same sample at its regular position.
            stream = repetition + attempt * self.plan.repeats
            try:
                pixels = self._read(chosen, generator_for(self.plan.seed, epoch, chosen, stream))
            except (ImageError, OSError) as error:
                rows.unreadable.append(Unreadable(source.key(chosen), reason(error)))
            else:
                if self.alternate_flip and self._turn(chosen, epoch + stream):
                    pixels = torch.from_numpy(pixels.numpy()[..., ::-1].copy())
                rows.add(pixels, source, chosen)
                return
        if self.plan.training:
            key, why = rows.unreadable[-1]
            raise DataError(f"{source.name}: {attempt + 1} images in a row cannot be read, such as {key}: {why}")

    def _turn(self, index: int, turn: int) -> bool:
        """Every other turn of a sample; half of all samples begin with it."""
        return bool((digest(self.plan.seed, index, size=1, purpose=b"flip")[0].item() ^ turn) & 1)

    def _read(self, index: int, generator: np.random.Generator) -> Tensor:
        source = self.plan.source
        try:
            with seed_globally(generator) if source.draws else nullcontext():
                image = source.read(index)
            return self.transform(image, generator)
        except (VitruvianError, OSError):
            raise
        except Exception as error:
            key = printable(source.key(index))
            raise DataError(f"{key}: the transform failed: {type(error).__name__}: {describe_error(error)}") from error


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
        """`batch_size` counts over all `world` processes; see `Plan` for the order.

        With `alternate_flip`, every image is flipped horizontally in every other epoch.

        A short last batch is dropped while training, unless `drop_last` says otherwise, and never in an
        evaluation. Where more than the share `max_unreadable` of an epoch's images, and more than ten or a quarter of
        them, cannot be read, DataError; until then, training takes the next readable one instead, and an evaluation
        leaves them out.
        """
        validate("workers", WorkerCount, workers)
        check_range("max_unreadable", max_unreadable, 0.0, 1.0)
        self.plan = Plan(
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
        """Why each unreadable sample that was met cannot be read, by key."""
        self._make = Maker(self.plan, transform, alternate_flip)
        self._workers: Workers[tuple[int, int], Rows] | None = Workers(self._make, workers) if workers else None

    @property
    def source(self) -> Source:
        return self.plan.source

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on, exactly as an unbroken epoch gives them.

        One epoch at a time: a new call ends what an earlier one has not yet given.
        """
        if not 0 <= start <= self.steps_per_epoch:
            raise ConfigError(f"batch {start} of an epoch of {self.steps_per_epoch}")
        places = ((epoch, number) for number in range(start, self.steps_per_epoch))
        whole = self.plan.rows // self.plan.world  # of an epoch: broken ones may all come first
        few = min(FEW, FEW_SHARE * whole) if self.max_unreadable else 0
        seen = failed = read = 0
        for rows in map(self._make, places) if self._workers is None else self._workers.results(places):
            seen, failed, read = seen + rows.count, failed + len(rows.unreadable), read + len(rows.labels)
            self.unreadable.update(rows.unreadable)
            if failed > max(self.max_unreadable * whole, few):
                raise DataError(
                    f"{self.source.name}: {failed} of {seen} images could not be read, {self._such_as()}; "
                    f"this exceeds {argument('max_unreadable', self.max_unreadable, 'g')} of an epoch's {whole:,}"
                )
            yield rows.batch()
        if not read and failed:
            raise DataError(f"{self.source.name}: not one image could be read, {self._such_as()}")

    def _such_as(self) -> str:
        some = list(self.unreadable.items())[:3]
        return "such as " + ", ".join(f"{printable(key)} ({printable(why)})" for key, why in some)

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
