"""What a run learns to answer: the question to each image, its loss, and how the answers are measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.data.loader import Batch
from vitruvian.data.sources import Source, class_sizes
from vitruvian.evaluation.measuring.metrics import SHOWN_MISTAKES, Measures, measure

if TYPE_CHECKING:
    from vitruvian.training.recipe import Recipe

# B images, K classes

Autocast = Callable[[], AbstractContextManager[object]]


class Measured(Protocol):
    """What every measurement of held-out images has."""

    @property
    def loss(self) -> float: ...

    @property
    def top1(self) -> float: ...

    def scalars(self) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a measurement computes."""

    device: torch.device
    dtype: torch.dtype | None
    """Of autocast."""
    all_ranks: bool
    """Every process of torchrun has its own batches, and all get the measures of the whole."""


class Objective(ABC):
    """Owns the targets, the loss and the measures of a run; the model answers."""

    @abstractmethod
    def targets(self, batch: Batch, step: int) -> Tensor:
        """What is asked of each image of a batch, (B, ...)."""

    def answers(self, batch: Batch, pixels: Tensor) -> Tensor:
        """What else there is to learn from the pixels of a batch as the model sees them, (B, ...)."""
        return pixels.new_empty(len(pixels), 0)

    @abstractmethod
    def judged(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, answers: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        """The loss of each image (B,), and how many answers are right as a float."""

    @abstractmethod
    def measured(self, model: nn.Module, batches: Iterable[Batch], images: int, place: Place) -> Measured:
        """The measures of a model over all batches of held-out `images`, without dropout."""


class Labels(Objective):
    """The class of each image."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe, self.classes = recipe, classes

    def targets(self, batch: Batch, step: int) -> Tensor:
        return batch.labels

    def judged(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, answers: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        with autocast():
            logits = module(pixels)
        loss = LOSSES[self.recipe.loss]
        return loss(logits, targets, self.recipe.label_smoothing), right(logits.detach(), targets)

    def measured(self, model: nn.Module, batches: Iterable[Batch], images: int, place: Place) -> Measures:
        return measure(
            model,
            batches,
            classes=self.classes,
            device=place.device,
            dtype=place.dtype,
            mistakes=SHOWN_MISTAKES,
            all_ranks=place.all_ranks,
        )


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    soft = targets.dim() == 2
    return F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=0.0 if soft else label_smoothing)


def bce(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of each class, summed over the classes as in big_vision."""
    logits = logits.float()
    wanted = shares(targets, logits, label_smoothing)
    return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(dim=1)


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"cross_entropy": cross_entropy, "bce": bce}
"""By the name that a recipe has for them: the loss of each image (B,) in float32, from logits (B, K) and targets.

Targets are labels (B,), or shares of classes (B, K), which are already smoothed.
"""


def shares(targets: Tensor, logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Targets as shares of classes (B, K)."""
    if targets.dim() == 2:
        return targets
    classes = logits.shape[1]
    return F.one_hot(targets, classes).to(logits).mul_(1 - label_smoothing).add_(label_smoothing / classes)


def right(logits: Tensor, targets: Tensor) -> Tensor:
    """How many images' best class is the (largest) target, as a float."""
    labels = targets.argmax(dim=1) if targets.dim() == 2 else targets
    return (logits.argmax(dim=1) == labels).sum().float()


def balanced_weights(source: Source) -> Tensor:
    """A weight for each class, inverse to its size and one in the mean over the images; 0 for a class without any."""
    sizes = class_sizes(source.labels(), len(source.classes))
    present = sizes > 0
    weights = np.where(present, len(source) / (present.sum() * np.maximum(sizes, 1)), 0.0)
    return torch.from_numpy(weights).float()


def image_weights(targets: Tensor, own: Tensor, classes: Tensor | None) -> Tensor:
    """How much each image counts: its own weight times that of its class, or of its shares of classes."""
    if classes is None:
        return own
    return own * (targets @ classes if targets.dim() == 2 else classes[targets])
