"""Fine-tuning as in the paper: select the lr on a dev split, train again on all images, average over seeds.

A `Protocol` says what to do, its `Trial`s are runs in the folder of a `Sweep`, and `finetune` trains them. Studies
use `train_series`, too: it trains any list of runs on one dataset, resuming where an earlier call was interrupted.
"""

import json
import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from vitruvian.data.formats import BUILT_IN
from vitruvian.errors import ConfigError, Interrupted, TrainingError, argument
from vitruvian.evaluation.metrics import MEASURE_NAMES, TARGET_NAMES
from vitruvian.files import read_json, read_object, write_json, write_text
from vitruvian.progress import print_notes, print_status
from vitruvian.report.html import PAGE, render
from vitruvian.targets import KINDS, LOWER_IS_BETTER
from vitruvian.tasks import SEEDS, Metric, Task, task_of_data
from vitruvian.text import format_duration
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.initial_model import model_for, target_of, without_shape
from vitruvian.training.journal import Listener, ProgressListener
from vitruvian.training.loop import Diverged
from vitruvian.training.planning import apply_hyperrule, fit_minutes
from vitruvian.training.recipe import (
    DESCRIPTION,
    HARMLESS,
    Recipe,
    change_recipe,
    changed_keys,
    read_recipe,
    recipe_from_table,
)
from vitruvian.training.run_folder import (
    FAILED_FILE,
    Run,
    RunState,
    absolute_data,
    absolute_path,
    lock_folder,
    series_folder,
)
from vitruvian.training.soup import Soup, make_soup
from vitruvian.training.splits import NO_TRANSFORMS, DataRef, continue_from, split_data
from vitruvian.training.train import check_start, resume, train
from vitruvian.weights.description import fingerprint
from vitruvian.weights.load import SWEEP_FILE

SMALL_RECIPE = "finetune-small"  # default for data that is not one of the paper's tasks
MANY_IMAGES = 100_000  # training images per trial above which we warn that there is no GPU
SHARED = {"lr", "lrs", "validation"} | DESCRIPTION | HARMLESS
"""Settings in which two sweeps may differ and still share their trials."""
NUMBERS = ("loss", "count", "seconds", *dict.fromkeys(name for row in KINDS.values() for name in row.metrics))
"""The numbers of a trial's result, of which each kind of target has some."""
UNSET = {"image_size", "epochs", "steps", "eval_batch_size", "max_train_samples"}
"""Settings for which 0 means that they are not set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run: with a learning rate and the dev split (`dev`), or with a seed and the test split (`test`)."""

    kind: Literal["dev", "test"]
    lr: float
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def state(self) -> RunState:
        return Run(self.folder).state

    @property
    def measures(self) -> dict[str, float]:
        """The metrics of the last evaluation; empty before the trial is done."""
        return Run(self.folder).result(*NUMBERS)

    def to_json(self) -> dict[str, Any]:
        state, facts = self.state, {"kind": self.kind, "lr": self.lr, "seed": self.seed, "folder": self.name}
        why = {"why": read_json(self.folder / FAILED_FILE, raises=TrainingError)} if state == "failed" else {}
        return {**facts, "state": state, **why, **self.measures}


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """Settings of a fine-tuning: a recipe with weights, learning rates to select from, and a number of seeds."""

    data: str  # name or absolute path
    recipe: Recipe  # the settings of all trials except lr, seed and split
    lrs: tuple[float, ...]  # to select from on the dev split
    seeds: int = SEEDS  # number of runs to average on the test split
    metric: Metric = "top1"  # that is reported and selected by
    soup: bool = False  # whether to average the seeds' weights, which needs a run without the dev split for each

    def __post_init__(self) -> None:
        if not self.recipe.weights:
            raise TrainingError("fine-tuning needs weights to start from", hint=f"give {argument('weights')}")
        if not self.lrs or min(self.lrs) <= 0:
            raise TrainingError(f"lrs={list(self.lrs)} must be one or more positive numbers")
        if self.seeds < 1:
            raise TrainingError(f"{argument('seeds', self.seeds)} is not at least 1")
        self.recipe.replace(validation="test")  # raises for recipes that select by validation

    def quick(self) -> "Protocol":
        """A copy with one seed and one learning rate: the recipe's if it is in `lrs`, else the first."""
        lr = self.recipe.lr if self.recipe.lr in self.lrs else self.lrs[0]
        return replace(self, lrs=(lr,), seeds=1)

    @property
    def trials(self) -> int:
        """Number of runs."""
        choosing = len(self.lrs) if len(self.lrs) > 1 else 0
        return choosing + self.seeds + (self.seeds - bool(choosing) if self.soup else 0)

    def within(
        self, minutes: float, keys: Container[str] = (), report: Callable[[str], None] = print_status
    ) -> "Protocol":
        """A copy whose trials, one after the other, end in this time, without changes to the settings in `keys`.

        `report` receives what was chosen.
        """
        trials = self.trials
        recipe, notes = fit_minutes(DataRef(self.data), self.recipe.replace(validation="dev"), minutes / trials, keys)
        for note in notes:
            report(f"note: {note}, for each of {trials} trials")
        return replace(self, recipe=recipe.replace(validation=self.recipe.validation))

    def settings(self) -> dict[str, Any]:
        """The settings, as JSON values, that must be equal for two sweeps to share trials."""
        settings = {key: value for key, value in self.recipe.to_json().items() if key not in SHARED}
        values: dict[str, Any] = json.loads(json.dumps({"data": self.data, **settings}))
        return values

    @property
    def identity(self) -> str:
        return fingerprint(self.settings())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A protocol and its trials so far."""

    folder: Path
    protocol: Protocol
    dev: tuple[Trial, ...] = ()
    dev_seeds: tuple[Trial, ...] = ()  # with the chosen lr and other seeds, to choose an average of the weights
    test: tuple[Trial, ...] = ()
    soup: Soup | None = None

    @property
    def trials(self) -> tuple[Trial, ...]:
        return (*self.dev, *self.dev_seeds, *self.test)

    @property
    def unreadable(self) -> dict[str, str]:
        """The images that any trial skipped, with the reasons."""
        return {key: reason for trial in self.trials for key, reason in Run(trial.folder).unreadable.items()}

    @property
    def chosen_lr(self) -> float | None:
        """The best learning rate on the dev split (the first of equals); None before all have been tried."""
        if not self.dev:
            return self.protocol.lrs[0]
        if any(trial.state not in ("done", "failed") for trial in self.dev):
            return None
        values = {trial.lr: trial.measures[self.metric] for trial in self.dev if trial.state == "done"}
        best = min if self.metric in LOWER_IS_BETTER else max
        return best(values, key=values.__getitem__) if values else None

    @property
    def metric(self) -> str:
        """The metric to select by: top-1 in place of ReaL, for which training has no labels."""
        return "mean_per_class" if self.protocol.metric == "mean_per_class" else self.metrics[0]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The two most important metrics of the kind of target."""
        known = next((trial.measures for trial in self.trials if trial.state == "done"), {})
        rows = (row.metrics for row in KINDS.values() if row.metrics[0] in known)
        return next(rows, KINDS["single"].metrics)[:2]

    def values(self, metric: str | None = None) -> list[float]:
        """The metric on the test split, seed by seed."""
        return [trial.measures[metric or self.metric] for trial in self.test if trial.state == "done"]

    @property
    def measured_on(self) -> str:
        """Description of the test images; empty before the first test trial."""
        return next((str(Run(t.folder).facts.get("validation", "")) for t in self.test if t.state != "waiting"), "")

    @property
    def finished(self) -> bool:
        return bool(self.test) and all(trial.state in ("done", "failed") for trial in self.test)

    def to_json(self) -> dict[str, Any]:
        return {
            "identity": self.protocol.identity,
            "data": self.protocol.data,
            "weights": self.protocol.recipe.weights,
            "metric": self.protocol.metric,
            "lrs": list(self.protocol.lrs),
            "seeds": self.protocol.seeds,
            "chosen_lr": self.chosen_lr,
            "measured_on": self.measured_on,
            "finished": self.finished,
            **{name: mean_and_std(self.values(name)) for name in self.metrics},
            "soup": None if self.soup is None else self.soup.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "recipe": self.protocol.recipe.to_json(),
        }


def mean_and_std(values: Iterable[float]) -> dict[str, float | int | None]:
    """Mean and sample standard deviation, which is None for a single value."""
    numbers = list(values)
    return {
        "mean": statistics.fmean(numbers) if numbers else None,
        "deviation": statistics.stdev(numbers) if len(numbers) > 1 else None,
        "count": len(numbers),
    }


def format_mean(values: Sequence[float]) -> str:
    """`91.03 ± 0.12` over several values, `91.03` for one; empty for none."""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}" if values else ""


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
    """The protocol for fine-tuning these weights on this data.

    Args:
        data: A path, or the name of a task, which brings the paper's recipe, preprocessing and metric.
        weights: A file, folder or published name.
        recipe: Replaces the task's recipe; without a task the default is `finetune-small`.
        task: The task whose recipe, preprocessing and metric to use for other data.
        settings: Changes to the recipe, such as "steps=500".
        lrs: Replace the recipe's learning rates.
        seeds: Number of runs to average.

    Raises:
        ConfigError: a setting is invalid, or the recipe does not train on labels.
    """
    if task is None and str(data) not in BUILT_IN:
        task = task_of_data(str(data))
    name = recipe or (task.recipe if task else SMALL_RECIPE)
    chosen = name if isinstance(name, Recipe) else read_recipe(name)
    if chosen.objective == "masked":
        raise ConfigError(
            "fine-tuning needs labels, and this recipe trains without them (objective='masked')",
            hint="pre-train with `vit train`, then fine-tune from its run with another recipe",
        )
    chosen = chosen.replace(weights=absolute_path(weights), architecture=without_shape(chosen))
    if task is not None:
        chosen = chosen.replace(preprocess={**task.preprocess, **chosen.preprocess})
    if chosen.bit_hyperrule:
        chosen = apply_hyperrule(change_recipe(chosen, settings), DataRef(data).dataset.train)
    keys = changed_keys(settings)
    if keys & {"steps", "epochs"} and chosen.steps and chosen.warmup >= 1:
        chosen = chosen.replace(warmup=chosen.warmup / chosen.steps)  # the same fraction of a run of another length
    chosen = change_recipe(chosen, settings)
    if "lr" in keys:
        if lrs:
            raise ConfigError(f"give {argument('lr', chosen.lr, 'g')} or {argument('lrs')} to select from, not both")
        lrs = (chosen.lr,)
    chosen, notes = continue_from(chosen, absolute_data(data), keys)
    print_notes(notes)
    return Protocol(
        data=absolute_data(data),
        recipe=chosen,
        lrs=tuple(dict.fromkeys(lrs or chosen.lrs or (chosen.lr,))),
        seeds=seeds,
        metric=task.metric if task else "top1",
    )


def finetune(
    protocol: Protocol,
    out: str | Path | None = None,
    *,
    listeners: Sequence[Listener] = (),
    report: Callable[[str], None] = print_status,
    progress: bool = True,
) -> Sweep:
    """Train all trials of a protocol, resuming where an earlier call was interrupted.

    A learning rate at which training diverges is not selected. Under torchrun, all processes call this.

    Args:
        protocol: From `protocol_for`.
        out: Folder of the sweep; by default the one in `runs/` with the same protocol, else a new one.
        listeners: Objects that are notified of the steps and metrics of all trials.
        report: Receives one line per trial.
        progress: Show progress on stderr.

    Returns:
        The finished sweep.

    Raises:
        TrainingError: training diverged at every learning rate or with every seed, or `out` contains other files.
        Interrupted: a signal stopped a trial; the same call resumes it.
    """
    recipe = protocol.recipe
    with process_group(recipe.device) as processes, ExitStack() as stack:  # once for all trials
        data, same = DataRef(protocol.data), partial(differences, protocol)
        name = f"{Path(protocol.data.rstrip('/*')).stem or 'data'}-finetune"
        folder = Path(processes.on_main(lambda: str(series_folder(name, out, SWEEP_FILE, "sweep", same))))
        if not (folder / SWEEP_FILE).is_file():
            check_protocol(protocol, data, processes, report)
        processes.on_main(lambda: stack.enter_context(lock_folder(folder)))
        listeners = (ProgressListener(), *listeners) if progress else listeners

        def train_trials(sweep: Sweep, trials: Sequence[Trial]) -> None:
            runs = []
            for trial in trials:
                settings = recipe.replace(lr=trial.lr, seed=trial.seed, validation=trial.kind)
                purpose = "to select the learning rate" if trial in sweep.dev else f"seed {trial.seed}, for the average"
                if trial.kind == "test":  # evaluated once, at the end
                    settings, purpose = settings.replace(eval_every=0), f"seed {trial.seed}, for the result"
                position = f"trial {sweep.trials.index(trial) + 1} of {protocol.trials}"
                runs.append((trial.folder, settings, f"{position}: lr {trial.lr:g}, {purpose}"))
            record = partial(write_sweep, sweep)
            train_series(runs, data, processes, listeners=listeners, report=report, record=record)

        def failure(trial: Trial, when: str) -> TrainingError:
            why = trial.to_json().get("why", "for an unknown reason")
            reason = f"training diverged {when}, in {trial.name}: {why}"
            return TrainingError(reason, where=folder, hint=f"try lower {argument('lrs')}")

        lrs = protocol.lrs if len(protocol.lrs) > 1 else ()  # a single one needs no selection
        dev = [Trial(kind="dev", lr=lr, seed=recipe.seed, folder=folder / f"dev-lr-{lr}") for lr in lrs]
        sweep = Sweep(folder=folder, protocol=protocol, dev=tuple(dev))
        train_trials(sweep, sweep.dev)
        lr = processes.broadcast(sweep.chosen_lr)
        if lr is None:
            raise failure(sweep.dev[0], "at every lr")
        seeds = range(recipe.seed, recipe.seed + protocol.seeds)
        test = [Trial(kind="test", lr=lr, seed=s, folder=folder / f"test-lr-{lr}-seed-{s}") for s in seeds]
        sweep = replace(sweep, test=tuple(test))
        train_trials(sweep, sweep.test)
        if not processes.broadcast(sweep.values()):
            raise failure(sweep.test[0], "with every seed")
        if protocol.soup:
            chosen = [trial for trial in sweep.dev if trial.lr == lr]
            missing = [trial for trial in sweep.test if trial.seed not in {trial.seed for trial in chosen}]
            extra = [replace(t, kind="dev", folder=folder / f"dev-lr-{lr}-seed-{t.seed}") for t in missing]
            sweep = replace(sweep, dev_seeds=tuple(extra))
            train_trials(sweep, extra)
            dev_runs = [trial.folder for trial in (*chosen, *extra) if trial.state == "done"]
            test_runs = [trial.folder for trial in sweep.test if trial.state == "done"]
            soup = make_soup(dev_runs, test_runs, data, folder, sweep.metric, processes) if dev_runs else None
            sweep = replace(sweep, soup=soup)
            if processes.is_main:
                write_sweep(sweep)
                report(str(soup or "no average: training diverged with every seed"))
        return sweep


def check_protocol(protocol: Protocol, data: DataRef, processes: Processes, report: Callable[[str], None]) -> None:
    """Raise before anything is written if no trial can start, and warn if the trials will take days."""
    recipe = protocol.recipe
    check_start(recipe, NO_TRANSFORMS)
    splits = split_data(data, recipe)
    recipe, _ = recipe.for_target(splits.train.target)
    model_for(recipe, splits.classes, target_of(splits.train))
    images = recipe.steps * recipe.batch_size or round(recipe.epochs * len(splits.train))
    if processes.is_main and processes.device.type == "cpu" and images > MANY_IMAGES:
        advice = f", the recipe {SMALL_RECIPE} is made for such machines" if recipe.steps else ""
        report(
            f"note: each trial trains on {images:,} images without a GPU, which may take days; "
            f"max_train_samples=N trains on at most N{advice}"
        )


def differences(protocol: Protocol, folder: Path) -> list[str]:
    """Settings in which the sweep in `folder` differs from `protocol`; empty if its trials can be reused."""
    content = read_object(folder / SWEEP_FILE, raises=TrainingError)
    try:
        recipe = recipe_from_table(content["recipe"], str(folder / SWEEP_FILE))
        before = Protocol(data=content["data"], recipe=recipe, lrs=tuple(content["lrs"]))
        if before.identity != content["identity"]:
            raise ValueError("it has changed since it was written")
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"not a valid sweep: {error}", where=folder / SWEEP_FILE) from error
    return list(list_changes(before.settings(), protocol.settings()))


def list_changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The values in which two JSON objects differ, by their full names."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *before]):
            yield from list_changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now and not before and name in UNSET:
        yield f"no {name}, not {name}={now}"
    elif before != now:
        yield f"{name}={before}, not {now or 'unset' if name in UNSET else now}"


STATE_NOTES = {"done": " (already done)", "failed": " (diverged earlier)", "begun": " (resuming)", "waiting": ""}


def train_series(
    runs: Sequence[tuple[Path, Recipe, str]],
    data: DataRef,
    processes: Processes,
    *,
    listeners: Sequence[Listener],
    report: Callable[[str], None],
    record: Callable[[], object],
) -> None:
    """Start or resume the run in each of these folders, unless it is finished.

    Each run has a folder, a recipe and a title. A run that diverges counts as finished: its folder says why, and the
    series continues. All processes follow what the main one finds in the folders. In the main process `report`
    receives a line per run, and `record` writes the results so far: it is called first and after each run.
    """
    if processes.is_main:
        record()
    for folder, recipe, title in runs:
        state: RunState = processes.broadcast(Run(folder).state)
        if processes.is_main:
            report(title + STATE_NOTES[state])
        try:
            if state == "begun":
                resume(folder, data=data, listeners=listeners, progress=False)
            elif state == "waiting":
                train(data, recipe=recipe, out=folder, listeners=listeners, progress=False)
        except Interrupted as stopped:
            text = f"stopped in {folder.name}; run the same command to continue"
            raise Interrupted(text, stopped.signal_number) from None
        except Diverged as error:
            if processes.is_main:
                write_json(folder / FAILED_FILE, str(error))
        if processes.is_main:
            Run(folder).remove_checkpoints()
            record()


METRICS = MEASURE_NAMES | TARGET_NAMES
UNITS = {"top1": "%", "mean_per_class": "%"}  # of metrics whose name does not include it


def write_sweep(sweep: Sweep) -> None:
    """Write `sweep.json` and `report.html` into the sweep's folder, atomically."""
    write_json(sweep.folder / SWEEP_FILE, sweep.to_json())
    chosen = {"learning rate": f"{sweep.chosen_lr:g}"} if sweep.chosen_lr is not None else {}
    tiles = {METRICS[k]: f"{format_mean(sweep.values(k))} {UNITS.get(k, '')}" for k in sweep.metrics} | chosen
    headings = [f">{METRICS[name]}" for name in sweep.metrics]
    done = sum(trial.state == "done" for trial in sweep.trials)
    progress = f"{done} of {sweep.protocol.trials} trials done"
    # The sweep may have replaced the recipe's learning rates.
    lrs = {"lr": sweep.chosen_lr or "not chosen yet", "lrs": sweep.protocol.lrs}
    page = render(
        "sweep.html",
        title=f"{Path(sweep.protocol.recipe.weights).name} fine-tuned on {Path(sweep.protocol.data).name}",
        subtitle=progress + ("" if sweep.finished else ", not finished yet"),
        tile_values=tiles if sweep.values() else {},
        failed=[trial.name for trial in sweep.trials if trial.state == "failed"],
        titles=["trial", ">lr", ">seed", *headings, ">loss", "time", "state"],
        dev_trials=[trial_row(sweep, trial) for trial in (*sweep.dev, *sweep.dev_seeds)],
        soup=str(sweep.soup or ""),
        test_trials=[trial_row(sweep, trial) for trial in sweep.test],
        measured_on=sweep.measured_on or "test images",
        settings=sweep.protocol.recipe.report_settings() | lrs,
    )
    write_text(sweep.folder / PAGE, page)


def trial_row(sweep: Sweep, trial: Trial) -> list[object]:
    measures, state = trial.measures, trial.state
    link = Markup('<a href="{0}/{1}">{0}</a>').format(trial.name, PAGE)
    numbers = ["–"] * (len(sweep.metrics) + 2)
    if measures:
        accuracies = [f"{measures[key]:.2f} {UNITS.get(key, '')}" for key in sweep.metrics]
        numbers = [*accuracies, f"{measures['loss']:.4f}", format_duration(measures["seconds"])]
    is_chosen = trial in sweep.dev and trial.lr == sweep.chosen_lr
    name = link if state == "done" else trial.name
    return [name, f"{trial.lr:g}", trial.seed, *numbers, "chosen" if is_chosen else state]
