"""`vit demo`: draw pictures, make a small model, convert it with its certificate, and predict."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vitruvian.cli.start import quick_imports

if TYPE_CHECKING:
    from PIL import Image

    from vitruvian.model.build import Model

KINDS = ("disc", "rows", "columns", "dots")
SIDE = 64
FITTED, TESTED = 240, 80


def demo() -> None:
    """Show the package at work on pictures it draws itself, in a few seconds and offline."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vit-demo-") as folder:
        show(Path(folder))
    print(f"\nDone in {time.monotonic() - started:.0f} seconds. With weights and pictures of your own:")
    print("  vit predict photos/ --model google/vit-base-patch16-224")
    print("  vit models    lists the weights that others published")


def show(folder: Path) -> None:
    """The steps of the demonstration, each told before it starts."""
    say("importing torch ...")
    with quick_imports():
        from vitruvian.cli.predict import as_table
        from vitruvian.predict import Classifier
        from vitruvian.weights.convert import convert
        from vitruvian.weights.save import save

    say(f"drawing {FITTED + TESTED} pictures of {', '.join(KINDS)} ...")
    rng = random.Random(0)
    drawings = [draw(KINDS[i % len(KINDS)], rng) for i in range(FITTED + TESTED)]

    say("making a Vision Transformer with random weights and fitting its head by least squares ...")
    model = fitted(drawings[:FITTED])
    answers = Classifier(model).predict(drawings[FITTED:], top=1)
    right = sum(answer.label == KINDS[i % len(KINDS)] for i, (answer,) in enumerate(answers))
    print(f"  right on {right} of {TESTED} pictures it was not fitted to")

    say("converting: native -> google -> timm, each read back and compared ...")
    save(model, folder / "native")
    print(indented(str(convert(folder / "native", folder / "google.npz", to="google"))))
    print(indented(str(convert(folder / "google.npz", folder / "timm.safetensors", to="timm"))))

    say("predicting with the converted weights: vit predict *.png --model timm.safetensors")
    paths = []
    for kind, drawing in zip(KINDS, drawings[FITTED:]):
        drawing.save(path := folder / f"{kind}.png")
        paths.append(path)
    for prediction in Classifier(folder / "timm.safetensors").stream(paths, top=2):
        print(indented(as_table(prediction).replace(f"{folder}/", "")))


def say(step: str) -> None:
    print(f"* {step}", flush=True)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def draw(kind: str, rng: random.Random) -> Image.Image:
    """A light figure of this kind on a dark ground; colours, sizes and places are drawn by lot."""
    from PIL import Image, ImageDraw

    dark = tuple(rng.randrange(0, 120) for _ in range(3))
    light = tuple(rng.randrange(150, 256) for _ in range(3))
    picture = Image.new("RGB", (SIDE, SIDE), dark)
    pen = ImageDraw.Draw(picture)
    if kind == "disc":
        radius = rng.randint(14, 26)
        x, y = rng.randint(radius, SIDE - radius), rng.randint(radius, SIDE - radius)
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=light)
        return picture
    step = rng.randint(8, 14)
    start = -rng.randrange(step)
    for y in range(start, SIDE, step):
        for x in range(start, SIDE, step):
            across = step if kind == "rows" else step // 2
            down = step if kind == "columns" else step // 2
            pen.rectangle((x, y, x + across, y + down), fill=light)
    return picture


def fitted(drawings: list[Image.Image]) -> Model:
    """A small ViT whose random features a linear head tells apart; `drawings` run through KINDS in turn."""
    import torch

    from vitruvian.config import Preprocess, ViTConfig
    from vitruvian.data.preprocess import view
    from vitruvian.model.build import build

    config = ViTConfig(
        image_size=(SIDE, SIDE),
        patch_size=8,
        classes=len(KINDS),
        layers=2,
        width=192,
        mlp_width=768,
        heads=3,
        pool="mean",
        class_token=False,
    )
    model = build(config, seed=0).eval()
    model.preprocess, model.labels = Preprocess(image_size=(SIDE, SIDE)), KINDS
    with torch.no_grad():
        features = model.features(torch.stack([view(drawing, model.preprocess) for drawing in drawings])).double()
        targets = torch.eye(len(KINDS)).double().repeat(len(drawings) // len(KINDS), 1) - 1 / len(KINDS)
        centre = features.mean(dim=0)
        x = features - centre
        ridge = 0.01 * len(x) * x.var() * torch.eye(config.feature_width)
        weight = 10 * torch.linalg.solve(x.T @ x + ridge, x.T @ targets)  # times 10: clear logits
        assert model.head is not None
        model.head.weight.copy_(weight.T)
        model.head.bias.copy_(-centre @ weight)
    return model
