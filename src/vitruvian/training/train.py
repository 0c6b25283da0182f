"""Training from start to end, and the continuation of a run that was interrupted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vitruvian import __version__
from vitruvian.catalog import resolve
from vitruvian.cost import parameters
from vitruvian.data.transform import Transform
from vitruvian.errors import TrainingError, argument
from vitruvian.model.build import Model
from vitruvian.report.html import PAGE
from vitruvian.text import brief
from vitruvian.training.checkpoint import Checkpoints, Position, damage, free_name, read_position, read_tensors
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.given import NO_VIEWS, DataRef, Views, chosen_recipe, fitting_workers, given_again
from vitruvian.training.head import fit_head, is_fresh
from vitruvian.training.images import Images, fitting_batch_size, images_for
from vitruvian.training.journal import Listener, ShownProgress, tell_all
from vitruvian.training.loop import keeps_best
from vitruvian.training.model import model_again, model_for
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, LOCAL, Recipe
from vitruvian.training.recipes import changed, keys_of
from vitruvian.training.run import RESULT_FILE, Run, claimed, create, environment, lasting_path, owned
from vitruvian.training.seen import seen_notes
from vitruvian.training.trainer import Trainer
from vitruvian.training.whiten import whiten
from vitruvian.weights.description import Description
from vitruvian.weights.load import RUN_FILE, locate
from vitruvian.weights.store import digests

FEW_IMAGES = 50_000
"""Below which a model that starts from scratch lags far behind one that starts from weights."""
LINGERING_SECONDS = 60
"""How long processes that go on with a run wait for those before them to leave it."""
PHOTO_PIXELS = 64
"""Side from which images are taken for photos."""


def train(
    data: object,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    view: Transform | None = None,
    train_view: Transform | None = None,
    progress: bool = True,
    auto_resume: bool = False,
) -> Run:
    """Train on the images in `data` and give back the finished run.

    `data` is whatever `open_dataset` takes: a path, an address or a name, or an object such as a map-style
    `torch.utils.data.Dataset`. `recipe` is a name, a TOML file or a Recipe; without one it is chosen from the data.
    `model` is a name in the catalog, `weights` a file, folder or published name to start from. `settings` are changes
    such as "epochs=20". The folder `out` must be new; without it, there is one in `runs/`. With `auto_resume` it may
    hold a run of the same recipe, which then goes on: the same call begins a run and continues it.

    `train_view` and `view` take the place of the recipe's training and evaluation views: callables that make a
    normalized float tensor (channels, rows, columns) of a PIL image. `listeners` hear each step, line of metrics and
    note; `progress` shows them on stderr. Under torchrun, all processes call this.
    """
    ref, views = DataRef.of(data), Views(view, train_view)
    plan = chosen_recipe(ref, recipe, model=model, weights=weights, settings=settings)
    if not auto_resume:
        return begin(ref, plan, out=out, views=views, listeners=with_progress(listeners, progress))
    if out is None:
        raise TrainingError(f"auto_resume needs {argument('out')}, the folder in which a run is to begin or to go on")
    with process_group(plan.device) as processes:
        if not processes.on_main(lambda: (Path(out).expanduser() / RUN_FILE).is_file()):
            return begin(ref, plan, out=out, views=views, listeners=with_progress(listeners, progress))
        opened = Run.open(out)
        check_recipe(
            opened,
            lasting(plan),
            f"{opened.folder}: ",
            f"start with the same settings, or choose another {argument('out')}",
        )
        return resume(
            out,
            data=ref.data,
            settings=[change for change in settings if keys_of([change]) <= HARMLESS],
            listeners=listeners,
            view=view,
            train_view=train_view,
            progress=progress,
        )


def resume(
    run: str | Path | Run,
    *,
    data: object = None,
    settings: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    view: Transform | None = None,
    train_view: Transform | None = None,
    progress: bool = True,
) -> Run:
    """Continue a run from its last checkpoint, in the middle of an epoch if need be; a finished one is left alone.

    Of a finished run whose report is missing, the report is written. What was given as an object, the data or a view,
    must be given again; `data` also tells where files are that have moved. `settings` may change only what the result
    does not depend on, such as "workers=4".
    """
    if run == "":
        raise TrainingError("the name of the run is empty; give its folder")
    opened = run if isinstance(run, Run) else Run.open(run)
    changed_part = opened.damage() if opened.finished else ""
    without_report = opened.finished and not (opened.folder / PAGE).is_file() and any(opened.checkpoints.glob("step-*"))
    if opened.finished and not changed_part and not without_report:
        return opened
    check_recipe(opened, opened.recipe, f"{opened.folder / 'recipe.toml'}: ", "put it back, or start a new run")
    if opened.facts.get("teacher") != teacher_digests(opened.recipe):
        raise TrainingError(f"{opened.recipe.teacher}: the teacher has changed since the run began; put it back")
    for change in settings:
        if not keys_of([change]) <= HARMLESS:
            raise TrainingError(
                f"{change!r} cannot be set for a run that goes on, only {', '.join(sorted(HARMLESS))}; start a new run"
            )
    plan = changed(opened.recipe, settings)
    ref, views = DataRef.of(given_again(opened, data)), Views(view, train_view)
    views.check_again(opened)
    heard = with_progress(listeners, progress)
    with process_group(plan.device) as processes, ExitStack() as stack:
        processes.check_same(shared_settings(plan))
        # Of a job that torchrun has started again, a process may still be about to end.
        patience = LINGERING_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0
        processes.on_main(lambda: stack.enter_context(owned(opened.folder, wait_seconds=patience)))
        plan, notes = fitting_workers(plan)
        if changed_part:
            processes.on_main(lambda: set_aside(opened))
            notes.append(f"{changed_part}: finishing again")
        images = images_for(ref, plan)
        check_same(opened.facts, images)
        images = replace(images, notes=(*images.notes, *notes))
        return go_on(opened, plan, images, processes=processes, views=views, listeners=heard)


def begin(
    data: DataRef,
    recipe: Recipe,
    *,
    out: str | Path | None,
    views: Views = NO_VIEWS,
    listeners: Sequence[Listener] = (),
) -> Run:
    views.check_start(recipe)
    recipe = lasting(recipe)
    with process_group(recipe.device) as processes, ExitStack() as stack:
        processes.check_same(shared_settings(recipe))
        plan, notes = fitting_workers(recipe)
        plan, images = fitted(plan, images_for(data, plan), processes)
        processes.check_same(sizes_of(images))
        seen = seen_notes(data.name, plan, images.validation_is)
        images = replace(images, notes=(*images.notes, *views.notes(), *notes, *seen, *honest_notes(plan, images)))
        folder = Path(processes.on_main(lambda: str(stack.enter_context(claimed(out, data.short_name)))))
        start = starting_model(plan, images, processes=processes, listeners=listeners)
        trainer = Trainer.build(plan, images, processes, start, views=views)
        facts = {"data": data.name, "views": views.given(), **facts_of(images, trainer)}
        processes.on_main(lambda: create(folder, plan, facts) and None)
        processes.check_sees(folder / RUN_FILE)
        return trainer.fit(folder, position=Position(), listeners=listeners)


def go_on(
    run: Run, plan: Recipe, images: Images, *, processes: Processes, views: Views, listeners: Sequence[Listener]
) -> Run:
    """Train on from the last checkpoint, or from the start where there is none."""
    said = partial(tell_all, listeners if processes.is_main else ())
    found = processes.on_main(lambda: Checkpoints(run.checkpoints, processes).newest_whole(said))
    if found:  # what the run started from may be gone
        model = model_again(Description.from_json(run.facts.get("model"), f"{run.folder}/run.json"), plan)
    else:
        model = starting_model(plan, images, processes=processes, listeners=listeners)
    trainer, position = Trainer.build(plan, images, processes, model, views=views), Position()
    if found:
        position = read_position(found)
        best = run.best(position.best_step)
        if problem := damage(best) if keeps_best(plan) and position.best_step else "":
            raise TrainingError(f"{best}: the best weights so far are damaged: {problem}; put them back, or start anew")
        read_tensors(found, trainer.state.tensors(), processes)
        trainer.state.restore(position)
    return trainer.fit(run.folder, position=position, listeners=listeners)


def with_progress(listeners: Sequence[Listener], progress: bool) -> tuple[Listener, ...]:
    return (ShownProgress(), *listeners) if progress else tuple(listeners)


def starting_model(recipe: Recipe, images: Images, *, processes: Processes, listeners: Sequence[Listener]) -> Model:
    model = model_for(recipe, images.classes).to(processes.device)
    if recipe.stem_init == "whitening" and not recipe.weights:
        whiten(model, images.train)
    if recipe.head_init != "zero" and is_fresh(model):
        said = partial(tell_all, listeners if processes.is_main else ())
        fit_head(model, images.train, recipe, processes=processes, said=said)
    return model


def fitted(recipe: Recipe, images: Images, processes: Processes) -> tuple[Recipe, Images]:
    """The recipe with a batch size that the images can fill, and a note where it had to change."""
    size = fitting_batch_size(recipe, len(images.train), processes.world_size)
    if size == recipe.batch_size:
        return recipe, images
    note = f"batch_size is {size}, not {recipe.batch_size}: there are no more images to train on"
    return recipe.replace(batch_size=size), replace(images, notes=(*images.notes, note))


def honest_notes(recipe: Recipe, images: Images) -> list[str]:
    """What to expect of few photos from scratch."""
    count = len(images.train)
    side = recipe.image_size or resolve(recipe.model).image_size[0]
    if recipe.weights or recipe.objective != "labels" or count >= FEW_IMAGES or side < PHOTO_PIXELS:
        return []
    return [f"from scratch, {count:,} images give a poor model; weights to start from do far better"]


def lasting(recipe: Recipe) -> Recipe:
    """The recipe as a run keeps it, with the whole path of a teacher."""
    return recipe.replace(teacher=lasting_path(recipe.teacher)) if recipe.teacher else recipe


def check_recipe(run: Run, recipe: Recipe, where: str, hint: str) -> None:
    """The settings are those that the run began with, as far as its result depends on them."""
    facts = run.facts
    was, now = (json.loads(json.dumps(settings)) for settings in (facts.get("recipe"), recipe.to_json()))
    for key in now:
        fitted = key == "batch_size" and was.get(key) <= facts["training_images"] < now[key]
        if key not in HARMLESS | DESCRIPTION and was.get(key) != now[key] and not fitted:
            raise TrainingError(f"{where}{key}={was.get(key)} when the run began, not {now[key]}; {hint}")


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """What must be the same in all processes of a run."""
    settings = {key: value for key, value in recipe.to_json().items() if key not in LOCAL | DESCRIPTION}
    return {"vitruvian": __version__, **settings}


def set_aside(run: Run) -> None:
    """Keep a finished run's damaged files under other names, so that they are made again."""
    for name in (RESULT_FILE, "model"):
        if (run.folder / name).exists():
            os.replace(run.folder / name, free_name(run.folder / f"damaged-{name}"))


def facts_of(images: Images, trainer: Trainer) -> dict[str, Any]:
    """What run.json says of the images and the model."""
    return {
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
        "teacher": teacher_digests(trainer.recipe),
        "environment": environment(),
    }


def teacher_digests(recipe: Recipe) -> dict[str, str] | None:
    """What tells the weights of the teacher from others; None without one."""
    return digests(locate(recipe.teacher)) if recipe.teacher else None


def check_same(facts: dict[str, Any], images: Images) -> None:
    """The data are those that the run began with, as far as their classes and numbers tell."""
    where = facts.get("data") or argument("data")
    for name, now in sizes_of(images).items():
        was = facts.get(name.replace(" ", "_"))
        if was != now:
            was, now = (value if isinstance(value, list) else [value] for value in (was, now))
            raise TrainingError(
                f"{where}: the data have changed since the run began, the {name} were {brief(was)} "
                f"and are {brief(now)}; put them back, or start a new run"
            )


def sizes_of(images: Images) -> dict[str, Any]:
    return {
        "classes": list(images.classes),
        "training images": len(images.train),
        "validation images": len(images.validation),
    }
