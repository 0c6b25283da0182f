"""Metrics of several labels per image and of numbers, with bootstrap intervals; unknown targets are left out.

Thresholds and margins are fitted on the images that are measured. Metrics that depend on them use, for each half of the
images, those fitted on the other half, so that they are not flattered; all images fit what is saved with the model.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.errors import DataError, NotFiniteError
from vitruvian.evaluation.metrics import RESAMPLES, ImageMeasures, Interval, bootstrap
from vitruvian.targets import COVERAGE, KINDS, SEPARATOR, Target, TargetTable

# n images, K outputs: labels or numbers

FEW_POSITIVES = 5  # a label with fewer images gets the threshold of all labels together
BOOTSTRAP_CELLS = 5e7  # values that all resamples may read together; more images need fewer resamples

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetMeasures(ImageMeasures):
    """Metrics of several labels or of numbers."""

    names: tuple[str, ...]  # (K)
    targets: Floats  # (n, K) NaN if unknown
    scores: Floats  # (n, K) probabilities of labels, or predicted numbers
    loss: float
    target: Target  # what the model has saved
    fitted: bool = False  # whether to use the thresholds and margins of `target`

    @property
    def known(self) -> Mask:
        return ~np.isnan(self.targets)

    @property
    def metrics(self) -> tuple[str, ...]:
        return KINDS[self.target.kind].metrics

    @property
    def metric(self) -> str:
        return self.metrics[0]

    def scalars(self) -> dict[str, float]:
        values = self.values(np.ones(self.count))
        return {"count": self.count, "loss": self.loss} | {k: v for k, v in values.items() if np.isfinite(v)}

    def headline_interval(self) -> dict[str, float]:
        """The interval of the most important metric, such as `map_low` and `map_high`."""
        low, high = self.intervals()[self.metric]
        return {f"{self.metric}_low": low, f"{self.metric}_high": high} if np.isfinite(low + high) else {}

    def weighted(self, drawn: Floats) -> float:
        return self.values(drawn)[self.metric]

    @abstractmethod
    def values(self, drawn: Floats) -> dict[str, float]:
        """The metrics by name, if each image counts as often as it was drawn (n,)."""

    @abstractmethod
    def per_output(self) -> dict[str, Floats]:
        """Metrics (K,) of each label or number by name."""

    @abstractmethod
    def text(self, row: int) -> str:
        """The prediction for an image."""

    @abstractmethod
    def fit(self) -> Target:
        """The target with thresholds or margins fitted to these images."""

    def cross_fit(self, fit: Callable[[Floats, Floats], Floats]) -> Floats:
        """Cross-fitting in two halves: for each image (n, K), the value (K,) that `fit` returns for the other half."""
        half = np.arange(self.count) % 2 == 0
        result = np.empty((self.count, len(self.names)))
        for part in (half, ~half):
            rest = ~part if self.count > 1 else part
            result[part] = fit(self.scores[rest], self.targets[rest])
        return result

    @property
    def resamples(self) -> int:
        """Draws of the bootstrap that are affordable."""
        return int(np.clip(BOOTSTRAP_CELLS / self.targets.size, 50, RESAMPLES))

    def intervals(self, seed: int = 0) -> dict[str, Interval]:
        """Bootstrap intervals of the metrics."""

        def statistic(drawn: Floats) -> list[float]:
            values = self.values(drawn)
            return [values[name] for name in self.metrics]

        return dict(zip(self.metrics, bootstrap(statistic, self.count, seed=seed, resamples=self.resamples)))


class SortedScores:
    """The scores of one label, sorted once, for average precision with any weights of the images."""

    def __init__(self, scores: Floats, truth: Floats) -> None:
        self.rows = np.flatnonzero(~np.isnan(truth))
        self.rows = self.rows[np.argsort(-scores[self.rows], kind="stable")]
        self.truth, ordered = truth[self.rows], scores[self.rows]
        self.last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))  # of each run of equal scores

    def average_precision(self, weights: Floats) -> float:
        """The sum of (R_k - R_k-1) P_k over distinct scores, in percent; NaN without a positive image."""
        drawn = weights[self.rows]
        hits, seen = np.cumsum(drawn * self.truth)[self.last], np.cumsum(drawn)[self.last]
        if not len(hits) or not hits[-1]:
            return np.nan
        return 100 * float((np.diff(hits, prepend=0) * hits / np.maximum(seen, 1e-12)).sum() / hits[-1])


def f1_thresholds(scores: Floats, targets: Floats) -> Floats:
    """The threshold (K,) of each label with the largest F1; that of all labels together for rare labels."""
    common = f1_threshold(scores.ravel(), targets.ravel())
    positives = (targets == 1).sum(axis=0)
    return np.array(
        [
            f1_threshold(scores[:, k], targets[:, k]) if positives[k] >= FEW_POSITIVES else common
            for k in range(targets.shape[1])
        ]
    )


def f1_threshold(scores: Floats, truth: Floats) -> float:
    """The threshold with the largest F1, in the middle between two scores; 0.5 without a positive image."""
    ordered = SortedScores(scores, truth)
    if not len(ordered.last) or not ordered.truth.any():
        return 0.5
    hits = np.cumsum(ordered.truth)[ordered.last]
    best = int((hits / (ordered.last + 1 + ordered.truth.sum())).argmax())
    values = scores[ordered.rows][ordered.last]
    return float((values[best] + (values[best + 1] if best + 1 < len(values) else 0.0)) / 2)


class LabelMeasures(TargetMeasures):
    """Metrics of several labels per image, in percent except for coverage.

    mAP is the mean over labels with a known image (macro), or of all decisions together (micro). `hamming` is the
    fraction of wrong decisions. `coverage` is the mean number of top-ranked labels that it takes to include all labels
    of an image (coverage error).
    """

    @cached_property
    def sorted_scores(self) -> list[SortedScores]:
        return [SortedScores(self.scores[:, k], self.targets[:, k]) for k in range(len(self.names))]

    @cached_property
    def all_scores(self) -> SortedScores:
        return SortedScores(self.scores.ravel(), self.targets.ravel())

    @cached_property
    def decisions(self) -> Mask:
        """(n, K) whether each label is predicted."""
        if self.fitted:
            return self.scores >= np.array(self.target.thresholds or (0.5,))
        return self.scores >= self.cross_fit(f1_thresholds)

    @cached_property
    def covered(self) -> Floats:
        """(n,) how many labels have at least the score of the lowest label of the image; 0 without labels."""
        lowest = np.where(self.targets == 1, self.scores, np.inf).min(axis=1, keepdims=True)
        return ((self.scores >= lowest) & self.known).sum(axis=1).astype(np.float64)

    def counts(self, drawn: Floats) -> tuple[Floats, Floats, Floats]:
        """(K,) images with a label that is predicted, with the label, and with the prediction."""
        truth, said = (self.targets == 1).astype(np.float64), (self.decisions & self.known).astype(np.float64)
        return drawn @ (truth * said), drawn @ truth, drawn @ said

    def values(self, drawn: Floats) -> dict[str, float]:
        hits, positives, predicted = self.counts(drawn)
        present = positives > 0
        precisions = [s.average_precision(drawn) for s, is_present in zip(self.sorted_scores, present) if is_present]
        f1 = 200 * hits / np.maximum(positives + predicted, 1e-12)
        wrong = drawn @ ((self.decisions != (self.targets == 1)) & self.known)
        micro = self.all_scores.average_precision(np.repeat(drawn, len(self.names)))
        return {
            "map": float(np.mean(precisions)) if precisions else np.nan,
            "map_micro": micro,
            "f1": float(f1[present].mean()) if present.any() else np.nan,
            "hamming": 100 * float(wrong.sum() / np.maximum(drawn @ self.known, 1e-12).sum()),
            "coverage": float(drawn @ self.covered / drawn.sum()),
        }

    def text(self, row: int) -> str:
        return SEPARATOR.join(self.names[k] for k in np.flatnonzero(self.decisions[row])) or "none"

    def per_output(self) -> dict[str, Floats]:
        ones = np.ones(self.count)
        hits, positives, predicted = self.counts(ones)
        nan = np.full(len(self.names), np.nan)
        return {
            "images": positives,
            "AP %": np.array([ordered.average_precision(ones) for ordered in self.sorted_scores]),
            "recall %": np.divide(100 * hits, positives, out=nan.copy(), where=positives > 0),
            "precision %": np.divide(100 * hits, predicted, out=nan.copy(), where=predicted > 0),
            "threshold": np.array(self.fit().thresholds),
        }

    def fit(self) -> Target:
        if self.fitted:
            return self.target
        fitted = f1_thresholds(self.scores, self.targets).clip(0, 1)
        return self.target.replace(thresholds=tuple(np.round(fitted, 6).tolist()))


def fit_margins(scores: Floats, targets: Floats, coverage: float = COVERAGE) -> Floats:
    """Half the width (K,) of intervals that contain `coverage` of new values (split conformal prediction).

    This is the ceil(coverage (n + 1))-th smallest error; the largest if there are too few images for that.
    """
    margins = np.zeros(targets.shape[1])
    for k in range(targets.shape[1]):
        errors = np.sort(np.abs(scores[:, k] - targets[:, k])[~np.isnan(targets[:, k])])
        margins[k] = errors[min(int(np.ceil(coverage * (len(errors) + 1))), len(errors)) - 1] if len(errors) else 0.0
    return margins


class NumberMeasures(TargetMeasures):
    """Metrics of numbers, in their units, as means over the columns."""

    def columns(self, drawn: Floats) -> dict[str, Floats]:
        """The metrics (K,) of each column."""
        weights = drawn[:, None] * self.known
        total = np.maximum(weights.sum(axis=0), 1e-12)
        truth = np.where(self.known, self.targets, 0.0)

        def mean(values: Floats) -> Floats:
            return np.asarray((weights * values).sum(axis=0) / total)

        error, centered, spread = self.scores - truth, truth - mean(truth), self.scores - mean(self.scores)
        variances = np.maximum(mean(centered**2), 1e-30), np.maximum(mean(spread**2), 1e-30)
        return {
            "mae": mean(np.abs(error)),
            "rmse": np.sqrt(mean(error**2)),
            "r2": 1 - mean(error**2) / variances[0],
            "correlation": mean(centered * spread) / np.sqrt(variances[0] * variances[1]),
        }

    def values(self, drawn: Floats) -> dict[str, float]:
        return {name: float(values.mean()) for name, values in self.columns(drawn).items()}

    def text(self, row: int) -> str:
        return ", ".join(f"{score:.4g}" for score in self.scores[row])

    @property
    def covered(self) -> float:
        """Percent of the known values inside their intervals."""
        fit = partial(fit_margins, coverage=self.target.coverage)
        margins = np.array(self.target.margins or (np.nan,)) if self.fitted else self.cross_fit(fit)
        inside = np.abs(self.scores - self.targets) <= margins
        return 100 * float(inside[self.known].mean())

    def per_output(self) -> dict[str, Floats]:
        images = self.known.sum(axis=0).astype(np.float64)
        return {"images": images, **self.columns(np.ones(self.count)), "margin": np.array(self.fit().margins)}

    def fit(self) -> Target:
        if self.fitted:
            return self.target
        margins = fit_margins(self.scores, self.targets, self.target.coverage)
        return self.target.replace(margins=tuple(margins.tolist()))


MEASURES: dict[str, type[TargetMeasures]] = {
    "multi": LabelMeasures,
    "number": NumberMeasures,
    "ordinal": NumberMeasures,
}
"""The metrics of each kind of target that is not one class per image."""


def scores_of(outputs: NDArray[np.floating], target: Target) -> Floats:
    """Probabilities of labels, or numbers, from a model's outputs (n, K)."""
    values = np.asarray(outputs, np.float64)
    if KINDS[target.kind].score_function == "sigmoid":
        return np.asarray(torch.from_numpy(values).sigmoid().numpy())
    return np.asarray(values * np.array(target.std or (1.0,)) + np.array(target.mean or (0.0,)))


def measure_outputs(
    outputs: NDArray[np.floating],
    labels: NDArray[np.integer],
    indices: NDArray[np.int64],
    table: TargetTable,
    target: Target,
    *,
    loss: float = 0.0,
    fitted: bool = False,
) -> TargetMeasures:
    """The metrics of a model's outputs (n, K) for images with these rows of the table. Raises DataError without any."""
    order = np.argsort(indices, kind="stable")
    if not len(order):
        raise DataError("there are no examples to evaluate the model on")
    broken = np.flatnonzero(~np.isfinite(outputs).all(axis=1))
    if len(broken):
        raise NotFiniteError(f"the model's outputs for example {indices[broken[0]]} are NaN or infinite")
    return MEASURES[target.kind](
        names=table.names,
        indices=indices[order],
        targets=table.rows(labels[order]).astype(np.float64),
        scores=scores_of(outputs[order], target),
        loss=loss,
        target=target,
        fitted=fitted,
    )
