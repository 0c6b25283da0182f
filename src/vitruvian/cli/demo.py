"""`vit demo`: train a ViT on the built-in digits from scratch, evaluate it, and explain the bundled model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import vitruvian as vt
from vitruvian.cli.options import Changes, import_torch, option

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from vitruvian.explain.explainer import Explained

SHOWN = 6  # number of test digits drawn on the terminal with their predictions
PAGE = "demo.html"
PHOTOS = ("cat.jpg", "coffee.jpg")  # from the page of `vit serve`; the bundled model knows cats, but no cups
SHADES = " .:-=+*#%@"  # from no ink to full ink


def demo(
    out: Annotated[Path | None, option("RUN", "Folder of the run [default: a new one in runs/].")] = None,
    settings: Changes = None,
) -> None:
    """Train on the built-in digits, evaluate, predict, explain.

    Works offline and takes about a minute; at the end it prints the path of a page with the results.
    """
    started = time.monotonic()
    print_step("importing torch ...")
    import_torch()
    import numpy as np
    import torch
    from PIL import Image

    from vitruvian.data.formats import open_dataset
    from vitruvian.evaluation.metrics import wilson
    from vitruvian.weights import hub

    # more threads do not help with so small a model, and wait for each other on a busy machine
    torch.set_num_threads(1)
    print_step("training a Vision Transformer on 1,438 handwritten digits from scratch: vit train digits")
    run = vt.train("digits", recipe="digits", out=out, settings=settings or ())
    print_step("evaluating it on the 359 test digits")
    last = run.evaluation
    right = round(last["count"] * last["top1"] / 100)
    low, high = wilson(right, last["count"])
    interval = f"95% confidence interval {low:.1f} to {high:.1f}%"
    mistakes = f"{last['count'] - right} mistakes in {last['count']} digits"
    print(f"  accuracy {last['top1']:.1f}% ({interval}): {mistakes}, after {last['seconds']:.0f} s")
    print_step(f"classifying {SHOWN} of them: vit predict digit.png --model {run.folder}")
    test = open_dataset("digits").splits["test"]
    indices = [int(np.flatnonzero(test.labels() == digit)[0]) for digit in range(SHOWN)]
    digits = [image for image in map(test.read, indices) if not isinstance(image, bytes)]
    predictions = vt.Classifier(run.folder).predict(digits, top=1)
    captions = [f"{best.label}, {100 * best.probability:.0f}%" for (best,) in predictions]
    print(indent(side_by_side([draw(digit) for digit in digits], captions), "  "))
    print_step("classifying photos with the bundled model, and showing where it looks: vit explain cat.jpg")
    explainer = vt.Explainer(vt.load(hub.BUNDLED), vt.MapSettings(methods=("gradient",)))
    folder = files("vitruvian.serve") / "page"
    cat, coffee = (Image.open(str(folder / name)).convert("RGB") for name in PHOTOS)
    images = {"a cat": cat, "a cat in a corner": in_corner(cat), "a cup of coffee": coffee}
    photos = [replace(explainer.explain(image), path=name) for name, image in images.items()]
    for photo in photos:
        best = photo.predictions[0]
        shown = "rejected, none of its classes" if photo.rejected else f"{best.label}, {100 * best.probability:.0f}%"
        print(f"  {photo.path}: {shown}")
    page = write_page(run, interval, digits, captions, explainer, photos)
    print(f"\nDone in {time.monotonic() - started:.0f} seconds. All results on one page:\n  {page}")
    print(f"Training curves, confusion matrix and mistakes:\n  {run.folder / 'report.html'}")
    print("To train on your own images, with one folder per class:\n  vit train photos/")


def print_step(step: str) -> None:
    print(f"* {step}", flush=True)


def write_page(
    run: vt.Run,
    interval: str,
    digits: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    explainer: vt.Explainer,
    photos: Sequence[Explained],
) -> Path:
    """Write a page about the training, the digits and the photos to the folder of the run."""
    from PIL import Image

    from vitruvian.explain.explainer import image_context
    from vitruvian.files import write_text
    from vitruvian.report.chart import Chart, Line
    from vitruvian.report.color import HELD_OUT
    from vitruvian.report.html import render, thumbnail

    last = run.evaluation
    curve = Line("test digits", [(line["step"], line["top1"]) for line in run.metrics("val")], color=HELD_OUT)
    shown = [(thumbnail(Image.fromarray(digit), caption), caption) for digit, caption in zip(digits, captions)]
    contexts = [image_context(photo, photo.overlays()) for photo in photos]
    for values in (values for values in contexts if values["rejected"]):
        values |= {"overlays": values["overlays"][:1], "predictions": []}  # the image alone, without maps of classes
    page = render(
        "demo.html",
        title="vit demo",
        heading="What vit demo did",
        tile_values={
            f"accuracy on test digits ({interval})": f"{last['top1']:.1f}%",
            "training time": f"{last['seconds']:.0f} s",
        },
        chart=Chart(title="Accuracy in %", lines=[curve], x_label="step"),
        digits=[{"image": image, "caption": caption} for image, caption in shown],
        classes=explainer.vit.meta.labels or (),
        photos=contexts,
    )
    return write_text(run.folder / PAGE, page)


def in_corner(image: Image.Image) -> Image.Image:
    """A gray square with the middle of an image in its lower right quarter."""
    from PIL import Image, ImageOps

    scene = Image.new("RGB", (400, 400), "gray")
    scene.paste(ImageOps.fit(image, (200, 200)), (200, 200))
    return scene


def draw(ink: NDArray[np.uint8]) -> list[str]:
    """Draw each pixel as two characters, since a character is twice as high as wide."""
    return ["".join(2 * SHADES[value * len(SHADES) // 256] for value in row) for row in ink.tolist()]


def side_by_side(drawings: Sequence[list[str]], captions: Sequence[str]) -> str:
    """Drawings in one row, each with a caption below it."""
    width = max(len(line) for lines in drawings for line in lines)
    rows = [*zip(*drawings), captions]
    return "\n".join("  ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
