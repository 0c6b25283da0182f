"""Decode a part of a JPEG, reading little more of the file than that part needs.

Three things save time, and none changes what an image shows: libjpeg-turbo is called directly (simplejpeg); a part that
is much larger than the wanted size is decoded at half, quarter or eighth size; and in files with a restart marker after
every block (`vit pack` writes them), all blocks that the part does not touch are cut out of the file before decoding.
"""

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
SCAN, INTERVAL, APP1 = 0xFFDA, 0xFFDD, 0xFFE1
RESTART, END = 0xD0, 0xD9  # after a byte 0xFF
TWO_WORDS, FRAME = struct.Struct(">HH").unpack_from, struct.Struct(">BHHB").unpack_from
NEIGHBORS = 2  # pixels around a part that its colors depend on: subsampled chroma is interpolated during decoding

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
    block: Size  # rows and columns of pixels in one coded block (an MCU)
    separable: bool  # whether every block of an upright image is coded separately, so that blocks can be cut out
    frame: int  # offset of the frame header in the file
    scan: int  # offset of the coded blocks

    @property
    def size(self) -> Size:
        """Rows and columns of the upright image."""
        rows, columns = self.stored
        return (columns, rows) if self.orientation > 4 else (rows, columns)


def read_header(data: bytes) -> JpegHeader | None:
    """The header of an ordinary 8-bit gray or color JPEG; None for other files, which `decode` handles."""
    frame, interval, has_exif, position = 0, 0, False, 2
    try:
        while True:
            marker, length = TWO_WORDS(data, position)
            if marker == SCAN:
                break
            if marker in SEQUENTIAL or marker == PROGRESSIVE:
                frame = position
            elif marker == INTERVAL:
                interval = int.from_bytes(data[position + 4 : position + 6])
            elif marker == APP1:
                has_exif = True
            elif marker < 0xFF00:
                return None
            position += 2 + length
        precision, rows, columns, components = FRAME(data, frame + 4)
        if not frame or precision != 8 or components not in (1, 3) or not 0 < rows * columns <= MAX_PIXELS:
            return None
        sampling = [data[frame + 11 + 3 * k] for k in range(components)] if components > 1 else [0x11]
        one_scan = 0xFF00 + data[frame + 1] in SEQUENTIAL and data[position + 4] == components
        if not one_scan:
            check_scans(data, rows * columns, MAX_PIXELS)
        rotation = orientation(identify(io.BytesIO(data))) if has_exif else 1
        return JpegHeader(
            stored=(rows, columns),
            orientation=rotation if rotation in TRANSFORMS else 1,
            block=(8 * max(s & 15 for s in sampling), 8 * max(s >> 4 for s in sampling)),
            separable=one_scan and interval == 1 and rotation == 1,
            frame=frame,
            scan=position + 2 + length,
        )
    except Exception:  # broken bytes raise any kind of error; `decode` explains them
        return None


def decode_box(data: bytes, header: JpegHeader, box: Box, size: Size) -> Levels:
    """RGB of the part `box`, scaled down by 1, 2, 4 or 8 but not below `size` rows and columns.

    At full size it is bit-identical to the same part of `decode(data)`, which also decodes the files that libjpeg-turbo
    rejects.
    """
    codec, factor = require("simplejpeg", "train"), shrink_factor((box.rows, box.columns), size, most=8)
    try:
        part, inner, stored = cut_blocks(data, header, box) if header.separable else (data, box, header.stored)
        rows, columns = (-(-side // factor) for side in stored)
        levels = codec.decode_jpeg(part, "RGB", min_height=rows, min_width=columns)
    except (ValueError, IndexError):
        return box.crop(np.asarray(decode(data)))
    transposed, flip_code = TRANSFORMS.get(header.orientation, (False, None))  # to upright
    if transposed:
        levels = opencv().transpose(levels)
    if flip_code is not None:
        levels = opencv().flip(levels, flip_code)
    return Box(*(round(side / factor) for side in inner)).crop(levels)


def shrink_factor(size: Size, target: Size, most: int = 2**16) -> int:
    """The largest power of two by which `size` can be divided and still cover `target`."""
    factor = 1
    while 2 * factor <= min(most, size[0] // target[0], size[1] // target[1]):
        factor *= 2
    return factor


def cut_blocks(data: bytes, header: JpegHeader, box: Box) -> tuple[Any, Box, Size]:
    """A smaller JPEG of the blocks that `box` needs, the position of `box` in it, and its rows and columns.

    The pixels of the box are bit-identical. A file whose blocks do not match its header is returned unchanged.
    """
    # A JPEG codes blocks (MCUs) in rows from the top left. Normally a block cannot be decoded without the ones before
    # it: codes are not aligned to bytes, and DC coefficients are coded as differences to the previous block. A restart
    # marker (0xFF 0xD0 to 0xD7) resets both. With one after every block, the blocks are independent byte strings, and
    # the byte after 0xFF separates markers from data (0xFF 0x00). So the file of a part is made of bytes alone, without
    # decoding: the headers with a new size, the strings of the wanted blocks row by row, and markers renumbered from
    # 0 to 7 in turn, the last replaced by the end-of-image marker.
    (height, width), (tall, wide) = header.stored, header.block
    rows, columns = -(-height // tall), -(-width // wide)
    codes = np.frombuffer(data, np.uint8, offset=header.scan)
    candidates = (codes == 0xFF).nonzero()[0]
    block_ends = candidates[codes[1:].take(candidates, mode="clip") > 0] + 2  # after the marker
    if len(block_ends) != rows * columns:
        return data, box, header.stored
    edges = np.concatenate([[0], block_ends])
    starts, ends = edges[:-1].reshape(rows, columns), edges[1:].reshape(rows, columns)
    upper, lower = max(0, (box.top - NEIGHBORS) // tall), min(rows, (box.top + box.rows + 1) // tall + 1)
    left, right = max(0, (box.left - NEIGHBORS) // wide), min(columns, (box.left + box.columns + 1) // wide + 1)
    starts, ends = starts[upper:lower, left:right], ends[upper:lower, left:right]
    size = (min(height, lower * tall) - upper * tall, min(width, right * wide) - left * wide)

    parts = [data[: header.frame + 5], struct.pack(">HH", *size), data[header.frame + 9 : header.scan]]
    body = data[header.scan :]
    parts += [body[start:end] for start, end in zip(starts[:, 0].tolist(), ends[:, -1].tolist())]
    smaller = bytearray().join(parts)
    markers = (ends - starts).cumsum() - 1
    codes = np.frombuffer(smaller, np.uint8, offset=header.scan)
    codes[markers] = RESTART + (np.arange(len(markers)) & 7)
    codes[markers[-1]] = END
    return smaller, Box(box.top - upper * tall, box.left - left * wide, box.rows, box.columns), size


@functools.cache
def opencv() -> Any:
    """The module cv2 without its own threads: workers use the other cores, and threads do not survive a fork."""
    module = require("cv2", "train")
    module.setNumThreads(0)
    return module
