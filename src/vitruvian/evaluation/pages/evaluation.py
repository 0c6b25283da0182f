"""The page of an evaluation: accuracies with intervals, calibration, confusions, mistakes, classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitruvian.evaluation.measuring.calibration import BINS, Calibration, Reliability
from vitruvian.evaluation.measuring.evaluate import Evaluation
from vitruvian.evaluation.measuring.intervals import LEVEL
from vitruvian.evaluation.measuring.metrics import MEASURE_NAMES
from vitruvian.evaluation.pages.sections import measure_sections, measure_tiles, unreadable_parts
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import (
    Html,
    columns,
    heading,
    notice,
    page,
    paragraph,
    remark,
    section,
    short_name,
    table,
    tiles,
    write_report,
)

NAMES = MEASURE_NAMES | {
    "real": "ReaL accuracy",
    "top1_among_all_outputs": "top-1 among all outputs",
    "calibration_error": "calibration error",
}
"""What the numbers that have an interval are called."""


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """Write evaluation.json and report.html into a folder, and give the path of the page."""
    title = f"{short_name(evaluation.model)} on {Path(evaluation.data).name}"
    made = page(title, sections(title, evaluation))
    return write_report(folder, name="evaluation.json", numbers=evaluation.to_json(), page=made)


def sections(title: str, evaluation: Evaluation) -> Iterator[Html]:
    yield heading(title, summary(evaluation))
    values = measure_tiles(evaluation.measures)
    if evaluation.real is not None:
        values[NAMES["real"]] = f"{evaluation.real:.2f} %"
    values[NAMES["calibration_error"]] = f"{evaluation.calibration.now.error:.2f} %"
    yield tiles(values)
    if evaluation.unreadable:
        yield notice(f"{len(evaluation.unreadable):,} images could not be read and are not counted.")
    if evaluation.left_out:
        yield notice(f"{evaluation.left_out:,} images are of classes that the model does not have, and not counted.")
    rows = [
        (NAMES[name], value, Html("{:.2f} to {:.2f}".format(*evaluation.intervals[name])))
        for name, value in shown_numbers(evaluation).items()
    ]
    yield section(
        "Accuracy",
        table(["", "percent", f"{LEVEL:g} % interval"], rows),
        note="What chance in the choice of images can do; intervals by Wilson, that of calibration by bootstrap.",
    )
    yield section("Calibration", *calibration_parts(evaluation.calibration))
    yield from measure_sections(evaluation.measures, evaluation.space.classes, evaluation.source)
    if evaluation.unreadable:
        yield section("Images that could not be read", *unreadable_parts(evaluation.unreadable))
    if evaluation.notes:
        yield section("Data", *map(paragraph, evaluation.notes))


def summary(evaluation: Evaluation) -> str:
    space, count = evaluation.space, evaluation.measures.count
    line = f"{count:,} images of {evaluation.part}, {len(space.classes):,} classes"
    line += f" matched with the model's outputs by {space.about}"
    if evaluation.restricted:
        line += f"; {space.competing:,} of the model's {space.total:,} outputs compete"
    return line + ("; each answered together with its mirror image" if evaluation.classifier.flip else "")


def shown_numbers(evaluation: Evaluation) -> dict[str, float]:
    """The numbers that have an interval, in the order in which they are shown."""
    measures = evaluation.measures
    found = {"top1": measures.top1}
    if measures.top5_tells:
        found["top5"] = measures.top5
    found["mean_per_class"] = measures.mean_per_class
    if evaluation.real is not None:
        found["real"] = evaluation.real
    if evaluation.restricted:
        found["top1_among_all_outputs"] = evaluation.among_all
    return found | {"calibration_error": evaluation.calibration.now.error}


def calibration_parts(found: Calibration) -> Iterator[Html]:
    lines = [Line("as it should be", [(0.0, 0.0), (100.0, 100.0)]), curve("the model", found.before or found.now)]
    if found.after is not None:
        lines.append(curve("with the fitted temperature", found.after))
    title = "Reliability: accuracy against probability, in percent"
    chart = Chart(title=title, lines=lines, x_label="probability", y_from=0.0)
    note = (
        f"Images are put into {BINS} bins by the probability of the best answer. Below the diagonal the model is "
        "too sure of itself, above it not sure enough."
    )
    yield remark(note)
    stages = {"all images": found.now, "not fitted on, now": found.before, "not fitted on, fitted": found.after}
    rows = [(name, stage.temperature, stage.error, stage.loss) for name, stage in stages.items() if stage is not None]
    yield columns(chart.svg(), table(["", "temperature", "calibration error %", "cross-entropy"], rows))
    if found.temperature is None:
        yield notice(f"No temperature was fitted: {found.obstacle}.")
    else:
        yield remark(f"The temperature was fitted on {found.fitted_on}.")


def curve(name: str, found: Reliability) -> Line:
    return Line(name, [(part.confidence, part.accuracy) for part in found.bins])
