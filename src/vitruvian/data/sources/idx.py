"""IDX files as MNIST and Fashion-MNIST come in, gzipped or not."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.sources.base import DataSet, Source, data_set
from vitruvian.data.sources.records import RecordSource, unpacked
from vitruvian.errors import DataError

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
            raise DataError(f"{images}: the file of labels, {start}-labels-idx1-ubyte, is not beside it")
    return found


def existing(folder: Path, start: str, kind: str) -> Path | None:
    """The file of this kind, in either spelling, gzipped or not."""
    names = [f"{start}{mark}{kind}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def open_idx(folder: Path) -> DataSet:
    """The data set in a folder of IDX files."""
    pairs = idx_files(folder)
    loaded = {split: (unpacked(images), read_labels(unpacked(labels))) for split, (images, labels) in pairs.items()}
    names = tuple(map(str, range(1 + max(int(labels.max()) for _, labels in loaded.values()))))
    if "fashion" in str(folder.resolve()).lower() and len(names) == len(FASHION):
        names = FASHION
    sources: dict[str, Source] = {}
    for split, (images, labels) in loaded.items():
        count, rows, columns = read_header(images, dimensions=3)
        if count != len(labels):
            raise DataError(f"{pairs[split][0]}: {count} images but {len(labels)} labels; get the files again")
        sources[split] = RecordSource(
            f"{folder} ({split})", names, [images], labels=labels, shape=(rows, columns), header=16
        )
    return data_set(str(folder), sources)


def read_labels(path: Path) -> NDArray[np.int32]:
    (count,) = read_header(path, dimensions=1)
    labels = np.fromfile(path, np.uint8, offset=8).astype(np.int32)
    if count < 1 or len(labels) != count:
        raise DataError(f"{path}: {len(labels)} labels where the header promises {count}; get the file again")
    return labels


def read_header(path: Path, *, dimensions: int) -> tuple[int, ...]:
    """The sizes that an IDX file of unsigned bytes begins with."""
    with open(path, "rb") as file:
        start = file.read(4 + 4 * dimensions)
    if len(start) < 4 + 4 * dimensions or start[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path}: not an IDX file of bytes with {dimensions} dimensions; get the file again")
    return struct.unpack(f">{dimensions}I", start[4:])
