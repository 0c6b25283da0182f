"""`vit tasks`: the tasks that papers report, and whether their images are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import DataRoot
from vitruvian.text import table

if TYPE_CHECKING:
    from vitruvian.tasks import Task

METRICS = {"top1": "top-1", "mean_per_class": "mean per class", "real": "ReaL"}


def tasks(
    name: Annotated[str, typer.Argument(help="A task or part of a name, such as pets or vtab.")] = "",
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each task.")] = False,
) -> None:
    """List tasks: classes, splits, metric, which images are here.

    With a NAME, also what to download and where to put it. Commands that take DATA take these names.
    """
    from vitruvian.tasks import TASKS, find_task, task_named
    from vitruvian.tasks import data_root as root_folder

    root = root_folder(data_root)
    exact = find_task(name) if name else None
    found = [exact] if exact else [task for task in TASKS.values() if name.lower() in task.name]
    if not found:
        found = [task_named(name)]
    if as_json:
        for task in found:
            print(json.dumps(task.to_json(root), ensure_ascii=False))
    elif len(found) == 1:
        print("\n".join(described(found[0], root)))
    else:
        print(table(HEADINGS, [row(task, root) for task in found]))
        print(f"\nImages belong into {root}. `vit tasks NAME` tells what to download and where to put it.")


HEADINGS = ("task", "title", ">classes", ">train", ">val", ">test", "metric", "images")


def row(task: Task, root: Path) -> tuple[str, ...]:
    counts = [f"{task.splits[split]:,}" if task.splits.get(split) else "-" for split in ("train", "val", "test")]
    present = "present" if task.present(root) else "missing"
    return task.name, task.title, f"{task.classes:,}" if task.classes else "-", *counts, METRICS[task.metric], present


def described(task: Task, root: Path) -> list[str]:
    """All that is known of a task, a line for each fact."""
    from vitruvian.tasks import in_words

    missing = ", ".join(map(in_words, task.missing(root)))
    facts = {
        "task": task.name + (f" (also {', '.join(task.aliases)})" if task.aliases else ""),
        "title": task.title,
        "group": task.group,
        "classes": f"{task.classes:,}" if task.classes else "as the lists tell",
        "splits": ", ".join(f"{split} {count:,}" if count else split for split, count in task.splits.items()),
        "metric": METRICS[task.metric],
        "view": ", ".join(f"{key}={value}" for key, value in task.view.items()),
        "recipe": task.recipe,
        "note": task.note,
        "folder": str(task.place(root)),
        "holds": ", ".join(map(in_words, task.wanted)),
        "images": f"missing: {missing}" if missing else "present",
        "download": task.download,
    }
    return [f"{name:10}{fact}" for name, fact in facts.items() if fact]
