"""Read every image of a dataset once: its properties and a small sketch of it, or why it cannot be read.

A sketch of 1,152 bytes is enough to recognize an image again and to compare it roughly with others: 32x32 values of
brightness (Y) and 8x8 of each color difference (Cb, Cr), from 0 to 255.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.data.decode import (
    Problem,
    ReducedImage,
    UnreadableImageError,
    open_reduced,
    orientation,
    problem_of,
    reason,
)
from vitruvian.data.sources import Source
from vitruvian.data.stored import display_stored
from vitruvian.data.workers import in_order
from vitruvian.progress import Track

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Rows = NDArray[np.int64]  # indices of images in a scan
WORKER_CHUNK = 32  # number of images that a worker examines per task
MAX_REASONS = 1000
DRAFT_SIDE = 256  # JPEG images are decoded at the smallest of their scales whose sides are at least this, in pixels
Trait = IntFlag("Trait", "CMYK DEEP ALPHA ROTATED ANIMATED GRAY_END")  # unusual properties of an image
PLACE = [("split", "u1"), ("label", "i4"), ("index", "i8")]
MEASURED = [("problem", "u1"), ("traits", "u2"), ("rows", "i4"), ("columns", "i4"), ("bytes", "i8"), ("pixels", "u8")]
RECORD = np.dtype(PLACE + MEASURED)  # one image; `pixels` are 64 bits, equal for images of equal size and pixels


@dataclass(frozen=True, slots=True)
class Scan:
    """All images of a dataset, split after split, in the order of their sources."""

    splits: Mapping[str, Source]
    records: NDArray[np.void]  # one RECORD per image
    sketches: Bytes  # one per image, in a temporary file if there are many; zeros if it cannot be read
    reasons: dict[int, str]  # why images cannot be read, by row; the first thousand only

    @property
    def readable(self) -> NDArray[np.bool_]:
        return np.asarray(self.records["problem"] == Problem.NONE)


def scan(splits: Mapping[str, Source], *, workers: int, track: Track) -> Scan:
    """Examine every image once; the result does not depend on the number of workers."""
    sources = list(splits.values())
    total = sum(map(len, sources))
    records, reasons = np.zeros(total, RECORD), dict[int, str]()
    sketches: Bytes = np.zeros((total, SKETCH_BYTES) if total <= MOST_IN_MEMORY else 0, np.uint8)
    if total > MOST_IN_MEMORY:
        with tempfile.TemporaryFile() as file:  # the memory map keeps the file after it is closed
            sketches = np.memmap(file, np.uint8, "w+", shape=(total, SKETCH_BYTES))
    positions = ((split, index) for split, source in enumerate(sources) for index in range(len(source)))
    examined = in_order(partial(examine, sources), positions, workers=workers, chunk=WORKER_CHUNK)
    for row, (record, drawn, problem) in enumerate(track(examined, total)):
        records[row], sketches[row] = record, drawn
        if problem and len(reasons) < MAX_REASONS:
            reasons[row] = problem
    start = 0
    for split, source in enumerate(sources):
        part = records[start : start + len(source)]
        part["split"], part["index"], part["label"] = split, np.arange(len(source)), source.labels()
        start += len(source)
    return Scan(splits, records, sketches, reasons)


MOST_REMEMBERED = 10_000  # images
_remembered: dict[bytes, tuple[NDArray[np.void], Bytes, str]] = {}  # results of `examine` by the digest of an image


def examine(sources: Sequence[Source], position: tuple[int, int]) -> tuple[NDArray[np.void], Bytes, str]:
    """Read one sample, given by the indices of its source and in it; it may be broken in any way.

    Returns its RECORD, its sketch, and why it cannot be read. The result for a readable image is remembered, because
    the runs of a sweep compare the same images again and again.
    """
    split, index = position
    record, drawn, problem = np.zeros((), RECORD), np.zeros(SKETCH_BYTES, np.uint8), ""
    try:
        data = sources[split].read(index)
        content, shape = (data, "") if isinstance(data, bytes) else (data.tobytes(), str(data.shape))
        digest = hashlib.blake2b(content, digest_size=16, key=shape.encode()).digest()
        if digest in _remembered:
            return _remembered[digest]
        record["bytes"] = len(content)
        try:
            image = open_reduced(data, DRAFT_SIDE)
        except UnreadableImageError:
            on_screen = display_stored(data)
            if on_screen is None:
                raise
            image = ReducedImage(on_screen, on_screen, on_screen.size)
        record["columns"], record["rows"] = image.size
        record["traits"] = traits_of(image.stored)
        size = f"{image.size} as {image.upright.size}".encode()
        hashed = hashlib.blake2b(image.upright.tobytes(), digest_size=8, key=size)
        record["pixels"] = int.from_bytes(hashed.digest(), "little")
        drawn = sketch(image.upright)
        if len(_remembered) >= MOST_REMEMBERED:
            _remembered.clear()
        _remembered[digest] = record, drawn, problem
    except Exception as error:  # sources and Pillow raise any kind of error for broken files
        record["problem"], problem = problem_of(error), reason(error)
    return record, drawn, problem


def traits_of(image: Image.Image) -> Trait:
    """The unusual properties of a decoded image."""
    present = {
        Trait.CMYK: image.mode == "CMYK",
        Trait.DEEP: image.mode == "F" or image.mode.startswith("I"),
        Trait.ALPHA: image.has_transparency_data,
        Trait.ROTATED: orientation(image) in range(2, 9),
        Trait.ANIMATED: has_frames(image),
        Trait.GRAY_END: image.format == "JPEG" and ends_gray(image),
    }
    return Trait(sum(trait for trait, is_present in present.items() if is_present))


def has_frames(image: Image.Image) -> bool:
    """Whether there is a second frame; the second image that some phones hide in a JPEG does not count."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # the data after the first frame is broken; it is not used
        return True


def ends_gray(image: Image.Image) -> bool:
    """Whether the last eighth of a JPEG is the uniform gray that decoders use for missing data."""
    height = image.height // 8
    if height < 2:
        return False
    end = np.asarray(image.crop((0, image.height - height, image.width, image.height)))
    return bool(end.min() >= 127 and end.max() <= 129 and np.asarray(image).std() > 4)


# Sketches: N images, each 32 x 32 brightness and 8 x 8 x 2 color

SIDE = 32
CELLS = 8
SKETCH_BYTES = SIDE * SIDE + 2 * CELLS * CELLS
MOST_IN_MEMORY = 10_000  # number of images up to which their sketches are kept in memory

# Two sketches show the same image within these limits, measured on 502 photographs. Halved, at a third of the size,
# squashed, re-encoded (JPEG 50 and 20), 15% darker or with 20% more contrast, all stay within them; 15% brighter,
# which clips the highlights, 98%; with a patch of an eighth of the side painted over, 21%; with a tenth cropped, 0.4%.
MIN_CORRELATION = 0.98  # minimum correlation of brightness
MAX_LEVELS = 20.0  # maximum mean difference in a cell of 4x4 points, of 255, with equal brightness and contrast
MAX_COLOR_LEVELS = 20.0  # maximum difference of color in a cell
BANDS = 8  # parts of 16 bits in an image's hash; two images are compared if one part is equal
CHUNK = 2048  # number of sketches processed at once; bounds the memory


def sketch(image: Image.Image) -> Bytes:
    """The sketch of an RGB image of any size."""
    small = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("YCbCr"))
    step = SIDE // CELLS
    color = small[..., 1:].reshape(CELLS, step, CELLS, step, 2).mean((1, 3))
    return np.concatenate([small[..., 0].ravel(), np.rint(color).astype(np.uint8).ravel()])


def brightness_of(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 32, 32)
    return sketches[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE).astype(np.float32)


def color_of(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 8, 8, 2), 0 for gray
    return sketches[:, SIDE * SIDE :].reshape(-1, CELLS, CELLS, 2).astype(np.float32) - 128.0


def is_gray(sketches: Bytes) -> NDArray[np.bool_]:
    return np.asarray(np.abs(color_of(sketches)).max((1, 2, 3), initial=0) <= 2)


def is_blank(sketches: Bytes) -> NDArray[np.bool_]:
    """Whether an image has one color only, within 2 levels."""
    light, color = brightness_of(sketches), color_of(sketches)
    return np.asarray((np.ptp(light, axis=(1, 2)) <= 4) & (np.ptp(color, axis=(1, 2)).max(-1, initial=0) <= 4))


def perceptual_hashes(sketches: Bytes) -> NDArray[np.uint16]:  # (N, 1152) -> (N, 8)
    """128 bits per image: the signs of its lowest spatial frequencies (DCT), without the mean.

    Changes of brightness, contrast, scale and compression hardly affect them.
    """
    order = np.arange(SIDE)
    waves = np.cos(np.pi * (2 * order[None] + 1) * order[:16, None] / (2 * SIDE)).astype(np.float32)
    lowest = sorted((u + v, u, v) for u in range(16) for v in range(16) if u + v)[: BANDS * 16]
    rows, columns = [u for _, u, _ in lowest], [v for _, _, v in lowest]
    spectrum = waves @ brightness_of(sketches) @ waves.T
    return np.ascontiguousarray(np.packbits(spectrum[:, rows, columns] > 0, axis=1)).view(np.uint16)


def is_same_image(first: Bytes, second: Bytes) -> NDArray[np.bool_]:
    """Whether sketch k of `first` and sketch k of `second` show the same image."""
    pairs = len(first)
    one, two = (brightness_of(sketches).reshape(pairs, -1) for sketches in (first, second))
    one, two = one - one.mean(1, keepdims=True), two - two.mean(1, keepdims=True)
    spread_one, spread_two = (np.sqrt((values**2).mean(1, keepdims=True)) + 1e-6 for values in (one, two))
    correlation = (one * two).mean(1) / (spread_one * spread_two)[:, 0]
    difference = np.abs(one / spread_one - two / spread_two) * np.sqrt(spread_one * spread_two)
    step = SIDE // CELLS
    cells = difference.reshape(pairs, CELLS, step, CELLS, step).mean((2, 4)).max((1, 2), initial=0)
    colors = np.abs(color_of(first) - color_of(second)).max((1, 2, 3), initial=0)
    return np.asarray((correlation >= MIN_CORRELATION) & (cells <= MAX_LEVELS) & (colors <= MAX_COLOR_LEVELS))


def sketch_features(sketches: Bytes) -> Floats:  # (N, 1152) -> (N, 176), each of length 1
    """Features of the appearance: directions of edges in 4x4 cells, and brightness and color of the cells."""
    gray, count = brightness_of(sketches), len(sketches)
    down, right = np.zeros_like(gray), np.zeros_like(gray)
    down[:, 1:-1], right[:, :, 1:-1] = gray[:, 2:] - gray[:, :-2], gray[:, :, 2:] - gray[:, :, :-2]
    strength, angle = np.hypot(down, right), (np.arctan2(down, right) % np.pi) * (8 / np.pi)
    below, share = np.floor(angle).astype(int) % 8, angle - np.floor(angle)
    edges = np.empty((count, 4, 4, 8), np.float32)
    for direction in range(8):
        part = np.where(below == direction, 1 - share, np.where((below + 1) % 8 == direction, share, 0))
        edges[..., direction] = (strength * part).reshape(count, 4, 8, 4, 8).sum((2, 4))
    light = (gray - 128).reshape(count, 4, 8, 4, 8).mean((2, 4)).reshape(count, -1)
    hue = 2 * color_of(sketches).reshape(count, 4, 2, 4, 2, 2).mean((2, 4)).reshape(count, -1)
    parts = unit(np.sqrt(edges).reshape(count, -1)), 0.6 * unit(np.concatenate([light, hue], 1))
    return unit(np.concatenate(parts, 1))


def unit(vectors: Floats) -> Floats:
    return np.asarray(vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + np.float32(1e-6)))


def map_sketches(function: Callable[[Bytes], NDArray[Any]], sketches: Bytes, rows: Rows) -> NDArray[Any]:
    """Apply a function to the sketches in these rows, a chunk at a time."""
    return np.concatenate([function(sketches[chunk]) for chunk in chunks(rows)] or [function(sketches[:0])])


def chunks(rows: Rows, size: int = CHUNK) -> Iterator[Rows]:
    """`rows` in parts that fit in memory with their sketches."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
