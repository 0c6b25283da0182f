"""Reading MATLAB's files of level 5: the arrays, texts, cells and structures that datasets come with.

Only what datasets use is read; sparse arrays, objects and functions are refused. Nothing in a file is executed.
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
"""Of a file, and of all that is packed in it."""

MATRIX, COMPRESSED = 14, 15

NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8", 16: "u1"}
"""Types of stored numbers; 16 is text in UTF-8."""

CELL, STRUCTURE, TEXT = 1, 2, 4

NUMERIC = range(6, 16)

Element = tuple[int, bytes]
"""The type and the content of a piece of a file."""


def read_matlab(path: Path) -> dict[str, Any]:
    """The variables of a file by name: arrays (rows, columns), texts, lists (cells), or lists of dictionaries."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: {path.stat().st_size >> 20} MB is too much for a list of labels")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    if len(content) < HEADER_BYTES or content[126:128] not in (b"IM", b"MI"):
        raise DataError(f"{path}: not a MATLAB file of level 5 (MATLAB 5 to 7); get it again")
    order = "<" if content[126:128] == b"IM" else ">"
    variables, left = {}, MAX_BYTES
    try:
        for kind, body in elements(content[HEADER_BYTES:], order):
            if kind == COMPRESSED:
                kind, body = next(elements(unpacked(body, left), order))
            if kind != MATRIX:
                raise ValueError(f"a variable of type {kind}")
            left -= len(body)
            name, value = matrix(body, order)
            variables[name] = value
    except (struct.error, zlib.error, ValueError, IndexError, OverflowError, RuntimeError, StopIteration) as error:
        reason = "it ends too soon" if isinstance(error, StopIteration) else describe_error(error)
        raise DataError(f"{path}: a broken MATLAB file ({reason}); get it again") from error
    return {name: value for name, value in variables.items() if name}


def elements(content: bytes, order: str) -> Iterator[Element]:
    """The pieces that lie one after the other; each begins at a multiple of 8, but for compressed ones."""
    place = 0
    while place + 8 <= len(content):
        kind, size = struct.unpack_from(order + "II", content, place)
        if kind >> 16:  # a short piece: type and size share four bytes, the content has the other four
            kind, size = kind & 0xFFFF, kind >> 16
            yield kind, content[place + 4 : place + 4 + size]
            place += 8
            continue
        body = content[place + 8 : place + 8 + size]
        if len(body) < size:
            raise ValueError("it ends too soon")
        yield kind, body
        place += 8 + size + (0 if kind == COMPRESSED else -size % 8)


def unpacked(body: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(body, max(most, 1))
    if unpacker.unconsumed_tail:
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
        raise ValueError(f"an array of class {flags}, which is not read here")
    return name, numbers(next(pieces), order).reshape(shape, order="F")


def structures(pieces: Iterator[Element], count: int, order: str) -> list[dict[str, Any]]:
    """The structures of an array, each a dictionary by field."""
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
