"""`vit cascade` and `vit tome`: a model that computes less, fitted on images of one's own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vitruvian.cli.options import Heads, ImageSize, Split, TomeR, tome_of
from vitruvian.cli.start import note_replaced, quick_imports
from vitruvian.progress import track

Source = Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a folder or a published name.")]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="The folder of the new model.")]
Calibrate = Annotated[
    str, typer.Option(metavar="DATA", help="Images to fit on, such as a folder; their labels are not used.")
]


def cascade(
    source: Source,
    destination: Destination,
    calibrate: Calibrate,
    image_size: ImageSize = None,
    tome_r: TomeR = None,
    max_loss: Annotated[
        float, typer.Option(min=0.0, max=100.0, metavar="POINTS", help="Points of top-1 that may be lost.")
    ] = 0.5,
    split: Split = None,
    num_heads: Heads = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the line.")] = False,
) -> None:
    """Write a model that answers easy images with a cheap pass.

    That pass has images of --image-size, or merges --tome-r tokens; the whole model answers where it is unsure. How
    sure it must be is fitted so that the answers lose no more than --max-loss, as the whole model's own probabilities
    expect it.
    """
    with quick_imports():
        from vitruvian.compress.cascade import fit_cascade
        from vitruvian.weights.convert import check_other
        from vitruvian.weights.load import load, locate
        from vitruvian.weights.save import save

    check_other(destination.expanduser(), locate(source))
    note_replaced(destination)
    model = load(source, num_heads=num_heads)
    found = fit_cascade(
        model,
        calibrate,
        image_size=image_size,
        tome_r=tome_of(tome_r) or 0,
        max_loss=max_loss,
        split=split,
        track=partial(track, label="images"),
    )
    model.meta = model.meta.replace(cascade=found.cascade)
    save(model, destination)
    print(json.dumps(found.to_json()) if as_json else f"{found}\nwrote {destination}")


def tome(
    source: Source,
    destination: Destination,
    calibrate: Calibrate,
    tome_r: TomeR,
    split: Split = None,
    num_heads: Heads = None,
) -> None:
    """Write a model with adaptive token merging.

    R tokens merge in each layer on average, more where patches are alike. The similarity threshold of each layer is
    fitted on the images.
    """
    with quick_imports():
        from vitruvian.compress.cascade import fit_merging
        from vitruvian.weights.convert import check_other
        from vitruvian.weights.load import load, locate
        from vitruvian.weights.save import save

    check_other(destination.expanduser(), locate(source))
    note_replaced(destination)
    model = fit_merging(load(source, num_heads=num_heads), calibrate, tome_of(tome_r) or 0, split=split)
    save(model, destination)
    thresholds = ", ".join(f"{each:.3f}" for each in model.config.tome_thresholds)  # type: ignore[union-attr]
    print(f"thresholds of the layers: {thresholds}\nwrote {destination}")
