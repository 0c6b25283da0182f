"""CIFAR-10 and CIFAR-100 in their two original formats, unpacked or in the original archive.

The binary version is read as it is. Pickles and archives are written once into the cache in the binary version:
a record is the label (CIFAR-100: coarse, then fine) and three planes of 32 x 32 pixels.
"""

from __future__ import annotations

import io
import lzma
import pickle
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitruvian.data.sources.base import Dataset, Source, make_dataset
from vitruvian.data.sources.formats.pixels import RecordSource, records_in
from vitruvian.data.sources.index import derived
from vitruvian.data.sources.names import parse_classes
from vitruvian.errors import DataError
from vitruvian.files import read_text
from vitruvian.text import describe_error

PIXELS = 3 * 32 * 32
MAX_ARCHIVE_BYTES = 2**29
"""Unpacked; the largest original is CIFAR-100's with 185 MB."""


@dataclass(frozen=True)
class Layout:
    """What the files of a dataset are called; in the binary version each data file ends in `.bin`."""

    train: tuple[str, ...]
    test: str
    names: str
    """File of class names in the binary version."""
    meta: str
    """File of class names among the pickles."""
    names_key: bytes
    label_keys: tuple[bytes, ...]
    """Of the labels in a pickle, in the order of a record's first bytes; the last is the one learned."""

    @property
    def data(self) -> tuple[str, ...]:
        return (*self.train, self.test)


LAYOUTS = (
    Layout(
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        names="batches.meta.txt",
        meta="batches.meta",
        names_key=b"label_names",
        label_keys=(b"labels",),
    ),
    Layout(
        train=("train",),
        test="test",
        names="fine_label_names.txt",
        meta="meta",
        names_key=b"fine_label_names",
        label_keys=(b"coarse_labels", b"fine_labels"),
    ),
)


def cifar_folders(folder: Path) -> list[Path]:
    """The folder itself or the one that the archive unpacked to, if it has files of CIFAR."""
    for place in (folder, *sorted(folder.glob("cifar-10*/"))):
        if any(binary_files(place, layout) or pickles(place, layout) for layout in LAYOUTS):
            return [place]
    return []


def binary_files(folder: Path, layout: Layout) -> list[Path]:
    names = [f"{name}.bin" for name in layout.data]
    return [folder / name for name in names if (folder / layout.names).is_file() and (folder / name).is_file()]


def pickles(folder: Path, layout: Layout) -> list[Path]:
    return [folder / name for name in layout.data if (folder / layout.meta).is_file() and (folder / name).is_file()]


def open_cifar(places: list[Path], name: str) -> Dataset:
    """The dataset in a folder of either format, or in the original archive."""
    path = places[0]
    if path.is_file():
        return open_binary(derived("cifar", [path], partial(convert, partial(archive_members, path))), name)
    for layout in LAYOUTS:
        if binary_files(path, layout):
            return open_binary(path, name)
        found = pickles(path, layout)
        if found:
            files = [path / layout.meta, *found]
            return open_binary(derived("cifar", files, partial(convert, partial(folder_members, files))), name)
    raise DataError(f"{path}: no files of CIFAR-10 or CIFAR-100 in it")


def open_binary(folder: Path, name: str) -> Dataset:
    layout = next((layout for layout in LAYOUTS if binary_files(folder, layout)), None)
    if layout is None:
        raise DataError(f"{name}: not an archive of CIFAR-10 or CIFAR-100; unpack it and pass the folder")
    classes = parse_classes(read_text(folder / layout.names, raises=DataError), str(folder / layout.names))
    prefix = len(layout.label_keys)
    sources: dict[str, Source] = {}
    notes = []
    for split, wanted in (("train", layout.train), ("test", (layout.test,))):
        files = [folder / f"{stem}.bin" for stem in wanted if (folder / f"{stem}.bin").is_file()]
        if len(files) < len(wanted):
            notes.append(f"only {len(files)} of the {len(wanted)} files of the split {split} are there")
        if files:
            labels = np.concatenate([read_labels(file, prefix) for file in files])
            if labels.max() >= len(classes):
                raise DataError(
                    f"{files[0]}: label {labels.max()}, but only {len(classes)} classes; get the files again"
                )
            sources[split] = RecordSource(
                f"{name} ({split})", classes, files, labels=labels, shape=(3, 32, 32), prefix=prefix
            )
    return make_dataset(name, sources, notes)


def read_labels(path: Path, prefix: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    records_in(path, prefix + PIXELS, 0)
    records = np.memmap(path, np.uint8, "r").reshape(-1, prefix + PIXELS)
    return records[:, prefix - 1].astype(np.int32)


Member = tuple[str, BinaryIO]


def archive_members(path: Path) -> Iterator[Member]:
    """The regular files of an archive by their last names; nothing is unpacked by name."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if member.offset_data + member.size > MAX_ARCHIVE_BYTES:
                    raise DataError(f"{path}: unpacks to more than CIFAR does; get it again")
                file = archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    yield member.name.rpartition("/")[2], file  # type: ignore[misc]
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: a broken archive ({describe_error(error)}); get it again") from error


def folder_members(files: list[Path]) -> Iterator[Member]:
    for path in files:
        with open(path, "rb") as file:
            yield path.name, file


def convert(members: Callable[[], Iterator[Member]], into: Path) -> None:
    """Write the members of either format as the binary version."""
    for name, file in members():
        for layout in LAYOUTS:
            if name == layout.names or name in {f"{stem}.bin" for stem in layout.data}:
                with open(into / name, "wb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            elif name == layout.meta or name in layout.data:
                convert_pickle(plain_pickle(file.read(), name), layout, name, into)


def convert_pickle(content: Any, layout: Layout, name: str, into: Path) -> None:
    wanted = "no names of CIFAR classes in it" if name == layout.meta else "not a batch of CIFAR images"
    try:
        if name == layout.meta:
            names = [name.decode() if isinstance(name, bytes) else str(name) for name in content[layout.names_key]]
            (into / layout.names).write_text("\n".join(names))
        else:
            pixels = np.asarray(content[b"data"], np.uint8).reshape(-1, PIXELS)
            labels = [np.asarray(content[key], np.uint8).reshape(len(pixels), 1) for key in layout.label_keys]
            np.concatenate([*labels, pixels], axis=1).tofile(into / f"{name}.bin")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{name}: {wanted} ({error!r}); get the file again") from error


def latin1(text: str, encoding: str) -> bytes:
    """What `_codecs.encode` does in pickles: bytes written as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
    return text.encode("latin1")


def empty_array(kind: type, shape: tuple[int, ...], code: bytes | str) -> Any:
    """What NumPy's `_reconstruct` does in pickles, for plain arrays: an array that its state then fills."""
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError("an array that is not plain")
    return np.ndarray((0,), np.int8)


def plain_dtype(code: bytes | str, *_: object) -> np.dtype[Any]:
    """A type of number; anything else, such as objects, could hold more than data."""
    dtype = np.dtype(code.decode("latin1") if isinstance(code, bytes) else code)
    if dtype.kind not in "iufb":
        raise pickle.UnpicklingError(f"an array of {dtype}")
    return dtype


ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): plain_dtype,
    ("numpy.core.multiarray", "_reconstruct"): empty_array,
    ("numpy._core.multiarray", "_reconstruct"): empty_array,
    ("_codecs", "encode"): latin1,
}


class PlainUnpickler(pickle.Unpickler):
    """Knows numbers, text, bytes, lists, dictionaries and arrays of numbers, and refuses all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def plain_pickle(data: bytes, where: str) -> Any:
    """The plain data in a pickle, with Python 2's text as bytes."""
    try:
        return PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # broken bytes lead the unpickler to nearly any error
        raise DataError(f"{where}: not a pickle of plain data ({describe_error(error)})") from error
