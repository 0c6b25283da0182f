"""Images of one size stored as bare pixels: IDX files as MNIST comes in, and the built-in digits."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import RawImage
from vitruvian.data.sources.base import Dataset, Source, located, make_dataset
from vitruvian.data.sources.index import OpenFile, derived
from vitruvian.data.sources.subset import hold_out
from vitruvian.errors import DataError, ImageError

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
    loaded = {split: (unpacked(images), read_labels(unpacked(labels))) for split, (images, labels) in pairs.items()}
    names = tuple(map(str, range(1 + max(int(labels.max()) for _, labels in loaded.values()))))
    if "fashion" in str(folder.resolve()).lower() and len(names) == len(FASHION):
        names = FASHION
    sources: dict[str, Source] = {}
    for split, (images, labels) in loaded.items():
        count, rows, columns = read_header(images, dimensions=3)
        if count != len(labels):
            raise DataError(f"{count} images but {len(labels)} labels; get the files again", where=pairs[split][0])
        sources[split] = RecordSource(
            f"{name} ({split})", names, [images], labels=labels, shape=(rows, columns), header=16
        )
    return make_dataset(name, sources)


def read_labels(path: Path) -> NDArray[np.int32]:
    (count,) = read_header(path, dimensions=1)
    labels = np.fromfile(path, np.uint8, offset=8).astype(np.int32)
    if count < 1 or len(labels) != count:
        raise DataError(f"{len(labels)} labels where the header promises {count}; get the file again", where=path)
    return labels


def read_header(path: Path, *, dimensions: int) -> tuple[int, ...]:
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
