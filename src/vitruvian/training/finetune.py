"""Fine-tuning as the paper does it: choose the lr on a dev split, train again on everything, average over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vitruvian.data.formats import BUILT_IN
from vitruvian.errors import ConfigError, Interrupted, TrainingError, argument
from vitruvian.files import write_json
from vitruvian.progress import print_status
from vitruvian.tasks import SEEDS, Task, task_of_data
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.given import NO_VIEWS, DataRef
from vitruvian.training.images import images_for
from vitruvian.training.journal import Listener
from vitruvian.training.loop import Diverged
from vitruvian.training.model import model_for, without_shape
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import changed, keys_of, read_recipe
from vitruvian.training.run import FAILED_FILE, RUNS, Run, RunState, is_free, lasting_data, lasting_path, owned
from vitruvian.training.sweep import Protocol, Sweep, Trial, differences, write_sweep_report
from vitruvian.training.train import begin, resume, with_progress
from vitruvian.weights.load import SWEEP_FILE

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
        task = task_of_data(str(data))
    named = recipe or (task.recipe if task else SMALL_RECIPE)
    found = named if isinstance(named, Recipe) else read_recipe(named)
    if found.objective == "masked":
        raise ConfigError(
            "fine-tuning learns labels, and this recipe learns without them (objective='masked'): "
            "pre-train with `vit train`, then fine-tune from its run with another recipe"
        )
    found = found.replace(weights=lasting_path(weights), architecture=without_shape(found))
    if task is not None:
        found = found.replace(view={**task.preprocess, **found.view})
    if keys_of(settings) & {"steps", "epochs"} and found.steps and found.warmup >= 1:
        found = found.replace(warmup=found.warmup / found.steps)  # the same part of a run of another length
    found = changed(found, settings)
    if "lr" in keys_of(settings):
        if lrs:
            raise ConfigError(f"give {argument('lr', found.lr, 'g')} or {argument('lrs')} to choose among, not both")
        lrs = (found.lr,)
    return Protocol(
        data=lasting_data(data),
        recipe=found,
        lrs=tuple(dict.fromkeys(lrs or found.lrs or (found.lr,))),
        seeds=seeds,
        metric=task.metric if task else "top1",
    )


def finetune(
    protocol: Protocol,
    out: str | Path | None = None,
    *,
    listeners: Sequence[Listener] = (),
    said: Callable[[str], None] = print_status,
    progress: bool = True,
) -> Sweep:
    """Carry the protocol out, or go on with it where an earlier call was cut off.

    Each trial is a run folder in `out`; finished ones are not repeated, an unfinished one is resumed. Without `out`,
    it is the folder in `runs/` that has this protocol's sweep, or else a new one. A learning rate at which training
    diverges is left out of the choice. Under torchrun, all processes call this.
    """
    with process_group(protocol.recipe.device) as processes, ExitStack() as stack:  # once for all trials
        folder = Path(processes.broadcast(str(sweep_folder(protocol, out) if processes.is_main else "")))
        data = DataRef(protocol.data)
        sweep = Sweep(folder=folder, protocol=protocol, dev=tuple(protocol.dev_trials(folder)))
        if not (folder / SWEEP_FILE).is_file():
            check(protocol, data, processes, said)
        processes.on_main(lambda: stack.enter_context(owned(folder)))
        heard = with_progress(listeners, progress)

        def train(sweep: Sweep, trials: Sequence[Trial]) -> None:
            series = Series(data=data, processes=processes, listeners=heard, said=said, record=partial(record, sweep))
            if processes.is_main:
                record(sweep)
            for trial in trials:
                place = f"trial {sweep.trials.index(trial) + 1} of {len(sweep.dev) + protocol.seeds}"
                series.train(trial.folder, protocol.recipe_of(trial), f"{place}: {trial.title}")

        train(sweep, sweep.dev)
        lr = processes.broadcast(sweep.chosen_lr)
        if lr is None:
            raise TrainingError(
                f"{folder}: training diverged at every lr, {sweep.dev[0].why}; try lower {argument('lrs')}"
            )
        sweep = replace(sweep, test=tuple(protocol.test_trials(folder, lr)))
        train(sweep, sweep.test)
        if not processes.broadcast(sweep.values()):
            raise TrainingError(
                f"{folder}: training diverged with every seed, {sweep.test[0].why}; try lower {argument('lrs')}"
            )
        return sweep


def record(sweep: Sweep) -> None:
    sweep.write()
    write_sweep_report(sweep)


def check(protocol: Protocol, data: DataRef, processes: Processes, said: Callable[[str], None]) -> None:
    """Refuse what no trial can begin with before anything is written, and warn of what takes days."""
    recipe = protocol.recipe
    NO_VIEWS.check_start(recipe)
    images = images_for(data, recipe)
    model_for(recipe, images.classes)
    seen = recipe.steps * recipe.batch_size or round(recipe.epochs * len(images.train))
    if processes.is_main and processes.device.type == "cpu" and seen > MANY_IMAGES:
        made = f", the recipe {SMALL_RECIPE} is made for such machines" if recipe.steps else ""
        said(
            f"note: each trial goes through {seen:,} images, and there is no GPU: this may take days; "
            f"max_train_samples=N trains on no more than N{made}"
        )


def sweep_folder(protocol: Protocol, out: str | Path | None) -> Path:
    """The folder asked for, if it is free or has this very sweep; else the first such in `runs/`."""
    if out is not None:
        folder = Path(out).expanduser()
        if (folder / SWEEP_FILE).is_file():
            found = differences(folder, protocol)
            if found:
                raise TrainingError(f"{folder}: there is a sweep with {found[0]}; choose another {argument('out')}")
        elif folder.exists() and (not folder.is_dir() or not is_free(folder)):
            raise TrainingError(f"{folder}: exists and is no sweep; choose another {argument('out')}")
        return folder
    name = Path(protocol.data.rstrip("/*")).stem or "data"
    number = 1
    while True:
        folder = RUNS / f"{name}-finetune-{number}"
        if not folder.exists() or ((folder / SWEEP_FILE).is_file() and not differences(folder, protocol)):
            return folder
        number += 1


BEFORE: dict[RunState, str] = {
    "done": " (done before)",
    "failed": " (diverged before)",
    "begun": " (goes on)",
    "waiting": "",
}
"""What is said of a run when its turn comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Runs on one dataset, which is opened once. All processes follow what the main one finds in the folders."""

    data: DataRef
    processes: Processes
    listeners: Sequence[Listener] = ()
    said: Callable[[str], None]
    """Hears what comes next, in the main process."""
    record: Callable[[], object]
    """Writes what is known so far; called in the main process."""

    def train(self, folder: Path, recipe: Recipe, title: str) -> None:
        """Train the run in a folder, or go on with it, unless it is over.

        A run that diverges is over, too: its folder says why, and the series goes on.
        """
        state: RunState = self.processes.broadcast(Run(folder).state)
        if self.processes.is_main:
            self.said(title + BEFORE[state])
        try:
            if state == "begun":
                resume(folder, data=self.data, listeners=self.listeners, progress=False)
            elif state == "waiting":
                begin(self.data, recipe, out=folder, listeners=self.listeners)
        except Interrupted as stopped:
            text = f"stopped in {folder.name}; the same command goes on from there"
            raise Interrupted(text, stopped.signal_number) from None
        except Diverged as error:
            if self.processes.is_main:
                write_json(folder / FAILED_FILE, str(error))
        if self.processes.is_main:
            Run(folder).forget_checkpoints()
            self.record()
