"""The table of dataset formats, and `open_dataset`, which recognizes the format of its argument."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.folder import extract_zip, open_folder, open_unlabeled
from vitruvian.data.names import is_pattern, match_files, split_name
from vitruvian.data.pixels import find_cifar, find_idx, open_cifar, open_digits, open_idx
from vitruvian.data.releases import open_task
from vitruvian.data.remote import open_url
from vitruvian.data.shards import open_shards
from vitruvian.data.sources import Dataset, Source, make_dataset, with_targets
from vitruvian.data.tables import (
    contains_images,
    find_saved,
    open_coco,
    open_frame,
    open_manifest,
    open_parquet,
    open_saved,
)
from vitruvian.errors import DataError, nearest, parsing
from vitruvian.progress import print_notes
from vitruvian.targets import AUTO, KINDS, TargetSpec, parse_target
from vitruvian.tasks import all_tasks, find_task
from vitruvian.text import describe_error

BUILT_IN = {"digits": open_digits}  # datasets in the package. To open a folder of the same name, write `./digits`


def find_files(extension: str, folder: Path) -> list[Path]:
    """Files with this extension in a folder, its `data` and its splits; none if there are class folders too."""
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if any(path.name != "data" and not split_name(path.name) for path in inner):
        return []
    return [path for parent in (folder, *inner) for path in sorted(parent.glob(f"[!.]*{extension}")) if path.is_file()]


class Format(NamedTuple):
    """A row of the table of formats."""

    open: Callable[..., Dataset]  # from files or folders, and the dataset's name in messages
    in_folder: Callable[[Path], list[Path]] = lambda folder: []  # what to open in such a folder; empty for others
    extensions: tuple[str, ...] = ()  # extensions of single files
    accepts: Callable[[list[Path]], bool] = bool  # whether files are of the format, if the extension does not decide
    several: bool = False  # whether several files, given by a pattern, may form one dataset
    states_target: bool = False  # whether `open` takes a TargetSpec, as such files can state several kinds of targets

    def dataset(self, paths: list[Path], name: str, target: TargetSpec) -> Dataset:
        return self.open(paths, name, target) if self.states_target else self.open(paths, name)


def open_zip(files: list[Path], name: str, target: TargetSpec = AUTO) -> Dataset:
    """The dataset in a zip archive: what its folder would be, or the only table in it."""
    folder, notes = extract_zip(files[0])
    try:
        dataset = open_directory(folder, name, target)
    except DataError:
        extensions = {extension for row in ("manifest", "COCO") for extension in FORMATS[row].extensions}
        tables = [path for path in folder.iterdir() if path.suffix.lower() in extensions]
        if len(tables) != 1:
            raise
        dataset = open_files(tables, name, target)
    return replace(dataset, notes=(*notes, *dataset.notes))


FORMATS = {
    # the first that matches is used
    "CIFAR": Format(open_cifar, find_cifar, (".tar.gz", ".tgz")),
    "IDX": Format(open_idx, lambda folder: [folder] if find_idx(folder) else []),
    "saved datasets": Format(open_saved, find_saved, states_target=True),
    "tar shards": Format(open_shards, partial(find_files, ".tar"), (".tar",), several=True),
    "Parquet": Format(open_parquet, partial(find_files, ".parquet"), (".parquet",), contains_images, True, True),
    "manifest": Format(open_manifest, extensions=(".csv", ".tsv", ".jsonl", ".parquet"), states_target=True),
    "COCO": Format(open_coco, extensions=(".json",), states_target=True),
    "zip": Format(open_zip, extensions=(".zip",), states_target=True),
    "class folders": Format(open_folder, lambda folder: [folder]),
}


def open_dataset(
    data: object, *, split: str | None = None, target: str = "auto", accepts: Iterable[str] = ("single",)
) -> Dataset:
    """Open a dataset in any supported format.

    Args:
        data: A path, a pattern of shards or Parquet files, a URL of shards, `digits` or the name of a task; or an
            object: a map-style `torch.utils.data.Dataset`, a Hugging Face dataset, a mapping from splits to such, or a
            data frame of pandas or polars with the columns of a manifest.
        split: Only this split.
        target: What to predict: a key of `targets.KINDS`, perhaps with columns of a manifest, such as
            "number:age,weight"; by default what the data states.
        accepts: The kinds of targets that the caller can work with.

    Raises:
        DataError: The data does not exist, is of no supported format, or is damaged.
    """
    is_name, spec = isinstance(data, str | os.PathLike), parse_target(target)
    with parsing(data, DataError) if is_name else nullcontext():
        try:
            if isinstance(data, Dataset):
                dataset = data
            elif isinstance(data, Source):
                dataset = make_dataset(data.name, {"train": data})
            elif isinstance(data, str | os.PathLike):
                dataset = open_name(os.fspath(data), spec)
            elif hasattr(data, "__arrow_c_stream__"):
                dataset = open_frame(data, spec)
            else:
                from vitruvian.data.torch_dataset import open_datasets

                dataset = open_datasets(data)
        except OSError as error:
            raise DataError(describe_error(error).lower(), where=error.filename or data) from error
        dataset = with_targets(dataset, spec, tuple(accepts))
    return dataset if split is None else dataset.only(split)


def open_images(data: object, *, split: str | None = None) -> Mapping[str, Source]:
    """The splits of a dataset for work without labels; also accepts a folder of images without class folders."""
    try:
        dataset = open_dataset(data, split=split, accepts=KINDS)
        print_notes(dataset.notes)
        return dataset.splits
    except DataError:
        folder = Path(data).expanduser() if isinstance(data, str | os.PathLike) else None
        if folder is not None and folder.suffix.lower() == ".zip" and folder.is_file():
            folder, _ = extract_zip(folder)
        if split is not None or folder is None or not folder.is_dir():
            raise
        if any(row.in_folder(folder) for name, row in FORMATS.items() if name != "class folders"):
            raise
        unlabeled = open_unlabeled(folder)
        if unlabeled is None:
            raise
        return {"all": unlabeled}


def open_name(text: str, target: TargetSpec = AUTO) -> Dataset:
    if not text.strip():
        raise DataError("the name of the data is empty", hint="pass a path (`.` is this folder), a URL or a task")
    if text in BUILT_IN:
        return BUILT_IN[text]()
    if "://" in text:
        return open_url(text)
    path = Path(text).expanduser()
    if path.is_dir():
        return open_directory(path, target=target)
    if path.is_file():
        return open_files([path], text, target)
    if is_pattern(str(path)):
        return open_files(match_files(str(path)), text, target)
    task = find_task(text)
    if task is not None:
        return open_task(task, folders=open_directory)
    near = nearest(text, [*BUILT_IN, *all_tasks()])
    hint = f"did you mean {near[0]}?" if near else f"the built-in dataset is called {', '.join(BUILT_IN)}"
    raise DataError("no such file or folder", where=text, hint=hint)


def open_directory(folder: Path, name: str = "", target: TargetSpec = AUTO) -> Dataset:
    """The dataset in a folder, of the first format that matches."""
    for row in FORMATS.values():
        paths = row.in_folder(folder)
        if paths:
            return row.dataset(paths, name or str(folder), target)
    raise AssertionError("class folders accept any folder")


def open_files(files: list[Path], name: str, target: TargetSpec = AUTO) -> Dataset:
    """The dataset in one file, or in several of one format."""
    extensions = {"".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix for path in files}
    extension = extensions.pop().lower()
    if extensions:
        raise DataError(f"files of several kinds: {extension} and {', '.join(extensions)}", where=name)
    rows = [row for row in FORMATS.values() if extension in row.extensions]
    for row in rows:
        if (row.several or len(files) == 1) and row.accepts(files):
            return row.dataset(files, name, target)
    if rows and len(files) > 1:
        several = " or ".join(ext for row in FORMATS.values() if row.several for ext in row.extensions)
        raise DataError(f"{len(files)} files; a pattern may match {several} files, not {extension}", where=name)
    if extension in (".rar", ".7z"):
        raise DataError(f"a {extension} archive", where=name, hint="unpack it and pass the folder")
    raise DataError(
        "a single image" if extension in EXTENSIONS else "not a known dataset format",
        where=name,
        hint="pass a folder with one folder per class, a manifest (.csv, .jsonl, .parquet), COCO JSON, a .zip, "
        "shards (.tar), or a folder of CIFAR, IDX or Parquet files",
    )
