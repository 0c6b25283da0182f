"""What a run learns to answer: the question to each image, its loss, and how the answers are measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vitruvian.data.loader import Batch
from vitruvian.evaluation.metrics import Measures, measure
from vitruvian.evaluation.sections import SHOWN_MISTAKES
from vitruvian.training.losses import losses, right
from vitruvian.training.recipe import Recipe

# B images

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

    @abstractmethod
    def judged(self, module: nn.Module, pixels: Tensor, targets: Tensor, autocast: Autocast) -> tuple[Tensor, Tensor]:
        """The loss of each image (B,), and how many answers are right as a float."""

    @abstractmethod
    def measured(self, model: nn.Module, batches: Iterable[Batch], images: int, place: Place) -> Measured:
        """The measures of a model over all batches of held-out `images`, without dropout."""


@dataclass(frozen=True, slots=True)
class Labels(Objective):
    """The class of each image."""

    recipe: Recipe
    classes: int

    def targets(self, batch: Batch, step: int) -> Tensor:
        return batch.labels

    def judged(self, module: nn.Module, pixels: Tensor, targets: Tensor, autocast: Autocast) -> tuple[Tensor, Tensor]:
        with autocast():
            logits = module(pixels)
        return losses(logits, targets, self.recipe.loss, self.recipe.label_smoothing), right(logits.detach(), targets)

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
