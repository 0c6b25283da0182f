"""Confidence intervals: how far an accuracy might be off because other images could have been drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

# n images

RESAMPLES = 1000
LEVEL = 95.0
"""Percent of the resamples inside an interval."""

Weights = NDArray[np.float64]
Statistic = Callable[[Weights], float]
"""A number from how often each image was drawn (n,)."""


def intervals(
    statistics: Mapping[str, Statistic], count: int, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, tuple[float, float]]:
    """For each statistic the middle LEVEL percent of its values when `count` images are drawn with replacement.

    The same seed draws the same images. A statistic that a draw leaves without images skips that draw.
    """
    generator = np.random.default_rng(seed)
    values: dict[str, list[float]] = {name: [] for name in statistics}
    for _ in range(resamples):
        drawn = np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64)
        for name, statistic in statistics.items():
            values[name].append(statistic(drawn))
    tail = (100.0 - LEVEL) / 2
    found = {}
    for name, seen in values.items():
        low, high = np.nanpercentile(seen, [tail, 100.0 - tail])
        found[name] = (float(low), float(high))
    return found


def share(right: NDArray[np.bool_]) -> Statistic:
    """Percent of right answers."""
    values = right.astype(np.float64)
    return lambda drawn: 100.0 * float(drawn @ values) / float(drawn.sum())


def share_among(rows: NDArray[np.int64], right: NDArray[np.bool_]) -> Statistic:
    """Percent of right answers among some of the images."""
    inner = share(right)
    return lambda drawn: inner(drawn[rows]) if drawn[rows].any() else float("nan")


def class_mean(labels: NDArray[np.int64], right: NDArray[np.bool_]) -> Statistic:
    """Mean, in percent, of the accuracies of all classes that were drawn."""

    def statistic(drawn: Weights) -> float:
        counts = np.bincount(labels, drawn)
        correct = np.bincount(labels, drawn * right)
        return 100.0 * float((correct[counts > 0] / counts[counts > 0]).mean())

    return statistic
