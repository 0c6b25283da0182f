"""Studies that train models: the cells of a table or figure, each with several seeds, beside the paper's numbers."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from vitruvian.cost import parameters
from vitruvian.errors import ConfigError, TrainingError, UnknownNameError, argument
from vitruvian.files import fingerprint, write_json, write_text
from vitruvian.progress import print_status
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, render, write_image
from vitruvian.study import STUDY_FILE
from vitruvian.study.paper import differs_text, paper_chart, paper_number, paper_text
from vitruvian.tasks import SEEDS
from vitruvian.text import format_duration, package_table
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import Trial, format_mean, mean_and_std, train_series
from vitruvian.training.initial_model import config_of, scale_size, without_shape
from vitruvian.training.integrations import Listener, ProgressListener
from vitruvian.training.planning import plan
from vitruvian.training.recipe import OTHER_CLASSES, Recipe, change_recipe, read_recipe, recipe_names
from vitruvian.training.run_folder import RUNS, Run, RunState, is_free, lock_folder
from vitruvian.training.splits import DataRef, fit_batch_size, run_multiply_adds, split_data
from vitruvian.training.train import check_recipe

Metric = Literal["top1", "fewshot"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRow:
    """One row of a study: the settings that its models share."""

    name: str
    recipe: str = ""  # empty: the study's
    settings: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()  # instead of those of the columns
    pretrain: tuple[str, ...] | None = None  # settings of a run whose weights this row starts from
    paper: tuple[str, ...] = ()  # table, model, data and column of the paper's number


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyKind:
    """One table or figure of the paper as rows and columns; `studies.toml` explains the fields."""

    name: str
    about: str
    paper: str
    finding: str
    metric: Metric
    columns: dict[str, Any]  # name, values, and settings that are filled with each value
    rows: tuple[StudyRow, ...]
    recipe: str = ""
    x: str = ""
    small: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@cache
def study_kinds() -> dict[str, StudyKind]:
    """All studies that train models, by name."""
    content = package_table("studies.toml")
    shared = content.pop("small")
    return {
        name: StudyKind(
            **table
            | {
                "name": name,
                "small": (*shared, *table.get("small", ())),
                "rows": tuple(StudyRow(**r) for r in table["rows"]),
            }
        )
        for name, table in content.items()
    }


PLOT_FILE = "study.png"
AXES = {"images": "training images", "multiply_adds": "multiply-adds of training", "lr": "learning rate"}
METRICS = {"top1": "top-1", "fewshot": "few-shot"}
HEADINGS = ("row", "", ">images", ">steps", ">parameters", ">multiply-adds", "", ">paper", ">time", "state")
"""Headings of the table of cells; the study fills in the empty ones, for its columns and its metric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRun(Trial):
    """One training run of a study."""

    scratch: Recipe  # the recipe without weights to start from, which may not exist yet
    multiply_adds: int  # of all training steps


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCell:
    """One cell of the table: the model of a row with the value of a column, trained with each seed."""

    row: str
    column: str
    metric: str
    images: int  # number of training images
    parameters: int
    runs: tuple[StudyRun, ...]
    paper: float | None  # the paper's number

    @property
    def state(self) -> RunState:
        """`done` when all runs are, `failed` if one diverged."""
        states = [run.state for run in self.runs]
        return next(state for state in ("failed", "begun", "waiting", "done") if state in states)

    @property
    def values(self) -> list[float]:
        """The metric, seed by seed, of the runs that are done."""
        return [run[self.metric] for run in self.results(self.metric) if run]

    def results(self, *keys: str) -> list[dict[str, float]]:
        return [Run(run.folder).result(*keys) for run in self.runs]

    def to_json(self) -> dict[str, Any]:
        """All facts about the cell; nothing that is measured before it is done."""
        recipe = self.runs[0].recipe
        return {
            "row": self.row,
            "column": self.column,
            "images": self.images,
            "steps": recipe.steps,
            "epochs": recipe.epochs or recipe.steps * recipe.batch_size / self.images,
            "batch_size": recipe.batch_size,
            "lr": recipe.lr,
            "parameters": self.parameters,
            "multiply_adds": self.runs[0].multiply_adds,
            "paper": self.paper,
            "state": self.state,
            "metric": self.metric,
            "values": self.values,
            **mean_and_std(self.values),
            "runs": [
                {"folder": run.folder.name, "seed": run.recipe.seed, "state": run.state, **result}
                for run, result in zip(self.runs, self.results("top1", "loss", "count", "seconds"))
            ],
        }

    def texts(self) -> list[str]:
        """The cell as a row of the table with HEADINGS."""
        cell = self.to_json()
        seconds = sum(run.get("seconds", 0) for run in cell["runs"])
        counts = (f"{cell[key]:,}" for key in ("images", "steps", "parameters"))
        paper = "-" if self.paper is None else str(self.paper)
        measured = (format_mean(self.values) or "-", paper, format_duration(seconds) if self.values else "-")
        return [self.row, self.column, *counts, f"{cell['multiply_adds']:.3g}", *measured, self.state]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The cells of a study, all its runs in order, and its folder."""

    kind: StudyKind
    data: DataRef
    folder: Path
    cells: tuple[StudyCell, ...]
    runs: tuple[StudyRun, ...]

    @property
    def headings(self) -> list[str]:
        names = iter((self.kind.columns["name"], f">{METRICS[self.kind.metric]}, %"))
        return [heading or next(names) for heading in HEADINGS]

    @property
    def differs(self) -> str:
        """What differs from the paper, as a sentence."""
        largest, cell = max(self.cells, key=lambda cell: cell.parameters), self.cells[0]
        recipe = cell.runs[0].recipe
        images = max(cell.images for cell in self.cells)
        sizes = f"models of up to {largest.parameters / 1e6:.2g} million parameters, {images:,} images"
        fewshot = "the classes that are not trained on" if recipe.eval_fewshot == OTHER_CLASSES else recipe.eval_fewshot
        of = f"{recipe.fewshot_shots}-shot accuracy on {fewshot}" if self.kind.metric == "fewshot" else "top-1 accuracy"
        seeds = f"mean and sample standard deviation of {len(cell.runs)} seeds" if len(cell.runs) > 1 else "one seed"
        return f"{sizes} of {self.data.short_name}, {of}, {seeds}"

    def remarks(self) -> list[str]:
        """The paper's finding, and what differs here."""
        return [f"the paper ({self.kind.paper}): {self.kind.finding}", differs_text(self.differs)]

    def lines(self) -> list[Line]:
        """For each row, mean and standard deviation over the horizontal axis, for the cells that have a result."""
        points: dict[str, dict[float, tuple[float, float]]] = {}
        for cell in map(StudyCell.to_json, self.cells if self.kind.x else ()):
            row = points.setdefault(cell["row"], {})
            if cell["mean"] is not None:
                row[float(cell[self.kind.x])] = cell["mean"], cell["deviation"] or 0.0
        return [
            Line(
                name, sorted((x, mean) for x, (mean, _) in row.items()), spread={x: std for x, (_, std) in row.items()}
            )
            for name, row in points.items()
        ]

    def chart(self) -> Chart:
        title = f"{self.kind.paper.partition(',')[0]} here: {METRICS[self.kind.metric]} accuracy, % (mean ± std)"
        axis = AXES.get(self.kind.x, "")
        return Chart(title=title, lines=self.lines(), x_label=f"{axis} (logarithmic)", log_x=True, size=(760, 400))

    def paper_text(self) -> str:
        """The paper's table that stands beside the study, for printing; empty if there is none."""
        if not self.kind.beside:
            return ""
        table, *columns = self.kind.beside
        task = self.data.short_name if self.data.short_name in ("cifar10", "cifar100") else "imagenet"
        return paper_text([task, *columns], [table], self.differs)


def scaled(recipe: Recipe, change: str) -> str:
    """A change such as `architecture.depth*=2` with the value that it gives: `architecture.depth=8`."""
    key, factor = (part.strip() for part in change.split("*="))
    table, _, name = key.rpartition(".")
    owner = config_of(recipe, 2) if table == "architecture" else getattr(recipe, table) if table else recipe
    value = getattr(owner, name)
    return f"{key}={max(1, round(value * float(factor))) if isinstance(value, int) else value * float(factor)}"


def apply(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with changes such as `steps=300`, then those such as `lr*=3`."""
    recipe = change_recipe(recipe, [change for change in changes if "*=" not in change])
    return change_recipe(recipe, [scaled(recipe, change) for change in changes if "*=" in change])


def choose_rows(kind: StudyKind, names: Sequence[str], recipe: str | None) -> list[StudyRow]:
    """The rows with these names, in which a recipe or a TOML file can stand for a row; all if there are none."""
    rows = {row.name: row for row in kind.rows}
    for name in names:
        if name not in rows and not name.endswith(".toml") and name not in recipe_names():
            raise UnknownNameError("row", name, [*rows, *recipe_names()], see=f"(there are {', '.join(rows)})")
    chosen = [rows.get(name) or StudyRow(name=Path(name).stem, recipe=name) for name in names or rows]
    if len({row.name for row in chosen}) != len(chosen):
        raise ConfigError(f"the rows {', '.join(names)} must have different names")
    if recipe and any(row.recipe for row in chosen):
        hint = f"give {argument('rows')} recipes instead"
        reason = f"each row of {kind.name} has its own recipe, so one recipe cannot replace them all"
        raise ConfigError(reason, hint=hint)
    return chosen


def choose_values(kind: StudyKind, row: StudyRow, labels: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of a row with these labels, or new ones where a single number is enough; all if there are none."""
    values = [tuple(value) if isinstance(value, list) else (value,) for value in row.values or kind.columns["values"]]
    known = {f"{value[0]:g}" if isinstance(value[0], float) else str(value[0]): value for value in values}
    for label in (label for label in labels if label not in known and not row.values):
        if not re.fullmatch(r"\d+(\.\d+)?|all", label) or isinstance(values[0][0], str):
            raise UnknownNameError("column", label, known, see=f"(there are {', '.join(known)})")
    return [known.get(label, (label,)) for label in labels if label in known or not row.values] if labels else values


def plan_study(
    name: str,
    data: str | Path,
    *,
    recipe: str | None = None,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: int = SEEDS,
    out: str | Path | None = None,
) -> Study:
    """The study of this name on this data; trains nothing.

    Args:
        name: A key of `study_kinds`.
        data: A path or a name.
        recipe: Replaces the study's recipe and its settings for small machines.
        rows: Only these rows; a recipe or a TOML file is a row, too.
        columns: Only these columns, or other numbers.
        settings: Changes to all recipes, such as "steps=100", before those of rows and columns.
        seeds: Number of runs of each cell.
        out: Folder of the study; by default `runs/DATA-NAME`.

    Raises:
        TrainingError: `out` exists and is not a study.
        ConfigError: a row, a column or a setting is invalid.
    """
    kind, ref = study_kinds()[name], DataRef(data)
    folder = Path(out or RUNS / f"{ref.short_name}-{name}").expanduser()
    if not is_free(folder) and not (folder / STUDY_FILE).is_file():
        raise TrainingError("exists and is not a study", where=folder, hint=f"choose another {argument('out')}")
    runs: dict[str, StudyRun] = {}  # by settings: cells with the same settings share their runs

    def add(recipe: Recipe, title: str, pretrained: StudyRun | None = None) -> tuple[StudyRun, int, int]:
        splits = split_data(ref, recipe)
        config = config_of(recipe, 0 if recipe.objective == "masked" else len(splits.classes))
        recipe = recipe.replace(batch_size=fit_batch_size(recipe, len(splits.train), 1))
        steps = recipe.steps or max(1, round(recipe.epochs * (len(splits.train) // recipe.batch_size)))
        scratch, size = recipe, scale_size(config, recipe.train_scale)
        if pretrained is not None:
            weights = str(pretrained.folder.absolute())
            recipe = recipe.replace(weights=weights, architecture=without_shape(recipe))
        words = re.sub(r"[^A-Za-z0-9.]+", "-", f"{title} seed {recipe.seed}")
        work = run_multiply_adds(recipe, config, size, steps)
        run = StudyRun(folder=folder / words, recipe=recipe, title=words, scratch=scratch, multiply_adds=work)
        return runs.setdefault(fingerprint(recipe.to_json()), run), len(splits.train), parameters(config)

    cells = []
    for row in choose_rows(kind, rows, recipe):
        is_small = recipe is None and row in kind.rows
        base = apply(read_recipe(recipe or row.recipe or kind.recipe), kind.small if is_small else ())
        base = apply(base, settings)
        if kind.metric == "fewshot" and not base.eval_fewshot:
            reason = f"{name} measures few-shot accuracy"
            raise ConfigError(reason, hint="set eval_fewshot to the data to measure it on")
        for value in choose_values(kind, row, columns):
            label = f"{value[0]:g}" if isinstance(value[0], float) else str(value[0])
            filled = [0 if part == "all" else part for part in value]
            changed = apply(base, [text.format(*filled) for text in (*row.settings, *kind.columns["settings"])])
            trained = []
            for seed in range(base.seed, base.seed + seeds):
                before = None
                if row.pretrain is not None:
                    before, *_ = add(apply(base, [*row.pretrain, f"seed={seed}"]), f"{row.name} pre-training")
                trained.append(add(changed.replace(seed=seed), f"{row.name} {label}", before))
            published = paper_number(*(text.format(label) for text in row.paper)) if row.paper else None
            cells.append(
                StudyCell(
                    row=row.name,
                    column=label,
                    metric=kind.metric,
                    images=trained[0][1],
                    parameters=trained[0][2],
                    runs=tuple(run for run, *_ in trained),
                    paper=published,
                )
            )
    return Study(kind=kind, data=ref, folder=folder, cells=tuple(cells), runs=tuple(runs.values()))


def run_study(
    study: Study,
    *,
    listeners: Sequence[Listener] = (),
    report: Callable[[str], None] = print_status,
    progress: bool = True,
) -> None:
    """Train every run that is not done, resuming where an earlier call was interrupted, and write the report.

    Under torchrun all processes call this and share each run.
    """
    hint = f"choose another {argument('out')}"
    for planned in study.runs:  # before hours of work
        run = Run(planned.folder)
        if run.state == "waiting":
            continue
        if run.facts.get("data") != study.data.name:
            reason = f"trained on {run.facts.get('data')}, not {study.data.name}"
            raise TrainingError(reason, where=planned.folder, hint=hint)
        check_recipe(run, planned.recipe, planned.folder, hint)

    with process_group(study.runs[0].recipe.device) as processes, ExitStack() as stack:  # once for all runs
        processes.on_main(lambda: stack.enter_context(lock_folder(study.folder)))
        listeners = (ProgressListener(), *listeners) if progress else listeners
        titles = [f"run {number} of {len(study.runs)}: {run.title}" for number, run in enumerate(study.runs, 1)]
        runs = [replace(run, title=title) for run, title in zip(study.runs, titles)]
        record = partial(write_study, study)
        train_series(runs, study.data, processes, listeners=listeners, report=report, record=record)


def estimate_seconds(study: Study, seconds: float = 3.0) -> Iterator[tuple[StudyRun, float]]:
    """Each run with its estimated time (0 if done), from steps of one run of each recipe, scaled by multiply-adds."""
    measured: dict[tuple[str, str], float] = {}  # seconds per multiply-add
    for run in study.runs:
        key = run.scratch.model, run.scratch.objective
        if key not in measured and run.state != "done":
            measured[key] = plan(study.data, run.scratch, seconds=seconds).seconds / run.multiply_adds
        yield run, 0.0 if run.state == "done" else measured[key] * run.multiply_adds


def write_study(study: Study) -> None:
    """Write `study.json`, `report.html`, and `study.png` once there is a point to plot."""
    kind, cells = study.kind, [cell.to_json() for cell in study.cells]
    facts = {"study": kind.name, "paper": kind.paper, "finding": kind.finding, "differs": study.differs}
    write_json(study.folder / STUDY_FILE, {**facts, "data": study.data.name, "cells": cells})
    chart = study.chart()
    image = chart.image()
    if image is not None:
        write_image(study.folder / PLOT_FILE, image)
    write_page(
        study.folder,
        title=f"{kind.name} study on {study.data.short_name}",
        subtitle=f"{sum(run.state == 'done' for run in study.runs)} of {len(study.runs)} runs done",
        remarks=[kind.about, *study.remarks()],
        charts=[part for part in (chart if image else None, paper_chart(*kind.beside[:2]) if kind.x else None) if part],
        headings=study.headings,
        rows=[cell.texts() for cell in study.cells],
    )


def write_page(folder: Path, *, title: str, subtitle: str, **content: Any) -> None:
    """Write the page of a study: remarks, charts, and a table with headings and rows."""
    write_text(folder / PAGE, render("study.html", title=title, subtitle=subtitle, **content))
