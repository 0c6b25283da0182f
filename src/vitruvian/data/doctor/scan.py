"""Read every image of a dataset once: its properties and a small sketch of it, or why it cannot be read."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.data.decode import Reduced, open_reduced, orientation, reason
from vitruvian.data.sources import Source
from vitruvian.data.workers import in_order
from vitruvian.progress import Track

Bytes = NDArray[np.uint8]

Floats = NDArray[np.float32]

Places = NDArray[np.int64]
"""Numbers of images."""

SIDE = 32

CELLS = 8

SKETCH_BYTES = SIDE * SIDE + 2 * CELLS * CELLS

LEAST_CORRELATION = 0.98
"""Of the brightness of two sketches that show the same image.

This and the next two limits were measured on 502 photographs. Halved, at a third of the size, squashed, re-encoded
(JPEG 50 and 20), 15% darker or with 20% more contrast, all stay within them; 15% brighter, which cuts the
highlights, 98%; with a patch of an eighth of the side painted over, 21%; with a tenth cropped, 0.4%.
"""

MOST_LEVELS = 20.0
"""Mean difference in a cell of 4x4 points, in levels of 255, once brightness and contrast are made equal."""

MOST_COLOR_LEVELS = 20.0
"""Difference of color in a cell."""

BANDS = 8
"""Parts of 16 bits in an image's hash; two images are compared where one part is equal."""

CHUNK = 2048
"""Sketches that are worked on at once; bounds the memory."""


def sketch(image: Image.Image) -> Bytes:
    """The sketch of an RGB image, of any size."""
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("YCbCr"))
    step = SIDE // CELLS
    color = small[..., 1:].reshape(CELLS, step, CELLS, step, 2).mean((1, 3))
    return np.concatenate([small[..., 0].ravel(), np.rint(color).astype(np.uint8).ravel()])


def brightness(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 32, 32)
    return sketches[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE).astype(np.float32)


def color(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 8, 8, 2), 0 for gray
    return sketches[:, SIDE * SIDE :].reshape(-1, CELLS, CELLS, 2).astype(np.float32) - 128.0


def is_gray(sketches: Bytes) -> NDArray[np.bool_]:
    return np.asarray(np.abs(color(sketches)).max((1, 2, 3), initial=0) <= 2)


def is_blank(sketches: Bytes) -> NDArray[np.bool_]:
    """Whether an image shows one color only, give or take 2 levels."""
    spread = np.ptp(brightness(sketches), axis=(1, 2)), np.ptp(color(sketches), axis=(1, 2)).max(-1, initial=0)
    return np.asarray((spread[0] <= 4) & (spread[1] <= 4))


def hashes(sketches: Bytes) -> NDArray[np.uint16]:  # (N, 1152) -> (N, 8)
    """128 bits of each image: the signs of its lowest spatial frequencies, without the mean.

    Brightness, contrast, scale and compression hardly change them.
    """
    order = np.arange(SIDE)
    waves = np.cos(np.pi * (2 * order[None] + 1) * order[:16, None] / (2 * SIDE)).astype(np.float32)
    lowest = sorted((u + v, u, v) for u in range(16) for v in range(16) if u + v)[: BANDS * 16]
    rows, columns = [u for _, u, _ in lowest], [v for _, _, v in lowest]
    spectrum = waves @ brightness(sketches) @ waves.T
    return np.ascontiguousarray(np.packbits(spectrum[:, rows, columns] > 0, axis=1)).view(np.uint16)


def same_image(first: Bytes, second: Bytes) -> NDArray[np.bool_]:
    """Whether sketch k of `first` and sketch k of `second` show the same image."""
    pairs = len(first)
    one, two = (brightness(side).reshape(pairs, -1) for side in (first, second))
    one, two = one - one.mean(1, keepdims=True), two - two.mean(1, keepdims=True)
    spread_one, spread_two = (np.sqrt((side**2).mean(1, keepdims=True)) + 1e-6 for side in (one, two))
    correlation = (one * two).mean(1) / (spread_one * spread_two)[:, 0]
    difference = np.abs(one / spread_one - two / spread_two) * np.sqrt(spread_one * spread_two)
    step = SIDE // CELLS
    cells = difference.reshape(pairs, CELLS, step, CELLS, step).mean((2, 4)).max((1, 2), initial=0)
    colors = np.abs(color(first) - color(second)).max((1, 2, 3), initial=0)
    alike = (correlation >= LEAST_CORRELATION) & (cells <= MOST_LEVELS) & (colors <= MOST_COLOR_LEVELS)
    return np.asarray(alike)


def features(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 176), each of length 1
    """What an image roughly looks like: directions of edges in 4x4 cells, and brightness and color of the cells."""
    gray, count = brightness(sketches), len(sketches)
    down, right = np.zeros_like(gray), np.zeros_like(gray)
    down[:, 1:-1], right[:, :, 1:-1] = gray[:, 2:] - gray[:, :-2], gray[:, :, 2:] - gray[:, :, :-2]
    strength, turn = np.hypot(down, right), (np.arctan2(down, right) % np.pi) * (8 / np.pi)
    below, share = np.floor(turn).astype(int) % 8, turn - np.floor(turn)
    edges = np.empty((count, 4, 4, 8), np.float32)
    for direction in range(8):
        part = np.where(below == direction, 1 - share, np.where((below + 1) % 8 == direction, share, 0))
        edges[..., direction] = (strength * part).reshape(count, 4, 8, 4, 8).sum((2, 4))
    light = (gray - 128).reshape(count, 4, 8, 4, 8).mean((2, 4)).reshape(count, -1)
    hue = 2 * color(sketches).reshape(count, 4, 2, 4, 2, 2).mean((2, 4)).reshape(count, -1)
    parts = unit(np.sqrt(edges).reshape(count, -1)), 0.6 * unit(np.concatenate([light, hue], 1))
    return unit(np.concatenate(parts, 1))


def unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + np.float32(1e-6)))


def mapped(function: Callable[[Bytes], NDArray[Any]], sketches: Bytes, places: Places) -> NDArray[Any]:
    """A function of the sketches at some places, a part at a time."""
    return np.concatenate([function(sketches[part]) for part in pieces(places)] or [function(sketches[:0])])


def pieces(places: Places, size: int = CHUNK) -> Iterator[Places]:
    """`places` cut into parts that fit in memory with their sketches."""
    for start in range(0, len(places), size):
        yield places[start : start + size]


WORKER_CHUNK = 32
"""Images that a worker looks at before it reports."""

KEPT_REASONS = 1000

RECORD = np.dtype(
    [
        ("split", np.uint8),
        ("problem", np.uint8),
        ("oddity", np.uint16),
        ("label", np.int32),
        ("index", np.int64),
        ("rows", np.int32),
        ("columns", np.int32),
        ("bytes", np.int64),
        ("pixels", np.uint64),
    ]
)
"""What is kept of one image in memory; the names are those of Look."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All images of a dataset, split after split, in the order of their sources."""

    splits: Mapping[str, Source]
    records: NDArray[np.void]
    """One RECORD an image."""
    sketches: Bytes
    """One sketch an image, in a temporary file rather than in memory; zeros where the image cannot be read."""
    reasons: dict[int, str]
    """Why an image cannot be read, by its place in `records`; the first thousand only."""

    @property
    def readable(self) -> NDArray[np.bool_]:
        return np.asarray(self.records["problem"] == Problem.NONE)

    def source(self, place: int) -> tuple[str, Source, int]:
        """The split, the source and the number within it of the image at `place`."""
        name = list(self.splits)[self.records["split"][place]]
        return name, self.splits[name], int(self.records["index"][place])


def scan(splits: Mapping[str, Source], *, workers: int, track: Track) -> Scan:
    """Look at every image once; the result does not depend on the number of workers."""
    sources = list(splits.values())
    total = sum(map(len, sources))
    records, reasons = np.zeros(total, RECORD), dict[int, str]()
    with tempfile.TemporaryFile() as file:  # the mapping keeps the file's blocks after it is closed
        sketches = np.memmap(file, np.uint8, "w+", shape=(total, SKETCH_BYTES))
    places = ((split, index) for split, source in enumerate(sources) for index in range(len(source)))
    looks = in_order(partial(look_at, sources), places, workers=workers, chunk=WORKER_CHUNK)
    for place, look in enumerate(track(looks, total)):
        for name in ("problem", "oddity", "rows", "columns", "bytes", "pixels"):
            records[name][place] = getattr(look, name)
        sketches[place] = look.sketch
        if look.reason and len(reasons) < KEPT_REASONS:
            reasons[place] = look.reason
    start = 0
    for split, source in enumerate(sources):
        part = records[start : start + len(source)]
        part["split"], part["index"], part["label"] = split, np.arange(len(source)), source.labels()
        start += len(source)
    return Scan(splits, records, sketches, reasons)


DRAFT_SIDE = 256
"""JPEG images are decoded at the smallest of their scales whose sides are at least this, in pixels."""


class Problem(IntEnum):
    """Why an image cannot be read."""

    NONE = 0
    EMPTY = auto()
    TRUNCATED = auto()
    NOT_AN_IMAGE = auto()
    BROKEN = auto()


class Oddity(IntFlag):
    """What an image has that others usually have not."""

    NONE = 0
    CMYK = auto()
    DEEP = auto()
    ALPHA = auto()
    TURNED = auto()
    ANIMATED = auto()
    GRAY_END = auto()


@dataclass(kw_only=True, slots=True)
class Look:
    """What is kept of one image."""

    sketch: Bytes
    bytes: int = 0
    columns: int = 0
    rows: int = 0
    oddity: Oddity = Oddity.NONE
    pixels: int = 0
    """A hash of its size and pixels."""
    problem: Problem = Problem.NONE
    reason: str = ""


def look_at(sources: Sequence[Source], place: tuple[int, int]) -> Look:
    """The sample of a source, by their numbers, which may be broken in any way."""
    split, index = place
    look = Look(sketch=np.zeros(SKETCH_BYTES, np.uint8))
    try:
        data = sources[split].read(index)
        look.bytes = len(data) if isinstance(data, bytes) else data.nbytes
        image = open_reduced(data, DRAFT_SIDE)
        look.columns, look.rows = image.size
        look.oddity = oddity_of(image.stored)
        look.pixels = hash_of(image)
        look.sketch = sketch(image.upright)
    except Exception as error:  # sources and Pillow raise whatever broken bytes lead them to
        look.reason = reason(error)
        look.problem = problem_of(look.reason)
    return look


def hash_of(image: Reduced) -> int:
    """64 bits that are equal for images of equal size and pixels."""
    size = f"{image.size} as {image.upright.size}".encode()
    return int.from_bytes(hashlib.blake2b(image.upright.tobytes(), digest_size=8, key=size).digest(), "little")


def oddity_of(image: Image.Image) -> Oddity:
    """What is unusual about a decoded image."""
    signs = {
        Oddity.CMYK: image.mode == "CMYK",
        Oddity.DEEP: image.mode == "F" or image.mode.startswith("I"),
        Oddity.ALPHA: image.has_transparency_data,
        Oddity.TURNED: orientation(image) in range(2, 9),
        Oddity.ANIMATED: has_frames(image),
        Oddity.GRAY_END: image.format == "JPEG" and ends_gray(image),
    }
    return Oddity(sum(oddity for oddity, present in signs.items() if present))


def has_frames(image: Image.Image) -> bool:
    """Whether there is a second frame; the second image that some telephones hide in a JPEG does not count."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # what follows the first frame is broken, and not used
        return True


def ends_gray(image: Image.Image) -> bool:
    """Whether the last eighth of a JPEG is the even gray that decoders put in place of missing data."""
    height = image.height // 8
    if height < 2:
        return False
    end = np.asarray(image.crop((0, image.height - height, image.width, image.height)))
    return bool(end.min() >= 127 and end.max() <= 129 and np.asarray(image).std() > 4)


def problem_of(text: str) -> Problem:
    """The kind of problem that `decode` tells in this line."""
    for words, problem in (
        ("is empty", Problem.EMPTY),
        ("truncated", Problem.TRUNCATED),
        ("cut short", Problem.TRUNCATED),
        ("not an image", Problem.NOT_AN_IMAGE),
        ("this is a", Problem.NOT_AN_IMAGE),
    ):
        if words in text.lower():
            return problem
    return Problem.BROKEN
