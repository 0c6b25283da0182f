"""Tiny models and images to serve."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.model.build import build
from vitruvian.model.vit import ViT


def tiny_vit(seed: int = 0, *, num_classes: int = 6, size: int = 32, **settings: object) -> ViT:
    """Two layers, two heads, a grid of 4 x 4 patches."""
    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=(size, size),
        num_classes=num_classes,
        **{"patch_size": size // 4, "depth": 2, "width": 16, "mlp_dim": 32, "num_heads": 2} | settings,
    )
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(size, size)))
    if num_classes:
        model.meta = model.meta.replace(labels=tuple(f"class {index}" for index in range(num_classes)))
    return model.eval()


def tiny_digits() -> ViT:
    """The same for gray digits."""
    torch.manual_seed(2)
    config = ViTConfig(
        image_size=(16, 16), patch_size=4, in_channels=1, num_classes=10, depth=2, width=16, mlp_dim=32, num_heads=2
    )
    model = build(config)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(16, 16), mean=(0.5,), std=(0.5,)))
    model.meta = model.meta.replace(labels=tuple("0123456789"))
    return model.eval()


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def photo(seed: int = 0, *, size: tuple[int, int] = (48, 40), kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    return encoded(small.resize(size), kind)
