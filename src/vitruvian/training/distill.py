"""Knowledge distillation: a run that learns from a teacher's outputs beside the labels.

Logits after Hinton et al. 2015 (arXiv:1503.02531), the distillation token after DeiT (arXiv:2012.12877), features by
their similarities within a batch after Tung and Mori 2019 (arXiv:1907.09682), which compares features of any widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
from vitruvian.training.initial_model import shared_features
from vitruvian.training.objective import LOSSES, Autocast, Labels, count_correct
from vitruvian.training.recipe import CHOICES, Recipe
from vitruvian.weights.load import load

# B images, K classes, F features, A teacher outputs per image: K logits or F features


@dataclass
class StudentOutputs:
    """The outputs of the student's last forward pass."""

    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K), averaged over the heads."""
    features: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, F), the input of the head."""
    head: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K) of the first head."""
    token: Tensor = field(default_factory=lambda: torch.empty(0))
    """(B, K) of the distillation token's head."""


def soft_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of softened probabilities (B,) times temperature²; at 0, the teacher's class is a label."""
    if not temperature:
        hard = F.cross_entropy(logits.float(), teacher.argmax(dim=1), reduction="none")
        return hard.where(teacher.isfinite().all(dim=1), torch.nan)  # NaN logits have an argmax, too
    student_log, teacher_log = ((x.float() / temperature).log_softmax(dim=1) for x in (logits, teacher))
    return F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(dim=1) * temperature**2


def similarity_loss(features: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference (B,) of each image's cosine similarities with the others of the batch."""
    student_unit, teacher_unit = (F.normalize(x.float(), dim=1) for x in (features, teacher))
    return (student_unit @ student_unit.T - teacher_unit @ teacher_unit.T).square().mean(dim=1)


@dataclass(frozen=True, slots=True)
class Distillation:
    """How a student learns from a teacher."""

    loss: Callable[[StudentOutputs, Tensor, float], Tensor]
    """(B,), from the teacher's outputs (B, A) and the temperature."""
    uses_features: bool = False
    """The teacher gives features, not logits."""
    head_only: bool = False
    """The labels train the first head only, not the mean of both heads."""


DISTILLATIONS = {
    "logits": Distillation(lambda student, teacher, temperature: soft_loss(student.logits, teacher, temperature)),
    "token": Distillation(
        lambda student, teacher, temperature: soft_loss(student.token, teacher, temperature), head_only=True
    ),
    "features": Distillation(
        lambda student, teacher, _: similarity_loss(student.features, teacher), uses_features=True
    ),
}
CHOICES["distillation"] = DISTILLATIONS


class Distilled(Labels):
    """Classification, with a teacher's outputs as further targets."""

    def __init__(self, recipe: Recipe, student: Model, source: Source, processes: Processes) -> None:
        super().__init__(recipe, student.config.num_classes)
        self.kind, self.student = DISTILLATIONS[recipe.distillation], StudentOutputs()
        self.teacher = Teacher(recipe, student, source, processes)
        token_head = student.head_dist if isinstance(student, ViT) else None
        if self.kind.head_only and token_head is None:
            raise ConfigError("distillation='token' needs a distillation token: architecture.distillation=true")
        assert student.head is not None
        student.head.register_forward_hook(self.store_head)
        if token_head is not None:
            token_head.register_forward_hook(self.store_token)

    def store_head(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.student.features, self.student.head = inputs[0], output

    def store_token(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.student.token = output

    def teacher_outputs(self, batch: Batch, pixels: Tensor) -> Tensor:
        return self.teacher.stored(batch) if self.teacher.values is not None else self.teacher(pixels)

    def losses(
        self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor, autocast: Autocast
    ) -> tuple[Tensor, Tensor]:
        with autocast():
            self.student.logits = module(pixels)
        logits = self.student.head if self.kind.head_only else self.student.logits
        label_losses = LOSSES[self.recipe.loss](logits, targets, self.recipe.label_smoothing)
        teacher_losses = self.kind.loss(self.student, teacher, self.recipe.distillation_temperature)
        losses = torch.lerp(label_losses, teacher_losses, self.recipe.distillation_weight)
        return losses, count_correct(self.student.logits.detach(), targets)


class Teacher:
    """A frozen model that sees the student's images in each step, or saw each image once before the first step."""

    def __init__(self, recipe: Recipe, student: Model, source: Source, processes: Processes) -> None:
        self.model = load(recipe.teacher).to(processes.device).requires_grad_(False)
        self.uses_features = DISTILLATIONS[recipe.distillation].uses_features
        self.columns = None if self.uses_features else shared_classes(self.model, student, recipe.teacher)
        self.student_preprocess, self.device = student.meta.preprocess, processes.device
        teacher_channels, student_channels = self.model.config.in_channels, student.config.in_channels
        if teacher_channels != student_channels and recipe.teacher_input == "same":
            raise ConfigError(
                f"teacher={recipe.teacher!r} takes {teacher_channels} channels, the student {student_channels}",
                hint="use teacher_input='fixed'",
            )
        self.values: Tensor | None = None
        """(N, F) features of all training images, with `teacher_input='fixed'`."""
        if recipe.teacher_input == "fixed":
            self.values = self.compute_features(source, recipe, processes)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Outputs (B, A) for normalized pixels of the student."""
        with torch.no_grad():
            pixels = convert_pixels(pixels, self.student_preprocess, self.model.meta.preprocess)
            return self.model.features(pixels) if self.uses_features else self.select(self.model(pixels))

    def stored(self, batch: Batch) -> Tensor:
        """Outputs (B, A) for the images of a batch, without augmentation."""
        assert self.values is not None
        with torch.no_grad():
            features = self.values[batch.indices].to(self.device)
            head = self.model.head
            return features if self.uses_features or head is None else self.select(head(features))

    def select(self, logits: Tensor) -> Tensor:
        """The logits of the student's classes, calibrated."""
        logits = logits / self.model.meta.temperature
        return logits if self.columns is None else logits[:, self.columns]

    def compute_features(self, source: Source, recipe: Recipe, processes: Processes) -> Tensor:
        """The features of all images, from the feature store that probes share, or computed and put there."""
        if isinstance(self.model, ViT) and self.model.head_dist is not None and not self.uses_features:
            raise ConfigError(
                f"teacher_input='fixed' stores the input of one head, {recipe.teacher} has two",
                hint="use teacher_input='same'",
            )
        if recipe.augment.mixes:
            raise ConfigError(
                "teacher_input='fixed' cannot be used with mixup or cutmix",
                hint="use teacher_input='same', or mix none",
            )
        encoder = Encoder(self.model, device=str(self.device))
        features = shared_features(encoder, source, processes, label="running the teacher")
        if features.unreadable:
            unreadable = brief([image.key for image in features.unreadable])
            raise DataError(f"teacher_input='fixed' needs every image, and cannot read {unreadable}")
        return torch.from_numpy(features.values)


def shared_classes(teacher: Model, student: Model, name: str) -> Tensor | None:
    """Indices of the student's classes in the teacher's outputs; None if both have the same classes."""
    if teacher.meta.labels == student.meta.labels:
        return None
    if teacher.meta.labels is None and teacher.config.num_classes == student.config.num_classes:
        print_status(
            f"note: teacher={name!r} has no labels: assuming that its {teacher.config.num_classes:,} classes are in "
            "the order of the data"
        )
        return None
    index = {label: column for column, label in enumerate(teacher.meta.labels or ())}
    missing = [label for label in student.meta.labels or () if label not in index]
    if missing or not index:
        raise ConfigError(
            f"teacher={name!r} does not know the classes {brief(missing)}",
            hint="choose another teacher, or distillation='features'",
        )
    return torch.tensor([index[label] for label in student.meta.labels or ()])


def convert_pixels(pixels: Tensor, source: Preprocess, target: Preprocess) -> Tensor:
    """Pixels normalized and resized for one model, converted to another model's mean, std and size."""
    if (source.mean, source.std) != (target.mean, target.std):
        mean, std, new_mean, new_std = (
            pixels.new_tensor(values).view(-1, 1, 1) for values in (source.mean, source.std, target.mean, target.std)
        )
        pixels = (pixels * std + mean - new_mean) / new_std
    if pixels.shape[-2:] != target.image_size:
        pixels = F.interpolate(pixels, target.image_size, mode="bilinear", antialias=True)
    return pixels
