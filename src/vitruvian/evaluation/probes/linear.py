"""A linear probe: multinomial logistic regression on frozen features, its regularization chosen on a dev split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# n images, F features, K classes

L2 = tuple(10.0 ** (-step / 2) for step in range(13))
"""What is tried, from 1 down to 1e-6: each starts where the one before ended."""
PATIENCE = 3
"""So many in a row that are no better than the best end the search."""
PIECE = 2**13
"""Images that are in memory as float64, with their logits, at a time."""
MOST_STEPS = 1000
SMALLEST_GRADIENT = 1e-5
"""Of the mean loss, at which a fit is done: accuracies no longer change."""
SMALLEST_STD = 1e-5

Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearProbe:
    """A fitted linear classifier."""

    mean: Tensor
    std: Tensor
    weights: Tensor
    """(F + 1, K) for standardized features; the last row is the bias."""

    def standardized(self, features: NDArray[Any]) -> Tensor:
        return (torch.from_numpy(np.asarray(features, np.float64)) - self.mean) / self.std

    def logits(self, features: NDArray[Any]) -> Tensor:
        return torch.addmm(self.weights[-1], self.standardized(features), self.weights[:-1])

    def predictions(self, features: NDArray[Any]) -> Labels:
        pieces = [self.logits(features[start : start + PIECE]) for start in range(0, len(features), PIECE)]
        return np.concatenate([piece.numpy().argmax(axis=1) for piece in pieces])


def fit(features: NDArray[Any], labels: Labels, *, classes: int, l2: float, start: Tensor | None = None) -> LinearProbe:
    """The minimum of mean cross-entropy + l2 / 2 |W|^2 over standardized features; the bias is free.

    Float64 and L-BFGS from `start`, or from zero: the same numbers each time.
    """
    mean, std = moments(features)
    shape = (features.shape[1] + 1, classes)
    weights = (torch.zeros(shape, dtype=torch.float64) if start is None else start.clone()).requires_grad_(True)
    found = LinearProbe(mean=mean, std=std, weights=weights)
    starts = range(0, len(labels), PIECE)
    truths = [torch.from_numpy(labels[first : first + PIECE]) for first in starts]
    optimizer = torch.optim.LBFGS(
        [weights],
        max_iter=MOST_STEPS,
        tolerance_grad=SMALLEST_GRADIENT,
        tolerance_change=1e-10,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for first, truth in zip(starts, truths):
            logits = found.logits(features[first : first + PIECE])
            loss = torch.nn.functional.cross_entropy(logits, truth, reduction="sum") / len(labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        penalty = l2 / 2 * weights[:-1].square().sum()
        penalty.backward()  # type: ignore[no-untyped-call]
        return total + penalty.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return LinearProbe(mean=mean, std=std, weights=weights.detach())


def moments(features: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) of the features, both in float64."""
    pieces = [features[first : first + PIECE] for first in range(0, len(features), PIECE)]
    mean = np.sum([piece.sum(axis=0, dtype=np.float64) for piece in pieces], axis=0) / len(features)
    squares = np.sum([np.square(piece - mean).sum(axis=0) for piece in pieces], axis=0)
    return torch.from_numpy(mean), torch.from_numpy(np.sqrt(squares / len(features))) + SMALLEST_STD


def chosen_l2(
    train: tuple[NDArray[Any], Labels],
    dev: tuple[NDArray[Any], Labels],
    *,
    classes: int,
    candidates: Sequence[float] = L2,
) -> tuple[float, dict[float, float]]:
    """The regularization that is best on `dev`, of equal ones the strongest; and all accuracies there, in percent."""
    found: dict[float, float] = {}
    start: Tensor | None = None
    best, worse = 0.0, 0
    for l2 in sorted(candidates, reverse=True):
        probe = fit(*train, classes=classes, l2=l2, start=start)
        start = probe.weights
        found[l2] = 100.0 * float((probe.predictions(dev[0]) == dev[1]).mean())
        worse = 0 if not best or found[l2] > found[best] else worse + 1
        best = l2 if not worse else best
        if worse == PATIENCE:
            break
    return best, found
