"""Operations on one image for augmentation: crops, affine moves, erasing, color changes, and RandAugment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vitruvian.config import Interpolation
from vitruvian.data.jpeg import Box, Levels, opencv, shrink_factor
from vitruvian.settings import Size

PaddingMode = Literal["constant", "reflect"]

Span = tuple[float, float]
"""Least, greatest."""

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


RAMP = np.arange(256, dtype=np.float32)

SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
"""Pillow's ImageFilter.SMOOTH."""


def looked_up(levels: Levels, table: NDArray[np.float32] | NDArray[np.intp]) -> Levels:
    """Every value replaced by its entry in `table`: (256,), or (256, channels), cut to 0 to 255."""
    entries = table.clip(0, 255).astype(np.uint8)
    return opencv().LUT(levels, entries[None] if entries.ndim == 2 else entries)


def blended(dull: Levels, levels: Levels, factor: float) -> Levels:
    """`dull` at factor 0, `levels` at 1, beyond it above 1."""
    return opencv().addWeighted(levels, factor, dull, 1.0 - factor, 0.0)


def gray(levels: Levels) -> Levels:
    """Luma (rows, columns), in the weights of ITU-R 601."""
    return levels if levels.ndim == 2 else opencv().cvtColor(levels, opencv().COLOR_RGB2GRAY)


def rgb(levels: Levels) -> Levels:
    """Three equal channels from gray."""
    return levels if levels.ndim == 3 else opencv().cvtColor(levels, opencv().COLOR_GRAY2RGB)


def brightness(levels: Levels, factor: float) -> Levels:
    return looked_up(levels, RAMP * np.float32(factor))


def contrast(levels: Levels, factor: float) -> Levels:
    """Away from the mean luma; big_vision takes the number of pixels / 256 for that mean by mistake."""
    middle = np.float32(int(opencv().mean(gray(levels))[0] + 0.5))
    return looked_up(levels, middle + np.float32(factor) * (RAMP - middle))


def saturation(levels: Levels, factor: float) -> Levels:
    return levels if levels.ndim == 2 else blended(rgb(gray(levels)), levels, factor)


def sharpness(levels: Levels, factor: float) -> Levels:
    """Smoothed below factor 1, sharpened above; the outermost pixels stay."""
    smooth = levels.copy()
    smooth[1:-1, 1:-1] = opencv().filter2D(levels, -1, SMOOTH)[1:-1, 1:-1]
    return blended(smooth, levels, factor)


def hue(levels: Levels, turn: float) -> Levels:
    """Every hue moved by the share `turn` of the color circle."""
    if levels.ndim == 2:
        return levels
    cv2 = opencv()
    circle = cv2.cvtColor(levels, cv2.COLOR_RGB2HSV_FULL)
    circle[..., 0] += np.uint8(round(turn * 255) % 256)
    return cv2.cvtColor(circle, cv2.COLOR_HSV2RGB_FULL)


def inverted(levels: Levels) -> Levels:
    return looked_up(levels, 255 - RAMP)


def posterized(levels: Levels, bits: int) -> Levels:
    """Only the `bits` highest bits of each value."""
    return levels & np.uint8(256 - (1 << (8 - bits)))


def solarized(levels: Levels, threshold: int) -> Levels:
    """Values from `threshold` on inverted."""
    return looked_up(levels, np.where(threshold > RAMP, RAMP, 255 - RAMP))


def solarized_add(levels: Levels, addition: int) -> Levels:
    """Values below 128 made brighter."""
    return looked_up(levels, np.where(RAMP < 128, RAMP + addition, RAMP))


def autocontrast(levels: Levels) -> Levels:
    """Each channel stretched from 0 to 255."""
    tables = []
    for counts in histograms(levels):
        present = np.flatnonzero(counts)
        low, high = int(present[0]), int(present[-1])
        scale = 255 / max(high - low, 1)
        stretched = np.trunc(RAMP.astype(np.float64) * scale - low * scale)
        tables.append(RAMP if low == high else stretched.astype(np.float32))
    return looked_up(levels, np.stack(tables, axis=1))


def equalized(levels: Levels) -> Levels:
    """Each channel with its values spread evenly."""
    tables = []
    for counts in histograms(levels):
        step = int(counts.sum() - counts[counts > 0][-1]) // 255
        below = np.cumsum(counts) - counts
        tables.append(((step // 2 + below) // step).astype(np.float32) if step else RAMP)
    return looked_up(levels, np.stack(tables, axis=1))


def histograms(levels: Levels) -> list[NDArray[np.intp]]:
    """How often each of the 256 values occurs, for each channel."""
    channels = range(1 if levels.ndim == 2 else levels.shape[2])
    cv2 = opencv()
    return [cv2.calcHist([levels], [c], None, [256], [0, 256]).ravel().astype(np.intp) for c in channels]


def color_jitter(levels: Levels, strengths: tuple[float, float, float, float], rng: np.random.Generator) -> Levels:
    """Brightness, contrast, saturation and hue changed by random amounts, in random order."""
    *factors, turn = strengths
    ranges = [*((1 - strength, 1 + strength) for strength in factors), (-turn, turn)]
    amounts = [low + draw * (high - low) for draw, (low, high) in zip(rng.random(4).tolist(), ranges)]
    for place in rng.permutation(4).tolist():
        if strengths[place]:
            levels = (brightness, contrast, saturation, hue)[place](levels, amounts[place])
    return levels


Operation = Callable[[Levels, float, np.random.Generator], Levels]

SHIFT, HOLE = 100 / 224, 40 / 224
"""Of the view's side at full strength: shift, and half the side of the hole."""


def _signed(amount: float, rng: np.random.Generator) -> float:
    return amount if rng.random() < 0.5 else -amount


def _shift(levels: Levels, axis: int, strength: float, rng: np.random.Generator) -> float:
    return _signed(SHIFT * strength * levels.shape[axis], rng)


def _factor(strength: float) -> float:
    return 0.1 + 1.8 * strength


def cutout(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """A gray square around a random pixel, cut off at the edges."""
    rows, columns = levels.shape[:2]
    reach = int(HOLE * strength * min(rows, columns))
    y, x = (int(draw * side) for draw, side in zip(rng.random(2).tolist(), (rows, columns)))
    top, left = max(0, y - reach), max(0, x - reach)
    changed = levels.copy()
    Box(top, left, y + reach - top, x + reach - left).of(changed)[...] = GRAY
    return changed


def gaussian_blur(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """Blurred with a deviation of 0.1 to 2 pixels at full strength, as BYOL and DeiT III draw it."""
    return opencv().GaussianBlur(levels, (0, 0), 0.1 + 1.9 * strength * rng.random())


RAND_AUGMENT: dict[str, Operation] = {
    # strength is magnitude / 10
    "autocontrast": lambda levels, strength, rng: autocontrast(levels),
    "equalize": lambda levels, strength, rng: equalized(levels),
    "invert": lambda levels, strength, rng: inverted(levels),
    "rotate": lambda levels, strength, rng: rotated(levels, _signed(30 * strength, rng)),
    "posterize": lambda levels, strength, rng: posterized(levels, max(1, int(4 * strength))),
    "solarize": lambda levels, strength, rng: solarized(levels, int(256 * strength)),
    "color": lambda levels, strength, rng: saturation(levels, _factor(strength)),
    "contrast": lambda levels, strength, rng: contrast(levels, _factor(strength)),
    "brightness": lambda levels, strength, rng: brightness(levels, _factor(strength)),
    "sharpness": lambda levels, strength, rng: sharpness(levels, _factor(strength)),
    "shear_x": lambda levels, strength, rng: moved(levels, (1, _signed(0.3 * strength, rng), 0, 0, 1, 0)),
    "shear_y": lambda levels, strength, rng: moved(levels, (1, 0, 0, _signed(0.3 * strength, rng), 1, 0)),
    "translate_x": lambda levels, strength, rng: moved(levels, (1, 0, _shift(levels, 1, strength, rng), 0, 1, 0)),
    "translate_y": lambda levels, strength, rng: moved(levels, (1, 0, 0, 0, 1, _shift(levels, 0, strength, rng))),
    "cutout": cutout,
    "solarize_add": lambda levels, strength, rng: solarized_add(levels, int(110 * strength)),
}

OPS: dict[str, Operation] = {
    # what `augment.ops` can name; strength is 0 to 1
    **RAND_AUGMENT,
    "gaussian_blur": gaussian_blur,
    "grayscale": lambda levels, strength, rng: saturation(levels, 1.0 - strength),
}


def rand_augment(levels: Levels, num_ops: int, magnitude: float, rng: np.random.Generator) -> Levels:
    """The image after `num_ops` random operations; magnitude is of 10."""
    operations = tuple(RAND_AUGMENT.values())
    for draw in rng.random(num_ops).tolist():
        levels = operations[int(draw * len(operations))](levels, magnitude / 10, rng)
    return levels
