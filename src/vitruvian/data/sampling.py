"""Which samples make up a batch: of an epoch, for one of several processes, from the batch's number alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vitruvian.cache import scratch_folder
from vitruvian.data.columns import CHUNK, Column, piece
from vitruvian.data.order import Blocks, IndexArray, LaneOrder, ordered, permuted
from vitruvian.data.sources import Source, class_sizes, ranks_in_class
from vitruvian.errors import ConfigError, argument
from vitruvian.settings import check_choice, check_range

Sampling = Literal["uniform", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The batches of every epoch."""

    source: Source
    batch_size: int
    """Samples in a batch over all processes together."""
    seed: int
    training: bool
    """In a shuffled order that differs from epoch to epoch; otherwise in the source's order, each sample once."""
    drop_last: bool
    """Leave out the last batch of an epoch where it would be short."""
    rank: int = 0
    world: int = 1
    """Number of processes; of each batch, process `rank` has the part of that number."""
    sampling: Sampling = "uniform"
    """`uniform`: each sample once an epoch; `balanced`: all classes equally often."""
    repeats: int = 1
    """Views of each sample in a batch; an epoch keeps its length, so it has fewer samples (repeated augmentation)."""
    balanced: Balanced | BalancedBlocks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        check_choice("sampling", self.sampling, get_args(Sampling))
        check_range("batch_size", self.batch_size, 1)
        check_range("repeats", self.repeats, 1)
        check_range("rank", self.rank, 0, self.world - 1)
        if self.batch_size % self.repeats:
            raise ConfigError(f"{argument('batch_size', self.batch_size)} is not divisible by repeats={self.repeats}")
        if not self.training and (self.drop_last or self.repeats > 1 or self.sampling != "uniform"):
            raise ConfigError("an evaluation takes each sample once: no drop_last, repeats or balanced sampling")
        if self.training and self.batch_size % self.world:
            less = self.batch_size // self.world * self.world
            raise ConfigError(
                f"{argument('batch_size', self.batch_size)} is not divisible by the {self.world} processes; take "
                f"{f'{less} or ' if less else ''}{less + self.world}, or another number of processes"
            )
        if not self.steps:
            raise ConfigError(
                f"{argument('batch_size', self.batch_size)} is more than the {len(self.source)} samples of "
                f"{self.source.name}",
                hint=f"take {len(self.source)} or less",
            )
        if self.sampling == "balanced":
            kind = Balanced if self.source.blocks is None else BalancedBlocks
            object.__setattr__(self, "balanced", kind(self.source))

    @property
    def rows(self) -> int:
        """Views in an epoch over all processes together, before a short last batch is dropped."""
        return len(self.source) // self.repeats * self.repeats

    @property
    def steps(self) -> int:
        """Batches in an epoch."""
        return self.rows // self.batch_size if self.drop_last else -(-self.rows // self.batch_size)

    def batch(self, epoch: int, number: int) -> tuple[IndexArray, IndexArray]:
        """This process's part of a batch: the samples, and for each which of its repeated views it is."""
        first = number * self.batch_size
        count = min(self.batch_size, self.rows - first)
        positions = np.arange(first // self.repeats, (first + count) // self.repeats)
        if not self.training:
            samples = positions
        elif self.balanced is not None:
            samples = self.balanced.samples(positions, self.rows // self.repeats, self.seed, epoch)
        else:
            samples = ordered(positions, len(self.source), self.seed, epoch, self.source.blocks)
        mine = slice(self.rank * count // self.world, (self.rank + 1) * count // self.world)
        repetitions = np.tile(np.arange(self.repeats), len(positions))
        return np.repeat(samples, self.repeats)[mine], repetitions[mine]


class Balanced:
    """An order in which every class comes up equally often, to within one in an epoch.

    The samples of a class are gone through from epoch to epoch, each time in a new order, so none comes up a
    second time before all others of its class did.
    """

    def __init__(self, source: Source) -> None:
        labels = source.labels()
        self.sizes = class_sizes(labels, len(source.classes))
        self.present = np.flatnonzero(self.sizes)
        self.starts = np.cumsum(self.sizes) - self.sizes
        path = scratch_folder() / "by_class.i64"
        free = self.starts.copy()
        with open(path, "wb") as file:
            for start in range(0, len(labels), CHUNK):
                chunk = piece(labels, start)
                order = np.argsort(chunk, kind="stable")
                edges = np.flatnonzero(np.diff(chunk[order], prepend=-1))
                for label, members in zip(chunk[order[edges]], np.split(start + order, edges[1:])):
                    file.seek(int(free[label]) * 8)
                    file.write(members.astype("i8").tobytes())
                    free[label] += len(members)
        self.members = Column(path, "i8")
        """The samples, class by class."""

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length."""
        count = len(self.present)
        turn, slot = np.divmod(permuted(positions, length, seed, epoch), count)
        label = self.present[slot]
        size = self.sizes[label]
        cycle, place = np.divmod(turn + epoch * -(-length // count), size)
        within = permuted(place, size, seed, stream=cycle * len(self.sizes) + label)
        return np.array([self.members[int(index)] for index in self.starts[label] + within], np.int64)


class BalancedBlocks:
    """The same for a source with blocks: how often each sample comes up in an epoch is balanced, and the samples come
    block by block, so that only a few blocks are in use at a time.

    Each epoch goes through the labels once; memory grows with the blocks, not with the samples.
    """

    def __init__(self, source: Source) -> None:
        assert source.blocks is not None
        self.source, self.blocks = source, source.blocks
        labels = source.labels()
        self.sizes = class_sizes(labels, len(source.classes))
        self.slots = np.cumsum(self.sizes > 0) - 1
        """The number of each class among those that have samples."""
        self.ends = np.cumsum(self.blocks.sizes)
        path, seen = scratch_folder() / "places.i64", np.zeros_like(self.sizes)
        with open(path, "wb") as file:
            for start in range(0, len(labels), CHUNK):
                ranks_in_class(piece(labels, start).astype(np.int64), seen).astype("i8").tofile(file)
        self.places = Column(path, "i8")
        """The number of each sample in its class."""
        self._order: tuple[tuple[int, int, int], LaneOrder] | None = None
        self._turns: dict[int, IndexArray] = {}
        """Where the uses of each sample end in its block, for the blocks of that order in use."""

    def uses(self, start: int, stop: int, key: tuple[int, int, int]) -> IndexArray:
        """How often each of these samples comes up in an epoch; the key is its length, the seed and its number."""
        length, seed, epoch = key
        label = np.asarray(self.source.labels()[start:stop], np.int64)
        size, place = self.sizes[label], np.asarray(self.places.array()[start:stop])
        classes = int(self.slots[-1]) + 1
        more = permuted(self.slots[label], classes, seed, epoch, classes) < length % classes
        first = epoch * -(-length // classes)  # of the turns of a class, which go through it again and again
        last = first + length // classes + more
        cycles = first // size, np.maximum(last - 1, 0) // size
        early, late = (permuted(place, size, seed, stream=cycle * len(self.sizes) + label) for cycle in cycles)
        begun, within = early >= first - cycles[0] * size, late < last - cycles[1] * size
        found = np.where(
            cycles[0] == cycles[1], begun & within, begun.astype(np.int64) + within + cycles[1] - cycles[0] - 1
        )
        return np.where(last > first, found, 0)

    def order(self, key: tuple[int, int, int]) -> LaneOrder:
        """The order of an epoch in which a block is as long as its samples are used."""
        if self._order is None or self._order[0] != key:
            used = np.zeros(len(self.ends), np.int64)
            for start in range(0, len(self.source), CHUNK):
                uses = self.uses(start, min(start + CHUNK, len(self.source)), key)
                block = np.searchsorted(self.ends, start + np.arange(len(uses)), side="right")
                used += np.bincount(block, uses, len(used)).astype(np.int64)
            self._order = key, LaneOrder(Blocks(used, self.blocks.lanes), *key[1:])
            self._turns.clear()
        return self._order[1]

    def turns(self, block: int, key: tuple[int, int, int]) -> IndexArray:
        if block not in self._turns:
            while len(self._turns) > 4 * self.blocks.lanes:
                del self._turns[next(iter(self._turns))]
            stop = int(self.ends[block])
            self._turns[block] = np.cumsum(self.uses(stop - int(self.blocks.sizes[block]), stop, key))
        return self._turns[block]

    def samples(self, positions: IndexArray, length: int, seed: int, epoch: int) -> IndexArray:
        """The samples at these positions of an epoch of this length, those of a block together."""
        key = (length, seed, epoch)
        order = self.order(key)
        numbers = order.samples(positions)
        blocks = np.searchsorted(order.starts + order.sizes, numbers, side="right")
        found = np.empty_like(numbers)
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            start = int(self.ends[block]) - int(self.blocks.sizes[block])
            turn = numbers[mine] - order.starts[block]
            found[mine] = start + np.searchsorted(self.turns(block, key), turn, side="right")
        return found
