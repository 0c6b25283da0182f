"""Several sources as one: the training and validation splits together, for the last training of a protocol."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.sources.base import RawImage, Source
from vitruvian.errors import DataError


class Union(Source):
    """The examples of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Source], *, name: str) -> None:
        self.parts, self.name = tuple(parts), name
        self.classes = self.parts[0].classes
        for part in self.parts:
            if part.classes != self.classes:
                raise DataError(f"{part.name} and {self.parts[0].name} have different classes and are not put together")
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, index: int) -> tuple[Source, int]:
        """The part that an example is in, and its number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - (int(self._ends[number - 1]) if number else 0)

    def label(self, index: int) -> int:
        part, number = self.place(index)
        return part.label(number)

    @cached_property
    def _labels(self) -> NDArray[np.int32]:
        return np.concatenate([part.labels() for part in self.parts])

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def weight(self, index: int) -> float:
        part, number = self.place(index)
        return part.weight(number)

    def read(self, index: int) -> RawImage:
        part, number = self.place(index)
        return part.read(number)

    def key(self, index: int) -> str:
        part, number = self.place(index)
        return part.key(number)

    def announce(self, indices: IndexArray) -> None:
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number, part in enumerate(self.parts):
            if part.blocks is not None:
                part.announce(indices[numbers == number] - (int(self._ends[number - 1]) if number else 0))

    @cached_property
    def blocks(self) -> Blocks | None:  # type: ignore[override]
        """The blocks of all parts; a part without any is one block for each example."""
        found = [part.blocks for part in self.parts]
        if all(blocks is None for blocks in found):
            return None
        sizes = [
            np.ones(len(part), np.int64) if blocks is None else blocks.sizes for part, blocks in zip(self.parts, found)
        ]
        return Blocks(np.concatenate(sizes), max(blocks.lanes for blocks in found if blocks is not None))
