"""The data set that a path, a pattern, a URL or a built-in name means; the kind is told from what is there."""

from __future__ import annotations

from pathlib import Path

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.sources.base import Dataset
from vitruvian.data.sources.formats.cifar import is_cifar, open_cifar
from vitruvian.data.sources.formats.folder import open_folder
from vitruvian.data.sources.formats.manifest import open_manifest
from vitruvian.data.sources.formats.parquet import image_columns, open_parquet
from vitruvian.data.sources.formats.pixels import idx_files, open_digits, open_idx
from vitruvian.data.sources.formats.tar import open_tar
from vitruvian.data.sources.names import is_pattern, matching, split_name
from vitruvian.data.sources.releases import open_task
from vitruvian.data.sources.remote.stream import open_stream
from vitruvian.errors import DataError, nearest
from vitruvian.tasks import TASKS, find_task

BUILT_IN = {"digits": open_digits}
"""Data sets that the package carries. A folder of the same name is meant by `./digits`."""


def open_dataset(data: str | Path, *, split: str | None = None) -> Dataset:
    """The data set that `data` means, or only its split of this name.

    `data` is a path, a pattern of shards or Parquet files, a URL of shards, `digits`, or the name of a task.
    """
    text = str(data)
    try:
        found = opened(text)
    except OSError as error:
        raise DataError(f"{error.filename or text}: {(error.strerror or str(error)).lower()}") from error
    return found if split is None else found.only(split)


def opened(text: str) -> Dataset:
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
    hint = f"; did you mean {near[0]}?" if near else f"; the built-in data set is called {', '.join(BUILT_IN)}"
    raise DataError(f"{text}: no such file or folder{hint}")


def open_directory(folder: Path) -> Dataset:
    """The data set in a folder: of CIFAR, of IDX files, of shards, of Parquet files, or of folders of images."""
    for place in (folder, *folder.glob("cifar-10*/")):
        if is_cifar(place):
            return open_cifar(place)
    if idx_files(folder):
        return open_idx(folder)
    for ending, opener in ((".tar", open_tar), (".parquet", open_parquet)):
        files = files_below(folder, ending)
        if files:
            return opener(files, str(folder))
    return open_folder(folder)


def files_below(folder: Path, ending: str) -> list[Path]:
    """Files of this ending in a folder, in its `data` and in its splits; none where there are class folders too."""
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if any(path.name != "data" and not split_name(path.name) for path in inner):
        return []
    return [path for place in (folder, *inner) for path in sorted(place.glob(f"[!.]*{ending}"))]


def open_files(files: list[Path], name: str) -> Dataset:
    """The data set in one file, or in several of one kind."""
    endings = {"".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix for path in files}
    ending = endings.pop().lower()
    if endings:
        raise DataError(f"{name}: files of several kinds, {ending} and {', '.join(endings)}; wanted one kind")
    if ending == ".tar":
        return open_tar(files, name)
    if ending == ".parquet" and (len(files) > 1 or image_columns(files[0])):
        return open_parquet(files, name)
    if len(files) > 1:
        raise DataError(
            f"{name}: {len(files)} files; a pattern may stand for .tar or .parquet files, not for {ending or 'others'}"
        )
    if ending in (".csv", ".tsv", ".parquet"):
        return open_manifest(files[0])
    if ending in (".tar.gz", ".tgz"):
        return open_cifar(files[0])
    kind = "a single image" if ending in EXTENSIONS else "not a kind of data set known here"
    raise DataError(
        f"{name}: {kind}; wanted a folder with a folder for each class, a manifest (.csv, .parquet), shards (.tar), "
        "or a folder of CIFAR, IDX or Parquet files"
    )
