"""The evaluation view that each family's models ask for, where the file itself cannot say."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Preprocess, ViTConfig
from vitruvian.weights.families.registry import READERS
from vitruvian.weights.files import Checkpoint

IMAGENET = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}

VIEWS = [
    # family, which of its sorts of files, changes to ViT-B/16 at 224, view
    ("google", 0, {"image_size": 384}, {"image_size": 384, "antialias": False}),
    ("google", 1, {}, {"image_size": 224, "antialias": False}),
    ("big_vision", 0, {}, {"scaled_size": 256, "interpolation": "area"}),
    ("timm", 0, {}, {"scaled_size": 248, "interpolation": "bicubic"}),
    ("timm", 0, {"image_size": 384}, {"image_size": 384, "scaled_size": 384, "interpolation": "bicubic"}),
    ("timm", 0, {"distillation": True}, {"scaled_size": 248, "interpolation": "bicubic", **IMAGENET}),
    ("timm", 0, {"layer_scale": True}, {"scaled_size": 248, "interpolation": "bicubic", **IMAGENET}),
    ("torchvision", 0, {}, {"scaled_size": 256, **IMAGENET}),
    ("torchvision", 0, {"width": 1024, "heads": 16}, {"scaled_size": 242, **IMAGENET}),
    ("torchvision", 0, {"image_size": 512},
     {"image_size": 512, "scaled_size": 512, "interpolation": "bicubic", **IMAGENET}),
    ("dino", 1, {}, {"scaled_size": 256, "interpolation": "bicubic", **IMAGENET}),
    ("dino", 0, {"image_size": 518, "patch_size": 14}, {"scaled_size": 256, "interpolation": "bicubic", **IMAGENET}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "member", "changes", "view"), VIEWS)
def test_each_family_prepares_images_as_its_evaluation_does(family, member, changes, view):
    config = ViTConfig(**changes)
    checkpoint = Checkpoint(path=Path("weights"), format="safetensors", tensors={})
    fit = "crop" if "scaled_size" in view else "squash"
    wanted = Preprocess(**({"image_size": 224, "fit": fit} | view))
    assert READERS[family][member].usual_view(checkpoint, config) == wanted
