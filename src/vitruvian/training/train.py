"""Start a training run, or resume an interrupted one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from vitruvian import __version__
from vitruvian.catalog import resolve
from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.cost import parameters
from vitruvian.data.transform import Transform
from vitruvian.errors import TrainingError, argument
from vitruvian.report.html import PAGE
from vitruvian.text import brief
from vitruvian.training.checkpoint import Checkpoints, Position, free_name, read_position, verify
from vitruvian.training.distributed import process_group
from vitruvian.training.initial_model import initial_model, rebuild_model, without_shape
from vitruvian.training.journal import Listener, ProgressListener, notify
from vitruvian.training.loop import Loop, Trainer, needs_best
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, LOCAL, Recipe, change_recipe, changed_keys, read_recipe
from vitruvian.training.run_folder import (
    RESULT_FILE,
    Run,
    absolute_path,
    claim_folder,
    create_run,
    environment,
    lock_folder,
)
from vitruvian.training.splits import (
    CustomTransforms,
    DataRef,
    Splits,
    fit_batch_size,
    fit_workers,
    leakage_notes,
    split_data,
)
from vitruvian.weights import hub
from vitruvian.weights.checkpoint_files import digests
from vitruvian.weights.description import Description
from vitruvian.weights.load import RUN_FILE, locate, published_name

FEW_IMAGES = 50_000
"""With fewer images, training from scratch is far worse than fine-tuning."""
PHOTO_PIXELS = 64
"""Image side from which data counts as photos."""
RESTART_SECONDS = 60
"""How long processes restarted by torchrun wait for their predecessors to release the run."""
SIZE_SETTINGS = {"depth", "width", "mlp_dim", "num_heads", "stem"}
"""Model settings that the name of a model decides."""


def train(
    data: object,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    settings: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    transform: Transform | None = None,
    train_transform: Transform | None = None,
    progress: bool = True,
    auto_resume: bool = False,
) -> Run:
    """Train a model on images. Under torchrun, all processes call this.

    Args:
        data: Anything that `open_dataset` takes: a path, a URL, a name, or an object such as a map-style
            `torch.utils.data.Dataset`.
        recipe: A name, a TOML file or a Recipe; by default chosen for the data.
        model: Architecture to train from scratch (random weights).
        weights: File, folder or published name of weights to start from.
        out: Folder of the run, which must be new or empty; by default a new one in `runs/`.
        settings: Changes to the recipe, such as "epochs=20".
        listeners: Objects that are notified of steps, metrics and notes.
        transform: Replaces the evaluation preprocessing: a callable from a PIL image to a normalized float tensor
            (channels, rows, columns).
        train_transform: Replaces the recipe's augmentation, likewise.
        progress: Show progress on stderr.
        auto_resume: Resume the run in `out` if there is one with the same recipe, so that one call can start and
            continue a run.

    Returns:
        The finished run.

    Raises:
        TrainingError: the run cannot start, or diverged.
        Interrupted: a signal stopped the run; a checkpoint is written, and `resume` continues it.
    """
    ref, transforms = DataRef.of(data), CustomTransforms(transform, train_transform)
    chosen = choose_recipe(ref, recipe, model=model, weights=weights, settings=settings)
    if chosen.teacher:
        chosen = chosen.replace(teacher=absolute_path(chosen.teacher))
    if auto_resume and out is None:
        raise TrainingError(f"auto_resume needs {argument('out')}, the folder of the run to start or continue")
    with process_group(chosen.device) as processes, ExitStack() as stack:
        if auto_resume and processes.on_main(lambda: (Path(str(out)).expanduser() / RUN_FILE).is_file()):
            run = Run.open(str(out))
            check_recipe(run, chosen, run.folder, f"use the same settings, or choose another {argument('out')}")
            changes = [change for change in settings if changed_keys([change]) <= HARMLESS]
            return resume(
                run,
                data=ref,
                settings=changes,
                listeners=listeners,
                transform=transform,
                train_transform=train_transform,
                progress=progress,
            )
        check_start(chosen, transforms)
        processes.check_same(shared_settings(chosen))
        chosen, worker_notes = fit_workers(chosen)
        splits = split_data(ref, chosen)
        batch_size = fit_batch_size(chosen, len(splits.train), processes.world_size)
        if batch_size != chosen.batch_size:
            splits = splits.with_notes(f"batch_size is {batch_size}, not {chosen.batch_size}: there are no more images")
            chosen = chosen.replace(batch_size=batch_size)
        processes.check_same(splits.sizes)
        leakage = leakage_notes(ref.name, chosen, splits.validation_is)
        splits = splits.with_notes(*transforms.notes(), *worker_notes, *leakage, *scratch_notes(chosen, splits))
        folder = Path(processes.on_main(lambda: str(stack.enter_context(claim_folder(out, ref.short_name)))))
        if progress:
            listeners = (ProgressListener(), *listeners)
        report = partial(notify, listeners if processes.is_main else ())
        start = initial_model(chosen, splits.classes, splits.train, processes, report)
        trainer = Trainer(chosen, splits, processes, start, transforms)
        facts = {"data": ref.name, "transforms": transforms.names, **run_facts(trainer)}
        processes.on_main(lambda: create_run(folder, chosen, facts) and None)
        processes.check_sees(folder / RUN_FILE)
        return Loop(trainer, folder, Position(), listeners).run()


def resume(
    run: str | Path | Run,
    *,
    data: object = None,
    settings: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    transform: Transform | None = None,
    train_transform: Transform | None = None,
    progress: bool = True,
) -> Run:
    """Continue a run from its last checkpoint, exactly as if it had not been interrupted.

    A finished run is returned unchanged, except that a missing report is written.

    Args:
        run: The run or its folder.
        data: Needed again if the run started with an object; otherwise the new location of data that has moved.
        settings: Changes to settings that do not affect the result, such as "workers=4".
        listeners: Objects that are notified of steps, metrics and notes.
        transform: Needed again if the run started with it.
        train_transform: Needed again if the run started with it.
        progress: Show progress on stderr.

    Returns:
        The finished run.

    Raises:
        TrainingError: the run, its data or its settings have changed, or its files are damaged.
        Interrupted: a signal stopped the run again.
    """
    if run == "":
        raise TrainingError("the name of the run is empty", hint="give its folder")
    run = run if isinstance(run, Run) else Run.open(run)
    for change in settings:
        if not changed_keys([change]) <= HARMLESS:
            allowed = ", ".join(sorted(HARMLESS))
            raise TrainingError(f"{change!r} cannot be changed when resuming, only {allowed}", hint="start a new run")
    damage = run.damage() if run.finished else ""
    needs_report = run.finished and not (run.folder / PAGE).is_file() and any(run.checkpoints.glob("step-*"))
    if run.finished and not damage and not needs_report:
        return run
    check_recipe(run, run.recipe, run.folder / "recipe.toml", "restore it, or start a new run")
    facts = run.facts
    if facts.get("teacher") != teacher_digests(run.recipe):
        raise TrainingError("the teacher has changed since the run began", where=run.recipe.teacher, hint="restore it")
    if data is None and not facts.get("data"):
        raise TrainingError(
            "the run started with a dataset object", where=run.folder, hint="pass it again, resume(run, data=...)"
        )
    recipe = change_recipe(run.recipe, settings)
    ref, transforms = (
        DataRef.of(facts.get("data") if data is None else data),
        CustomTransforms(transform, train_transform),
    )
    transforms.check_resume(run)
    if progress:
        listeners = (ProgressListener(), *listeners)
    with process_group(recipe.device) as processes, ExitStack() as stack:
        processes.check_same(shared_settings(recipe))
        # Processes that torchrun has just replaced may still be ending.
        seconds = RESTART_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0
        processes.on_main(lambda: stack.enter_context(lock_folder(run.folder, wait_seconds=seconds)))
        recipe, notes = fit_workers(recipe)
        if damage:
            processes.on_main(lambda: rename_damaged(run))
            notes.append(f"{damage}: finishing again")
        splits = split_data(ref, recipe)
        check_data(facts, splits)
        splits = splits.with_notes(*notes)
        report = partial(notify, listeners if processes.is_main else ())
        checkpoint = processes.on_main(lambda: Checkpoints(run.checkpoints, processes).newest_intact(report))
        if checkpoint is None:
            start = initial_model(recipe, splits.classes, splits.train, processes, report)
            return Loop(Trainer(recipe, splits, processes, start, transforms), run.folder, Position(), listeners).run()
        # The weights that the run started from may be gone.
        start = rebuild_model(Description.from_json(facts.get("model"), f"{run.folder}/run.json"), recipe)
        trainer, position = Trainer(recipe, splits, processes, start, transforms), read_position(checkpoint)
        best = run.best(position.best_step)
        if problem := verify(best) if needs_best(recipe) and position.best_step else "":
            raise TrainingError(
                f"the best weights so far are damaged: {problem}", where=best, hint="restore them, or start a new run"
            )
        trainer.restore(checkpoint, position)
        return Loop(trainer, run.folder, position, listeners).run()


def choose_recipe(
    data: object,
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """The recipe that `train` uses for these arguments; by default it depends on the data."""
    if model and weights:
        raise TrainingError(
            f"{argument('model')} trains from scratch, {argument('weights')} starts from weights: give one of the two"
        )
    if recipe is None:
        recipe = default_recipe(DataRef.of(data), model, weights)
        if recipe == "photos" and not weights:
            weights = hub.default_weights()
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if model:
        chosen = chosen.replace(model=model, weights="", architecture=architecture_for(chosen, model))
    if weights:
        chosen = chosen.replace(weights=absolute_path(weights), architecture=without_shape(chosen))
    return change_recipe(chosen, settings)


def default_recipe(data: DataRef, model: str | None, weights: str | Path | None) -> str:
    if not weights and data.name == "digits":
        return "digits"
    if not weights and data.dataset.name.lower().startswith("cifar"):
        return "cifar10"
    return "scratch" if model else "photos"


def architecture_for(recipe: Recipe, model: str) -> dict[str, Any]:
    """The part of a recipe's architecture that applies to another model: all but the size, which its name decides."""
    settings = {key: value for key, value in recipe.architecture.items() if key not in SIZE_SETTINGS}
    config = resolve(model)
    if settings.get("representation_size") and isinstance(config, ViTConfig):
        settings["representation_size"] = config.width
    if isinstance(config, ResNetConfig):
        known = {field.name for field in fields(ResNetConfig)}
        return {key: value for key, value in settings.items() if key in known}
    return settings


def check_start(recipe: Recipe, transforms: CustomTransforms) -> None:
    """Raise, before the data is opened, if a package is missing or the transforms do not fit the recipe."""
    transforms.check(recipe)
    if recipe.weights and published_name(recipe.weights):
        hub.require_packages(recipe.weights)


def scratch_notes(recipe: Recipe, splits: Splits) -> list[str]:
    """A warning that few photos are not enough to train from scratch."""
    images = len(splits.train)
    side = recipe.image_size or resolve(recipe.model).image_size[0]
    if recipe.weights or recipe.objective != "labels" or images >= FEW_IMAGES or side < PHOTO_PIXELS:
        return []
    return [f"from scratch (random weights), {images:,} images give a poor model; start from weights instead"]


def check_recipe(run: Run, recipe: Recipe, where: Path, hint: str) -> None:
    """Raise TrainingError unless all settings that affect the result are those that the run started with."""
    facts = run.facts
    before, now = (json.loads(json.dumps(settings)) for settings in (facts.get("recipe"), recipe.to_json()))
    for key in now:
        was_reduced = key == "batch_size" and before.get(key) <= facts["training_images"] < now[key]
        if key not in HARMLESS | DESCRIPTION and before.get(key) != now[key] and not was_reduced:
            reason = f"{key}={before.get(key)} when the run began, not {now[key]}"
            raise TrainingError(reason, where=where, hint=hint)


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    settings = {key: value for key, value in recipe.to_json().items() if key not in LOCAL | DESCRIPTION}
    return {"vitruvian": __version__, **settings}


def rename_damaged(run: Run) -> None:
    """Rename the damaged files of a finished run, so that they are written again."""
    for name in (RESULT_FILE, "model"):
        if (run.folder / name).exists():
            os.replace(run.folder / name, free_name(run.folder / f"damaged-{name}"))


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """The facts about the images and the model in run.json."""
    splits = trainer.splits
    return {
        "classes": list(splits.classes),
        "training_images": len(splits.train),
        "validation_images": len(splits.validation),
        "validation": splits.validation_is,
        "steps": trainer.batches.total,
        "steps_per_epoch": trainer.batches.per_epoch,
        "model": Description.of(trainer.model).to_json(),
        "parameters": parameters(trainer.model.config),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "notes": list(splits.notes),
        "teacher": teacher_digests(trainer.recipe),
        "environment": environment(),
    }


def teacher_digests(recipe: Recipe) -> dict[str, str] | None:
    """Digests of the teacher's files, to notice if it changes."""
    return digests(locate(recipe.teacher)) if recipe.teacher else None


def check_data(facts: dict[str, Any], splits: Splits) -> None:
    """Raise TrainingError unless classes and numbers of images are those that the run started with."""
    for name, now in splits.sizes.items():
        before = facts.get(name.replace(" ", "_"))
        if before != now:
            was, are = (brief(value if isinstance(value, list) else [value]) for value in (before, now))
            raise TrainingError(
                f"the data has changed since the run began: the {name} were {was} and are now {are}",
                where=facts.get("data") or None,
                hint="restore it, or start a new run",
            )
