"""The report of a training run: curves, confusion matrix, mistakes, data problems and settings on one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitruvian.catalog import title_of
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.data.doctor.checks import small_classes, unbalanced_classes
from vitruvian.data.doctor.findings import Finding
from vitruvian.data.sources import Source, class_sizes
from vitruvian.evaluation.metrics import Measures
from vitruvian.evaluation.report import measure_sections, measure_tiles
from vitruvian.files import write_text
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, TINY_SIDE, embed_image, render
from vitruvian.text import format_duration, plural
from vitruvian.training import journal
from vitruvian.training.masked import ColorMeasures, MaskedExample, corruption_of, levels_of, patchify, shown_color
from vitruvian.training.objective import ValidationMetrics
from vitruvian.training.run_folder import Run, environment
from vitruvian.weights.description import Description


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Results of a run that are not in the files of its folder. Missing parts are omitted from the report."""

    train: Source
    measures: ValidationMetrics | None = None
    """Metrics of the final model, with the mistakes or examples to show."""
    held_out: Source | None = None
    """The validation images, to show mistakes."""
    stopped: str = ""
    """Why the run ended before its last step; empty if it did not."""


def write_report(run: Run, outcome: Outcome) -> Path:
    """Write `report.html` into the run's folder, atomically; returns its path."""
    lines, recorded, measures = run.metrics(), run.facts, outcome.measures
    name = model_title(run)
    examples: list[dict[str, Any]] = []
    if isinstance(measures, ColorMeasures) and outcome.held_out is not None:
        model = Description.from_json(recorded.get("model"), f"{run.folder}/run.json")
        assert isinstance(model.config, ViTConfig)
        for example in measures.examples:
            examples += color_images(example, model.meta.preprocess, model.config.patch_size, outcome.held_out)
    page = render(
        "training.html",
        title=f"{name} on {Path(str(recorded.get('data', 'unnamed data'))).name}",
        subtitle=progress(outcome, lines),
        tile_values=tiles(outcome, lines),
        stopped=outcome.stopped,
        measured=measures is not None,
        masked=run.recipe.objective == "masked",
        curves=list(curves(lines)),
        measures=measure_sections(measures, outcome.train.classes, outcome.held_out)
        if isinstance(measures, Measures)
        else "",
        examples=examples,
        notes=list(recorded.get("notes", ())),
        findings=list(class_findings(outcome.train)),
        classes_checked=not outcome.train.remote,
        unreadable_images=run.unreadable,
        settings={"model": name} | run.recipe.report_settings(),
        environment=environment() | recorded.get("environment", {}),
    )
    return write_text(run.folder / PAGE, page)


def model_title(run: Run) -> str:
    """The architecture and the weights that training started from."""
    model = title_of(Description.from_json(run.facts.get("model"), f"{run.folder}/run.json").config)
    return f"{model} fine-tuned from {Path(run.recipe.weights).name}" if run.recipe.weights else model


def progress(outcome: Outcome, lines: list[journal.Line]) -> str:
    """Images, steps and epochs in one line."""
    data = f"{len(outcome.train):,} training images of {len(outcome.train.classes):,} classes"
    if not lines:
        return f"{data}; no steps recorded"
    epochs = lines[-1]["epoch"]
    return f"{data}, {plural(lines[-1]['step'], 'step')}, {epochs:.4g} epoch{'' if epochs == 1 else 's'}"


def tiles(outcome: Outcome, lines: list[journal.Line]) -> dict[str, str]:
    values: dict[str, str] = {}
    if isinstance(outcome.measures, ColorMeasures):
        values = {
            "color accuracy": f"{outcome.measures.top1:.2f} %",
            "cross-entropy": f"{outcome.measures.loss:.4f}",
            "corrupted patches": f"{outcome.measures.patches:,}",
            "validation images": f"{outcome.measures.count:,}",
        }
    elif isinstance(outcome.measures, Measures):
        values = measure_tiles(outcome.measures)
        values["validation images"] = values.pop("images")
    return values | (
        {"training time": format_duration(lines[-1]["seconds"])} if lines and "seconds" in lines[-1] else {}
    )


def class_findings(train: Source) -> Iterator[Finding]:
    """Classes that are small or much larger than others; remote labels are not read for that."""
    for check in () if train.remote else (small_classes, unbalanced_classes):
        yield from check(class_sizes(train.labels(), len(train.classes)), train.classes, "train")


CHARTS = {
    "loss": "Loss",
    "top1": "Top-1 accuracy, %",
    "lr": "Learning rate",
    "images_per_second": "Images per second",
}
"""Recorded numbers that are drawn, and their titles."""


def curves(lines: Iterable[journal.Line]) -> Iterator[Chart]:
    """A chart for each recorded number, with a line for each split."""
    recorded = list(lines)
    names = {"": "run", "val": "validation"}
    splits = list(dict.fromkeys(str(line.get("split", "")) for line in recorded))
    for key, title in CHARTS.items():
        drawn = [Line(names.get(split, split), points(recorded, split, key)) for split in splits]
        drawn = [line for line in drawn if line.points]
        if drawn:
            yield Chart(title=title, lines=drawn, x_label="step", y_from=0.0 if key != "top1" else None)


def points(lines: Iterable[journal.Line], split: str, key: str) -> list[tuple[float, float]]:
    """Step and value, sorted by step; the last of several lines with the same step counts."""
    values = {
        float(line["step"]): float(line[key])
        for line in lines
        if str(line.get("split", "")) == split and isinstance(line.get(key), int | float)
    }
    return sorted(values.items())


# N patches of P x P pixels, C channels

MASK_LEVEL = 128
"""Gray, for masked patches."""

Pixels = NDArray[np.uint8]


def color_images(example: MaskedExample, preprocess: Preprocess, side: int, source: Source) -> Iterator[dict[str, Any]]:
    """The image, the model's input and the predicted colors, with captions."""
    kind = "tiny" if max(example.pixels.shape[1:]) <= TINY_SIDE else ""
    captions = (source.key(example.index), "input of the model", "predicted colors")
    for levels, caption in zip(corruption_images(example, preprocess, side), captions):
        yield {"image": embed_image(Image.fromarray(levels), caption, kind=kind), "caption": caption}


def corruption_images(example: MaskedExample, preprocess: Preprocess, side: int) -> tuple[Pixels, Pixels, Pixels]:
    """The image, its corruption and its prediction as uint8 (rows, columns, 3), or (rows, columns) if gray."""
    levels = levels_of(torch.from_numpy(example.pixels)[None], preprocess)
    patches = patchify(levels, side)[0].numpy().astype(np.uint8)  # (N, C, P, P)
    corruption = corruption_of(torch.from_numpy(example.draws)[None])
    rows, columns = levels.shape[-2] // side, levels.shape[-1] // side
    corrupted, predicted = patches[corruption.taken_from[0].numpy()], patches.copy()
    corrupted[corruption.masked[0].numpy()] = MASK_LEVEL
    for index, color in zip(np.flatnonzero(corruption.chosen[0].numpy()), example.predicted.tolist()):
        predicted[index] = np.array(shown_color(color, patches.shape[1]), np.uint8)[:, None, None]
    return (
        join_patches(patches, rows, columns),
        join_patches(corrupted, rows, columns),
        join_patches(predicted, rows, columns),
    )


def join_patches(patches: Pixels, rows: int, columns: int) -> Pixels:
    """Patches (N, C, P, P) -> (rows * P, columns * P, C), without the last axis if C is 1."""
    _, channels, side, _ = patches.shape
    grid = patches.reshape(rows, columns, channels, side, side).transpose(0, 3, 1, 4, 2)
    image = grid.reshape(rows * side, columns * side, channels)
    return np.ascontiguousarray(image[..., 0] if channels == 1 else image)
