"""Columns of numbers in files, read by position: their length is not limited by memory."""

import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import scratch_folder

CHUNK = 1 << 14  # number of entries per step when reading a whole column
SMALL_BYTES = 2**18  # maximum size of a column that is kept in memory, which is faster


class OpenFile:
    """A file read by position; a pickled copy opens it again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def read(self, offset: int, size: int) -> bytes:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            # Unlike `__del__`, this works during the shutdown of Python, when `os` may be gone from this module.
            weakref.finalize(self, os.close, self._descriptor).atexit = False
        if hasattr(os, "pread"):
            return os.pread(self._descriptor, size, offset)
        os.lseek(self._descriptor, offset, os.SEEK_SET)  # Windows
        return os.read(self._descriptor, size)

    def __reduce__(self) -> "tuple[type[OpenFile], tuple[Path]]":
        return OpenFile, (self.path,)


class Column:
    """A file with one number per entry, read with `pread`: mapped pages would count towards the memory."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self._length = path.stat().st_size // self.dtype.itemsize
        self._file = OpenFile(path)
        self._values: NDArray[Any] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(f"entry {index} of {self._length} in {self.path}")
        if self._values is None and self._length * self.dtype.itemsize <= SMALL_BYTES:
            self._values = np.fromfile(self.path, self.dtype)
        if self._values is not None:
            return self._values.item(index)
        return np.frombuffer(self._file.read(index * self.dtype.itemsize, self.dtype.itemsize), self.dtype).item()

    def array(self) -> NDArray[Any]:
        """All numbers, as a memory map of the file."""
        return np.memmap(self.path, self.dtype, "r") if self._length else np.empty(0, self.dtype)


def read_chunk(values: NDArray[Any], start: int) -> NDArray[Any]:
    """A copy of CHUNK values from `start` on; a memory map is bypassed, since its pages would stay in memory."""
    stop = min(start + CHUNK, len(values))
    if isinstance(values, np.memmap) and values.filename is not None:
        return np.fromfile(values.filename, values.dtype, stop - start, offset=values.offset + start * values.itemsize)
    return values[start:stop].copy()


def read_chunks(values: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """All values in chunks, each with the index of its first value."""
    return ((start, read_chunk(values, start)) for start in range(0, len(values), CHUNK))


def scratch_column(chunks: Iterable[NDArray[Any]], dtype: str) -> Column:
    """A column of these chunks in a temporary file."""
    path = scratch_folder() / "column"
    with open(path, "wb") as file:
        for chunk in chunks:
            chunk.astype(dtype).tofile(file)
    return Column(path, dtype)
