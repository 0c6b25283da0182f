"""`vit demo`: train a ViT on the built-in digits from scratch, evaluate it, and read digits it has not seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Changes
from vitruvian.cli.start import quick_imports

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vitruvian.training import Run

SHOWN = 6
"""Held-out digits that are drawn on the terminal with their answers."""

SHADES = " .:-=+*#%@"
"""From no ink to full ink."""


def demo(
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of the run; else a new one in runs/.")] = None,
    settings: Changes = None,
) -> None:
    """Train on the built-in digits, evaluate, predict, and say where the report is; about a minute, offline."""
    started = time.monotonic()
    say("importing torch ...")
    with quick_imports():
        from vitruvian.training import train

    say("training a Vision Transformer on 1,438 handwritten digits from scratch: vit train digits")
    run = train("digits", recipe="digits", out=out, settings=settings or ())
    say("evaluating it on the 359 digits that were held out")
    print(indented(evaluated(run)))
    say(f"reading {SHOWN} of them: vit predict digit.png --model {run.folder}")
    print(indented(read_aloud(run)))
    print(f"\nDone in {time.monotonic() - started:.0f} seconds. Curves, confusions and mistakes as images:")
    print(f"  {run.folder / 'report.html'}")
    print("With images of your own, a folder for each kind:")
    print("  vit train photos/ --from google/vit-base-patch16-224-in21k")


def say(step: str) -> None:
    print(f"* {step}", flush=True)


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def evaluated(run: Run) -> str:
    """The last evaluation of a run in one line."""
    last = run.evaluation
    wrong = round(last["count"] * (1 - last["top1"] / 100))
    return f"{last['top1']:.1f}% right: {wrong} mistakes in {last['count']} digits, after {last['seconds']:.0f} s"


def read_aloud(run: Run) -> str:
    """Some held-out digits as characters, and under each what the model says."""
    import numpy as np

    from vitruvian.data.sources import open_dataset
    from vitruvian.predict import Classifier

    held = open_dataset("digits").splits["test"]
    places = [int(np.flatnonzero(held.labels() == digit)[0]) for digit in range(SHOWN)]
    images = [held.read(place) for place in places]
    arrays = [image for image in images if not isinstance(image, bytes)]
    answers = Classifier(run.folder).predict(arrays, top=1)
    said = [f"{answer.label}, {100 * answer.probability:.0f}%" for (answer,) in answers]
    return beside([drawing(array) for array in arrays], said)


def drawing(ink: NDArray[np.uint8]) -> list[str]:
    """Each pixel as two characters, since a character is twice as high as wide."""
    return ["".join(2 * SHADES[value * len(SHADES) // 256] for value in row) for row in ink.tolist()]


def beside(drawings: Sequence[list[str]], captions: Sequence[str]) -> str:
    """Drawings in one row, a caption under each."""
    width = max(len(line) for lines in drawings for line in lines)
    rows = [*zip(*drawings), captions]
    return "\n".join("  ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)
