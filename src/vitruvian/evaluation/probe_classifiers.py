"""Classifiers on frozen features: few-shot least squares, logistic regression and nearest neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.errors import ConfigError, DataError, argument

# n images to train on, m others, F features, K classes

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
FEWSHOT_L2 = 2.0**10
BIAS = 100.0
SMALLEST_STD = 1e-5

Array = NDArray[np.float64]
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastSquares:
    """A linear map from features to one score per class."""

    mean: Array
    std: Array
    weights: Array
    """(F + 1, K); the last row is for the constant feature."""

    def scores(self, features: NDArray[Any]) -> Array:
        return with_constant((features - self.mean) / self.std) @ self.weights  # (m, K)


def with_constant(features: Array) -> Array:
    return np.concatenate([features, np.full((len(features), 1), BIAS)], axis=1)


def fit_fewshot(features: NDArray[Any], labels: Labels, *, classes: int, l2: float = FEWSHOT_L2) -> LeastSquares:
    """Regularized least squares in float64, as the ViT releases compute it (big_vision, `evaluators/fewshot_lsr.py`).

    The features are standardized with their own mean and deviation, and a constant feature of 100 stands for a bias
    that is hardly regularized. Targets are +1 for the class and -1 for others; l2 does not depend on the number of
    images. With X (n, F + 1) and Y (n, K), the weights W that minimize |X W - Y|^2 + l2 |W|^2 solve

        (X^T X + l2 I) W = X^T Y        a system of F + 1 equations, or, by the identity
        W = X^T (X X^T + l2 I)^-1 Y     (X^T X + l2 I)^-1 X^T = X^T (X X^T + l2 I)^-1, of only n equations.

    The smaller of the two is solved: few shots have far fewer images than features.
    """
    x = np.asarray(features, np.float64)
    mean, std = x.mean(axis=0), x.std(axis=0) + SMALLEST_STD
    x = with_constant((x - mean) / std)  # (n, F + 1)
    y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)  # (n, K)
    n, width = x.shape
    if n >= width:
        weights = np.linalg.solve(x.T @ x + l2 * np.eye(width), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(n), y)
    return LeastSquares(mean=mean, std=std, weights=np.asarray(weights, np.float64))


def shuffle_classes(labels: Labels, *, classes: int, seed: int) -> list[Labels]:
    """The images of each class in random order; fewer shots are the beginning of more."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == index)) for index in range(classes)]


def fewshot_predictions(
    train: tuple[NDArray[Any], Labels], test: NDArray[Any], *, classes: int, shots: int, seed: int
) -> Labels:
    """Predicted classes (m,) of the test features, trained on `shots` images per class; the first class wins ties."""
    features, labels = train
    chosen = np.concatenate([order[:shots] for order in shuffle_classes(labels, classes=classes, seed=seed)])
    fitted = fit_fewshot(features[chosen], labels[chosen], classes=classes)
    return np.asarray(fitted.scores(test).argmax(axis=1))


def possible_shots(labels: Labels, classes: Sequence[str], requested: Sequence[int] | None) -> tuple[list[int], str]:
    """The shots for which every class has enough images, and a note on the others.

    Raises:
        DataError: A class has too few images for `requested` shots.
    """
    counts = np.bincount(labels, minlength=len(classes))
    least = int(counts.argmin())
    shots = sorted(set(SHOTS if requested is None else requested))
    if shots and shots[0] < 1:
        raise ConfigError(f"{argument('shots', shots[0])} is not at least 1")
    possible = [count for count in shots if count <= counts[least]]
    if len(possible) == len(shots):
        return shots, ""
    what = f"class {classes[least]!r} has {counts[least]} training images"
    if requested is not None:
        advice = f"use at most {counts[least]} shots" if counts[least] else "add some, or remove the class"
        raise DataError(f"{what}, {shots[-1]} shots need {shots[-1]}", hint=advice)
    left = ", ".join(str(count) for count in shots if count not in possible)
    return possible, f"no few-shot accuracy for {left} shots: {what}"


L2_GRID = tuple(10.0 ** (-step / 2) for step in range(13))
"""Regularizations of the linear probe, from 1 to 1e-6; each fit starts from the previous solution."""
PATIENCE = 3
"""Number of regularizations without improvement that end the search."""
LINEAR_PIECE = 2**13
"""Number of images converted to float64 per step."""
MOST_STEPS = 1000
SMALLEST_GRADIENT = 1e-5
"""Gradient of the mean loss at which a fit has converged: accuracies no longer change."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearClassifier:
    """Multinomial logistic regression."""

    mean: Tensor
    std: Tensor
    weights: Tensor
    """(F + 1, K) for standardized features; the last row is the bias."""

    def standardize(self, features: NDArray[Any]) -> Tensor:
        return (torch.from_numpy(np.asarray(features, np.float64)) - self.mean) / self.std

    def logits(self, features: NDArray[Any]) -> Tensor:
        return torch.addmm(self.weights[-1], self.standardize(features), self.weights[:-1])

    def predictions(self, features: NDArray[Any]) -> Labels:
        pieces = [
            self.logits(features[start : start + LINEAR_PIECE]) for start in range(0, len(features), LINEAR_PIECE)
        ]
        return np.concatenate([piece.numpy().argmax(axis=1) for piece in pieces])


def fit_linear(
    features: NDArray[Any], labels: Labels, *, classes: int, l2: float, start: Tensor | None = None
) -> LinearClassifier:
    """Minimize mean cross-entropy + l2 / 2 |W|^2 over standardized features, without a penalty on the bias.

    L-BFGS in float64 from `start`, or from zero, is deterministic.
    """
    mean, std = moments(features)
    shape = (features.shape[1] + 1, classes)
    weights = (torch.zeros(shape, dtype=torch.float64) if start is None else start.clone()).requires_grad_(True)
    classifier = LinearClassifier(mean=mean, std=std, weights=weights)
    starts = range(0, len(labels), LINEAR_PIECE)
    truths = [torch.from_numpy(labels[first : first + LINEAR_PIECE]) for first in starts]
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
            logits = classifier.logits(features[first : first + LINEAR_PIECE])
            loss = torch.nn.functional.cross_entropy(logits, truth, reduction="sum") / len(labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        penalty = l2 / 2 * weights[:-1].square().sum()
        penalty.backward()  # type: ignore[no-untyped-call]
        return total + penalty.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return LinearClassifier(mean=mean, std=std, weights=weights.detach())


def moments(features: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (F,) of the features, in float64."""
    pieces = [features[first : first + LINEAR_PIECE] for first in range(0, len(features), LINEAR_PIECE)]
    mean = np.sum([piece.sum(axis=0, dtype=np.float64) for piece in pieces], axis=0) / len(features)
    squares = np.sum([np.square(piece - mean).sum(axis=0) for piece in pieces], axis=0)
    return torch.from_numpy(mean), torch.from_numpy(np.sqrt(squares / len(features))) + SMALLEST_STD


def choose_l2(
    train: tuple[NDArray[Any], Labels],
    dev: tuple[NDArray[Any], Labels],
    *,
    classes: int,
    candidates: Sequence[float] = L2_GRID,
) -> tuple[float, dict[float, float]]:
    """The regularization with the best accuracy on `dev`, the strongest of equals, and all accuracies in percent."""
    accuracies: dict[float, float] = {}
    start: Tensor | None = None
    best, worse = 0.0, 0
    for l2 in sorted(candidates, reverse=True):
        classifier = fit_linear(*train, classes=classes, l2=l2, start=start)
        start = classifier.weights
        accuracies[l2] = 100.0 * float((classifier.predictions(dev[0]) == dev[1]).mean())
        worse = 0 if not best or accuracies[l2] > accuracies[best] else worse + 1
        best = l2 if not worse else best
        if worse == PATIENCE:
            break
    return best, accuracies


TEMPERATURE = 0.07
NEIGHBOR_COUNTS = (10, 20, 50, 100, 200)
"""Numbers of neighbors to choose from."""
MOST_QUERIES = 4096
"""Maximum number of images to choose the number of neighbors by."""
NEIGHBOR_PIECE = 512
"""Number of images compared with all others per step."""


def neighbor_predictions(
    train: tuple[NDArray[Any], Labels], test: NDArray[Any], *, classes: int, neighbors: int
) -> Labels:
    """Predicted classes (m,) by the votes of the nearest `neighbors`, weighted by exp(cosine / 0.07) as in DINO."""
    known, labels = directions(train[0]), torch.from_numpy(train[1])
    count = min(neighbors, len(known))
    pieces = []
    for first in range(0, len(test), NEIGHBOR_PIECE):
        near = (directions(test[first : first + NEIGHBOR_PIECE]) @ known.T).topk(count)
        pieces.append(votes(near.values, labels[near.indices], classes))
    return np.concatenate([piece.numpy().argmax(axis=1) for piece in pieces])


def choose_neighbors(
    train: tuple[NDArray[Any], Labels], *, classes: int, seed: int = 0, candidates: Sequence[int] = NEIGHBOR_COUNTS
) -> tuple[int, dict[int, float]]:
    """The number of neighbors with the best leave-one-out accuracy, the smallest of equals, and all accuracies.

    At most MOST_QUERIES random images are classified by the others. Accuracies are in percent.
    """
    known, labels = directions(train[0]), torch.from_numpy(train[1])
    counts = sorted({min(count, len(known) - 1) for count in candidates})
    queries = np.sort(np.random.default_rng(seed).permutation(len(known))[:MOST_QUERIES])
    right = dict.fromkeys(counts, 0)
    for first in range(0, len(queries), NEIGHBOR_PIECE):
        indices = torch.from_numpy(queries[first : first + NEIGHBOR_PIECE])
        similar = known[indices] @ known.T
        similar[torch.arange(len(indices)), indices] = -torch.inf  # an image is not its own neighbor
        near = similar.topk(counts[-1])
        for count in counts:
            predicted = votes(near.values[:, :count], labels[near.indices[:, :count]], classes).numpy().argmax(axis=1)
            right[count] += int((predicted == train[1][indices.numpy()]).sum())
    accuracies = {count: 100.0 * hits / len(queries) for count, hits in right.items()}
    return max(accuracies, key=lambda count: accuracies[count]), accuracies


def directions(features: NDArray[Any]) -> Tensor:
    """Unit-length features in float32."""
    return F.normalize(torch.from_numpy(np.asarray(features, np.float32)), dim=1)


def votes(similarities: Tensor, labels: Tensor, classes: int) -> Tensor:  # (B, k), (B, k) -> (B, K)
    weights = (similarities.double() / TEMPERATURE).exp()
    return torch.zeros(len(labels), classes, dtype=torch.float64).scatter_add_(1, labels, weights)
