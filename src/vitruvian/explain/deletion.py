"""Deletion curves, which score a map: how fast the probability falls when the highest-ranked patches are removed.

Patches are removed step by step in the order of the map, by filling them with the mean color of the image. The area
under the curve of the probability is the score: the smaller, the better the map has found what the prediction depends
on. Random orders give the score that a map has to beat.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.errors import ConfigError
from vitruvian.inference import Classifier, probabilities_of
from vitruvian.settings import Size

# R rows and C columns of patches, P = R * C, S steps

STEPS = 10
RANDOM_ORDERS = 3
RANDOM = "random"  # the name of the curve of random orders

Order = NDArray[np.int64]  # patch indices (row * C + column) in the order of removal


@dataclass(frozen=True, slots=True)
class Curve:
    """The probability of one class while patches are removed."""

    removed: NDArray[np.float64]  # fraction of the patches, from 0 to 1
    probability: NDArray[np.float64]

    @property
    def area(self) -> float:
        """The area under the curve, between 0 and 1."""
        return float(np.trapezoid(self.probability, self.removed))


def deletion_curves(
    classifier: Classifier, pixels: Tensor, maps: Mapping[str, Tensor], index: int, *, steps: int = STEPS, seed: int = 0
) -> dict[str, Curve]:
    """Compute the deletion curves of maps of one image.

    Args:
        classifier: The model.
        pixels: Normalized pixels (channels, height, width).
        maps: Maps (R, C) by name.
        index: The class whose probability is measured.
        steps: Number of steps from no patch to all.
        seed: Random seed of the random orders.

    Returns:
        The curve of each map by name, and `random`.
    """
    shapes = {tuple(values.shape) for values in maps.values()}
    if len(shapes) != 1:
        raise ConfigError(f"the maps of one image must have one shape, got {sorted(shapes)}")
    grid: Size = shapes.pop()  # type: ignore[assignment]
    patches, rng = grid[0] * grid[1], np.random.default_rng(seed)
    counts = np.unique(np.rint(np.linspace(0, patches, steps + 1)).astype(np.int64))  # a small grid has fewer steps
    orders = {name: [rank_patches(values)] for name, values in maps.items()}
    orders[RANDOM] = [rng.permutation(patches) for _ in range(RANDOM_ORDERS)]
    curves = {}
    for name, tried in orders.items():
        probabilities = []
        for order in tried:
            logits = classifier.logits(torch.stack([cover_patches(pixels, order[:count], grid) for count in counts]))
            probabilities.append(probabilities_of(classifier.model, logits.double())[:, index])
        curves[name] = Curve(counts / patches, torch.stack(probabilities).mean(dim=0).numpy())
    return curves


def rank_patches(values: Tensor) -> Order:
    """Patch indices from the highest value to the lowest, ties in reading order."""
    return np.argsort(-values.flatten().cpu().double().numpy(), kind="stable")


def cover_patches(pixels: Tensor, patches: Order, grid: Size) -> Tensor:
    """The image with these patches in its mean color."""
    _, rows, columns = pixels.shape
    keep = torch.ones(grid[0] * grid[1], dtype=torch.bool)
    keep[torch.from_numpy(patches)] = False
    keep = keep.view(grid).repeat_interleave(rows // grid[0], 0).repeat_interleave(columns // grid[1], 1)
    return torch.where(keep, pixels, pixels.mean(dim=(1, 2), keepdim=True))
