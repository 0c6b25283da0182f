"""Part of a JPEG as pixels, decoding little more of the file than that part needs.

Three savings, none of which changes what an image shows: libjpeg-turbo called directly (simplejpeg); decoding at
half, quarter or eighth size where the part is that much larger than what is made of it; and, in files with a
restart marker after every block (`vit pack` writes them), leaving out all blocks that the part does not touch.
"""

from __future__ import annotations

import functools
import io
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import MAX_PIXELS, decode, identify, orientation
from vitruvian.errors import require
from vitruvian.settings import Size

Levels = NDArray[np.uint8]
"""Pixel values of 0 to 255: (rows, columns, 3) RGB, or (rows, columns) gray."""

SEQUENTIAL, PROGRESSIVE = (0xFFC0, 0xFFC1), 0xFFC2  # frames with Huffman codes
SCAN, INTERVAL, APP1 = 0xFFDA, 0xFFDD, 0xFFE1
RESTART, END = 0xD0, 0xD9  # behind a byte 0xFF
TWO_WORDS, FRAME = struct.Struct(">HH").unpack_from, struct.Struct(">BHHB").unpack_from

NEIGHBORS = 2
"""Pixels around a part that its own colors depend on: coarse chroma is interpolated while decoding."""

TURNS = {
    # EXIF orientation: whether rows and columns change places, then what is mirrored, as cv2.flip counts it
    2: (False, 1),
    3: (False, -1),
    4: (False, 0),
    5: (True, None),
    6: (True, 1),
    7: (True, -1),
    8: (True, 0),
}


class Box(NamedTuple):
    """Part of an upright image, in pixels."""

    top: int
    left: int
    rows: int
    columns: int

    def of(self, levels: Levels) -> Levels:
        return levels[self.top : self.top + self.rows, self.left : self.left + self.columns]


class Header(NamedTuple):
    """What a JPEG says before its first pixel."""

    stored: Size
    orientation: int
    block: Size
    """Rows and columns of pixels in one coded block (an MCU)."""
    separable: bool
    """Every block of an upright image is coded on its own, so that some can be left out."""
    frame: int
    """Where in the file the frame header begins."""
    scan: int
    """Where the coded blocks begin."""

    @property
    def size(self) -> Size:
        """Rows and columns of the upright image."""
        rows, columns = self.stored
        return (columns, rows) if self.orientation > 4 else (rows, columns)


def read_header(data: bytes) -> Header | None:
    """The header of an ordinary 8-bit gray or color JPEG; None for whatever else `decode` should look at."""
    try:
        return _header(data)
    except Exception:  # what broken bytes lead to; `decode` knows how to say what is wrong with them
        return None


def _header(data: bytes) -> Header | None:
    frame, interval, described, position = 0, 0, False, 2
    while True:
        marker, length = TWO_WORDS(data, position)
        if marker == SCAN:
            break
        if marker in SEQUENTIAL or marker == PROGRESSIVE:
            frame = position
        elif marker == INTERVAL:
            interval = int.from_bytes(data[position + 4 : position + 6])
        elif marker == APP1:
            described = True
        elif marker < 0xFF00:
            return None
        position += 2 + length
    precision, rows, columns, components = FRAME(data, frame + 4)
    if not frame or precision != 8 or components not in (1, 3) or not 0 < rows * columns <= MAX_PIXELS:
        return None
    sampling = [data[frame + 11 + 3 * k] for k in range(components)] if components > 1 else [0x11]
    one_scan = 0xFF00 + data[frame + 1] in SEQUENTIAL and data[position + 4] == components
    held = orientation(identify(io.BytesIO(data))) if described else 1
    return Header(
        stored=(rows, columns),
        orientation=held if held in TURNS else 1,
        block=(8 * max(s & 15 for s in sampling), 8 * max(s >> 4 for s in sampling)),
        separable=one_scan and interval == 1 and held == 1,
        frame=frame,
        scan=position + 2 + length,
    )


def decode_box(data: bytes, header: Header, box: Box, wanted: Size) -> Levels:
    """RGB of the part `box`, scaled down by 1, 2, 4 or 8 but not below `wanted` rows and columns.

    At full size bit-identical to the same part of `decode(data)`, which also has the last word on files
    that libjpeg-turbo complains about.
    """
    codec, factor = require("simplejpeg", "train"), shrink_factor((box.rows, box.columns), wanted, most=8)
    try:
        part, kept, stored = cut(data, header, box) if header.separable else (data, box, header.stored)
        rows, columns = (-(-side // factor) for side in stored)
        levels = codec.decode_jpeg(part, "RGB", min_height=rows, min_width=columns)
    except (ValueError, IndexError):
        return box.of(np.asarray(decode(data)))
    return Box(*(round(side / factor) for side in kept)).of(upright(levels, header.orientation))


def upright(levels: Levels, orientation: int) -> Levels:
    """The stored pixels, turned the way the camera was held."""
    swapped, mirrored = TURNS.get(orientation, (False, None))
    if swapped:
        levels = opencv().transpose(levels)
    return levels if mirrored is None else opencv().flip(levels, mirrored)


def shrink_factor(size: Size, wanted: Size, most: int = 2**16) -> int:
    """The greatest power of two by which `size` can be divided and still cover `wanted`."""
    factor = 1
    while 2 * factor <= min(most, size[0] // wanted[0], size[1] // wanted[1]):
        factor *= 2
    return factor


def cut(data: bytes, header: Header, box: Box) -> tuple[Any, Box, Size]:
    """A smaller JPEG of the blocks that `box` needs, where `box` lies in it, and its rows and columns.

    The pixels of the box stay the same, bit for bit. A file that does not keep what its header promises is
    given back whole.
    """
    (height, width), (tall, wide) = header.stored, header.block
    rows, columns = -(-height // tall), -(-width // wide)
    codes = np.frombuffer(data, np.uint8, offset=header.scan)
    marks = (codes == 0xFF).nonzero()[0]
    edges = np.zeros(rows * columns + 1, np.intp)  # of the blocks, each with the marker that ends it
    found = marks[codes[1:].take(marks, mode="clip") > 0] + 2  # 0xFF 0x00 is not a marker
    if len(found) != rows * columns:
        return data, box, header.stored
    edges[1:] = found
    starts, ends = edges[:-1].reshape(rows, columns), edges[1:].reshape(rows, columns)
    upper, lower = max(0, (box.top - NEIGHBORS) // tall), min(rows, (box.top + box.rows + 1) // tall + 1)
    left, right = max(0, (box.left - NEIGHBORS) // wide), min(columns, (box.left + box.columns + 1) // wide + 1)
    starts, ends = starts[upper:lower, left:right], ends[upper:lower, left:right]
    size = (min(height, lower * tall) - upper * tall, min(width, right * wide) - left * wide)

    parts = [data[: header.frame + 5], struct.pack(">HH", *size), data[header.frame + 9 : header.scan]]
    body = data[header.scan :]
    parts += [body[start:end] for start, end in zip(starts[:, 0].tolist(), ends[:, -1].tolist())]
    smaller = bytearray().join(parts)
    places = (ends - starts).cumsum() - 1
    numbers = np.frombuffer(smaller, np.uint8, offset=header.scan)
    numbers[places] = RESTART + (np.arange(len(places)) & 7)  # markers count from 0 to 7, again and again
    numbers[places[-1]] = END
    return smaller, Box(box.top - upper * tall, box.left - left * wide, box.rows, box.columns), size


@functools.cache
def opencv() -> Any:
    """The module cv2, told to stay on the calling thread.

    A view is one core's work and workers bring the others; OpenCV's own threads would also not survive the fork
    that starts a worker.
    """
    module = require("cv2", "train")
    module.setNumThreads(0)
    return module
