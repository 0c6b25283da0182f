"""Datasets of raw pixels: IDX files (MNIST), CIFAR-10 and CIFAR-100, and the built-in digits."""

import gzip
import io
import pickle
import shutil
import struct
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import RawImage
from vitruvian.data.index import cached_folder
from vitruvian.data.names import parse_classes
from vitruvian.data.sources import Dataset, Source, hold_out, locate, make_dataset
from vitruvian.errors import DataError, ImageError, parsing
from vitruvian.files import check_pickle, read_text

DOWNLOAD_AGAIN = "download it again"


class RecordSource(Source):
    """Files of equal records, each ending with an image: (rows, columns) or color planes (3, rows, columns)."""

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
        """`prefix` bytes precede each image, `header` bytes the first record."""
        self.name, self.classes = name, classes
        self._files = [OpenFile(path) for path in files]
        self._labels, self._shape = labels, shape
        self._prefix, self._header = prefix, header
        self._record = prefix + int(np.prod(shape))
        self._ends = np.cumsum([count_records(path, self._record, header) for path in files])
        if self._ends[-1] != len(labels):
            raise DataError(f"{self._ends[-1]} images but {len(labels)} labels", where=name)

    def read(self, index: int) -> RawImage:
        file, within = locate(self._ends, index)
        size = self._record - self._prefix
        data = self._files[file].read(self._header + within * self._record + self._prefix, size)
        if len(data) < size:
            raise ImageError("the file ends before the image", where=self.key(index))
        values = np.frombuffer(data, np.uint8).reshape(self._shape)
        return values if values.ndim == 2 else np.ascontiguousarray(values.transpose(1, 2, 0))


def count_records(path: Path, record: int, header: int) -> int:
    """The number of records in a file, which may contain nothing else."""
    count, rest = divmod(path.stat().st_size - header, record)
    if rest or count < 1:
        reason = f"{path.stat().st_size} bytes are not a whole number of records of {record} bytes"
        raise DataError(reason, where=path, hint=DOWNLOAD_AGAIN)
    return count


# IDX files, the format of MNIST

IDX_FILES = {"train": "train", "test": "t10k"}  # prefixes of the file names of a split
MAX_UNPACKED_BYTES, MAX_RATIO = 2**28, 100  # limits of an unpacked gzip file: bytes, or times its size
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
"""The classes of Fashion-MNIST, which its files do not name; recognized by the folder's name."""


def find_idx(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The files of images and of labels of each split in a folder."""

    def find(start: str, kind: str) -> Path | None:  # in either spelling, gzipped or not
        names = [f"{start}{mark}{kind}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
        return next((folder / name for name in names if (folder / name).is_file()), None)

    files = {}
    for split, start in IDX_FILES.items():
        images, labels = find(f"{start}-images", "idx3"), find(f"{start}-labels", "idx1")
        if images and labels:
            files[split] = (images, labels)
        elif images:
            raise DataError(f"the file of labels, {start}-labels-idx1-ubyte, is missing", where=images)
    return files


def open_idx(folders: list[Path], name: str) -> Dataset:
    """The dataset in a folder of IDX files."""
    folder = folders[0]
    files = find_idx(folder)
    loaded = {split: (gunzip(images), read_idx_labels(gunzip(labels))) for split, (images, labels) in files.items()}
    names = tuple(map(str, range(1 + max(int(labels.max()) for _, labels in loaded.values()))))
    if "fashion" in str(folder.resolve()).lower() and len(names) == len(FASHION):
        names = FASHION
    sources: dict[str, Source] = {}
    for split, (images, labels) in loaded.items():
        count, rows, columns = read_idx_header(images, dimensions=3)
        if count != len(labels):
            raise DataError(f"{count} images but {len(labels)} labels", where=files[split][0], hint=DOWNLOAD_AGAIN)
        title, shape = f"{name} ({split})", (rows, columns)
        sources[split] = RecordSource(title, names, [images], labels=labels, shape=shape, header=16)
    return make_dataset(name, sources)


def gunzip(path: Path) -> Path:
    """The file itself, or its unpacked content in the cache if it is gzipped."""

    def unpack(into: Path) -> None:
        with parsing(path, DataError, reason="damaged gzip file", hint=DOWNLOAD_AGAIN):
            limit = max(MAX_UNPACKED_BYTES, MAX_RATIO * path.stat().st_size)
            with gzip.open(path) as packed, open(into / path.stem, "wb") as file:
                while chunk := packed.read(1 << 20):
                    limit -= len(chunk)
                    if limit < 0:
                        raise DataError("unpacks to far more data than images need", where=path, hint=DOWNLOAD_AGAIN)
                    file.write(chunk)

    return cached_folder("gzip", [path], unpack) / path.stem if path.suffix == ".gz" else path


def read_idx_labels(path: Path) -> NDArray[np.int32]:
    (count,) = read_idx_header(path, dimensions=1)
    labels = np.fromfile(path, np.uint8, offset=8).astype(np.int32)
    if count < 1 or len(labels) != count:
        raise DataError(f"{len(labels)} labels, the header states {count}", where=path, hint=DOWNLOAD_AGAIN)
    return labels


def read_idx_header(path: Path, *, dimensions: int) -> tuple[int, ...]:
    """The sizes at the start of an IDX file of unsigned bytes."""
    with open(path, "rb") as file:
        start = file.read(4 + 4 * dimensions)
    if len(start) < 4 + 4 * dimensions or start[:4] != bytes([0, 0, 8, dimensions]):
        reason = f"not an IDX file of bytes with {dimensions} dimensions"
        raise DataError(reason, where=path, hint=DOWNLOAD_AGAIN)
    return struct.unpack(f">{dimensions}I", start[4:])


# The built-in digits

HELD_OUT = 0.2  # fraction of each class in the split `test`, chosen with seed 0


class DigitsSource(Source):
    """All digits, as gray values from 0 to 255, white on black."""

    name = "digits"
    classes = tuple("0123456789")

    def __init__(self) -> None:
        path = resources.files("vitruvian.data") / "digits.npz"
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            self._images = np.rint(content["images"] * (255 / 16)).astype(np.uint8)
            self._labels = content["labels"].astype(np.int32)

    def read(self, index: int) -> RawImage:
        return np.asarray(self._images[index])


def open_digits() -> Dataset:
    """The digits, with a fifth of them held out as the split `test`."""
    train, test = hold_out(DigitsSource(), HELD_OUT, seed=0)
    train.name, test.name = "digits (train)", "digits (test)"
    return make_dataset("digits", {"train": train, "test": test})


# CIFAR-10 and CIFAR-100, as folders or in the original archives. The binary version is read directly; pickles and
# archives are converted to it once, into the cache. A record of the binary version is the label (CIFAR-100: coarse,
# then fine) and three planes of 32 x 32 pixels.

PIXELS = 3 * 32 * 32
MAX_ARCHIVE_BYTES = 2**29  # limit on the unpacked size; the largest original is CIFAR-100's with 185 MB
Member = tuple[str, BinaryIO]  # name and content of a file


@dataclass(frozen=True)
class CifarLayout:
    """The file names of a dataset; in the binary version each data file ends in `.bin`."""

    train: tuple[str, ...]
    test: str
    names: str  # file of class names in the binary version
    meta: str  # file of class names among the pickles
    names_key: bytes
    label_keys: tuple[bytes, ...]  # in a pickle, in the order of a record's first bytes; the last is the one to learn

    def files(self, folder: Path, *, binary: bool) -> list[Path]:
        """The file of class names and the data files of one version in a folder; none if either is missing."""
        names, suffix = (self.names, ".bin") if binary else (self.meta, "")
        paths = [folder / f"{stem}{suffix}" for stem in (*self.train, self.test)]
        data = [path for path in paths if path.is_file()]
        return [folder / names, *data] if data and (folder / names).is_file() else []


CIFAR_LAYOUTS = (
    CifarLayout(
        train=tuple(f"data_batch_{index}" for index in range(1, 6)),
        test="test_batch",
        names="batches.meta.txt",
        meta="batches.meta",
        names_key=b"label_names",
        label_keys=(b"labels",),
    ),
    CifarLayout(
        train=("train",),
        test="test",
        names="fine_label_names.txt",
        meta="meta",
        names_key=b"fine_label_names",
        label_keys=(b"coarse_labels", b"fine_labels"),
    ),
)


def find_cifar(folder: Path) -> list[Path]:
    """The folder itself, or the one that the archive unpacks to, if it contains CIFAR files."""
    for path in (folder, *sorted(folder.glob("cifar-10*/"))):
        if any(layout.files(path, binary=binary) for layout in CIFAR_LAYOUTS for binary in (True, False)):
            return [path]
    return []


def open_cifar(paths: list[Path], name: str) -> Dataset:
    """The dataset in a folder of either version, or in an original archive."""
    folder = path = paths[0]
    if path.is_file():
        folder = cached_folder("cifar", [path], lambda into: convert(unpack_archive(path), into))
    elif not any(layout.files(path, binary=True) for layout in CIFAR_LAYOUTS):
        pickles = next(filter(None, (layout.files(path, binary=False) for layout in CIFAR_LAYOUTS)), [])
        if not pickles:
            raise DataError("no CIFAR-10 or CIFAR-100 files", where=path)
        members = ((file.name, io.BytesIO(file.read_bytes())) for file in pickles)
        folder = cached_folder("cifar", pickles, lambda into: convert(members, into))
    layout = next((layout for layout in CIFAR_LAYOUTS if layout.files(folder, binary=True)), None)
    if layout is None:
        hint = "unpack it and pass the folder"
        raise DataError("not an archive of CIFAR-10 or CIFAR-100", where=name, hint=hint)
    classes = parse_classes(read_text(folder / layout.names, raises=DataError), str(folder / layout.names))
    prefix = len(layout.label_keys)
    sources: dict[str, Source] = {}
    notes = []
    for split, stems in (("train", layout.train), ("test", (layout.test,))):
        files = [folder / f"{stem}.bin" for stem in stems if (folder / f"{stem}.bin").is_file()]
        if len(files) < len(stems):
            notes.append(f"only {len(files)} of the {len(stems)} files of the split {split} are present")
        if files:
            for file in files:
                count_records(file, prefix + PIXELS, 0)  # raises if it is not a whole number
            records = [np.memmap(file, np.uint8, "r").reshape(-1, prefix + PIXELS) for file in files]
            labels = np.concatenate([rows[:, prefix - 1] for rows in records]).astype(np.int32)
            if labels.max() >= len(classes):
                reason = f"label {labels.max()}, but only {len(classes)} classes"
                raise DataError(reason, where=files[0], hint=DOWNLOAD_AGAIN)
            title, shape = f"{name} ({split})", (3, 32, 32)
            sources[split] = RecordSource(title, classes, files, labels=labels, shape=shape, prefix=prefix)
    return make_dataset(name, sources, notes)


def unpack_archive(path: Path) -> Iterator[Member]:
    """The regular files of an archive by their base names; nothing is extracted to a path from the archive."""
    boundary = parsing(path, DataError, reason="damaged archive", hint=DOWNLOAD_AGAIN)
    with boundary, tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.offset_data + member.size > MAX_ARCHIVE_BYTES:
                raise DataError("unpacks to more data than CIFAR has", where=path, hint=DOWNLOAD_AGAIN)
            file = archive.extractfile(member) if member.isreg() else None
            if file is not None:
                yield member.name.rpartition("/")[2], file  # type: ignore[misc]


def convert(members: Iterable[Member], into: Path) -> None:
    """Write members of either version as the binary version."""
    for name, file in members:
        for layout in CIFAR_LAYOUTS:
            stems = (*layout.train, layout.test)
            if name == layout.names or name in {f"{stem}.bin" for stem in stems}:
                with open(into / name, "wb") as copy:
                    shutil.copyfileobj(file, copy, 1 << 20)
            elif name == layout.meta or name in stems:
                convert_pickle(plain_pickle(file.read(), name), layout, name, into)


def convert_pickle(content: Any, layout: CifarLayout, name: str, into: Path) -> None:
    expected = "no CIFAR class names" if name == layout.meta else "not a batch of CIFAR images"
    with parsing(name, DataError, reason=expected, hint=DOWNLOAD_AGAIN):
        if name == layout.meta:
            names = [name.decode() if isinstance(name, bytes) else str(name) for name in content[layout.names_key]]
            (into / layout.names).write_text("\n".join(names))
        else:
            pixels = np.asarray(content[b"data"], np.uint8).reshape(-1, PIXELS)
            labels = [np.asarray(content[key], np.uint8).reshape(len(pixels), 1) for key in layout.label_keys]
            np.concatenate([*labels, pixels], axis=1).tofile(into / f"{name}.bin")


def latin1_bytes(text: str, encoding: str) -> bytes:
    """Replaces `_codecs.encode`, which pickles call for bytes written as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
    return text.encode("latin1")


def empty_array(kind: type, shape: tuple[int, ...], code: bytes | str) -> Any:
    """Replaces NumPy's `_reconstruct`: an empty array of a plain type, which its pickled state then fills."""
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError("an array that is not plain")
    return np.ndarray((0,), np.int8)


def numeric_dtype(code: bytes | str, *_: object) -> np.dtype[Any]:
    """Replaces `np.dtype` and accepts only numbers: other types, such as objects, could contain more than data."""
    dtype = np.dtype(code.decode("latin1") if isinstance(code, bytes) else code)
    if dtype.kind not in "iufb":
        raise pickle.UnpicklingError(f"an array of {dtype}")
    return dtype


ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): numeric_dtype,
    ("numpy.core.multiarray", "_reconstruct"): empty_array,
    ("numpy._core.multiarray", "_reconstruct"): empty_array,
    ("_codecs", "encode"): latin1_bytes,
}


class PlainUnpickler(pickle.Unpickler):
    """Accepts numbers, text, bytes, lists, dictionaries and numeric arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def plain_pickle(data: bytes, where: str) -> Any:
    """The plain data in a pickle, with Python 2's strings as bytes."""
    with parsing(where, DataError, reason="not a pickle of plain data"):
        check_pickle(io.BytesIO(data), where, raises=DataError)
        return PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
