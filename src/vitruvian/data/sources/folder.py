"""A folder with a folder of images for each class, with or without folders for the splits above."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.sources.base import (
    DataSet,
    LeftOut,
    RawImage,
    class_name,
    data_set,
    natural,
    read_file,
    split_name,
)
from vitruvian.data.sources.cache import fill, scratch_folder
from vitruvian.data.sources.index import Entry, Index, IndexedSource, read_index, write_index
from vitruvian.errors import DataError


class FolderSource(IndexedSource):
    """The images below one folder; an example's key is its path from there."""

    def __init__(self, name: str, classes: tuple[str, ...], index: Index, *, root: Path) -> None:
        super().__init__(name, classes, index)
        self.root = root

    def read(self, index: int) -> RawImage:
        return read_file(self.root / self.key(index))


def open_folder(root: Path) -> DataSet:
    """The data set in a folder of folders. Each time the folder is listed anew, as nothing tells of changes in it."""
    splits = split_folders(root)
    left_out = LeftOut()
    folder = scratch_folder()
    fill(folder, lambda into: write_index(into, entries(root, splits, left_out), left_out=left_out))
    stored = read_index(folder)
    if not stored.classes:
        raise DataError(no_classes(root, left_out))
    sources = {
        split: FolderSource(f"{root}/{split}" if splits else str(root), stored.classes, index, root=root)
        for split, index in stored.splits.items()
    }
    return data_set(str(root), sources, stored.notes)


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
        for place in sorted(top.iterdir(), key=lambda path: natural(path.name)):
            relative = os.path.relpath(place, root)
            if place.name.startswith("."):
                left_out.add("hidden items", relative)
            elif not place.is_dir():
                left_out.add("files outside the class folders", relative)
            else:
                label, count = class_name(place.name), 0
                for image in images(place, left_out, (identity(place),)):
                    count += 1
                    yield Entry(split, image[start:], label)
                if not count:
                    left_out.add("class folders without an image", relative)


def images(folder: Path, left_out: LeftOut, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Paths of the images at any depth, sorted; a link that leads back to a folder above is not followed."""
    with os.scandir(folder) as found:
        items = sorted(found, key=lambda item: item.name)
    for item in items:
        if item.name.startswith("."):
            left_out.add("hidden items", item.path)
        elif item.is_dir():
            here = identity(item.path)
            if here in above:
                left_out.add("links to a folder above", item.path)
            else:
                yield from images(Path(item.path), left_out, (*above, here))
        elif os.path.splitext(item.name)[1].lower() not in EXTENSIONS:
            left_out.add("files that are not images", item.path)
        elif not item.is_file():
            left_out.add("links that lead nowhere, or special files", item.path)
        else:
            yield item.path


def identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def no_classes(root: Path, left_out: LeftOut) -> str:
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
    seen = "; ".join(left_out.lines()) or "nothing at all"
    return f"{root}: no images in class folders, found {seen}; wanted a folder of images for each class"
