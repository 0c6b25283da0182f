"""What every source of samples offers, and the dataset that its splits form."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import RawImage
from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.sources.names import SPLITS, split_name
from vitruvian.errors import DataError, ImageError
from vitruvian.text import printable

MAX_IMAGE_BYTES = 2**28


@dataclass
class LeftOut:
    """What was come across and not taken, counted by reason."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def lines(self) -> list[str]:
        return [
            f"left out: {count} {reason}, such as {printable(self.examples[reason])}"
            for reason, count in self.counts.items()
        ]


class Source(ABC):
    """One split of a dataset: labeled images that can be read in any order."""

    classes: tuple[str, ...]
    name: str
    """What to call the source in messages."""
    blocks: Blocks | None = None
    """Which samples are cheap only when read together; None where all cost the same."""
    remote: bool = False
    """Whether labels and keys come only with the images, from far away: asking for all of them fetches everything."""
    draws: bool = False
    """Whether reading draws from the global random generators, which the loader then seeds for each sample."""

    @abstractmethod
    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        return int(self.labels()[index])

    @abstractmethod
    def labels(self) -> NDArray[np.int32]:
        """All labels, perhaps mapped from a file: go through them in pieces, and no memory is needed."""

    @abstractmethod
    def read(self, index: int) -> RawImage:
        """The image, not yet decoded; ImageError or OSError where it cannot be had."""

    def key(self, index: int) -> str:
        """What to call the sample in reports."""
        return f"{self.name} #{index}"

    def weight(self, index: int) -> float:
        """How much the sample counts in the loss."""
        return 1.0

    def announce(self, indices: IndexArray) -> None:  # noqa: B027  (most sources have nothing to do)
        """Say that these samples are read soon, so that a slow source can begin to fetch them."""


class PartSource(Source):
    """A source whose samples are those of others; `part` tells of which."""

    @abstractmethod
    def part(self, index: int) -> tuple[Source, int]:
        """The source that a sample is in, and its number there."""

    def label(self, index: int) -> int:
        source, number = self.part(index)
        return source.label(number)

    def weight(self, index: int) -> float:
        source, number = self.part(index)
        return source.weight(number)

    def read(self, index: int) -> RawImage:
        source, number = self.part(index)
        return source.read(number)

    def key(self, index: int) -> str:
        source, number = self.part(index)
        return source.key(number)


def located(ends: IndexArray, index: int) -> tuple[int, int]:
    """Which of several runs, one after the other, holds an item, and its number there."""
    number = int(np.searchsorted(ends, index, side="right"))
    return number, index - (int(ends[number - 1]) if number else 0)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The splits of one dataset; all have the same classes."""

    name: str
    splits: Mapping[str, Source]
    """`train`, `val` and `test`, as far as there are such, then others."""
    notes: tuple[str, ...] = ()
    """What was left out or is strange, a line each."""
    divided: bool = True
    """Whether the data has splits; otherwise all of it is `train`."""

    @property
    def classes(self) -> tuple[str, ...]:
        return next(iter(self.splits.values())).classes

    @property
    def train(self) -> Source:
        if "train" not in self.splits:
            raise DataError(f"no split to train on, only {', '.join(self.splits)}; call one 'train'", where=self.name)
        return self.splits["train"]

    @property
    def validation(self) -> Source | None:
        """The validation split, or else the test split, if there is one."""
        return self.splits.get("val", self.splits.get("test"))

    def only(self, split: str) -> Dataset:
        """The dataset with no other split than this one."""
        name = split_name(split) or split
        if not self.divided:
            raise DataError(
                f"there is no split {split!r}, nor any other; leave it out to take all images, or put the "
                "class folders into folders called train, val or test",
                where=self.name,
            )
        if name not in self.splits:
            raise DataError(f"there is no split {split!r}, only {', '.join(self.splits)}", where=self.name)
        return replace(self, splits={name: self.splits[name]})


def make_dataset(
    name: str, splits: Mapping[str, Source], notes: Iterable[str] = (), *, divided: bool = True
) -> Dataset:
    """The dataset of these splits in their usual order, once it is sure that one can learn from it."""
    filled = {split: source for split, source in splits.items() if len(source)}
    if not filled:
        raise DataError("there are no images in it", where=name)
    order = sorted(filled, key=lambda split: ([*SPLITS, split].index(split), split))
    ordered = {split: filled[split] for split in order}
    result = Dataset(name=name, splits=ordered, notes=tuple(notes), divided=divided)
    if len(result.classes) < 2:
        total = sum(map(len, filled.values()))
        raise DataError(
            f"all {total} images are of one class, {result.classes[0]!r}; at least two classes are wanted", where=name
        )
    return result


def inside(where: str | Path, path: str) -> str:
    """A path that a file of untrusted origin names, if it stays in the folder where it begins."""
    if os.path.isabs(path) or ".." in path.replace("\\", "/").split("/"):
        raise DataError(f"the path {printable(path)} leads out of its folder; wanted paths inside it", where=where)
    return path


def read_file(path: str | Path) -> bytes:
    """The bytes of a regular file of an image's size."""
    found = os.stat(path)  # before it is opened, which may wait for ever for a pipe's other end
    if not stat.S_ISREG(found.st_mode):
        raise ImageError("this is not a regular file", where=printable(str(path)))
    check_image_bytes(found.st_size, str(path))
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def check_image_bytes(size: int, key: str) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size >> 20} MB is too much for an image", where=printable(key))
