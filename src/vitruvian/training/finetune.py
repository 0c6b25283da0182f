"""Series of runs on one dataset: fine-tuning as in the paper, averages of its seeds, and cross-validation.

A `Protocol` says what to do: select the lr on a dev split, train again on all images, average over seeds. Its `Trial`s
are runs in the folder of a `Sweep`, and `finetune` trains them. `train_series` trains any list of runs, resuming where
an earlier call was interrupted.
"""

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from vitruvian.data.formats import BUILT_IN
from vitruvian.data.groups import assign_folds, group_numbers
from vitruvian.data.sources import Dataset, all_but_test
from vitruvian.errors import ConfigError, Interrupted, TrainingError, argument
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.evaluation.metrics import MEASURE_NAMES, TARGET_NAMES, ImageMeasures
from vitruvian.evaluation.out_of_fold import PREDICTIONS_FILE, FoldResult, fold_result, write_predictions
from vitruvian.evaluation.target_metrics import TargetMeasures
from vitruvian.files import read_json, write_json, write_text
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import plain_state
from vitruvian.progress import print_notes, print_status
from vitruvian.report.html import PAGE, render
from vitruvian.settings import Record
from vitruvian.targets import KINDS, LOWER_IS_BETTER
from vitruvian.tasks import SEEDS, Metric, Task, task_of_data
from vitruvian.text import format_duration, plural
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.initial_model import model_for, target_of
from vitruvian.training.integrations import Listener, ProgressListener
from vitruvian.training.loop import Diverged
from vitruvian.training.objective import Labels, TargetRows, ValidationMetrics
from vitruvian.training.planning import fit_minutes, prepare_recipe
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, Recipe, RecipeChanges, parse_changes, read_recipe
from vitruvian.training.run_folder import FAILED_FILE, Run, RunState, lock_folder, series_folder
from vitruvian.training.splits import NO_TRANSFORMS, DataRef, fold_of, split_data, validation_loader
from vitruvian.training.train import check_start, resume, train
from vitruvian.weights.load import SOUP_FOLDER, SWEEP_FILE, assemble, load
from vitruvian.weights.save import save

FOLDS_FILE = "folds.json"
SMALL_RECIPE = "finetune-small"  # default for data that is not one of the paper's tasks
MANY_IMAGES = 100_000  # training images per trial above which we warn that there is no GPU
SHARED = {"lr", "lrs", "validation"} | DESCRIPTION | HARMLESS
"""Settings in which two sweeps may differ and still share their trials."""
NUMBERS = ("loss", "count", "seconds", *dict.fromkeys(name for row in KINDS.values() for name in row.metrics))
"""The numbers of a trial's result, of which each kind of target has some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One run of a series."""

    folder: Path
    recipe: Recipe
    title: str  # for the line that announces it

    @property
    def state(self) -> RunState:
        return Run(self.folder).state

    @property
    def measures(self) -> dict[str, float]:
        """The metrics of the last evaluation; empty before the trial is done."""
        return Run(self.folder).result(*NUMBERS)

    def to_json(self) -> dict[str, Any]:
        state, recipe = self.state, self.recipe
        facts = {"kind": recipe.validation, "lr": recipe.lr, "seed": recipe.seed, "folder": self.folder.name}
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Soup(Record):
    """The best average on the dev split, and whether it is better there than every seed."""

    name: str
    metric: str
    dev: float  # of the average, on the dev split
    single: float  # of the best seed alone
    kept: bool  # whether the average is the model of the sweep
    measures: dict[str, float]  # of the kept average of the seeds of the result, on the test split

    def __str__(self) -> str:
        result = f"kept, with {self.measures[self.metric]:.4g} in the result" if self.kept else "not kept"
        values = f"{self.metric} {self.dev:.4g} on the dev split, the best seed alone {self.single:.4g}"
        return f"{self.name}: {values}; {result}"


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
        """The best learning rate on the dev split (ties: the first); None before all have been tried."""
        if not self.dev:
            return self.protocol.lrs[0]
        if any(trial.state not in ("done", "failed") for trial in self.dev):
            return None
        values = {trial.recipe.lr: trial.measures[self.metric] for trial in self.dev if trial.state == "done"}
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
            "settings": fixed_settings(self.protocol.data, self.protocol.recipe),
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
    settings: RecipeChanges = (),
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
    if task is not None:
        chosen = chosen.replace(preprocess={**task.preprocess, **chosen.preprocess})
    changes, ref = parse_changes(settings), DataRef(data)
    if changes.keys() & {"steps", "epochs"} and chosen.steps and chosen.warmup >= 1:
        chosen = chosen.replace(warmup=chosen.warmup / chosen.steps)  # the same fraction of a run of another length
    chosen, notes = prepare_recipe(ref, chosen, weights=weights, settings=changes)
    if "lr" in changes:
        if lrs:
            raise ConfigError(f"give {argument('lr', chosen.lr, 'g')} or {argument('lrs')} to select from, not both")
        lrs = (chosen.lr,)
    print_notes(notes)
    return Protocol(
        data=ref.name,
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
        data, fixed = DataRef(protocol.data), fixed_settings(protocol.data, recipe)
        name = f"{data.short_name}-finetune"
        folder = Path(processes.on_main(lambda: str(series_folder(name, out, SWEEP_FILE, "sweep", fixed))))
        if not (folder / SWEEP_FILE).is_file():
            check_protocol(protocol, data, processes, report)
        processes.on_main(lambda: stack.enter_context(lock_folder(folder)))
        listeners = (ProgressListener(), *listeners) if progress else listeners

        numbers = itertools.count(1)

        def trial(name: str, purpose: str, **changes: Any) -> Trial:
            changed = recipe.replace(**changes)
            title = f"trial {next(numbers)} of {protocol.trials}: lr {changed.lr:g}, {purpose}"
            return Trial(folder=folder / name, recipe=changed, title=title)

        def train_trials(sweep: Sweep, trials: Sequence[Trial]) -> None:
            record = partial(write_sweep, sweep)
            train_series(trials, data, processes, listeners=listeners, report=report, record=record)

        def failure(trial: Trial, when: str) -> TrainingError:
            why = trial.to_json().get("why", "for an unknown reason")
            reason = f"training diverged {when}, in {trial.folder.name}: {why}"
            return TrainingError(reason, where=folder, hint=f"try lower {argument('lrs')}")

        lrs = protocol.lrs if len(protocol.lrs) > 1 else ()  # a single one needs no selection
        dev = [trial(f"dev-lr-{lr}", "to select the learning rate", lr=lr, validation="dev") for lr in lrs]
        sweep = Sweep(folder=folder, protocol=protocol, dev=tuple(dev))
        train_trials(sweep, sweep.dev)
        lr = processes.broadcast(sweep.chosen_lr)
        if lr is None:
            raise failure(sweep.dev[0], "at every lr")
        seeds = range(recipe.seed, recipe.seed + protocol.seeds)
        final: Any = {"lr": lr, "validation": "test", "eval_every": 0}  # evaluated once, at the end
        test = [trial(f"test-lr-{lr}-seed-{s}", f"seed {s}, for the result", seed=s, **final) for s in seeds]
        sweep = replace(sweep, test=tuple(test))
        train_trials(sweep, sweep.test)
        if not processes.broadcast(sweep.values()):
            raise failure(sweep.test[0], "with every seed")
        if protocol.soup:
            chosen = [t for t in sweep.dev if t.recipe.lr == lr]
            missing = [s for s in seeds if s not in {t.recipe.seed for t in chosen}]
            names = {s: f"dev-lr-{lr}-seed-{s}" for s in missing}
            more: Any = {"lr": lr, "validation": "dev"}
            extra = [trial(name, f"seed {s}, for the average", seed=s, **more) for s, name in names.items()]
            sweep = replace(sweep, dev_seeds=tuple(extra))
            train_trials(sweep, extra)
            dev_runs = [t.folder for t in (*chosen, *extra) if t.state == "done"]
            test_runs = [t.folder for t in sweep.test if t.state == "done"]
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


def fixed_settings(data: str, recipe: Recipe, **more: Any) -> dict[str, Any]:
    """The settings, as JSON values, that must be equal for two calls to share the runs in a folder."""
    settings = {key: value for key, value in recipe.to_json().items() if key not in SHARED}
    fixed: dict[str, Any] = json.loads(json.dumps({"data": data, **more, **settings}))
    return fixed


STATE_NOTES = {"done": " (already done)", "failed": " (diverged earlier)", "begun": " (resuming)", "waiting": ""}


def train_series(
    trials: Sequence[Trial],
    data: DataRef,
    processes: Processes,
    *,
    listeners: Sequence[Listener],
    report: Callable[[str], None],
    record: Callable[[], object],
) -> None:
    """Start or resume each of these runs, unless it is finished.

    A run that diverges counts as finished: its folder says why, and the series continues. All processes follow what the
    main one finds in the folders. In the main process `report` receives a line per run, and `record` writes the results
    so far: it is called first and after each run.
    """
    if processes.is_main:
        record()
    for trial in trials:
        folder, state = trial.folder, processes.broadcast(trial.state)
        if processes.is_main:
            report(trial.title + STATE_NOTES[state])
        try:
            if state == "begun":
                resume(folder, data=data, listeners=listeners, progress=False)
            elif state == "waiting":
                train(data, recipe=trial.recipe, out=folder, listeners=listeners, progress=False)
        except Interrupted as stopped:
            text = f"stopped in {folder.name}; run the same command to continue"
            raise Interrupted(text, stopped.signal_number) from None
        except Diverged as error:
            if processes.is_main:
                write_json(folder / FAILED_FILE, str(error))
        if processes.is_main:
            shutil.rmtree(Run(folder).checkpoints, ignore_errors=True)
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
        failed=[trial.folder.name for trial in sweep.trials if trial.state == "failed"],
        titles=["trial", ">lr", ">seed", *headings, ">loss", "time", "state"],
        dev_trials=[trial_row(sweep, trial) for trial in (*sweep.dev, *sweep.dev_seeds)],
        soup=str(sweep.soup or ""),
        test_trials=[trial_row(sweep, trial) for trial in sweep.test],
        measured_on=sweep.measured_on or "test images",
        settings=sweep.protocol.recipe.report_settings() | lrs,
    )
    write_text(sweep.folder / PAGE, page)


def trial_row(sweep: Sweep, trial: Trial) -> list[object]:
    measures, state, recipe = trial.measures, trial.state, trial.recipe
    link = Markup('<a href="{0}/{1}">{0}</a>').format(trial.folder.name, PAGE)
    numbers = ["–"] * (len(sweep.metrics) + 2)
    if measures:
        accuracies = [f"{measures[key]:.2f} {UNITS.get(key, '')}" for key in sweep.metrics]
        numbers = [*accuracies, f"{measures['loss']:.4f}", format_duration(measures["seconds"])]
    is_chosen = trial in sweep.dev and recipe.lr == sweep.chosen_lr
    name = link if state == "done" else trial.folder.name
    return [name, f"{recipe.lr:g}", recipe.seed, *numbers, "chosen" if is_chosen else state]


# Model soups: M. Wortsman et al., 2022, arXiv:2203.05482 and arXiv:2109.01903 (WiSE-FT). Seeds that are trained without
# the dev split choose the average on it. The seeds of the result, which are trained on the dev split too, are then
# averaged in the same way.

SHARES = (1.0, 0.75, 0.5)  # of the fine-tuned weights in an average; the rest are the weights before fine-tuning


def make_soup(
    dev: Sequence[Path], test: Sequence[Path], data: DataRef, out: Path, metric: str, processes: Processes
) -> Soup:
    """Choose an average of the runs `dev` on the dev split; save that of the runs `test` if it is better than each."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values, single = {}, max(sign * Run(folder).result(metric)[metric] for folder in dev)
    for share in SHARES if len(dev) > 1 else SHARES[1:]:
        values[share] = sign * validate(average_weights(dev, share), Run(dev[0]), data, processes).scalars()[metric]
    share = max(values, key=values.__getitem__)
    name = f"average of {plural(len(test), 'seed')}"
    name += f" and {1 - share:.0%} of the starting weights" if share < 1 else ""
    measures, kept = dict[str, float](), values[share] > single
    if kept:
        model = average_weights(test, share)
        metrics = validate(model, Run(test[0]), data, processes)
        if isinstance(metrics, TargetMeasures):
            model.meta = model.meta.replace(target=metrics.fit())
        model.meta, measures = model.meta.replace(origin=f"{name}; {model.meta.origin}"), metrics.scalars()
        processes.on_main(lambda: save(model, out / SOUP_FOLDER / "model"))
    ours, best = sign * values[share], sign * single
    return Soup(name=name, metric=metric, dev=ours, single=best, kept=kept, measures=measures)


def average_weights(folders: Sequence[Path], share: float) -> Model:
    """The mean of the models of runs that differ in their seed, all but the head mixed with the starting weights."""
    models = [load(folder) for folder in folders]
    states, meta, config = [model.state_dict() for model in models], models[0].meta, models[0].config
    start = plain_state(model_for(Run(folders[0]).recipe, meta.labels or (), meta.target)) if share < 1 else states[0]
    state = dict(states[0])
    for name in (name for name, tensor in state.items() if tensor.is_floating_point()):
        state[name] = torch.stack([other[name] for other in states]).mean(dim=0)
        if not name.startswith("head"):
            state[name] = torch.lerp(start[name], state[name], share)
    return assemble(empty(config), state, meta)


def validate(model: Model, run: Run, data: DataRef, processes: Processes) -> ValidationMetrics:
    """The metrics of a model on the validation images of a run."""
    splits, recipe, model = split_data(data, run.recipe), run.recipe, model.to(processes.device)
    objective = Labels(recipe, model, processes)
    if splits.train.targets is not None:
        objective = TargetRows(recipe, model, splits.train, processes)
    with validation_loader(splits.validation, recipe, model.meta.preprocess, processes) as loader:
        images = len(splits.validation)
        return objective.evaluate(loader.batches(0), images, all_ranks=processes.is_distributed)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """A finished cross-validation."""

    folder: Path
    result: FoldResult
    runs: tuple[Run, ...]  # of each fold

    @property
    def predictions(self) -> Path:
        """The table of out-of-fold predictions."""
        return self.folder / PREDICTIONS_FILE

    def to_json(self) -> dict[str, Any]:
        files = {"folds": [str(run.folder) for run in self.runs], "predictions": str(self.predictions)}
        return {"folder": str(self.folder), **self.result.to_json(), **files}


def cross_validate(
    data: object,
    settings: Recipe | Protocol,
    folds: int,
    out: str | Path | None = None,
    *,
    listeners: Sequence[Listener] = (),
    report: Callable[[str], None] = print_status,
    progress: bool = True,
) -> CrossValidation:
    """Train one model per fold of all images but the test split, and predict each image by the model without it.

    Groups (`group_by` in the recipe) are never divided. The same call resumes an interrupted cross-validation.

    Args:
        data: As for `train`; a path or a name with a Protocol.
        settings: A recipe (`choose_recipe`) to train each model with, or a protocol (`protocol_for`), whose learning
            rate is then chosen within each fold, on images of the others.
        folds: Number of folds.
        out: Folder; by default one in `runs/`.
        listeners: Objects that are notified of the steps and metrics of all runs.
        report: Receives one line per run.
        progress: Show progress on stderr.

    Raises:
        ConfigError: There are fewer images or groups than folds.
        TrainingError: `out` has other files, or training diverged in a fold.
        Interrupted: A signal stopped a run; the same call resumes it.
    """
    ref = DataRef.of(data)
    recipe = settings if isinstance(settings, Recipe) else settings.recipe
    dataset = ref.open(recipe.target)
    images = all_but_test(dataset)
    if recipe.objective != "labels" or recipe.class_range != (0.0, 1.0):
        raise TrainingError("cross-validation needs labels, and all classes")
    assigned = assign_folds(images, folds, recipe.split_seed, recipe.group_by)  # raises before anything is written
    lrs = (recipe.lr,) if isinstance(settings, Recipe) else settings.lrs
    fixed = fixed_settings(ref.name, recipe, folds=folds, lrs=lrs)

    def prepare() -> str:
        folder = series_folder(f"{ref.short_name}-folds", out, FOLDS_FILE, "cross-validation", fixed)
        if not (folder / FOLDS_FILE).is_file():
            write_json(folder / FOLDS_FILE, {"settings": fixed})
        return str(folder)

    with process_group(recipe.device) as processes, ExitStack() as stack:
        folder = Path(processes.on_main(prepare))
        processes.on_main(lambda: stack.enter_context(lock_folder(folder)))
        trials = []
        for fold in range(1, folds + 1):
            changed = recipe.replace(fold=(fold, folds))
            trials.append(Trial(folder=folder / f"fold-{fold}", recipe=changed, title=f"fold {fold} of {folds}"))
        if isinstance(settings, Protocol):
            runs = []
            for trial in trials:
                protocol = replace(settings, recipe=trial.recipe, seeds=1)
                titled = partial(lambda title, text: report(f"{title}, {text}"), trial.title)
                sweep = finetune(protocol, trial.folder, listeners=listeners, report=titled, progress=progress)
                runs.append(Run(sweep.test[0].folder))
        else:
            followers = (ProgressListener(), *listeners) if progress else listeners
            train_series(trials, ref, processes, listeners=followers, report=report, record=lambda: None)
            runs = [Run(trial.folder) for trial in trials]
        failed = next((run for run in runs if run.state != "done"), None)
        if failed is not None:
            reason = "training diverged in this fold"
            raise TrainingError(reason, where=failed.folder, hint=f"try a lower {argument('lr')}")
        parts: list[ImageMeasures] = []
        for fold, (run, trial) in enumerate(zip(runs, trials)):
            held_out = Dataset(name=images.name, splits={"test": fold_of(dataset, trial.recipe)[1]})
            measured = evaluate(held_out, run.folder / "model").measures
            parts.append(replace(measured, indices=np.flatnonzero(assigned == fold)[measured.indices]))
        measures, groups = parts[0].join(*parts[1:]), group_numbers(images, recipe.group_by)
        rows, interval = measures.indices, measures.intervals()[measures.metric]
        groups = None if groups is None else groups[rows]
        summary = fold_result(measures.metric, measures.weighted, interval, assigned[rows], groups)
        result = CrossValidation(folder=folder, result=summary, runs=tuple(runs))
        if processes.is_main:
            write_predictions(result.predictions, measures, images, assigned)
            write_json(folder / FOLDS_FILE, {"settings": fixed, "result": result.to_json()})
        return result
