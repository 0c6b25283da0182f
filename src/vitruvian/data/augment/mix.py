"""Batches whose images are mixed in pairs, and the classes they then show."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.data.augment.settings import Augment
from vitruvian.data.jpeg import Box
from vitruvian.errors import ConfigError
from vitruvian.settings import Size

# B images, C channels, H rows, W columns, K classes


def mix(
    pixels: Tensor,
    labels: Tensor,
    *,
    classes: int,
    settings: Augment,
    rng: np.random.Generator,
    smoothing: float = 0.0,
    repeats: int = 1,
) -> tuple[Tensor, Tensor]:
    """Normalized float images (B, C, H, W) mixed by Mixup or CutMix, and each one's shares of the classes (B, K).

    One draw from `rng` serves the whole batch. Image 2i is mixed with 2i + 1 and the other way round, an odd
    last one with itself: processes that share a batch in even, contiguous parts and have equal generators mix
    as one process would. `repeats` is the number of views of one image that follow each other, which are not
    mixed among themselves. `smoothing` of each label is spread over all classes. Shares add up to one.
    """
    if not pixels.is_floating_point():
        raise ConfigError(f"mixing needs normalized pixels, not {pixels.dtype}: call normalize first")
    targets = smoothed(labels, classes, smoothing)
    if not settings.mixes or rng.random() >= settings.mixup_prob:
        return pixels, targets
    partners = neighbors(len(pixels), repeats).to(pixels.device)
    pastes = settings.cutmix_alpha > 0
    if rng.random() < pastes / (pastes + (settings.mixup_alpha > 0)):  # one half where both have an alpha
        box = pasted_box(
            (pixels.shape[2], pixels.shape[3]), rng.beta(settings.cutmix_alpha, settings.cutmix_alpha), rng
        )
        kept = 1.0 - box.rows * box.columns / (pixels.shape[2] * pixels.shape[3])
        rows, columns = slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns)
        pixels = pixels.clone()
        pixels[:, :, rows, columns] = pixels[:, :, rows, columns][partners]
    else:
        kept = rng.beta(settings.mixup_alpha, settings.mixup_alpha)
        pixels = pixels[partners].lerp_(pixels, kept)
    return pixels, targets[partners].lerp_(targets, kept)


def smoothed(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One minus `smoothing` for the label, and `smoothing` divided among all classes: (B,) -> (B, K) float32."""
    return F.one_hot(labels, classes).float().mul_(1.0 - smoothing).add_(smoothing / classes)


def neighbors(count: int, repeats: int = 1) -> Tensor:
    """1, 0, 3, 2, ... in groups of `repeats`; what has no neighbor stays alone."""
    places = torch.arange(count)
    partners = (places // repeats ^ 1) * repeats + places % repeats
    return torch.where(partners < count, partners, places)


def pasted_box(size: Size, kept: float, rng: np.random.Generator) -> Box:
    """About 1 - `kept` of an image, in its proportions, around a random point and cut off at the edges."""
    side = math.sqrt(1.0 - kept)
    spans = []
    for length, draw in zip(size, rng.random(2).tolist()):
        middle, reach = int(draw * length), int(side * length) / 2
        start, stop = max(0, math.floor(middle - reach)), min(length, math.floor(middle + reach))
        spans.append((start, stop - start))
    (top, rows), (left, columns) = spans
    return Box(top, left, rows, columns)
