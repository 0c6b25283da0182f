"""A fresh head that starts as a linear probe of the frozen features of the training images.

Logistic regression chooses its regularization on a part that it holds out of them. Least squares chooses its own, and
the scale of the logits, by leave-one-out answers, which it gives without fitting again. So nothing is judged on what it
was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitruvian.cache import scratch_folder
from vitruvian.data.sources import Source, Subset
from vitruvian.evaluation.probes.features import FeatureSet, divided
from vitruvian.evaluation.probes.linear import L2, chosen_l2, fit
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.training.distributed import Processes
from vitruvian.training.features import shared_features
from vitruvian.training.recipe import Recipe

# N images, D features, K classes

MOST_IMAGES = 20_000
"""The head is fitted to no more of them, evenly spread; training sees all."""
STRENGTHS = tuple(10.0 ** (power / 2) for power in range(-8, 5))
"""Tried for the regularization, relative to the mean variance of a feature."""
SCALES = tuple(10.0 ** (power / 20) for power in range(31))
"""Tried for the logits, relative to answers between 0 and 1; beyond 32, probabilities have nothing left to learn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearHead:
    """logits = features @ weight + bias."""

    weight: Tensor
    """(D, K)"""
    bias: Tensor
    """(K,)"""
    strength: float
    """Of the regularization."""
    scale: float = 1.0
    """Of the logits, relative to what was fitted."""


def is_fresh(model: Model) -> bool:
    """Whether the head is new, and so all zeros."""
    return model.head is not None and not bool(model.head.weight.any())


def fit_head(
    model: Model, source: Source, recipe: Recipe, *, processes: Processes, said: Callable[[str], None]
) -> LinearHead:
    """Put the fitted head into the model; features are taken from the store that probes share.

    Of a distilled model, whose two heads are averaged, the second stays zero and the first counts twice.
    """
    assert model.head is not None
    heads = 2 if isinstance(model, ViT) and model.head_dist is not None else 1
    training = model.training
    encoder = Encoder(model.eval(), device=str(processes.device))
    few = thinned(source, MOST_IMAGES)
    said(f"fitting the head to {len(few):,} images")
    try:
        found = shared_features(encoder, few, processes, label="fitting the head")
    finally:
        model.train(training)
    if recipe.head_init == "probe":
        head = logistic(found)
    else:
        features, labels = torch.from_numpy(found.values), torch.from_numpy(found.labels)
        head = least_squares(features, labels, len(source.classes), label_smoothing=recipe.label_smoothing)
    with torch.no_grad():
        model.head.weight.copy_(heads * head.weight.T)
        model.head.bias.copy_(heads * head.bias + recipe.head_bias)
    return head


def thinned(source: Source, most: int) -> Source:
    """The source, or so many of its examples at equal distances."""
    if len(source) <= most:
        return source
    path = scratch_folder() / "thinned.i64"
    np.linspace(0, len(source) - 1, most).astype("i8").tofile(path)
    return Subset(source, path, name=f"{source.name} ({most:,} of {len(source):,})")


def logistic(found: FeatureSet) -> LinearHead:
    """Logistic regression as `vit probe` fits it, as a head that reads features as they are.

    Where no class has two images there is nothing to choose by, and the regularization is the strongest.
    """
    classes = len(found.classes)
    choosable = np.bincount(found.labels).max() > 1
    l2 = chosen_l2(*divided(found), classes=classes)[0] if choosable else max(L2)
    probe = fit(*found.examples, classes=classes, l2=l2)
    weight = probe.weights[:-1] / probe.std[:, None]  # (D, K)
    return LinearHead(weight=weight.float(), bias=(probe.weights[-1] - probe.mean @ weight).float(), strength=l2)


def least_squares(features: Tensor, labels: Tensor, classes: int, *, label_smoothing: float = 0.0) -> LinearHead:
    """Ridge regression on one-hot labels, in float64, scaled to logits of the lowest loss."""
    x, y = features.double(), F.one_hot(labels, classes).double()
    x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
    x, y = x - x_mean, y - y_mean
    variances, axes = torch.linalg.eigh(x.T @ x)
    along = x @ axes  # (N, D) features along the axes of their scatter
    reach = along.T @ y  # (D, K)
    unit = float(variances.mean()) or 1.0

    def answers(strength: float) -> Tensor:
        """(N, K) to each image by a fit without it."""
        shrunk = 1 / (variances.clamp(min=0) + strength * unit)
        leverage = (along.square() * shrunk).sum(dim=1) + 1 / len(x)
        return y - (y - along @ (shrunk[:, None] * reach)) / (1 - leverage).clamp(min=1e-6)[:, None]

    errors = {strength: float((answers(strength) - y).square().mean()) for strength in STRENGTHS}
    strength = min(errors, key=errors.__getitem__)
    left_out = answers(strength) + y_mean
    losses = {
        scale: float(F.cross_entropy(scale * left_out, labels, label_smoothing=label_smoothing)) for scale in SCALES
    }
    scale = min(losses, key=losses.__getitem__)
    weight = scale * (axes @ (reach / (variances.clamp(min=0) + strength * unit)[:, None]))
    return LinearHead(
        weight=weight.float(),
        bias=(scale * y_mean - x_mean @ weight).float(),
        strength=strength,
        scale=scale,
    )
