"""The report of a run: one HTML file with curves, confusions, mistakes, data problems and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitruvian.catalog import title_of
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.doctor.checks import small_classes, uneven_classes
from vitruvian.data.sources import Source, class_sizes
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
from vitruvian.report.images import TINY_SIDE, embedded, gallery
from vitruvian.text import format_duration, plural
from vitruvian.training.journal import Line
from vitruvian.training.masked import ColorMeasures, Example, corruption_of, cut, levels_of, shown_color
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
    epochs = lines[-1]["epoch"]
    return f"{data}, {plural(lines[-1]['step'], 'step')}, {epochs:.4g} epoch{'' if epochs == 1 else 's'}"


def numbers(outcome: Outcome, lines: list[Line]) -> dict[str, str]:
    values: dict[str, str] = {}
    if isinstance(outcome.measures, ColorMeasures):
        values = color_tiles(outcome.measures)
    elif isinstance(outcome.measures, Measures):
        values = measure_tiles(outcome.measures)
        values["held-out images"] = values.pop("images")
    return values | (
        {"training time": format_duration(lines[-1]["seconds"])} if lines and "seconds" in lines[-1] else {}
    )


def data_problems(train: Source, unreadable: dict[str, str], notes: Iterable[str]) -> Iterator[Html]:
    """What the dataset left out, classes that are small or unequal, and files that could not be read."""
    found = [*map(paragraph, notes)]
    for check in () if train.remote else (small_classes, uneven_classes):
        for finding in check(class_sizes(train.labels(), len(train.classes)), train.classes, "train"):
            examples = ", ".join(example.note for example in finding.examples)
            advice = f'<span class="soft">{text(finding.advice)}</span>'
            found.append(Html(f"<p>{text(finding.text)} ({text(examples)})<br>{advice}</p>"))
    found += unreadable_parts(unreadable)
    fine = "" if train.remote else ", and no class is small or far from the others"
    yield from found or [paragraph(f"Every image could be read{fine}.")]


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


# N patches of P x P pixels, C channels

MASK_LEVEL = 128
"""Gray, for patches that became the mask embedding."""
NOTE = (
    "For each image: the image, what the model saw (gray is the mask; some patches are another's, some stayed), "
    "and the image with the predicted mean colors in place of the corrupted patches."
)

Pixels = NDArray[np.uint8]


def color_tiles(measures: ColorMeasures) -> dict[str, str]:
    return {
        "colors right": f"{measures.top1:.2f} %",
        "cross-entropy": f"{measures.loss:.4f}",
        "corrupted patches": f"{measures.patches:,}",
        "held-out images": f"{measures.count:,}",
    }


def color_sections(measures: ColorMeasures, preprocess: Preprocess, side: int, source: Source) -> Iterator[Html]:
    """Some held-out images as they are, as they were seen, and as they were filled in."""
    if measures.examples:
        shown = (figure for example in measures.examples for figure in figures(example, preprocess, side, source))
        yield section("Predicted colors", gallery(shown), note=NOTE)


def figures(example: Example, preprocess: Preprocess, side: int, source: Source) -> Iterator[tuple[Html, Html]]:
    """The three views of an example, each with its caption."""
    kind = "tiny" if max(example.pixels.shape[1:]) <= TINY_SIDE else ""
    names = (source.key(example.index), "as the model saw it", "predicted colors")
    for levels, name in zip(three_views(example, preprocess, side), names):
        yield embedded(Image.fromarray(levels), name, kind=kind), Html(f'<small class="soft">{text(name)}</small>')


def three_views(example: Example, preprocess: Preprocess, side: int) -> tuple[Pixels, Pixels, Pixels]:
    """The image, its corruption and its prediction as uint8 (rows, columns, 3), or (rows, columns) where gray."""
    levels = levels_of(torch.from_numpy(example.pixels)[None], preprocess)
    patches = cut(levels, side)[0].numpy().astype(np.uint8)  # (N, C, P, P)
    corruption = corruption_of(torch.from_numpy(example.draws)[None])
    rows, columns = levels.shape[-2] // side, levels.shape[-1] // side
    seen, filled = patches[corruption.taken_from[0].numpy()], patches.copy()
    seen[corruption.masked[0].numpy()] = MASK_LEVEL
    for place, color in zip(np.flatnonzero(corruption.chosen[0].numpy()), example.predicted.tolist()):
        filled[place] = np.array(shown_color(color, patches.shape[1]), np.uint8)[:, None, None]
    image, saw, said = (joined(some, rows, columns) for some in (patches, seen, filled))
    return image, saw, said


def joined(patches: Pixels, rows: int, columns: int) -> Pixels:
    """Patches (N, C, P, P) -> (rows * P, columns * P, C), without the last axis where C is 1."""
    _, channels, side, _ = patches.shape
    grid = patches.reshape(rows, columns, channels, side, side).transpose(0, 3, 1, 4, 2)
    whole = grid.reshape(rows * side, columns * side, channels)
    return np.ascontiguousarray(whole[..., 0] if channels == 1 else whole)
