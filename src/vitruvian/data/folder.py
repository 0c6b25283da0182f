"""Image files in folders: a folder for each class, lists of `path label`, or just all images below a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from vitruvian.data.decode import EXTENSIONS, RawImage
from vitruvian.data.index import Entry, IndexedSource, indexed
from vitruvian.data.names import class_name, natural, split_name
from vitruvian.data.sources import Dataset, LeftOut, inside, make_dataset, read_file
from vitruvian.errors import DataError
from vitruvian.text import printable


class FolderSource(IndexedSource):
    """The images below one folder; a sample's key is its path from there."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, root: Path) -> None:
        super().__init__(name, classes, folder)
        self.root = root

    def read(self, index: int) -> RawImage:
        return read_file(os.path.join(self.root, self.key(index)))


def open_folder(folders: list[Path], name: str) -> Dataset:
    """The dataset in a folder of folders. Each time the folder is listed anew, as nothing tells of changes in it."""
    root = folders[0]
    splits = split_folders(root)
    stored = indexed(partial(entries, root, splits))
    if not stored.classes:
        raise DataError(no_classes(root, stored.notes))
    sources = {
        split: FolderSource(f"{name}/{split}" if splits else name, stored.classes, index, root=root)
        for split, index in stored.splits.items()
    }
    return make_dataset(name, sources, stored.notes, divided=bool(splits))


def open_unlabeled(folder: Path) -> FolderSource | None:
    """All images below a folder, whose only class has an empty name; None where there are none."""
    start = len(os.path.join(folder, ""))
    stored = indexed(lambda left_out: (Entry("all", path[start:], "") for path in images(folder, left_out)))
    return FolderSource(str(folder), ("",), stored.splits["all"], root=folder) if stored.splits else None


def split_folders(root: Path) -> dict[Path, str]:
    """The folders of `root` that are splits: called like one, and with folders inside, unlike a class 'train'."""
    folders = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    named = {path: split for path in folders if (split := split_name(path.name))}
    found = {path: split for path, split in named.items() if any(inside.is_dir() for inside in path.iterdir())}
    if named and not found and len(named) == len(folders):
        names = " and ".join(path.name for path in named)
        raise DataError(
            f"{root}: no class folders in {names}, so the images have no labels; wanted a folder for each class"
        )
    if len(set(found.values())) < len(found):
        raise DataError(f"{root}: {' and '.join(path.name for path in found)} mean the same split; keep one of them")
    return found


def entries(root: Path, splits: dict[Path, str], left_out: LeftOut) -> Iterator[Entry]:
    """The images, split by split, class by class in natural order, and by name inside a class."""
    for path in sorted(root.iterdir()) if splits else ():
        if path not in splits:
            left_out.add("items beside the splits", path.name)
    start = len(os.path.join(root, ""))
    for top, split in (splits or {root: "train"}).items():
        places = sorted(top.iterdir(), key=lambda path: natural(path.name))
        listed = {identity(path) for path in (root, top, *places) if path.is_dir()}  # no class by a link from another
        for place in places:
            relative = os.path.relpath(place, root)
            if place.name.startswith("."):
                left_out.add("hidden items", relative)
            elif not place.is_dir():
                left_out.add("files outside the class folders", relative)
            else:
                label, count = class_name(place.name), 0
                for image in images(place, left_out, set(listed)):
                    count += 1
                    yield Entry(split, image[start:], label)
                if not count:
                    left_out.add("class folders without an image", relative)


def images(folder: str | Path, left_out: LeftOut, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Paths of the images at any depth, sorted in each folder; links are followed, but no folder is listed twice."""
    seen = set() if seen is None else seen
    seen.add(identity(folder))
    with os.scandir(folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        if item.name.startswith("."):
            left_out.add("hidden items", item.path)
        elif os.path.isdir(item.path):  # False, not an error, for a link that leads to itself
            if identity(item.path) in seen:
                left_out.add("links to a folder that is listed already", item.path)
            else:
                yield from images(item.path, left_out, seen)
        elif os.path.splitext(item.name)[1].lower() not in EXTENSIONS:
            left_out.add("files that are not images", item.path)
        elif not os.path.isfile(item.path):
            left_out.add("links that lead nowhere, or special files", item.path)
        else:
            yield item.path


def identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def no_classes(root: Path, notes: list[str]) -> str:
    """Why a folder gives no classes, and what to do about it."""
    files = [path for path in root.iterdir() if path.is_file() and not path.name.startswith(".")]
    loose = [path for path in files if path.suffix.lower() in EXTENSIONS]
    tables = [path.name for path in files if path.suffix.lower() in (".csv", ".tsv", ".parquet")]
    if tables:
        return f"{root}: a list of images, {tables[0]}, but no class folders; pass {root / tables[0]} itself"
    if loose:
        return (
            f"{root}: {len(loose)} images without labels; put each into a folder named after its class, "
            "or write a CSV file with the columns path and label"
        )
    seen = "; ".join(notes) or "nothing at all"
    return f"{root}: no images in class folders, found {seen}; wanted a folder of images for each class"


def open_lists(name: str, folder: Path, lists: Mapping[str, Path], *, classes: int = 0) -> Dataset:
    """The dataset of one list a split; labels are numbers from 0, or those that occur where `classes` is 0.

    Paths begin at the list's folder or at one above it, up to `folder`.
    """
    known = tuple(map(str, range(classes))) if classes else None
    return listed(name, folder, list_entries(folder, lists), classes=known)


def list_entries(folder: Path, lists: Mapping[str, Path]) -> Iterator[Entry]:
    for split, path in lists.items():
        start = ""
        for number, (image, label) in enumerate(read_list(path)):
            image = inside(path, image)
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
    source: Callable[..., FolderSource] = FolderSource,
) -> Dataset:
    """The dataset of these entries, whose keys are paths below `root`; classes as `write_index` takes them."""
    stored = indexed(lambda _: entries, classes=classes)
    splits = {
        split: source(f"{name} ({split})", stored.classes, index, root=root) for split, index in stored.splits.items()
    }
    return make_dataset(name, splits)


def class_folders(folders: Iterable[Path]) -> list[Path]:
    """Folders that are not hidden, in natural order."""
    return sorted((path for path in folders if path.is_dir() and path.name[0] != "."), key=lambda p: natural(p.name))


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files as they are given, and the images in each folder and below it, sorted.

    In folders, an image is known by its ending, and what is hidden (a name that starts with a dot) is left out.
    """
    found: list[str] = []
    for given in paths:
        path = os.fspath(given)
        if not os.path.isdir(path):
            found.append(path)
            continue
        try:
            below = sorted(images(path, LeftOut()))
        except OSError as error:
            raise DataError(f"{printable(str(error.filename))}: cannot list this folder ({error.strerror})") from error
        if not below:
            endings = " ".join(sorted(EXTENSIONS))
            raise DataError(f"{printable(path)}: no images in this folder or below it (looked for {endings})")
        found += below
    return found
