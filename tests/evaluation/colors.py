"""A tiny model, and images that it can tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitruvian.config import ViTConfig
from vitruvian.model.build import build
from vitruvian.model.vit import ViT

TINY = ViTConfig(image_size=(16, 16), patch_size=8, depth=1, width=16, mlp_dim=32, num_heads=2, num_classes=3)
COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def tiny_model(**changes: object) -> ViT:
    model = build(TINY.replace(**changes), seed=0)
    assert isinstance(model, ViT)
    if model.head is not None:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    model.eval()
    return model


def make_colors(root: Path, splits: dict[str, int], *, noise: float = 30.0) -> Path:
    """Noisy images of three colors, as many of each in every split as it says; all different."""
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        for name, color in COLORS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.array(color) + noise * rng.normal(size=(12, 14, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03d}.png")
    return root
