"""Operations on one image by name, and RandAugment: a few of them of one strength, as big_vision selects them.

Cubuk et al. 2019, arXiv:1909.13719. "RandAugment(2, 10)" of the plain-ViT baseline is two layers of magnitude 10 of 10.
At that magnitude: rotation by 30 degrees, shear by 0.3, shift by 100 pixels of 224 (scaled with the view), factors
of 1.9 for brightness, contrast, color and sharpness, 4 bits for posterize, 110 for solarize_add, a hole of 80 pixels
of 224. As there, more is not always stronger: posterize keeps more bits, solarize inverts fewer values, and factors lie
below 1 under magnitude 5. Differences to big_vision: at least one bit stays, and contrast is Pillow's (color.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitruvian.data.augment import color
from vitruvian.data.augment.geometry import GRAY, moved, rotated
from vitruvian.data.jpeg import Box, Levels, opencv

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
    "autocontrast": lambda levels, strength, rng: color.autocontrast(levels),
    "equalize": lambda levels, strength, rng: color.equalized(levels),
    "invert": lambda levels, strength, rng: color.inverted(levels),
    "rotate": lambda levels, strength, rng: rotated(levels, _signed(30 * strength, rng)),
    "posterize": lambda levels, strength, rng: color.posterized(levels, max(1, int(4 * strength))),
    "solarize": lambda levels, strength, rng: color.solarized(levels, int(256 * strength)),
    "color": lambda levels, strength, rng: color.saturation(levels, _factor(strength)),
    "contrast": lambda levels, strength, rng: color.contrast(levels, _factor(strength)),
    "brightness": lambda levels, strength, rng: color.brightness(levels, _factor(strength)),
    "sharpness": lambda levels, strength, rng: color.sharpness(levels, _factor(strength)),
    "shear_x": lambda levels, strength, rng: moved(levels, (1, _signed(0.3 * strength, rng), 0, 0, 1, 0)),
    "shear_y": lambda levels, strength, rng: moved(levels, (1, 0, 0, _signed(0.3 * strength, rng), 1, 0)),
    "translate_x": lambda levels, strength, rng: moved(levels, (1, 0, _shift(levels, 1, strength, rng), 0, 1, 0)),
    "translate_y": lambda levels, strength, rng: moved(levels, (1, 0, 0, 0, 1, _shift(levels, 0, strength, rng))),
    "cutout": cutout,
    "solarize_add": lambda levels, strength, rng: color.solarized_add(levels, int(110 * strength)),
}


OPS: dict[str, Operation] = {
    # what `augment.ops` can name; strength is 0 to 1
    **RAND_AUGMENT,
    "gaussian_blur": gaussian_blur,
    "grayscale": lambda levels, strength, rng: color.saturation(levels, 1.0 - strength),
}


def rand_augment(levels: Levels, num_ops: int, magnitude: float, rng: np.random.Generator) -> Levels:
    """The image after `num_ops` random operations; magnitude is of 10."""
    operations = tuple(RAND_AUGMENT.values())
    for draw in rng.random(num_ops).tolist():
        levels = operations[int(draw * len(operations))](levels, magnitude / 10, rng)
    return levels
