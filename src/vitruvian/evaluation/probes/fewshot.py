"""Few-shot accuracy of frozen features by regularized least squares, as the ViT releases compute it.

The few images are whitened with their own mean and deviation (+ 1e-5), a constant feature of 100 stands for a bias
that is hardly regularized, targets are +1 for the class and -1 for others, and l2 = 2^10 is added to the diagonal as
it is, whatever the number of images (big_vision, `evaluators/fewshot_lsr.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import ConfigError, DataError, argument

# n images to learn from, m others, F features, K classes

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
L2 = 2.0**10
BIAS = 100.0
SMALLEST_STD = 1e-5

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """A linear map from features to a score of each class."""

    mean: Array
    std: Array
    weights: Array
    """(F + 1, K); the last row is for the constant feature."""

    def scores(self, features: NDArray[Any]) -> Array:
        return extended((features - self.mean) / self.std) @ self.weights  # (m, K)


def extended(features: Array) -> Array:
    return np.concatenate([features, np.full((len(features), 1), BIAS)], axis=1)


def regression(features: NDArray[Any], labels: Labels, *, classes: int, l2: float = L2) -> Regression:
    """The least-squares solution in float64, through whichever of the two equal systems is smaller."""
    x = np.asarray(features, np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0) + SMALLEST_STD
    x = extended((x - mean) / std)  # (n, F + 1)
    y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)  # (n, K)
    n, width = x.shape
    if n >= width:
        weights = np.linalg.solve(x.T @ x + l2 * np.eye(width), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(n), y)
    return Regression(mean=mean, std=std, weights=np.asarray(weights, np.float64))


def shuffled_classes(labels: Labels, *, classes: int, seed: int) -> list[Labels]:
    """The images of each class in the order in which they are taken; fewer shots are the beginning of more."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == number)) for number in range(classes)]


def fewshot_predictions(
    train: tuple[NDArray[Any], Labels], test: NDArray[Any], *, classes: int, shots: int, seed: int
) -> Labels:
    """Classes (m,) of the test features after `shots` images of each class; equal scores give the first class."""
    features, labels = train
    chosen = np.concatenate([picked[:shots] for picked in shuffled_classes(labels, classes=classes, seed=seed)])
    fitted = regression(features[chosen], labels[chosen], classes=classes)
    return np.asarray(fitted.scores(test).argmax(axis=1))


def possible_shots(labels: Labels, classes: Sequence[str], wanted: Sequence[int] | None) -> tuple[list[int], str]:
    """The shots that every class can give, and a line on what is left out; DataError if they were asked for."""
    counts = np.bincount(labels, minlength=len(classes))
    least = int(counts.argmin())
    shots = sorted(set(SHOTS if wanted is None else wanted))
    if shots and shots[0] < 1:
        raise ConfigError(f"{argument('shots', shots[0])} is not at least 1")
    possible = [number for number in shots if number <= counts[least]]
    if len(possible) == len(shots):
        return shots, ""
    what = f"class {classes[least]!r} has {counts[least]} images to learn from"
    if wanted is not None:
        advice = f"ask for at most {counts[least]} shots" if counts[least] else "add some, or remove the class"
        raise DataError(f"{what}, where {shots[-1]} shots want {shots[-1]}; {advice}")
    left = ", ".join(str(number) for number in shots if number not in possible)
    return possible, f"no few-shot accuracy for {left} shots: {what}"
