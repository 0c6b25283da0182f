"""The samples of each batch: computed from epoch and batch index, for one of several processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vitruvian.cache import scratch_folder
from vitruvian.data.columns import CHUNK, Column, read_chunk
from vitruvian.data.order import Blocks, IndexArray, LaneOrder, epoch_order, permute
from vitruvian.data.sources import Source, class_sizes, ranks_in_class
from vitruvian.errors import ConfigError, argument
from vitruvian.settings import check_choice, check_range

Sampling = Literal["uniform", "balanced"]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The batches of every epoch."""

    source: Source
    batch_size: int
    """Samples per batch over all processes."""
    seed: int
    training: bool
    """Whether to shuffle, differently in each epoch; otherwise each sample occurs once, in the source's order."""
    drop_last: bool
    """Whether to drop the last batch of an epoch if it is short."""
    rank: int = 0
    world: int = 1
    """Number of processes; process `rank` gets that part of each batch."""
    sampling: Sampling = "uniform"
    """`uniform`: each sample once per epoch; `balanced`: all classes equally often."""
    repeats: int = 1
    """Augmented versions of each sample per batch; an epoch keeps its length, so it has fewer samples."""
    balanced: Balanced | BalancedBlocks | None = field(init=False, default=None)

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
            raise ConfigError(
                f"{batch_size} is not divisible by the {self.world} processes",
                hint=f"use {f'{less} or ' if less else ''}{less + self.world}, or another number of processes",
            )
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
        labels = source.labels()
        self.sizes = class_sizes(labels, len(source.classes))
        self.present = np.flatnonzero(self.sizes)
        self.starts = np.cumsum(self.sizes) - self.sizes
        path = scratch_folder() / "by_class.i64"
        free = self.starts.copy()
        with open(path, "wb") as file:
            for start in range(0, len(labels), CHUNK):
                chunk = read_chunk(labels, start)
                order = np.argsort(chunk, kind="stable")
                edges = np.flatnonzero(np.diff(chunk[order], prepend=-1))
                for label, members in zip(chunk[order[edges]], np.split(start + order, edges[1:])):
                    file.seek(int(free[label]) * 8)
                    file.write(members.astype("i8").tobytes())
                    free[label] += len(members)
        self.members = Column(path, "i8")
        """The samples, sorted by class."""

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length."""
        count = len(self.present)
        turn, slot = np.divmod(permute(positions, length, seed, epoch), count)
        label = self.present[slot]
        size = self.sizes[label]
        cycle, position = np.divmod(turn + epoch * -(-length // count), size)
        within = permute(position, size, seed, stream=cycle * len(self.sizes) + label)
        return np.array([self.members[int(index)] for index in self.starts[label] + within], np.int64)


class BalancedBlocks:
    """Balanced sampling for a source with blocks, in an order that uses few of them at a time.

    First it is computed how often each sample occurs in the epoch, which needs one pass over the labels. The order is
    then a LaneOrder over blocks as long as their uses. Memory grows with the number of blocks, not of samples.
    """

    def __init__(self, source: Source) -> None:
        assert source.blocks is not None
        self.source, self.blocks = source, source.blocks
        labels = source.labels()
        self.sizes = class_sizes(labels, len(source.classes))
        self.slots = np.cumsum(self.sizes > 0) - 1
        """The index of each class among those that have samples."""
        self.ends = np.cumsum(self.blocks.sizes)
        path, counted = scratch_folder() / "ranks.i64", np.zeros_like(self.sizes)
        with open(path, "wb") as file:
            for start in range(0, len(labels), CHUNK):
                ranks_in_class(read_chunk(labels, start).astype(np.int64), counted).astype("i8").tofile(file)
        self.ranks = Column(path, "i8")
        """The index of each sample in its class."""
        self._order: tuple[tuple[int, int, int], LaneOrder] | None = None
        self._use_ends: dict[int, IndexArray] = {}
        """Where the uses of each sample end in its block, for the blocks in use."""

    def uses(self, start: int, stop: int, key: tuple[int, int, int]) -> IndexArray:
        """How often each of these samples occurs in an epoch; the key is (length, seed, epoch)."""
        length, seed, epoch = key
        label = np.asarray(self.source.labels()[start:stop], np.int64)
        size, rank = self.sizes[label], np.asarray(self.ranks.array()[start:stop])
        classes = int(self.slots[-1]) + 1
        more = permute(self.slots[label], classes, seed, epoch, classes) < length % classes
        # The epoch has the turns first..last of a class: the end of one cycle, full cycles, the start of another.
        first = epoch * -(-length // classes)
        last = first + length // classes + more
        cycles = first // size, np.maximum(last - 1, 0) // size
        early, late = (permute(rank, size, seed, stream=cycle * len(self.sizes) + label) for cycle in cycles)
        in_first, in_last = early >= first - cycles[0] * size, late < last - cycles[1] * size
        several = in_first.astype(np.int64) + in_last + cycles[1] - cycles[0] - 1
        return np.where(last > first, np.where(cycles[0] == cycles[1], in_first & in_last, several), 0)

    def order(self, key: tuple[int, int, int]) -> LaneOrder:
        """The order of an epoch over blocks as long as their uses."""
        if self._order is None or self._order[0] != key:
            used = np.zeros(len(self.ends), np.int64)
            for start in range(0, len(self.source), CHUNK):
                uses = self.uses(start, min(start + CHUNK, len(self.source)), key)
                block = np.searchsorted(self.ends, start + np.arange(len(uses)), side="right")
                used += np.bincount(block, uses, len(used)).astype(np.int64)
            self._order = key, LaneOrder(Blocks(used, self.blocks.lanes), *key[1:])
            self._use_ends.clear()
        return self._order[1]

    def use_ends(self, block: int, key: tuple[int, int, int]) -> IndexArray:
        if block not in self._use_ends:
            while len(self._use_ends) > 4 * self.blocks.lanes:
                del self._use_ends[next(iter(self._use_ends))]
            stop = int(self.ends[block])
            self._use_ends[block] = np.cumsum(self.uses(stop - int(self.blocks.sizes[block]), stop, key))
        return self._use_ends[block]

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length, grouped by block."""
        key = (length, seed, epoch)
        order = self.order(key)
        uses = order.samples(positions)
        blocks = np.searchsorted(order.starts + order.sizes, uses, side="right")
        samples = np.empty_like(uses)
        for block in np.unique(blocks).tolist():
            mask = blocks == block
            start = int(self.ends[block]) - int(self.blocks.sizes[block])
            use = uses[mask] - order.starts[block]
            samples[mask] = start + np.searchsorted(self.use_ends(block, key), use, side="right")
        return samples
