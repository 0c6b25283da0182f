"""Conformal prediction sets: the classes that contain the label with a promised probability, and how often they do.

Split conformal prediction with the label's probability as the score (LAC: M. Sadinle et al., 2019). The threshold is
the k-th smallest probability of the label among n images that the model was not trained on, k = floor((1 - c)(n + 1)).
The set of a new image from the same distribution, all classes with at least that probability, contains its label with
probability c or more, whatever the model is.
"""

from dataclasses import dataclass
from math import floor

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import ConfigError, argument
from vitruvian.evaluation.calibration import Fitting, Rows, probabilities
from vitruvian.evaluation.label_spaces import DatasetLogits
from vitruvian.evaluation.metrics import Interval, accuracy_interval

# n images, K classes

TENTHS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformalSets:
    """A fitted threshold, and its sets on images that it was not fitted on; numbers in percent."""

    promised: float
    threshold: float  # classes of at least this probability are in the set
    temperature: float  # of the probabilities
    fitted_on: str
    count: int  # images that the sets were measured on
    coverage: float  # of these, the images whose set contains the label
    interval: Interval
    mean_size: float  # classes in a set
    single: float  # images whose set has one class
    empty: float  # images whose set has none


def check_coverage(coverage: float) -> None:
    if not 0.5 <= coverage < 1:
        raise ConfigError(f"{argument('coverage', coverage)} is not between 0.5 and 1, such as 0.95")


def fit_threshold(label_probability: NDArray[np.float64], coverage: float) -> float:
    """The threshold that keeps the promise, from the probabilities of the labels of images that it is fitted on."""
    rank = floor((1 - coverage) * (len(label_probability) + 1) + 1e-9)
    if rank < 1:
        needed, count = int(np.ceil(1 / (1 - coverage) - 1e-9)) - 1, len(label_probability)
        raise ConfigError(
            f"{argument('coverage', coverage)} needs at least {needed} images to fit on, there are {count}"
        )
    return float(np.sort(label_probability)[rank - 1])


def fit_sets(fit: Fitting, outputs: DatasetLogits, *, coverage: float, t: float) -> ConformalSets:
    """Fit the threshold at temperature t, and measure its sets on images that it was not fitted on.

    On the split `val`, if there is one; else on all images, and every tenth is measured by a threshold fitted on the
    others, which is far more precise than two halves.

    Raises:
        ConfigError: The promise needs more images.
    """
    if fit.dev is not outputs:
        threshold = fit_threshold(probabilities_of_labels(fit.dev, fit.fit_rows, t, 0.0)[0], coverage)
        own, sizes = probabilities_of_labels(outputs, fit.rest, t, threshold)
        right, fitted_on = own >= threshold, fit.dev_name
    else:
        own, sizes = probabilities_of_labels(outputs, np.arange(len(outputs)), t, 0.0)
        right, fitted_on = np.zeros(len(own), np.bool_), f"all {len(own):,} images, each measured without its tenth"
        threshold, tenth = fit_threshold(own, coverage), np.random.default_rng(0).permutation(len(own)) % TENTHS
        for part in range(min(TENTHS, len(own))):
            limit = fit_threshold(own[tenth != part], coverage)
            right[tenth == part] = own[tenth == part] >= limit
            sizes[tenth == part] = probabilities_of_labels(outputs, np.flatnonzero(tenth == part), t, limit)[1]
    return ConformalSets(
        promised=100 * coverage,
        threshold=threshold,
        temperature=t,
        fitted_on=fitted_on,
        count=len(right),
        coverage=100.0 * float(right.mean()),
        interval=accuracy_interval(right),
        mean_size=float(sizes.mean()),
        single=100.0 * float((sizes == 1).mean()),
        empty=100.0 * float((sizes == 0).mean()),
    )


def probabilities_of_labels(
    outputs: DatasetLogits, rows: Rows, temperature: float, threshold: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The probability (n,) of each label, and the sizes (n,) of the sets."""
    scores, sizes = [], []
    for part, logits in outputs.pieces(rows):
        values = probabilities(logits / temperature, outputs.score_function).numpy()  # (B, K)
        scores.append(values[np.arange(len(part)), outputs.labels[part]])
        sizes.append((values >= threshold).sum(axis=1))
    return np.concatenate(scores), np.concatenate(sizes)
