"""A convolutional stem whose first layer decorrelates the pixels of the images that it will be trained on."""

from __future__ import annotations

from contextlib import closing

import torch
import torch.nn.functional as F

from vitruvian.config import ROOT_CHANNELS
from vitruvian.data.loader import Loader
from vitruvian.data.sources import Source
from vitruvian.data.transform import as_transform
from vitruvian.errors import ConfigError
from vitruvian.model.build import Model
from vitruvian.model.stems import ConvStem, whitening_kernels
from vitruvian.model.vit import ViT
from vitruvian.training.head import thinned

MOST_IMAGES = 2_000
"""Whose patches are counted, evenly spread; a patch has few values, and an image many patches."""


def whiten(model: Model, source: Source) -> None:
    """Set the first convolution of the stem to the directions in which the patches of the images vary most."""
    stem = model.embed.stem if isinstance(model, ViT) else None
    if not isinstance(stem, ConvStem):
        raise ConfigError("stem_init='whitening' needs architecture.stem.style='conv'")
    weight = stem.root.weight
    sums = torch.zeros(weight[0].numel(), weight[0].numel(), dtype=torch.float64)
    few = thinned(source, MOST_IMAGES)
    with closing(Loader(few, transform=as_transform(model.meta.preprocess), batch_size=100, training=False)) as loader:
        for batch in loader.batches(0):
            patches = F.unfold(batch.pixels, weight.shape[-1], stride=2).transpose(1, 2).flatten(0, 1).double()
            sums += patches.T @ patches
    kernels = whitening_kernels(sums / sums.trace() * len(sums), ROOT_CHANNELS // 2)
    with torch.no_grad():
        weight[: len(kernels)] = kernels.view(-1, *weight.shape[1:]).to(weight)
