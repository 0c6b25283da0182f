"""Is a map right? How fast the probability falls when the patches it ranks highest are taken away.

Patches are removed in the order of the map, step by step, by painting them in the view's mean color. The area under
the probability's curve is the score: the smaller, the better the map has found what the answer rests on. Patches
removed in random orders give the score that any map must beat.
"""

from __future__ import annotations

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
RANDOM = "random"
"""The name of the curve of random orders."""

Order = NDArray[np.int64]
"""Patches by number (row * C + column), the first to be removed first."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The probability of one class while patches are removed."""

    removed: NDArray[np.float64]
    """Share of the patches, from 0 to 1."""
    probability: NDArray[np.float64]

    @property
    def area(self) -> float:
        """Under the curve, between 0 and 1."""
        return float(np.trapezoid(self.probability, self.removed))


def deletion_curves(
    classifier: Classifier, pixels: Tensor, maps: Mapping[str, Tensor], index: int, *, steps: int = STEPS, seed: int = 0
) -> dict[str, Curve]:
    """The curve of each map (R, C) for the class `index` on one view (channels, rows, columns), and of `random`."""
    shapes = {tuple(values.shape) for values in maps.values()}
    if len(shapes) != 1:
        raise ConfigError(f"maps of one image have one shape, not {sorted(shapes)}")
    grid: Size = shapes.pop()  # type: ignore[assignment]
    orders = {name: [by_rank(values)] for name, values in maps.items()}
    rng = np.random.default_rng(seed)
    orders[RANDOM] = [rng.permutation(grid[0] * grid[1]) for _ in range(RANDOM_ORDERS)]
    return {
        name: mean_curve(classifier, pixels, orders=several, grid=grid, index=index, steps=steps)
        for name, several in orders.items()
    }


def by_rank(values: Tensor) -> Order:
    """Patches from the highest value to the lowest, equal ones in reading order."""
    return np.argsort(-values.flatten().double().cpu().numpy(), kind="stable")


def mean_curve(
    classifier: Classifier, pixels: Tensor, *, orders: list[Order], grid: Size, index: int, steps: int
) -> Curve:
    """The mean over orders of the probability after each step."""
    patches = grid[0] * grid[1]
    counts = np.unique(np.rint(np.linspace(0, patches, steps + 1)).astype(np.int64))  # a small grid has fewer steps
    curves = []
    for order in orders:
        logits = classifier.logits(torch.stack([covered(pixels, order[:count], grid) for count in counts]))
        curves.append(probabilities_of(classifier.model, logits.double())[:, index])
    return Curve(counts / patches, torch.stack(curves).mean(dim=0).numpy())


def covered(pixels: Tensor, patches: Order, grid: Size) -> Tensor:
    """The view with these patches in its mean color."""
    _, rows, columns = pixels.shape
    keep = torch.ones(grid[0] * grid[1], dtype=torch.bool)
    keep[torch.from_numpy(patches)] = False
    keep = keep.view(grid).repeat_interleave(rows // grid[0], 0).repeat_interleave(columns // grid[1], 1)
    return torch.where(keep, pixels, pixels.mean(dim=(1, 2), keepdim=True))
