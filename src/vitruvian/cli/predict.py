"""`vit predict`: what is in these images?"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    Batch,
    DefaultModel,
    Device,
    Engine,
    EngineChoice,
    Heads,
    ImageSize,
    Labels,
    MaxUnreadable,
    On,
    Piece,
    Readers,
    Shard,
    Split,
    Template,
    TomeR,
    tome_of,
)
from vitruvian.cli.start import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_status, track, track_amounts

if TYPE_CHECKING:
    from vitruvian.predict import ImageResult


def predict(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILES_OR_FOLDERS", help="Images, or folders of them; with --out, one dataset."),
    ],
    model: DefaultModel = None,
    labels: Labels = None,
    template: Template = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="How many answers an image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each image.")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write the answers as Parquet parts to a folder or URL.")
    ] = None,
    shard: Shard = None,
    on: On = None,
    split: Split = None,
    piece: Piece = 4096,
    max_unreadable: MaxUnreadable = 0.25,
    workers: Readers = 0,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
    engine: Engine = EngineChoice.TORCH,
    tome_r: TomeR = None,
) -> None:
    """Name what is in images, with probabilities.

    An image that cannot be read is reported, the others are still answered, and the exit code is 1. With --out, for
    millions of images: parts are written, by as many processes as --shard says, and `vit merge` checks them.
    """
    if out is None and (shard is not None or on):
        raise typer.BadParameter("--shard and --on are for --out")
    if on and (num_heads or image_size or labels or tome_r or device != "cpu"):
        raise typer.BadParameter(
            "--on loads the model on each node, without --num-heads, --image-size, --labels, --device, --tome-r"
        )
    if out is not None and (as_json or len(paths) != 1):
        raise typer.BadParameter("--out takes one dataset, and no --json")
    if out is not None and engine != EngineChoice.TORCH:
        raise typer.BadParameter("--engine is not for --out, whose parts are the same on every machine")
    with quick_imports():
        from vitruvian.data.folder import find_images
        from vitruvian.predict import Classifier
        from vitruvian.weights.hub import default_source
        from vitruvian.weights.words import read_words

    images = [] if out is not None else find_images(paths)  # before a model is downloaded for them
    model = default_source() if model is None else model
    words = None if labels is None else read_words(labels)
    classifier_of = partial(
        Classifier,
        num_heads=num_heads,
        image_size=image_size,
        device=device,
        engine=engine.value,
        tome_r=tome_of(tome_r),
        labels=words,
        template=template,
    )
    if out is not None:
        from vitruvian.bulk.run import predict as run_predict

        run_predict(
            paths[0],
            model if on else classifier_of(model),
            out,
            shard=shard,
            on=on,
            split=split,
            top=top,
            piece=piece,
            batch_size=batch_size,
            max_unreadable=max_unreadable,
            workers=workers,
            track=partial(track_amounts, label="images"),
        )
        print(f"the answers are in {out}: `vit merge {out}` checks them")
        return
    classifier = classifier_of(model)
    failed = 0
    for prediction in track(classifier.stream(images, top=top, batch_size=batch_size), len(images), "images"):
        failed += bool(prediction.error)
        show(prediction, as_json=as_json)
    if failed:
        if len(images) > 1:
            print_status(f"{failed} of {len(images)} images could not be read")
        raise typer.Exit(1)


def words_of(labels: str) -> tuple[str, ...]:
    from vitruvian.weights.words import read_words

    return read_words(labels)


def show(result: ImageResult, *, as_json: bool) -> None:
    """An image's answers on stdout; without JSON, an error goes to stderr."""
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    elif result.error:
        print_status(f"error: {result.error}")
    else:
        print(as_table(result), flush=True)


def as_table(result: ImageResult) -> str:
    """The path, and below it a line for each answer with the percentages in one column; first what is none of them."""
    from vitruvian.text import printable

    labels = [printable(answer.label) for answer in result.predictions]
    width = max(map(len, labels))
    rows = [f"  {label:<{width}}  {a.probability:7.2%}" for label, a in zip(labels, result.predictions)]
    none = ["  none of these; the nearest:"] if result.rejected else []
    return "\n".join([printable(result.path), *none, *rows])
