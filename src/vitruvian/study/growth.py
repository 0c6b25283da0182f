"""Figures 3 to 5 on a small machine: accuracy of several architectures over data size and over compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitruvian.cost import parameters
from vitruvian.errors import ConfigError, TrainingError, argument
from vitruvian.files import write_json, write_text
from vitruvian.progress import print_status
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, render, write_image
from vitruvian.study import STUDY_FILE
from vitruvian.text import format_duration
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import Series
from vitruvian.training.initial_model import config_of, scale_size
from vitruvian.training.journal import Listener, ProgressListener
from vitruvian.training.planning import plan
from vitruvian.training.recipe import Recipe, change_recipe, read_recipe
from vitruvian.training.run_folder import RUNS, Run, RunState, is_free, lock_folder
from vitruvian.training.splits import DataRef, fit_batch_size, resolution_stages, run_multiply_adds, split_data
from vitruvian.training.train import check_recipe

RECIPES = ("study-vit", "study-hybrid", "study-resnet")
"""Default recipes, which train alike and need about the same compute per image."""
SIZES = (1_000, 4_000, 16_000, 0)
"""Default numbers of training images; 0: all."""
SIZE_STEPS = 1_000
"""Default steps for every size, so that compute is equal."""
COMPUTE_STEPS = (125, 250, 500, 1_000, 2_000)

Kind = Literal["data-size", "compute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthCell:
    """A recipe trained on a number of images for a number of steps."""

    recipe_name: str
    recipe: Recipe
    images: int
    """Number of training images."""
    classes: int
    folder: Path

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all training steps."""
        config = config_of(self.recipe, self.classes)
        stages = resolution_stages(self.recipe, scale_size(config, self.recipe.train_scale), self.recipe.steps)
        return run_multiply_adds(self.recipe, config, stages)

    @property
    def state(self) -> RunState:
        return Run(self.folder).state

    @property
    def measures(self) -> dict[str, float]:
        """Validation metrics; empty before the cell is done."""
        return Run(self.folder).result("top1", "loss", "count", "seconds")

    def to_json(self) -> dict[str, Any]:
        return {
            "recipe": short_name(self.recipe_name),
            "images": self.images,
            "steps": self.recipe.steps,
            "batch_size": self.recipe.batch_size,
            "epochs": self.recipe.steps * self.recipe.batch_size / self.images,
            "parameters": parameters(config_of(self.recipe, self.classes)),
            "multiply_adds": self.multiply_adds,
            "folder": self.folder.name,
            "state": self.state,
            **self.measures,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The cells of a study, and its folder."""

    kind: Kind
    data: DataRef
    folder: Path
    cells: tuple[GrowthCell, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "data": self.data.name, "cells": [cell.to_json() for cell in self.cells]}

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """For each recipe, accuracy over training images or over compute, for the cells that are done."""
        lines: dict[str, list[tuple[float, float]]] = {}
        for cell in self.cells:
            x = cell.images if self.kind == "data-size" else cell.multiply_adds
            points = lines.setdefault(short_name(cell.recipe_name), [])
            if cell.measures:
                points.append((float(x), cell.measures["top1"]))
        return {name: sorted(points) for name, points in lines.items()}


def short_name(recipe: str) -> str:
    """`study-vit` as `vit`."""
    return Path(recipe).stem.removeprefix("study-")


def plan_study(
    kind: Kind,
    data: str | Path,
    *,
    sizes: Sequence[int],
    steps: Sequence[int],
    recipes: Sequence[str] = RECIPES,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
) -> Study:
    """The study with every recipe at every size and number of steps; trains nothing.

    Raises:
        TrainingError: `out` exists and is not a study.
        ConfigError: a size, a number of steps or a recipe is invalid.
    """
    ref = DataRef(data)
    folder = Path(out or RUNS / f"{ref.short_name}-{kind}").expanduser()
    if folder.exists() and (not folder.is_dir() or (not is_free(folder) and not (folder / STUDY_FILE).is_file())):
        raise TrainingError("exists and is not a study", where=folder, hint=f"choose another {argument('out')}")
    if min(steps) < 1 or min(sizes) < 0:
        raise ConfigError(f"sizes={list(sizes)} and steps={list(steps)} must be positive numbers")
    if len({short_name(name) for name in recipes}) != len(recipes):
        raise ConfigError(f"the recipes {', '.join(recipes)} must have different names")
    cells = [
        build_cell(ref, name, folder=folder, settings=[*settings, f"max_train_samples={images}", f"steps={count}"])
        for images in sizes
        for count in steps
        for name in recipes
    ]
    return Study(kind=kind, data=ref, folder=folder, cells=tuple(cells))


def build_cell(data: DataRef, name: str, *, folder: Path, settings: Sequence[str]) -> GrowthCell:
    """A recipe with these settings, in a subfolder of `folder` named by its size and steps."""
    recipe = change_recipe(read_recipe(name), settings)
    splits = split_data(data, recipe)
    images = len(splits.train)
    recipe = recipe.replace(batch_size=fit_batch_size(recipe, images, 1))
    subfolder = folder / f"{short_name(name)}-{recipe.max_train_samples or 'all'}-images-{recipe.steps}-steps"
    return GrowthCell(recipe_name=name, recipe=recipe, images=images, classes=len(splits.classes), folder=subfolder)


def run_study(
    study: Study,
    *,
    listeners: Sequence[Listener] = (),
    report: Callable[[str], None] = print_status,
    progress: bool = True,
) -> None:
    """Train every cell that is not done, resuming where an earlier call was interrupted, and write the report.

    Under torchrun all processes call this and share each cell.
    """
    for cell in study.cells:
        check_cell(study, cell)  # before hours of work

    def record() -> None:
        write_json(study.folder / STUDY_FILE, study.to_json())
        write_study_report(study)

    with process_group(study.cells[0].recipe.device) as processes, ExitStack() as stack:  # once for all cells
        processes.on_main(lambda: stack.enter_context(lock_folder(study.folder)))
        listeners = (ProgressListener(), *listeners) if progress else listeners
        series = Series(data=study.data, processes=processes, listeners=listeners, report=report, record=record)
        if processes.is_main:
            record()
        for position, cell in enumerate(study.cells, 1):
            series.train(cell.folder, cell.recipe, f"cell {position} of {len(study.cells)}: {cell.folder.name}")


def check_cell(study: Study, cell: GrowthCell) -> None:
    """Raise TrainingError if the folder of a cell has a run with other data or settings."""
    if cell.state == "waiting":
        return
    run = Run(cell.folder)
    hint = f"choose another {argument('out')}"
    if run.facts.get("data") != study.data.name:
        reason = f"trained on {run.facts.get('data')}, not {study.data.name}"
        raise TrainingError(reason, where=cell.folder, hint=hint)
    check_recipe(run, cell.recipe, cell.folder, hint)


def estimate_seconds(study: Study, seconds: float = 5.0) -> Iterator[tuple[GrowthCell, float]]:
    """Each cell with its estimated time (0 if done), after measuring steps of each recipe for about `seconds`."""
    measured: dict[str, tuple[float, float]] = {}
    for cell in study.cells:
        if cell.recipe_name not in measured:
            cost = plan(study.data, recipe=cell.recipe, seconds=seconds)
            measured[cell.recipe_name] = cost.timing.step_seconds, cost.evaluation_seconds / max(1, cost.evaluations)
        step, evaluation = measured[cell.recipe_name]
        yield cell, 0.0 if cell.state == "done" else cell.recipe.steps * step + evaluation


PLOT_FILE = "study.png"
TITLES = {
    "data-size": ("Accuracy over the number of training images", "training images"),
    "compute": ("Accuracy over training compute", "multiply-adds of training"),
}


def write_study_report(study: Study) -> Path:
    """Write `report.html`, and `study.png` once there is a point to plot; returns the path of the page."""
    heading, x_label = TITLES[study.kind]
    lines = [Line(name, points) for name, points in study.lines().items()]
    title = f"{heading}: top-1, %"
    chart = Chart(title=title, lines=lines, x_label=f"{x_label} (logarithmic)", log_x=True, size=(760, 400))
    image = chart.image()
    if image is not None:
        write_image(study.folder / PLOT_FILE, image)
    done = sum(cell.state == "done" for cell in study.cells)
    page = render(
        "study.html",
        title=f"{study.kind} study on {study.data.short_name}",
        subtitle=f"{done} of {len(study.cells)} runs done",
        chart=chart if image is not None else None,
        chart_title=heading,
        runs=[table_row(cell.to_json()) for cell in study.cells],
    )
    return write_text(study.folder / PAGE, page)


def table_row(cell: dict[str, Any]) -> list[object]:
    top1 = f"{cell['top1']:.2f} %" if "top1" in cell else "–"
    seconds = format_duration(cell["seconds"]) if "seconds" in cell else "–"
    counts = [cell["images"], cell["steps"], float(cell["epochs"]), cell["parameters"]]
    return [cell["recipe"], *counts, f"{cell['multiply_adds']:.3g}", top1, seconds, cell["state"]]
