"""What a run optimizes: targets, per-image losses and validation metrics.

Add a loss to `LOSSES`; recipes then know its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.data.loader import Batch
from vitruvian.data.sources import Source, class_sizes
from vitruvian.evaluation.metrics import SHOWN_MISTAKES, Measures, measure
from vitruvian.training.recipe import CHOICES, Recipe

# B images, K classes

Autocast = Callable[[], AbstractContextManager[object]]


class ValidationMetrics(Protocol):
    """What every evaluation on validation images gives."""

    @property
    def loss(self) -> float: ...

    @property
    def top1(self) -> float: ...

    def scalars(self) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where an evaluation computes."""

    device: torch.device
    dtype: torch.dtype | None
    """Autocast dtype."""
    all_ranks: bool
    """Whether each process of torchrun has its own batches; all get the metrics over all of them."""


class Objective(ABC):
    """The targets, the loss and the validation metrics of a run."""

    @abstractmethod
    def targets(self, batch: Batch, step: int) -> Tensor:
        """The targets of a batch, (B, ...)."""

    def teacher_outputs(self, batch: Batch, pixels: Tensor) -> Tensor:
        """The teacher's outputs for a batch, (B, A); A is 0 without a teacher."""
        return pixels.new_empty(len(pixels), 0)

    @abstractmethod
    def losses(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        """The loss of each image (B,), and the number of correct predictions as a float tensor."""

    @abstractmethod
    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], images: int, placement: Placement
    ) -> ValidationMetrics:
        """The metrics of a model, in eval mode, over all batches of `images` validation images."""


class Labels(Objective):
    """Classification: the class of each image."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.recipe, self.classes = recipe, classes

    def targets(self, batch: Batch, step: int) -> Tensor:
        return batch.labels

    def losses(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        with autocast():
            logits = module(pixels)
        losses = LOSSES[self.recipe.loss](logits, targets, self.recipe.label_smoothing)
        return losses, count_correct(logits.detach(), targets)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], images: int, placement: Placement) -> Measures:
        return measure(
            model,
            batches,
            classes=self.classes,
            device=placement.device,
            dtype=placement.dtype,
            mistakes=SHOWN_MISTAKES,
            all_ranks=placement.all_ranks,
        )


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    is_soft = targets.dim() == 2
    label_smoothing = 0.0 if is_soft else label_smoothing
    return F.cross_entropy(logits.float(), targets, reduction="none", label_smoothing=label_smoothing)


def bce(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy of each class, summed over the classes as in big_vision."""
    logits = logits.float()
    targets = shares(targets, logits, label_smoothing)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"cross_entropy": cross_entropy, "bce": bce}
"""The loss of each image (B,) in float32, from logits (B, K), targets and label smoothing.

Targets are labels (B,), or soft targets (B, K), which are already smoothed.
"""
CHOICES["loss"] = LOSSES


def shares(targets: Tensor, logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Targets as soft targets (B, K)."""
    if targets.dim() == 2:
        return targets
    classes = logits.shape[1]
    return F.one_hot(targets, classes).to(logits).mul_(1 - label_smoothing).add_(label_smoothing / classes)


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """The number of images whose best class is the (largest) target, as a float tensor."""
    labels = targets.argmax(dim=1) if targets.dim() == 2 else targets
    return (logits.argmax(dim=1) == labels).sum().float()


def balanced_weights(source: Source) -> Tensor:
    """Class weights (K,), inverse to class sizes, with mean 1 over the images; 0 for a class without images."""
    sizes = class_sizes(source.labels(), len(source.classes))
    present = sizes > 0
    weights = np.where(present, len(source) / (present.sum() * np.maximum(sizes, 1)), 0.0)
    return torch.from_numpy(weights).float()


def image_weights(targets: Tensor, weights: Tensor, class_weights: Tensor | None) -> Tensor:
    """The weight of each image (B,), times that of its class, or of its soft targets."""
    if class_weights is None:
        return weights
    return weights * (targets @ class_weights if targets.dim() == 2 else class_weights[targets])
