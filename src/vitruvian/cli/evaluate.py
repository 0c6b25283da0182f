"""`vit evaluate` and `vit probe`: how good a model or its frozen features are on these images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    Batch,
    Data,
    LoadOptions,
    ModelName,
    ModelOptions,
    OptionalModel,
    ReportFolder,
    Template,
    data_argument,
    expand_options,
    json_option,
    parse_numbers,
    split_names,
)
from vitruvian.cli.process import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_status, track
from vitruvian.text import plural

if TYPE_CHECKING:
    from vitruvian.evaluation.evaluate import Evaluation
    from vitruvian.evaluation.probe import ProbeReport

SHOWN_UNREADABLE = 5
"""Maximum number of unreadable files to list on the terminal; a report lists more."""


@expand_options
def evaluate(
    data: Data,
    model: ModelName,
    options: ModelOptions,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Split to use [default: test, val, or the only one].")
    ] = None,
    real: Annotated[Path | None, typer.Option(metavar="FILE", help="ImageNet-ReaL labels: real.json.")] = None,
    wordnet_ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="WordNet ids of the model's outputs, one per line (for 21k models)."),
    ] = None,
    mappings: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="ObjectNet's mappings [default: those beside its images].")
    ] = None,
    calibrated: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the model with the fitted temperature, which vit predict applies."),
    ] = None,
    template: Template = None,
    flip: Annotated[
        bool, typer.Option("--flip", help="Average the outputs for an image and its mirror image.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Random seed for intervals and calibration.")] = 0,
    as_json: Annotated[bool, json_option(" instead of the table")] = False,
    out: ReportFolder = None,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Measure a model: accuracy, confidence intervals, calibration.

    Every image counts, including those of a short last batch. Classes and outputs are matched by name. A CLIP or SigLIP
    is evaluated zero-shot, with the class names as labels.
    """
    with quick_imports():
        from vitruvian.evaluation.evaluate import evaluate as run_evaluation
        from vitruvian.evaluation.evaluate import save_calibrated
        from vitruvian.evaluation.report import write_evaluation
        from vitruvian.inference import Encoder

    evaluation = run_evaluation(
        data,
        Encoder(model, **options.arguments()),
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
    print(json.dumps(evaluation.to_json()) if as_json else evaluation_table(evaluation))
    print_warnings(evaluation)
    if out is not None:
        print_status(f"wrote {write_evaluation(evaluation, out)}")
    if calibrated is not None:
        save_calibrated(evaluation, calibrated)
        print_status(f"wrote the calibrated model to {calibrated}")


def evaluation_table(evaluation: Evaluation) -> str:
    """The measures with their intervals, under a line that says what they were measured on."""
    from vitruvian.evaluation.metrics import LEVEL
    from vitruvian.evaluation.report import NAMES, evaluation_summary, interval_numbers
    from vitruvian.text import table

    rows = []
    for name, value in interval_numbers(evaluation).items():
        low, high = evaluation.intervals[name]
        rows.append((NAMES[name], f"{value:.2f}", f"{low:.2f} to {high:.2f}"))
    lines = [evaluation_summary(evaluation), table(("", ">percent", f"{LEVEL:g}% interval"), rows)]
    if evaluation.real is not None:
        lines.append(f"ReaL: {evaluation.real_count:,} images have labels")
    calibration = evaluation.calibration
    if calibration.before is not None and calibration.after is not None:
        lines.append(
            f"temperature {calibration.temperature:.3f}, fitted on {calibration.fitted_on}: calibration error "
            f"{calibration.before.error:.2f}% -> {calibration.after.error:.2f}% on the others"
        )
    elif calibration.obstacle:
        lines.append(f"no temperature fitted: {calibration.obstacle}")
    return "\n".join(lines)


def print_warnings(evaluation: Evaluation) -> None:
    """Print skipped images and notes to stderr."""
    for key, reason in evaluation.unreadable[:SHOWN_UNREADABLE]:
        print_status(f"not read: {key}: {reason}")
    if evaluation.unreadable:
        print_status(f"not counted: {plural(len(evaluation.unreadable), 'unreadable image')}")
    if evaluation.left_out:
        print_status(f"not counted: {plural(evaluation.left_out, 'image')} of classes that the model does not have")
    for note in evaluation.notes:
        print_status(f"note: {note}")


@expand_options
def probe(
    options: LoadOptions,
    data: Annotated[str | None, data_argument()] = None,
    model: OptionalModel = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Vectors of `vit embed`, instead of DATA and --model.")
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="NAMES", help="Probes to run, separated by commas.")
    ] = "fewshot,linear,neighbors",
    shots: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Images per class of the few-shot probe [default: 1,5,10,25]."),
    ] = None,
    neighbors: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of neighbors that vote [default: chosen].")
    ] = None,
    as_json: Annotated[bool, json_option(" instead of the table")] = False,
    out: ReportFolder = None,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Measure frozen features: few-shot, linear, nearest neighbors.

    Features are computed once and stored in the cache directory ($VITRUVIAN_CACHE); probing again takes seconds.
    """
    if vectors is None and (data is None or model is None):
        raise typer.BadParameter("give DATA and --model, or --vectors")
    if vectors is not None and (data is not None or model is not None):
        raise typer.BadParameter("--vectors replaces DATA and --model, which its job.json names")
    shot_counts = None if shots is None else parse_numbers(shots, "--shots")
    with quick_imports():
        from vitruvian.evaluation.probe import probe as run_probe
        from vitruvian.evaluation.report import write_probe
        from vitruvian.inference import Encoder

    if vectors is not None:
        from vitruvian.bulk.result import probe_vectors

        reading = partial(track, label="parts")
        report = probe_vectors(vectors, only=split_names(only), shots=shot_counts, neighbors=neighbors, track=reading)
    else:
        assert model is not None
        report = run_probe(
            data,
            Encoder(model, **options.arguments()),
            only=split_names(only),
            shots=shot_counts,
            neighbors=neighbors,
            batch_size=batch_size,
            track=partial(track, label="features"),
        )
    print(json.dumps(report.to_json()) if as_json else probe_table(report))
    if report.unreadable:
        print_status(f"skipped {plural(len(report.unreadable), 'unreadable image')}")
    if out is not None:
        print_status(f"wrote {write_probe(report, out)}")


def probe_table(report: ProbeReport) -> str:
    from vitruvian.evaluation.report import probe_summary
    from vitruvian.text import table

    rows = []
    for result in report.results:
        spread = f"± {result.deviation:.2f}" if len(result.runs) > 1 else ""
        rows.append((result.probe, result.setting, f"{result.top1:.2f}", spread, f"{result.mean_per_class:.2f}"))
    notes = [f"note: {note}" for note in report.notes]
    return "\n".join(
        [probe_summary(report), *notes, table(("probe", "setting", ">top-1 %", "", ">mean per class %"), rows)]
    )
