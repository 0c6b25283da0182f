"""`vit evaluate`: how good is a model on these images?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    Batch,
    Device,
    Engine,
    EngineChoice,
    Heads,
    ImageSize,
    ModelName,
    ReportFolder,
    Template,
    TomeR,
    tome_of,
)
from vitruvian.cli.start import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_status, track

if TYPE_CHECKING:
    from vitruvian.evaluation.measuring.evaluate import Evaluation

SHOWN_UNREADABLE = 5
"""Unreadable files that are named on the terminal; a report lists more."""


def evaluate(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, or a built-in name.")],
    model: ModelName,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which split; else test, or val, or the only one.")
    ] = None,
    real: Annotated[Path | None, typer.Option(metavar="FILE", help="ImageNet-ReaL labels: real.json.")] = None,
    wordnet_ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What each output is, a WordNet id a line (21k models)."),
    ] = None,
    mappings: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="ObjectNet's mappings; found by itself beside its images.")
    ] = None,
    calibrated: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the model with the fitted temperature, which vit predict uses."),
    ] = None,
    template: Template = None,
    flip: Annotated[bool, typer.Option("--flip", help="Average the answers to an image and its mirror image.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the intervals and the calibration.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
    out: ReportFolder = None,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
    engine: Engine = EngineChoice.TORCH,
    tome_r: TomeR = None,
) -> None:
    """Measure a model: accuracy with intervals, ReaL, calibration.

    Every image counts, also those of a short last batch. Classes and outputs are matched by their names. A CLIP or
    SigLIP is measured zero-shot, with the names of the classes as its words.
    """
    with quick_imports():
        from vitruvian.evaluation.measuring.evaluate import evaluate as run_evaluation
        from vitruvian.evaluation.measuring.evaluate import save_calibrated
        from vitruvian.evaluation.report import write_evaluation
        from vitruvian.predict import Encoder

    found = run_evaluation(
        data,
        Encoder(
            model,
            num_heads=num_heads,
            image_size=image_size,
            device=device,
            engine=engine.value,
            tome_r=tome_of(tome_r),
        ),
        template=template,
        flip=flip,
        split=split,
        real=real,
        wordnet_ids=wordnet_ids,
        mappings=mappings,
        seed=seed,
        batch_size=batch_size,
        track=partial(track, label="images"),
    )
    print(json.dumps(found.to_json()) if as_json else as_table(found))
    complain(found)
    if out is not None:
        print_status(f"the report is {write_evaluation(found, out)}")
    if calibrated is not None:
        save_calibrated(found, calibrated)
        print_status(f"the calibrated model is {calibrated}")


def as_table(found: Evaluation) -> str:
    """Numbers with their intervals, under a line on what they were measured on."""
    from vitruvian.evaluation.measuring.intervals import LEVEL
    from vitruvian.evaluation.report import NAMES, evaluation_summary, interval_numbers
    from vitruvian.text import table

    rows = []
    for name, value in interval_numbers(found).items():
        low, high = found.intervals[name]
        rows.append((NAMES[name], f"{value:.2f}", f"{low:.2f} to {high:.2f}"))
    lines = [evaluation_summary(found), table(("", ">percent", f"{LEVEL:g}% interval"), rows)]
    if found.real is not None:
        lines.append(f"ReaL: {found.real_count:,} images have labels")
    fitted = found.calibration
    if fitted.before is not None and fitted.after is not None:
        lines.append(
            f"temperature {fitted.temperature:.3f}, fitted on {fitted.fitted_on}: "
            f"calibration error {fitted.before.error:.2f}% -> {fitted.after.error:.2f}% on the others"
        )
    elif fitted.obstacle:
        lines.append(f"no temperature was fitted: {fitted.obstacle}")
    return "\n".join(lines)


def complain(found: Evaluation) -> None:
    """What is not in the numbers, on stderr."""
    for key, why in list(found.unreadable.items())[:SHOWN_UNREADABLE]:
        print_status(f"not read: {key}: {why}")
    if found.unreadable:
        print_status(f"{len(found.unreadable):,} images could not be read and are not counted")
    if found.left_out:
        print_status(f"{found.left_out:,} images of classes that the model does not have are not counted")
    for note in found.notes:
        print_status(f"note: {note}")
