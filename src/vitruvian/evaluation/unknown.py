"""Unknown images: how well scores of a model tell images of its classes from others, and a threshold that rejects them.

Known and unknown images are divided: a quarter to fit scores, a quarter to choose the score and its threshold by, and
half to measure on. The threshold accepts 95% of known images. `neighbors` (Y. Sun et al., 2022) and `mahalanobis` (K.
Lee et al., 2018) need the features of an image, so a model is saved with the best of the others, which are computed
from its logits and work in every engine: `probability`, `energy`, and `fitted energy` (see `shift_energy`).
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.data.sources import Source
from vitruvian.errors import DataError
from vitruvian.evaluation.calibration import probabilities, shift_energy
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking

FEWEST = 16  # minimum number of known, and of unknown images
TRUE_POSITIVES = 0.95  # share of known images that a threshold accepts
SHRINKAGE = 0.1  # share of the mean variance in the covariance of the Mahalanobis distance
SAVED_ON = {"probability": "probability", "energy": "energy", "fitted energy": "energy"}  # scores from logits alone

Scores = NDArray[np.float64]  # (n,) larger for known images


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A fitted threshold, measured on images that nothing was fitted on; numbers in percent."""

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
    parts: list[tuple[list[Tensor], list[Tensor], NDArray[np.int64]]] = []  # thirds of logits and features, labels
    options: Any = {"batch_size": batch_size, "track": track}

    def run(forward: Callable[[Tensor], Tensor], source: Source) -> tuple[list[int], Tensor]:
        pieces = list(classifier.run_source(forward, source, np.arange(len(source)), unreadable=[], **options))
        return [index for rows, _ in pieces for index in rows], torch.cat([values for _, values in pieces]).double()

    for source in (known, unknown):
        if len(source) < FEWEST:
            raise DataError(f"{len(source)} images are too few, at least {FEWEST} are needed", where=source.name)
        indices, logits = run(classifier.logits, source)
        features = run(classifier.features, source)[1] if plain else logits
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(indices)))
        sizes = [len(order) // 4, len(order) // 4, len(order) - 2 * (len(order) // 4)]
        split = [[values[rows] for rows in torch.split(order, sizes)] for values in (logits, features)]
        parts.append((split[0], split[1], np.asarray(source.labels())[np.array(indices)][order[: sizes[0]]]))
    (_, fit, labels), (_, others, _) = parts
    scores: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "probability": lambda z, f: probabilities(z / temperature, meta.score_function).amax(dim=1),
        "energy": lambda z, f: z.logsumexp(dim=1),
    }
    shifted: nn.Linear | None = None
    if plain:
        assert head is not None
        shifted = deepcopy(head).float().cpu()
        shift_energy(shifted, fit[0].float(), [others[0].float()])
        weight, bias = shifted.weight.detach().double(), shifted.bias.detach().double()
        bank = nn.functional.normalize(fit[0], dim=1)
        classes, which = np.unique(labels, return_inverse=True)
        means = torch.stack([fit[0][torch.from_numpy(which == k)].mean(dim=0) for k in range(len(classes))])
        rest = fit[0] - means[torch.from_numpy(which)]
        covariance = rest.T @ rest / len(rest)
        variance = covariance.trace() / len(covariance)
        covariance *= 1 - SHRINKAGE
        covariance.diagonal().add_(SHRINKAGE * variance + 1e-6)
        whiten = torch.linalg.inv(torch.linalg.cholesky(covariance)).T
        scores |= {
            "fitted energy": lambda z, f: (f @ weight.T + bias).logsumexp(dim=1),
            "neighbors": lambda z, f: (nn.functional.normalize(f, dim=1) @ bank.T).amax(dim=1),
            "mahalanobis": lambda z, f: -torch.cdist(f @ whiten, means @ whiten).amin(dim=1),
        }
    # by score: known and unknown images to choose by, then those to measure on
    values = {
        name: [[score(z[k], f[k]).numpy() for z, f, _ in parts] for k in (1, 2)] for name, score in scores.items()
    }
    quality = {name: auroc(*choose) for name, (choose, _) in values.items()}
    best = max(quality, key=quality.__getitem__)
    chosen = max((name for name in quality if name in SAVED_ON), key=quality.__getitem__)
    (dev, _), (accepted, rejected) = values[chosen]
    threshold = float(np.quantile(dev, 1 - TRUE_POSITIVES, method="lower"))
    return Rejection(
        known=len(accepted),
        unknown=len(rejected),
        auroc={name: auroc(*measured) for name, (_, measured) in values.items()},
        fpr={name: false_positives(*measured) for name, (_, measured) in values.items()},
        best=best,
        chosen=chosen,
        threshold=threshold,
        accepted=100.0 * float((accepted >= threshold).mean()),
        rejected=100.0 * float((rejected < threshold).mean()),
        head=shifted if chosen == "fitted energy" else None,
    )
