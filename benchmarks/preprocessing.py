"""How far our preprocessing is from that of each kind's own library, on real images, in levels of 255.

    python benchmarks/preprocessing.py IMAGES [--count 50]

IMAGES is a folder. A processor of transformers is saved as transformers saves it, and its `preprocessor_config.json` is
read back by us. Those that work with Pillow alone have our filters, so the difference is that of float32; DINOv3's
resizes tensors. Where torchvision is installed (`make bench` builds .venv-peers), DINOv3's processor and the
transforms of timm and open_clip are compared too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps

from peers import make_torchvision_importable
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Preprocess, ViTConfig
from vitruvian.data.preprocess import preprocess_image
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.huggingface import read_preprocessor
from vitruvian.weights.families.openclip import read_preprocess_cfg
from vitruvian.weights.families.timm_config import read_preprocess

PROCESSORS = {
    "ViT": ("ViTImageProcessorPil", {}),
    "CLIP": ("CLIPImageProcessorPil", {}),
    "SigLIP": ("SiglipImageProcessorPil", {}),
    "DINOv2": ("BitImageProcessorPil", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}),
    "BEiT": ("BeitImageProcessorPil", {}),
    "BEiT, 256 to 224": ("BeitImageProcessorPil", {"size": {"height": 256, "width": 256}, "do_center_crop": True}),
    "DeiT": ("DeiTImageProcessorPil", {}),
    "MAE, MSN": ("ViTImageProcessorPil", {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}),
    "I-JEPA at 448": ("ViTImageProcessorPil", {"size": {"height": 448, "width": 448}}),
    "data2vec": ("BeitImageProcessorPil", {"do_center_crop": False, "size": {"height": 224, "width": 224}}),
    "SigLIP 2": ("SiglipImageProcessorPil", {"size": {"height": 256, "width": 256}, "resample": 2}),
    "DINOv3": ("DINOv3ViTImageProcessor", {}),
}
"""Name: the class, and what published models of the kind change."""
TIMM = {
    "timm AugReg": {"crop_pct": 0.9, "interpolation": "bicubic"},
    "timm DeiT-III 384": {"input_size": (3, 384, 384), "crop_pct": 1.0, "interpolation": "bicubic"},
    "timm SigLIP": {"crop_pct": 0.9, "crop_mode": "squash", "interpolation": "bicubic"},
    "timm EVA-02 448": {
        "input_size": (3, 448, 448),
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "interpolation": "bicubic",
    },
    "timm DINOv2 518": {"input_size": (3, 518, 518), "crop_pct": 1.0, "interpolation": "bicubic"},
    "timm bilinear": {"crop_pct": 0.95, "interpolation": "bilinear", "mean": IMAGENET_MEAN, "std": IMAGENET_STD},
}
"""Name: what `pretrained_cfg` says."""
OPEN_CLIP = {
    "open_clip": {"size": 224},
    "open_clip squash": {"size": 256, "resize_mode": "squash", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    "open_clip bilinear": {"size": [224, 256], "resize_mode": "squash", "interpolation": "bilinear"},
}
"""Name: `preprocess_cfg`."""

Transform = Callable[[Image.Image], torch.Tensor]


def processor_of(name: str) -> tuple[Transform, Preprocess]:
    """transformers' own, and our view of the file that it saves."""
    kind, changes = PROCESSORS[name]
    processor = getattr(transformers, kind)(**changes)
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
    return lambda image: processor(image, return_tensors="pt")["pixel_values"][0], read_preprocessor(
        settings, (224, 224)
    )


def timm_transform(name: str) -> tuple[Transform, Preprocess]:
    from timm.data import create_transform, resolve_data_config

    cfg = {"input_size": (3, 224, 224), "mean": (0.5,) * 3, "std": (0.5,) * 3} | TIMM[name]
    return create_transform(**resolve_data_config(pretrained_cfg=cfg)), read_preprocess(
        cfg, tuple(cfg["input_size"][1:])
    )


def open_clip_transform(name: str) -> tuple[Transform, Preprocess]:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    settings = {"open_clip_config.json": {"preprocess_cfg": OPEN_CLIP[name]}}
    checkpoint = Checkpoint(path=Path(), format="safetensors", tensors={}, settings=settings)
    view = read_preprocess_cfg(checkpoint, ViTConfig())
    assert view is not None
    return image_transform_v2(PreprocessCfg(**OPEN_CLIP[name]), is_train=False), view


def compare(transform: Transform, view: Preprocess, images: Iterable[Path]) -> tuple[float, float]:
    """The mean over all images and the largest difference, in levels of 255."""
    std = torch.tensor(view.std)[:, None, None]
    means, largest = [], 0.0
    for path in images:
        with Image.open(path) as image:
            theirs = transform(ImageOps.exif_transpose(image).convert("RGB"))
        levels = (preprocess_image(path, view) - theirs).abs() * std * 255
        means.append(float(levels.mean()))
        largest = max(largest, float(levels.max()))
    return float(np.mean(means)), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--count", type=int, default=50)
    options = parser.parse_args()
    found = sorted(path for path in options.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    images = found[:: max(1, len(found) // options.count)][: options.count]
    print(f"{'processor':<20} {'mean':>8} {'largest':>8}   levels of 255, {len(images)} images")
    kinds = [(name, processor_of) for name in PROCESSORS]
    kinds += [(name, timm_transform) for name in TIMM] + [(name, open_clip_transform) for name in OPEN_CLIP]
    for name, made in kinds:
        try:
            transform, view = made(name)
        except (ImportError, AttributeError) as error:
            print(f"{name:<20} not compared: {error}".splitlines()[0][:100])
            continue
        mean, largest = compare(transform, view, images)
        print(f"{name:<20} {mean:8.4f} {largest:8.4f}", flush=True)


if __name__ == "__main__":
    make_torchvision_importable()
    main()
