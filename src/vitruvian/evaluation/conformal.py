"""Conformal prediction: sets of classes or labels, and intervals of numbers, with guaranteed coverage of the truth.

Split conformal prediction. Each image has a score of how well the truth conforms with the outputs: the probability of
its label (LAC: M. Sadinle et al., 2019), the smallest probability of its labels, or the negative error of a number. The
threshold is the k-th smallest score among n images that the model was not trained on, k = floor((1 - c)(n + 1)). A new
image from the same distribution has at least that score with probability c or more, whatever the model is.

This is the mean over all choices of the n images. For one choice the probability differs from c by chance: it is
distributed as Beta(n + 1 - k, k) if no scores are equal, with a standard deviation of about sqrt(c (1 - c) / n).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import ConfigError, argument
from vitruvian.evaluation.calibration import CalibrationSplit, Rows
from vitruvian.evaluation.label_spaces import PIECE, DatasetLogits
from vitruvian.evaluation.metrics import Interval, central, probabilities, wilson
from vitruvian.evaluation.target_metrics import LabelMeasures, TargetMeasures

# n images, K classes or outputs, S scores of an image: one, or one for each number

TENTHS = 10
DRAWS = 100_000  # of the beta distribution

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformalSets:
    """Fitted thresholds, and their sets on images that they were not fitted on; numbers in percent."""

    kind: str  # of target
    requested: float  # target coverage
    thresholds: tuple[float, ...]  # (S,) of probabilities, or the negative half width of each number's interval
    temperature: float  # of the probabilities
    fitted_on: str
    count: int  # images that the sets were measured on
    coverage: float  # of these, the images whose set contains the truth
    interval: Interval  # confidence interval of the coverage
    expected: Interval  # for new images: what the number of images to fit on allows
    mean_size: float | None  # classes in a set; None for numbers
    single: float | None  # images whose set has one class
    empty: float | None  # images whose set has none

    @property
    def threshold(self) -> float:
        return self.thresholds[0]


@dataclass(frozen=True, slots=True)
class Conformity:
    """The scores of images, and the outputs that are in a set if they reach its threshold."""

    scores: Floats  # (n, S) NaN if the truth is unknown
    outputs: Callable[[Rows], Iterable[Floats]] | None = None  # of these rows, some (B, K) at a time; None for numbers


def check_coverage(coverage: float) -> None:
    if not 0.5 <= coverage < 1:
        raise ConfigError(f"{argument('coverage', coverage)} is not between 0.5 and 1, such as 0.95")


def rank_of(coverage: float, count: int) -> int:
    """The rank k of the threshold among the scores of `count` images. Raises ConfigError if there are too few."""
    rank = floor((1 - coverage) * (count + 1) + 1e-9)
    if rank < 1:
        needed = int(np.ceil(1 / (1 - coverage) - 1e-9)) - 1
        what = f"{argument('coverage', coverage)} needs at least {needed} images to fit on, there are {count}"
        raise ConfigError(what)
    return rank


def conformal_threshold(scores: Floats, coverage: float) -> float:
    """The threshold that guarantees the coverage, from the scores (n,) of the images that it is fitted on."""
    return float(np.sort(scores)[rank_of(coverage, len(scores)) - 1])


def conformal_thresholds(scores: Floats, coverage: float) -> Floats:
    """The threshold (S,) of each score (n, S), from the images whose truth is known."""
    return np.array([conformal_threshold(column[~np.isnan(column)], coverage) for column in scores.T])


def expected_coverage(coverage: float, count: int) -> Interval:
    """The central LEVEL percent of the coverage for new images, in percent, of thresholds fitted on `count` images."""
    rank = rank_of(coverage, count)
    ends: Interval = central(100.0 * np.random.default_rng(0).beta(count + 1 - rank, rank, DRAWS))
    return ends


def conformal_sets(
    fit: Conformity, measured: Conformity | None, *, coverage: float, kind: str, t: float = 1.0, fitted_on: str = ""
) -> ConformalSets:
    """Fit thresholds, and measure their sets on `measured`.

    Without that, on the same images: every tenth is measured by thresholds fitted on the others, which is far more
    precise than two halves.

    Raises:
        ConfigError: There are too few images for this coverage.
    """
    thresholds = conformal_thresholds(fit.scores, coverage)
    images = measured or fit
    n = len(images.scores)
    parts = [(np.arange(n), thresholds)]
    if measured is None:
        tenth = np.random.default_rng(0).permutation(n) % TENTHS
        parts = [
            (np.flatnonzero(tenth == part), conformal_thresholds(fit.scores[tenth != part], coverage))
            for part in np.unique(tenth)
        ]
    covered, sizes = np.zeros(images.scores.shape, np.bool_), np.zeros(n, np.int64)
    for rows, limits in parts:
        covered[rows] = images.scores[rows] >= limits
        if images.outputs is not None:
            sizes[rows] = np.concatenate([(outputs >= limits).sum(axis=1) for outputs in images.outputs(rows)])
    known = ~np.isnan(images.scores)
    count, share = int(known.any(axis=1).sum()), float(covered[known].mean())
    has_sizes = images.outputs is not None
    return ConformalSets(
        kind=kind,
        requested=100 * coverage,
        thresholds=tuple(thresholds.tolist()),
        temperature=t,
        fitted_on=fitted_on or f"all {count:,} images, measured in ten folds",
        count=count,
        coverage=100.0 * share,
        interval=wilson(share * count, count),
        expected=expected_coverage(coverage, int((~np.isnan(fit.scores)).sum(axis=0).min())),
        mean_size=float(sizes.mean()) if has_sizes else None,
        single=100.0 * float((sizes == 1).mean()) if has_sizes else None,
        empty=100.0 * float((sizes == 0).mean()) if has_sizes else None,
    )


def fit_sets(fit: CalibrationSplit, outputs: DatasetLogits, *, coverage: float, t: float) -> ConformalSets:
    """Sets of classes at temperature t: fitted on the split `val`, if there is one, else on all images."""

    def conformity(logits: DatasetLogits, rows: Rows) -> Conformity:
        def outputs_of(some: Rows) -> Iterator[Floats]:
            for _, values in logits.pieces(rows[some]):
                yield probabilities(values / t, logits.score_function).numpy()

        labels = np.split(logits.labels[rows], range(PIECE, len(rows), PIECE))
        pieces = zip(outputs_of(np.arange(len(rows))), labels)
        of_labels = [np.take_along_axis(values, truth[:, None], axis=1) for values, truth in pieces]
        return Conformity(np.concatenate(of_labels), outputs_of)

    options: Any = {"coverage": coverage, "kind": "single", "t": t}
    if fit.dev is outputs:
        return conformal_sets(conformity(outputs, np.arange(len(outputs))), None, **options)
    scores = conformity(fit.dev, fit.fit_rows)
    return conformal_sets(scores, conformity(outputs, fit.rest), fitted_on=fit.dev_name, **options)


def fit_target_sets(measures: TargetMeasures, coverage: float) -> ConformalSets:
    """Sets that contain all labels of an image, or intervals of numbers, fitted on these images.

    An image without labels is left out.
    """
    conformity = Conformity(-np.abs(measures.scores - measures.targets))
    if isinstance(measures, LabelMeasures):
        lowest = np.where(measures.targets == 1, measures.scores, np.inf).min(axis=1, keepdims=True)
        conformity = Conformity(np.where(np.isfinite(lowest), lowest, np.nan), lambda rows: [measures.scores[rows]])
    return conformal_sets(conformity, None, coverage=coverage, kind=measures.target.kind)
