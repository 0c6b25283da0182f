"""The trials of a fine-tuning: what each is, what it gave, and what they say together."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from vitruvian.errors import TrainingError, argument
from vitruvian.evaluation.measuring.metrics import MEASURE_NAMES
from vitruvian.files import read_json, read_object, write_json, write_text
from vitruvian.report.html import PAGE, render
from vitruvian.tasks import SEEDS, Metric
from vitruvian.text import format_duration
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, Recipe
from vitruvian.training.recipes import recipe_from
from vitruvian.training.run import FAILED_FILE, Run, RunState
from vitruvian.weights.description import fingerprint
from vitruvian.weights.load import SWEEP_FILE

Kind = Literal["dev", "test"]

CHANGEABLE = {"lr", "lrs", "validation"} | DESCRIPTION | HARMLESS
"""Settings in which two sweeps may differ and share their trials."""
UNSET = {"image_size", "epochs", "steps", "eval_batch_size", "max_train_samples"}
"""Settings of which 0 says that they are not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training: at a learning rate, measured on the dev split; or with a seed, measured on the test split."""

    kind: Kind
    lr: float
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def title(self) -> str:
        if self.kind == "dev":
            return f"lr {self.lr:g}, to choose the learning rate"
        return f"lr {self.lr:g}, seed {self.seed}, for the result"

    @property
    def state(self) -> RunState:
        return Run(self.folder).state

    @property
    def why(self) -> str:
        """Why it came to nothing."""
        return f"in {self.name}: {self.to_json().get('why', 'for a reason that is not on record')}"

    @property
    def measures(self) -> dict[str, float]:
        """The numbers of the last evaluation of a trial that is done."""
        return Run(self.folder).result("top1", "mean_per_class", "loss", "count", "seconds")

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "kind": self.kind,
            "lr": self.lr,
            "seed": self.seed,
            "folder": self.name,
            "state": self.state,
        }
        if found["state"] == "failed":
            found["why"] = read_json(self.folder / FAILED_FILE, raises=TrainingError)
        return found | self.measures


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """What is to be done: a recipe with weights, the learning rates to choose among, how many seeds to average."""

    data: str
    recipe: Recipe
    lrs: tuple[float, ...]
    seeds: int = SEEDS
    metric: Metric = "top1"

    def __post_init__(self) -> None:
        if not self.recipe.weights:
            raise TrainingError(f"fine-tuning starts from weights; give {argument('weights')}")
        if not self.lrs or min(self.lrs) <= 0:
            raise TrainingError(f"lrs {list(self.lrs)} are not one or more numbers above 0")
        if self.seeds < 1:
            raise TrainingError(f"{self.seeds} seeds are not one or more")
        self.recipe.replace(validation="test")  # which not every recipe may

    def quickly(self) -> Protocol:
        """The same with the recipe's own learning rate, or the only one, and one seed."""
        lr = self.recipe.lr if self.recipe.lr in self.lrs else self.lrs[0]
        return Protocol(data=self.data, recipe=self.recipe, lrs=(lr,), seeds=1, metric=self.metric)

    def settings(self) -> dict[str, Any]:
        """What must be equal for trials to be shared, as JSON has it."""
        settings = {key: value for key, value in self.recipe.to_json().items() if key not in CHANGEABLE}
        found: dict[str, Any] = json.loads(json.dumps({"data": self.data, **settings}))
        return found

    @property
    def identity(self) -> str:
        return fingerprint(self.settings())

    def dev_trials(self, folder: Path) -> list[Trial]:
        """One for each learning rate, where there is a choice."""
        if len(self.lrs) == 1:
            return []
        seed = self.recipe.seed
        return [Trial(kind="dev", lr=lr, seed=seed, folder=folder / f"dev-lr-{lr}") for lr in self.lrs]

    def test_trials(self, folder: Path, lr: float) -> list[Trial]:
        seeds = range(self.recipe.seed, self.recipe.seed + self.seeds)
        return [Trial(kind="test", lr=lr, seed=s, folder=folder / f"test-lr-{lr}-seed-{s}") for s in seeds]

    def recipe_of(self, trial: Trial) -> Recipe:
        """The settings of one trial; the test split is measured once, at the end."""
        changes: dict[str, Any] = {"lr": trial.lr, "seed": trial.seed, "validation": trial.kind}
        if trial.kind == "test":
            changes["eval_every"] = 0
        return self.recipe.replace(**changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A protocol and its trials so far."""

    folder: Path
    protocol: Protocol
    dev: tuple[Trial, ...] = ()
    test: tuple[Trial, ...] = ()

    @property
    def trials(self) -> tuple[Trial, ...]:
        return (*self.dev, *self.test)

    @property
    def unreadable(self) -> dict[str, str]:
        """Why images were skipped, by key, in any of the trials."""
        return {key: why for trial in self.trials for key, why in Run(trial.folder).unreadable.items()}

    @property
    def chosen_lr(self) -> float | None:
        """The best learning rate on the dev split, once all have been tried; of equals the first, or the only one."""
        if not self.dev:
            return self.protocol.lrs[0]
        if any(trial.state not in ("done", "failed") for trial in self.dev):
            return None
        values = {trial.lr: trial.measures[self.measured] for trial in self.dev if trial.state == "done"}
        return max(values, key=values.__getitem__) if values else None

    @property
    def measured(self) -> str:
        """The measure that decides: ReaL needs labels that training does not have, so top-1 stands for it."""
        return "mean_per_class" if self.protocol.metric == "mean_per_class" else "top1"

    def values(self, measure: str | None = None) -> list[float]:
        """The measure on the test split, seed by seed."""
        return [trial.measures[measure or self.measured] for trial in self.test if trial.state == "done"]

    @property
    def measured_on(self) -> str:
        """What the result was measured on, in words; empty before the first trial for it."""
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
            "top1": mean_and_std(self.values("top1")),
            "mean_per_class": mean_and_std(self.values("mean_per_class")),
            "trials": [trial.to_json() for trial in self.trials],
            "recipe": self.protocol.recipe.to_json(),
        }

    def write(self) -> None:
        write_json(self.folder / SWEEP_FILE, self.to_json())


def mean_and_std(values: Iterable[float]) -> dict[str, float | int | None]:
    """Mean and sample standard deviation, which one value does not have."""
    found = list(values)
    return {
        "mean": statistics.fmean(found) if found else None,
        "deviation": statistics.stdev(found) if len(found) > 1 else None,
        "count": len(found),
    }


def differences(folder: Path, protocol: Protocol) -> list[str]:
    """In what the sweep in a folder differs from this protocol, so that its trials are no use; empty if in nothing."""
    content = read_object(folder / SWEEP_FILE, raises=TrainingError)
    try:
        recipe = recipe_from(content["recipe"], str(folder / SWEEP_FILE))
        was = Protocol(data=content["data"], recipe=recipe, lrs=tuple(content["lrs"]))
        if was.identity != content["identity"]:
            raise ValueError("it has changed since it was written")
    except (ValueError, KeyError, TypeError) as error:
        raise TrainingError(f"{folder / SWEEP_FILE}: not the record of a sweep: {error}") from error
    return [] if was.identity == protocol.identity else list(differing(was.settings(), protocol.settings()))


def differing(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Each value in which two JSON objects differ, by its full name."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *before]):
            yield from differing(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now and not before and name in UNSET:
        yield f"no {name}, not {name}={now}"
    elif before != now:
        yield f"{name}={before}, not {now or 'unset' if name in UNSET else now}"


METRICS = {key: MEASURE_NAMES[key] for key in ("top1", "mean_per_class")}


def write_sweep_report(sweep: Sweep) -> Path:
    """Write `report.html` into the sweep's folder, atomically; returns its path."""
    chosen = {"learning rate": f"{sweep.chosen_lr:g}"} if sweep.chosen_lr is not None else {}
    tiles = {name: format_mean(sweep, key) for key, name in METRICS.items()} | chosen
    done = sum(trial.state == "done" for trial in sweep.trials)
    progress = f"{done} of {len(sweep.dev) + sweep.protocol.seeds} trials done"
    page = render(
        "sweep.html",
        title=f"{Path(sweep.protocol.recipe.weights).name} fine-tuned on {Path(sweep.protocol.data).name}",
        subtitle=progress + ("" if sweep.finished else ", not finished yet"),
        tile_values=tiles if sweep.values() else {},
        failed=[trial.name for trial in sweep.trials if trial.state == "failed"],
        titles=["trial", ">lr", ">seed", *(f">{name}" for name in METRICS.values()), ">cross-entropy", "time", "state"],
        dev_trials=[trial_row(sweep, trial) for trial in sweep.dev],
        test_trials=[trial_row(sweep, trial) for trial in sweep.test],
        measured_on=sweep.measured_on or "test images",
        # the sweep may have replaced the recipe's learning rates
        settings=sweep.protocol.recipe.shown() | {"lr": sweep.chosen_lr or "not chosen yet", "lrs": sweep.protocol.lrs},
    )
    return write_text(sweep.folder / PAGE, page)


def format_mean(sweep: Sweep, measure: str) -> str:
    """`91.03 ± 0.12 %` over several seeds, `91.03 %` for one."""
    values = mean_and_std(sweep.values(measure))
    if values["mean"] is None:
        return "–"
    spread = "" if values["deviation"] is None else f" ± {values['deviation']:.2f}"
    return f"{values['mean']:.2f}{spread} %"


def trial_row(sweep: Sweep, trial: Trial) -> list[object]:
    measures, state = trial.measures, trial.state
    link = Markup('<a href="{0}/{1}">{0}</a>').format(trial.name, PAGE)
    numbers = [f"{measures[key]:.2f} %" if measures else "–" for key in METRICS]
    loss = f"{measures['loss']:.4f}" if measures else "–"
    seconds = format_duration(measures["seconds"]) if measures else "–"
    is_chosen = trial.kind == "dev" and trial.lr == sweep.chosen_lr
    name = link if state == "done" else trial.name
    return [name, f"{trial.lr:g}", trial.seed, *numbers, loss, seconds, "chosen" if is_chosen else state]
