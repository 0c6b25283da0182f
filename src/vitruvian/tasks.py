"""The datasets that papers report, by name (`tasks.toml`): where their images belong, their splits, and the metric."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vitruvian.errors import UnknownNameError
from vitruvian.text import fold, package_table

DATA_VARIABLE = "VITRUVIAN_DATA"
DEFAULT_ROOT = "~/vitruvian-data"
SEEDS = 3  # default number of seeds to average over

Layout = Literal[
    "cifar", "flowers", "folders", "imagenet", "lists", "mafw", "numbered", "objectnet", "omni", "pets", "vizwiz",
    "watermark", "wordnet",
]  # fmt: skip
"""How the files of a task are arranged; `data.releases` has an opener for each layout."""

Metric = Literal["top1", "mean_per_class", "real"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One dataset with its metric; its images are in `folder` below the root directory of all tasks."""

    name: str
    title: str
    folder: str
    layout: Layout
    classes: int  # 0 if only the lists in the release state it
    splits: Mapping[str, int]  # number of images per split in the release; 0 if unknown
    files: tuple[str, ...]  # patterns of files in the folder, each of which must match; `|` separates alternatives
    download: str  # instructions: files to download, from where, and how to arrange them in the folder
    aliases: tuple[str, ...] = ()
    metric: Metric = "top1"  # the main metric in papers; `real`: the prediction is among the labels of ImageNet-ReaL
    group: str = ""  # group of a VTAB task: Natural, Specialized or Structured
    recipe: str = "finetune-paper"  # recipe for fine-tuning as in the paper
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    """Preprocessing settings that belong to the task (see `config.Preprocess`)."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Patterns of other files that an evaluation needs, by kind (`real`, `mappings`)."""
    note: str = ""  # remarks for users

    def path(self, root: Path) -> Path:
        return root / self.folder

    def missing(self, root: Path) -> list[str]:
        """The patterns of `files` that match nothing."""
        path = self.path(root)
        if not path.is_dir():
            return list(self.files)
        return [pattern for pattern in self.files if not any(any(path.glob(glob)) for glob in pattern.split("|"))]

    def present(self, root: Path) -> bool:
        return not self.missing(root)

    def to_json(self, root: Path) -> dict[str, Any]:
        """The row as `vit datasets --json` prints it."""
        fields = asdict(self) | {"folder": str(self.path(root))}
        del fields["extra_files"]
        return fields | {"present": self.present(root), "missing": self.missing(root)}


def describe_pattern(pattern: str) -> str:
    """A pattern of `Task.files` as text."""
    return pattern.replace("|", " or ")


def data_root(chosen: str | Path | None = None) -> Path:
    """The directory of all tasks: `chosen`, else $VITRUVIAN_DATA, else `~/vitruvian-data`."""
    return Path(chosen or os.environ.get(DATA_VARIABLE) or DEFAULT_ROOT).expanduser()


def _fill(value: Any, row: Mapping[str, Any]) -> Any:
    """A value of `tasks.toml` for one row of a family; `"{column}"` alone keeps the type of the column."""
    if isinstance(value, dict):
        return {key: _fill(item, row) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_fill(item, row) for item in value)
    if not isinstance(value, str):
        return value
    column = value.removeprefix("{").removesuffix("}")
    return _fill(row[column], {}) if column in row and value == f"{{{column}}}" else value.format(**row)


@cache
def all_tasks() -> dict[str, Task]:
    """All tasks by name."""
    content = package_table("tasks.toml")
    tasks = [Task(**_fill(task, {})) for task in content["tasks"]]
    for family in content["families"]:
        tasks += [Task(**_fill(family["task"], dict(zip(family["columns"], row)))) for row in family["rows"]]
    return {task.name: task for task in tasks}


def vtab_tasks() -> list[Task]:
    """The 19 tasks of VTAB."""
    return [task for task in all_tasks().values() if task.group]


@cache
def tasks_by_name() -> dict[str, Task]:
    """The tasks by their folded names and aliases."""
    return {fold(name): task for task in all_tasks().values() for name in (task.name, *task.aliases)}


def find_task(name: str) -> Task | None:
    """The task of this name or alias; None if there is none, or for a path."""
    return None if "/" in name or "\\" in name else tasks_by_name().get(fold(name))


def task_of_data(data: str) -> Task | None:
    """The task that DATA names; None if it is an existing path or no task."""
    return None if Path(data).expanduser().exists() else find_task(data)


def preprocess_for(data: str) -> Mapping[str, Any]:
    """Preprocessing settings of the task that DATA names; empty if it names none."""
    task = task_of_data(data)
    return {} if task is None else task.preprocess


def extra_file(data: str, kind: str) -> Path | None:
    """The extra file of this kind (`real`, `mappings`) of the task that `data` names, if it has one."""
    task = task_of_data(data)
    if task is None or kind not in task.extra_files:
        return None
    folder = task.path(data_root())
    return next((path for glob in task.extra_files[kind].split("|") for path in folder.glob(glob)), None)


def get_task(name: str) -> Task:
    """The task of this name or alias; an UnknownNameError suggests similar names."""
    task = find_task(name)
    if task is None:
        aliases = (alias for known in all_tasks().values() for alias in known.aliases)
        raise UnknownNameError("task", name, [*all_tasks(), *aliases], see="(see `vit datasets`)")
    return task


def download_hint(task: Task, root: Path) -> str:
    """The missing files of a task and how to get them, in one line."""
    missing = " and ".join(map(describe_pattern, task.missing(root)))
    return (
        f"the task {task.name} has no {missing} in {task.path(root)}; download {task.download} (set the directory of "
        f"all tasks with {DATA_VARIABLE})"
    )
