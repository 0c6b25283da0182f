"""Training from start to end, and the continuation of a run that was interrupted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitruvian.cost import parameters
from vitruvian.errors import TrainingError
from vitruvian.model.build import Model
from vitruvian.text import brief
from vitruvian.training.checkpoint import Checkpoints, Position, read_position, read_tensors
from vitruvian.training.choose import chosen_recipe
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.head import fit_head, is_fresh
from vitruvian.training.images import Images, fitting_batch_size, images_for
from vitruvian.training.journal import Listener
from vitruvian.training.model import model_again, model_for
from vitruvian.training.recipe import HARMLESS, Recipe
from vitruvian.training.recipes import changed, keys_of
from vitruvian.training.run import RUNS, Run, create, environment, lasting_data
from vitruvian.training.trainer import Trainer
from vitruvian.weights.description import Description


def train(
    data: str | Path,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
) -> Run:
    """Train on the images in `data` and give back the finished run.

    `recipe` is a name, a TOML file or a Recipe; without one it is chosen from the data. `model` is a name in the
    catalog, `weights` a file, folder or published name to start from. `settings` are changes such as
    "epochs=20". The folder `out` must be new; without it, there is one in `runs/`. Under torchrun, all processes
    call this.
    """
    plan = chosen_recipe(data, recipe, model=model, weights=weights, settings=settings)
    with process_group(plan.device) as processes:
        plan, images = fitted(plan, images_for(data, plan), processes)
        folder = Path(processes.broadcast(str(out or free_folder(data)))).expanduser()
        start = starting_model(plan, images, processes=processes, listeners=listeners)
        trainer = Trainer.build(plan, images, processes, start)
        problem = ""
        if processes.is_main:
            try:
                create(folder, plan, facts_of(data, images, trainer))
            except TrainingError as error:
                problem = str(error)
        problem = processes.broadcast(problem)
        if problem:
            raise TrainingError(problem)
        return trainer.fit(folder, position=Position(), listeners=listeners)


def resume(run: str | Path | Run, *, settings: Sequence[str] = (), listeners: Sequence[Listener] = ()) -> Run:
    """Continue a run from its last checkpoint, in the middle of an epoch if need be; a finished one is left alone.

    `settings` may change only what the result does not depend on, such as "workers=4".
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    if opened.finished:
        return opened
    for change in settings:
        if not keys_of([change]) <= HARMLESS:
            raise TrainingError(
                f"{change!r} cannot be set for a run that goes on, only {', '.join(sorted(HARMLESS))}; start a new run"
            )
    facts, plan = opened.facts, changed(opened.recipe, settings)
    with process_group(plan.device) as processes:
        images = images_for(facts["data"], plan)
        check_same(facts, images)
        found = Checkpoints(opened.checkpoints, processes).all()
        if found:  # what the run started from may be gone
            model = model_again(Description.from_json(facts.get("model"), f"{opened.folder}/run.json"), plan)
        else:
            model = starting_model(plan, images, processes=processes, listeners=listeners)
        trainer, position = Trainer.build(plan, images, processes, model), Position()
        if found:
            position = Position.from_json(read_position(found[-1]))
            read_tensors(found[-1], trainer.state.tensors(), processes)
            trainer.state.restore(position)
        return trainer.fit(opened.folder, position=position, listeners=listeners)


def starting_model(recipe: Recipe, images: Images, *, processes: Processes, listeners: Sequence[Listener]) -> Model:
    """The model of a run before its first step."""
    model = model_for(recipe, images.classes).to(processes.device)
    if recipe.head_init != "zero" and is_fresh(model):

        def said(text: str) -> None:
            for listener in listeners if processes.is_main else ():
                listener.said(text)

        fit_head(model, images.train, recipe, device=processes.device, said=said)
    return model


def fitted(recipe: Recipe, images: Images, processes: Processes) -> tuple[Recipe, Images]:
    """The recipe with a batch size that the images can fill, and a note where it had to change."""
    size = fitting_batch_size(recipe, len(images.train), processes.world_size)
    if size == recipe.batch_size:
        return recipe, images
    note = f"batch_size is {size}, not {recipe.batch_size}: there are no more images to train on"
    return recipe.replace(batch_size=size), replace(images, notes=(*images.notes, note))


def facts_of(data: str | Path, images: Images, trainer: Trainer) -> dict[str, Any]:
    """What run.json says."""
    return {
        "data": lasting_data(data),
        "classes": list(images.classes),
        "training_images": len(images.train),
        "validation_images": len(images.validation),
        "validation": images.validation_is,
        "steps": trainer.batches.total,
        "steps_per_epoch": trainer.batches.per_epoch,
        "model": Description.of(trainer.model).to_json(),
        "parameters": parameters(trainer.model.config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "notes": list(images.notes),
        "environment": environment(),
    }


def check_same(facts: dict[str, Any], images: Images) -> None:
    """The data are those that the run began with, as far as their classes and numbers tell."""
    found = {
        "classes": list(images.classes),
        "training images": len(images.train),
        "validation images": len(images.validation),
    }
    for name, now in found.items():
        was = facts.get(name.replace(" ", "_"))
        if was != now:
            was, now = (value if isinstance(value, list) else [value] for value in (was, now))
            raise TrainingError(
                f"{facts.get('data')}: the data have changed since the run began, the {name} were {brief(was)} "
                f"and are {brief(now)}; put them back, or start a new run"
            )


def free_folder(data: str | Path) -> Path:
    """A new folder in `runs/`, named after the data."""
    name = Path(str(data).rstrip("/*")).stem or "run"
    number = 1
    while (folder := RUNS / f"{name}-{number}").exists():
        number += 1
    return folder
