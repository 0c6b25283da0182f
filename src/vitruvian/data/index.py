"""An index of samples on disk: keys, labels, weights and positions.

Its size is not limited by memory: entries are read with `pread` rather than mapped, since mapped pages count towards
the memory of the process.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import cache_folder, scratch_folder
from vitruvian.data.columns import CHUNK, Column, OpenFile
from vitruvian.data.names import class_name, natural
from vitruvian.data.sources import LeftOut, Source
from vitruvian.errors import DataError, FileError
from vitruvian.files import atomic_path, read_json, short_hash

FORMAT = 2
"""Raised when the layout of what is stored changes, so that older files are not read."""

STALE_SECONDS = 24 * 3600
"""Age at which what was derived from an earlier state of the data is removed."""


@dataclass(slots=True)
class Entry:
    """One sample on its way into an index."""

    split: str
    key: str
    label: str
    weight: float = 1.0
    numbers: tuple[int, ...] = ()
    """Where the image lies, as the source understands it."""


class IndexedSource(Source):
    """The samples listed in the index of one split; how an image is read is left open."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path) -> None:
        self.name = name
        self.classes = classes
        self._ends = Column(folder / "ends.i64", "i8")
        self._keys = OpenFile(folder / "keys.bin")
        self._labels = Column(folder / "labels.i32", "i4")
        self._weights = Column(folder / "weights.f32", "f4") if (folder / "weights.f32").exists() else None
        self.numbers = {path.stem: Column(path, "i8") for path in folder.glob("*.i64")}

    def __len__(self) -> int:
        return self._ends.length

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def labels(self) -> NDArray[np.int32]:
        return self._labels.array()

    def weight(self, index: int) -> float:
        return 1.0 if self._weights is None else float(self._weights[index])

    def key(self, index: int) -> str:
        end, start = self._ends[index], self._ends[index - 1] if index else 0
        return os.fsdecode(self._keys.read(start, end - start))


class Writer:
    """Appends the entries of one split to files."""

    def __init__(self, folder: Path, numbers: Sequence[str], files: ExitStack) -> None:
        folder.mkdir()
        self.folder = folder
        self.weighted = False
        codes = {"ends.i64": "q", "labels.i32": "i", "weights.f32": "f"} | {f"{name}.i64": "q" for name in numbers}

        def opened(name: str) -> BinaryIO:
            return files.enter_context(open(folder / name, "wb"))

        self._keys = opened("keys.bin")
        self._columns: list[tuple[BinaryIO, array[Any]]] = [(opened(name), array(codes[name])) for name in codes]
        self._end = 0

    def add(self, entry: Entry, label: int) -> None:
        key = os.fsencode(entry.key)
        self._end += len(key)
        self._keys.write(key)
        self.weighted |= entry.weight != 1.0
        row = (self._end, label, entry.weight, *entry.numbers)
        for (_, values), number in zip(self._columns, row, strict=True):
            values.append(number)
        if len(values) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        for file, values in self._columns:
            values.tofile(file)
            del values[:]


class StoredIndex(NamedTuple):
    """What `write_index` left in a folder."""

    classes: tuple[str, ...]
    splits: dict[str, Path]
    """The folder of each split's index."""
    notes: list[str]


def indexed(
    entries: Callable[[LeftOut], Iterable[Entry]],
    *,
    files: Sequence[Path] = (),
    kind: str = "",
    numbers: Sequence[str] = (),
    classes: tuple[str, ...] | None = None,
) -> StoredIndex:
    """The index of these entries; they may note what they leave out.

    Made once while the `files` that they are read from stay the same; each time where none are named.
    """

    def build(folder: Path) -> None:
        left_out = LeftOut()
        write_index(folder, entries(left_out), left_out=left_out, numbers=numbers, classes=classes)

    if files:
        return read_index(derived(kind, files, build))
    folder = scratch_folder()
    build(folder)
    return read_index(folder)


def derived(kind: str, files: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """A folder that `build` filled from these files: an earlier one if they are still the same.

    Where the cache folder cannot be written, the folder is temporary and ends with this process.
    """
    state = [(found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]
    group = cache_folder() / "index" / short_hash([kind, *map(os.path.abspath, files)])
    target = group / short_hash([FORMAT, *state])
    if target.is_dir():
        return target
    try:
        with atomic_path(target) as new:
            new.mkdir()
            build(new)
    except FileError:
        target = scratch_folder()
        build(target)
        return target
    for folder in group.iterdir():
        with suppress(OSError):  # another process removes it at the same time
            if folder != target and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    return target


def write_index(
    folder: Path,
    entries: Iterable[Entry],
    *,
    left_out: LeftOut,
    numbers: Sequence[str] = (),
    classes: tuple[str, ...] | None = None,
) -> None:
    """Write the entries, in their order, as an index of each split, and what was left out on the way to them.

    Without given classes, they are the labels that occur, in natural order. With them, a label is a name or the
    number of a class.
    """
    seen: dict[str, int] = {}
    writers: dict[str, Writer] = {}
    with ExitStack() as files:
        for entry in entries:
            writer = writers.get(entry.split)
            if writer is None:
                writer = writers[entry.split] = Writer(folder / str(len(writers)), numbers, files)
            writer.add(entry, seen.setdefault(entry.label, len(seen)))
        for writer in writers.values():
            writer.flush()
    known = classes or tuple(sorted({class_name(label) for label in seen}, key=natural))
    final = class_numbers(seen, known)
    for writer in writers.values():
        renumber(writer.folder / "labels.i32", final)
        if not writer.weighted:
            (writer.folder / "weights.f32").unlink()
    content = {"classes": known, "splits": list(writers), "notes": left_out.lines()}
    (folder / "index.json").write_text(json.dumps(content))


def class_numbers(labels: Iterable[str], classes: tuple[str, ...]) -> NDArray[np.int32]:
    """The number of each label, which is a class's name or its number."""
    known = {name: number for number, name in enumerate(classes)}
    numbers = []
    for label in labels:
        name = class_name(label)
        number = known.get(name, int(name) if name.isdecimal() and len(name) < 10 else -1)
        if not 0 <= number < len(classes):
            raise DataError(
                f"label {label!r} is neither one of the {len(classes)} names in the list of classes "
                f"nor a number below {len(classes)}"
            )
        numbers.append(number)
    return np.array(numbers, "i4")


def renumber(path: Path, numbers: NDArray[np.int32]) -> None:
    """Replace each label by its final number, in place."""
    with open(path, "r+b") as file:
        while labels := file.read(4 * CHUNK):
            file.seek(-len(labels), os.SEEK_CUR)
            file.write(numbers[np.frombuffer(labels, "i4")].tobytes())


def read_index(folder: Path) -> StoredIndex:
    content = read_json(folder / "index.json")
    splits = {split: folder / str(number) for number, split in enumerate(content["splits"])}
    return StoredIndex(tuple(content["classes"]), splits, content["notes"])
