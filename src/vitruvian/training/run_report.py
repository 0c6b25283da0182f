"""The report of a training run: curves, confusion matrix, mistakes, data problems and settings on one page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitruvian.catalog import title_of
from vitruvian.data.doctor.checks import small_classes, unbalanced_classes
from vitruvian.data.doctor.findings import Finding
from vitruvian.data.sources import Source, class_sizes
from vitruvian.evaluation.metrics import Measures
from vitruvian.evaluation.report import measure_sections, measure_tiles, target_sections
from vitruvian.evaluation.target_metrics import TargetMeasures
from vitruvian.files import write_text
from vitruvian.report.chart import Chart, Line
from vitruvian.report.color import HELD_OUT, OTHER, TRAINING
from vitruvian.report.html import PAGE, TINY_SIDE, embed_image, render
from vitruvian.targets import KINDS
from vitruvian.text import format_duration, plural
from vitruvian.training.initial_model import scale_size
from vitruvian.training.masked import ColorMeasures
from vitruvian.training.objective import ValidationMetrics
from vitruvian.training.run_folder import Run, environment
from vitruvian.weights.checkpoint_files import Description


def write_report(
    run: Run,
    train: Source,
    *,
    held_out: Source | None = None,
    measures: ValidationMetrics | None = None,
    stopped: str = "",
) -> Path:
    """Write `report.html` into the run's folder, atomically; returns its path.

    `measures` are those of the final model, with the mistakes or examples to show from the validation images
    `held_out`; `stopped` is why the run ended before its last step. Missing parts are omitted.
    """
    lines, facts, recipe = run.metrics(), run.facts, run.recipe
    model = Description.from_json(facts.get("model"), f"{run.folder}/run.json")
    name = title_of(model.config) + (f" fine-tuned from {Path(recipe.weights).name}" if recipe.weights else "")
    noun = KINDS[train.target].noun
    progress = f"{len(train):,} training images of {plural(len(train.classes), noun)}"
    if lines:
        epochs = lines[-1]["epoch"]
        progress += f", {plural(lines[-1]['step'], 'step')}, {epochs:.4g} epoch{'' if epochs == 1 else 's'}"
    else:
        progress += "; no steps recorded"
    tiles: dict[str, str] = {}
    examples: list[dict[str, Any]] = []
    sections = ""
    if isinstance(measures, ColorMeasures):
        tiles = {
            "color accuracy": f"{measures.top1:.2f} %",
            "cross-entropy": f"{measures.loss:.4f}",
            "corrupted patches": f"{measures.patches:,}",
            "validation images": f"{measures.count:,}",
        }
        for example in measures.examples if held_out is not None else ():
            assert held_out is not None
            kind = "tiny" if max(example.image.shape) <= TINY_SIDE else ""
            captions = (held_out.key(example.index), "input of the model", "predicted colors")
            for levels, caption in zip((example.image, example.seen, example.predicted), captions):
                examples.append({"image": embed_image(Image.fromarray(levels), caption, kind=kind), "caption": caption})
    elif isinstance(measures, Measures):
        tiles, sections = measure_tiles(measures), measure_sections(measures, train.classes, held_out)
    elif isinstance(measures, TargetMeasures):
        tiles, sections = measure_tiles(measures), target_sections(measures, held_out)
    if "images" in tiles:
        tiles["validation images"] = tiles.pop("images")
    if lines and "seconds" in lines[-1]:
        tiles["training time"] = format_duration(lines[-1]["seconds"])
    findings: list[Finding] = []
    if not train.remote and noun != "number":  # remote labels are not read for that
        if train.targets is None:
            sizes = class_sizes(train.labels(), len(train.classes))
        else:
            sizes = np.rint(np.prod(train.targets.statistics(np.asarray(train.labels()))[:2], axis=0)).astype(np.int64)
        for check in (small_classes, unbalanced_classes):
            findings += check(sizes, train.classes, "train")
    resolutions = {"evaluated at": model.config.image_size, "trained at": scale_size(model.config, recipe.train_scale)}
    pixels = {name: f"{rows} x {columns} pixels" for name, (rows, columns) in resolutions.items()}
    known = {"model": name, "recipe": recipe.name, "command": recipe.command}
    shown = {key: value for key, value in known.items() if value} | pixels
    machine = environment() | facts.get("environment", {})
    page = render(
        "training.html",
        title=f"{name} on {Path(str(facts.get('data', 'unnamed data'))).name}",
        subtitle=progress,
        tile_values=tiles,
        stopped=stopped,
        measured=measures is not None,
        masked=recipe.objective == "masked",
        curves=list(curves(lines)),
        measures=sections,
        examples=examples,
        notes=list(facts.get("notes", ())),
        findings=findings,
        classes_checked=not train.remote,
        unreadable_images=run.unreadable,
        settings=shown | recipe.report_settings(),
        environment={key: value for key, value in machine.items() if key not in shown},
    )
    return write_text(run.folder / PAGE, page)


CHARTS = {  # recorded numbers that are drawn, and their titles
    "loss": "Loss",
    "top1": "Top-1 accuracy, %",
    "map": "mAP, %",
    "label_accuracy": "Correct labels, %",
    "mae": "Mean absolute error",
    "fewshot": "Few-shot accuracy, %",
    "lr": "Learning rate",
    "images_per_second": "Images per second",
}


def curves(lines: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """A chart for each recorded number, with a line for each split."""
    kinds = {"": ("run", OTHER), "train": ("train", TRAINING), "val": ("validation", HELD_OUT)}
    for key, title in CHARTS.items():
        points: dict[str, dict[float, float]] = {}  # by split and step; the last line with the same step counts
        for line in lines:
            values = points.setdefault(str(line.get("split", "")), {})
            if isinstance(line.get(key), int | float):
                values[float(line["step"])] = float(line[key])
        drawn = []
        for split, values in points.items():
            name, color = kinds.get(split, (split, None))
            if values:
                drawn.append(Line(name, sorted(values.items()), color=color))
        if drawn:
            y_from = None if title.endswith("%") else 0.0
            yield Chart(title=title, lines=drawn, x_label="step", y_from=y_from)
