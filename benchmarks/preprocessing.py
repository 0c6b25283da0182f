"""How far our preprocessing is from each processor of transformers, on real images, in levels of 255.

    python benchmarks/preprocessing.py IMAGES [--count 50]

IMAGES is a folder. A processor is saved as transformers saves it, and its `preprocessor_config.json` is read back by
us. The processors are those that work with Pillow alone, whose filters are ours, so the difference is that of float32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from vitruvian.data.preprocess import preprocess_image
from vitruvian.weights.families.huggingface_json import preprocess_of

PROCESSORS = {
    "ViT": ("ViTImageProcessorPil", {}),
    "CLIP": ("CLIPImageProcessorPil", {}),
    "SigLIP": ("SiglipImageProcessorPil", {}),
    "DINOv2": ("BitImageProcessorPil", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}),
    "BEiT": ("BeitImageProcessorPil", {}),
    "BEiT, 256 to 224": ("BeitImageProcessorPil", {"size": {"height": 256, "width": 256}, "do_center_crop": True}),
    "DeiT": ("DeiTImageProcessorPil", {}),
}
"""Name: the class, and what published models of the kind change."""


def compare(name: str, images: Iterable[Path]) -> tuple[float, float]:
    """The mean over all images and the largest difference, in levels of 255."""
    kind, changes = PROCESSORS[name]
    processor = getattr(transformers, kind)(**changes)
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
    view = preprocess_of(settings, (224, 224))
    std = torch.tensor(view.std)[:, None, None]
    means, largest = [], 0.0
    for path in images:
        with Image.open(path) as image:
            theirs = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
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
    for name in PROCESSORS:
        mean, largest = compare(name, images)
        print(f"{name:<20} {mean:8.4f} {largest:8.4f}")


if __name__ == "__main__":
    main()
