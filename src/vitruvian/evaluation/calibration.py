"""Calibration of a model's scores: reliability, a fitted temperature, and an energy that rejects unknown images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitruvian.config import ScoreFunction
from vitruvian.errors import ConfigError
from vitruvian.evaluation.label_spaces import DatasetLogits

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


def probabilities(logits: Tensor, score_function: ScoreFunction) -> Tensor:  # (n, K) -> (n, K)
    return logits.softmax(dim=1) if score_function == "softmax" else logits.sigmoid()


def log_partition(logits: Tensor, score_function: ScoreFunction) -> Tensor:  # (n, K) -> (n,)
    """What cross-entropy subtracts from the label's logit: ln(sum(e^x)), or with sigmoids the sum of ln(1 + e^x)."""
    return logits.logsumexp(dim=1) if score_function == "softmax" else F.softplus(logits).sum(dim=1)


def confidences(
    outputs: DatasetLogits, temperature: float, rows: Rows | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_], float]:
    """The probability of each image's prediction, whether it is right, and the mean cross-entropy.

    With sigmoids, the cross-entropy is binary and summed over the classes.
    """
    best, right, loss, count = [], [], 0.0, 0
    for part, logits in outputs.pieces(rows):
        scaled, truth = logits / temperature, torch.from_numpy(outputs.labels[part])
        likelihood = scaled.gather(1, truth[:, None])[:, 0] - log_partition(scaled, outputs.score_function)
        chosen = logits.numpy().argmax(axis=1)
        best.append(probabilities(scaled, outputs.score_function).numpy()[np.arange(len(part)), chosen])
        right.append(chosen == outputs.labels[part])
        loss -= float(likelihood.sum())
        count += len(part)
    return np.concatenate(best), np.concatenate(right), loss / count


def bin_numbers(confidence: NDArray[np.float64]) -> Rows:
    """The bin of each probability; bins include their upper edge."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_error(bins: Rows, confidence: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Expected calibration error in percent; `confidence` and `right` are already multiplied by the image weights."""
    gaps = np.bincount(bins, right - confidence, minlength=BINS)
    return 100.0 * float(np.abs(gaps).sum())


def reliability(outputs: DatasetLogits, temperature: float, rows: Rows | None = None) -> Reliability:
    confidence, right, loss = confidences(outputs, temperature, rows)
    bins, total = bin_numbers(confidence), len(confidence)
    means = [
        (int((bins == index).sum()), float(confidence[bins == index].mean()), float(right[bins == index].mean()))
        for index in np.unique(bins)
    ]
    return Reliability(
        count=total,
        temperature=temperature,
        error=calibration_error(bins, confidence / total, right / total),
        loss=loss,
        bins=tuple(Bin(count=n, confidence=100.0 * mean, accuracy=100.0 * correct) for n, mean, correct in means),
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


class Fitting(NamedTuple):
    """What numbers besides the weights are fitted on, and what their effect is measured on."""

    dev: DatasetLogits
    fit_rows: Rows  # of `dev`
    rest: Rows  # of the evaluated images, those that nothing is fitted on
    dev_name: str


def fitting(outputs: DatasetLogits, dev: DatasetLogits | None, *, seed: int) -> Fitting:
    """Fit on at most MOST images: of the split `val` if `dev` has its logits, else of a random half of the images."""
    shuffled = np.random.default_rng(seed).permutation(len(outputs if dev is None else dev))
    if dev is not None:
        fit_rows = np.sort(shuffled[:MOST])
        return Fitting(dev, fit_rows, np.arange(len(outputs)), f"{len(fit_rows):,} images of the split 'val'")
    fit_rows = np.sort(shuffled[: round(FIT_FRACTION * len(outputs))][:MOST])
    rest = np.setdiff1d(np.arange(len(outputs)), fit_rows)
    return Fitting(outputs, fit_rows, rest, f"a random part of {len(fit_rows):,} of the {len(outputs):,} images")


def calibration(outputs: DatasetLogits, temperature: float, fit: Fitting) -> Calibration:
    """Calibration at the model's temperature, and at one fitted on other images than it is measured on."""
    now = reliability(outputs, temperature)
    dev, fit_rows, rest, dev_name = fit
    if len(fit_rows) < FEWEST:
        return Calibration(now=now, obstacle=f"{len(fit_rows)} images are too few, at least {FEWEST} are needed")
    fitted = fit_temperature(dev, fit_rows)
    if fitted in (0.0, np.inf):
        obstacle = "the predictions are no better than chance"
        if not fitted:
            share = f"all {len(fit_rows):,}" if confidences(dev, 1.0, fit_rows)[1].all() else "nearly all"
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

    Logistic regression between features (n, D) of `known` and `unknown` images gives a linear term, which is added to
    all logits. A term common to all logits changes no probability, only the energy that a threshold for rejection is
    compared with; and as part of the head it works in every engine. The kinds of `unknown` images have equal weights,
    which sum to the weight of the known ones.

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
