"""The report of a run: one HTML file with curves, confusions, mistakes, data problems and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vitruvian.catalog import title_of
from vitruvian.config import ViTConfig
from vitruvian.data.doctor.classes import small_classes, uneven_classes
from vitruvian.data.sources.base import Source
from vitruvian.data.sources.subset import class_sizes
from vitruvian.evaluation.measuring.metrics import Measures
from vitruvian.evaluation.pages.sections import measure_sections, measure_tiles, unreadable_parts
from vitruvian.files import write_text
from vitruvian.report.chart import Chart
from vitruvian.report.chart import Line as Curve
from vitruvian.report.html import (
    PAGE,
    Html,
    columns,
    facts,
    heading,
    notice,
    page,
    paragraph,
    section,
    text,
    tiles,
)
from vitruvian.text import duration
from vitruvian.training.journal import Line
from vitruvian.training.masked import ColorMeasures
from vitruvian.training.masked_report import color_sections, color_tiles
from vitruvian.training.objective import Measured
from vitruvian.training.run import Run, environment
from vitruvian.weights.description import Description


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run knows at its end beside what its folder holds; whatever is missing is left out of the report."""

    train: Source
    measures: Measured | None = None
    """Of the model that the run gives, with the mistakes or examples that are to be shown."""
    held_out: Source | None = None
    """What the measures were taken on; without it mistakes have no images."""
    stopped: str = ""
    """Why the run ended before its last step; empty if it did not."""


def write_report(run: Run, outcome: Outcome) -> Path:
    """Write `report.html` into the run's folder and give its path; an older one stays until the new is complete."""
    title = f"{name_of(run)} on {Path(str(run.facts.get('data', 'unnamed data'))).name}"
    return write_text(run.folder / PAGE, page(title, sections(title, run, outcome)))


def name_of(run: Run) -> str:
    """What to call the model: what it is, and the weights that it started from."""
    model = title_of(Description.from_json(run.facts.get("model"), f"{run.folder}/run.json").config)
    return f"{model} from {Path(run.recipe.weights).name}" if run.recipe.weights else model


def sections(title: str, run: Run, outcome: Outcome) -> Iterator[Html]:
    lines, recorded = run.metrics(), run.facts
    yield heading(title, progress(outcome, lines))
    yield tiles(numbers(outcome, lines))
    if outcome.stopped:
        yield notice(f"The run ended early: {outcome.stopped}")
    if outcome.measures is None:
        yield notice("There were no held-out images to measure the model on, so its accuracy is not known.")
    drawn = list(curves(lines))
    if drawn:
        note = "Training loss is the recipe's, with its views and mixing; on held-out images it is cross-entropy."
        if run.recipe.objective == "masked":
            note = "Over the corrupted patches; held-out images are corrupted in the same way each time."
        yield section("Curves", columns(*drawn), note=note)
    if isinstance(outcome.measures, Measures):
        yield from measure_sections(outcome.measures, outcome.train.classes, outcome.held_out)
    elif isinstance(outcome.measures, ColorMeasures) and outcome.held_out is not None:
        model = Description.from_json(recorded.get("model"), f"{run.folder}/run.json")
        assert isinstance(model.config, ViTConfig)
        yield from color_sections(outcome.measures, model.preprocess, model.config.patch_size, outcome.held_out)
    yield section("Data", *data_problems(outcome.train, run.unreadable, recorded.get("notes", ())))
    yield section("Settings", facts({"model": name_of(run)} | run.recipe.shown()))
    yield section("Environment", facts(environment() | recorded.get("environment", {})))


def progress(outcome: Outcome, lines: list[Line]) -> str:
    """What the run did, in a line."""
    data = f"{len(outcome.train):,} training images of {len(outcome.train.classes):,} classes"
    if not lines:
        return f"{data}; no step is on record"
    return f"{data}, {lines[-1]['step']:,} steps, {lines[-1]['epoch']:.4g} epochs"


def numbers(outcome: Outcome, lines: list[Line]) -> dict[str, str]:
    values: dict[str, str] = {}
    if isinstance(outcome.measures, ColorMeasures):
        values = color_tiles(outcome.measures)
    elif isinstance(outcome.measures, Measures):
        values = measure_tiles(outcome.measures)
        values["held-out images"] = values.pop("images")
    return values | ({"training time": duration(lines[-1]["seconds"])} if lines and "seconds" in lines[-1] else {})


def data_problems(train: Source, unreadable: dict[str, str], notes: Iterable[str]) -> Iterator[Html]:
    """What the data set left out, classes that are small or unequal, and files that could not be read."""
    found = [*map(paragraph, notes)]
    if not train.remote:
        found += class_problems(train)
    found += unreadable_parts(unreadable)
    fine = "" if train.remote else ", and no class is small or far from the others"
    yield from found or [paragraph(f"Every image could be read{fine}.")]


def class_problems(train: Source) -> Iterator[Html]:
    counts = class_sizes(train.labels(), len(train.classes))
    for check in (small_classes, uneven_classes):
        for finding in check(counts, train.classes, "train"):
            examples = ", ".join(example.note for example in finding.examples)
            advice = f'<span class="soft">{text(finding.advice)}</span>'
            yield Html(f"<p>{text(finding.text)} ({text(examples)})<br>{advice}</p>")


CHARTS = (
    ("loss", "Loss"),
    ("top1", "Top-1 accuracy, %"),
    ("lr", "Learning rate"),
    ("images_per_second", "Images per second"),
)
"""What is drawn, and its title; a number that no line has is left out."""


def curves(lines: Iterable[Line]) -> Iterator[Html]:
    """A chart for each number, with a line for each split; what is called `val` may be a test split."""
    recorded = list(lines)
    names = {"": "run", "val": "held-out"}
    splits = list(dict.fromkeys(str(line.get("split", "")) for line in recorded))
    for name, title in CHARTS:
        drawn = [Curve(names.get(split, split), points(recorded, split, name)) for split in splits]
        drawn = [curve for curve in drawn if curve.points]
        if drawn:
            yield Chart(title=title, lines=drawn, x_label="step", y_from=0.0 if name != "top1" else None).svg()


def points(lines: Iterable[Line], split: str, name: str) -> list[tuple[float, float]]:
    """Step and value, in the order of steps; of lines with the same step, the last counts."""
    found = {
        float(line["step"]): float(line[name])
        for line in lines
        if str(line.get("split", "")) == split and isinstance(line.get(name), int | float)
    }
    return sorted(found.items())
