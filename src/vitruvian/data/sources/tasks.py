"""A task by name: the opener of its layout, and what to do where its images are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vitruvian.data.sources.base import DataSet
from vitruvian.data.sources.cifar import is_cifar, open_cifar
from vitruvian.data.sources.imagenet import open_imagenet, open_numbered, open_watermarked, open_wordnet
from vitruvian.data.sources.lists import open_lists
from vitruvian.data.sources.releases import (
    open_flowers,
    open_mafw,
    open_objectnet,
    open_omni,
    open_pets,
    open_vizwiz,
)
from vitruvian.errors import DataError
from vitruvian.tasks import TASKS, Task, data_root, how_to_get

VTAB_LISTS = {"train": "train800.txt", "val": "val200.txt", "test": "test.txt"}


def open_task(task: Task, root: Path | None = None, *, folders: Callable[[Path], DataSet]) -> DataSet:
    """The data set of a task below `root`, by default the usual one; `folders` opens what is no special layout."""
    root = root or data_root()
    if not task.present(root):
        raise DataError(how_to_get(task, root))
    found = opened(task, task.place(root), root, folders)
    own = {split: source for split, source in found.splits.items() if split in task.splits}
    found = replace(found, name=task.name, splits=own or found.splits)
    return replace(found, notes=(*found.notes, *unlike_release(task, found)))


def opened(task: Task, folder: Path, root: Path, folders: Callable[[Path], DataSet]) -> DataSet:
    openers: dict[str, Callable[[], DataSet]] = {
        "cifar": lambda: open_cifar(cifar_place(folder)),
        "flowers": lambda: open_flowers(folder),
        "folders": lambda: folders(folder),
        "imagenet": lambda: open_imagenet(folder),
        "lists": lambda: open_lists(
            str(folder), folder, {split: folder / name for split, name in VTAB_LISTS.items()}, classes=task.classes
        ),
        "mafw": lambda: open_mafw(folder, int(task.name[-1])),
        "numbered": lambda: open_numbered(inner(folder, "0")),
        "objectnet": lambda: open_objectnet(inner(folder, "images")),
        "omni": lambda: open_omni(folder),
        "pets": lambda: open_pets(folder),
        "vizwiz": lambda: open_vizwiz(folder),
        "watermark": lambda: open_watermarked(folder, TASKS["imagenet"].place(root)),
        "wordnet": lambda: open_wordnet(inner(folder, "n[0-9]*")),
    }
    return openers[task.layout]()


def cifar_place(folder: Path) -> Path:
    """The folder of CIFAR's files, or the original archive."""
    for place in (folder, *sorted(folder.glob("cifar-10*/"))):
        if is_cifar(place):
            return place
    return next(iter(sorted(folder.glob("cifar-10*.tar.gz"))), folder)


def inner(folder: Path, pattern: str) -> Path:
    """The folder itself where the pattern matches in it, or else the folder inside that the archive unpacked to."""
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if next(place.glob(pattern), None) is not None:
            return place
    return folder


def unlike_release(task: Task, found: DataSet) -> list[str]:
    """What differs from the release, so that numbers are not taken for those of the whole task."""
    lines = []
    for split, wanted in task.splits.items():
        count = len(found.splits[split]) if split in found.splits else 0
        if wanted and count != wanted:
            lines.append(f"{task.name}: {count:,} images in {split}, the release has {wanted:,}")
    if task.classes and len(found.classes) != task.classes:
        lines.append(f"{task.name}: {len(found.classes):,} classes, the release has {task.classes:,}")
    return lines
