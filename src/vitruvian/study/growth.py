"""Figures 3 to 5 at the size of a small machine: families of models over growing data, and over growing compute."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitruvian.cost import parameters
from vitruvian.errors import ConfigError, Interrupted, TrainingError
from vitruvian.study import STUDY_FILE
from vitruvian.training.distributed import process_group
from vitruvian.training.images import fitting_batch_size, images_for, run_multiply_adds, stages_of
from vitruvian.training.journal import Listener
from vitruvian.training.model import config_of, scaled
from vitruvian.training.plan import plan
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, Recipe
from vitruvian.training.recipes import changed, read_recipe
from vitruvian.training.run import RUNS, Run, RunState, lasting_data, write_record
from vitruvian.training.train import resume, train

FAMILIES = ("study-vit", "study-hybrid", "study-resnet")
"""Recipes of one training and about equal multiply-adds."""
SIZES = (1_000, 4_000, 16_000, 0)
"""Images to train on; 0 is all."""
SIZE_STEPS = 1_000
"""The same for each size, so that compute is equal."""
COMPUTE_STEPS = (125, 250, 500, 1_000, 2_000)

Kind = Literal["data-size", "compute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model trained on so many images for so many steps."""

    family: str
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
            "family": self.family,
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
    data: str
    folder: Path
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "data": self.data, "cells": [cell.to_json() for cell in self.cells]}

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """For each family, accuracy over images or over multiply-adds of training, as far as measured."""
        found: dict[str, list[tuple[float, float]]] = {}
        for cell in self.cells:
            across = cell.images if self.kind == "data-size" else cell.multiply_adds
            points = found.setdefault(family_name(cell.family), [])
            if cell.measures:
                points.append((float(across), cell.measures["top1"]))
        return {name: sorted(points) for name, points in found.items()}


def family_name(recipe: str) -> str:
    """`study-vit` as `vit`."""
    return Path(recipe).stem.removeprefix("study-")


def study_of(
    kind: Kind,
    data: str | Path,
    *,
    sizes: Sequence[int],
    steps: Sequence[int],
    families: Sequence[str] = FAMILIES,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
) -> Study:
    """The cells of a study: every family at every size and number of steps; nothing is trained yet."""
    where = lasting_data(data)
    folder = Path(out or RUNS / f"{Path(data).name}-{kind}").expanduser()
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / STUDY_FILE).is_file())):
        raise TrainingError(f"{folder}: exists and is no study; choose another --out")
    if min(steps) < 1 or min(sizes) < 0:
        raise ConfigError(f"sizes {list(sizes)} and steps {list(steps)} are not whole numbers above 0")
    if len({family_name(name) for name in families}) != len(families):
        raise ConfigError(f"the families {', '.join(families)} do not differ in their names")
    cells = [
        cell_of(where, name, folder=folder, settings=[*settings, f"max_train_samples={count}", f"steps={number}"])
        for count in sizes
        for number in steps
        for name in families
    ]
    return Study(kind=kind, data=where, folder=folder, cells=tuple(cells))


def cell_of(data: str, family: str, *, folder: Path, settings: Sequence[str]) -> Cell:
    """A family's recipe with these settings, in a folder inside `folder` that its size and steps name."""
    recipe = changed(read_recipe(family), settings)
    images = images_for(data, recipe)
    found = len(images.train)
    recipe = recipe.replace(batch_size=fitting_batch_size(recipe, found, 1))
    name = f"{family_name(family)}-{recipe.max_train_samples or 'all'}-images-{recipe.steps}-steps"
    return Cell(family=family, recipe=recipe, images=found, classes=len(images.classes), folder=folder / name)


def carry_out(
    study: Study,
    *,
    listeners: Sequence[Listener] = (),
    said: Callable[[str], None] = print,
    after: Callable[[Study], object],
) -> None:
    """Train every cell that is not done, going on where an earlier call was cut off; `after` each, call that.

    Under torchrun all processes share each cell, and the first one writes and speaks.
    """
    for cell in study.cells:
        check_same(study, cell)  # before hours of work
    with process_group(study.cells[0].recipe.device) as processes:  # once for all cells
        for number, cell in enumerate(study.cells, 1):
            state = processes.broadcast(cell.state)
            if processes.is_main:
                before = {"done": " (done before)", "begun": " (goes on)", "waiting": ""}[state]
                said(f"cell {number} of {len(study.cells)}: {cell.folder.name}{before}")
                write_study(study)
                if state == "waiting":
                    shutil.rmtree(cell.folder, ignore_errors=True)  # what was cut off before the run was on record
            try:
                train_cell(study, cell, state, listeners)
            except Interrupted as stopped:
                text = f"stopped in {cell.folder.name}, cell {number} of {len(study.cells)}; the same command goes on"
                raise Interrupted(text, stopped.number) from None
            if processes.is_main:
                Run(cell.folder).forget_checkpoints()
                write_study(study)
                after(study)


def train_cell(study: Study, cell: Cell, state: RunState, listeners: Sequence[Listener]) -> None:
    """Train, or train on, unless the cell is done."""
    if state == "begun":
        resume(cell.folder, listeners=listeners)
    elif state == "waiting":
        train(study.data, recipe=cell.recipe, out=cell.folder, listeners=listeners)


def check_same(study: Study, cell: Cell) -> None:
    """A cell that is begun or done was trained as this study wants it."""
    if cell.state == "waiting":
        return
    run = Run(cell.folder)
    was, now = run.recipe.to_json(), changed(cell.recipe, []).to_json()
    free = HARMLESS | DESCRIPTION
    found = [key for key in now if key not in free and was.get(key) != now[key]]
    if run.facts.get("data") != study.data:
        raise TrainingError(
            f"{cell.folder}: trained on {run.facts.get('data')}, not {study.data}; choose another --out"
        )
    if found:
        key = found[0]
        raise TrainingError(
            f"{cell.folder}: trained with {key}={was.get(key)!r}, not {now[key]!r}; choose another --out"
        )


def write_study(study: Study) -> None:
    write_record(study.folder / STUDY_FILE, study.to_json())


def estimates(study: Study, seconds: float = 5.0) -> Iterator[tuple[Cell, float]]:
    """Each cell and about how many seconds it takes, from steps of each family measured for so long; 0 if done."""
    measured: dict[str, tuple[float, float]] = {}
    for cell in study.cells:
        if cell.family not in measured:
            found = plan(study.data, recipe=cell.recipe, seconds=seconds)
            measured[cell.family] = found.step_seconds, found.evaluation_seconds / max(1, found.evaluations)
        step, evaluation = measured[cell.family]
        yield cell, 0.0 if cell.state == "done" else cell.recipe.steps * step + evaluation
