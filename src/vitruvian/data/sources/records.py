"""Images of one size whose pixels lie one after the other in files, as in CIFAR and MNIST."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.sources.base import RawImage, Source
from vitruvian.data.sources.cache import derived
from vitruvian.data.sources.index import OpenFile
from vitruvian.errors import DataError, ImageError


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
            raise DataError(f"{name}: {self._ends[-1]} images but {len(labels)} labels")

    def __len__(self) -> int:
        return len(self._labels)

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def read(self, index: int) -> RawImage:
        number = int(np.searchsorted(self._ends, index, side="right"))
        within = index - (int(self._ends[number - 1]) if number else 0)
        size = self._record - self._prefix
        data = self._files[number].read(self._header + within * self._record + self._prefix, size)
        if len(data) < size:
            raise ImageError(f"{self.key(index)}: the file ends before the image does")
        values = np.frombuffer(data, np.uint8).reshape(self._shape)
        return values if values.ndim == 2 else np.ascontiguousarray(values.transpose(1, 2, 0))

    def key(self, index: int) -> str:
        return f"{self.name} #{index}"


def records_in(path: Path, record: int, header: int) -> int:
    """How many whole records a file holds; it may hold nothing else."""
    count, rest = divmod(path.stat().st_size - header, record)
    if rest or count < 1:
        raise DataError(
            f"{path}: {path.stat().st_size} bytes are not a whole number of records of {record}; "
            "the file is broken, get it again"
        )
    return count


def unpacked(path: Path) -> Path:
    """The file itself, or what is in it if it is gzipped, unpacked once into the cache."""
    if path.suffix != ".gz":
        return path
    return derived("gzip", [path], partial(unpack, path)) / path.stem


def unpack(path: Path, into: Path) -> None:
    try:
        with gzip.open(path) as packed, open(into / path.stem, "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path}: a broken gzip file ({error}); get it again") from error
