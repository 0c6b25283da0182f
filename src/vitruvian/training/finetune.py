"""Fine-tuning as the paper does it: choose the lr on a dev split, train again on everything, average over seeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitruvian.data.sources import BUILT_IN
from vitruvian.errors import ConfigError, Interrupted, TrainingError
from vitruvian.tasks import SEEDS, Task, task_meant
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.images import images_for
from vitruvian.training.journal import Listener
from vitruvian.training.loop import Diverged
from vitruvian.training.model import model_for, without_shape
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import changed, keys_of, read_recipe
from vitruvian.training.run import RUNS, Run, lasting_data, lasting_path, write_whole
from vitruvian.training.sweep import FAILED_FILE, SWEEP_FILE, Protocol, State, Sweep, Trial, differences
from vitruvian.training.sweep_report import write_sweep_report
from vitruvian.training.train import resume, train

SMALL_RECIPE = "finetune-small"
"""For data that is not a task of the paper."""
MANY_IMAGES = 100_000
"""In a trial without a GPU, that a warning is due."""


def protocol_for(
    data: str | Path,
    weights: str | Path,
    *,
    recipe: str | Path | Recipe | None = None,
    task: Task | None = None,
    settings: Sequence[str] = (),
    lrs: Sequence[float] = (),
    seeds: int = SEEDS,
) -> Protocol:
    """What fine-tuning these weights on this data means.

    A task by name brings the paper's recipe, its view and its metric; `task` gives them to other data. Without a task
    and a recipe, the recipe is `finetune-small`. `lrs` replace those of the recipe.
    """
    if task is None and str(data) not in BUILT_IN:
        task = task_meant(str(data))
    named = recipe or (task.recipe if task else SMALL_RECIPE)
    found = named if isinstance(named, Recipe) else read_recipe(named)
    if found.objective == "masked":
        raise ConfigError(
            "fine-tuning learns labels, and this recipe learns without them (objective='masked'): "
            "pre-train with `vit train`, then fine-tune --from its run with another recipe"
        )
    found = found.replace(weights=lasting_path(weights), architecture=without_shape(found))
    if task is not None:
        found = found.replace(view={**task.view, **found.view})
    found = changed(with_share_of_warmup(found, settings), settings)
    if "lr" in keys_of(settings):
        if lrs:
            raise ConfigError(f"give lr={found.lr:g} or lrs= to choose among, not both")
        lrs = (found.lr,)
    return Protocol(
        data=lasting_data(data),
        recipe=found,
        lrs=tuple(dict.fromkeys(lrs or found.lrs or (found.lr,))),
        seeds=seeds,
        metric=task.metric if task else "top1",
    )


def with_share_of_warmup(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with its warm-up as a share, where its length is changed: it stays the same part of the run."""
    if keys_of(settings) & {"steps", "epochs"} and recipe.steps and recipe.warmup >= 1:
        return recipe.replace(warmup=recipe.warmup / recipe.steps)
    return recipe


def finetune(
    protocol: Protocol,
    out: str | Path | None = None,
    *,
    listeners: Sequence[Listener] = (),
    said: Callable[[str], None] | None = None,
) -> Sweep:
    """Carry the protocol out, or go on with it where an earlier call was cut off.

    Each trial is a run folder in `out`; finished ones are not repeated, an unfinished one is resumed. Without `out`,
    it is the folder in `runs/` that has this protocol's sweep, or else a new one. A rate at which
    training diverges is left out of the choice. Under torchrun, all processes call this.
    """
    with process_group(protocol.recipe.device) as processes:  # once for all trials
        folder = Path(processes.broadcast(str(sweep_folder(protocol, out) if processes.is_main else "")))
        work = Work(
            processes=processes, listeners=tuple(listeners), said=said if said and processes.is_main else silent
        )
        return work.sweep(protocol, folder)


def silent(text: str) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Who does the trials and who hears of them; all processes follow what the first one finds in the folders."""

    processes: Processes
    listeners: tuple[Listener, ...]
    said: Callable[[str], None]

    def sweep(self, protocol: Protocol, folder: Path) -> Sweep:
        """All trials of a protocol."""
        if not (folder / SWEEP_FILE).is_file():
            self.check(protocol)
        sweep = Sweep(folder=folder, protocol=protocol, dev=tuple(protocol.dev_trials(folder)))
        self.record(sweep)
        for number, trial in enumerate(sweep.dev, 1):
            self.carry_out(sweep, trial, number)
        lr = self.processes.broadcast(sweep.chosen_lr)
        if lr is None:
            raise TrainingError(
                f"{folder}: training diverged at every learning rate, {why(sweep.dev[0])}; try lower --lrs"
            )
        sweep = replace(sweep, test=tuple(protocol.test_trials(folder, lr)))
        for number, trial in enumerate(sweep.test, len(sweep.dev) + 1):
            self.carry_out(sweep, trial, number)
        if not self.processes.broadcast(sweep.values()):
            raise TrainingError(f"{folder}: training diverged with every seed, {why(sweep.test[0])}; try lower --lrs")
        return sweep

    def check(self, protocol: Protocol) -> None:
        """Refuse what no trial can begin with before anything is written, and warn of what takes days."""
        recipe = protocol.recipe
        images = images_for(protocol.data, recipe)
        model_for(recipe, images.classes)
        seen = recipe.steps * recipe.batch_size or round(recipe.epochs * len(images.train))
        if self.processes.device.type == "cpu" and seen > MANY_IMAGES:
            made = f", --recipe {SMALL_RECIPE} is made for such machines" if recipe.steps else ""
            self.said(
                f"note: each trial goes through {seen:,} images, and there is no GPU: this may take days; "
                f"--set max_train_samples=N trains on no more than N{made}"
            )

    def carry_out(self, sweep: Sweep, trial: Trial, number: int) -> None:
        """Train, or train on, unless the trial is over."""
        state: State = self.processes.broadcast(trial.state)
        self.said(announced(trial, state, f"{number} of {len(sweep.dev) + sweep.protocol.seeds}"))
        try:
            if state == "begun":
                resume(trial.folder, listeners=self.listeners)
            elif state == "waiting":
                if self.processes.is_main:
                    shutil.rmtree(trial.folder, ignore_errors=True)  # what was cut off before the run was on record
                recipe = sweep.protocol.recipe_of(trial)
                train(sweep.protocol.data, recipe=recipe, out=trial.folder, listeners=self.listeners)
        except Interrupted as stopped:
            done = sum(other.state == "done" for other in sweep.trials)
            text = f"stopped in {trial.name} with {done} trials done; the same command goes on from there"
            raise Interrupted(text, stopped.number) from None
        except Diverged as error:
            if self.processes.is_main:
                write_whole(trial.folder / FAILED_FILE, str(error))
        if self.processes.is_main:
            Run(trial.folder).forget_checkpoints()
        self.record(sweep)

    def record(self, sweep: Sweep) -> None:
        """Write sweep.json and report.html."""
        if self.processes.is_main:
            sweep.write()
            write_sweep_report(sweep)


def announced(trial: Trial, state: State, place: str) -> str:
    """What comes next, in a line."""
    seed = f", seed {trial.seed}" if trial.kind == "test" else ""
    before = {"done": " (done before)", "failed": " (diverged before)", "begun": " (goes on)", "waiting": ""}[state]
    return f"trial {place}: lr {trial.lr:g}{seed}, measured on the {trial.kind} split{before}"


def why(trial: Trial) -> str:
    return f"in {trial.name}: {trial.to_json().get('why', 'for a reason that is not on record')}"


def sweep_folder(protocol: Protocol, out: str | Path | None) -> Path:
    """The folder asked for, if it is free or has this very sweep; else the first such in `runs/`."""
    if out is not None:
        folder = Path(out).expanduser()
        if (folder / SWEEP_FILE).is_file():
            found = differences(folder, protocol)
            if found:
                raise TrainingError(f"{folder}: there is a sweep with {found[0]}; choose another --out")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TrainingError(f"{folder}: exists and is no sweep; choose another --out")
        return folder
    name = Path(protocol.data.rstrip("/*")).stem or "data"
    number = 1
    while True:
        folder = RUNS / f"{name}-finetune-{number}"
        if not folder.exists() or ((folder / SWEEP_FILE).is_file() and not differences(folder, protocol)):
            return folder
        number += 1
