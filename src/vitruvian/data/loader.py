"""Batches of transformed images: ordered by seed and epoch, made by any number of workers, resumable at any batch.

The transformed sample i of epoch e depends on (seed, e, i) alone, so neither workers nor an interruption change it.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, get_args

import numpy as np
import torch
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.data.columns import CHUNK, Column, read_chunks
from vitruvian.data.decode import Unreadable, reason
from vitruvian.data.order import IndexArray, LaneOrder, Sampling, epoch_order, generator_for, hash_words, permute
from vitruvian.data.sources import Source, class_sizes
from vitruvian.data.transform import SampleTransform, seed_globally
from vitruvian.data.workers import Workers
from vitruvian.errors import ConfigError, DataError, ImageError, VitruvianError, argument
from vitruvian.settings import Workers as WorkerCount
from vitruvian.settings import check_choice, check_range, validate
from vitruvian.text import describe_error, printable

FEW, FEW_SHARE = 10, 0.25  # so many unreadable images are always accepted, up to this fraction of an epoch
MAX_REPLACEMENTS = 100  # consecutive unreadable images that stop a run
LOOK_AHEAD = 16  # minimum number of batches by which reads are announced to a slow source


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batches of every epoch."""

    source: Source
    batch_size: int  # samples per batch over all processes
    seed: int = 0  # of the order and of the generators
    training: bool  # whether to shuffle, differently in each epoch; otherwise the source's order
    drop_last: bool  # whether to drop the last batch of an epoch if it is short
    rank: int = 0
    world: int = 1  # number of processes; process `rank` gets that part of each batch
    sampling: Sampling = "uniform"  # `uniform`: each sample once per epoch; `balanced`: all classes equally often
    repeats: int = 1  # augmented versions of each sample per batch; an epoch keeps its length, so it has fewer samples
    balanced: "Balanced | None" = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, get_args(Sampling))
        check_range("batch_size", self.batch_size, 1)
        check_range("repeats", self.repeats, 1)
        check_range("rank", self.rank, 0, self.world - 1)
        batch_size = argument("batch_size", self.batch_size)
        if self.batch_size % self.repeats:
            raise ConfigError(f"{batch_size} is not divisible by repeats={self.repeats}")
        if not self.training and (self.drop_last or self.repeats > 1 or self.sampling != "uniform"):
            raise ConfigError("evaluation uses each sample once: no drop_last, repeats or balanced sampling")
        if self.training and self.batch_size % self.world:
            less = self.batch_size // self.world * self.world
            hint = f"use {f'{less} or ' if less else ''}{less + self.world}, or another number of processes"
            raise ConfigError(f"{batch_size} is not divisible by the {self.world} processes", hint=hint)
        if not self.steps:
            count = len(self.source)
            reason = f"{batch_size} exceeds the {count} samples of {self.source.name}"
            raise ConfigError(reason, hint=f"use {count} or less")
        if self.sampling == "balanced":
            kind = Balanced if self.source.blocks is None else BalancedBlocks
            object.__setattr__(self, "balanced", kind(self.source))

    @property
    def rows(self) -> int:
        """Images per epoch over all processes, before a short last batch is dropped."""
        return len(self.source) // self.repeats * self.repeats

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def batch(self, epoch: int, step: int) -> tuple[IndexArray, IndexArray]:
        """This process's part of a batch: the samples, and which repetition of its sample each row is."""
        first = step * self.batch_size
        count = min(self.batch_size, self.rows - first)
        positions = np.arange(first // self.repeats, (first + count) // self.repeats)
        if not self.training:
            samples = positions
        elif self.balanced is not None:
            samples = self.balanced.samples(positions, self.rows // self.repeats, self.seed, epoch)
        else:
            samples = epoch_order(positions, len(self.source), self.seed, epoch, self.source.blocks)
        part = slice(self.rank * count // self.world, (self.rank + 1) * count // self.world)
        repetitions = np.tile(np.arange(self.repeats), len(positions))
        return np.repeat(samples, self.repeats)[part], repetitions[part]


# Balanced sampling. The positions of an epoch are permuted and dealt to the C classes that have samples, so that a
# position becomes (turn, class). The turns of a class are counted on from epoch to epoch, and each run through its
# n samples (a cycle of n turns) has its own permutation. So a class comes up equally often in an epoch, to within
# one, and no sample is repeated before all others of its class were used.


class Balanced:
    """Balanced sampling for a source whose samples can be read in any order."""

    def __init__(self, source: Source) -> None:
        labels, count = source.strata()
        self.sizes = class_sizes(labels, count)
        self.present = np.flatnonzero(self.sizes)
        self.starts = np.cumsum(self.sizes) - self.sizes
        path, free = scratch_folder() / "by_class.i64", self.starts.copy()
        with open(path, "wb") as file:  # not mapped, so that its pages do not count as memory
            for start, chunk in read_chunks(labels):
                order = np.argsort(chunk, kind="stable")
                edges = np.flatnonzero(np.diff(chunk[order], prepend=-1))
                for label, members in zip(chunk[order[edges]], np.split(start + order, edges[1:])):
                    file.seek(int(free[label]) * 8)
                    file.write(members.astype("i8").tobytes())
                    free[label] += len(members)
        self.members = Column(path, "i8")  # the samples, sorted by class

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length."""
        count = len(self.present)
        turn, slot = np.divmod(permute(positions, length, seed, epoch), count)
        label = self.present[slot]
        size = self.sizes[label]
        cycle, position = np.divmod(turn + epoch * -(-length // count), size)
        within = permute(position, size, seed, stream=cycle * len(self.sizes) + label)
        return np.array([self.members[int(index)] for index in self.starts[label] + within], np.int64)


class BalancedBlocks(Balanced):
    """Balanced sampling for a source with blocks, in an order that uses few of them at a time.

    First it is counted how often each sample occurs in the epoch, in 8 bytes per sample. The order is then a LaneOrder
    over blocks as long as their uses.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        assert source.blocks is not None
        self.blocks = source.blocks
        self._epoch: tuple[tuple[int, int, int], IndexArray, LaneOrder] | None = None

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length, grouped by block."""
        key = (length, seed, epoch)
        if self._epoch is None or self._epoch[0] != key:
            uses = np.zeros(len(self.members), np.int64)
            for start in range(0, length, CHUNK):
                np.add.at(uses, super().samples(np.arange(start, min(start + CHUNK, length)), *key), 1)
            ends = np.cumsum(uses)  # where the uses of each sample end
            used = np.diff(ends[np.cumsum(self.blocks.sizes) - 1], prepend=0)
            self._epoch = key, ends, LaneOrder(replace(self.blocks, sizes=used), seed, epoch)
        _, ends, order = self._epoch
        return np.searchsorted(ends, order.samples(positions), side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This process's part of one batch."""

    pixels: Tensor  # (B, C, H, W) as the transform returns them; (0,) if this process has no part in a short last batch
    labels: Tensor  # int64 (B,)
    indices: Tensor  # int64 (B,): the samples' indices in the source
    weights: Tensor  # float32 (B,)
    unreadable: list[Unreadable]  # images that could not be read and are not in the batch

    def __len__(self) -> int:
        return len(self.labels)


Row = tuple[int, int, float]  # label, index and weight of a sample
RawBatch = tuple[Tensor, list[Row], list[Unreadable]]  # only pixels are large enough for shared memory


@dataclass(frozen=True)
class BatchMaker:
    """Makes the batch of an epoch and a step, in this process or in a worker."""

    plan: BatchPlan
    transform: SampleTransform
    alternate_flip: bool = False

    def __call__(self, position: tuple[int, int]) -> RawBatch:
        epoch, step = position
        source = self.plan.source
        samples, repetitions = self.plan.batch(epoch, step)
        self._announce(epoch, step, samples)
        pixels, rows, unreadable = torch.empty(0), list[Row](), list[Unreadable]()
        for index, repetition in zip(samples.tolist(), repetitions.tolist()):
            image, chosen = self._sample(epoch, index, repetition, unreadable)
            if image is None:
                continue
            if not rows:
                pixels = torch.empty((len(samples), *image.shape), dtype=image.dtype)
                if torch.utils.data.get_worker_info() is not None:
                    pixels.share_memory_()  # type: ignore[no-untyped-call]
            if image.shape != pixels.shape[1:]:
                problem = f"transformed to shape {tuple(image.shape)}, the batch has {tuple(pixels.shape[1:])}"
                raise DataError(problem, where=printable(source.key(chosen)))
            pixels.numpy()[len(rows)] = image.numpy()  # PyTorch would wake its threads for each image
            rows.append((source.label(chosen), chosen, source.weight(chosen)))
        return pixels[: len(rows)], rows, unreadable

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
        """Number of batches to announce in advance: as many as the blocks that are read together last.

        Blocks of equal size end together, so announcing only a few batches ahead would leave no time to fetch the next.
        """
        blocks = self.plan.source.blocks
        assert blocks is not None
        together = blocks.lanes if self.plan.training else 1
        batches = -(-together * int(blocks.sizes.max()) // self.plan.batch_size)
        return min(max(LOOK_AHEAD, batches), self.plan.steps)

    def _sample(self, epoch: int, index: int, repeat: int, unreadable: list[Unreadable]) -> tuple[Tensor | None, int]:
        """The transformed sample and its index or, in training, those of the next one that can be read."""
        source, plan = self.plan.source, self.plan
        for attempt in range(min(MAX_REPLACEMENTS, len(source)) if plan.training else 1):
            chosen = (index + attempt) % len(source)
            # A replacement is augmented with another stream than the same sample at its regular position.
            stream = repeat + attempt * plan.repeats
            try:
                pixels = self._read(chosen, generator_for(plan.seed, epoch, chosen, stream))
            except (ImageError, OSError) as error:
                unreadable.append(Unreadable(source.key(chosen), reason(error)))
                continue
            if self.alternate_flip:  # every other turn, starting with the first for half of the samples
                first = hash_words(plan.seed, chosen, size=1, purpose=b"flip")[0].item()
                if (first ^ (epoch + stream)) & 1:
                    pixels = torch.from_numpy(pixels.numpy()[..., ::-1].copy())
            return pixels, chosen
        if plan.training:
            key, why = unreadable[-1]
            problem = f"{attempt + 1} consecutive images cannot be read, such as {key}: {why}"
            raise DataError(problem, where=source.name)
        return None, index

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
        training: bool,
        workers: int = 0,
        drop_last: bool | None = None,
        max_unreadable: float = 0.01,
        alternate_flip: bool = False,
        **plan: Any,
    ) -> None:
        """Args:
        source: The images.
        transform: Makes a tensor of an image and a random generator.
        training: Whether to shuffle and to replace unreadable images by the next readable ones; an evaluation
            skips them.
        workers: Number of worker processes; 0 makes the batches in this process.
        drop_last: Whether to drop a short last batch; by default in training.
        max_unreadable: Share of an epoch's images that may be unreadable before DataError is raised; ten images or
            a quarter are always accepted, whichever is less.
        alternate_flip: Whether to flip every image horizontally in every other epoch.
        plan: Fields of `BatchPlan`: batch_size, and perhaps seed, rank, world, sampling and repeats.
        """
        validate("workers", WorkerCount, workers)
        check_range("max_unreadable", max_unreadable, 0.0, 1.0)
        drop_last = training if drop_last is None else drop_last
        self.source = source
        self.plan = BatchPlan(source=source, training=training, drop_last=drop_last, **plan)
        self.steps_per_epoch = self.plan.steps
        self.max_unreadable = max_unreadable
        self.unreadable: dict[str, str] = {}  # why samples could not be read, by key
        self._make = BatchMaker(self.plan, transform, alternate_flip)
        self._workers: Workers[tuple[int, int], RawBatch] | None = Workers(self._make, workers) if workers else None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches from step `start` on, as in an uninterrupted epoch; ends the iteration of an earlier call."""
        if not 0 <= start <= self.steps_per_epoch:
            raise ConfigError(f"start={start} is beyond the {self.steps_per_epoch} batches of an epoch")
        steps = ((epoch, step) for step in range(start, self.steps_per_epoch))
        total = self.plan.rows // self.plan.world  # of the epoch: broken images may all come first
        limit = max(self.max_unreadable * total, min(FEW, FEW_SHARE * total) if self.max_unreadable else 0)
        read = failed = 0
        results = map(self._make, steps) if self._workers is None else self._workers.results(steps)
        for pixels, rows, unreadable in results:
            read, failed = read + len(rows), failed + len(unreadable)
            tried = read if self.plan.training else read + failed
            self.unreadable.update(unreadable)
            if failed > limit:
                exceeded = argument("max_unreadable", self.max_unreadable, "g")
                problem = f"{failed} of {tried} images could not be read, {self._examples()}"
                raise DataError(f"{problem}; this exceeds {exceeded} of an epoch's {total:,}", where=self.source.name)
            labels, indices, weights = zip(*rows) if rows else ((), (), ())
            yield Batch(
                pixels=pixels,
                labels=torch.tensor(labels, dtype=torch.int64),
                indices=torch.tensor(indices, dtype=torch.int64),
                weights=torch.tensor(weights, dtype=torch.float32),
                unreadable=unreadable,
            )
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
