"""Fine-tuning of models on tasks: Table 5 and VTAB, with a reason for each missing number."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitruvian.data.formats import open_dataset
from vitruvian.errors import CheckpointError, DataError, Interrupted, TrainingError
from vitruvian.evaluation.evaluate import evaluate_classes
from vitruvian.files import write_json
from vitruvian.progress import print_status
from vitruvian.study import STUDY_FILE
from vitruvian.study.paper import paper_rows
from vitruvian.tasks import SEEDS, Task, get_task, vtab_tasks
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import finetune, format_mean, protocol_for
from vitruvian.weights.load import locate

TABLE5_TASKS = ("cifar10", "cifar100", "imagenet", "imagenet-real", "flowers102", "pets")
"""The columns of Table 5, as names of tasks."""
SINGLE_TASKS = ("imagenet", "imagenet-real", "cifar10", "cifar100", "pets", "flowers102")
TABLE2_TASKS = (*SINGLE_TASKS, *(task.name for task in vtab_tasks()))
"""Those of Table 2; VTAB is the mean of its 19 tasks."""
TABLE2_RECIPES = {"imagenet": "finetune-paper-table2"}  # at 512 pixels, with averaged weights
TABLES: dict[str, tuple[Sequence[str], Mapping[str, str], Sequence[str]]] = {
    "table2": (TABLE2_TASKS, TABLE2_RECIPES, ("table2",)),
    "table5": (TABLE5_TASKS, {}, ("table5", "table2")),
}
"""Default tasks, recipes that replace those of tasks, and the paper's tables to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCell:
    """A model fine-tuned on a task, or the reason why it could not be."""

    model: str
    task: Task
    values: tuple[float, ...] = ()  # the task's metric on the test split, seed by seed, in percent
    metric: str = ""  # top1, mean_per_class or real
    missing: str = ""

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def text(self) -> str:
        """`94.43 ± 0.10`, `94.43` for a single run, or a dash."""
        return format_mean(self.values) or "-"

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


def real_accuracies(runs: Sequence[Path]) -> list[float]:
    return [evaluate_classes("imagenet-real", run).real or 0.0 for run in runs]


def transfer(
    models: Sequence[str],
    tasks: Sequence[Task],
    out: Path,
    *,
    recipe: str | None = None,
    recipes: Mapping[str, str] = MappingProxyType({}),
    settings: Sequence[str] = (),
    quick: bool = False,
    seeds: int = SEEDS,
    report: Callable[[str], None] = print_status,
) -> list[TransferCell]:
    """Fine-tune every model on every task, each in its own subfolder of `out`; finished cells are not repeated.

    ImageNet-ReaL has no training images: its cell evaluates the runs of `imagenet`, which are trained if they are not
    yet. A cell whose data is missing or whose training fails has the reason, and the others continue. Under torchrun
    all processes call this and share each run.

    Args:
        models: Files, directories or published names of weights.
        tasks: Tasks to fine-tune on.
        out: Folder of the study.
        recipe: Replaces the recipe of each task.
        recipes: Replace the recipes of some tasks, by their names.
        settings: Changes to all recipes, such as "steps=500".
        quick: One learning rate and one seed.
        seeds: Number of runs to average.
        report: Receives a line per cell and per trial.

    Raises:
        CheckpointError: weights cannot be found or read.
        Interrupted: a signal stopped the study; the same call resumes it.
    """
    for model in models:
        locate(model)  # before hours of work
    cells: list[TransferCell] = []
    with process_group("auto") as processes:  # once for all runs
        for model, task in product(models, tasks):
            if processes.is_main:
                report(f"{model} on {task.name} ({len(cells) + 1} of {len(models) * len(tasks)})")
            try:
                trained_on = get_task("imagenet") if task.metric == "real" else task
                if task.metric == "real":
                    open_dataset(task.name)  # before hours of training
                protocol = protocol_for(
                    trained_on.name,
                    model,
                    recipe=recipe or recipes.get(trained_on.name),
                    settings=settings,
                    task=trained_on,
                    seeds=seeds,
                )
                folder = out / f"{folder_name(model)}-{trained_on.name}"
                sweep = finetune(protocol.quick() if quick else protocol, folder, report=report)
                values, metric = sweep.values(), sweep.metric
                if task.metric == "real":
                    done = [trial.folder for trial in sweep.test if trial.state == "done"]
                    values = processes.on_main(partial(real_accuracies, done))
                    metric = "real"
                cell = TransferCell(model=model, task=task, values=tuple(values), metric=metric)
            except (Interrupted, CheckpointError):
                raise
            except (DataError, TrainingError) as error:
                report(f"skipped: {error}")
                cell = TransferCell(model=model, task=task, missing=str(error))
            cells.append(cell)
            if processes.is_main:
                write_json(out / STUDY_FILE, {"cells": [cell.to_json() for cell in cells]})
    return cells


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
        raise DataError("no tasks given", hint="`vit datasets` lists them")
    return [get_task(name) for name in unique]


def vtab_result(model: str, cells: Sequence[TransferCell]) -> dict[str, Any]:
    """The group means of one model, and its mean over all tasks: `vtab_mean` only if all 19 are measured."""
    groups: dict[str, list[TransferCell]] = {}
    for cell in (cell for cell in cells if cell.model == model):
        groups.setdefault(cell.task.group, []).append(cell)
    means = {name: [cell.mean for cell in group if cell.mean is not None] for name, group in groups.items()}
    measured = [mean for group in means.values() for mean in group]
    mean = statistics.fmean(measured) if measured else None
    summaries = {}
    for name, group in groups.items():
        average = statistics.fmean(means[name]) if means[name] else None
        summaries[name] = {"mean": average, "measured": len(means[name]), "tasks": len(group)}
    return {
        "model": model,
        "groups": summaries,
        "vtab_mean": mean if len(measured) == len(vtab_tasks()) else None,
        "mean_of_measured": mean,
        "measured": len(measured),
        "paper": {row.name: row.values for row in paper_rows("table9")},
        "missing": {cell.task.name: cell.missing for group in groups.values() for cell in group if cell.mean is None},
    }
