"""Models x tasks through fine-tuning: Table 5 and VTAB, with a reason in place of each number that is missing."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from vitruvian.errors import CheckpointError, DataError, Interrupted, TrainingError
from vitruvian.files import write_json
from vitruvian.progress import print_status
from vitruvian.study import STUDY_FILE
from vitruvian.study.published import VTAB_MEAN
from vitruvian.tasks import SEEDS, VTAB_TASKS, Task, task_named
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import finetune, protocol_for
from vitruvian.training.journal import Listener
from vitruvian.training.sweep import mean_and_std
from vitruvian.weights.load import locate

REAL = "ReaL has no images to train on: fine-tune on imagenet, then `vit evaluate imagenet-real --model TRIAL`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How each cell is fine-tuned."""

    recipe: str | None = None
    """In place of the task's own."""
    settings: tuple[str, ...] = ()
    quick: bool = False
    """One learning rate and one seed."""
    seeds: int = SEEDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One model on one task: a number, or why there is none."""

    model: str
    task: Task
    values: tuple[float, ...] = ()
    """Of the task's metric on the test split, seed by seed, in percent."""
    measured: str = ""
    """What the values are: top1 or mean_per_class."""
    missing: str = ""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def text(self) -> str:
        """`94.43 ± 0.10`, `94.43` of one run, or a dash."""
        found = mean_and_std(self.values)
        if found["mean"] is None:
            return "-"
        return f"{found['mean']:.2f}" + (f" ± {found['deviation']:.2f}" if found["deviation"] is not None else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "task": self.task.name,
            "group": self.task.group,
            "metric": self.measured,
            "values": list(self.values),
            "mean": self.mean,
            "missing": self.missing,
        }


def transfer(
    models: Sequence[str],
    tasks: Sequence[Task],
    out: Path,
    *,
    setup: Setup,
    listeners: Sequence[Listener] = (),
    said: Callable[[str], None] = print_status,
) -> list[Cell]:
    """Fine-tune every model on every task, each in a folder of its own in `out`; what is done is not repeated.

    Under torchrun all processes share each training, and the first one writes and speaks.
    A cell whose data is missing, or whose training fails, has the reason, and the others go on. Weights that cannot be
    found, and an interruption, end the study: the same call goes on from there.
    """
    for model in models:
        locate(model)  # before hours of work
    cells: list[Cell] = []
    with process_group("auto") as processes:  # once for all trainings
        for model in models:
            for task in tasks:
                if processes.is_main:
                    said(f"{model} on {task.name} ({len(cells) + 1} of {len(models) * len(tasks)})")
                folder = out / f"{short(model)}-{task.name}"
                cells.append(one_cell(model, task, folder=folder, setup=setup, listeners=listeners, said=said))
                if processes.is_main:
                    write_json(out / STUDY_FILE, {"cells": [cell.to_json() for cell in cells]})
    return cells


def one_cell(
    model: str, task: Task, *, folder: Path, setup: Setup, listeners: Sequence[Listener], said: Callable[[str], None]
) -> Cell:
    """Fine-tune a model on a task in `folder`, or tell why not."""
    if task.metric == "real":
        return Cell(model=model, task=task, missing=REAL)
    try:
        protocol = protocol_for(
            task.name, model, recipe=setup.recipe, settings=setup.settings, task=task, seeds=setup.seeds
        )
        sweep = finetune(protocol.quickly() if setup.quick else protocol, folder, listeners=listeners, said=said)
    except (Interrupted, CheckpointError):
        raise
    except (DataError, TrainingError) as error:
        said(f"left out: {error}")
        return Cell(model=model, task=task, missing=str(error))
    return Cell(model=model, task=task, values=tuple(sweep.values()), measured=sweep.measured)


def short(model: str) -> str:
    """A model's name or path as the name of a folder, different for different ones."""
    whole = str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model
    words = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name).strip("-") or "model"
    return f"{words}-{sha256(whole.encode()).hexdigest()[:6]}"


def tasks_named(names: Sequence[str]) -> list[Task]:
    """The tasks of these names or aliases, each once."""
    found = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not found:
        raise DataError("no task is named; `vit tasks` lists them")
    return [task_named(name) for name in found]


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabResult:
    """What one model reaches on VTAB, as far as its tasks are here."""

    model: str
    groups: dict[str, tuple[float | None, int, int]]
    """By name: the mean over the tasks that were measured, how many those are, and how many there are."""
    mean: float | None
    """Over the measured tasks; VTAB's own only where `whole`."""
    measured: int
    whole: bool
    missing: dict[str, str]
    """Reasons by task."""

    def to_json(self) -> dict[str, Any]:
        groups = {name: {"mean": mean, "measured": n, "tasks": of} for name, (mean, n, of) in self.groups.items()}
        vtab = self.mean if self.whole else None
        return {
            "model": self.model,
            "groups": groups,
            "vtab_mean": vtab,
            "mean_of_measured": self.mean,
            "measured": self.measured,
            "paper_vtab_mean": VTAB_MEAN,
            "missing": self.missing,
        }


def vtab_result(model: str, cells: Sequence[Cell]) -> VtabResult:
    """Group means and the mean over all tasks of one model."""
    own = [cell for cell in cells if cell.model == model]
    groups: dict[str, tuple[float | None, int, int]] = {}
    for name in dict.fromkeys(cell.task.group for cell in own):
        inside = [cell for cell in own if cell.task.group == name]
        means = [cell.mean for cell in inside if cell.mean is not None]
        groups[name] = (statistics.fmean(means) if means else None, len(means), len(inside))
    means = [cell.mean for cell in own if cell.mean is not None]
    return VtabResult(
        model=model,
        groups=groups,
        mean=statistics.fmean(means) if means else None,
        measured=len(means),
        whole=len(means) == len(VTAB_TASKS),
        missing={cell.task.name: cell.missing for cell in own if cell.mean is None},
    )
