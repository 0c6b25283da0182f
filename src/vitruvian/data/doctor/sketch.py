"""An image as 1,152 bytes: enough to recognize it again, and to compare it roughly with others.

N sketches; each is 32x32 brightness (Y) and 8x8 of the two color differences (Cb, Cr), values 0 to 255.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
