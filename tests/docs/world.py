"""A folder with tiny stand-ins for the files that the documentation names: images, tasks, weights, published models.

A published name is found in it as a path, so that nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from layouts import make_cifar, make_imagenet, make_pets, make_vtab
from pages import ROOT
from PIL import Image
from two_towers import save_clip, save_siglip

import vitruvian as vt
from vitruvian.catalog import imagenet_ids, imagenet_labels
from vitruvian.config import Preprocess, ViTConfig

MODELS = {
    "explain.md": {"num_classes": 1000, "depth": 6, "num_heads": 4, "image_size": 128},  # layer 5, head 2, patch 7, 3
}
"""What a page's Python has for `model`, where the tiniest will not do."""
SHAPE = {"image_size": 32, "patch_size": 16, "depth": 2, "width": 32, "mlp_dim": 32, "num_heads": 2}


def tiny(labels: tuple[str, ...] = (), num_classes: int = 0, **settings: object) -> vt.ViT:
    model = vt.build(ViTConfig(**{**SHAPE, **settings}, num_classes=len(labels) or num_classes), seed=0)
    model.meta = model.meta.replace(labels=labels or None)
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=model.config.image_size))
    if model.head is not None:
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


def make_photos(folder: Path, names: tuple[str, ...], splits: dict[str, int]) -> None:
    """Images of a color each, with noise, named by numbers."""
    rng = np.random.default_rng(0)
    for split, count in splits.items():
        for color, name in zip(np.linspace(60, 200, len(names)), names):
            target = folder / split / name
            target.mkdir(parents=True)
            for number in range(count):
                pixels = (color + 30 * rng.normal(size=(40, 50, 3))).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(target / f"{number}.jpg")


def make_images(root: Path) -> None:
    cats_and_dogs = ("cat", "dog")
    make_photos(root / "photos", cats_and_dogs, {"train": 12, "test": 4})
    make_photos(root / "PHOTOS", cats_and_dogs, {".": 33})  # 32 are needed to measure a loss, and as many to fit
    listed = sorted(path.relative_to(root) for path in (root / "photos").rglob("*.jpg"))
    rows = [f"{path},{path.parts[2]},{path.parts[1]},camera {int(path.stem) % 3}" for path in listed]
    (root / "photos.csv").write_text("\n".join(["path,label,split,camera", *rows]))
    (root / "OTHERS").symlink_to("PHOTOS")
    for name in ("DATA", "SRC", "TEST", "IMAGES", "SHARDS", "new", "bucket/shards", "bucket/jft"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to("../photos" if "/" in name else "photos")
    make_photos(root / "pets", cats_and_dogs, {"train": 12, "test": 4})
    make_photos(root / "imagenet-r", tuple(imagenet_ids()[:3]), {".": 1})
    make_photos(root / "imagenet-val-1000", ("",), {".": 18})
    for name in ("photo.jpg", "a.jpg", "b.jpg", "more/a.png"):
        (root / name).parent.mkdir(exist_ok=True)
        Image.open(root / "photos" / "test" / "cat" / "0.jpg").save(root / name)
    Image.open(root / "a.jpg").save(root / "b.png")
    make_masks(root)
    make_bands(root)
    shutil.copy(ROOT / "docs" / "explain" / "table.png", root)
    (root / "names.txt").write_text("cat\ndog\n")
    (root / "corrections.json").write_text('{"format": 1, "data": "SRC", "corrections": []}')


def make_bands(root: Path) -> None:
    """Images of 4 channels of 16 bits."""
    rng = np.random.default_rng(0)
    for name in ("crop", "water"):
        (root / "bands" / name).mkdir(parents=True)
        for number in range(12):
            np.save(root / "bands" / name / f"{number}.npy", rng.integers(0, 65535, (40, 50, 4), dtype=np.uint16))


def make_masks(root: Path) -> None:
    """Images of a bright and a dark half, with masks and polygons of the dark one; gray images, some half bright."""
    left = {"category_id": 1, "segmentation": [[0, 0, 15, 0, 15, 31, 0, 31]]}
    coco: dict[str, list[object]] = {"categories": [{"id": 1, "name": "dark"}], "images": [], "annotations": []}
    for name in ("scenes", "masks", "parts/good", "parts/scratched", "truth/scratched"):
        (root / name).mkdir(parents=True)
    for index in range(3):
        dark = np.zeros((32, 32), np.uint8)
        dark[:, :16] = 1
        Image.fromarray(dark).save(root / "masks" / f"{index}.png")
        Image.fromarray(200 - 150 * dark).convert("RGB").save(root / "scenes" / f"{index}.png")
        Image.fromarray(dark).save(root / "truth" / "scratched" / f"{index}_mask.png")
        for name in ("good", "scratched"):
            Image.fromarray(100 + 2 * index + 150 * (name != "good") * dark).save(
                root / "parts" / name / f"{index}.png"
            )
        coco["images"].append({"id": index, "file_name": f"{index}.png", "width": 32, "height": 32})
        coco["annotations"].append({"image_id": index, **left})
    (root / "coco.json").write_text(json.dumps(coco))


def make_tasks(root: Path) -> None:
    make_pets(root / "tasks")
    make_vtab(root / "tasks")
    make_cifar(root / "tasks")
    make_cifar(root)
    (root / "cifar-10-batches-bin").symlink_to("cifar10/cifar-10-batches-bin")
    make_imagenet(root)
    (root / "imagenet" / "real.json").rename(root / "real.json")


def save_mae(folder: Path) -> None:
    """transformers' masked autoencoder, with the decoder that only it writes."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    side = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    decoder = {f"decoder_{name}": size for name, size in side.items()}
    ViTMAEForPreTraining(ViTMAEConfig(**side, **decoder, image_size=32, patch_size=16)).save_pretrained(folder)
    view = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    (folder / "preprocessor_config.json").write_text(json.dumps(view))


def make_weights(root: Path) -> None:
    ours, imagenet = tiny(("cat", "dog")), tiny(imagenet_labels())
    for name in ("weights.safetensors", "first.safetensors"):
        vt.save(ours, root / name, family="timm")
    for name in ("second", "W", "WEIGHTS", "runs/photos", "runs/mine"):
        vt.save(ours, root / name)
    for name in ("cats", "dogs"):
        model = vt.load(root / "weights.safetensors")
        vt.add_lora(model, vt.LoraConfig(rank=2))
        vt.save_adapter(model, root / "runs" / name / "adapter", base="weights.safetensors")
    vt.save(imagenet, root / "weights.npz", family="google")
    vt.save(imagenet, root / "ViT-B_16.npz", family="google")
    vt.save(tiny(), root / "dino.pth", family="timm")
    for name in ("vit_ti16.safetensors", "vit_ti16_imagenet1k.safetensors"):
        vt.save(imagenet, root / name, family="timm")
    vt.save(tiny(num_classes=1000, depth=12), root / "google/vit-base-patch16-224", family="huggingface")
    vt.save(imagenet, root / "google/vit-base-patch16-224-in21k", family="huggingface")
    save_mae(root / "facebook" / "vit-mae-base")
    save_clip(root / "openai" / "clip-vit-base-patch32")
    save_siglip(root / "google" / "siglip-base-patch16-224", model_input_names=["input_ids"], padding_side="right")


def make_world(root: Path) -> Path:
    for make in (make_images, make_tasks, make_weights):
        make(root)
    with contextlib.chdir(root):  # as the pages name them
        vt.embed("photos/", "weights.safetensors", "vectors/")
    return root


def environment(root: Path) -> dict[str, str]:
    """No network, no cache but the world's own, one thread."""
    return {"HF_HUB_OFFLINE": "1", "VITRUVIAN_CACHE": str(root / "cache"), "VITRUVIAN_DATA": str(root / "tasks")}


def transform(image: object, rng: np.random.Generator) -> torch.Tensor:
    return vt.preprocess_image(image, Preprocess(image_size=32))


def names(root: Path, page: str) -> dict[str, object]:
    """What code on a page may use that an earlier page, or its reader, has made."""
    from vitruvian.data.formats import open_dataset
    from vitruvian.data.loader import Loader

    one = page == "explain.md"  # it names a class for one image
    model = tiny(**MODELS.get(page, {"labels": ("cat", "dog")}))
    paths = [root / "a.jpg", root / "b.png"]
    pixels = torch.stack([vt.preprocess_image(path, model.meta.preprocess) for path in paths[: 1 if one else 2]])
    loader = Loader(
        open_dataset(root / "photos").splits["test"], transform=transform, batch_size=4, training=False, seed=0
    )
    given = {"model": model, "paths": paths, "pixels": pixels, "image": Image.open(paths[0]), "transform": transform}
    return {"__name__": "__main__", "vt": vt, "torch": torch, "json": json, "loader": loader, **given}
