"""BiT-HyperRule: the length, resolution and Mixup of a fine-tuning by the number and the size of the images."""

import math
from collections.abc import Iterable
from statistics import median

import numpy as np

from vitruvian.data.decode import decode
from vitruvian.data.sources import Source
from vitruvian.errors import ImageError
from vitruvian.training.recipe import Recipe

LENGTHS: tuple[tuple[float, int, int, tuple[float, ...], float], ...] = (
    # below this number of images: steps, steps of warmup, where the learning rate decays, mixup_alpha
    (20_000, 500, 100, (0.4, 0.6, 0.8), 0.0),
    (500_000, 10_000, 500, (0.3, 0.6, 0.9), 0.1),
    (math.inf, 20_000, 500, (0.3, 0.6, 0.9), 0.1),
)
SMALL_AREA = 96 * 96
SIDES = {True: (160, 128), False: (512, 480)}  # is the image small: side before and after the random crop
EXAMINED = 25  # images whose median size decides the resolution


def apply_hyperrule(recipe: Recipe, images: Source) -> Recipe:
    """The recipe with the settings that the rule derives from the training images; no longer marked to be applied."""
    count = min(len(images), recipe.max_train_samples or len(images))
    steps, warmup, decay_at, mixup = next(row[1:] for row in LENGTHS if count < row[0])
    before, after = SIDES[median(areas(images)) < SMALL_AREA]
    return recipe.replace(
        bit_hyperrule=False,
        epochs=0.0,
        steps=steps,
        warmup=warmup / steps,  # the same fraction if the user shortens the run
        decay_at=decay_at,
        image_size=after,
        augment=recipe.augment.replace(crop="random", precrop=before / after, mixup_alpha=mixup),
    )


def areas(images: Source) -> Iterable[int]:
    """The areas, in pixels, of some images, evenly spaced."""
    for index in np.unique(np.linspace(0, len(images) - 1, EXAMINED).astype(int)).tolist():
        try:
            yield math.prod(decode(images.read(index)).size)
        except ImageError:
            continue  # training reports it
