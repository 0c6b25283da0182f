"""`vit study`: the paper's tables and figures, measured, each continued where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import Changes, Command, DataRoot, names_in, parse_numbers, place_data
from vitruvian.cli.start import speaks
from vitruvian.tasks import SEEDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vitruvian.study.growth import Study
    from vitruvian.study.transfer import Cell, Setup, VtabResult
    from vitruvian.tasks import Task

study = typer.Typer(help="Repeat the paper's tables and figures.", no_args_is_help=True)


Models = Annotated[str, typer.Option(metavar="W,W,...", help="Weights to start from: files, folders or names.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the study; else one in runs/.")]
Quick = Annotated[bool, typer.Option("--quick", help="One learning rate and one seed.")]
RecipeName = Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="In place of each task's own recipe.")]
Seeds = Annotated[int, typer.Option(min=1, metavar="N", help="Runs that are averaged.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line for each cell.")]
Data = Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, or a task (`vit tasks`).")]
Recipes = Annotated[
    str, typer.Option(metavar="R,R,...", help="Recipes to compare; else study-vit, study-hybrid and study-resnet.")
]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Say which cells would run and how long; trains nothing.")]


@study.command(cls=Command)
def table5(
    models: Models,
    tasks: Annotated[str, typer.Option(metavar="T,T,...", help="Tasks (`vit tasks`); else those of the table.")] = "",
    out: Out = None,
    quick: Quick = False,
    recipe: RecipeName = None,
    seeds: Seeds = SEEDS,
    settings: Changes = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune models on tasks and print the paper's Table 5 beside what was measured.

    A task whose images are missing leaves its cell empty and says why; the others run.
    """
    from vitruvian.study.published import TABLE5_TASKS
    from vitruvian.study.transfer import Setup, tasks_named

    place_data(data_root)
    chosen = tasks_named(tasks.split(",") if tasks else TABLE5_TASKS)
    setup = Setup(recipe=recipe, settings=tuple(settings or ()), quick=quick, seeds=seeds)
    cells = fine_tuned(models, chosen, out or Path("runs/study-table5"), setup)
    if as_json and speaks():
        print("\n".join(json.dumps(cell.to_json()) for cell in cells))
    elif speaks():
        show_table5(cells)
    fail_if_empty(cells)


@study.command(cls=Command)
def vtab(
    models: Models,
    out: Out = None,
    quick: Quick = False,
    recipe: RecipeName = None,
    seeds: Seeds = SEEDS,
    settings: Changes = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune models on the 19 tasks of VTAB-1k and give the means of its groups."""
    from vitruvian.study.transfer import Setup, vtab_result
    from vitruvian.tasks import VTAB_TASKS

    place_data(data_root)
    setup = Setup(recipe=recipe, settings=tuple(settings or ()), quick=quick, seeds=seeds)
    cells = fine_tuned(models, VTAB_TASKS, out or Path("runs/study-vtab"), setup)
    for model in dict.fromkeys(cell.model for cell in cells) if speaks() else ():
        result = vtab_result(model, cells)
        print(json.dumps(result.to_json())) if as_json else show_vtab(result, cells)
    fail_if_empty(cells)


@study.command("data-size", cls=Command)
def data_size(
    data: Data,
    sizes: Annotated[str, typer.Option(metavar="N,N,...", help="Images to train on; `all` for all.")] = "",
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps of each training.")] = None,
    recipes: Recipes = "",
    out: Out = None,
    settings: Changes = None,
    plan: PlanOnly = False,
    as_json: AsJson = False,
) -> None:
    """Train ViT, hybrid and ResNet on growing parts of the images, for equally many steps (Figures 3 and 4)."""
    from vitruvian.study.growth import RECIPES, SIZE_STEPS, SIZES, study_of

    found = study_of(
        "data-size",
        data,
        sizes=parse_numbers(sizes) if sizes else list(SIZES),
        steps=[steps or SIZE_STEPS],
        recipes=names_in(recipes) or RECIPES,
        settings=settings or [],
        out=out,
    )
    grow(found, plan=plan, as_json=as_json)


@study.command(cls=Command)
def compute(
    data: Data,
    steps: Annotated[str, typer.Option(metavar="N,N,...", help="Steps of the trainings.")] = "",
    images: Annotated[int, typer.Option(min=0, metavar="N", help="Images to train on; 0 for all.")] = 0,
    recipes: Recipes = "",
    out: Out = None,
    settings: Changes = None,
    plan: PlanOnly = False,
    as_json: AsJson = False,
) -> None:
    """Train ViT, hybrid and ResNet for growing numbers of steps: accuracy over multiply-adds (Figure 5)."""
    from vitruvian.study.growth import COMPUTE_STEPS, RECIPES, study_of

    found = study_of(
        "compute",
        data,
        sizes=[images],
        steps=parse_numbers(steps) if steps else list(COMPUTE_STEPS),
        recipes=names_in(recipes) or RECIPES,
        settings=settings or [],
        out=out,
    )
    grow(found, plan=plan, as_json=as_json)


def fine_tuned(models: str, tasks: Sequence[Task], out: Path, setup: Setup) -> list[Cell]:
    from vitruvian.study.transfer import transfer

    names = names_in(models)
    if not names:
        raise typer.BadParameter("give the weights to start from", param_hint="--models")
    return list(transfer(names, tasks, out, setup=setup))


def fail_if_empty(cells: list[Cell]) -> None:
    """Exit with 1 where nothing was measured; the reasons have been told."""
    if not any(cell.values for cell in cells):
        raise typer.Exit(1)


def show_table5(cells: list[Cell]) -> None:
    """What was measured, then the paper's rows, in the same columns."""
    from vitruvian.study.published import TABLE5, published
    from vitruvian.text import table

    tasks = list(dict.fromkeys(cell.task.name for cell in cells))
    by = {(cell.model, cell.task.name): cell for cell in cells}
    rows = [["measured", m, *(by[m, task].text for task in tasks)] for m in dict.fromkeys(c.model for c in cells)]
    columns = {task: published(task) for task in tasks}
    for row in TABLE5 if any(columns.values()) else ():
        numbers = (f"{columns[task][row]:.2f}" if row in columns[task] else "-" for task in tasks)
        rows.append(["paper", f"{row[1]}, {row[0]}", *numbers])
    print(table(("", "model", *(f">{task}" for task in tasks)), rows))
    means = sorted({cell.task.name for cell in cells if cell.measured == "mean_per_class"})
    if means:
        print(f"\nmean per class: {', '.join(means)}; the others are top-1, in percent")
    show_missing(cells)


def show_missing(cells: list[Cell]) -> None:
    for cell in cells:
        if cell.missing:
            print(f"missing: {cell.model} on {cell.task.name}: {cell.missing}")


def show_vtab(result: VtabResult, cells: list[Cell]) -> None:
    from vitruvian.study.published import VTAB_MEAN
    from vitruvian.tasks import VTAB_TASKS
    from vitruvian.text import table

    own = [cell for cell in cells if cell.model == result.model]
    print(result.model)
    print(table(("task", "group", ">measured"), [(cell.task.name, cell.task.group, cell.text) for cell in own]))
    for name, (mean, count, total) in result.groups.items():
        print(f"{name}: " + ("-" if mean is None else f"{mean:.2f}") + f" over {count} of {total} tasks")
    if result.whole and result.mean is not None:
        print(f"VTAB mean: {result.mean:.2f} (the paper: {VTAB_MEAN}, H/14 from JFT-300M)")
    else:
        number = "no number" if result.mean is None else f"{result.mean:.2f}"
        print(f"mean of the {result.measured} measured tasks: {number}; VTAB is the mean over all {len(VTAB_TASKS)}")
        print(f"the paper's VTAB mean: {VTAB_MEAN} (H/14 from JFT-300M)")
    show_missing(own)


def grow(found: Study, *, plan: bool, as_json: bool) -> None:
    """Carry a study out and print it, or only say what it would do."""
    from vitruvian.study.growth import run_study, write_study_report

    if plan:
        show_plan(found)
        return
    run_study(found, after=write_study_report)
    if as_json and speaks():
        print("\n".join(json.dumps(cell.to_json()) for cell in found.cells))
    elif speaks():
        show_growth(found)


def show_plan(study: Study) -> None:
    from vitruvian.study.growth import estimates
    from vitruvian.text import format_duration, table

    rows, total = [], 0.0
    for cell, seconds in estimates(study):
        total += seconds
        work = f"{cell.multiply_adds:.3g}"
        time = format_duration(seconds) if seconds else "-"
        rows.append((cell.folder.name, f"{cell.images:,}", f"{cell.recipe.steps:,}", work, time, cell.state))
    print(table(("cell", ">images", ">steps", ">multiply-adds", ">about", "state"), rows))
    print(
        f"\n{len(rows)} cells in {study.folder}, about {format_duration(total)} in all, as measured now on a few steps"
    )


def show_growth(study: Study) -> None:
    from vitruvian.text import table

    rows = []
    for cell in study.cells:
        values = cell.to_json()
        numbers = [f"{values['images']:,}", f"{values['steps']:,}", f"{values['multiply_adds']:.3g}"]
        results = (f"{values['top1']:.2f}%", f"{values['seconds']:.0f} s") if "top1" in values else ("-", cell.state)
        rows.append((values["recipe"], *numbers, *results))
    print(table(("recipe", ">images", ">steps", ">multiply-adds", ">top-1", ">time"), rows))
    print(f"\nthe page is {study.folder / 'report.html'}, the plot {study.folder / 'study.png'}")
