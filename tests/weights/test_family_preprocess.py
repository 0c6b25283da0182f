"""The evaluation view that each family's models ask for, where the file itself cannot say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Preprocess, ViTConfig
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.google import BigVision
from vitruvian.weights.families.huggingface import read_preprocessor, write_preprocessor
from vitruvian.weights.families.registry import READERS

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
    ("torchvision", 0, {"width": 1024, "num_heads": 16}, {"scaled_size": 242, **IMAGENET}),
    ("torchvision", 0, {"image_size": 512},
     {"image_size": 512, "scaled_size": 512, "interpolation": "bicubic", **IMAGENET}),
    ("dino", 2, {}, {"scaled_size": 256, "interpolation": "bicubic", **IMAGENET}),
    ("dino", 1, {"image_size": 518, "patch_size": 14}, {"scaled_size": 256, "interpolation": "bicubic", **IMAGENET}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "member", "changes", "view"), VIEWS)
def test_each_family_prepares_images_as_its_evaluation_does(family, member, changes, view):
    config = ViTConfig(**changes)
    checkpoint = Checkpoint(path=Path("weights"), format="safetensors", tensors={})
    fit = "crop" if "scaled_size" in view else "squash"
    wanted = Preprocess(**({"image_size": 224, "fit": fit} | view))
    assert READERS[family][member].default_preprocess(checkpoint, config) == wanted


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "preprocessing.py"


def test_images_are_prepared_as_the_processors_of_transformers_do_it(shared, monkeypatch):
    """Exactly, as the filters are the same; `benchmarks/preprocessing.py` compares 50 images."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARK.parent)  # it imports its neighbors
    spec = importlib.util.spec_from_file_location("preprocessing", BENCHMARK)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    images = sorted((shared / "data" / "imagenet-val-1000").rglob("*.*"))[:600:200]
    if not images:
        pytest.skip("the folder has no images")
    for name in [name for name, (kind, _) in benchmark.PROCESSORS.items() if kind.endswith("Pil")]:  # no torchvision
        assert benchmark.compare(*benchmark.processor_of(name), images) == pytest.approx((0.0, 0.0), abs=1e-3), name


def test_a_single_size_means_a_square_or_the_shorter_side_as_the_processor_has_it():
    settings = {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3}
    deit = read_preprocessor(settings | {"feature_extractor_type": "DeiTFeatureExtractor"}, (224, 224))
    clip = read_preprocessor(settings | {"feature_extractor_type": "CLIPFeatureExtractor"}, (224, 224))
    assert (deit.fit, clip.fit) == ("squash", "crop")
    assert deit.scaled_size == clip.scaled_size == (256, 256)
    for view in (deit, clip):
        assert read_preprocessor(write_preprocessor(view), (224, 224)) == view


@pytest.mark.parametrize(("text", "size"), [({"params/txt/head/kernel": torch.ones(2, 2)}, (384, 384)), ({}, None)])
def test_so400m_14_of_big_vision_s_siglip_is_fed_384_pixels(text, size):
    arrays = {"embedding/kernel": torch.ones(14, 14, 3, 8), "pos_embedding": torch.ones(1, 27 * 27, 8)}
    checkpoint = Checkpoint(path=Path("w.npz"), format="npz", tensors=arrays | text)
    assert BigVision().facts(checkpoint, arrays).image_size == size
