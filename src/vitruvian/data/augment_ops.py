"""Operations on one image for augmentation: random crops, affine maps, erasing, color changes, and RandAugment.

Images are uint8, (rows, columns, 3) RGB or (rows, columns) gray; every function leaves its argument unchanged. Color
operations have Pillow's meaning: those that depend on each value alone go through a table of 256 entries and equal
Pillow bit for bit; blends of two images are rounded where Pillow truncates, and may be 1 higher.
"""

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
"""Minimum and maximum."""

GRAY = 128
"""Value of pixels that are moved in from outside the image."""

FILTERS: dict[Interpolation, int] = {
    # the values of cv2.INTER_NEAREST_EXACT, _LINEAR, _CUBIC, _AREA, _LANCZOS4
    "nearest": 6,
    "bilinear": 1,
    "bicubic": 2,
    "area": 3,
    "lanczos": 4,
}

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 10 / 3)
"""Area and aspect ratio of the erased rectangle, as in the paper on random erasing and in timm."""


def inception_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A crop with uniform aspect ratio, and a height uniform among those that fit the area and the image.

    The algorithm of tf.image.sample_distorted_bounding_box without object boxes, which the paper's code calls.
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
            return _place((rows, columns), size, draws[2:])
    return Box(0, 0, *size)


def random_resized_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box:
    """A crop with uniform area and log-uniform aspect ratio, as in torchvision's RandomResizedCrop."""
    box = _random_box(size, area, ratio, rng)
    if box is not None:
        return box
    shape = min(max(size[1] / size[0], ratio[0]), ratio[1])
    return center_box(size, (1.0, shape))


def _random_box(size: Size, area: Span, ratio: Span, rng: np.random.Generator) -> Box | None:
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        draws = rng.random(4).tolist()
        pixels = (area[0] + draws[0] * (area[1] - area[0])) * size[0] * size[1]
        shape = math.exp(low + draws[1] * (high - low))
        rows, columns = round(math.sqrt(pixels / shape)), round(math.sqrt(pixels * shape))
        if 0 < rows <= size[0] and 0 < columns <= size[1]:
            return _place((rows, columns), size, draws[2:])
    return None


def _place(part: Size, size: Size, draws: list[float]) -> Box:
    """A box of the size `part` at a random position in an image of `size`."""
    rows, columns = part
    return Box(int(draws[0] * (size[0] - rows + 1)), int(draws[1] * (size[1] - columns + 1)), rows, columns)


def center_box(size: Size, shape: tuple[float, float]) -> Box:
    """The largest box with the aspect ratio of `shape`, in the center."""
    rows = min(size[0], max(1, round(size[1] * shape[0] / shape[1])))
    columns = min(size[1], max(1, round(size[0] * shape[1] / shape[0])))
    return Box((size[0] - rows) // 2, (size[1] - columns) // 2, rows, columns)


def resize_levels(levels: Levels, size: Size, interpolation: Interpolation) -> Levels:
    """Resize to `size` rows and columns, after averaging down by a power of two if that leaves enough pixels."""
    cv2 = opencv()
    factor = shrink_factor(levels.shape[:2], size)
    if factor > 1:
        rows, columns = levels.shape[0] // factor, levels.shape[1] // factor
        levels = cv2.resize(levels, (columns, rows), interpolation=cv2.INTER_AREA)
    if levels.shape[:2] == size:
        return levels
    rows, columns = size
    return cv2.resize(levels, (columns, rows), interpolation=FILTERS[interpolation])


def pad_and_crop(levels: Levels, size: Size, padding: int, mode: PaddingMode, rng: np.random.Generator) -> Levels:
    """Pad each side by `padding` pixels and crop `size` rows and columns at a random position."""
    cv2 = opencv()
    border = cv2.BORDER_CONSTANT if mode == "constant" else cv2.BORDER_REFLECT_101
    padded: Levels = cv2.copyMakeBorder(levels, padding, padding, padding, padding, border)
    return _place(size, padded.shape[:2], rng.random(2).tolist()).crop(padded)


def affine(levels: Levels, matrix: tuple[float, float, float, float, float, float]) -> Levels:
    """The image whose pixel at (x, y) is the nearest to (ax + by + c, dx + ey + f) in `levels`, or gray outside.

    Coordinates are those of Pillow's Image.transform: the first pixel spans 0 to 1.
    """
    cv2 = opencv()
    a, b, c, d, e, f = matrix
    centered = np.array([[a, b, c + (a + b - 1) / 2], [d, e, f + (d + e - 1) / 2]])
    rows, columns = levels.shape[:2]
    flags = cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(levels, centered, (columns, rows), flags=flags, borderValue=(GRAY,) * 3)


def rotate(levels: Levels, degrees: float) -> Levels:
    """Rotate counter-clockwise about the center."""
    angle, y, x = math.radians(degrees), levels.shape[0] / 2, levels.shape[1] / 2
    cos, sin = math.cos(angle), math.sin(angle)
    return affine(levels, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def random_erasing(levels: Levels, rng: np.random.Generator) -> Levels:
    """Fill a random rectangle with noise."""
    box = _random_box(levels.shape[:2], ERASED_AREA, ERASED_RATIO, rng)
    if box is None:
        return levels
    changed = levels.copy()
    hole = box.crop(changed)
    hole[...] = rng.integers(0, 256, hole.shape, dtype=np.uint8)
    return changed


RAMP = np.arange(256, dtype=np.float32)
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13
"""Pillow's ImageFilter.SMOOTH."""


def look_up(levels: Levels, table: NDArray[np.float32] | NDArray[np.intp]) -> Levels:
    """Replace every value by its entry in `table`, (256,) or (256, channels), clipped to 0 to 255."""
    entries = table.clip(0, 255).astype(np.uint8)
    return opencv().LUT(levels, entries[None] if entries.ndim == 2 else entries)


def blend(degenerate: Levels, levels: Levels, factor: float) -> Levels:
    """`degenerate` at factor 0, `levels` at 1, extrapolated above 1."""
    return opencv().addWeighted(levels, factor, degenerate, 1.0 - factor, 0.0)


def to_gray(levels: Levels) -> Levels:
    """Luma (rows, columns), with the weights of ITU-R 601."""
    return levels if levels.ndim == 2 else opencv().cvtColor(levels, opencv().COLOR_RGB2GRAY)


def to_rgb_levels(levels: Levels) -> Levels:
    """Three channels; equal ones from gray."""
    return levels if levels.ndim == 3 else opencv().cvtColor(levels, opencv().COLOR_GRAY2RGB)


def brightness(levels: Levels, factor: float) -> Levels:
    return look_up(levels, RAMP * np.float32(factor))


def contrast(levels: Levels, factor: float) -> Levels:
    """Scale the distance from the mean luma; big_vision uses the number of pixels / 256 for that mean by mistake."""
    middle = np.float32(int(opencv().mean(to_gray(levels))[0] + 0.5))
    return look_up(levels, middle + np.float32(factor) * (RAMP - middle))


def saturation(levels: Levels, factor: float) -> Levels:
    return levels if levels.ndim == 2 else blend(to_rgb_levels(to_gray(levels)), levels, factor)


def sharpness(levels: Levels, factor: float) -> Levels:
    """Smooth below factor 1, sharpen above; the outermost pixels stay."""
    smooth = levels.copy()
    smooth[1:-1, 1:-1] = opencv().filter2D(levels, -1, SMOOTH)[1:-1, 1:-1]
    return blend(smooth, levels, factor)


def hue(levels: Levels, shift: float) -> Levels:
    """Shift every hue by this share of the color circle."""
    if levels.ndim == 2:
        return levels
    cv2 = opencv()
    hsv = cv2.cvtColor(levels, cv2.COLOR_RGB2HSV_FULL)
    hsv[..., 0] += np.uint8(round(shift * 255) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def invert(levels: Levels) -> Levels:
    return look_up(levels, 255 - RAMP)


def posterize(levels: Levels, bits: int) -> Levels:
    """Keep the `bits` highest bits of each value."""
    return levels & np.uint8(256 - (1 << (8 - bits)))


def solarize(levels: Levels, threshold: int) -> Levels:
    """Invert values from `threshold` on."""
    return look_up(levels, np.where(threshold > RAMP, RAMP, 255 - RAMP))


def solarize_add(levels: Levels, addition: int) -> Levels:
    """Make values below 128 brighter."""
    return look_up(levels, np.where(RAMP < 128, RAMP + addition, RAMP))


def autocontrast(levels: Levels) -> Levels:
    """Stretch each channel to the range from 0 to 255."""
    tables = []
    for counts in histograms(levels):
        present = np.flatnonzero(counts)
        low, high = int(present[0]), int(present[-1])
        scale = 255 / max(high - low, 1)
        stretched = np.trunc(RAMP.astype(np.float64) * scale - low * scale)
        tables.append(RAMP if low == high else stretched.astype(np.float32))
    return look_up(levels, np.stack(tables, axis=1))


def equalize(levels: Levels) -> Levels:
    """Equalize the histogram of each channel."""
    tables = []
    for counts in histograms(levels):
        step = int(counts.sum() - counts[counts > 0][-1]) // 255
        below = np.cumsum(counts) - counts
        tables.append(((step // 2 + below) // step).astype(np.float32) if step else RAMP)
    return look_up(levels, np.stack(tables, axis=1))


def histograms(levels: Levels) -> list[NDArray[np.intp]]:
    """Counts of the 256 values, per channel."""
    channels = range(1 if levels.ndim == 2 else levels.shape[2])
    cv2 = opencv()
    return [cv2.calcHist([levels], [c], None, [256], [0, 256]).ravel().astype(np.intp) for c in channels]


def color_jitter(levels: Levels, strengths: tuple[float, float, float, float], rng: np.random.Generator) -> Levels:
    """Change brightness, contrast, saturation and hue by random amounts, in random order."""
    *factors, shift = strengths
    ranges = [*((1 - strength, 1 + strength) for strength in factors), (-shift, shift)]
    amounts = [low + draw * (high - low) for draw, (low, high) in zip(rng.random(4).tolist(), ranges)]
    for index in rng.permutation(4).tolist():
        if strengths[index]:
            levels = (brightness, contrast, saturation, hue)[index](levels, amounts[index])
    return levels


# Operations by name, and RandAugment as in big_vision (Cubuk et al. 2019, arXiv:1909.13719). "RandAugment(2, 10)" of
# the plain-ViT baseline is two operations of magnitude 10 of 10. At that magnitude: rotation by 30 degrees, shear by
# 0.3, shift by 100 pixels of 224 (scaled with the image), factors of 1.9 for brightness, contrast, color and sharpness,
# 4 bits for posterize, 110 for solarize_add, a hole of 80 pixels of 224. As there, more is not always stronger:
# posterize keeps more bits, solarize inverts fewer values, and factors are below 1 under magnitude 5. Differences to
# big_vision: at least one bit stays, and contrast is Pillow's.

Operation = Callable[[Levels, float, np.random.Generator], Levels]

SHIFT, HOLE = 100 / 224, 40 / 224
"""Shift, and half the side of the hole, relative to the side of the image at full strength."""


def _sign(amount: float, rng: np.random.Generator) -> float:
    return amount if rng.random() < 0.5 else -amount


def _shift(levels: Levels, axis: int, strength: float, rng: np.random.Generator) -> float:
    return _sign(SHIFT * strength * levels.shape[axis], rng)


def _factor(strength: float) -> float:
    return 0.1 + 1.8 * strength


def cutout(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """Draw a gray square around a random pixel, clipped at the edges."""
    rows, columns = levels.shape[:2]
    reach = int(HOLE * strength * min(rows, columns))
    y, x = (int(draw * side) for draw, side in zip(rng.random(2).tolist(), (rows, columns)))
    top, left = max(0, y - reach), max(0, x - reach)
    changed = levels.copy()
    Box(top, left, y + reach - top, x + reach - left).crop(changed)[...] = GRAY
    return changed


def gaussian_blur(levels: Levels, strength: float, rng: np.random.Generator) -> Levels:
    """Blur with a standard deviation of 0.1 to 2 pixels at full strength, as in BYOL and DeiT III."""
    return opencv().GaussianBlur(levels, (0, 0), 0.1 + 1.9 * strength * rng.random())


RAND_AUGMENT: dict[str, Operation] = {
    # strength is magnitude / 10
    "autocontrast": lambda levels, strength, rng: autocontrast(levels),
    "equalize": lambda levels, strength, rng: equalize(levels),
    "invert": lambda levels, strength, rng: invert(levels),
    "rotate": lambda levels, strength, rng: rotate(levels, _sign(30 * strength, rng)),
    "posterize": lambda levels, strength, rng: posterize(levels, max(1, int(4 * strength))),
    "solarize": lambda levels, strength, rng: solarize(levels, int(256 * strength)),
    "color": lambda levels, strength, rng: saturation(levels, _factor(strength)),
    "contrast": lambda levels, strength, rng: contrast(levels, _factor(strength)),
    "brightness": lambda levels, strength, rng: brightness(levels, _factor(strength)),
    "sharpness": lambda levels, strength, rng: sharpness(levels, _factor(strength)),
    "shear_x": lambda levels, strength, rng: affine(levels, (1, _sign(0.3 * strength, rng), 0, 0, 1, 0)),
    "shear_y": lambda levels, strength, rng: affine(levels, (1, 0, 0, _sign(0.3 * strength, rng), 1, 0)),
    "translate_x": lambda levels, strength, rng: affine(levels, (1, 0, _shift(levels, 1, strength, rng), 0, 1, 0)),
    "translate_y": lambda levels, strength, rng: affine(levels, (1, 0, 0, 0, 1, _shift(levels, 0, strength, rng))),
    "cutout": cutout,
    "solarize_add": lambda levels, strength, rng: solarize_add(levels, int(110 * strength)),
}

OPS: dict[str, Operation] = {
    # the operations for `augment.ops`; strength is 0 to 1
    **RAND_AUGMENT,
    "gaussian_blur": gaussian_blur,
    "grayscale": lambda levels, strength, rng: saturation(levels, 1.0 - strength),
}


def rand_augment(levels: Levels, num_ops: int, magnitude: float, rng: np.random.Generator) -> Levels:
    """Apply `num_ops` random operations of this magnitude, from 0 to 10."""
    operations = tuple(RAND_AUGMENT.values())
    for draw in rng.random(num_ops).tolist():
        levels = operations[int(draw * len(operations))](levels, magnitude / 10, rng)
    return levels
