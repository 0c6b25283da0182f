"""`vit evaluate`, `vit compare`, `vit probe`, `vit advise`: how good models are on these images, or could become."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import data_argument, expand_options, flag, import_torch, option, parse_numbers, split_names
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_notes, print_status, track
from vitruvian.text import plural, table

if TYPE_CHECKING:
    from vitruvian.evaluation.evaluate import Evaluation, TargetEvaluation

SHOWN_UNREADABLE = 5  # files to list on the terminal; a report lists more
WORDNET_IDS = option("FILE", "WordNet ids of the model's outputs, one per line (for 21k models).")
MAPPINGS = option("FOLDER", "ObjectNet's mappings [default: those beside its images].")
CALIBRATED = option("FOLDER", "Save the model with the fitted temperature, prediction sets and threshold.")
BY = option("COLUMN", "Accuracy per value of this column of the manifest, or of a regular expression on the path.")
UNKNOWN = option("FOLDER", "Images of none of the classes: fit a threshold that rejects such images.")
COVERAGE = option("SHARE", "Fit prediction sets with this coverage of the true label, such as 0.95.")
OUT_OF_FOLD = option("FILE", "With --folds: a .csv file for the linear probe's predictions, for `vit doctor`.")
SHOWN_SLICES = 20
SHOWN_DIFFERENCES = 10  # classes and images to list on the terminal
SAVE = option("MODEL", "Save the linear probe as a model, a new directory for --model.", "--save")
ADVISED = option("W", f"Weights: {opt.WEIGHTS}; repeatable [default: those in the cache].", "--model", "-m")
SHOTS = option("N,N,...", "Images per class of the few-shot probe [default: 1,5,10,25].")


@expand_options
def evaluate(
    data: Annotated[str, data_argument()],
    model: opt.ModelName,
    options: opt.ModelOptions,
    split: Annotated[str | None, option("NAME", "Split to use [default: test, val, or the only one].")] = None,
    real: Annotated[Path | None, option("FILE", "ImageNet-ReaL labels: real.json.")] = None,
    wordnet_ids: Annotated[Path | None, WORDNET_IDS] = None,
    mappings: Annotated[Path | None, MAPPINGS] = None,
    by: Annotated[str | None, BY] = None,
    coverage: Annotated[float | None, COVERAGE] = None,
    corruptions: Annotated[
        str | None, option("NAMES", "Accuracy under corruptions of ImageNet-C: all, or names.")
    ] = None,
    sample: Annotated[int, option("N", "With --corruptions: only N images, classes balanced.", min=0)] = 0,
    unknown: Annotated[str | None, UNKNOWN] = None,
    calibrated: Annotated[Path | None, CALIBRATED] = None,
    template: opt.Template = None,
    flip: Annotated[bool, flag("--flip", "Average the outputs for an image and its mirror image.")] = False,
    seed: Annotated[int, option("N", "Random seed for intervals and calibration.", min=0)] = 0,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the table.")] = False,
    out: opt.ReportFolder = None,
    batch_size: opt.Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Measure a model: accuracy, confidence intervals, calibration.

    Every image counts, including those of a short last batch. Classes and outputs are matched by name. A CLIP or SigLIP
    is evaluated zero-shot, with the class names as labels.
    """
    import_torch()
    from vitruvian.evaluation.evaluate import save_calibrated
    from vitruvian.evaluation.report import write_evaluation
    from vitruvian.inference import Encoder

    labels: Any = {"real": real, "wordnet_ids": wordnet_ids, "mappings": mappings, "template": template}
    run: Any = {"flip": flip, "seed": seed, "batch_size": batch_size, "track": partial(track, label="images")}
    names = split_names(corruptions or "")
    more: Any = {"by": by or "", "coverage": coverage, "unknown": unknown, "corruptions": names, "sample": sample}
    evaluation = vt.evaluate(data, Encoder(model, **vars(options)), split=split, **labels, **more, **run)
    print(json.dumps(evaluation.to_json()) if as_json else evaluation_table(evaluation))
    for key, reason in evaluation.unreadable[:SHOWN_UNREADABLE]:
        print_status(f"not read: {key}: {reason}")
    if evaluation.unreadable:
        print_status(f"not counted: {plural(len(evaluation.unreadable), 'unreadable image')}")
    if evaluation.left_out:
        print_status(f"not counted: {plural(evaluation.left_out, 'image')} of classes that the model does not have")
    print_notes(evaluation.notes)
    if out is not None:
        print_status(f"wrote {write_evaluation(evaluation, out)}")
    if calibrated is not None:
        print_notes(save_calibrated(evaluation, calibrated))
        print_status(f"wrote the calibrated model to {calibrated}")


def evaluation_table(evaluation: "Evaluation | TargetEvaluation") -> str:
    """Format the measures with their intervals, under a line that says what they were measured on."""
    from vitruvian.evaluation.evaluate import TargetEvaluation as OfTargets
    from vitruvian.evaluation.evaluate import metric_table

    lines = [evaluation.summary, table(*metric_table(evaluation))]
    if isinstance(evaluation, OfTargets):
        return "\n".join([*lines, *sets_and_slices(evaluation), *corruptions_of(evaluation)])
    if evaluation.real is not None:
        lines.append(f"ReaL: {len(evaluation.right['real']):,} images have labels")
    if evaluation.space.is_mapped:
        from vitruvian.study.paper import paper_rows

        (row,) = paper_rows("objectnet")
        published = f"top-1 {row.text('top1')}, top-5 {row.text('top5')}"
        lines.append(f"the paper on ObjectNet, among all outputs: {row.name}, {published}")
    calibration = evaluation.calibration
    if calibration.before is not None and calibration.after is not None:
        lines.append(
            f"temperature {calibration.temperature:.3f}, fitted on {calibration.fitted_on}: calibration error "
            f"{calibration.before.error:.2f}% -> {calibration.after.error:.2f}% on the others"
        )
    elif calibration.obstacle:
        lines.append(f"no temperature fitted: {calibration.obstacle}")
    lines += sets_and_slices(evaluation)
    if evaluation.rejection is not None:
        rejection = evaluation.rejection
        cells = [(name, f"{value:.2f}", f"{rejection.fpr[name]:.2f}") for name, value in rejection.auroc.items()]
        lines += ["\n" + table(("score", ">AUROC %", ">FPR at 95% TPR"), cells), str(rejection)]
    return "\n".join([*lines, *corruptions_of(evaluation)])


def corruptions_of(evaluation: "Evaluation | TargetEvaluation") -> list[str]:
    """A table of the corruptions and a line about their mean, if there are any."""
    from vitruvian.evaluation import report

    result = evaluation.corruptions
    if result is None:
        return []
    return ["\n" + table(report.CORRUPTION_TITLES, result.rows()), report.describe_corruptions(result)]


def sets_and_slices(evaluation: "Evaluation | TargetEvaluation") -> list[str]:
    """A line about the prediction sets, and a table of the slices, if there are any."""
    from vitruvian.evaluation import report

    lines = [] if evaluation.sets is None else [report.describe_sets(evaluation.sets)]
    if evaluation.slices:
        titles, rows = report.slice_table(evaluation)
        lines.append("\n" + table(titles, rows[:SHOWN_SLICES]))
        if len(evaluation.slices) > SHOWN_SLICES:
            lines.append(f"the worst {SHOWN_SLICES} of {len(evaluation.slices):,}; --json has all")
        lines.append(report.describe_worst(evaluation))
    return lines


@expand_options
def compare(
    models: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs or weights; the first is the baseline.")],
    options: opt.ModelOptions,
    data: Annotated[str | None, option("DATA", "Data to compare on [default: what all runs held out].")] = None,
    split: Annotated[str | None, option("NAME", "Split of DATA [default: test, val, or the only one].")] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the tables.")] = False,
    out: opt.ReportFolder = None,
    batch_size: opt.Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Compare runs or models image by image: is the difference real?

    Prints the paired difference of each model from the first with its interval, the classes and the settings in which
    they differ, and the images that they classify differently.
    """
    import_torch()
    from vitruvian.inference import Encoder
    from vitruvian.study.compare import describe_pair, write_comparison

    if len(models) < 2:
        raise typer.BadParameter("give at least two", param_hint="RUN...")
    encoders = [Encoder(model, **vars(options)) for model in models]
    follow = partial(track, label="images")
    result = vt.compare(encoders, data, split=split, batch_size=batch_size, track=follow)
    if as_json:
        print(json.dumps(result.to_json()))
    else:
        print(f"{result.summary}\n{table(*result.table())}")
        print("\n".join(describe_pair(pair, result.models[0], result.metric) for pair in result.pairs))
        rows = [(name, f"{n:,}", *map(result.format, values)) for name, n, values in result.classes]
        names = [f">{name}" for name in result.models]
        print("\n" + table(("class", ">images", *names), rows[:SHOWN_DIFFERENCES]))
        if result.settings:
            print("\n" + table(("setting", *result.models), [(n, *v) for n, v in result.settings.items()]))
        if result.images:
            shown = [(image.key, image.label, *image.predictions) for image in result.images[:SHOWN_DIFFERENCES]]
            print("\n" + table(("image", "label", *result.models), shown))
            print(f"{len(result.images):,} images have different predictions; --json has all")
    print_notes(result.notes)
    if out is not None:
        print_status(f"wrote {write_comparison(result, out)}")


@expand_options
def probe(
    options: opt.ModelOptions,
    data: Annotated[str | None, data_argument()] = None,
    model: opt.OptionalModel = None,
    vectors: Annotated[str | None, option("FOLDER", "Vectors of `vit embed`, instead of DATA and --model.")] = None,
    only: Annotated[str, option("NAMES", "Probes to run, separated by commas.")] = "fewshot,linear,neighbors",
    shots: Annotated[str | None, SHOTS] = None,
    neighbors: Annotated[int | None, option("N", "Number of neighbors that vote [default: chosen].", min=1)] = None,
    group_by: opt.GroupBy = None,
    target: opt.TargetName = None,
    folds: Annotated[int | None, option("K", "Cross-validate in K folds, without the test split.", min=2)] = None,
    predictions: Annotated[Path | None, OUT_OF_FOLD] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the table.")] = False,
    save_to: Annotated[Path | None, SAVE] = None,
    out: opt.ReportFolder = None,
    batch_size: opt.Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Measure frozen features: few-shot, linear, nearest neighbors.

    Features are computed once and stored in the cache directory ($VITRUVIAN_CACHE); probing again takes seconds.
    """
    if save_to is not None and vectors is not None:
        raise typer.BadParameter("--save needs DATA and --model: vectors come without a model")
    if save_to is not None and save_to.exists():
        raise typer.BadParameter(f"{save_to} exists", param_hint="--save")
    if vectors is None and (data is None or model is None):
        raise typer.BadParameter("give DATA and --model, or --vectors")
    if vectors is not None and (data is not None or model is not None):
        raise typer.BadParameter("--vectors replaces DATA and --model, which its job.json names")
    if vectors is not None and (group_by or folds):
        raise typer.BadParameter("--group-by and --folds need DATA and --model, not --vectors")
    if predictions is not None and (folds is None or "linear" not in split_names(only)):
        raise typer.BadParameter("--predictions needs --folds and the linear probe")
    shot_counts = None if shots is None else parse_numbers(shots, "--shots", "1,5,all")
    probes: dict[str, Any] = {"only": split_names(only), "shots": shot_counts, "neighbors": neighbors}
    import_torch()
    from vitruvian.evaluation.report import write_probe
    from vitruvian.inference import Encoder

    if vectors is not None:
        from vitruvian.bulk.result import probe_vectors

        report = probe_vectors(vectors, track=partial(track, label="parts"), **probes)
    else:
        assert model is not None
        encoder, follow = Encoder(model, **vars(options)), partial(track, label="features")
        probes |= {"group_by": group_by or "", "folds": folds or 0, "predictions": predictions}
        report = vt.probe(data, encoder, target=target or "auto", batch_size=batch_size, track=follow, **probes)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print("\n".join([report.summary, *(f"note: {note}" for note in report.notes)]))
        if report.results:
            print(table(*report.table()))
    if report.unreadable:
        print_status(f"skipped {plural(len(report.unreadable), 'unreadable image')}")
    if out is not None:
        print_status(f"wrote {write_probe(report, out)}")
    if save_to is not None:
        from vitruvian.training.initial_model import probe_model

        few = max(shot_counts) if shot_counts and "linear" not in probes["only"] else 0
        chosen: Any = {"shots": few, "group_by": group_by or "", "target": target or "auto", "batch_size": batch_size}
        vt.save(probe_model(data, encoder, **chosen), save_to)
        print_status(f"wrote the probe to {save_to} (vit predict IMAGES --model {save_to})")


def advise(
    data: Annotated[str, data_argument()],
    models: Annotated[list[str] | None, ADVISED] = None,
    minutes: Annotated[float, option("N", "Time for the advice, and for what it may recommend.", min=0.01)] = 30.0,
    html: Annotated[Path | None, option("FILE", "Write a page, with sample images and doubtful labels.")] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the table.")] = False,
) -> None:
    """Examine data, try what is cheap, predict the rest, recommend.

    Each option has an expected accuracy with its interval, and its time, size and speed on this machine.
    """
    import_torch()
    from vitruvian.study.advise import HEADINGS

    advice = vt.advise(data, models or (), minutes=minutes, html=html)
    if as_json:
        print(json.dumps(advice.to_json()))
    else:
        print("\n".join([advice.summary, *(f"  {finding}" for finding in advice.findings), ""]))
        print(table(HEADINGS, [option.cells for option in advice.options]))
        print(f"\nmeasured on {advice.test_is}\n{advice.more_images}\n\nrecommended: {advice.reason}")
        print(f"  {advice.recommended.command}" if advice.recommended else "")
    print_notes([*advice.notes, *([f"wrote {html}"] if html else [])])
