"""Part of a source, and the division of one into examples to train on and examples held out."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.order import Blocks, IndexArray, permuted
from vitruvian.data.sources.base import Picture, Source
from vitruvian.data.sources.cache import scratch_folder
from vitruvian.data.sources.index import CHUNK, Column, piece
from vitruvian.errors import ConfigError, DataError


class Subset(Source):
    """The examples of a source whose numbers, ascending, stand in a file."""

    def __init__(self, source: Source, numbers: Path, *, name: str) -> None:
        self.source = source
        self.name = name
        self.classes = source.classes
        self._numbers = Column(numbers, "i8")

    def __len__(self) -> int:
        return self._numbers.length

    def original(self, index: int) -> int:
        """The number of the example in the whole source."""
        return int(self._numbers[index])

    def label(self, index: int) -> int:
        return self.source.label(self.original(index))

    @cached_property
    def _labels(self) -> Column:
        path = scratch_folder() / "labels.i32"
        numbers, labels = self._numbers.array(), self.source.labels()
        done = 0
        with open(path, "wb") as file:
            for start in range(0, len(labels), CHUNK):
                mine = piece(numbers, done)
                mine = mine[: np.searchsorted(mine, start + CHUNK)]
                piece(labels, start)[mine - start].astype("i4").tofile(file)
                done += len(mine)
        return Column(path, "i4")

    def labels(self) -> NDArray[np.int32]:
        return self._labels.array()

    def weight(self, index: int) -> float:
        return self.source.weight(self.original(index))

    def read(self, index: int) -> Picture:
        return self.source.read(self.original(index))

    def key(self, index: int) -> str:
        return self.source.key(self.original(index))

    def announce(self, indices: IndexArray) -> None:
        if self.source.blocks is not None:
            self.source.announce(np.array([self.original(int(index)) for index in indices], np.int64))

    @cached_property
    def blocks(self) -> Blocks | None:  # type: ignore[override]
        """What is left of the source's blocks."""
        whole = self.source.blocks
        if whole is None:
            return None
        edges = np.concatenate([[0], np.cumsum(whole.sizes)])
        sizes = np.diff(np.searchsorted(self._numbers.array(), edges))
        return Blocks(sizes[sizes > 0], whole.lanes)


def hold_out(source: Source, share: float, seed: int) -> tuple[Subset, Subset]:
    """The source divided into (train, held): `share` of each class is held, chosen by the seed.

    A class of two or more examples has at least one on either side; a class of one is for training.
    """
    if not 0 < share < 1:
        raise ConfigError(f"the share held out, {share}, is not between 0 and 1")
    labels = source.labels()
    sizes = class_sizes(labels, len(source.classes))
    wanted = np.rint(sizes * share).astype(np.int64).clip(1, np.maximum(sizes - 1, 0))
    if not wanted.any():
        raise DataError(f"{source.name}: no class has two pictures, so none can be held out for validation")
    folder = scratch_folder()
    seen = np.zeros_like(sizes)
    with open(folder / "train.i64", "wb") as train, open(folder / "held.i64", "wb") as held:
        for start in range(0, len(labels), CHUNK):
            chunk = piece(labels, start).astype(np.int64)
            place = permuted(ranks_in_class(chunk, seen), sizes[chunk], seed, stream=chunk)
            chosen = place < wanted[chunk]
            (start + np.flatnonzero(~chosen)).astype("i8").tofile(train)
            (start + np.flatnonzero(chosen)).astype("i8").tofile(held)
    return (
        Subset(source, folder / "train.i64", name=f"{source.name} (without what is held out)"),
        Subset(source, folder / "held.i64", name=f"{source.name} (held out)"),
    )


def class_sizes(labels: NDArray[np.int32], classes: int) -> IndexArray:
    """How many examples each class has."""
    sizes = np.zeros(classes, np.int64)
    for start in range(0, len(labels), CHUNK):
        sizes += np.bincount(piece(labels, start), minlength=classes)
    return sizes


def ranks_in_class(labels: IndexArray, seen: IndexArray) -> IndexArray:
    """For each label, how many of its class came before it; `seen` counts them from call to call."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    first = np.searchsorted(grouped, grouped)  # where the run of the same label begins
    ranks = np.empty_like(labels)
    ranks[order] = seen[grouped] + np.arange(len(labels)) - first
    np.add.at(seen, labels, 1)
    return ranks
