"""Calibration of a model's scores: reliability, a fitted temperature, and a threshold that rejects unknown images.

To fit that threshold, known and unknown images are divided: a quarter to fit scores, a quarter to choose the score and
its threshold by, and half to measure on. The threshold accepts 95% of known images. `neighbors` (Y. Sun et al., 2022)
and `mahalanobis` (K. Lee et al., 2018) need the features of an image, so a model is saved with the best of the others,
which are computed from its logits and work in every engine: `probability`, `energy`, and `fitted energy` (see
`shift_energy`).
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.label_spaces import DatasetLogits
from vitruvian.evaluation.metrics import probabilities
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking

# n images, D features, K classes

BINS = 15
FEWEST = 20  # minimum number of images to fit a temperature on
MOST = 5000  # maximum number of images to fit a temperature on; more do not change it
FIT_FRACTION = 0.5  # fraction of the images to fit on, if there is no other split
HOTTEST = 100.0  # temperatures are searched from 1 / HOTTEST to HOTTEST
STEPS = 60  # bisection steps over that range; enough for float64 precision

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Images whose predictions have about the same probability; numbers in percent."""

    count: int
    confidence: float  # mean probability of the predictions
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """Agreement of probabilities and accuracy over a set of images."""

    count: int
    temperature: float
    error: float  # expected calibration error in percent: the bins' |accuracy - confidence|, weighted by their images
    loss: float  # mean cross-entropy; with sigmoids, binary and summed over the classes
    bins: tuple[Bin, ...]  # BINS of equal width from 0 to 1, without empty ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Calibration of the model, and the effect of a fitted temperature on other images than it was fitted on."""

    now: Reliability  # over all images
    temperature: float | None = None  # the fitted temperature; None if none could be fitted
    fitted_on: str = ""  # description of the images
    obstacle: str = ""  # why no temperature was fitted
    before: Reliability | None = None
    after: Reliability | None = None  # both over the images that the temperature was not fitted on

    @property
    def helps(self) -> bool:
        """Whether a temperature was fitted that lowers the cross-entropy of other images."""
        return self.before is not None and self.after is not None and self.after.loss < self.before.loss


def bin_numbers(confidence: NDArray[np.float64]) -> Rows:
    """The bin of each probability; bins include their upper edge."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_error(bins: Rows, gaps: NDArray[np.float64]) -> float:
    """Expected calibration error in percent, from accuracy minus confidence of each image times its weight (n,)."""
    return 100.0 * float(np.abs(np.bincount(bins, gaps)).sum())


def reliability(outputs: DatasetLogits, temperature: float, rows: Rows | None = None) -> Reliability:
    measures = outputs.measures(temperature, rows)
    bins, gaps = bin_numbers(measures.probabilities), measures.right - measures.probabilities
    parts = [measures.part(np.flatnonzero(bins == index)) for index in np.unique(bins)]
    return Reliability(
        count=measures.count,
        temperature=temperature,
        error=calibration_error(bins, gaps / measures.count),
        loss=measures.loss,
        bins=tuple(Bin(count=m.count, confidence=100 * float(m.probabilities.mean()), accuracy=m.top1) for m in parts),
    )


def fit_temperature(outputs: DatasetLogits, rows: Rows) -> float:
    """The temperature with the least cross-entropy over these rows.

    If there is no minimum in the range, 0 (all or nearly all predictions are correct) or infinity (they are no better
    than chance). Cross-entropy is convex in 1 / temperature, so the minimum is where its slope changes sign, which
    bisection finds.
    """
    pieces = [(logits, outputs.labels[part]) for part, logits in outputs.pieces(rows)]
    if outputs.score_function == "softmax":  # which a common term does not change; keeps the sums small
        pieces = [(logits - logits.amax(dim=1, keepdim=True), truth) for logits, truth in pieces]

    def slope(inverse: float) -> float:  # the derivative of the summed cross-entropy with respect to 1 / temperature
        total = 0.0
        for logits, truth in pieces:
            expected = (probabilities(logits * inverse, outputs.score_function) * logits).sum()
            total += float(expected) - float(logits.numpy()[np.arange(len(truth)), truth].sum())
        return total

    if slope(HOTTEST) < 0:
        return 0.0
    if slope(1 / HOTTEST) > 0:
        return np.inf
    low, high = -np.log(HOTTEST), np.log(HOTTEST)  # logarithms of 1 / temperature
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(float(np.exp(middle))) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


class CalibrationSplit(NamedTuple):
    """The images to fit temperature and thresholds on, and the images to measure their effect on."""

    dev: DatasetLogits
    fit_rows: Rows  # of `dev`
    rest: Rows  # of the evaluated images, those that nothing is fitted on
    dev_name: str


def calibration_split(outputs: DatasetLogits, dev: DatasetLogits | None, *, seed: int) -> CalibrationSplit:
    """Fit on at most MOST images: of the split `val` if `dev` has its logits, else of a random half of the images."""
    shuffled = np.random.default_rng(seed).permutation(len(outputs if dev is None else dev))
    if dev is not None:
        fit_rows = np.sort(shuffled[:MOST])
        return CalibrationSplit(dev, fit_rows, np.arange(len(outputs)), f"{len(fit_rows):,} images of the split 'val'")
    fit_rows = np.sort(shuffled[: round(FIT_FRACTION * len(outputs))][:MOST])
    rest = np.setdiff1d(np.arange(len(outputs)), fit_rows)
    return CalibrationSplit(
        outputs, fit_rows, rest, f"a random part of {len(fit_rows):,} of the {len(outputs):,} images"
    )


def calibration(outputs: DatasetLogits, temperature: float, fit: CalibrationSplit) -> Calibration:
    """Calibration at the model's temperature, and at one fitted on other images than it is measured on."""
    now = reliability(outputs, temperature)
    dev, fit_rows, rest, dev_name = fit
    if len(fit_rows) < FEWEST:
        return Calibration(now=now, obstacle=f"{len(fit_rows)} images are too few, at least {FEWEST} are needed")
    fitted = fit_temperature(dev, fit_rows)
    if fitted in (0.0, np.inf):
        obstacle = "the predictions are no better than chance"
        if not fitted:
            share = f"all {len(fit_rows):,}" if dev.measures(rows=fit_rows).right.all() else "nearly all"
            obstacle = f"{share} calibration images are classified correctly"
        return Calibration(now=now, obstacle=f"{obstacle} ({dev_name})")
    return Calibration(
        now=now,
        temperature=fitted,
        fitted_on=dev_name,
        before=reliability(outputs, temperature, rest),
        after=reliability(outputs, fitted, rest),
    )


L2 = 0.001  # regularization of the term added to the energy, for features divided by their mean standard deviation


def shift_energy(head: nn.Linear, known: Tensor, unknown: Sequence[Tensor], *, l2: float = L2) -> None:
    """Change a head so that its energy, log(sum(exp(logits))), separates images of its classes from others.

    Logistic regression on features (n, D) of `known` and `unknown` images gives a linear term, which is added to every
    logit. The same term on all logits leaves the probabilities unchanged and shifts only the energy, which is compared
    with the rejection threshold. It is part of the head, so it works in every engine. Each kind of `unknown` images has
    the same total weight, and all kinds together weigh as much as the known images.

    Raises:
        ConfigError: There are no known or no unknown images.
    """
    if not len(known) or not unknown or not all(map(len, unknown)):
        raise ConfigError("fitting the energy needs features of known images and of each kind of unknown images")
    x = torch.cat([known, *unknown]).double()
    target = torch.cat([torch.ones(len(known)), torch.zeros(len(x) - len(known))]).double()
    weights = [torch.full((len(known),), 1 / len(known))]
    weights += [torch.full((len(some),), 1 / len(some) / len(unknown)) for some in unknown]
    weight = torch.cat(weights).double()
    mean, std = x[: len(known)].mean(dim=0), x[: len(known)].std(dim=0).mean()
    with torch.no_grad():
        energy = F.linear(x, head.weight.double(), head.bias.double()).logsumexp(dim=1)
    scale = energy[: len(known)].std().clamp(min=1e-6)
    inputs, energy = (x - mean) / std, energy / scale
    term = torch.zeros(x.shape[1] + 1, dtype=x.dtype, requires_grad=True)  # (D + 1,), the constant last
    optimizer = torch.optim.LBFGS([term], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = energy + inputs @ term[:-1] + term[-1]
        loss = F.binary_cross_entropy_with_logits(logits, target, weight, reduction="sum")
        loss = loss + l2 * term[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        shift = scale * term[:-1] / std  # (D,)
        head.weight.add_(shift)
        head.bias.add_(scale * term[-1] - shift @ mean)


FEWEST_UNKNOWN = 16  # minimum number of known, and of unknown images
TRUE_POSITIVES = 0.95  # share of known images that a threshold accepts
SHRINKAGE = 0.1  # share of the mean variance in the covariance of the Mahalanobis distance
SAVED_ON = {"probability": "probability", "energy": "energy", "fitted energy": "energy"}  # scores from logits alone

Scores = NDArray[np.float64]  # (n,) larger for known images


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A fitted threshold, measured on images that were not used for fitting; numbers in percent."""

    known: int  # images measured on
    unknown: int
    auroc: dict[str, float]  # of each score, on the images measured on
    fpr: dict[str, float]  # unknown images that each score accepts where it accepts 95% of the known ones
    best: str  # the best score on the images to choose by
    chosen: str  # the best of those that can be saved with a model
    threshold: float
    accepted: float  # known images above the threshold
    rejected: float  # unknown images below it
    head: nn.Linear | None = field(default=None, repr=False, compare=False)  # with `fitted energy`

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "head"}

    def __str__(self) -> str:
        text = f"unknown images: a threshold on the {self.chosen} accepts {self.accepted:.1f}% of {self.known:,} known"
        text += f" and rejects {self.rejected:.1f}% of {self.unknown:,} unknown images"
        return text if self.best == self.chosen else f"{text}; {self.best} is better, but needs the features"


def auroc(known: Scores, unknown: Scores) -> float:
    """The probability in percent that a known image has the larger score; ties count half."""
    ordered = np.sort(unknown)
    below, upto = (np.searchsorted(ordered, known, side=side) for side in ("left", "right"))
    return 100.0 * float((below + upto).mean()) / (2 * len(unknown))


def false_positives(known: Scores, unknown: Scores) -> float:
    """The share of unknown images, in percent, at the threshold that accepts 95% of the known ones."""
    return 100.0 * float((unknown >= np.quantile(known, 1 - TRUE_POSITIVES, method="lower")).mean())


def fit_rejection(
    classifier: Classifier,
    known: Source,
    unknown: Source,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> Rejection:
    """Compare scores on images of the model's classes and on others, and fit a threshold on the best.

    Raises:
        DataError: There are too few images, or too many cannot be read.
    """
    model, meta = classifier.model, classifier.model.meta
    head = model.head if isinstance(model, Model) and getattr(model, "head_dist", None) is None else None
    plain = head is not None and meta.score_function == "softmax" and meta.cascade is None and not classifier.flip
    options: Any = {"batch_size": batch_size, "track": track}
    parts: list[list[tuple[Tensor, Tensor]]] = []  # logits and features to fit, to choose and to measure on
    labels = np.empty(0, np.int64)  # of the known images to fit on

    def run(forward: Callable[[Tensor], Tensor], source: Source) -> tuple[list[int], Tensor]:
        pieces = list(classifier.run_source(forward, source, np.arange(len(source)), unreadable=[], **options))
        return [index for rows, _ in pieces for index in rows], torch.cat([values for _, values in pieces]).double()

    for source in (known, unknown):
        if len(source) < FEWEST_UNKNOWN:
            reason = f"{len(source)} images are too few, at least {FEWEST_UNKNOWN} are needed"
            raise DataError(reason, where=source.name)
        indices, logits = run(classifier.logits, source)
        features = run(classifier.features, source)[1] if plain else logits
        order, quarter = np.random.default_rng(seed).permutation(len(indices)), len(indices) // 4
        parts.append([(logits[rows], features[rows]) for rows in np.split(order, [quarter, 2 * quarter])])
        labels = np.asarray(source.labels())[np.array(indices)[order[:quarter]]] if source is known else labels
    scores: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "probability": lambda z, f: probabilities(z / temperature, meta.score_function).amax(dim=1),
        "energy": lambda z, f: z.logsumexp(dim=1),
    }
    shifted: nn.Linear | None = None
    if plain:
        assert head is not None
        (_, fit), (_, others) = (quarters[0] for quarters in parts)
        shifted = deepcopy(head).float().cpu()
        shift_energy(shifted, fit.float(), [others.float()])
        weight, bias = shifted.weight.detach().double(), shifted.bias.detach().double()
        bank = F.normalize(fit, dim=1)
        of_class = F.one_hot(torch.from_numpy(np.unique(labels, return_inverse=True)[1])).double()  # (n, K)
        means = of_class.T @ fit / of_class.sum(dim=0)[:, None]
        rest = fit - of_class @ means
        covariance = (1 - SHRINKAGE) * rest.T @ rest / len(rest)
        covariance.diagonal().add_(SHRINKAGE / (1 - SHRINKAGE) * covariance.trace() / len(covariance) + 1e-6)
        whiten = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        scores |= {
            "fitted energy": lambda z, f: (f @ weight.T + bias).logsumexp(dim=1),
            "neighbors": lambda z, f: (F.normalize(f, dim=1) @ bank.T).amax(dim=1),
            "mahalanobis": lambda z, f: -torch.cdist(f @ whiten, means @ whiten).amin(dim=1),
        }
    # by score: known and unknown images to choose by, then those to measure on
    values = {
        name: [[score(*quarters[k]).numpy() for quarters in parts] for k in (1, 2)] for name, score in scores.items()
    }
    quality = {name: auroc(*choose) for name, (choose, _) in values.items()}
    chosen = max((name for name in quality if name in SAVED_ON), key=quality.__getitem__)
    (dev, _), (accepted, rejected) = values[chosen]
    threshold = float(np.quantile(dev, 1 - TRUE_POSITIVES, method="lower"))
    return Rejection(
        known=len(accepted),
        unknown=len(rejected),
        auroc={name: auroc(*measured) for name, (_, measured) in values.items()},
        fpr={name: false_positives(*measured) for name, (_, measured) in values.items()},
        best=max(quality, key=quality.__getitem__),
        chosen=chosen,
        threshold=threshold,
        accepted=100.0 * float((accepted >= threshold).mean()),
        rejected=100.0 * float((rejected < threshold).mean()),
        head=shifted if chosen == "fitted energy" else None,
    )
