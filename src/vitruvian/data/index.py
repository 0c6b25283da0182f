"""An index of samples on disk: keys, labels, weights and positions in columns, so that its length needs no memory."""

import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import cache_folder, scratch_folder
from vitruvian.data.columns import CHUNK, Column, OpenFile
from vitruvian.data.names import class_name
from vitruvian.data.sources import SkippedFiles, Source
from vitruvian.errors import DataError, FileError, short_repr
from vitruvian.files import atomic_path, read_json, short_hash
from vitruvian.text import natural_key

Opened = TypeVar("Opened", bound="IndexedSource")
FORMAT = 3  # version of the layout on disk; increment it to invalidate stored indexes
STALE_SECONDS = 24 * 3600  # age at which files derived from an earlier state of the data are removed


@dataclass(slots=True)
class Entry:
    """One sample to be written to an index."""

    split: str
    key: str
    label: str
    weight: float = 1.0
    numbers: tuple[int, ...] = ()  # where the image is, in the terms of its source


Entries = Callable[[SkippedFiles], Iterable[Entry]]  # a function that reads the entries and notes what it skips
Classes = tuple[str, ...] | None  # the class names if they are known in advance


class IndexedSource(Source):
    """The samples in the index of one split; subclasses know how to read the images."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path) -> None:
        self.name = name
        self.classes = classes
        self._ends = Column(folder / "ends.i64", "i8")
        self._keys = OpenFile(folder / "keys.bin")
        self._labels = Column(folder / "labels.i32", "i4")
        self._weights = Column(folder / "weights.f32", "f4") if (folder / "weights.f32").exists() else None
        self.numbers = {path.stem: Column(path, "i8") for path in folder.glob("*.i64")}

    def weight(self, index: int) -> float:
        return 1.0 if self._weights is None else float(self._weights[index])

    def key(self, index: int) -> str:
        end, start = self._ends[index], self._ends[index - 1] if index else 0
        return os.fsdecode(self._keys.read(start, end - start))


class SplitWriter:
    """Appends the entries of one split to the files of its index."""

    def __init__(self, folder: Path, numbers: Sequence[str], files: ExitStack) -> None:
        folder.mkdir()
        self.folder, self.weighted, self._end = folder, False, 0
        codes = {"ends.i64": "q", "labels.i32": "i", "weights.f32": "f"} | {f"{name}.i64": "q" for name in numbers}
        opened = [files.enter_context(open(folder / name, "wb")) for name in ("keys.bin", *codes)]  # noqa: SIM115
        self._keys: BinaryIO = opened[0]
        arrays: list[array[Any]] = [array(code) for code in codes.values()]
        self._columns = list(zip(opened[1:], arrays))

    def add(self, entry: Entry, label: int) -> None:
        key = os.fsencode(entry.key)
        self._end += len(key)
        self._keys.write(key)
        self.weighted |= entry.weight != 1.0
        row = (self._end, label, entry.weight, *entry.numbers)
        for (_, values), value in zip(self._columns, row, strict=True):
            values.append(value)
        if len(values) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        for file, values in self._columns:
            values.tofile(file)
            del values[:]


class StoredIndex(NamedTuple):
    """An index stored in a folder by `write_index`."""

    classes: tuple[str, ...]
    splits: dict[str, Path]  # the folder of each split's index
    notes: list[str]

    def sources(self, name: str, make: Callable[..., Opened], **options: Any) -> dict[str, Opened]:
        """One source per split: `make(name, classes, folder, **options)`."""
        return {split: make(f"{name} ({split})", self.classes, path, **options) for split, path in self.splits.items()}


def build_index(
    entries: Entries, files: Sequence[Path] = (), kind: str = "", numbers: Sequence[str] = (), classes: Classes = None
) -> StoredIndex:
    """The index of these entries.

    It is stored and reused while the `files` that the entries are read from stay the same; without files it is made
    each time. Without `classes`, the classes are the labels that occur, in natural order. With them, a label is a
    class's name or its index.
    """
    folder = cached_folder(kind, files, lambda folder: write_index(folder, entries, numbers, classes))
    content = read_json(folder / "index.json")
    splits = {split: folder / str(position) for position, split in enumerate(content["splits"])}
    return StoredIndex(tuple(content["classes"]), splits, content["notes"])


def cached_folder(kind: str, files: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """A folder that `build` filled from these files, made again when they change.

    Without files, or if the cache cannot be written, it is temporary and is removed when this process ends.
    """
    if files:
        state = [(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)]
        group = cache_folder() / "index" / short_hash([kind, *map(os.path.abspath, files)])
        target = group / short_hash([FORMAT, *state])
        if target.is_dir():
            return target
        with suppress(FileError):
            with atomic_path(target) as new:
                new.mkdir()
                build(new)
            for folder in group.iterdir():
                with suppress(OSError):  # another process removes it at the same time
                    if folder != target and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                        shutil.rmtree(folder, ignore_errors=True)
            return target
    target = scratch_folder()
    build(target)
    return target


def write_index(folder: Path, entries: Entries, numbers: Sequence[str], classes: Classes) -> None:
    """Write the entries, in their order, as one index per split."""
    skipped = SkippedFiles()
    codes: dict[str, int] = {}  # labels in the order in which they occur; replaced by class indices at the end
    writers: dict[str, SplitWriter] = {}
    with ExitStack() as files:
        for entry in entries(skipped):
            writer = writers.get(entry.split)
            if writer is None:
                writer = writers[entry.split] = SplitWriter(folder / str(len(writers)), numbers, files)
            writer.add(entry, codes.setdefault(entry.label, len(codes)))
        for writer in writers.values():
            writer.flush()
    known = classes or tuple(sorted({class_name(label) for label in codes}, key=natural_key))
    indices = class_indices(codes, known)
    for writer in writers.values():
        with open(writer.folder / "labels.i32", "r+b") as file:
            while chunk := file.read(4 * CHUNK):
                file.seek(-len(chunk), os.SEEK_CUR)
                file.write(indices[np.frombuffer(chunk, "i4")].tobytes())
        if not writer.weighted:
            (writer.folder / "weights.f32").unlink()
    content = {"classes": known, "splits": list(writers), "notes": skipped.notes()}
    (folder / "index.json").write_text(json.dumps(content))


def class_indices(labels: Iterable[str], classes: tuple[str, ...]) -> NDArray[np.int32]:
    """The class index of each label, which is a class's name or its index."""
    known = {name: index for index, name in enumerate(classes)}
    indices = []
    for label in labels:
        name = class_name(label)
        index = known.get(name, int(name) if name.isdecimal() and len(name) < 10 else -1)
        if not 0 <= index < len(classes):
            known_names = f"one of the {len(classes)} listed class names"
            raise DataError(f"label {short_repr(label)} is neither {known_names} nor an index below {len(classes)}")
        indices.append(index)
    return np.array(indices, "i4")
