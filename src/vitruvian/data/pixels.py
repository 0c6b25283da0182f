"""Datasets of raw pixels: IDX files (MNIST), CIFAR-10 and CIFAR-100, and the built-in digits."""

from __future__ import annotations

import gzip
import io
import lzma
import pickle
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import RawImage
from vitruvian.data.index import derived
from vitruvian.data.names import parse_classes
from vitruvian.data.sources import Dataset, Source, hold_out, located, make_dataset
from vitruvian.errors import DataError, ImageError
from vitruvian.files import read_text
from vitruvian.text import describe_error

SMALL_FILE = 2**28

MOST_TIMES = 100
"""A file may unpack to so many bytes, or to so many times its size; images shrink to a tenth or so when packed."""


class RecordSource(Source):
    """Files of records of one length; the pixels of an image end its record.

    Pixels are stored as (rows, columns) or as color planes (3, rows, columns).
    """

    def __init__(
        self,
        name: str,
        classes: tuple[str, ...],
        files: Sequence[Path],
        *,
        labels: NDArray[np.int32],
        shape: tuple[int, ...],
        prefix: int = 0,
        header: int = 0,
    ) -> None:
        """`prefix` bytes stand before each image, `header` bytes before the first."""
        self.name = name
        self.classes = classes
        self._files = [OpenFile(path) for path in files]
        self._labels = labels
        self._shape = shape
        self._prefix, self._header = prefix, header
        self._record = prefix + int(np.prod(shape))
        self._ends = np.cumsum([records_in(path, self._record, header) for path in files])
        if self._ends[-1] != len(labels):
            raise DataError(f"{self._ends[-1]} images but {len(labels)} labels", where=name)

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def read(self, index: int) -> RawImage:
        number, within = located(self._ends, index)
        size = self._record - self._prefix
        data = self._files[number].read(self._header + within * self._record + self._prefix, size)
        if len(data) < size:
            raise ImageError("the file ends before the image does", where=self.key(index))
        values = np.frombuffer(data, np.uint8).reshape(self._shape)
        return values if values.ndim == 2 else np.ascontiguousarray(values.transpose(1, 2, 0))


def records_in(path: Path, record: int, header: int) -> int:
    """How many whole records a file holds; it may hold nothing else."""
    count, rest = divmod(path.stat().st_size - header, record)
    if rest or count < 1:
        raise DataError(
            f"{path.stat().st_size} bytes are not a whole number of records of {record}; "
            "the file is broken, get it again",
            where=path,
        )
    return count


def unpacked(path: Path) -> Path:
    """The file itself, or what is in it if it is gzipped, unpacked once into the cache."""
    return derived("gzip", [path], partial(unpack, path)) / path.stem if path.suffix == ".gz" else path


def unpack(path: Path, into: Path) -> None:
    try:
        limit = max(SMALL_FILE, MOST_TIMES * path.stat().st_size)
        with gzip.open(path) as packed, open(into / path.stem, "wb") as file:
            while piece := packed.read(1 << 20):
                limit -= len(piece)
                if limit < 0:
                    raise DataError("unpacks to far more than images of its size would; get it again", where=path)
                file.write(piece)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"a broken gzip file ({error}); get it again", where=path) from error


FILES = {"train": "train", "test": "t10k"}
"""How the names of a split's files begin."""

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
"""The classes of Fashion-MNIST, which its files do not name; known by the folder's name."""


def idx_files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The files of images and of labels of each split in a folder."""
    found = {}
    for split, start in FILES.items():
        images, labels = existing(folder, f"{start}-images", "idx3"), existing(folder, f"{start}-labels", "idx1")
        if images and labels:
            found[split] = (images, labels)
        elif images:
            raise DataError(f"the file of labels, {start}-labels-idx1-ubyte, is not beside it", where=images)
    return found


def existing(folder: Path, start: str, kind: str) -> Path | None:
    """The file of this kind, in either spelling, gzipped or not."""
    names = [f"{start}{mark}{kind}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def open_idx(folders: list[Path], name: str) -> Dataset:
    """The dataset in a folder of IDX files."""
    folder = folders[0]
    pairs = idx_files(folder)
    loaded = {split: (unpacked(images), read_idx_labels(unpacked(labels))) for split, (images, labels) in pairs.items()}
    names = tuple(map(str, range(1 + max(int(labels.max()) for _, labels in loaded.values()))))
    if "fashion" in str(folder.resolve()).lower() and len(names) == len(FASHION):
        names = FASHION
    sources: dict[str, Source] = {}
    for split, (images, labels) in loaded.items():
        count, rows, columns = read_idx_header(images, dimensions=3)
        if count != len(labels):
            raise DataError(f"{count} images but {len(labels)} labels; get the files again", where=pairs[split][0])
        sources[split] = RecordSource(
            f"{name} ({split})", names, [images], labels=labels, shape=(rows, columns), header=16
        )
    return make_dataset(name, sources)


def read_idx_labels(path: Path) -> NDArray[np.int32]:
    (count,) = read_idx_header(path, dimensions=1)
    labels = np.fromfile(path, np.uint8, offset=8).astype(np.int32)
    if count < 1 or len(labels) != count:
        raise DataError(f"{len(labels)} labels where the header promises {count}; get the file again", where=path)
    return labels


def read_idx_header(path: Path, *, dimensions: int) -> tuple[int, ...]:
    """The sizes that an IDX file of unsigned bytes begins with."""
    with open(path, "rb") as file:
        start = file.read(4 + 4 * dimensions)
    if len(start) < 4 + 4 * dimensions or start[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"not an IDX file of bytes with {dimensions} dimensions; get the file again", where=path)
    return struct.unpack(f">{dimensions}I", start[4:])


HELD = 0.2
"""Share of each class in the split `test`; the seed of the choice is 0."""


class DigitsSource(Source):
    """All digits, as gray pixels from 0 to 255, white on black."""

    name = "digits"
    classes = tuple("0123456789")

    def __len__(self) -> int:
        return len(stored()[1])

    def labels(self) -> NDArray[np.int32]:
        return stored()[1]

    def read(self, index: int) -> RawImage:
        return np.asarray(stored()[0][index])


@lru_cache(maxsize=1)
def stored() -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    with (files("vitruvian.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as content:
        images, labels = content["images"], content["labels"]
    return np.rint(images * (255 / 16)).astype(np.uint8), labels.astype(np.int32)


def open_digits() -> Dataset:
    """The digits, a fifth of them held out as the split `test`."""
    train, test = hold_out(DigitsSource(), HELD, seed=0)
    train.name, test.name = "digits (train)", "digits (test)"
    return make_dataset("digits", {"train": train, "test": test})


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
            labels = np.concatenate([read_cifar_labels(file, prefix) for file in files])
            if labels.max() >= len(classes):
                raise DataError(
                    f"{files[0]}: label {labels.max()}, but only {len(classes)} classes; get the files again"
                )
            sources[split] = RecordSource(
                f"{name} ({split})", classes, files, labels=labels, shape=(3, 32, 32), prefix=prefix
            )
    return make_dataset(name, sources, notes)


def read_cifar_labels(path: Path, prefix: int) -> np.ndarray[Any, np.dtype[np.int32]]:
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
