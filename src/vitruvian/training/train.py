"""Start a training run, or resume an interrupted one."""

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitruvian import __version__
from vitruvian.catalog import resolve, title_of
from vitruvian.config import Preprocess
from vitruvian.cost import parameters
from vitruvian.data.doctor.overlap import split_notes
from vitruvian.data.sources import Source
from vitruvian.data.stored import lost_by_rgb
from vitruvian.data.transform import Transform
from vitruvian.errors import ImageError, TrainingError, argument
from vitruvian.evaluation.features import FeatureSet, compute_features, open_store
from vitruvian.inference import Encoder
from vitruvian.machine import device_name
from vitruvian.model.build import Model
from vitruvian.progress import no_tracking, print_status, track
from vitruvian.report.html import PAGE
from vitruvian.targets import SINGLE
from vitruvian.text import brief
from vitruvian.training import run_folder
from vitruvian.training.checkpoint import Checkpoints, Position, free_name, read_position, verify, write_digests
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.initial_model import fit_logistic, initial_model, rebuild_model, with_head
from vitruvian.training.integrations import Listener, ProgressListener, TensorBoard, notify
from vitruvian.training.loop import Loop, Trainer
from vitruvian.training.planning import RESERVE, prepare_recipe
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, LOCAL, Recipe, RecipeChanges, change_recipe, join_changes
from vitruvian.training.run_folder import Run, make_folder
from vitruvian.training.splits import CustomTransforms, DataRef, fit_to_data, fit_workers, leakage_notes, split_data
from vitruvian.weights import hub
from vitruvian.weights.checkpoint_files import Description, digests
from vitruvian.weights.load import RUN_FILE, locate, published_name
from vitruvian.weights.save import save

FEW_IMAGES = 50_000  # with fewer images, training from scratch is far worse than fine-tuning
PHOTO_PIXELS = 64  # image side from which data counts as photos
RESTART_SECONDS = 60  # how long processes restarted by torchrun wait for their predecessors to release the run


def train(
    data: object,
    weights: str | Path | None = None,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    out: str | Path | None = None,
    settings: RecipeChanges = (),
    listeners: Sequence[Listener] = (),
    transform: Transform | None = None,
    train_transform: Transform | None = None,
    progress: bool = True,
    auto_resume: bool = False,
    minutes: float | None = None,
    **changes: Any,
) -> run_folder.Run:
    """Train a model on images. Under torchrun, all processes call this.

    Args:
        data: Anything that `open_dataset` takes: a path, a URL, a name, or an object such as a map-style
            `torch.utils.data.Dataset`.
        weights: File, folder or published name of weights to start from.
        recipe: A name, a TOML file or a Recipe; by default chosen for the data.
        model: Architecture to train from scratch (random weights).
        out: Folder of the run, which must be new or empty; by default a new one in `runs/`.
        settings: Changes to the recipe: {"epochs": 20, "augment.hflip": 0}, or ["epochs=20"].
        listeners: Objects that are notified of steps, metrics and notes. TensorBoard events are always written.
        transform: Replaces the evaluation preprocessing: a callable from a PIL image to a normalized float tensor
            (channels, rows, columns).
        train_transform: Replaces the recipe's augmentation, likewise.
        progress: Show progress on stderr.
        auto_resume: Resume the run in `out` if there is one with the same recipe, so that one call can start and
            continue a run.
        minutes: Time for the run, from which the number of steps is chosen (see `fit_minutes`). If steps turn out to
            be slower, there are fewer.
        changes: Settings of the recipe by keyword, such as `epochs=20` or `lr=1e-4` (see `Recipe`).

    Returns:
        The finished run.

    Raises:
        TrainingError: the run cannot start, or diverged.
        Interrupted: a signal stopped the run; a checkpoint is written, and `resume` continues it.
    """
    began = time.monotonic()
    settings, listeners = join_changes(settings, changes, signature(train).parameters), (TensorBoard(), *listeners)
    ref, transforms = DataRef.of(data), CustomTransforms(transform, train_transform)
    if minutes is not None and (auto_resume or {"epochs", "steps"} & settings.keys()):
        raise TrainingError(f"{argument('minutes')} chooses the steps; leave out epochs, steps and auto_resume")
    chosen, notes = prepare_recipe(ref, recipe, model=model, weights=weights, settings=settings, minutes=minutes)
    if auto_resume and out is None:
        raise TrainingError(f"auto_resume needs {argument('out')}, the folder of the run to start or continue")
    with process_group(chosen.device) as processes, ExitStack() as stack:
        if auto_resume and processes.on_main(lambda: (Path(str(out)).expanduser() / RUN_FILE).is_file()):
            run = run_folder.Run.open(str(out))
            target = (run.facts.get("model") or {}).get("target") or {}
            chosen, _ = chosen.for_target(target.get("kind", "single"))
            check_recipe(run, chosen, run.folder, f"use the same settings, or choose another {argument('out')}")
            harmless = {} if run.finished else {key: settings[key] for key in settings.keys() & HARMLESS}
            return resume(
                run,
                data=ref,
                settings=harmless,
                listeners=listeners[1:],
                transform=transform,
                train_transform=train_transform,
                progress=progress,
            )
        check_start(chosen, transforms)
        processes.check_same(shared_settings(chosen))
        chosen, worker_notes = fit_workers(chosen)
        chosen, splits = fit_to_data(chosen, ref, processes.world_size)
        images = len(splits.train)
        processes.check_same(splits.sizes)
        if processes.is_main and chosen.objective == "labels":
            shown = partial(track, label="comparing the splits") if progress else no_tracking
            held, held_is = splits.validation, splits.validation_is
            splits.notes.extend(split_notes(splits.train, held, held_is, chosen.group_by, shown))
        if transform is not None:
            saved = "the saved model has the preprocessing of the recipe instead"
            splits.notes.append(f"evaluated with your transform=; {saved}")
        splits.notes.extend([*device_notes(processes), *notes, *worker_notes, *leakage_notes(ref.name, chosen, splits)])
        if not chosen.weights:
            side = chosen.image_size or resolve(chosen.model).image_size[0]
            is_poor = chosen.objective == "labels" and images < FEW_IMAGES and side >= PHOTO_PIXELS
            poor = f", {images:,} images give a poor model; start from weights instead" if is_poor else ""
            splits.notes.append(f"training from scratch (random weights){poor}")
        folder = Path(processes.on_main(lambda: str(stack.enter_context(run_folder.claim_folder(out, ref.short_name)))))
        if progress:
            listeners = (ProgressListener(), *listeners)
        report = partial(notify, listeners if processes.is_main else ())
        start = initial_model(chosen, splits.classes, splits.train, processes, report)
        splits.notes.extend([] if transform or train_transform else depth_notes(splits.train, start.meta.preprocess))
        if chosen.lora.rank:
            counts = (sum(p.numel() for p in start.parameters() if p.requires_grad is flag) for flag in (True, False))
            kind, parts = "DoRA" if chosen.lora.dora else "LoRA", ", ".join(chosen.lora.parts)
            which = f"{kind} of rank {chosen.lora.rank} on {parts}"
            splits.notes.append("{}: {:,} parameters train, {:,} are frozen".format(which, *counts))
        trainer = Trainer(chosen, splits, processes, start, transforms)
        if not chosen.image_size and chosen.weights and (chosen.enlarge, chosen.train_scale) != (1, 1):
            sizes = start.config.image_size, trainer.augment.image_size
            evaluated, trained = ("x".join(map(str, size)) for size in sizes)
            scales = f"enlarge={chosen.enlarge:g} and train_scale={chosen.train_scale:g} in the recipe"
            splits.notes.append(f"images are evaluated at {evaluated} and trained at {trained} pixels: {scales}")
        facts = run_facts(trainer, ref)
        title = f"{title_of(start.config)} trained on {ref.name or ref.short_name}"
        described = chosen.replace(about=title, command=run_folder.command_line(), time="", result="")
        described = described.replace(model=title_of(start.config)) if chosen.weights else described
        processes.on_main(lambda: run_folder.write_run(folder, described, facts) and None)
        processes.check_sees(folder / RUN_FILE)
        deadline = math.inf if minutes is None else began + 60 * minutes * (1 - RESERVE / 2)
        return Loop(trainer, folder, Position(), listeners, deadline).run()


def depth_notes(source: Source, preprocess: Preprocess) -> list[str]:
    """A note if the first image has more than a model of 8-bit RGB reads."""
    lost = ""
    if not (source.remote or source.draws or preprocess.is_stored):
        with suppress(ImageError, OSError):  # training reports it
            lost = lost_by_rgb(source.read(0))
    keep = "preprocess.pixels=stored or architecture.in_channels keeps them"
    return [f"images are read as 8-bit RGB or gray, although the first has {lost}; {keep}"] if lost else []


def device_notes(processes: Processes) -> list[str]:
    """The accelerator of this process, if it has one."""
    return [] if processes.device.type == "cpu" else [f"device: {device_name(str(processes.device))}"]


def resume(
    run: str | Path | run_folder.Run,
    *,
    data: object = None,
    settings: RecipeChanges = (),
    listeners: Sequence[Listener] = (),
    transform: Transform | None = None,
    train_transform: Transform | None = None,
    progress: bool = True,
    **changes: Any,
) -> run_folder.Run:
    """Continue a run from its last checkpoint, exactly as if it had not been interrupted.

    A finished run is trained longer if `settings` has more epochs or steps: the learning rate continues as in a run of
    that length, and the augmentations are new. Without them it is returned unchanged; a missing report is written.

    Args:
        run: The run or its folder.
        data: Needed again if the run started with an object; otherwise the new location of data that has moved.
        settings: Changes to settings that do not affect the result, such as {"workers": 4}; for a finished run also
            epochs or steps, which count from the beginning of the run.
        listeners: Objects that are notified of steps, metrics and notes.
        transform: Needed again if the run started with it.
        train_transform: Needed again if the run started with it.
        progress: Show progress on stderr.
        changes: Such settings by keyword.

    Returns:
        The finished run.

    Raises:
        TrainingError: the run, its data or its settings have changed, or its files are damaged.
        Interrupted: a signal stopped the run again.
    """
    settings, listeners = join_changes(settings, changes, signature(resume).parameters), (TensorBoard(), *listeners)
    if run == "":
        raise TrainingError("the name of the run is empty", hint="give its folder")
    run = run if isinstance(run, run_folder.Run) else run_folder.Run.open(run)
    lengths = {"epochs", "steps"} & settings.keys()
    longer = run.finished and lengths
    for key in sorted(settings.keys() - HARMLESS - (lengths if longer else set())):
        change, hint = f"{key}={settings[key]}", "start a new run"
        if key in lengths:
            hint = f"resume the run to its end first, then train longer with {change}"
        allowed = ", ".join(sorted(HARMLESS))
        raise TrainingError(f"{change!r} cannot be changed when resuming, only {allowed}", hint=hint)
    damage = run.damage() if run.finished else ""
    needs_report = run.finished and not (run.folder / PAGE).is_file() and any(run.checkpoints.glob("step-*"))
    if run.finished and not damage and not needs_report and not longer:
        hint = f"to train longer, resume it with more {argument('epochs')}"
        if settings:
            change = "{}={}".format(*next(iter(settings.items())))
            raise TrainingError(f"the run has finished, so {change!r} has no effect", where=run.folder, hint=hint)
        if progress:
            longer_with = f"train longer with `vit train --resume {run.folder} --epochs N`"
            print_status(f"note: {run.folder} has finished; {longer_with}")
        return run
    check_recipe(run, run.recipe, run.folder / "recipe.toml", "restore it, or start a new run")
    facts = run.facts
    if facts.get("teacher") != teacher_digests(run.recipe):
        raise TrainingError("the teacher has changed since the run began", where=run.recipe.teacher, hint="restore it")
    if data is None and not facts.get("data"):
        reason = "the run started with a dataset object"
        raise TrainingError(reason, where=run.folder, hint="pass it again, resume(run, data=...)")
    recipe = change_recipe(run.recipe, settings)
    if longer:
        check_longer(run, damage)
    ref = DataRef.of(facts.get("data") if data is None else data)
    transforms, before = CustomTransforms(transform, train_transform), facts.get("transforms", [])
    if transforms.names != before:
        names = ", ".join(f"{name}=" for name in before) or "no custom transform"
        raise TrainingError(f"the run started with {names}", where=run.folder, hint="pass the same to resume")
    transforms.check(recipe)
    if progress:
        listeners = (ProgressListener(), *listeners)
    with process_group(recipe.device) as processes, ExitStack() as stack:
        processes.check_same(shared_settings(recipe))
        # Processes that torchrun has just replaced may still be ending.
        seconds = RESTART_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else 0
        processes.on_main(lambda: stack.enter_context(run_folder.lock_folder(run.folder, wait_seconds=seconds)))
        recipe, notes = fit_workers(recipe)
        if damage:
            processes.on_main(lambda: rename_damaged(run))
            notes.append(f"{damage}: finishing again")
        splits = split_data(ref, recipe)
        for name, now in splits.sizes.items():
            if (stored := facts.get(name.replace(" ", "_"))) != now:
                was, are = (brief(value if isinstance(value, list) else [value]) for value in (stored, now))
                reason = f"the data has changed since the run began: the {name} were {was} and are now {are}"
                raise TrainingError(reason, where=facts.get("data") or None, hint="restore it, or start a new run")
        splits.notes.extend([*device_notes(processes), *notes])
        report = partial(notify, listeners if processes.is_main else ())
        checkpoint = processes.on_main(lambda: Checkpoints(run.checkpoints, processes).newest_intact(report))
        if checkpoint is None:
            start, position = initial_model(recipe, splits.classes, splits.train, processes, report), Position()
        else:  # the weights that the run started from may be gone
            description = Description.from_json(facts.get("model"), f"{run.folder}/run.json")
            start, position = rebuild_model(description, recipe), read_position(checkpoint)
        trainer = Trainer(recipe, splits, processes, start, transforms)
        if longer:
            if trainer.batches.total <= position.step:
                done = f"{position.step:,} steps ({position.step / trainer.batches.per_epoch:g} epochs)"
                hint = "pass more epochs or steps to train longer"
                raise TrainingError(f"the run has finished {done}", where=run.folder, hint=hint)
            splits.notes.append(f"continuing after {position.step:,} of now {trainer.batches.total:,} steps")
            position.worse = 0  # early stopping begins anew
            processes.on_main(lambda: reopen(run, recipe, trainer.batches.total, position.best_step))
        if checkpoint is not None:
            best = run.best(position.best_step)
            if problem := verify(best) if recipe.final == "best" and position.best_step else "":
                reason = f"the best weights so far are damaged: {problem}"
                raise TrainingError(reason, where=best, hint="restore them, or start a new run")
            trainer.restore(checkpoint, position)
        return Loop(trainer, run.folder, position, listeners).run()


def check_start(recipe: Recipe, transforms: CustomTransforms) -> None:
    """Raise, before the data is opened, if a package is missing or the transforms do not fit the recipe."""
    transforms.check(recipe)
    if recipe.weights and published_name(recipe.weights):
        hub.require_packages(recipe.weights)


def check_recipe(run: run_folder.Run, recipe: Recipe, where: Path, hint: str) -> None:
    """Raise TrainingError unless all settings that affect the result are those that the run started with."""
    facts = run.facts
    before, now = (json.loads(json.dumps(settings)) for settings in (facts.get("recipe"), recipe.to_json()))
    for key in now:
        was_reduced = key == "batch_size" and before.get(key) <= facts["training_images"] < now[key]
        if key == "model" and recipe.weights:  # the weights decide
            continue
        if key not in HARMLESS | DESCRIPTION and key in before and before[key] != now[key] and not was_reduced:
            reason = f"{key}={before.get(key)} when the run began, not {now[key]}"
            raise TrainingError(reason, where=where, hint=hint)


def shared_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings that must be equal in all processes of a run."""
    settings = {key: value for key, value in recipe.to_json().items() if key not in LOCAL | DESCRIPTION}
    return {"vitruvian": __version__, **settings}


def check_longer(run: run_folder.Run, damage: str) -> None:
    """Raise TrainingError unless a finished run can be trained longer."""
    if damage:
        raise TrainingError(damage, where=run.folder, hint="resume the run without other settings to repair it")
    diverged = f"this run diverged ({run.diverged})" if run.diverged else ""
    if diverged or not any(run.checkpoints.glob("step-*")):
        reason = diverged or "this run has no checkpoint to continue from"
        raise TrainingError(reason, where=run.folder, hint=f"start a new run from it: {argument('weights')}")


def reopen(run: run_folder.Run, recipe: Recipe, steps: int, best_step: int) -> None:
    """Make a finished run one of more steps that is not finished."""
    best = run.best(best_step)
    if recipe.final == "best" and best_step and not best.exists():  # then the model has the best weights
        shutil.copytree(run.folder / "model", best)
        write_digests(best)
    for name in (run_folder.RESULT_FILE, PAGE):
        (run.folder / name).unlink(missing_ok=True)
    recipe = recipe.replace(command=f"{recipe.command}; {run_folder.command_line()}")
    run_folder.write_run(run.folder, recipe, run.facts | {"steps": steps})


def rename_damaged(run: run_folder.Run) -> None:
    """Rename the damaged files of a finished run, so that they are written again."""
    for name in (run_folder.RESULT_FILE, "model"):
        if (run.folder / name).exists():
            os.replace(run.folder / name, free_name(run.folder / f"damaged-{name}"))


def run_facts(trainer: Trainer, data: DataRef) -> dict[str, Any]:
    """The facts about the images and the model in run.json."""
    splits = trainer.splits
    return {
        "data": data.name,
        "transforms": trainer.transforms.names,
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
        "environment": run_folder.environment(),
    }


def teacher_digests(recipe: Recipe) -> dict[str, str] | None:
    """Digests of the teacher's files, to notice if it changes."""
    return digests(locate(recipe.teacher)) if recipe.teacher else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedClasses:
    """A model with more classes, and its accuracy in percent on images that were held out."""

    folder: Path
    added: tuple[str, ...]
    before: float  # of the old classes, by the model without the new ones
    after: float  # of the same images, among all classes
    new: float  # of the images of the new data, among all classes
    counts: tuple[int, int]  # held-out images of the run, and of the new data


def add_classes(run: str | Path | Run, data: object, out: str | Path | None = None) -> AddedClasses:
    """Add the classes of `data` to the model of a finished run, and save the model.

    Only the head is fitted, by logistic regression on the features of the run's training images and of `data`, so the
    run's data must still be there. Images of classes that the model has already are added to those.

    Args:
        run: A run with one label per image, or its folder.
        data: Images with labels; a part of each class is held out unless there is a split for validation.
        out: Folder of the new model, which must not exist; by default a new one in `runs/`.

    Raises:
        TrainingError: The run has not finished or its data cannot be found, or `data` has no new class.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    facts, recipe = run.facts, run.recipe
    if not run.finished or not facts.get("data"):
        reason = "has not finished" if not run.finished else "was trained on an object, which cannot be opened again"
        raise TrainingError(f"the run {reason}", where=run.folder)
    if out is not None and Path(out).expanduser().exists():
        raise TrainingError("exists", where=out, hint=f"choose another {argument('out')}")
    model, new = run.model(), DataRef.of(data)
    if model.meta.target != SINGLE or model.head is None:
        raise TrainingError("only a model with one label per image can get more classes", where=run.folder)
    old = split_data(facts["data"], recipe)
    more = split_data(new, recipe.replace(validation="auto", max_train_samples=0))
    added = tuple(name for name in more.classes if name not in old.classes)
    if not added:
        raise TrainingError("has no class that the model does not have", where=new.short_name)
    classes = (*old.classes, *added)
    encoder = Encoder(model)
    store = open_store(encoder)
    sources = (old.train, more.train, old.validation, more.validation)
    features = [compute_features(encoder, source, store) for source in sources]
    positions = [np.array([classes.index(name) for name in part.classes]) for part in features]
    parts = [replace(part, labels=at[part.labels], classes=classes) for part, at in zip(features, positions)]
    training, held_out = parts[:2], parts[2:]
    values, labels = (np.concatenate([getattr(part, name) for part in training]) for name in ("values", "labels"))
    head = fit_logistic(replace(training[0], values=values, labels=labels))
    extended = with_head(model, head, classes, f"{model.meta.origin}; with {len(added)} more classes")
    pairs = (model, held_out[0]), (extended, held_out[0]), (extended, held_out[1])
    before, after, right = (accuracy(*pair) for pair in pairs)
    folder = make_folder(new.short_name) if out is None else Path(out).expanduser()
    save(extended, folder)
    counts = len(held_out[0]), len(held_out[1])
    return AddedClasses(folder=folder, added=added, before=before, after=after, new=right, counts=counts)


def accuracy(model: Model, features: FeatureSet) -> float:
    """Accuracy of a model's head in percent."""
    assert model.head is not None
    with torch.no_grad():
        logits = model.head(torch.from_numpy(features.values))
    return 100.0 * float((logits.argmax(dim=1).numpy() == features.labels).mean())
