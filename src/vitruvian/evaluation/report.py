"""Reports of evaluations and probes, and the sections on metrics that training reports share."""

from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image, ImageColor

from vitruvian.data.doctor.doctor_report import thumbnail_of
from vitruvian.data.sources import Source
from vitruvian.evaluation import metrics
from vitruvian.evaluation.calibration import BINS
from vitruvian.evaluation.conformal import ConformalSets
from vitruvian.evaluation.corruptions import STRENGTHS, CorruptionResult
from vitruvian.evaluation.evaluate import NAMES, Evaluation, TargetEvaluation
from vitruvian.evaluation.probe import ProbeReport
from vitruvian.evaluation.probe_classifiers import SEEDS
from vitruvian.evaluation.target_metrics import NumberMeasures, TargetMeasures
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import COLORS
from vitruvian.report.html import embed_image, percent_bar, render, short_name, write_report
from vitruvian.targets import KINDS
from vitruvian.text import printable


def write_evaluation(evaluation: Evaluation | TargetEvaluation, folder: Path) -> Path:
    """Write evaluation.json and report.html into a new folder; returns the path of the page."""
    (slice_titles, slices), corruptions = slice_table(evaluation), evaluation.corruptions
    if isinstance(evaluation, TargetEvaluation):
        sections = target_sections(evaluation.measures, evaluation.source)
        facts: dict[str, Any] = {"tile_values": measure_tiles(evaluation.measures), "measures": sections}
    else:
        facts = class_facts(evaluation)
    page = render(
        "evaluation.html",
        title=f"{short_name(evaluation.model)} on {Path(evaluation.data).name}",
        subtitle=evaluation.summary,
        unreadable_images=dict(evaluation.unreadable),
        excluded=evaluation.left_out,
        level=metrics.LEVEL,
        notes=evaluation.notes,
        sets="" if evaluation.sets is None else describe_sets(evaluation.sets),
        by=evaluation.by,
        slice_titles=slice_titles,
        slices=slices,
        worst=describe_worst(evaluation) if evaluation.slices else "",
        corruption_titles=CORRUPTION_TITLES,
        corruptions=[] if corruptions is None else corruptions.rows(),
        corrupted="" if corruptions is None else describe_corruptions(corruptions),
        **facts,
    )
    return write_report(folder, name="evaluation.json", numbers=evaluation.to_json(), page=page)


def class_facts(evaluation: Evaluation) -> dict[str, Any]:
    """Template variables of an evaluation of one class per image."""
    calibration = evaluation.calibration
    tiles = measure_tiles(evaluation.measures)
    if evaluation.space.is_mapped:
        headline = {NAMES[f"{name}_among_all_outputs"]: f"{value:.2f} %" for name, value in evaluation.headline.items()}
        tiles = headline | tiles
    if evaluation.real is not None:
        tiles[NAMES["real"]] = f"{evaluation.real:.2f} %"
    tiles[NAMES["calibration_error"]] = f"{calibration.now.error:.2f} %"
    names = ("all images", "other images, before", "other images, after")
    stages = zip(names, (calibration.now, calibration.before, calibration.after))
    curves = {"this model": calibration.before or calibration.now, "with the fitted temperature": calibration.after}
    lines = [Line("perfectly calibrated", [(0.0, 0.0), (100.0, 100.0)])]
    lines += [Line(name, [(b.confidence, b.accuracy) for b in curve.bins]) for name, curve in curves.items() if curve]
    return {
        "tile_values": tiles,
        "bins": BINS,
        "accuracies": [
            (NAMES[name], value, "{:.2f} to {:.2f}".format(*evaluation.intervals[name]))
            for name, value in evaluation.numbers.items()
        ],
        "reliability": Chart(title="Reliability: accuracy in %", lines=lines, x_label="probability in %", y_from=0.0),
        "calibration": [(name, s.temperature, s.error, s.loss) for name, s in stages if s is not None],
        "no_temperature": calibration.obstacle if calibration.temperature is None else "",
        "fitted_on": calibration.fitted_on,
        "rejection": evaluation.rejection,
        "measures": measure_sections(evaluation.measures, evaluation.space.classes, evaluation.source),
    }


SET_TEXTS = {
    "single": ("prediction sets", "contain the label", "classes"),
    "multi": ("prediction sets", "contain all their labels", "labels"),
}
"""For each kind of target: the name of the result, what it guarantees, and what a set consists of."""
INTERVAL_TEXTS = ("prediction intervals", "contain the number", "")


def describe_sets(sets: ConformalSets) -> str:
    """Target coverage, measured coverage and size of prediction sets in one line."""
    name, guarantee, members = SET_TEXTS.get(sets.kind, INTERVAL_TEXTS)
    measured = "{:.2f}% ({:.2f} to {:.2f})".format(sets.coverage, *sets.interval)
    sizes = "half of their width: " + ", ".join(f"{-threshold:.4g}" for threshold in sets.thresholds)
    if sets.mean_size is not None:
        sizes = f"{sets.mean_size:.2f} {members} on average, {sets.single:.1f}% have one and {sets.empty:.1f}% none"
    chance = "{:.1f} to {:.1f}%".format(*sets.expected)
    return (
        f"{name} for {sets.requested:g}%, fitted on {sets.fitted_on}: {measured} of {sets.count:,} images {guarantee}, "
        f"{sizes}; expected coverage of new images, with this many images to fit on: {chance}"
    )


CORRUPTION_TITLES = ("corruption", *(f">strength {strength}" for strength in range(1, STRENGTHS + 1)), ">mean")


def describe_corruptions(result: CorruptionResult) -> str:
    """The mean over corruptions in one line."""
    text = metrics.number_format(result.metric).format
    mean, ends = metrics.METRIC_TEXTS[result.metric].format(result.mean), map(text, result.interval)
    ways = f"{len(result.kinds)} corruptions at {STRENGTHS} strengths"
    return f"{mean} ({' to '.join(ends)}) on {result.count:,} images, mean over {ways}"


def slice_table(evaluation: Evaluation | TargetEvaluation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings, and name, images, metric and interval of each slice, the worst first."""
    metric = evaluation.measures.metric
    text = metrics.number_format(metric)
    return (
        evaluation.by,
        ">images",
        f">{(metrics.TARGET_NAMES | {'top1': 'top-1 accuracy, %'})[metric]}",
        f"{metrics.LEVEL:g}% interval",
    ), [
        (s.name, f"{s.count:,}", text.format(s.value), f"{text} to {text}".format(*s.interval))
        for s in evaluation.slices
    ]


def describe_worst(evaluation: Evaluation | TargetEvaluation) -> str:
    """The worst slice compared with all images, in one line."""
    metric, worst = evaluation.measures.metric, evaluation.slices[0]
    total = evaluation.measures.scalars()[metric]
    low, high = worst.interval
    certain = ", which may be chance: its interval contains that" if low <= total <= high else ""
    where, text = f"{evaluation.by} {printable(worst.name) or '(empty)'}", metrics.METRIC_TEXTS[metric].format
    return f"worst: {where}, {text(worst.value)} on {worst.count:,} images; all images {text(total)}{certain}"


def write_probe(report: ProbeReport, folder: Path) -> Path:
    """Write probe.json and report.html into a new folder; returns the path of the page."""
    results = report.results
    shots = [(float(r.setting.removesuffix("-shot")), r.top1) for r in results if r.probe == "few-shot"]
    headings, rows = report.table()
    page = render(
        "probe.html",
        title=f"{short_name(report.model)} probed on {Path(report.data).name}",
        subtitle=report.summary,
        tile_values={f"{r.probe}, {r.setting}": with_interval(r.top1, r.interval) for r in results if r.interval},
        draws=len(SEEDS),
        headings=headings,
        rows=rows,
        chart=Chart(title="Few-shot top-1, %", lines=[Line("mean over seeds", shots)], x_label="images per class")
        if len(shots) > 1 and report.target == "single"
        else None,
        tried=[(result.probe, result.tried) for result in results if result.tried],
        notes=report.notes,
        unreadable_images=report.unreadable,
    )
    return write_report(folder, name="probe.json", numbers=report.to_json(), page=page)


def measure_tiles(measures: metrics.Measures | TargetMeasures) -> dict[str, str]:
    """The single numbers by display name, with their intervals."""
    numbers, ends = measures.scalars(), measures.intervals()
    names, text = metrics.TARGET_NAMES, "{:.4g} ({:.4g} to {:.4g})"
    if isinstance(measures, metrics.Measures):
        names, text = dict(metrics.MEASURE_NAMES), "{:.2f} % ({:.1f} to {:.1f})"
        if not measures.is_top5_meaningful:
            del names["top5"]
    tiles = {title: text.format(numbers[name], *ends[name]) for name, title in names.items() if name in numbers}
    if isinstance(measures, NumberMeasures):
        tiles[f"values inside their {measures.target.coverage:.0%} interval"] = f"{measures.covered:.1f} %"
    elif isinstance(measures, metrics.Measures):
        if measures.confusion is not None:
            tiles["mean F1"] = with_interval(*metrics.mean_f1(measures.confusion))
        tiles[measures.loss_name] = f"{measures.loss:.4f}"
    return tiles | {"images": f"{measures.count:,}"}


def with_interval(percent: float, interval: metrics.Interval) -> str:
    """`94.74 % (75.4 to 99.1)`."""
    return f"{percent:.2f} % ({interval[0]:.1f} to {interval[1]:.1f})"


def measure_sections(measures: metrics.Measures, classes: Sequence[str], source: Source | None = None) -> Markup:
    """Confusion matrix, most confident mistakes with their images from `source`, and classes, worst first."""
    mistakes = []
    for row in measures.mistakes[: metrics.SHOWN_MISTAKES] if source is not None else ():
        assert source is not None
        index, percent = int(measures.indices[row]), 100 * measures.probabilities[row]
        text = {"prediction": classes[measures.predictions[row]], "label": classes[measures.labels[row]]}
        image = {"image": thumbnail_of(source, index), "key": source.key(index)}
        mistakes.append(image | text | {"percent": percent})
    counts, correct, accuracy = measures.class_counts, measures.class_correct, measures.class_accuracy
    worst_first = np.lexsort((-counts, np.nan_to_num(accuracy, nan=np.inf)))  # classes without images come last
    return render(
        "measures.html",
        confusion=None if measures.confusion is None else confusion_part(measures.confusion, classes),
        matrix=len(classes) <= MAX_MATRIX_CLASSES,
        mistakes=mistakes,
        classes=[
            (classes[i], int(counts[i]), int(correct[i]), *starmap(percent_bar, measures.class_rates(i)))
            for i in worst_first
        ],
    )


def target_sections(measures: TargetMeasures, source: Source | None = None) -> Markup:
    """Metrics of each label or number, the worst predictions with their images, and charts of numbers."""
    outputs = measures.per_output()
    (_, counts), (_, first), *_ = outputs.items()
    is_number = isinstance(measures, NumberMeasures)
    order = np.lexsort((-counts, np.nan_to_num(-first if is_number else first, nan=np.inf)))
    errors = np.nan_to_num(np.abs(measures.scores - measures.targets))
    errors = errors / np.maximum(errors.mean(axis=0), 1e-12) if is_number else errors
    worst = np.argsort(-errors, axis=None, kind="stable")[: metrics.SHOWN_MISTAKES]
    mistakes = []
    for row, column in (divmod(int(cell), len(measures.names)) for cell in worst if source is not None):
        index, truth = int(measures.indices[row]), measures.targets[row, column]
        said, name = measures.scores[row, column], measures.names[column]
        text = f"{said:.4g} for {truth:.4g}" if is_number else f"{said:.1%}, labeled {'yes' if truth else 'no'}"
        assert source is not None
        mistakes.append({"image": thumbnail_of(source, index), "name": name, "text": text, "key": source.key(index)})
    charts = []
    for column, name in enumerate(measures.names[:MAX_CHARTS] if is_number else ()):
        known = np.flatnonzero(measures.known[:, column])
        known = known[:: -(-len(known) // MAX_DOTS)]
        truth, said = measures.targets[known, column].tolist(), measures.scores[known, column].tolist()
        ends = [(min(truth), min(truth)), (max(truth), max(truth))]
        for title, points, line in (
            (f"{name}: predicted", list(zip(truth, said)), ends),
            (f"{name}: predicted minus true", [(t, s - t) for t, s in zip(truth, said)], [(t, 0.0) for t, _ in ends]),
        ):
            dots, exact = Line("images", points, scatter=True), Line("exact", line)
            charts.append(Chart(title=title, lines=[dots, exact], x_label="true value"))
    return render(
        "targets.html",
        noun=KINDS[measures.target.kind].noun,
        headings=[">" + name for name in outputs],
        rows=[(measures.names[k], *(format_cell(values[k]) for values in outputs.values())) for k in order],
        mistakes=mistakes,
        charts=charts,
    )


def format_cell(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


# K classes; rows are labels, columns predictions

MAX_CHARTS, MAX_DOTS = 4, 400  # columns of numbers with charts, and dots in each

MAX_MATRIX_CLASSES = 30  # up to this many classes, the confusion matrix is a table of counts; above, an image
MAX_PAIRS = 20
MAX_IMAGE_SIDE = 512  # in pixels; with more classes, a pixel shows the maximum of several cells
RIGHT, WRONG = (ImageColor.getrgb(color) for color in COLORS[:2])


def confusion_part(confusion: metrics.Counts, classes: Sequence[str]) -> Markup:
    """The confusion matrix as a table of counts, or as an image with the most confused pairs."""
    if len(classes) <= MAX_MATRIX_CLASSES:
        rows = [list(zip(*pair)) for pair in zip(confusion.tolist(), opacity(row_fractions(confusion)).tolist())]
        return render("confusion.html", image=None, classes=list(classes), rows=rows)
    return render("confusion.html", image=confusion_image(confusion), pairs=list(confused_pairs(confusion, classes)))


def row_fractions(confusion: metrics.Counts) -> NDArray[np.float64]:
    """Each row divided by its sum; zeros for a class without images."""
    return np.asarray(confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1))


def opacity(fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Opacity of a cell's color. The square root keeps a few mistakes among many correct predictions visible."""
    return np.where(fraction > 0, 0.15 + 0.85 * np.sqrt(fraction), 0.0)


def confused_pairs(confusion: metrics.Counts, classes: Sequence[str]) -> Iterator[tuple[str, str, int, str]]:
    """Label, prediction, count and fraction of the label's images, most frequent first, at most MAX_PAIRS."""
    wrong = confusion.copy()
    np.fill_diagonal(wrong, 0)
    fractions = row_fractions(confusion)
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:MAX_PAIRS].tolist():
        row, column = divmod(cell, len(classes))
        if wrong[row, column]:
            yield classes[row], classes[column], int(wrong[row, column]), f"{fractions[row, column]:.0%}"


def confusion_image(confusion: metrics.Counts) -> Markup:
    """The confusion matrix with one pixel per cell or block of cells; empty cells are transparent."""
    fractions = row_fractions(confusion)
    block = -(-len(fractions) // MAX_IMAGE_SIDE)
    diagonal, starts = np.diag(np.diag(fractions)), np.arange(0, len(fractions), block)
    right, wrong = (
        np.maximum.reduceat(np.maximum.reduceat(part, starts, axis=0), starts, axis=1)  # the maximum of each block
        for part in (diagonal, fractions - diagonal)
    )
    pixels = np.zeros((*right.shape, 4), np.uint8)
    pixels[..., :3] = np.where((right >= wrong)[..., None], RIGHT, WRONG)
    pixels[..., 3] = np.round(255 * opacity(np.maximum(right, wrong)))
    alt = f"confusion matrix of {len(fractions)} classes: true class downwards, predicted class across"
    return embed_image(Image.fromarray(pixels), alt, kind="map")
