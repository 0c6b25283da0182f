"""Figures 3 to 5 at the size of a small machine: kinds of models over growing data, and over growing compute."""

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
from vitruvian.training.given import DataRef
from vitruvian.training.images import fitting_batch_size, images_for, run_multiply_adds, stages_of
from vitruvian.training.journal import Listener
from vitruvian.training.model import config_of, scaled
from vitruvian.training.plan import plan
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, Recipe
from vitruvian.training.recipes import changed, read_recipe
from vitruvian.training.run import RUNS, Run, RunState, is_free, owned
from vitruvian.training.train import with_progress

RECIPES = ("study-vit", "study-hybrid", "study-resnet")
"""Compared by default: of one training and about equal multiply-adds."""
SIZES = (1_000, 4_000, 16_000, 0)
"""Images to train on; 0 is all."""
SIZE_STEPS = 1_000
"""The same for each size, so that compute is equal."""
COMPUTE_STEPS = (125, 250, 500, 1_000, 2_000)

Kind = Literal["data-size", "compute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model trained on so many images for so many steps."""

    recipe_name: str
    recipe: Recipe
    images: int
    """To train on, counted."""
    classes: int
    folder: Path

    @property
    def multiply_adds(self) -> int:
        """Of the whole training."""
        config = config_of(self.recipe, self.classes)
        stages = stages_of(self.recipe, scaled(config, self.recipe.train_scale), self.recipe.steps)
        return run_multiply_adds(self.recipe, config, stages)

    @property
    def state(self) -> RunState:
        return Run(self.folder).state

    @property
    def measures(self) -> dict[str, float]:
        """The numbers of a finished cell, on held-out images."""
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
    """All cells of one study, and where they are kept."""

    kind: Kind
    data: DataRef
    folder: Path
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "data": self.data.name, "cells": [cell.to_json() for cell in self.cells]}

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """For each recipe, accuracy over images or over multiply-adds of training, as far as measured."""
        found: dict[str, list[tuple[float, float]]] = {}
        for cell in self.cells:
            across = cell.images if self.kind == "data-size" else cell.multiply_adds
            points = found.setdefault(short_name(cell.recipe_name), [])
            if cell.measures:
                points.append((float(across), cell.measures["top1"]))
        return {name: sorted(points) for name, points in found.items()}


def short_name(recipe: str) -> str:
    """`study-vit` as `vit`."""
    return Path(recipe).stem.removeprefix("study-")


def study_of(
    kind: Kind,
    data: str | Path,
    *,
    sizes: Sequence[int],
    steps: Sequence[int],
    recipes: Sequence[str] = RECIPES,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
) -> Study:
    """The cells of a study: every recipe at every size and number of steps; nothing is trained yet."""
    ref = DataRef(data)
    folder = Path(out or RUNS / f"{ref.short_name}-{kind}").expanduser()
    if folder.exists() and (not folder.is_dir() or (not is_free(folder) and not (folder / STUDY_FILE).is_file())):
        raise TrainingError(f"{folder}: exists and is no study; choose another {argument('out')}")
    if min(steps) < 1 or min(sizes) < 0:
        raise ConfigError(f"sizes {list(sizes)} and steps {list(steps)} are not whole numbers above 0")
    if len({short_name(name) for name in recipes}) != len(recipes):
        raise ConfigError(f"the recipes {', '.join(recipes)} do not differ in their names")
    cells = [
        cell_of(ref, name, folder=folder, settings=[*settings, f"max_train_samples={count}", f"steps={number}"])
        for count in sizes
        for number in steps
        for name in recipes
    ]
    return Study(kind=kind, data=ref, folder=folder, cells=tuple(cells))


def cell_of(data: DataRef, name: str, *, folder: Path, settings: Sequence[str]) -> Cell:
    """A recipe with these settings, in a folder inside `folder` that its size and steps name."""
    recipe = changed(read_recipe(name), settings)
    images = images_for(data, recipe)
    found = len(images.train)
    recipe = recipe.replace(batch_size=fitting_batch_size(recipe, found, 1))
    place = f"{short_name(name)}-{recipe.max_train_samples or 'all'}-images-{recipe.steps}-steps"
    return Cell(recipe_name=name, recipe=recipe, images=found, classes=len(images.classes), folder=folder / place)


def run_study(
    study: Study,
    *,
    listeners: Sequence[Listener] = (),
    said: Callable[[str], None] = print_status,
    after: Callable[[Study], object],
    progress: bool = True,
) -> None:
    """Train every cell that is not done, going on where an earlier call was cut off; `after` each, call that.

    Under torchrun all processes share each cell, and the main one writes and speaks.
    """
    for cell in study.cells:
        check_same(study, cell)  # before hours of work

    def record() -> None:
        write_json(study.folder / STUDY_FILE, study.to_json())
        after(study)

    with process_group(study.cells[0].recipe.device) as processes, ExitStack() as stack:  # once for all cells
        processes.on_main(lambda: stack.enter_context(owned(study.folder)))
        heard = with_progress(listeners, progress)
        series = Series(data=study.data, processes=processes, listeners=heard, said=said, record=record)
        if processes.is_main:
            record()
        for number, cell in enumerate(study.cells, 1):
            series.train(cell.folder, cell.recipe, f"cell {number} of {len(study.cells)}: {cell.folder.name}")


def check_same(study: Study, cell: Cell) -> None:
    """A cell that is begun or done was trained as this study wants it."""
    if cell.state == "waiting":
        return
    run = Run(cell.folder)
    was, now = run.recipe.to_json(), changed(cell.recipe, []).to_json()
    free = HARMLESS | DESCRIPTION
    found = [key for key in now if key not in free and was.get(key) != now[key]]
    if run.facts.get("data") != study.data.name:
        raise TrainingError(
            f"{cell.folder}: trained on {run.facts.get('data')}, not {study.data.name}",
            hint=f"choose another {argument('out')}",
        )
    if found:
        key = found[0]
        raise TrainingError(
            f"{cell.folder}: trained with {key}={was.get(key)!r}, not {now[key]!r}; choose another {argument('out')}"
        )


def estimates(study: Study, seconds: float = 5.0) -> Iterator[tuple[Cell, float]]:
    """Each cell and about how many seconds it takes, from steps of each recipe measured for so long; 0 if done."""
    measured: dict[str, tuple[float, float]] = {}
    for cell in study.cells:
        if cell.recipe_name not in measured:
            found = plan(study.data, recipe=cell.recipe, seconds=seconds)
            measured[cell.recipe_name] = found.step_seconds, found.evaluation_seconds / max(1, found.evaluations)
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
