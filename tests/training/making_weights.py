"""Tiny weights to fine-tune on the built-in digits, and the settings that make it quick."""

import torch

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.model.build import build
from vitruvian.weights.save import save

TINY_RECIPE = (
    "steps=8",
    "batch_size=32",
    "workers=0",
    "log_every=4",
    "image_size=8",
    "augment.hflip=0",
    "augment.crop=none",
    "layer_decay=1",
    "head_init=zero",
    "eval_every=0.1",
)


def tiny_weights(folder):
    """A native model for 8 x 8 gray images of 3 classes, so that digits need a new head."""
    config = ViTConfig(
        image_size=(8, 8), patch_size=4, in_channels=1, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3
    )
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(8, 8), mean=(0.5,), std=(0.5,)))
    save(model, folder)
    return folder
