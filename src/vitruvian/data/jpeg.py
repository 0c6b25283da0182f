"""Decode a part of a JPEG by libjpeg-turbo (simplejpeg), at half, quarter or eighth size if that is large enough."""

import functools
import io
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import MAX_PIXELS, check_scans, decode, identify, orientation
from vitruvian.errors import require
from vitruvian.settings import Size

Levels = NDArray[np.uint8]  # pixel values of 0 to 255: (rows, columns, 3) RGB, or (rows, columns) gray
SEQUENTIAL, PROGRESSIVE = (0xFFC0, 0xFFC1), 0xFFC2  # frames with Huffman codes
SCAN, APP1 = 0xFFDA, 0xFFE1
TWO_WORDS, FRAME = struct.Struct(">HH").unpack_from, struct.Struct(">BHHB").unpack_from

# EXIF orientation: whether to transpose, then the flip code of cv2.flip
TRANSFORMS = {2: (False, 1), 3: (False, -1), 4: (False, 0), 5: (True, None), 6: (True, 1), 7: (True, -1), 8: (True, 0)}


class Box(NamedTuple):
    """Part of an upright image, in pixels."""

    top: int
    left: int
    rows: int
    columns: int

    def crop(self, levels: Levels) -> Levels:
        return levels[self.top : self.top + self.rows, self.left : self.left + self.columns]


class JpegHeader(NamedTuple):
    """The header of a JPEG."""

    stored: Size
    orientation: int

    @property
    def size(self) -> Size:
        """Rows and columns of the upright image."""
        rows, columns = self.stored
        return (columns, rows) if self.orientation > 4 else (rows, columns)


def read_header(data: bytes) -> JpegHeader | None:
    """The header of an ordinary 8-bit gray or color JPEG; None for other files, which `decode` handles."""
    frame, has_exif, position = 0, False, 2
    try:
        while True:
            marker, length = TWO_WORDS(data, position)
            if marker == SCAN:
                break
            if marker in SEQUENTIAL or marker == PROGRESSIVE:
                frame = position
            elif marker == APP1:
                has_exif = True
            elif marker < 0xFF00:
                return None
            position += 2 + length
        precision, rows, columns, components = FRAME(data, frame + 4)
        if not frame or precision != 8 or components not in (1, 3) or not 0 < rows * columns <= MAX_PIXELS:
            return None
        if 0xFF00 + data[frame + 1] == PROGRESSIVE or data[position + 4] != components:  # several scans
            check_scans(data, rows * columns, MAX_PIXELS)
        rotation = orientation(identify(io.BytesIO(data))) if has_exif else 1
        return JpegHeader((rows, columns), rotation if rotation in TRANSFORMS else 1)
    except Exception:  # broken bytes raise any kind of error; `decode` explains them
        return None


def decode_box(data: bytes, header: JpegHeader, box: Box, size: Size) -> Levels:
    """RGB of the part `box`, scaled down by 1, 2, 4 or 8 but not below `size` rows and columns.

    At full size it is bit-identical to the same part of `decode(data)`, which also decodes the files that libjpeg-turbo
    rejects.
    """
    codec, factor = require("simplejpeg", "train"), shrink_factor((box.rows, box.columns), size, most=8)
    try:
        rows, columns = (-(-side // factor) for side in header.stored)
        levels = codec.decode_jpeg(data, "RGB", min_height=rows, min_width=columns)
    except (ValueError, IndexError):
        return box.crop(np.asarray(decode(data)))
    transposed, flip_code = TRANSFORMS.get(header.orientation, (False, None))  # to upright
    if transposed:
        levels = opencv().transpose(levels)
    if flip_code is not None:
        levels = opencv().flip(levels, flip_code)
    return Box(*(round(side / factor) for side in box)).crop(levels)


def shrink_factor(size: Size, target: Size, most: int = 2**16) -> int:
    """The largest power of two by which `size` can be divided and still cover `target`."""
    factor = 1
    while 2 * factor <= min(most, size[0] // target[0], size[1] // target[1]):
        factor *= 2
    return factor


@functools.cache
def opencv() -> Any:
    """The module cv2 without its own threads: workers use the other cores, and threads do not survive a fork."""
    module = require("cv2", "train")
    module.setNumThreads(0)
    return module
