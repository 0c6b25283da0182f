"""Fine-tuning of models on tasks: Table 5 and VTAB, with a reason for each missing number."""

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
from vitruvian.tasks import SEEDS, VTAB_TASKS, Task, get_task
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import finetune, mean_and_std, protocol_for
from vitruvian.training.journal import Listener
from vitruvian.weights.load import locate

REAL = "ReaL has no training images: fine-tune on imagenet, then `vit evaluate imagenet-real --model TRIAL`"


TABLE5_TASKS = ("cifar10", "cifar100", "imagenet", "imagenet-real", "flowers102", "pets")
"""The columns of Table 5, as names of tasks."""

TABLE5: dict[tuple[str, str], tuple[float, ...]] = {
    # pre-training data, model: CIFAR-10, CIFAR-100, ImageNet, ReaL, Flowers, Pets; fine-tuned at 384
    ("ImageNet", "B/16"): (98.13, 87.13, 77.91, 83.57, 89.49, 93.81),
    ("ImageNet", "B/32"): (97.77, 86.31, 73.38, 79.56, 85.43, 92.04),
    ("ImageNet", "L/16"): (97.86, 86.35, 76.53, 82.19, 89.66, 93.64),
    ("ImageNet", "L/32"): (97.94, 87.07, 71.16, 77.83, 86.36, 91.35),
    ("ImageNet-21k", "B/16"): (98.95, 91.67, 83.97, 88.35, 99.38, 94.43),
    ("ImageNet-21k", "B/32"): (98.79, 91.97, 81.28, 86.63, 99.11, 93.02),
    ("ImageNet-21k", "L/16"): (99.16, 93.44, 85.15, 88.40, 99.61, 94.73),
    ("ImageNet-21k", "L/32"): (99.13, 93.04, 80.99, 85.65, 99.19, 93.09),
    ("ImageNet-21k", "H/14"): (99.27, 93.82, 85.13, 88.70, 99.51, 94.82),
    ("JFT-300M", "B/16"): (99.00, 91.87, 84.15, 88.85, 99.56, 95.80),
    ("JFT-300M", "B/32"): (98.61, 90.49, 80.73, 86.27, 99.27, 93.40),
    ("JFT-300M", "L/16"): (99.38, 94.04, 87.12, 89.99, 99.56, 97.11),
    ("JFT-300M", "L/32"): (99.19, 92.52, 84.37, 88.28, 99.45, 95.83),
    ("JFT-300M", "H/14"): (99.50, 94.55, 88.04, 90.33, 99.68, 97.56),
}

VTAB_MEAN = 77.63
"""Table 2: H/14 pre-trained on JFT-300M, mean over the 19 tasks."""


def published_results(task: str) -> dict[tuple[str, str], float]:
    """The paper's results on one task by pre-training data and model; empty if Table 5 has none."""
    if task not in TABLE5_TASKS:
        return {}
    return {row: values[TABLE5_TASKS.index(task)] for row, values in TABLE5.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How each cell is fine-tuned."""

    recipe: str | None = None
    """Replaces the task's recipe."""
    settings: tuple[str, ...] = ()
    quick: bool = False
    """One learning rate and one seed."""
    seeds: int = SEEDS


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCell:
    """A model fine-tuned on a task, or the reason why it could not be."""

    model: str
    task: Task
    values: tuple[float, ...] = ()
    """The task's metric on the test split, seed by seed, in percent."""
    metric: str = ""
    """top1 or mean_per_class."""
    missing: str = ""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def text(self) -> str:
        """`94.43 ± 0.10`, `94.43` for a single run, or a dash."""
        stats = mean_and_std(self.values)
        if stats["mean"] is None:
            return "-"
        return f"{stats['mean']:.2f}" + (f" ± {stats['deviation']:.2f}" if stats["deviation"] is not None else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "task": self.task.name,
            "group": self.task.group,
            "metric": self.metric,
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
    report: Callable[[str], None] = print_status,
) -> list[TransferCell]:
    """Fine-tune every model on every task, each in its own subfolder of `out`; finished cells are not repeated.

    A cell whose data is missing or whose training fails has the reason, and the others continue. Under torchrun all
    processes call this and share each run.

    Raises:
        CheckpointError: weights cannot be found or read.
        Interrupted: a signal stopped the study; the same call resumes it.
    """
    for model in models:
        locate(model)  # before hours of work
    cells: list[TransferCell] = []
    with process_group("auto") as processes:  # once for all runs
        for model in models:
            for task in tasks:
                if processes.is_main:
                    report(f"{model} on {task.name} ({len(cells) + 1} of {len(models) * len(tasks)})")
                folder = out / f"{folder_name(model)}-{task.name}"
                cells.append(run_cell(model, task, folder=folder, setup=setup, listeners=listeners, report=report))
                if processes.is_main:
                    write_json(out / STUDY_FILE, {"cells": [cell.to_json() for cell in cells]})
    return cells


def run_cell(
    model: str, task: Task, *, folder: Path, setup: Setup, listeners: Sequence[Listener], report: Callable[[str], None]
) -> TransferCell:
    """Fine-tune a model on a task in `folder`."""
    if task.metric == "real":
        return TransferCell(model=model, task=task, missing=REAL)
    try:
        protocol = protocol_for(
            task.name, model, recipe=setup.recipe, settings=setup.settings, task=task, seeds=setup.seeds
        )
        sweep = finetune(protocol.quick() if setup.quick else protocol, folder, listeners=listeners, report=report)
    except (Interrupted, CheckpointError):
        raise
    except (DataError, TrainingError) as error:
        report(f"skipped: {error}")
        return TransferCell(model=model, task=task, missing=str(error))
    return TransferCell(model=model, task=task, values=tuple(sweep.values()), metric=sweep.metric)


def folder_name(model: str) -> str:
    """A folder name for a model's name or path; the hash distinguishes models with the same name."""
    path = Path(model).expanduser()
    identity = str(path.resolve()) if path.exists() else model
    words = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name).strip("-") or "model"
    return f"{words}-{sha256(identity.encode()).hexdigest()[:6]}"


def find_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks with these names or aliases, without repetitions."""
    unique = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not unique:
        raise DataError("no tasks given", hint="`vit tasks` lists them")
    return [get_task(name) for name in unique]


@dataclass(frozen=True, kw_only=True, slots=True)
class VtabResult:
    """The results of a model on VTAB, for the tasks whose data is available."""

    model: str
    groups: dict[str, tuple[float | None, int, int]]
    """By name: the mean over the measured tasks, their number, and the number of all tasks."""
    mean: float | None
    """Mean over the measured tasks; the VTAB score only if `is_complete`."""
    measured: int
    is_complete: bool
    missing: dict[str, str]
    """Reasons by task."""

    def to_json(self) -> dict[str, Any]:
        groups = {name: {"mean": mean, "measured": n, "tasks": of} for name, (mean, n, of) in self.groups.items()}
        vtab = self.mean if self.is_complete else None
        return {
            "model": self.model,
            "groups": groups,
            "vtab_mean": vtab,
            "mean_of_measured": self.mean,
            "measured": self.measured,
            "paper_vtab_mean": VTAB_MEAN,
            "missing": self.missing,
        }


def vtab_result(model: str, cells: Sequence[TransferCell]) -> VtabResult:
    """The group means and the mean over all tasks of one model."""
    model_cells = [cell for cell in cells if cell.model == model]
    groups: dict[str, tuple[float | None, int, int]] = {}
    for name in dict.fromkeys(cell.task.group for cell in model_cells):
        group_cells = [cell for cell in model_cells if cell.task.group == name]
        means = [cell.mean for cell in group_cells if cell.mean is not None]
        groups[name] = (statistics.fmean(means) if means else None, len(means), len(group_cells))
    means = [cell.mean for cell in model_cells if cell.mean is not None]
    return VtabResult(
        model=model,
        groups=groups,
        mean=statistics.fmean(means) if means else None,
        measured=len(means),
        is_complete=len(means) == len(VTAB_TASKS),
        missing={cell.task.name: cell.missing for cell in model_cells if cell.mean is None},
    )
