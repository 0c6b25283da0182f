"""Sources of labeled images, the datasets that they form as splits, and subsets of sources."""

import os
import stat
from abc import ABC, abstractmethod
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import scratch_folder
from vitruvian.data.columns import Column, read_chunk, read_chunks, scratch_column
from vitruvian.data.decode import RawImage
from vitruvian.data.names import SPLITS, split_name
from vitruvian.data.order import Blocks, IndexArray, permute
from vitruvian.errors import ConfigError, DataError, ImageError, argument
from vitruvian.targets import KINDS, TargetSpec, TargetTable
from vitruvian.text import brief, describe_error, plural, printable

MAX_IMAGE_BYTES = 2**28
EMPTY_CLASS = ("class folder", "without an image")  # noun and rest of the note about a class without images


@dataclass
class SkippedFiles:
    """Files and samples that were skipped, counted by reason."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, noun: str, reason: str, example: str) -> None:
        self.counts[noun, reason] += 1
        self.examples.setdefault((noun, reason), example)

    def notes(self) -> list[str]:
        """One line per reason, such as `skipped 2 files that are not images, such as a.txt`."""
        return [
            f"skipped {plural(count, noun)}{reason and f' {reason}'}, {'such as ' if count > 1 else ''}"
            f"{printable(self.examples[noun, reason])}"
            for (noun, reason), count in self.counts.items()
        ]


class Source(ABC):
    """One split of a dataset: labeled images that can be read in any order."""

    classes: tuple[str, ...]
    name: str  # the name of the source in messages
    blocks: Blocks | None = None  # samples that are cheap only when read together; None if all cost the same
    remote: bool = False  # whether labels and keys come with the images, so that reading all downloads everything
    draws: bool = False  # whether reading draws from the global generators, which the loader seeds for each sample
    targets: TargetTable | None = None  # if they are not one class each; a label is then a row of the table
    _labels: NDArray[np.int32] | Column  # of a source that does not override `__len__` and `labels`

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def labels(self) -> NDArray[np.int32]:
        """All labels, perhaps as a memory map: read them with `read_chunks`, and they take no memory."""
        return self._labels.array() if isinstance(self._labels, Column) else self._labels

    @abstractmethod
    def read(self, index: int) -> RawImage:
        """The encoded image. Raises ImageError or OSError if it cannot be read."""

    def key(self, index: int) -> str:
        """The name of the sample in reports."""
        return f"{self.name} #{index}"

    def weight(self, index: int) -> float:
        """The weight of the sample in the loss."""
        return 1.0

    def column_names(self) -> tuple[str, ...]:
        """The columns of the table that lists the samples; empty if there is none."""
        return ()

    def column(self, name: str) -> list[str]:
        """The values of a column, one per sample; empty text where there is none."""
        raise DataError(f"no column {name!r}", where=self.name)

    @property
    def target(self) -> str:
        """The kind of target, a key of KINDS."""
        return "single" if self.targets is None else self.targets.kind

    def label_text(self, index: int) -> str:
        """The class of a sample, or its targets as text."""
        label = self.label(index)
        return self.classes[label] if self.targets is None else self.targets.text(label)

    def strata(self) -> tuple[NDArray[Any], int]:
        """The stratum of each sample for stratified splits, and the number of strata.

        Strata are the classes, or those of `TargetTable.strata`.
        """
        if self.targets is None:
            return self.labels(), len(self.classes)
        groups = self.targets.strata()
        return groups[np.asarray(self.labels())], int(groups.max()) + 1

    def origin(self, index: int) -> "tuple[Source, int]":
        """The source that a sample comes from, through all parts and subsets, and its index there."""
        return self, index

    def announce(self, indices: IndexArray) -> None:  # noqa: B027  (most sources have nothing to do)
        """Announce that these samples are read soon, so that a slow source can begin to fetch them."""


class PartSource(Source):
    """A source whose samples are those of other sources."""

    _ends: IndexArray  # where the samples of each of several sources end

    def __len__(self) -> int:
        return int(self._ends[-1])

    @abstractmethod
    def part(self, index: int) -> tuple[Source, int]:
        """The source that contains a sample, and its index there."""

    def origin(self, index: int) -> tuple[Source, int]:
        source, inner = self.part(index)
        return source.origin(inner)

    def label(self, index: int) -> int:
        source, inner = self.part(index)
        return source.label(inner)

    def weight(self, index: int) -> float:
        source, inner = self.part(index)
        return source.weight(inner)

    def read(self, index: int) -> RawImage:
        source, inner = self.part(index)
        return source.read(inner)

    def key(self, index: int) -> str:
        source, inner = self.part(index)
        return source.key(inner)

    def column_names(self) -> tuple[str, ...]:
        return self.part(0)[0].column_names() if len(self) else ()

    def column(self, name: str) -> list[str]:
        parts = [self.part(index) for index in range(len(self))]
        sources = {id(source): source for source, _ in parts}
        columns = {key: source.column(name) for key, source in sources.items()}
        return [columns[id(source)][inner] for source, inner in parts]


def locate(ends: IndexArray, index: int) -> tuple[int, int]:
    """Which of several consecutive runs contains an item, given where they end, and the item's index in it."""
    run = int(np.searchsorted(ends, index, side="right"))
    return run, index - (int(ends[run - 1]) if run else 0)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The splits of one dataset; all have the same classes."""

    name: str
    splits: Mapping[str, Source]  # `train`, `val` and `test`, if present, then others
    notes: tuple[str, ...] = ()  # one line per thing that was skipped or is unusual
    divided: bool = True  # whether the data has splits; otherwise all of it is `train`
    target: str = "single"  # the kind of target that the data states
    columns: tuple[str, ...] | None = None  # if classes are comma-separated values of these columns of a manifest

    @property
    def classes(self) -> tuple[str, ...]:
        return next(iter(self.splits.values())).classes

    @property
    def train(self) -> Source:
        if "train" not in self.splits:
            reason = f"no split to train on, only {', '.join(self.splits)}"
            raise DataError(reason, where=self.name, hint="call one 'train'")
        return self.splits["train"]

    @property
    def validation(self) -> Source | None:
        """The validation split, or else the test split, if there is one."""
        return self.splits.get("val", self.splits.get("test"))

    def only(self, split: str) -> "Dataset":
        """The dataset reduced to one split."""
        name = split_name(split) or split
        if not self.divided:
            hint = "leave it out to use all images, or put the class folders into folders called train, val or test"
            raise DataError(f"no split {split!r}: this dataset has no splits", where=self.name, hint=hint)
        if name not in self.splits:
            raise DataError(f"no split {split!r}, only {', '.join(self.splits)}", where=self.name)
        return replace(self, splits={name: self.splits[name]})


def make_dataset(
    name: str,
    splits: Mapping[str, Source],
    notes: Iterable[str] = (),
    divided: bool = True,
    target: str = "single",
    columns: tuple[str, ...] | None = None,
) -> Dataset:
    """The dataset of these splits in their usual order; it must have images of at least two classes."""
    filled = {split: source for split, source in splits.items() if len(source)}
    if not filled:
        raise DataError("no images", where=name)
    order = sorted(filled, key=lambda split: ([*SPLITS, split].index(split), split))
    splits = {split: filled[split] for split in order}
    dataset = Dataset(name=name, splits=splits, notes=tuple(notes), divided=divided, target=target, columns=columns)
    if len(dataset.classes) < 2 and target == "single":
        total = sum(map(len, filled.values()))
        subject = "its only image is" if total == 1 else f"all {total} images are"
        reason = f"{subject} of one class, {dataset.classes[0]!r}; at least two classes are needed"
        raise DataError(reason, where=name)
    return dataset


def with_targets(dataset: Dataset, spec: TargetSpec, accepted: Iterable[str]) -> Dataset:
    """The dataset with the kind of target that is asked for, or that it states.

    Raises:
        DataError: The kind is not accepted, or the labels cannot be of this kind.
    """
    source = next(iter(dataset.splits.values()))
    stated = dataset.target if source.targets is None else source.target
    kind = stated if spec.kind == "auto" else spec.kind
    if kind not in accepted:
        reason = f"the data has {KINDS[kind].title}; this works with {' or '.join(KINDS[k].title for k in accepted)}"
        raise DataError(reason, where=dataset.name)
    if kind == source.target and (source.targets is not None or stated == kind):
        return dataset
    parse = KINDS[kind].parse
    if source.targets is not None or parse is None or (stated != "single" and stated != kind):
        reason = f"{argument('target', spec.kind)}, but the data has {KINDS[stated].title}"
        raise DataError(reason, where=dataset.name)
    if spec.columns and dataset.columns is None:
        raise DataError(f"{argument('target')} names columns, which only a manifest has", where=dataset.name)
    try:
        table = parse(dataset.classes, dataset.columns)
    except DataError as error:
        raise (error if error.where else error.replace(where=dataset.name)) from None
    notes = dataset.notes
    if table.levels:
        notes = (*notes, f"the order of the {len(table.levels)} classes is {brief(table.levels, 10)}")
    splits: dict[str, Source] = {name: TargetSource(part, table) for name, part in dataset.splits.items()}
    return replace(dataset, splits=splits, notes=notes, target=kind)


def check_inside(where: str | Path, path: str) -> str:
    """Return a path from an untrusted file; raises DataError if it points outside its folder."""
    if os.path.isabs(path) or ".." in path.replace("\\", "/").split("/"):
        raise DataError(f"the path {printable(path)} points outside its folder", where=where)
    return path


def read_file(path: str | Path) -> bytes:
    """The content of an image file; raises ImageError if it is not a regular file, or too large."""
    try:
        status = os.stat(path)  # before it is opened: opening a pipe may block forever
    except ValueError as error:  # a NUL in the path
        raise ImageError(describe_error(error), where=printable(str(path))) from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageError("not a regular file", where=printable(str(path)))
    check_image_bytes(status.st_size, str(path))
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def check_image_bytes(size: int, key: str) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ImageError(f"{size >> 20} MB is too large for an image", where=printable(key))


class DerivedSource(PartSource):
    """The samples of another source; a subclass changes their images or their targets, or leaves some out."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, source.name
        self.classes, self.targets = source.classes, source.targets
        self.draws, self.remote, self.blocks = source.draws, source.remote, source.blocks

    def __len__(self) -> int:
        return len(self.source)

    def part(self, index: int) -> tuple[Source, int]:
        return self.source, index

    def labels(self) -> NDArray[np.int32]:
        return self.source.labels()

    def announce(self, indices: IndexArray) -> None:
        self.source.announce(indices)


class TargetSource(DerivedSource):
    """The samples of a source whose classes stand for the rows of a table of targets."""

    def __init__(self, source: Source, table: TargetTable) -> None:
        super().__init__(source)
        self.classes, self.targets = table.names, table


class Subset(DerivedSource):
    """The samples of a source whose indices are in a file, in ascending order."""

    labels = Source.labels

    def __init__(self, source: Source, indices: Path, *, name: str) -> None:
        super().__init__(source)
        self.name, self._indices = name, Column(indices, "i8")
        if source.blocks is not None:  # reduced to the samples of this subset
            edges = np.concatenate([[0], np.cumsum(source.blocks.sizes)])
            sizes = np.diff(np.searchsorted(self._indices.array(), edges))
            self.blocks = Blocks(sizes[sizes > 0], source.blocks.lanes)

    def __len__(self) -> int:
        return len(self._indices)

    def original(self, index: int) -> int:
        """The index of the sample in the full source."""
        return int(self._indices[index])

    def part(self, index: int) -> tuple[Source, int]:
        return self.source, self.original(index)

    @cached_property
    def _labels(self) -> Column:  # type: ignore[override]
        def chunks() -> Iterator[NDArray[np.int32]]:
            done, all_indices = 0, self._indices.array()
            for start, labels in read_chunks(self.source.labels()):
                indices = read_chunk(all_indices, done)
                indices = indices[: np.searchsorted(indices, start + len(labels))]
                yield labels[indices - start]
                done += len(indices)

        return scratch_column(chunks(), "i4")

    def announce(self, indices: IndexArray) -> None:
        if self.source.blocks is not None:
            self.source.announce(np.array([self.original(int(index)) for index in indices], np.int64))


class ClassSubset(Subset):
    """The samples of some classes of a source; a label is the position of its class among these."""

    def __init__(self, source: Source, class_labels: Sequence[int]) -> None:
        """`class_labels` has the labels of the classes in the source."""
        if source.targets is not None:
            raise ConfigError(f"some of the classes can only be used with {KINDS['single'].title}")
        self._new_labels = np.full(len(source.classes), -1, np.int32)
        self._new_labels[list(class_labels)] = np.arange(len(class_labels))
        indices = (start + np.flatnonzero(self._new_labels[c] >= 0) for start, c in read_chunks(source.labels()))
        name = f"{source.name} ({len(class_labels)} of {plural(len(source.classes), 'class')})"
        super().__init__(source, scratch_column(indices, "i8").path, name=name)
        self.classes = tuple(source.classes[label] for label in class_labels)

    def label(self, index: int) -> int:
        return int(self._new_labels[super().label(index)])

    @cached_property
    def _labels(self) -> Column:  # type: ignore[override]
        return scratch_column((self._new_labels[chunk] for _, chunk in read_chunks(super()._labels.array())), "i4")


def take(source: Source, indices: IndexArray, name: str) -> Subset:
    """The samples with these indices, in ascending order; they are kept in a temporary file."""
    return Subset(source, scratch_column([indices], "i8").path, name=name)


def hold_out(source: Source, share: float, seed: int) -> tuple[Subset, Subset]:
    """Split a source into (train, held out): `share` of each class is held out, chosen by the seed.

    A class of two or more samples has at least one on either side; a class of one sample is used for training.
    """
    if not 0 < share < 1:
        raise ConfigError(f"the share held out, {share}, is not between 0 and 1")
    sizes = class_sizes(*source.strata())
    counts = np.rint(sizes * share).astype(np.int64).clip(1, np.maximum(sizes - 1, 0))
    if not counts.any():
        raise DataError("no class has two images, so none can be held out for validation", where=source.name)
    return _choose(source, counts, seed, "held out")


def first_samples(source: Source, count: int, seed: int) -> Subset:
    """`count` samples chosen by the seed, classes balanced if possible; a smaller subset is part of a larger one."""
    if not 0 < count <= len(source):
        raise ConfigError(f"{argument('max_train_samples', count)}: {source.name} has {len(source)} training images")
    sizes = class_sizes(*source.strata())
    return _choose(source, equal_shares(sizes, count), seed, f"the first {count}")[1]


def equal_shares(sizes: IndexArray, count: int) -> IndexArray:
    """Distribute `count` over the classes, one at a time in turn, until a class has no more."""
    rounds = bisect(range(int(sizes.max()) + 1), count, key=lambda rounds: np.minimum(sizes, rounds).sum()) - 1
    shares = np.minimum(sizes, rounds)
    shares[np.flatnonzero(sizes > rounds)[: count - int(shares.sum())]] += 1
    return shares


def _choose(source: Source, counts: IndexArray, seed: int, name: str) -> tuple[Subset, Subset]:
    """The other samples, and the chosen ones, called `name`: `counts` of each class, by the seed."""
    groups, count = source.strata()
    sizes = class_sizes(groups, count)
    folder = scratch_folder()
    counted = np.zeros_like(sizes)
    with open(folder / "rest.i64", "wb") as rest, open(folder / "chosen.i64", "wb") as chosen:
        for start, labels in read_chunks(groups):
            chunk = labels.astype(np.int64)
            position = permute(ranks_in_class(chunk, counted), sizes[chunk], seed, stream=chunk)
            mask = position < counts[chunk]
            (start + np.flatnonzero(~mask)).astype("i8").tofile(rest)
            (start + np.flatnonzero(mask)).astype("i8").tofile(chosen)
    others = Subset(source, folder / "rest.i64", name=f"{source.name} (without what is {name})")
    return others, Subset(source, folder / "chosen.i64", name=f"{source.name} ({name})")


def class_sizes(labels: NDArray[Any], classes: int) -> IndexArray:
    """The number of samples of each class."""
    sizes = np.zeros(classes, np.int64)
    for _, chunk in read_chunks(labels):
        sizes += np.bincount(chunk, minlength=classes)
    return sizes


def ranks_in_class(labels: IndexArray, counted: IndexArray) -> IndexArray:
    """How many labels of the same class precede each label; `counted` carries the counts from call to call."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    first = np.searchsorted(grouped, grouped)  # where the run of the same label begins
    ranks = np.empty_like(labels)
    ranks[order] = counted[grouped] + np.arange(len(labels)) - first
    np.add.at(counted, labels, 1)
    return ranks


class Concat(PartSource):
    """The samples of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Source], *, name: str) -> None:
        self.parts, self.name = tuple(parts), name
        self.classes, self.targets = self.parts[0].classes, self.parts[0].targets
        self.draws = any(part.draws for part in self.parts)
        self.remote = any(part.remote for part in self.parts)
        for part in self.parts:
            if part.classes != self.classes or part.targets is not self.targets:
                raise DataError(f"{part.name} and {self.parts[0].name} have different classes and cannot be combined")
        self._ends = np.cumsum([len(part) for part in self.parts])

    def part(self, index: int) -> tuple[Source, int]:
        run, inner = locate(self._ends, index)
        return self.parts[run], inner

    @cached_property
    def _labels(self) -> NDArray[np.int32]:  # type: ignore[override]
        return np.concatenate([part.labels() for part in self.parts])

    def announce(self, indices: IndexArray) -> None:
        runs = np.searchsorted(self._ends, indices, side="right")
        for run, part in enumerate(self.parts):
            if part.blocks is not None:
                part.announce(indices[runs == run] - (int(self._ends[run - 1]) if run else 0))

    @cached_property
    def blocks(self) -> Blocks | None:  # type: ignore[override]
        """The blocks of all parts; in a part without blocks, each sample is one."""
        if all(part.blocks is None for part in self.parts):
            return None
        sizes = [np.ones(len(part), np.int64) if part.blocks is None else part.blocks.sizes for part in self.parts]
        return Blocks(np.concatenate(sizes), max(part.blocks.lanes for part in self.parts if part.blocks is not None))


def all_but_test(dataset: Dataset) -> Source:
    """The images of the splits `train` and `val`, which cross-validation divides into folds."""
    dev = dataset.splits.get("val")
    return dataset.train if dev is None else Concat([dataset.train, dev], name=f"{dataset.name} (train and val)")
