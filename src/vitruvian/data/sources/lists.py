"""Lists of images: a line of `path label` for each, as VTAB-1k and many other releases have them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vitruvian.data.decode import printable
from vitruvian.data.sources.base import DataSet, LeftOut, Source, data_set, natural
from vitruvian.data.sources.cache import fill, scratch_folder
from vitruvian.data.sources.folder import FolderSource
from vitruvian.data.sources.index import Entry, read_index, write_index
from vitruvian.errors import DataError


def open_lists(name: str, folder: Path, lists: Mapping[str, Path], *, classes: int = 0) -> DataSet:
    """The data set of one list a split; labels are numbers from 0, or those that occur where `classes` is 0.

    Paths begin at the list's folder or at one above it, up to `folder`.
    """
    known = tuple(map(str, range(classes))) if classes else None
    return listed(name, folder, list_entries(folder, lists), classes=known)


def list_entries(folder: Path, lists: Mapping[str, Path]) -> Iterator[Entry]:
    for split, path in lists.items():
        start = ""
        for number, (image, label) in enumerate(read_list(path)):
            if not number:
                start = os.path.relpath(beginning(path, image, folder), folder)
            yield Entry(split, os.path.normpath(os.path.join(start, image)), label)


def read_list(path: Path) -> Iterator[tuple[str, str]]:
    """The pairs of path and label; a path may hold spaces."""
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, 1):
                words = line.split()
                if not words or line.startswith("#"):
                    continue
                if len(words) < 2:
                    raise DataError(f"{path}, line {number}: {printable(line.strip())!r} is not a path and a label")
                yield line.strip()[: -len(words[-1])].rstrip(), words[-1]
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not text in UTF-8 ({error}); get it again") from error


def beginning(path: Path, image: str, folder: Path) -> Path:
    """Where the paths of a list begin, told from its first image."""
    if Path(image).is_absolute() or ".." in Path(image).parts:
        raise DataError(f"{path}: the path {printable(image)} leads out of {folder}")
    places = [path.parent, *(place for place in path.parent.parents if place.is_relative_to(folder))]
    for place in places:
        if (place / image).exists():
            return place
    raise DataError(f"{path}: its first image, {printable(image)}, is not in {places[0]}; unpack the images there")


def listed(
    name: str,
    root: Path,
    entries: Iterable[Entry],
    *,
    classes: tuple[str, ...] | None = None,
    source: type[FolderSource] = FolderSource,
) -> DataSet:
    """The data set of these entries, whose keys are paths below `root`; classes as `write_index` takes them."""
    folder = scratch_folder()
    left_out = LeftOut()
    fill(folder, lambda into: write_index(into, entries, left_out=left_out, classes=classes))
    stored = read_index(folder)
    splits: dict[str, Source] = {
        split: source(f"{name} ({split})", stored.classes, index, root=root) for split, index in stored.splits.items()
    }
    if not splits:
        raise DataError(f"{root}: there are no images in it")
    return data_set(name, splits)


def in_order(folders: Iterable[Path]) -> list[Path]:
    """Folders that are not hidden, in natural order."""
    return sorted((path for path in folders if path.is_dir() and path.name[0] != "."), key=lambda p: natural(p.name))
