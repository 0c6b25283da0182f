"""Whether a model's probabilities can be believed: calibration error, reliability, a temperature that mends them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.evaluation.measuring.inference import Answers

# n images

BINS = 15
FEWEST = 20
"""Images that a temperature is fitted on, at least."""
MOST = 5000
"""Images that a temperature is fitted on, at most: more do not change it."""
SHARE = 0.5
"""Of the images, where there is no split to fit on."""
HOTTEST = 100.0
"""Temperatures are looked for from 1 / HOTTEST to HOTTEST."""
STEPS = 60
"""Halvings of that range, which leave less than the error of float64."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bin:
    """Images whose best answer has about the same probability; shares in percent."""

    count: int
    confidence: float
    """Mean probability of the best answer."""
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliability:
    """How probabilities and accuracy agree over a set of images."""

    count: int
    temperature: float
    error: float
    """Expected calibration error in percent: the bins' |accuracy - confidence|, weighted by their images."""
    loss: float
    """Mean cross-entropy."""
    bins: tuple[Bin, ...]
    """BINS of equal width from 0 to 1; empty ones are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The model as it is, and what a fitted temperature would do, on images that it was not fitted on."""

    now: Reliability
    """Over all images."""
    temperature: float | None = None
    """Fitted; None where that was not possible."""
    fitted_on: str = ""
    """Which images, in words."""
    obstacle: str = ""
    """Why no temperature was fitted."""
    before: Reliability | None = None
    after: Reliability | None = None
    """Over the images that the temperature was not fitted on."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Confidences(NamedTuple):
    """The best answer to each image."""

    probability: NDArray[np.float64]
    right: NDArray[np.bool_]
    loss: float
    """Mean cross-entropy over the images."""


def confidences(answers: Answers, temperature: float, rows: Rows | None = None) -> Confidences:
    best, right, loss, count = [], [], 0.0, 0
    for part, logits in answers.pieces(rows):
        scores = (logits / temperature).log_softmax(dim=1).numpy()
        truth = answers.labels[part]
        chosen = logits.numpy().argmax(axis=1)
        best.append(np.exp(scores[np.arange(len(part)), chosen]))
        right.append(chosen == truth)
        loss -= float(scores[np.arange(len(part)), truth].sum())
        count += len(part)
    return Confidences(np.concatenate(best), np.concatenate(right), loss / count)


def bin_numbers(confidence: NDArray[np.float64]) -> Rows:
    """The bin of each probability: the upper edge belongs to it, the lower does not."""
    return np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)


def calibration_error(bins: Rows, confidence: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """In percent; `right` may be 0 and 1, or any weights that `confidence` carries too, for each image."""
    gaps = np.bincount(bins, right - confidence, minlength=BINS)
    return 100.0 * float(np.abs(gaps).sum())


def reliability(answers: Answers, temperature: float, rows: Rows | None = None) -> Reliability:
    confidence, right, loss = confidences(answers, temperature, rows)
    numbers, total = bin_numbers(confidence), len(confidence)
    filled = [numbers == number for number in range(BINS)]
    return Reliability(
        count=total,
        temperature=temperature,
        error=calibration_error(numbers, confidence / total, right / total),
        loss=loss,
        bins=tuple(
            Bin(
                count=int(inside.sum()),
                confidence=100.0 * float(confidence[inside].mean()),
                accuracy=100.0 * float(right[inside].mean()),
            )
            for inside in filled
            if inside.any()
        ),
    )


def fitted_temperature(answers: Answers, rows: Rows) -> float | None:
    """The temperature of least cross-entropy over these rows; None where it falls without end: all right, or worse
    than chance.

    Cross-entropy is convex in 1 / temperature, so its slope is followed to where it changes sign.
    """
    slope = slope_of(answers, rows)
    if slope(HOTTEST) < 0 or slope(1 / HOTTEST) > 0:
        return None
    low, high = -np.log(HOTTEST), np.log(HOTTEST)  # of the inverse temperature
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(float(np.exp(middle))) < 0 else (low, middle)
    return float(np.exp(-(low + high) / 2))


def slope_of(answers: Answers, rows: Rows) -> Callable[[float], float]:
    """The slope of the summed cross-entropy in the inverse temperature."""
    kept = [(logits - logits.amax(dim=1, keepdim=True), answers.labels[part]) for part, logits in answers.pieces(rows)]

    def slope(inverse: float) -> float:
        total = 0.0
        for logits, truth in kept:
            expected = ((logits * inverse).softmax(dim=1) * logits).sum()
            total += float(expected) - float(logits.numpy()[np.arange(len(truth)), truth].sum())
        return total

    return slope


def why_no_best(answers: Answers, rows: Rows) -> str:
    """Why cross-entropy falls without end towards one end of the temperatures."""
    right = confidences(answers, 1.0, rows).right
    if right.all():
        return f"all {len(rows):,} answers are right, so cross-entropy only falls the surer the model is"
    if slope_of(answers, rows)(1 / HOTTEST) > 0:
        return f"the answers are no better than chance, so cross-entropy falls up to temperature {HOTTEST:g}"
    return f"nearly all answers are right, so cross-entropy falls down to temperature {1 / HOTTEST:g}"


def calibration(answers: Answers, temperature: float, dev: Answers | None, dev_is: str, *, seed: int) -> Calibration:
    """Calibration at the model's own temperature, and with one fitted on `dev`, or else on a share of the answers."""
    now = reliability(answers, temperature)
    shuffled = np.random.default_rng(seed).permutation(len(answers if dev is None else dev))
    if dev is None:
        fit_rows = np.sort(shuffled[: round(SHARE * len(answers))][:MOST])
        rest = np.setdiff1d(np.arange(len(answers)), fit_rows)
        dev, dev_is = answers, f"a random part of {len(fit_rows):,} of the {len(answers):,} images"
    else:
        fit_rows, rest = np.sort(shuffled[:MOST]), np.arange(len(answers))
        dev_is = f"{len(fit_rows):,} images of {dev_is}"
    if len(fit_rows) < FEWEST:
        return Calibration(now=now, obstacle=f"{len(fit_rows)} images to fit it on are too few, wanted {FEWEST}")
    fitted = fitted_temperature(dev, fit_rows)
    if fitted is None:
        return Calibration(now=now, obstacle=f"{why_no_best(dev, fit_rows)} ({dev_is})")
    return Calibration(
        now=now,
        temperature=fitted,
        fitted_on=dev_is,
        before=reliability(answers, temperature, rest),
        after=reliability(answers, fitted, rest),
    )
