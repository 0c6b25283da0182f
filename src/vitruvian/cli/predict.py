"""`vit predict`: classify images."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    BulkOptions,
    DefaultModel,
    EngineChoice,
    Labels,
    ModelOptions,
    Template,
    expand_options,
    json_option,
)
from vitruvian.cli.process import quick_imports
from vitruvian.progress import print_status, track, track_amounts

if TYPE_CHECKING:
    from vitruvian.inference import ImageResult


@expand_options
def predict(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILES_OR_FOLDERS", help="Images, or folders of images; with --out, one dataset."),
    ],
    bulk: BulkOptions,
    options: ModelOptions,
    model: DefaultModel = None,
    labels: Labels = None,
    template: Template = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Number of predictions per image.")] = 5,
    as_json: Annotated[bool, json_option(" per image (JSON Lines)")] = False,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Write predictions as Parquet parts to a folder or URL.")
    ] = None,
) -> None:
    """Classify images, with probabilities.

    Unreadable images are reported and skipped, and the exit code is 1. With --out, for millions of images:
    the predictions are written in parts, by one process per --shard, and `vit merge` verifies them.
    """
    if out is None and (bulk.shard is not None or bulk.on):
        raise typer.BadParameter("--shard and --on are for --out")
    if bulk.on and (labels or not options.is_default):
        raise typer.BadParameter(
            "--on loads the model on each node, without --num-heads, --image-size, --labels, --device, --tome-r"
        )
    if out is not None and (as_json or len(paths) != 1):
        raise typer.BadParameter("--out takes one dataset, and no --json")
    if out is not None and options.engine != EngineChoice.TORCH:
        raise typer.BadParameter("--engine is not for --out, whose parts are the same on every machine")
    with quick_imports():
        from vitruvian.data.folder import find_images
        from vitruvian.inference import Classifier
        from vitruvian.weights.hub import default_source
        from vitruvian.weights.zero_shot import parse_labels

    images = [] if out is not None else find_images(paths)  # before a model is downloaded for them
    model = default_source() if model is None else model
    words = None if labels is None else parse_labels(labels)
    arguments = {"labels": words, "template": template, **options.arguments()}
    if out is not None:
        from vitruvian.bulk.job import predict as run_predict

        run_predict(
            paths[0],
            model if bulk.on else Classifier(model, **arguments),
            out,
            top=top,
            **vars(bulk),
            track=partial(track_amounts, label="images"),
        )
        print(f"wrote predictions to {out}; `vit merge {out}` verifies them")
        return
    classifier = Classifier(model, **arguments)
    failed = 0
    for result in track(classifier.stream(images, top=top, batch_size=bulk.batch_size), len(images), "images"):
        failed += bool(result.error)
        print_result(result, as_json=as_json)
    if failed:
        if len(images) > 1:
            print_status(f"{failed} of {len(images)} images could not be read")
        raise typer.Exit(1)


def print_result(result: ImageResult, *, as_json: bool) -> None:
    """Print the predictions for an image; without JSON, an error goes to stderr."""
    if as_json:
        print(json.dumps(result.to_json()), flush=True)
    elif result.error:
        print_status(f"error: {result.error}")
    else:
        print(as_table(result), flush=True)


def as_table(result: ImageResult) -> str:
    """The path, whether the image was rejected, and one line per prediction with aligned percentages."""
    from vitruvian.text import printable

    labels = [printable(prediction.label) for prediction in result.predictions]
    width = max(map(len, labels))
    rows = [f"  {label:<{width}}  {p.probability:7.2%}" for label, p in zip(labels, result.predictions)]
    rejected = ["  rejected (none of the classes); the nearest:"] if result.rejected else []
    return "\n".join([printable(result.path), *rejected, *rows])
