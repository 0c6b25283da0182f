"""Training from start to end, and the continuation of a run that was interrupted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitruvian.cost import parameters
from vitruvian.errors import TrainingError
from vitruvian.model.build import Model
from vitruvian.training.average import average_for
from vitruvian.training.checkpoint import Checkpoints, read_position, read_tensors
from vitruvian.training.choose import chosen_recipe
from vitruvian.training.distributed import Processes, fully_shard, process_group, wrap_ddp
from vitruvian.training.environment import environment
from vitruvian.training.head import fit_head, is_fresh
from vitruvian.training.images import Images, TrainingBatches, fitting_batch_size, images_for, validation_loader
from vitruvian.training.journal import METRICS_FILE, Journal, Listener
from vitruvian.training.loop import Loop
from vitruvian.training.losses import balanced_weights
from vitruvian.training.optimizer import optimizer_for
from vitruvian.training.places import RUNS, lasting_data
from vitruvian.training.prepare import augment_of, model_again, model_for, objective_for
from vitruvian.training.recipe import HARMLESS, Recipe
from vitruvian.training.recipes import changed
from vitruvian.training.report import Outcome, write_report
from vitruvian.training.run import Run, create, write_whole
from vitruvian.training.signals import StopRequest, stop_requests
from vitruvian.training.state import Position, State
from vitruvian.training.step import Stepper
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
        prepared = prepare(plan, images, processes, start)
        problem = ""
        if processes.is_main:
            try:
                create(folder, plan, facts_of(data, images, prepared))
            except TrainingError as error:
                problem = str(error)
        problem = processes.broadcast(problem)
        if problem:
            raise TrainingError(problem)
        return carry_out(folder, prepared, processes=processes, position=Position(), listeners=tuple(listeners))


def resume(run: str | Path | Run, *, settings: Sequence[str] = (), listeners: Sequence[Listener] = ()) -> Run:
    """Continue a run from its last checkpoint, in the middle of an epoch if need be; a finished one is left alone.

    `settings` may change only what the result does not depend on, such as "workers=4".
    """
    opened = run if isinstance(run, Run) else Run.open(run)
    if opened.finished:
        return opened
    for change in settings:
        if change.partition("=")[0].strip() not in HARMLESS:
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
        prepared, position = prepare(plan, images, processes, model), Position()
        if found:
            position = Position.from_json(read_position(found[-1]))
            read_tensors(found[-1], prepared.state.tensors(), processes)
            prepared.state.restore(position)
        return carry_out(opened.folder, prepared, processes=processes, position=position, listeners=tuple(listeners))


def starting_model(recipe: Recipe, images: Images, *, processes: Processes, listeners: Sequence[Listener]) -> Model:
    """The model of a run before its first step."""
    model = model_for(recipe, images.classes).to(processes.device)
    if recipe.head_init != "zero" and is_fresh(model):

        def said(text: str) -> None:
            for listener in listeners if processes.is_main else ():
                listener.said(text)

        fit_head(model, images.train, recipe, device=processes.device, said=said)
    return model


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """All parts of a run, at its start."""

    recipe: Recipe
    images: Images
    model: Model
    state: State
    stepper: Stepper
    batches: TrainingBatches


def fitted(recipe: Recipe, images: Images, processes: Processes) -> tuple[Recipe, Images]:
    """The recipe with a batch size that the images can fill, and a note where it had to change."""
    size = fitting_batch_size(recipe, len(images.train), processes.world_size)
    if size == recipe.batch_size:
        return recipe, images
    note = f"batch_size is {size}, not {recipe.batch_size}: there are no more images to train on"
    return recipe.replace(batch_size=size), replace(images, notes=(*images.notes, note))


def prepare(recipe: Recipe, images: Images, processes: Processes, model: Model | None = None) -> Prepared:
    """The optimizer and the batches of a run around its model, by default that of the recipe."""
    model = (model or model_for(recipe, images.classes)).to(processes.device)
    batches = TrainingBatches(images.train, recipe, augment_of(recipe, model), processes)
    fully_shard(model, processes, recipe.parallel)
    if recipe.compile:
        model.compile()
    optimizer = optimizer_for(model, recipe)
    module = wrap_ddp(model, processes, recipe.parallel)  # which gives all processes the same weights
    stepper = Stepper(
        module,
        optimizer,
        batches=batches,
        objective=objective_for(recipe, model),
        average=average_for(model, recipe, batches.total),
        class_weights=balanced_weights(images.train) if recipe.class_weights == "balanced" else None,
    )
    state = State(model, optimizer, stepper.scaler, stepper.average, recipe)
    return Prepared(
        recipe=recipe,
        images=images,
        model=model,
        state=state,
        stepper=stepper,
        batches=batches,
    )


def carry_out(
    folder: Path, prepared: Prepared, *, processes: Processes, position: Position, listeners: tuple[Listener, ...]
) -> Run:
    """Run the loop from a position to the end, and save the model."""
    checkpoints = Checkpoints(Run(folder).checkpoints, processes, keep=prepared.recipe.keep_checkpoints)
    checkpoints.clean()
    heard = listeners if processes.is_main else ()
    with ExitStack() as stack:
        stack.callback(prepared.batches.close)
        validation = stack.enter_context(
            validation_loader(prepared.images.validation, prepared.recipe, prepared.model.preprocess, processes)
        )
        journal = None
        if processes.is_main:
            journal = Journal(folder / METRICS_FILE, heard, keep_bytes=position.journal_bytes)
            stack.callback(journal.close)
        for listener in heard:
            stack.callback(listener.finished)
            listener.started(folder=folder, steps=prepared.batches.total, done=position.step)
            for note in prepared.images.notes:
                listener.said(note)
        loop = Loop(
            folder,
            prepared.stepper,
            prepared.state,
            position,
            validation=validation,
            checkpoints=checkpoints,
            journal=journal,
        )
        stop = stack.enter_context(stop_requests())
        loop.run(stop)
        finish(loop, prepared.images)
    return Run(folder)


def finish(loop: Loop, images: Images) -> None:
    """Write what is left when a run is over: the skipped images, the report, and last the model."""
    unreadable = loop.processes.all_gather(loop.position.unreadable)
    if loop.processes.is_main and unreadable:
        write_whole(loop.folder / "unreadable.json", unreadable)
    with loop.averaged():
        if loop.recipe.final == "best" and loop.position.best_step != loop.position.step:
            loop.take_best()
            loop.measures = None
        measures = loop.measures or loop.measured(StopRequest())
        if loop.processes.is_main:
            early = f"no better evaluation in {loop.position.worse}" if loop.finished() else ""
            outcome = Outcome(train=images.train, measures=measures, held_out=images.validation, stopped=early)
            write_report(Run(loop.folder), outcome)
        loop.save_model(loop.folder / "model")


def facts_of(data: str | Path, images: Images, prepared: Prepared) -> dict[str, Any]:
    """What run.json says."""
    return {
        "data": lasting_data(data),
        "classes": list(images.classes),
        "training_images": len(images.train),
        "validation_images": len(images.validation),
        "validation": images.validation_is,
        "steps": prepared.batches.total,
        "steps_per_epoch": prepared.batches.per_epoch,
        "model": Description.of(prepared.model).to_json(),
        "parameters": parameters(prepared.model.config),
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
            raise TrainingError(
                f"{facts.get('data')}: the data have changed since the run began, the {name} were {brief(was)} "
                f"and are {brief(now)}; put them back, or start a new run"
            )


def brief(value: Any) -> str:
    """A value, or the beginning of a list."""
    if not isinstance(value, list):
        return str(value)
    return ", ".join(map(str, value[:5])) + (f" and {len(value) - 5} more" if len(value) > 5 else "")


def free_folder(data: str | Path) -> Path:
    """A new folder in `runs/`, named after the data."""
    name = Path(str(data).rstrip("/*")).stem or "run"
    number = 1
    while (folder := RUNS / f"{name}-{number}").exists():
        number += 1
    return folder
