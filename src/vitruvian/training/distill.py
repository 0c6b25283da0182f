"""Knowledge distillation: a run that learns what a teacher says of its images, beside their labels.

Logits after Hinton et al. 2015 (arXiv:1503.02531), the distillation token after DeiT (arXiv:2012.12877), features by
their similarities within a batch after Tung and Mori 2019 (arXiv:1907.09682), which any two widths can be compared by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import Preprocess
from vitruvian.data.loader import Batch
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, DataError
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.text import brief
from vitruvian.training.distributed import Processes
from vitruvian.training.features import shared_features
from vitruvian.training.objective import LOSSES, Autocast, Labels, right
from vitruvian.weights.load import load

if TYPE_CHECKING:
    from vitruvian.training.recipe import Recipe

# B images, K classes, F features, A what a teacher says of an image: K logits or F features


@dataclass
class Seen:
    """What the student's last forward pass gave."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K) of the whole model."""
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, F) that the head reads."""
    head: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K) of the head alone."""
    token: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K) of the distillation token's head."""


def soft_loss(logits: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """Divergence of softened probabilities (B,) times the squared temperature; at 0, the teacher's class is a label."""
    if not temperature:
        hard = F.cross_entropy(logits.float(), answers.argmax(dim=1), reduction="none")
        return hard.where(answers.isfinite().all(dim=1), torch.nan)  # what is not finite has a largest class, too
    found, wanted = ((x.float() / temperature).log_softmax(dim=1) for x in (logits, answers))
    return F.kl_div(found, wanted, reduction="none", log_target=True).sum(dim=1) * temperature**2


def similarity_loss(features: Tensor, answers: Tensor) -> Tensor:
    """Mean square difference (B,) of each image's cosine similarities with the others of the batch."""
    found, wanted = (F.normalize(x.float(), dim=1) for x in (features, answers))
    return (found @ found.T - wanted @ wanted.T).square().mean(dim=1)


@dataclass(frozen=True, slots=True)
class Distillation:
    """How a student learns from a teacher."""

    loss: Callable[[Seen, Tensor, float], Tensor]
    """(B,), from the teacher's answers (B, A) and the temperature."""
    reads_features: bool = False
    """The teacher gives features, not logits."""
    head_alone: bool = False
    """The labels are for the head alone, not for the mean of both heads."""


DISTILLATIONS = {
    "logits": Distillation(lambda seen, answers, temperature: soft_loss(seen.logits, answers, temperature)),
    "token": Distillation(
        lambda seen, answers, temperature: soft_loss(seen.token, answers, temperature), head_alone=True
    ),
    "features": Distillation(lambda seen, answers, _: similarity_loss(seen.features, answers), reads_features=True),
}
"""By the name that a recipe has for them."""


class Distilled(Labels):
    """The class of each image, and what a teacher says of it."""

    def __init__(self, recipe: Recipe, student: Model, source: Source, processes: Processes) -> None:
        super().__init__(recipe, student.config.num_classes)
        self.kind, self.seen = DISTILLATIONS[recipe.distillation], Seen()
        self.teacher = Teacher(recipe, student, source, processes)
        token_head = student.head_dist if isinstance(student, ViT) else None
        if self.kind.head_alone and token_head is None:
            raise ConfigError("distillation='token' needs a distillation token: architecture.distillation=true")
        assert student.head is not None
        student.head.register_forward_hook(self.see_head)
        if token_head is not None:
            token_head.register_forward_hook(self.see_token)

    def see_head(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.features, self.seen.head = inputs[0], output

    def see_token(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.token = output

    def answers(self, batch: Batch, pixels: Tensor) -> Tensor:
        return self.teacher.stored(batch) if self.teacher.values is not None else self.teacher(pixels)

    def judged(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, answers: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        with autocast():
            self.seen.logits = module(pixels)
        logits = self.seen.head if self.kind.head_alone else self.seen.logits
        own = LOSSES[self.recipe.loss](logits, targets, self.recipe.label_smoothing)
        taught = self.kind.loss(self.seen, answers, self.recipe.distillation_temperature)
        return torch.lerp(own, taught, self.recipe.distillation_weight), right(self.seen.logits.detach(), targets)


class Teacher:
    """A frozen model that is asked about the images as the student sees them, or was asked once about each."""

    def __init__(self, recipe: Recipe, student: Model, source: Source, processes: Processes) -> None:
        self.model = load(recipe.teacher).to(processes.device).requires_grad_(False)
        self.features = DISTILLATIONS[recipe.distillation].reads_features
        self.columns = None if self.features else shared_classes(self.model, student, recipe.teacher)
        self.student_view, self.device = student.meta.preprocess, processes.device
        found, wanted = self.model.config.in_channels, student.config.in_channels
        if found != wanted and recipe.teacher_view == "same":
            raise ConfigError(
                f"teacher={recipe.teacher!r} sees {found} channels, the student {wanted}; use teacher_view='fixed'"
            )
        self.values: Tensor | None = None
        """(N, F) features of the evaluation view of each image of the source, where those were asked for."""
        if recipe.teacher_view == "fixed":
            self.values = self.fixed(source, recipe, processes)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Answers (B, A) to normalized pixels of the student."""
        with torch.no_grad():
            pixels = seen_by(pixels, self.student_view, self.model.meta.preprocess)
            return self.model.features(pixels) if self.features else self.chosen(self.model(pixels))

    def stored(self, batch: Batch) -> Tensor:
        """Answers (B, A) to the images of a batch, whatever view the student has of them."""
        assert self.values is not None
        with torch.no_grad():
            features = self.values[batch.indices].to(self.device)
            head = self.model.head
            return features if self.features or head is None else self.chosen(head(features))

    def chosen(self, logits: Tensor) -> Tensor:
        logits = logits / self.model.meta.temperature
        return logits if self.columns is None else logits[:, self.columns]

    def fixed(self, source: Source, recipe: Recipe, processes: Processes) -> Tensor:
        """The features of all images, taken from the store that probes share, or put there."""
        if isinstance(self.model, ViT) and self.model.head_dist is not None and not self.features:
            raise ConfigError(
                f"teacher_view='fixed' keeps what one head reads, {recipe.teacher} has two; use teacher_view='same'"
            )
        if recipe.augment.mixes:
            raise ConfigError("teacher_view='fixed' knows no mixed images; use teacher_view='same', or mix none")
        encoder = Encoder(self.model, device=str(self.device))
        found = shared_features(encoder, source, processes, label="asking the teacher")
        if found.unreadable:
            raise DataError(f"teacher_view='fixed' needs every image, and cannot read {brief(list(found.unreadable))}")
        return torch.from_numpy(found.values)


def shared_classes(teacher: Model, student: Model, name: str) -> Tensor | None:
    """The teacher's outputs that are the student's classes, in their order; None where they are all of them."""
    if teacher.meta.labels == student.meta.labels:
        return None
    if teacher.meta.labels is None and teacher.config.num_classes == student.config.num_classes:
        print_status(
            f"note: teacher={name!r} states no labels: its {teacher.config.num_classes:,} classes are in data order"
        )
        return None
    places = {label: number for number, label in enumerate(teacher.meta.labels or ())}
    missing = [label for label in student.meta.labels or () if label not in places]
    if missing or not places:
        raise ConfigError(
            f"teacher={name!r} does not know the classes {brief(missing)}; "
            "choose another teacher, or distillation='features'"
        )
    return torch.tensor([places[label] for label in student.meta.labels or ()])


def seen_by(pixels: Tensor, own: Preprocess, other: Preprocess) -> Tensor:
    """Pixels normalized for one model, as another one wants them: its mean, deviation and size."""
    if (own.mean, own.std) != (other.mean, other.std):
        mean, std, new_mean, new_std = (
            pixels.new_tensor(values).view(-1, 1, 1) for values in (own.mean, own.std, other.mean, other.std)
        )
        pixels = (pixels * std + mean - new_mean) / new_std
    if pixels.shape[-2:] != other.image_size:
        pixels = F.interpolate(pixels, other.image_size, mode="bilinear", antialias=True)
    return pixels
