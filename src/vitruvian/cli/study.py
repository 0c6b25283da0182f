"""`vit study`: reproduce the paper's tables and figures; an interrupted study is resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitruvian.cli.options import (
    Changes,
    Command,
    DataRoot,
    Quick,
    Seeds,
    TaskData,
    expand_options,
    json_option,
    parse_numbers,
    set_data_root,
    split_names,
)
from vitruvian.cli.process import prints_results
from vitruvian.tasks import SEEDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitruvian.study.growth import Study
    from vitruvian.study.transfer import TransferCell, VtabResult
    from vitruvian.tasks import Task

study = typer.Typer(help="Reproduce the paper's tables and figures.", no_args_is_help=True)


Models = Annotated[
    str, typer.Option(metavar="W,W,...", help="Weights to start from: files, directories or published names.")
]


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of every study."""

    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study [default: in runs/].")] = None
    settings: Changes = None
    as_json: Annotated[bool, json_option(" per cell (JSON Lines)")] = False


@dataclass(frozen=True, kw_only=True)
class TransferOptions(StudyOptions):
    """Options of studies that fine-tune published weights."""

    quick: Quick = False
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="A recipe to use instead of each task's own.")] = (
        None
    )
    seeds: Seeds = SEEDS
    data_root: DataRoot = None

    def run(self, models: str, tasks: Sequence[Task], name: str) -> list[TransferCell]:
        """Fine-tune every model on every task."""
        from vitruvian.study.transfer import Setup, transfer

        set_data_root(self.data_root)
        names = split_names(models)
        if not names:
            raise typer.BadParameter("give weights to start from", param_hint="--models")
        setup = Setup(recipe=self.recipe, settings=tuple(self.settings or ()), quick=self.quick, seeds=self.seeds)
        return list(transfer(names, tasks, self.out or Path(f"runs/study-{name}"), setup=setup))


@dataclass(frozen=True, kw_only=True)
class GrowthOptions(StudyOptions):
    """Options of studies that train from scratch."""

    recipes: Annotated[
        str,
        typer.Option(metavar="R,R,...", help="Recipes to compare [default: study-vit, study-hybrid, study-resnet]."),
    ] = ""
    plan: Annotated[bool, typer.Option("--plan", help="Print which cells would run and how long; train nothing.")] = (
        False
    )

    def run(self, name: Literal["data-size", "compute"], data: str, sizes: Sequence[int], steps: Sequence[int]) -> None:
        """Run a study and print it, or print its plan."""
        from vitruvian.study.growth import RECIPES, plan_study, run_study

        recipes, settings = split_names(self.recipes) or RECIPES, self.settings or []
        study = plan_study(name, data, sizes=sizes, steps=steps, recipes=recipes, settings=settings, out=self.out)
        if self.plan:
            print_plan(study)
            return
        run_study(study)
        if self.as_json and prints_results():
            print("\n".join(json.dumps(cell.to_json()) for cell in study.cells))
        elif prints_results():
            print_growth(study)


@study.command(cls=Command)
@expand_options
def table5(
    models: Models,
    options: TransferOptions,
    tasks: Annotated[
        str, typer.Option(metavar="T,T,...", help="Tasks (`vit tasks`) [default: those of the table].")
    ] = "",
) -> None:
    """Fine-tune models on tasks and print the results beside the paper's Table 5.

    A task without images leaves its cell empty and prints the reason; the others run.
    """
    from vitruvian.study.transfer import TABLE5_TASKS, find_tasks

    cells = options.run(models, find_tasks(tasks.split(",") if tasks else TABLE5_TASKS), "table5")
    if options.as_json and prints_results():
        print("\n".join(json.dumps(cell.to_json()) for cell in cells))
    elif prints_results():
        print_table5(cells)
    fail_if_empty(cells)


@study.command(cls=Command)
@expand_options
def vtab(models: Models, options: TransferOptions) -> None:
    """Fine-tune models on the 19 tasks of VTAB-1k and print the means of its groups."""
    from vitruvian.study.transfer import vtab_result
    from vitruvian.tasks import VTAB_TASKS

    cells = options.run(models, VTAB_TASKS, "vtab")
    for model in dict.fromkeys(cell.model for cell in cells) if prints_results() else ():
        result = vtab_result(model, cells)
        print(json.dumps(result.to_json())) if options.as_json else print_vtab(result, cells)
    fail_if_empty(cells)


@study.command("data-size", cls=Command)
@expand_options
def data_size(
    data: TaskData,
    options: GrowthOptions,
    sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of training images; `all` for all.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Training steps of each cell.")] = None,
) -> None:
    """Train ViT, hybrid and ResNet on growing subsets, for the same number of steps (Figures 3 and 4)."""
    from vitruvian.study.growth import SIZE_STEPS, SIZES

    options.run("data-size", data, parse_numbers(sizes, "--sizes") if sizes else list(SIZES), [steps or SIZE_STEPS])


@study.command(cls=Command)
@expand_options
def compute(
    data: TaskData,
    options: GrowthOptions,
    steps: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of training steps.")] = "",
    images: Annotated[int, typer.Option(min=0, metavar="N", help="Number of training images; 0 for all.")] = 0,
) -> None:
    """Train ViT, hybrid and ResNet for growing numbers of steps: accuracy over multiply-adds (Figure 5)."""
    from vitruvian.study.growth import COMPUTE_STEPS

    options.run("compute", data, [images], parse_numbers(steps, "--steps") if steps else list(COMPUTE_STEPS))


def fail_if_empty(cells: list[TransferCell]) -> None:
    """Exit with 1 if nothing was measured; the reasons have been printed."""
    if not any(cell.values for cell in cells):
        raise typer.Exit(1)


def print_table5(cells: list[TransferCell]) -> None:
    """Print the measured rows, then the paper's rows, in the same columns."""
    from vitruvian.study.transfer import TABLE5, published_results
    from vitruvian.text import table

    tasks = list(dict.fromkeys(cell.task.name for cell in cells))
    by = {(cell.model, cell.task.name): cell for cell in cells}
    rows = [["measured", m, *(by[m, task].text for task in tasks)] for m in dict.fromkeys(c.model for c in cells)]
    columns = {task: published_results(task) for task in tasks}
    for row in TABLE5 if any(columns.values()) else ():
        numbers = (f"{columns[task][row]:.2f}" if row in columns[task] else "-" for task in tasks)
        rows.append(["paper", f"{row[1]}, {row[0]}", *numbers])
    print(table(("", "model", *(f">{task}" for task in tasks)), rows))
    means = sorted({cell.task.name for cell in cells if cell.metric == "mean_per_class"})
    if means:
        print(f"\nmean per class: {', '.join(means)}; the others are top-1, in percent")
    print_missing(cells)


def print_missing(cells: list[TransferCell]) -> None:
    for cell in cells:
        if cell.missing:
            print(f"missing: {cell.model} on {cell.task.name}: {cell.missing}")


def print_vtab(result: VtabResult, cells: list[TransferCell]) -> None:
    from vitruvian.study.transfer import VTAB_MEAN
    from vitruvian.tasks import VTAB_TASKS
    from vitruvian.text import table

    model_cells = [cell for cell in cells if cell.model == result.model]
    print(result.model)
    print(table(("task", "group", ">measured"), [(cell.task.name, cell.task.group, cell.text) for cell in model_cells]))
    for name, (mean, count, total) in result.groups.items():
        print(f"{name}: " + ("-" if mean is None else f"{mean:.2f}") + f" over {count} of {total} tasks")
    if result.is_complete and result.mean is not None:
        print(f"VTAB mean: {result.mean:.2f} (the paper: {VTAB_MEAN}, H/14 from JFT-300M)")
    else:
        mean_text = "none" if result.mean is None else f"{result.mean:.2f}"
        print(f"mean of the {result.measured} measured tasks: {mean_text}; VTAB is the mean over all {len(VTAB_TASKS)}")
        print(f"the paper's VTAB mean: {VTAB_MEAN} (H/14 from JFT-300M)")
    print_missing(model_cells)


def print_plan(study: Study) -> None:
    from vitruvian.study.growth import estimate_seconds
    from vitruvian.text import format_duration, table

    rows, total = [], 0.0
    for cell, seconds in estimate_seconds(study):
        total += seconds
        work = f"{cell.multiply_adds:.3g}"
        time = format_duration(seconds) if seconds else "-"
        rows.append((cell.folder.name, f"{cell.images:,}", f"{cell.recipe.steps:,}", work, time, cell.state))
    print(table(("cell", ">images", ">steps", ">multiply-adds", ">about", "state"), rows))
    print(
        f"\n{len(rows)} cells in {study.folder}, about {format_duration(total)} in all, as measured now on a few steps"
    )


def print_growth(study: Study) -> None:
    from vitruvian.text import table

    rows = []
    for cell in study.cells:
        values = cell.to_json()
        numbers = [f"{values['images']:,}", f"{values['steps']:,}", f"{values['multiply_adds']:.3g}"]
        results = (f"{values['top1']:.2f}%", f"{values['seconds']:.0f} s") if "top1" in values else ("-", cell.state)
        rows.append((values["recipe"], *numbers, *results))
    print(table(("recipe", ">images", ">steps", ">multiply-adds", ">top-1", ">time"), rows))
    print(f"\nreport: {study.folder / 'report.html'}; plot: {study.folder / 'study.png'}")
