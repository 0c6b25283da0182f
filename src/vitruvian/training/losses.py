"""What training makes small: the loss of each image, and how much each image counts."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.data.sources import Source
from vitruvian.data.sources.subset import class_sizes
from vitruvian.training.recipe import LossName

# B images, K classes


def losses(logits: Tensor, targets: Tensor, kind: LossName, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each image (B,) in float32; targets are labels (B,), or shares of classes (B, K) already smoothed.

    `bce` sums over the classes, as big_vision does.
    """
    logits = logits.float()
    if kind == "cross_entropy":
        soft = targets.dim() == 2
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=0.0 if soft else label_smoothing)
    return F.binary_cross_entropy_with_logits(logits, shares(targets, logits, label_smoothing), reduction="none").sum(
        dim=1
    )


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
