"""Sources of labeled images, the datasets that their splits form, and subsets of sources."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import scratch_folder
from vitruvian.data.columns import CHUNK, Column, piece
from vitruvian.data.decode import RawImage
from vitruvian.data.names import SPLITS, split_name
from vitruvian.data.order import Blocks, IndexArray, permuted
from vitruvian.errors import ConfigError, DataError, ImageError
from vitruvian.text import printable

MAX_IMAGE_BYTES = 2**28


@dataclass
class LeftOut:
    """What was come across and not taken, plural by reason."""

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


class Subset(PartSource):
    """The samples of a source whose numbers, ascending, stand in a file."""

    def __init__(self, source: Source, numbers: Path, *, name: str) -> None:
        self.source = source
        self.name = name
        self.classes = source.classes
        self.draws, self.remote = source.draws, source.remote
        self._numbers = Column(numbers, "i8")

    def __len__(self) -> int:
        return self._numbers.length

    def original(self, index: int) -> int:
        """The number of the sample in the whole source."""
        return int(self._numbers[index])

    def part(self, index: int) -> tuple[Source, int]:
        return self.source, self.original(index)

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

    A class of two or more samples has at least one on either side; a class of one is for training.
    """
    if not 0 < share < 1:
        raise ConfigError(f"the share held out, {share}, is not between 0 and 1")
    labels = source.labels()
    sizes = class_sizes(labels, len(source.classes))
    wanted = np.rint(sizes * share).astype(np.int64).clip(1, np.maximum(sizes - 1, 0))
    if not wanted.any():
        raise DataError(f"{source.name}: no class has two images, so none can be held out for validation")
    rest, held = divided(source, wanted, seed)
    return (
        Subset(source, rest, name=f"{source.name} (without what is held out)"),
        Subset(source, held, name=f"{source.name} (held out)"),
    )


def first_of_each(source: Source, count: int, seed: int) -> Subset:
    """`count` samples, as many of each class as of the others where it has so many, chosen by the seed.

    What is chosen for a smaller count is also chosen for a larger one.
    """
    if not 0 < count <= len(source):
        raise ConfigError(f"max_train_samples={count}: {source.name} has {len(source)} images to train on")
    sizes = class_sizes(source.labels(), len(source.classes))
    _, chosen = divided(source, equal_shares(sizes, count), seed)
    return Subset(source, chosen, name=f"{source.name} (the first {count})")


def equal_shares(sizes: IndexArray, count: int) -> IndexArray:
    """`count` dealt to the classes in turn, one each time around, until a class has no more."""
    each = 0
    for size in np.unique(sizes).tolist():
        if np.minimum(sizes, size).sum() > count:
            break
        each = size
    dealt = np.minimum(sizes, each)
    open_classes = np.flatnonzero(sizes > each)
    if len(open_classes):
        rounds, rest = divmod(int(count - dealt.sum()), len(open_classes))
        dealt[open_classes] += rounds
        dealt[open_classes[:rest]] += 1
    return dealt


def divided(source: Source, wanted: IndexArray, seed: int) -> tuple[Path, Path]:
    """Files with the numbers of the rest and of the chosen: as many of each class as wanted, by the seed."""
    labels = source.labels()
    sizes = class_sizes(labels, len(source.classes))
    folder = scratch_folder()
    seen = np.zeros_like(sizes)
    with open(folder / "rest.i64", "wb") as rest, open(folder / "chosen.i64", "wb") as chosen:
        for start in range(0, len(labels), CHUNK):
            chunk = piece(labels, start).astype(np.int64)
            place = permuted(ranks_in_class(chunk, seen), sizes[chunk], seed, stream=chunk)
            mine = place < wanted[chunk]
            (start + np.flatnonzero(~mine)).astype("i8").tofile(rest)
            (start + np.flatnonzero(mine)).astype("i8").tofile(chosen)
    return folder / "rest.i64", folder / "chosen.i64"


def class_sizes(labels: NDArray[np.int32], classes: int) -> IndexArray:
    """How many samples each class has."""
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


class Concat(PartSource):
    """The samples of all parts, one part after the other."""

    def __init__(self, parts: Sequence[Source], *, name: str) -> None:
        self.parts, self.name = tuple(parts), name
        self.classes = self.parts[0].classes
        self.draws = any(part.draws for part in self.parts)
        self.remote = any(part.remote for part in self.parts)
        for part in self.parts:
            if part.classes != self.classes:
                raise DataError(f"{part.name} and {self.parts[0].name} have different classes and are not put together")
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def part(self, index: int) -> tuple[Source, int]:
        number, within = located(self._ends, index)
        return self.parts[number], within

    @cached_property
    def _labels(self) -> NDArray[np.int32]:
        return np.concatenate([part.labels() for part in self.parts])

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def announce(self, indices: IndexArray) -> None:
        numbers = np.searchsorted(self._ends, indices, side="right")
        for number, part in enumerate(self.parts):
            if part.blocks is not None:
                part.announce(indices[numbers == number] - (int(self._ends[number - 1]) if number else 0))

    @cached_property
    def blocks(self) -> Blocks | None:  # type: ignore[override]
        """The blocks of all parts; a part without any is one block for each sample."""
        found = [part.blocks for part in self.parts]
        if all(blocks is None for blocks in found):
            return None
        sizes = [
            np.ones(len(part), np.int64) if blocks is None else blocks.sizes for part, blocks in zip(self.parts, found)
        ]
        return Blocks(np.concatenate(sizes), max(blocks.lanes for blocks in found if blocks is not None))
