"""What a run optimizes: targets, per-image losses and validation metrics; labels, and the outputs of a teacher.

Add a loss to `LOSSES`; recipes then know its name. Knowledge distillation: logits after Hinton et al. 2015
(arXiv:1503.02531), the distillation token after DeiT (arXiv:2012.12877).
"""

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import Preprocess
from vitruvian.data.loader import Batch
from vitruvian.data.sources import Source, class_sizes
from vitruvian.errors import ConfigError
from vitruvian.evaluation.metrics import Measures, autocast, measure_classes, score_batches
from vitruvian.evaluation.target_metrics import TargetMeasures, measure_outputs
from vitruvian.machine import choose_precision
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.text import brief
from vitruvian.training.distributed import Processes
from vitruvian.training.recipe import CHOICES, Recipe
from vitruvian.weights.load import load

# B images, K classes

MOST_WEIGHT = 100.0  # of positive labels, with class_weights="balanced"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ValidationMetrics(Protocol):
    """Metrics of every evaluation on validation images."""

    @property
    def loss(self) -> float: ...

    def scalars(self) -> dict[str, float]: ...


class Objective(ABC):
    """The targets, the loss and the validation metrics of a run."""

    metric, unit = "top1", 100.0
    """Name of the metric over training images, and the factor of the sums that `losses` returns."""

    def __init__(self, recipe: Recipe, model: Model, processes: Processes) -> None:
        """`model` is the one that is evaluated and saved; training may call it through a wrapper."""
        self.recipe, self.model, self.device = recipe, model, processes.device
        self.dtype = DTYPES.get(choose_precision(recipe.precision, str(processes.device)))

    @abstractmethod
    def targets(self, batch: Batch, step: int) -> Tensor:
        """The targets of a batch, (B, ...)."""

    def teacher_logits(self, pixels: Tensor) -> Tensor:
        """The teacher's logits of the student's classes, (B, K); (B, 0) without a teacher."""
        return pixels.new_empty(len(pixels), 0)

    @abstractmethod
    def losses(self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each image (B,), and the sum of the metric over the images as a float tensor."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch], images: int, *, all_ranks: bool) -> ValidationMetrics:
        """The metrics over the batches, of all processes if `all_ranks`, of `images` validation images."""


class Labels(Objective):
    """Classification: the class of each image."""

    def targets(self, batch: Batch, step: int) -> Tensor:
        return batch.labels

    def losses(self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.dtype):
            logits = module(pixels)
        losses = LOSSES[self.recipe.loss](logits, targets, self.recipe.label_smoothing)
        return losses, count_correct(logits.detach(), targets)

    def evaluate(self, batches: Iterable[Batch], images: int, *, all_ranks: bool) -> Measures:
        return measure_classes(
            self.model,
            batches,
            classes=self.model.config.num_classes,
            device=self.device,
            dtype=self.dtype,
            score_function=self.recipe.score_function,
            all_ranks=all_ranks,
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


def asl(outputs: Tensor, targets: Tensor) -> Tensor:
    """Asymmetric loss (Ridnik et al. 2021, arXiv:2009.14119), with its settings: easy negatives count less."""
    negative = (outputs.sigmoid() - ASL_MARGIN).clamp(min=0)
    losses = targets * F.logsigmoid(outputs) + (1 - targets) * negative**ASL_GAMMA * (1 - negative).log()
    return -losses


ASL_GAMMA, ASL_MARGIN = 4, 0.05

ROW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bce": partial(F.binary_cross_entropy_with_logits, reduction="none"),
    "asl": asl,
    "huber": partial(F.huber_loss, reduction="none"),
    "l1": partial(F.l1_loss, reduction="none"),
    "l2": partial(F.mse_loss, reduction="none"),
}
"""The loss of each label or number (B, K), from outputs and targets (B, K); numbers are standardized."""
CHOICES["loss"] = ChainMap(LOSSES, ROW_LOSSES)


class TargetRows(Labels):
    """Several labels or numbers per image. Unknown ones count neither in the loss nor in metrics."""

    def __init__(self, recipe: Recipe, model: Model, source: Source, processes: Processes) -> None:
        super().__init__(recipe, model, processes)
        assert source.targets is not None
        self.table, self.target = source.targets, model.meta.target
        self.is_labels = model.meta.score_function == "sigmoid"
        self.metric, self.unit = ("label_accuracy", 100.0) if self.is_labels else ("mae", 1.0)
        self.mean, self.std = (torch.tensor(v, device=self.device) for v in (self.target.mean, self.target.std))
        self.positive: Tensor | None = None  # (K,) weights of positive labels
        if recipe.class_weights == "balanced":
            _, share, _ = self.table.statistics(np.asarray(source.labels()))
            weights = np.clip((1 - share) / np.maximum(share, 1e-9), 1 / MOST_WEIGHT, MOST_WEIGHT)
            self.positive = torch.from_numpy(weights).float().to(self.device)

    def rows(self, labels: Tensor) -> Tensor:
        rows = self.table.rows(labels.numpy())
        if not self.is_labels:
            rows = (rows - np.array(self.target.mean)) / np.array(self.target.std)
        return torch.from_numpy(rows).float()

    def targets(self, batch: Batch, step: int) -> Tensor:
        return self.rows(batch.labels)

    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each image (B,), summed over its known labels or numbers."""
        filled = targets.nan_to_num()
        losses = ROW_LOSSES[self.recipe.loss](outputs.float(), filled)
        if self.positive is not None:
            losses = losses * (1 + filled * (self.positive - 1))
        return losses.where(targets.isfinite(), 0.0).sum(dim=1)

    def losses(self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.dtype):
            outputs = module(pixels)
        known, values = targets.isfinite(), outputs.detach().float()
        right = (values > 0) == (targets > 0.5) if self.is_labels else (values - targets).abs() * self.std
        mean = right.float().where(known, 0.0).sum(dim=1) / known.sum(dim=1).clamp(min=1)
        return self.row_losses(outputs, targets), mean.sum()

    def evaluate(self, batches: Iterable[Batch], images: int, *, all_ranks: bool) -> TargetMeasures:  # type: ignore[override]
        def score(outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
            outputs = outputs.float()
            losses = self.row_losses(outputs, self.rows(batch.labels).to(self.device))
            return outputs.cpu(), batch.labels, batch.indices, losses.cpu()

        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "all_ranks": all_ranks}
        columns = score_batches(self.model, batches, score, **options)
        outputs, labels, indices, losses = (column.numpy() for column in columns)
        loss = float(losses.mean(dtype=np.float64))
        return measure_outputs(outputs, labels, indices, self.table, self.target, loss=loss)


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


def soft_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of softened probabilities (B,) times temperature²; at 0, cross-entropy with the teacher's class."""
    if not temperature:
        hard = F.cross_entropy(logits.float(), teacher.argmax(dim=1), reduction="none")
        return hard.where(teacher.isfinite().all(dim=1), torch.nan)  # NaN logits have an argmax, too
    student_log, teacher_log = ((x.float() / temperature).log_softmax(dim=1) for x in (logits, teacher))
    return F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(dim=1) * temperature**2


class Distilled(Labels):
    """Classification, with the outputs of a frozen teacher, which gets the student's images, as further targets."""

    def __init__(self, recipe: Recipe, student: Model, processes: Processes) -> None:
        super().__init__(recipe, student, processes)
        self.teacher = load(recipe.teacher).to(self.device).requires_grad_(False)
        teacher_channels, student_channels = self.teacher.config.in_channels, student.config.in_channels
        if teacher_channels != student_channels:
            reason = f"teacher={recipe.teacher!r} takes {teacher_channels} channels, the student {student_channels}"
            raise ConfigError(reason, hint="choose another teacher")
        self.columns = shared_classes(self.teacher, student, recipe.teacher)
        self.heads: dict[str, Tensor] = {}  # (B, K) outputs of the class token's and the distillation token's heads
        if recipe.distillation == "token":
            token_head = student.head_dist if isinstance(student, ViT) else None
            if token_head is None:
                raise ConfigError("distillation='token' needs a distillation token: architecture.distillation=true")
            assert student.head is not None
            store = self.heads.update  # returns None, so that the hooks leave the outputs alone
            student.head.register_forward_hook(lambda _, inputs, output: store(labels=output))
            token_head.register_forward_hook(lambda _, inputs, output: store(teacher=output))

    @torch.no_grad()
    def teacher_logits(self, pixels: Tensor) -> Tensor:
        converted = convert_pixels(pixels, self.model.meta.preprocess, self.teacher.meta.preprocess)
        logits: Tensor = self.teacher(converted) / self.teacher.meta.temperature
        return logits if self.columns is None else logits[:, self.columns]

    def losses(self, module: nn.Module, pixels: Tensor, targets: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        with autocast(self.device, self.dtype):
            logits = module(pixels)  # the mean of the two heads, if there are two
        label_losses = LOSSES[self.recipe.loss](self.heads.get("labels", logits), targets, self.recipe.label_smoothing)
        teacher_losses = soft_loss(self.heads.get("teacher", logits), teacher, self.recipe.distillation_temperature)
        losses = torch.lerp(label_losses, teacher_losses, self.recipe.distillation_weight)
        return losses, count_correct(logits.detach(), targets)


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
        reason = f"teacher={name!r} does not know the classes {brief(missing)}"
        raise ConfigError(reason, hint="choose another teacher")
    return torch.tensor([index[label] for label in student.meta.labels or ()])


def convert_pixels(pixels: Tensor, source: Preprocess, target: Preprocess) -> Tensor:
    """Pixels normalized and resized for one model, converted to another model's mean, std and size."""
    if (source.mean, source.std) != (target.mean, target.std):
        values = source.mean, source.std, target.mean, target.std
        mean, std, new_mean, new_std = (pixels.new_tensor(value).view(-1, 1, 1) for value in values)
        pixels = (pixels * std + mean - new_mean) / new_std
    if pixels.shape[-2:] != target.image_size:
        pixels = F.interpolate(pixels, target.image_size, mode="bilinear", antialias=True)
    return pixels
