"""The table of dataset formats, and `open_dataset`, which recognizes the format of its argument."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.folder import open_folder, open_unlabeled
from vitruvian.data.names import is_pattern, match_files, split_name
from vitruvian.data.pixels import find_cifar, find_idx, open_cifar, open_digits, open_idx
from vitruvian.data.releases import open_task
from vitruvian.data.remote import open_url
from vitruvian.data.shards import open_shards
from vitruvian.data.sources import Dataset, Source, make_dataset
from vitruvian.data.tables import contains_images, open_manifest, open_parquet
from vitruvian.errors import DataError, nearest
from vitruvian.progress import print_status
from vitruvian.tasks import TASKS, find_task

BUILT_IN = {"digits": open_digits}
"""Datasets in the package. To open a folder of the same name, write `./digits`."""


def find_files(extension: str, folder: Path) -> list[Path]:
    """Files with this extension in a folder, its `data` and its splits; none if there are class folders too."""
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if any(path.name != "data" and not split_name(path.name) for path in inner):
        return []
    return [path for parent in (folder, *inner) for path in sorted(parent.glob(f"[!.]*{extension}")) if path.is_file()]


class Format(NamedTuple):
    """A row of the table of formats."""

    open: Callable[[list[Path], str], Dataset]
    """Opens the dataset in these files or folders; the second argument is its name in messages."""
    in_folder: Callable[[Path], list[Path]] = lambda folder: []
    """Paths to open in a folder of this format; empty for a folder of another format."""
    extensions: tuple[str, ...] = ()
    """Extensions of single files."""
    accepts: Callable[[list[Path]], bool] = bool
    """Whether files with these extensions are of the format, if the extension does not decide it."""
    several: bool = False
    """Whether several files, given by a pattern, may form one dataset."""


FORMATS = {
    # the first that matches is used
    "CIFAR": Format(open_cifar, find_cifar, (".tar.gz", ".tgz")),
    "IDX": Format(open_idx, lambda folder: [folder] if find_idx(folder) else []),
    "tar shards": Format(open_shards, partial(find_files, ".tar"), (".tar",), several=True),
    "Parquet": Format(open_parquet, partial(find_files, ".parquet"), (".parquet",), contains_images, several=True),
    "manifest": Format(open_manifest, extensions=(".csv", ".tsv", ".parquet")),
    "class folders": Format(open_folder, lambda folder: [folder]),
}


def open_dataset(data: object, *, split: str | None = None) -> Dataset:
    """Open a dataset in any supported format.

    Args:
        data: A path, a pattern of shards or Parquet files, a URL of shards, `digits` or the name of a task; or an
            object: a map-style `torch.utils.data.Dataset`, a Hugging Face dataset, or a mapping from splits to such.
        split: Only this split.

    Raises:
        DataError: The data does not exist, is of no supported format, or is damaged.
    """
    try:
        if isinstance(data, Dataset):
            dataset = data
        elif isinstance(data, Source):
            dataset = make_dataset(data.name, {"train": data})
        elif isinstance(data, str | os.PathLike):
            dataset = open_name(os.fspath(data))
        else:
            from vitruvian.data.torch_dataset import open_datasets

            dataset = open_datasets(data)
    except OSError as error:
        raise DataError((error.strerror or str(error)).lower(), where=error.filename or data) from error
    return dataset if split is None else dataset.only(split)


def open_images(data: object, *, split: str | None = None) -> Mapping[str, Source]:
    """The splits of a dataset for work without labels; also accepts a folder of images without class folders."""
    try:
        dataset = open_dataset(data, split=split)
        for note in dataset.notes:
            print_status(f"note: {note}")
        return dataset.splits
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


def open_name(text: str) -> Dataset:
    if not text.strip():
        raise DataError("the name of the data is empty", hint="pass a path (`.` is this folder), a URL or a task")
    if text in BUILT_IN:
        return BUILT_IN[text]()
    if "://" in text:
        return open_url(text)
    path = Path(text).expanduser()
    if path.is_dir():
        return open_directory(path)
    if path.is_file():
        return open_files([path], text)
    if is_pattern(str(path)):
        return open_files(match_files(str(path)), text)
    task = find_task(text)
    if task is not None:
        return open_task(task, folders=open_directory)
    near = nearest(text, [*BUILT_IN, *TASKS])
    hint = f"did you mean {near[0]}?" if near else f"the built-in dataset is called {', '.join(BUILT_IN)}"
    raise DataError("no such file or folder", where=text, hint=hint)


def open_directory(folder: Path) -> Dataset:
    """The dataset in a folder, of the first format that matches."""
    for row in FORMATS.values():
        paths = row.in_folder(folder)
        if paths:
            return row.open(paths, str(folder))
    raise AssertionError("class folders accept any folder")


def open_files(files: list[Path], name: str) -> Dataset:
    """The dataset in one file, or in several of one format."""
    extensions = {"".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix for path in files}
    extension = extensions.pop().lower()
    if extensions:
        raise DataError(f"files of several kinds: {extension} and {', '.join(extensions)}", where=name)
    rows = [row for row in FORMATS.values() if extension in row.extensions]
    for row in rows:
        if (row.several or len(files) == 1) and row.accepts(files):
            return row.open(files, name)
    if rows and len(files) > 1:
        several = " or ".join(ext for row in FORMATS.values() if row.several for ext in row.extensions)
        raise DataError(f"{len(files)} files; a pattern may match {several} files, not {extension}", where=name)
    raise DataError(
        "a single image" if extension in EXTENSIONS else "not a known dataset format",
        where=name,
        hint="pass a folder with one folder per class, a manifest (.csv, .parquet), shards (.tar), or a folder of "
        "CIFAR, IDX or Parquet files",
    )
