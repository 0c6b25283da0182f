"""Classifiers on frozen features: few-shot least squares, logistic regression and nearest neighbors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.target_metrics import SortedScores
from vitruvian.text import plural

# n images to train on, m others, F features, K classes

SHOTS = (1, 5, 10, 25)
SEEDS = (0, 1, 2)
FEWSHOT_L2 = 2.0**10
BIAS = 100.0
SMALLEST_STD = 1e-5
HOLD_OUT = 0.2  # fraction of each class that is held out if a split is missing, chosen with seed 0

Labels = NDArray[np.int64]
Examples = tuple[NDArray[Any], NDArray[Any]]  # features (n, F), and labels (n,) or targets (n, K), NaN if unknown


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearClassifier:
    """A linear map from standardized features to logits, in float64."""

    mean: Tensor
    std: Tensor
    weights: Tensor  # (F + 1, K); the last row is the bias

    def standardize(self, features: NDArray[Any]) -> Tensor:
        return (torch.from_numpy(np.asarray(features, np.float64)) - self.mean) / self.std

    def logits(self, features: NDArray[Any]) -> Tensor:
        return torch.addmm(self.weights[-1], self.standardize(features), self.weights[:-1])

    def predictions(self, features: NDArray[Any]) -> Labels:
        """Predicted classes (m,); the first class wins ties."""
        starts = range(0, len(features), LINEAR_PIECE)
        logits = (self.logits(features[start : start + LINEAR_PIECE]) for start in starts)
        return np.concatenate([piece.numpy().argmax(axis=1) for piece in logits])


def fit_fewshot(
    features: NDArray[Any], labels: NDArray[Any], *, classes: int, l2: float = FEWSHOT_L2
) -> LinearClassifier:
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
    x = np.concatenate([(x - mean) / std, np.full((len(x), 1), BIAS)], axis=1)  # (n, F + 1)
    if labels.ndim == 2:
        y = np.nan_to_num(2.0 * labels - 1.0)  # 0 if unknown
    else:
        y = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)  # (n, K)
    n, width = x.shape
    if n >= width:
        weights = np.linalg.solve(x.T @ x + l2 * np.eye(width), x.T @ y)
    else:
        weights = x.T @ np.linalg.solve(x @ x.T + l2 * np.eye(n), y)
    weights[-1] *= BIAS
    return LinearClassifier(mean=torch.from_numpy(mean), std=torch.from_numpy(std), weights=torch.from_numpy(weights))


def shuffle_classes(labels: NDArray[Any], *, classes: int, seed: int) -> list[Labels]:
    """The images of each class, or with each label, in random order; fewer shots are the beginning of more."""
    generator = np.random.default_rng(seed)
    members = [labels == index if labels.ndim == 1 else labels[:, index] == 1 for index in range(classes)]
    return [generator.permutation(np.flatnonzero(images)) for images in members]


def hold_out_examples(examples: Examples, *, classes: int) -> tuple[Examples, Examples]:
    """The examples to train on, and HOLD_OUT of each class to choose settings by: at least one and never all.

    Raises:
        DataError: No class has two images.
    """
    features, labels = examples
    if labels.ndim == 2:
        order = np.random.default_rng(0).permutation(len(labels))
        held_out, rest = np.split(order, [max(1, round(HOLD_OUT * len(labels)))])
    else:
        shuffled = shuffle_classes(labels, classes=classes, seed=0)
        chosen = [of[: min(max(1, round(HOLD_OUT * len(of))), len(of) - 1)] for of in shuffled if len(of)]
        held_out = np.sort(np.concatenate(chosen))
        rest = np.setdiff1d(np.arange(len(labels)), held_out)
    if not len(held_out):
        reason = "no class has two images, so no setting can be chosen"
        raise DataError(reason, hint=f"use {argument('only', 'fewshot')}")
    return (features[rest], labels[rest]), (features[held_out], labels[held_out])


def fewshot_predictions(
    train: Examples, test: NDArray[Any], *, classes: int, shots: int, seed: int, kind: str = "single"
) -> NDArray[Any]:
    """Predicted classes (m,) of the test features, trained on `shots` images per class.

    Of several labels scores (m, K), trained on `shots` images of each label; of numbers (m, K), trained on as many.
    """
    features, labels = train
    if kind in ("single", "multi"):
        shuffled = shuffle_classes(labels, classes=classes, seed=seed)
        chosen = np.concatenate([order[:shots] for order in shuffled])
        chosen = np.unique(chosen) if kind == "multi" else chosen
        fitted = fit_fewshot(features[chosen], labels[chosen], classes=classes)
        return fitted.predictions(test) if kind == "single" else np.asarray(fitted.logits(test).sigmoid().numpy())
    known = np.flatnonzero(~np.isnan(labels).any(axis=1))
    chosen = np.random.default_rng(seed).permutation(known)[: max(shots, 2)]
    return number_predictions((features[chosen], labels[chosen]), test)


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
    what = f"class {classes[least]!r} has {plural(int(counts[least]), 'training image')}"
    if requested is not None:
        advice = f"use at most {counts[least]} shots" if counts[least] else "add some, or remove the class"
        raise DataError(f"{what}, {shots[-1]} shots need {shots[-1]}", hint=advice)
    left = ", ".join(str(count) for count in shots if count not in possible)
    return possible, f"no few-shot accuracy for {left} shots: {what}"


L2_GRID = tuple(10.0 ** (-step / 2) for step in range(13))
"""Regularizations of the linear probe, from 1 to 1e-6; each fit starts from the previous solution."""
PATIENCE = 3  # number of regularizations without improvement that end the search
LINEAR_PIECE = 2**13  # number of images converted to float64 per step
MOST_STEPS = 1000
SMALLEST_GRADIENT = 1e-5  # gradient of the mean loss at which a fit has converged: accuracies no longer change


def summed_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy with labels (n,), or binary cross-entropy with targets (n, K) that are known."""
    if truth.dim() == 1:
        return F.cross_entropy(logits, truth, reduction="sum")
    known = ~truth.isnan()
    return F.binary_cross_entropy_with_logits(logits[known], truth[known], reduction="sum")


def fit_linear(
    features: NDArray[Any], labels: NDArray[Any], *, classes: int, l2: float, start: Tensor | None = None
) -> LinearClassifier:
    """Logistic regression: minimize mean cross-entropy + l2 / 2 |W|^2, without a penalty on the bias.

    It is multinomial for labels (n,), and one regression per label for targets (n, K).
    L-BFGS in float64 from `start`, or from zero, is deterministic. Features are converted piece by piece.
    """
    starts = range(0, len(labels), LINEAR_PIECE)
    pieces = [features[first : first + LINEAR_PIECE] for first in starts]
    truths = [torch.from_numpy(labels[first : first + LINEAR_PIECE]) for first in starts]
    mean = np.sum([piece.sum(axis=0, dtype=np.float64) for piece in pieces], axis=0) / len(labels)
    squares = np.sum([np.square(piece - mean).sum(axis=0) for piece in pieces], axis=0)
    std = torch.from_numpy(np.sqrt(squares / len(labels))) + SMALLEST_STD
    weights = torch.zeros(features.shape[1] + 1, classes, dtype=torch.float64) if start is None else start.clone()
    classifier = LinearClassifier(mean=torch.from_numpy(mean), std=std, weights=weights.requires_grad_(True))
    stop: dict[str, Any] = {"tolerance_grad": SMALLEST_GRADIENT, "tolerance_change": 1e-10, "max_iter": MOST_STEPS}
    optimizer = torch.optim.LBFGS([weights], history_size=20, line_search_fn="strong_wolfe", **stop)

    def closure() -> float:
        optimizer.zero_grad()
        total = 0.0
        for piece, truth in zip(pieces, truths):
            loss = summed_loss(classifier.logits(piece), truth) / len(labels)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        penalty = l2 / 2 * weights[:-1].square().sum()
        penalty.backward()  # type: ignore[no-untyped-call]
        return total + penalty.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return replace(classifier, weights=weights.detach())


def choose_l2(
    train: Examples, dev: Examples, *, classes: int, candidates: Sequence[float] = L2_GRID
) -> tuple[float, dict[float, float]]:
    """The l2 with the best accuracy or mAP on `dev` (ties: the largest), and the score of each l2 in percent."""
    accuracies: dict[float, float] = {}
    start: Tensor | None = None
    best, worse = 0.0, 0
    for l2 in sorted(candidates, reverse=True):
        classifier = fit_linear(*train, classes=classes, l2=l2, start=start)
        start = classifier.weights
        accuracies[l2] = score(classifier, dev)
        worse = 0 if not best or accuracies[l2] > accuracies[best] else worse + 1
        best = l2 if not worse else best
        if worse == PATIENCE:
            break
    return best, accuracies


def score(classifier: LinearClassifier, dev: Examples) -> float:
    """Accuracy of labels, or mean average precision of targets (n, K), in percent."""
    features, truth = dev
    if truth.ndim == 1:
        return 100.0 * float((classifier.predictions(features) == truth).mean())
    logits, weights = classifier.logits(features).numpy(), np.ones(len(truth))
    columns = [k for k in range(truth.shape[1]) if (truth[:, k] == 1).any()]
    precisions = [SortedScores(logits[:, k], truth[:, k]).average_precision(weights) for k in columns]
    return float(np.mean(precisions)) if precisions else 0.0


STRENGTHS = tuple(10.0 ** (power / 2) for power in range(-8, 5))
"""Candidates for the regularization of ridge regression, relative to the mean variance of a feature."""


def fit_ridge(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Weight (F, K) and bias (K,) of a ridge regression, with the strength that predicts images best that are left out.

    In the eigenbasis of the scatter matrix, X'X = V diag(v) V', a ridge fit of any strength costs one matrix product:
    predictions are (XV) diag(1 / (v + strength)) (XV)'Y. Leaving an image out changes its own residual by the factor
    1 / (1 - leverage), so leave-one-out predictions follow from a single fit.
    """
    x, y = features.double(), targets.double()
    x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
    x, y = x - x_mean, y - y_mean
    variances, axes = torch.linalg.eigh(x.T @ x)
    projected = x @ axes  # (n, F)
    products = projected.T @ y  # (F, K)
    unit = float(variances.mean()) or 1.0

    def error(strength: float) -> float:
        """Mean squared error of predictions for each image by a fit without it."""
        shrunk = 1 / (variances.clamp(min=0) + strength * unit)
        leverage = (projected.square() * shrunk).sum(dim=1) + 1 / len(x)
        residuals = (y - projected @ (shrunk[:, None] * products)) / (1 - leverage).clamp(min=1e-6)[:, None]
        return float(residuals.square().mean())

    weight = axes @ (products / (variances.clamp(min=0) + min(STRENGTHS, key=error) * unit)[:, None])
    return weight, y_mean - x_mean @ weight


def fit_numbers(features: NDArray[Any], targets: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """Weight (F, K) and bias (K,) of ridge regressions of targets (n, K), each on the images whose value is known."""
    x, known = torch.from_numpy(np.asarray(features)), ~np.isnan(targets)
    if known.all():
        return fit_ridge(x, torch.from_numpy(targets))
    fits = [fit_ridge(x[known[:, k]], torch.from_numpy(targets[known[:, k], k : k + 1])) for k in range(known.shape[1])]
    weights, biases = zip(*fits)
    return torch.cat(weights, dim=1), torch.cat(biases)


def number_predictions(train: Examples, test: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers (m, K) of the test features, by `fit_numbers`."""
    weight, bias = fit_numbers(*train)
    return np.asarray(test.astype(np.float64) @ weight.numpy() + bias.numpy())


TEMPERATURE = 0.07
NEIGHBOR_COUNTS = (10, 20, 50, 100, 200)  # numbers of neighbors to choose from
MOST_QUERIES = 4096  # maximum number of images to choose the number of neighbors by
NEIGHBOR_PIECE = 512  # number of images compared with all others per step


def nearest(
    known: NDArray[Any], test: NDArray[Any], count: int, own: Labels | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights exp(cosine / 0.07) as in DINO, and indices (B, count), of the known features nearest to each of `test`.

    If the test images are among the known ones, `own` has their indices: an image is not its own neighbor.
    """
    bank = directions(known)
    for first in range(0, len(test), NEIGHBOR_PIECE):
        similar = directions(test[first : first + NEIGHBOR_PIECE]) @ bank.T
        if own is not None:
            similar[torch.arange(len(similar)), torch.from_numpy(own[first : first + NEIGHBOR_PIECE])] = -torch.inf
        values, indices = similar.topk(min(count, len(bank)))
        yield (values.double() / TEMPERATURE).exp(), indices


def neighbor_predictions(
    train: Examples, test: NDArray[Any], *, classes: int, counts: Sequence[int], own: Labels | None = None
) -> dict[int, Labels]:
    """Predicted classes (m,) by the weighted votes of the nearest, for each number of them, in ascending order."""
    labels, pieces = torch.from_numpy(train[1]), dict[int, list[Labels]]((count, []) for count in counts)
    for weights, indices in nearest(train[0], test, counts[-1], own):
        for count in counts:
            votes = torch.zeros(len(weights), classes, dtype=torch.float64)  # (B, K)
            votes.scatter_add_(1, labels[indices[:, :count]], weights[:, :count])
            pieces[count].append(votes.numpy().argmax(axis=1))
    return {count: np.concatenate(predictions) for count, predictions in pieces.items()}


TARGET_NEIGHBORS = 20


def neighbor_scores(train: Examples, test: NDArray[Any], *, count: int) -> NDArray[np.float64]:
    """Weighted means (m, K) of the targets of the nearest; of all images where none of these is known."""
    targets, pieces = torch.from_numpy(np.asarray(train[1], np.float64)), []
    for weights, indices in nearest(train[0], test, count):
        rows = targets[indices]  # (B, count, K)
        shares = weights[:, :, None].where(~rows.isnan(), 0.0)
        total = shares.sum(dim=1)
        mean = (shares * rows.nan_to_num()).sum(dim=1) / total.clamp(min=1e-30)
        pieces.append(mean.where(total > 0, targets.nanmean(dim=0)))
    return np.asarray(torch.cat(pieces).numpy())


def choose_neighbors(
    train: Examples, *, classes: int, candidates: Sequence[int] = NEIGHBOR_COUNTS
) -> tuple[int, dict[int, float]]:
    """The number of neighbors with the best leave-one-out accuracy (ties: the smallest), and all accuracies.

    At most MOST_QUERIES random images are classified by the others. Accuracies are in percent.
    """
    features, labels = train
    counts = sorted({min(count, len(labels) - 1) for count in candidates})
    queries = np.sort(np.random.default_rng(0).permutation(len(labels))[:MOST_QUERIES])
    predictions = neighbor_predictions(train, features[queries], classes=classes, counts=counts, own=queries)
    right = {count: int((predicted == labels[queries]).sum()) for count, predicted in predictions.items()}
    accuracies = {count: 100.0 * hits / len(queries) for count, hits in right.items()}
    return max(accuracies, key=lambda count: accuracies[count]), accuracies


def directions(features: NDArray[Any]) -> Tensor:
    """Unit-length features in float32."""
    return F.normalize(torch.from_numpy(np.asarray(features, np.float32)), dim=1)
