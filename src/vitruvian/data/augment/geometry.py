"""Where a view lies in its image: boxes, scaling, padding, turning, erasing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vitruvian.config import Interpolation
from vitruvian.data.jpeg import Box, Levels, opencv, shrink_factor
from vitruvian.data.preprocess import cover_size
from vitruvian.settings import Size

if TYPE_CHECKING:
    from vitruvian.data.augment.settings import Augment, PaddingMode

Span = tuple[float, float]
"""Least, greatest."""

LONGEST = 64
"""Longer side over shorter side of what `pad` scales; of a longer image the middle, for the memory."""

GRAY = 128
"""What moves into view from outside the image."""

FILTERS: dict[Interpolation, int] = {
    # the numbers of cv2.INTER_NEAREST_EXACT, _LINEAR, _CUBIC, _AREA, _LANCZOS4
    "nearest": 6,
    "bilinear": 1,
    "bicubic": 2,
    "area": 3,
    "lanczos": 4,
}

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)
"""Share and width / height of what is random_erasing, as in the paper on random erasing and in timm."""


def visible_part(size: Size, settings: Augment, rng: np.random.Generator) -> tuple[Box, Size]:
    """The part of an image of `size` that the view shows, and the size it is scaled to."""
    whole = Box(0, 0, *size)
    match settings.crop:
        case "inception":
            return inception_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "resized":
            return resized_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "pad":
            longest = (LONGEST, 1) if size[0] > size[1] else (1, LONGEST)
            part = whole if max(size) <= LONGEST * min(size) else center_box(size, longest)
            return part, cover_size((part.rows, part.columns), settings.image_size)
        case "center":
            return center_box(size, settings.image_size), settings.image_size
        case _:
            return whole, settings.image_size


def inception_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A part with uniform ratio, and a height uniform among those that keep to the area and the image.

    The way of tf.image.sample_distorted_bounding_box without object boxes, which the paper's code calls.
    """
    least, most = area[0] * size[0] * size[1], area[1] * size[0] * size[1]
    for _ in range(100):
        draws = rng.random(4).tolist()
        shape = ratio[0] + draws[0] * (ratio[1] - ratio[0])
        tallest = min(round(math.sqrt(most / shape)), int((size[1] + 0.5) / shape), size[0])
        shortest = min(round(math.sqrt(least / shape)), tallest)
        rows = shortest + int(draws[1] * (tallest - shortest + 1))
        columns = round(rows * shape)
        if rows > 0 and 0 < columns <= size[1] and least <= rows * columns <= most:
            return _placed((rows, columns), size, draws[2:])
    return Box(0, 0, *size)


def resized_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A part with uniform area and log-uniform ratio, as torchvision's RandomResizedCrop draws it."""
    box = _rectangle(size, area, ratio, rng)
    if box is not None:
        return box
    shape = min(max(size[1] / size[0], ratio[0]), ratio[1])
    return center_box(size, (1.0, shape))


def _rectangle(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box | None:
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        draws = rng.random(4).tolist()
        pixels = (area[0] + draws[0] * (area[1] - area[0])) * size[0] * size[1]
        shape = math.exp(low + draws[1] * (high - low))
        rows, columns = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < rows <= size[0] and 0 < columns <= size[1]:
            return _placed((rows, columns), size, draws[2:])
    return None


def _placed(part: Size, size: Size, draws: list[float]) -> Box:
    rows, columns = part
    return Box(int(draws[0] * (size[0] - rows + 1)), int(draws[1] * (size[1] - columns + 1)), rows, columns)


def center_box(size: Size, shape: tuple[float, float]) -> Box:
    """The largest part with the proportions of `shape`, in the middle."""
    rows = min(size[0], max(1, round(size[1] * shape[0] / shape[1])))
    columns = min(size[1], max(1, round(size[0] * shape[1] / shape[0])))
    return Box((size[0] - rows) // 2, (size[1] - columns) // 2, rows, columns)


def scaled(levels: Levels, size: Size, interpolation: Interpolation) -> Levels:
    """The image with `size` rows and columns, averaged down by a power of two first where that leaves enough."""
    cv2 = opencv()
    factor = shrink_factor(levels.shape[:2], size)
    if factor > 1:
        rows, columns = levels.shape[0] // factor, levels.shape[1] // factor
        levels = cv2.resize(levels, (columns, rows), interpolation=cv2.INTER_AREA)
    if levels.shape[:2] == size:
        return levels
    rows, columns = size
    return cv2.resize(levels, (columns, rows), interpolation=FILTERS[interpolation])


def window(levels: Levels, size: Size, padding: int, padding_mode: PaddingMode, rng: np.random.Generator) -> Levels:
    """`size` rows and columns from anywhere in the image with `padding` more pixels on each side."""
    cv2 = opencv()
    border = cv2.BORDER_CONSTANT if padding_mode == "constant" else cv2.BORDER_REFLECT_101
    padded: Levels = cv2.copyMakeBorder(levels, padding, padding, padding, padding, border)
    return _placed(size, padded.shape[:2], rng.random(2).tolist()).of(padded)


def moved(levels: Levels, matrix: tuple[float, float, float, float, float, float]) -> Levels:
    """The image whose pixel at (x, y) is the nearest to (ax + by + c, dx + ey + f) in `levels`, or gray.

    Coordinates as in Pillow's Image.transform: the first pixel reaches from 0 to 1.
    """
    cv2 = opencv()
    a, b, c, d, e, f = matrix
    centered = np.array([[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]])
    rows, columns = levels.shape[:2]
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(levels, centered, (columns, rows), flags=flags, borderValue=(GRAY,) * 3)


def rotated(levels: Levels, degrees: float) -> Levels:
    """Turned counter-clockwise about its center."""
    angle, y, x = math.radians(degrees), levels.shape[0] / 2, levels.shape[1] / 2
    cos, sin = math.cos(angle), math.sin(angle)
    return moved(levels, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def random_erasing(levels: Levels, rng: np.random.Generator) -> Levels:
    """The image with a rectangle of noise in it."""
    box = _rectangle(levels.shape[:2], ERASED_AREA, ERASED_RATIO, rng)
    if box is None:
        return levels
    changed = levels.copy()
    hole = box.of(changed)
    hole[...] = rng.integers(0, 256, hole.shape, dtype=np.uint8)
    return changed
