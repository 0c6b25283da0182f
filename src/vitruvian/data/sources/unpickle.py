"""Pickles of plain data, read without running what they ask for."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from vitruvian.errors import DataError


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
        raise DataError(f"{where}: not a pickle of plain data ({error})") from error
