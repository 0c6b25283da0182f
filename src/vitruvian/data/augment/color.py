"""What happens to the colors of an image, with Pillow's meaning of each operation.

Every function takes and gives uint8, (rows, columns, 3) RGB or (rows, columns) gray, and leaves its argument as it was.
What depends on a pixel's own value alone goes through a table of 256 entries and equals Pillow bit for bit; what is
blended from two images is rounded where Pillow cuts off, and may be 1 higher.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.jpeg import Levels, opencv

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
