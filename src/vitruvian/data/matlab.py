"""Read MATLAB files of level 5: the arrays, texts, cells and structures that datasets use.

Sparse arrays, objects and functions are refused. `scipy.io.loadmat` is not used because damaged files crash it with a
segmentation fault.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.errors import DataError
from vitruvian.text import describe_error

HEADER_BYTES = 128

MAX_BYTES = 2**28
"""Maximum size of a file, and of its decompressed variables."""

MATRIX, COMPRESSED = 14, 15

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8", 16: "u1"}
"""Types of stored numbers; 16 is UTF-8 text."""

CELL, STRUCTURE, TEXT = 1, 2, 4

NUMERIC = range(6, 16)

Element = tuple[int, bytes]
"""Type and content of a data element."""


def read_matlab(path: Path) -> dict[str, Any]:
    """The variables of a file by name: arrays (rows, columns), texts, lists (cells) or lists of dictionaries."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path.stat().st_size >> 20} MB is too large for a list of labels", where=path)
        content = path.read_bytes()
    except OSError as error:
        raise DataError((error.strerror or "cannot be read").lower(), where=path) from error
    if len(content) < HEADER_BYTES or content[126:128] not in (b"IM", b"MI"):
        raise DataError("not a MATLAB file of level 5 (MATLAB 5 to 7)", where=path, hint="download it again")
    order = "<" if content[126:128] == b"IM" else ">"
    variables, remaining = {}, MAX_BYTES
    try:
        for kind, body in elements(content[HEADER_BYTES:], order):
            if kind == COMPRESSED:
                kind, body = next(elements(decompress(body, remaining), order))
            if kind != MATRIX:
                raise ValueError(f"a variable of type {kind}")
            remaining -= len(body)
            name, value = matrix(body, order)
            variables[name] = value
    except (struct.error, zlib.error, ValueError, IndexError, OverflowError, RuntimeError, StopIteration) as error:
        reason = "it is truncated" if isinstance(error, StopIteration) else describe_error(error)
        raise DataError(f"damaged MATLAB file ({reason})", where=path, hint="download it again") from error
    return {name: value for name, value in variables.items() if name}


def elements(content: bytes, order: str) -> Iterator[Element]:
    """Consecutive data elements; each starts at a multiple of 8 bytes, except after a compressed one."""
    offset = 0
    while offset + 8 <= len(content):
        kind, size = struct.unpack_from(order + "II", content, offset)
        if kind >> 16:  # a small element: type and size share four bytes, the content has the other four
            kind, size = kind & 0xFFFF, kind >> 16
            yield kind, content[offset + 4 : offset + 4 + size]
            offset += 8
            continue
        body = content[offset + 8 : offset + 8 + size]
        if len(body) < size:
            raise ValueError("it is truncated")
        yield kind, body
        offset += 8 + size + (0 if kind == COMPRESSED else -size % 8)


def decompress(body: bytes, most: int) -> bytes:
    decompressor = zlib.decompressobj()
    content = decompressor.decompress(body, max(most, 1))
    if decompressor.unconsumed_tail:
        raise ValueError("its variables are too large")
    return content


def matrix(body: bytes, order: str) -> tuple[str, Any]:
    if not body:
        return "", np.empty((0, 0))
    pieces = elements(body, order)
    flags = int(numbers(next(pieces), order)[0]) & 0xFF
    shape = tuple(int(side) for side in numbers(next(pieces), order))
    name = next(pieces)[1].decode("latin-1")
    if flags == CELL:
        return name, [matrix(piece, order)[1] for _, piece in pieces]
    if flags == STRUCTURE:
        return name, structures(pieces, int(np.prod(shape)), order)
    if flags == TEXT:
        kind, text = next(pieces)
        return name, text.decode("utf-8") if kind in (1, 2, 16) else "".join(map(chr, numbers((kind, text), order)))
    if flags not in NUMERIC:
        raise ValueError(f"an array of class {flags}, which is not supported")
    return name, numbers(next(pieces), order).reshape(shape, order="F")


def structures(pieces: Iterator[Element], count: int, order: str) -> list[dict[str, Any]]:
    """The structures of an array, as dictionaries from field to value."""
    length = int(numbers(next(pieces), order)[0])
    packed = next(pieces)[1]
    if not packed:
        return []
    names = [packed[i : i + length].split(b"\0")[0].decode("latin-1") for i in range(0, len(packed), length)]
    return [{name: matrix(next(pieces)[1], order)[1] for name in names} for _ in range(count)]


def numbers(element: Element, order: str) -> np.ndarray[Any, np.dtype[Any]]:
    kind, body = element
    if kind not in NUMBERS:
        raise ValueError(f"numbers of type {kind}")
    return np.frombuffer(body, order + NUMBERS[kind])
