"""The dataset that a path, a pattern, a URL, a name or an object means; the format is told from what is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.folder import open_folder, open_unlabeled
from vitruvian.data.names import is_pattern, matching, split_name
from vitruvian.data.pixels import cifar_folders, idx_files, open_cifar, open_digits, open_idx
from vitruvian.data.releases import open_task
from vitruvian.data.remote import open_stream
from vitruvian.data.shards import open_tar
from vitruvian.data.sources import Dataset, Source, make_dataset
from vitruvian.data.tables import holds_images, open_manifest, open_parquet
from vitruvian.errors import DataError, nearest
from vitruvian.progress import print_status
from vitruvian.tasks import TASKS, find_task

BUILT_IN = {"digits": open_digits}
"""Datasets that the package carries. A folder of the same name is meant by `./digits`."""


def files_below(ending: str, folder: Path) -> list[Path]:
    """Files of this ending in a folder, in its `data` and in its splits; none where there are class folders too."""
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if any(path.name != "data" and not split_name(path.name) for path in inner):
        return []
    return [path for place in (folder, *inner) for path in sorted(place.glob(f"[!.]*{ending}")) if path.is_file()]


class Format(NamedTuple):
    """A row of the table of formats."""

    open: Callable[[list[Path], str], Dataset]
    """The dataset in these files or folders; the second argument is its name in messages."""
    in_folder: Callable[[Path], list[Path]] = lambda folder: []
    """What of the format a folder holds, to be opened; nothing where the folder is of another format."""
    endings: tuple[str, ...] = ()
    """Of single files."""
    accepts: Callable[[list[Path]], bool] = bool
    """Whether files of these endings are of the format, where endings alone do not print_status."""
    several: bool = False
    """A pattern may stand for several files that are one dataset."""


FORMATS = {
    # the first that fits is taken
    "CIFAR": Format(open_cifar, cifar_folders, (".tar.gz", ".tgz")),
    "IDX": Format(open_idx, lambda folder: [folder] if idx_files(folder) else []),
    "tar shards": Format(open_tar, partial(files_below, ".tar"), (".tar",), several=True),
    "Parquet": Format(open_parquet, partial(files_below, ".parquet"), (".parquet",), holds_images, several=True),
    "manifest": Format(open_manifest, endings=(".csv", ".tsv", ".parquet")),
    "class folders": Format(open_folder, lambda folder: [folder]),
}


def open_dataset(data: object, *, split: str | None = None) -> Dataset:
    """The dataset that `data` means, or only its split of this name.

    `data` is a path, a pattern of shards or Parquet files, a URL of shards, `digits`, or the name of a task; or an
    object: a map-style `torch.utils.data.Dataset`, a dataset of Hugging Face, or a mapping from splits to such.
    """
    try:
        found = opened(data)
    except OSError as error:
        raise DataError(f"{error.filename or data}: {(error.strerror or str(error)).lower()}") from error
    return found if split is None else found.only(split)


def open_images(data: object, *, split: str | None = None) -> Mapping[str, Source]:
    """The splits of a dataset for work that needs no labels: also a folder of images that are in no classes."""
    try:
        found = open_dataset(data, split=split)
        for note in found.notes:
            print_status(f"note: {note}")
        return found.splits
    except DataError:
        folder = Path(data).expanduser() if isinstance(data, str | os.PathLike) else None
        if split is not None or folder is None or not folder.is_dir():
            raise
        if any(row.in_folder(folder) for name, row in FORMATS.items() if name != "class folders"):
            raise
        unlabeled = open_unlabeled(folder)
        if unlabeled is None:
            raise
        return {"all": unlabeled}


def opened(data: object) -> Dataset:
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Source):
        return make_dataset(data.name, {"train": data})
    if isinstance(data, str | os.PathLike):
        return open_text(os.fspath(data))
    from vitruvian.data.torch_dataset import open_datasets

    return open_datasets(data)


def open_text(text: str) -> Dataset:
    if not text.strip():
        raise DataError("the name of the data is empty; wanted a path, a URL, `digits` or a task (`.` is this folder)")
    if text in BUILT_IN:
        return BUILT_IN[text]()
    if "://" in text:
        return open_stream(text)
    path = Path(text).expanduser()
    if path.is_dir():
        return open_directory(path)
    if path.is_file():
        return open_files([path], text)
    if is_pattern(str(path)):
        return open_files(matching(str(path)), text)
    task = find_task(text)
    if task is not None:
        return open_task(task, folders=open_directory)
    near = nearest(text, [*BUILT_IN, *TASKS])
    hint = f"; did you mean {near[0]}?" if near else f"; the built-in dataset is called {', '.join(BUILT_IN)}"
    raise DataError(f"{text}: no such file or folder{hint}")


def open_directory(folder: Path) -> Dataset:
    """The dataset in a folder, of the first format that it holds."""
    for row in FORMATS.values():
        found = row.in_folder(folder)
        if found:
            return row.open(found, str(folder))
    raise AssertionError("class folders accept any folder")


def open_files(files: list[Path], name: str) -> Dataset:
    """The dataset in one file, or in several of one format."""
    endings = {"".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix for path in files}
    ending = endings.pop().lower()
    if endings:
        raise DataError(f"{name}: files of several kinds, {ending} and {', '.join(endings)}; wanted one kind")
    rows = [row for row in FORMATS.values() if ending in row.endings]
    for row in rows:
        if (row.several or len(files) == 1) and row.accepts(files):
            return row.open(files, name)
    if rows and len(files) > 1:
        many = " or ".join(ending for row in FORMATS.values() if row.several for ending in row.endings)
        raise DataError(f"{name}: {len(files)} files; a pattern may stand for {many} files, not for {ending}")
    kind = "a single image" if ending in EXTENSIONS else "not a format of datasets known here"
    raise DataError(
        f"{name}: {kind}; wanted a folder with a folder for each class, a manifest (.csv, .parquet), shards (.tar), "
        "or a folder of CIFAR, IDX or Parquet files"
    )
