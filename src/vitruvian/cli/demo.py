"""`vit demo`: train a ViT on the built-in digits from scratch, evaluate it, and explain the bundled model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Changes
from vitruvian.cli.process import quick_imports

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitruvian.explain import Explainer
    from vitruvian.explain.explainer import Explained
    from vitruvian.inference import Prediction
    from vitruvian.training import Run

SHOWN = 6
"""Number of test digits drawn on the terminal with their predictions."""

PAGE = "demo.html"
PHOTOS = ("cat", "coffee", "rocket")
"""Photos from the page of `vit serve`; the bundled model has a class for one of them."""

SHADES = " .:-=+*#%@"
"""From no ink to full ink."""


def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run [default: a new one in runs/].")
    ] = None,
    settings: Changes = None,
) -> None:
    """Train on the built-in digits, evaluate, predict, explain.

    Works offline and takes about a minute; at the end it prints the path of a page with the results.
    """
    started = time.monotonic()
    print_step("importing torch ...")
    with quick_imports():
        import torch

        from vitruvian.training import train

    # more threads do not help with so small a model, and wait for each other on a busy machine
    torch.set_num_threads(1)
    print_step("training a Vision Transformer on 1,438 handwritten digits from scratch: vit train digits")
    run = train("digits", recipe="digits", out=out, settings=settings or ())
    print_step("evaluating it on the 359 test digits")
    print(indent(accuracy_line(run), "  "))
    print_step(f"classifying {SHOWN} of them: vit predict digit.png --model {run.folder}")
    digits, predictions = classify_digits(run)
    captions = [f"{prediction.label}, {100 * prediction.probability:.0f}%" for prediction in predictions]
    print(indent(side_by_side([draw(digit) for digit in digits], captions), "  "))
    print_step("classifying photos with the bundled model, and showing what it looks at: vit explain cat.jpg")
    explainer, photos = explain_photos()
    print(indent("\n".join(f"{photo.path}: {describe_best(photo)}" for photo in photos), "  "))
    page = write_page(run, digits, captions, explainer, photos)
    print(f"\nDone in {time.monotonic() - started:.0f} seconds. All results on one page:\n  {page}")
    print(f"Training curves, confusion matrix and mistakes:\n  {run.folder / 'report.html'}")
    print("To train on your own images, with one folder per class:\n  vit train photos/")


def print_step(step: str) -> None:
    print(f"* {step}", flush=True)


def accuracy_line(run: Run) -> str:
    """The last evaluation of a run in one line."""
    last = run.evaluation
    wrong = round(last["count"] * (1 - last["top1"] / 100))
    return f"accuracy {last['top1']:.1f}%: {wrong} mistakes in {last['count']} digits, after {last['seconds']:.0f} s"


def classify_digits(run: Run) -> tuple[list[NDArray[np.uint8]], list[Prediction]]:
    """The first test image of each of some digits, and the best prediction for it."""
    import numpy as np

    from vitruvian.data.formats import open_dataset
    from vitruvian.inference import Classifier

    test = open_dataset("digits").splits["test"]
    indices = [int(np.flatnonzero(test.labels() == digit)[0]) for digit in range(SHOWN)]
    arrays = [image for image in map(test.read, indices) if not isinstance(image, bytes)]
    return arrays, [best for (best,) in Classifier(run.folder).predict(arrays, top=1)]


def explain_photos() -> tuple[Explainer, list[Explained]]:
    """The photos with the predictions of the bundled model, and what they depend on."""
    from vitruvian.explain import Explainer, MapSettings
    from vitruvian.weights import hub, load

    explainer = Explainer(load(hub.BUNDLED), MapSettings(methods=("gradient",)))
    folder = files("vitruvian.serve") / "page"
    names = [f"{name}.jpg" for name in PHOTOS]
    return explainer, [replace(explainer.explain(str(folder / name)), path=name) for name in names]


def describe_best(explained: Explained) -> str:
    best = explained.predictions[0]
    known = "rejected, nearest " if explained.rejected else ""
    return f"{known}{best.label}, {100 * best.probability:.0f}%"


def write_page(
    run: Run,
    digits: Sequence[NDArray[np.uint8]],
    captions: Sequence[str],
    explainer: Explainer,
    photos: Sequence[Explained],
) -> Path:
    """Write a page about the training, the digits and the photos to the folder of the run."""
    from PIL import Image

    from vitruvian.explain.explainer import image_context, overlays
    from vitruvian.files import write_text
    from vitruvian.report.chart import Chart, Line
    from vitruvian.report.html import render, thumbnail

    last = run.evaluation
    curve = Line("test digits", [(line["step"], line["top1"]) for line in run.metrics("val")])
    page = render(
        "demo.html",
        title="vit demo",
        heading="What vit demo did",
        tile_values={"accuracy on test digits": f"{last['top1']:.1f}%", "training time": f"{last['seconds']:.0f} s"},
        chart=Chart(title="Accuracy in %", lines=[curve], x_label="step"),
        digits=[
            {"image": thumbnail(Image.fromarray(digit), text), "caption": text} for digit, text in zip(digits, captions)
        ],
        classes=explainer.vit.meta.labels or (),
        photos=[image_context(photo, overlays(explainer, photo)) for photo in photos],
    )
    return write_text(run.folder / PAGE, page)


def draw(ink: NDArray[np.uint8]) -> list[str]:
    """Draw each pixel as two characters, since a character is twice as high as wide."""
    return ["".join(2 * SHADES[value * len(SHADES) // 256] for value in row) for row in ink.tolist()]


def side_by_side(drawings: Sequence[list[str]], captions: Sequence[str]) -> str:
    """Drawings in one row, each with a caption below it."""
    width = max(len(line) for lines in drawings for line in lines)
    rows = [*zip(*drawings), captions]
    return "\n".join("  ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
