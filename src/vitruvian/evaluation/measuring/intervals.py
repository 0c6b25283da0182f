"""Confidence intervals: how far a number might be off because other images could have been drawn.

A share of images has Wilson's interval, which has a width even where all answers are right (E. B. Wilson, 1927). The
mean over classes puts the classes' intervals together as the square roots of squares do (MOVER: G. Y. Zou and others,
2009). For numbers without a formula, images are drawn again: the bootstrap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import numpy as np
from numpy.typing import NDArray

# n images, K classes

LEVEL = 95.0
"""Percent."""
Z = 1.959963984540054
"""Standard errors to either side that hold LEVEL percent of a normal distribution."""
RESAMPLES = 1000

Interval = tuple[float, float]
"""In percent."""
Statistic = Callable[[NDArray[np.float64]], float]
"""A number from how often each image was drawn (n,)."""


def wilson(right: float, count: float) -> Interval:
    """Of the share of right answers among `count` images."""
    share, spare = right / count, Z**2 / count
    middle = (share + spare / 2) / (1 + spare)
    reach = sqrt(spare * (share * (1 - share) + spare / 4)) / (1 + spare)
    low = middle - reach if right else 0.0  # at the ends exact, where the formula rounds
    high = middle + reach if right < count else 1.0
    return 100.0 * low, 100.0 * high


def share_interval(right: NDArray[np.bool_]) -> Interval:
    return wilson(float(right.sum()), len(right))


def class_mean_interval(right: NDArray[np.int64], counts: NDArray[np.int64]) -> Interval:
    """Of the mean of the accuracies of all classes that have images: right answers (K,) among `counts` (K,)."""
    filled = [(float(r), float(n)) for r, n in zip(right.tolist(), counts.tolist()) if n]
    shares = np.array([100.0 * r / n for r, n in filled])
    ends = np.array([wilson(r, n) for r, n in filled])
    down, up = (np.sqrt(np.square(ends[:, side] - shares).sum()) / len(shares) for side in (0, 1))
    return float(shares.mean() - down), float(shares.mean() + up)


def bootstrap(statistic: Statistic, count: int, *, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The middle LEVEL percent of a statistic's values when `count` images are drawn with replacement."""
    generator = np.random.default_rng(seed)
    values = [
        statistic(np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64))
        for _ in range(resamples)
    ]
    tail = (100.0 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)
