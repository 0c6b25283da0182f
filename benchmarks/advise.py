"""Whether the advice holds: all options of `vit advise` are run, and measured on images that it never saw.

    python benchmarks/advise.py WORK --shared FOLDER [--only fashion,digits,textures] [--minutes N]

FOLDER has `weights/vit_ti16_imagenet1k.safetensors`, and `pets`, `cifar10` and `imagenet-val-1000` in `data/`. Fashion
MNIST is read from `fashion/` in WORK, where its four .gz files are (Debian: dataset-fashion-mnist). For each dataset a
small folder of images is written to WORK, and other images to test on. Commands are run as they are printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import vitruvian as vt
from vitruvian.data.formats import open_dataset

COARSE = {
    "fish": range(7),
    "bird": [*range(7, 25), *range(80, 101), *range(127, 147)],
    "reptile": range(25, 69),
    "insect": range(300, 320),
    "dog": range(151, 251),
    "cat": range(281, 294),
    "monkey": range(365, 385),
    "food": range(924, 970),
}
"""Groups of ImageNet's classes; there is one image of each class."""

Images = Iterator[tuple[str, Image.Image]]
Pixels = NDArray[np.float64]


def fashion(shared: Path, work: Path, per_class: int = 40) -> tuple[Images, Images]:
    names = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]

    def images(part: str) -> Images:
        pixels, labels = (
            np.frombuffer(
                gzip.decompress((work / "fashion" / f"{part}-{file}.gz").read_bytes()), np.uint8, offset=offset
            )
            for file, offset in (("images-idx3-ubyte", 16), ("labels-idx1-ubyte", 8))
        )
        for label, name in enumerate(names):
            for index in np.flatnonzero(labels == label)[:per_class]:
                yield name, Image.fromarray(pixels.reshape(-1, 28, 28)[index])

    return images("train"), images("t10k")


def textures(shared: Path, work: Path, per_class: int = 40) -> tuple[Images, Images]:
    """Rendered patterns of any direction, scale, contrast and color, under noise."""
    y, x = np.mgrid[:96, :96] / 96

    def stripes(u: Pixels, v: Pixels) -> Pixels:
        return np.sin(u)

    def waves(u: Pixels, v: Pixels) -> Pixels:
        return np.sin(u + 1.5 * np.sin(v / 2))

    def checks(u: Pixels, v: Pixels) -> Pixels:
        return np.sign(np.sin(u) * np.sin(v))

    def dots(u: Pixels, v: Pixels) -> Pixels:
        return np.sign(np.sin(u) + np.sin(v) - 1)

    def grid(u: Pixels, v: Pixels) -> Pixels:
        return np.maximum(np.sin(u), np.sin(v)) ** 9

    def hexagons(u: Pixels, v: Pixels) -> Pixels:
        return np.sin(u) + np.sin(u / 2 + 0.87 * v) + np.sin(u / 2 - 0.87 * v)

    def rings(u: Pixels, v: Pixels) -> Pixels:
        return np.sin(np.hypot(u, v))

    def spirals(u: Pixels, v: Pixels) -> Pixels:
        return np.sin(np.hypot(u, v) + 2 * np.arctan2(v, u))

    def images(seed: int) -> Images:
        rng = np.random.default_rng(seed)
        for pattern in (stripes, waves, checks, dots, grid, hexagons, rings, spirals):
            for _ in range(per_class):
                angle, scale = rng.uniform(0, 2 * np.pi), rng.uniform(15, 60)
                (dx, dy), contrast = rng.uniform(0.2, 0.8, 2), rng.uniform(0.1, 0.5)
                u = scale * (np.cos(angle) * (x - dx) + np.sin(angle) * (y - dy))
                v = scale * (np.cos(angle) * (y - dy) - np.sin(angle) * (x - dx))
                shade = contrast * pattern(u, v)[..., None] * rng.uniform(-1, 1, 3) + rng.normal(0, 0.2, (96, 96, 1))
                levels = 255 * (rng.uniform(0.3, 0.7, 3) + shade)
                yield pattern.__name__, Image.fromarray(levels.clip(0, 255).astype(np.uint8))

    return images(0), images(1)


def pets(shared: Path, work: Path, per_class: int = 8) -> tuple[Images, Images]:
    def images(split: str, count: int) -> Images:
        for folder in sorted((shared / "data" / "pets" / split).iterdir()):
            for path in sorted(folder.glob("*.jpg"))[:count]:  # neighbors often show the same animal
                yield folder.name, Image.open(path)

    return images("train", per_class), images("test", 8)


def cifar10(shared: Path, work: Path, per_class: int = 30) -> tuple[Images, Images]:
    folder = shared / "data" / "cifar10"
    described = json.loads((folder / "labels.json").read_text())

    def images(split: str, sheet: str, count: int) -> Images:
        pixels = np.asarray(Image.open(folder / sheet).convert("RGB"))
        cells = pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)
        labels = np.asarray(described[split])[: len(cells)]
        for label, name in enumerate(described["classes"]):
            for index in np.flatnonzero(labels == label)[:count]:
                yield name, Image.fromarray(cells[index])

    return images("train", "train_1.webp", per_class), images("test", "test.webp", 30)


def imagenet(shared: Path, work: Path) -> tuple[Images, Images]:
    def images(first: int) -> Images:
        for name, numbers in COARSE.items():
            for number in list(numbers)[first::2]:
                for path in (shared / "data" / "imagenet-val-1000" / f"{number:03d}").glob("*.jpg"):
                    yield name, Image.open(path)

    return images(0), images(1)


def digits(shared: Path, work: Path, per_class: int = 40) -> tuple[Images, Images]:
    source = open_dataset("digits").train
    labels = np.asarray(source.labels())

    def images(first: int) -> Images:
        for label, name in enumerate(source.classes):
            for index in np.flatnonzero(labels == label)[first : first + per_class].tolist():
                pixels = np.asarray(source.read(index))
                yield name, Image.fromarray(pixels.squeeze())

    return images(0), images(per_class)


def write(images: Images, folder: Path) -> None:
    for number, (name, image) in enumerate(images):
        (folder / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / name / f"{number}.png")


def run(command: str, folder: Path) -> tuple[Path | str, float]:
    """Run a command of the advice in an empty folder: the model that it makes, and the minutes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = shlex.split(command)[1:]
    if words[0] == "evaluate":  # makes no model
        return words[words.index("--model") + 1], 0.0
    began = time.monotonic()
    more = ["--out", "run"] if words[0] == "train" else []
    subprocess.run(
        [sys.executable, "-m", "vitruvian", *words, *more], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )
    return folder / ("run" if words[0] == "train" else "model"), (time.monotonic() - began) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--only", default="fashion,digits,textures")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--html", action="store_true")
    options = parser.parse_args()
    work = options.work.resolve()
    weights = options.shared.resolve() / "weights" / "vit_ti16_imagenet1k.safetensors"
    for name in options.only.split(","):
        folders = work / name / "images", work / name / "others"
        for images, folder in zip(globals()[name](options.shared, work), folders):
            if not folder.exists():
                write(images, folder)
        page = work / name / "advice.html" if options.html else None
        advice = vt.advise(folders[0], [weights], minutes=options.minutes, html=page)
        print(f"{name}: {advice.summary}; advice in {advice.seconds / 60:.1f} minutes; {advice.reason}", flush=True)
        print(f"  {advice.more_images}")
        reached = {}
        for option in advice.options:
            model, minutes = run(option.command, work / name / "run")
            measures = vt.evaluate(folders[1], model).measures
            reached[option.name] = measures.top1
            low, high = option.interval
            verdict = "inside" if low <= measures.top1 <= high else "OUTSIDE"
            print(
                f"  {option.name}: expected {option.top1:.1f} ({low:.1f} to {high:.1f}), "
                f"{'measured' if option.is_measured else 'predicted'} from {option.basis}; "
                f"reached {measures.top1:.1f} on {measures.count} other images, {verdict}; "
                f"{option.minutes:.1f} minutes expected, {minutes:.1f} taken",
                flush=True,
            )
        if advice.recommended is not None:
            lost = max(reached.values()) - reached[advice.recommended.name]
            print(f"  recommended {advice.recommended.name}: {lost:.1f} points below the best", flush=True)


if __name__ == "__main__":
    main()
