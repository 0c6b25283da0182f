"""`vit train`, `vit finetune` and `vit study`: from images to models; what was interrupted is resumed."""

from __future__ import annotations

import functools
import json
import os
import textwrap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import data_argument, expand_options, flag, option, parse_numbers, split_names
from vitruvian.progress import print_notes, print_status, prints_results
from vitruvian.tasks import DATA_VARIABLE, SEEDS, Task, all_tasks, get_task, vtab_tasks
from vitruvian.text import format_duration, plural, table

if TYPE_CHECKING:
    from vitruvian.study.transfer import TransferCell
    from vitruvian.training.finetune import CrossValidation, Sweep

TaskData = Annotated[str, data_argument("a task (`vit datasets`)")]
Seeds = Annotated[int, option("N", "Number of seeds to average over.", min=1)]
Quick = Annotated[bool, flag("--quick", "Use one learning rate and one seed.")]
Models = Annotated[str, option("W,W,...", "Weights to start from: files, directories or published names.")]
Minutes = Annotated[float | None, option("N", "Choose the number of steps so that everything ends in N minutes.")]
Folds = Annotated[int | None, option("K", "Cross-validate in K folds, without the test split.", min=2)]
ARCH = option("NAME", "Architecture to train from scratch, with random weights (`vit models`).", "--arch")
AUTO_RESUME = flag("--auto-resume", "Resume the run in --out if there is one, else start it.", opt.ADVANCED)
CLUSTER = option("'N x NAME'", "With --plan: estimate for other machines, such as '64 x A100'.", panel=opt.ADVANCED)
SOUP = "Model soup: average the seeds and the starting weights; kept if better on the dev split."
RECIPE = option("NAME", "A recipe or a TOML file [default: the task's, or finetune-small].")


def complete_task(incomplete: str) -> list[str]:
    return [name for name in all_tasks() if name.startswith(incomplete)]


TASK = option("TASK", "Use the recipe, preprocessing and metric of this task.", autocompletion=complete_task)


def set_data_root(root: Path | None) -> None:
    """Make --data-root the directory of all tasks, for this process and those it starts."""
    if root is not None:
        os.environ[DATA_VARIABLE] = str(root.expanduser().resolve())


Trackers = Annotated[list[str] | None, option("NAME", "Also log to wandb, mlflow or trackio; repeatable.", "--track")]


@expand_options
def train(
    options: opt.RecipeOptions,
    data: Annotated[str | None, data_argument("a built-in name (digits)")] = None,
    recipe: Annotated[str | None, option("NAME", "A recipe or a TOML file [default: one that suits the data].")] = None,
    model: Annotated[str | None, ARCH] = None,
    weights: Annotated[str | None, opt.StartingWeights] = None,
    out: Annotated[Path | None, option("RUN", "Folder of the run [default: a new one in runs/].")] = None,
    folds: Folds = None,
    resume: Annotated[str | None, option("RUN", "Resume this run.")] = None,
    auto_resume: Annotated[bool, AUTO_RESUME] = False,
    minutes: Minutes = None,
    track: Trackers = None,
    more_classes: Annotated[
        bool, flag("--add-classes", "Add the classes of DATA to the model of --from RUN, without training.")
    ] = False,
    plan: Annotated[bool, flag("--plan", "Print what would run, with estimates of time and memory.")] = False,
    as_json: Annotated[bool, flag("--json", "Print the result as one JSON object.")] = False,
    cluster: Annotated[str | None, CLUSTER] = None,
    recipes: Annotated[bool, flag("--recipes", "List the recipes and exit.")] = False,
    list_settings: Annotated[
        bool, flag("--settings", "List the settings for --set: `--settings lr` those named lr.")
    ] = False,
) -> None:
    """Train one model, from scratch or from weights.

    To choose the learning rate and repeat with several seeds, use `vit finetune`. An interrupted run can be resumed
    exactly with `vit train --resume RUN`. Under torchrun, all processes share the work.
    """
    if recipes:
        from vitruvian.training import recipe_names

        for name in recipe_names():
            described = vt.read_recipe(name)
            print(name)
            for text in (described.about, f"time: {described.time}", f"result: {described.result}"):
                print(textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    "))
        return
    if list_settings:
        from vitruvian.training.recipe import describe_settings

        for name, default, meaning in describe_settings(data or ""):
            print(f"{name} = {default}")
            if meaning:
                print(textwrap.fill(meaning, 80, initial_indent="    ", subsequent_indent="    "))
        return
    changes = options.changes()
    start: Any = {"model": model, "weights": weights, "settings": changes}
    if cluster is not None:
        if not plan or recipe is None:
            raise typer.BadParameter("--cluster needs --plan and --recipe NAME")
        from vitruvian.training.planning import cluster_lines, cluster_plan

        planned = cluster_plan(recipe, cluster, data=data, **start)
        print("\n".join(cluster_lines(planned)))
        return
    start["recipe"] = recipe
    if (data is None) == (resume is None):
        raise typer.BadParameter("give DATA to train on, or --resume RUN")
    if resume is not None and (recipe or model or weights or out or plan or minutes):
        raise typer.BadParameter("--resume can be combined only with --workers, --epochs and some --set")
    if auto_resume and (out is None or plan):
        raise typer.BadParameter("--auto-resume needs --out RUN, and has no effect with --plan")
    if folds is not None and (resume is not None or auto_resume or plan or minutes is not None):
        raise typer.BadParameter("--folds resumes by itself; leave out --resume, --auto-resume, --plan and --minutes")
    if plan and out is not None:
        raise typer.BadParameter("--out has no effect with --plan, which writes nothing")
    if more_classes:
        if weights is None or recipe or model or resume or auto_resume or plan or minutes or changes:
            raise typer.BadParameter("--add-classes needs DATA and --from RUN, and can be combined only with --out")
        result = vt.add_classes(weights, data, out)
        names = textwrap.shorten(", ".join(result.added), 80)
        print(f"added {names}")
        print(f"old classes: {result.before:.2f}% before, {result.after:.2f}% after, on {result.counts[0]:,} images")
        print(f"new data: {result.new:.2f}% on {result.counts[1]:,} images")
        print(f"model: {result.folder} (vit predict IMAGES --model {result.folder})")
        return
    if plan:
        from vitruvian.training.planning import plan as make_plan
        from vitruvian.training.planning import plan_lines, prepare_recipe
        from vitruvian.training.splits import DataRef

        opened = DataRef(data)
        chosen, notes = prepare_recipe(opened, **start, minutes=minutes)
        estimate = make_plan(opened, chosen)
        print("\n".join(plan_lines(estimate)))
        print_notes([*estimate.splits.notes, *notes])
        return
    from vitruvian.training.integrations import open_trackers

    listeners = open_trackers(track or ())
    if folds is not None:
        from vitruvian.training.finetune import cross_validate
        from vitruvian.training.planning import choose_recipe
        from vitruvian.training.splits import DataRef

        opened = DataRef(data)
        validation = cross_validate(opened, choose_recipe(opened, **start), folds, out, listeners=listeners)
        print_folds(validation, as_json=as_json)
        return
    if resume is not None:
        run = vt.resume(resume, settings=changes, listeners=listeners)
    else:
        start |= {"listeners": listeners}
        run = vt.train(data, **start, out=out, auto_resume=auto_resume, minutes=minutes)
    if prints_results():
        print(json.dumps(run.to_json())) if as_json else print_run(run)


def print_run(run: vt.Run) -> None:
    """Print the accuracy, and where the model is."""
    from vitruvian.training.run_folder import describe_result

    last = run.evaluation
    is_masked = run.recipe.objective == "masked"
    use = f"vit finetune DATA --from {run.folder}" if is_masked else f"vit predict IMAGES --model {run.folder}"
    print(f"{describe_result(last, run.facts['validation'])}, in {last['seconds']:.0f} s")
    if run.unreadable:
        print_status(f"{len(run.unreadable)} images could not be read, see {run.folder / 'unreadable.json'}")
    print(f"report: {run.folder / 'report.html'}")
    which = "best" if run.recipe.final == "best" else "last"
    print(f"model: {run.folder}, weights of step {last['step']} of {run.facts['steps']}, the {which} ({use})")


def print_folds(validation: CrossValidation, *, as_json: bool = False) -> None:
    """Print the accuracy of cross-validation, and where its predictions are."""
    if not prints_results():
        return
    if as_json:
        print(json.dumps(validation.to_json()))
        return
    from vitruvian.training.finetune import METRICS, UNITS

    result, scores = validation.result, zip(validation.runs, validation.result.runs)
    heading = f">{METRICS[result.metric]} {UNITS.get(result.metric, '')}".rstrip()
    rows = [(run.folder.name, f"{value:.4g}", str(run.folder)) for run, value in scores]
    print(table(("run", heading, "folder"), rows))
    file = validation.predictions
    print(f"\n{validation.result}\npredictions: {file} (vit doctor DATA --predictions {file})")


def parse_lrs(text: str) -> list[float]:
    """Parse learning rates such as `0.001,0.003,0.01`."""
    try:
        rates = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        expected = "a list of positive numbers, such as 0.001,0.003,0.01"
        raise typer.BadParameter(f"{text!r} is not {expected}", param_hint="--lrs")
    return rates


@expand_options
def finetune(
    data: TaskData,
    weights: Annotated[str, opt.StartingWeights],
    options: opt.RecipeOptions,
    out: Annotated[Path | None, option("DIR", "Folder of all trials [default: in runs/].")] = None,
    recipe: Annotated[str | None, RECIPE] = None,
    task: Annotated[str | None, TASK] = None,
    quick: Quick = False,
    lrs: Annotated[str | None, option("LR,LR,...", "Learning rates to sweep, instead of the recipe's.")] = None,
    seeds: Seeds = SEEDS,
    soup: Annotated[bool, flag("--soup", SOUP)] = False,
    folds: Folds = None,
    steps: Annotated[int | None, option("N", "Training steps of each trial.", min=1)] = None,
    minutes: Minutes = None,
    track: Trackers = None,
    data_root: opt.DataRoot = None,
    as_json: Annotated[bool, flag("--json", "Print the result as one JSON object.")] = False,
) -> None:
    """Choose a learning rate, then fine-tune with several seeds.

    This is the paper's protocol and trains many models: one per learning rate on a dev split, then one per seed with
    the best rate on all images, measured on the test split. For a single run, use `vit train DATA --from WEIGHTS`.
    The same command resumes after an interruption.
    """
    from vitruvian.training.integrations import open_trackers

    listeners = open_trackers(track or ())
    if folds is not None and (seeds != SEEDS or soup or minutes is not None):
        raise typer.BadParameter("--folds trains each fold once, without --seeds, --soup and --minutes")
    set_data_root(data_root)
    changes = options.changes(steps=steps)
    if minutes is not None and {"epochs", "steps"} & changes.keys():
        raise typer.BadParameter("--minutes chooses the steps; leave out --epochs and --steps")
    protocol = vt.protocol_for(
        data,
        weights,
        recipe=recipe,
        task=get_task(task) if task else None,
        settings=changes,
        lrs=() if lrs is None else parse_lrs(lrs),
        seeds=seeds,
    )
    protocol = replace(protocol.quick() if quick else protocol, soup=soup)
    protocol = protocol if minutes is None else protocol.within(minutes, changes)
    if folds is not None:
        from vitruvian.training.finetune import cross_validate

        print_folds(cross_validate(data, protocol, folds, out, listeners=listeners), as_json=as_json)
        return
    sweep = vt.finetune(protocol, out, listeners=listeners)
    if prints_results():
        print(json.dumps(sweep.to_json())) if as_json else print_sweep(sweep)
        if sweep.unreadable:
            where = f"unreadable.json in the folders of {sweep.folder}"
            print_status(f"{len(sweep.unreadable):,} images could not be read; {where} lists them")


def print_sweep(sweep: Sweep) -> None:
    """Print every trial, the result, and where the model is."""
    from vitruvian.training.finetune import METRICS, UNITS, format_mean

    rows = []
    for trial in sweep.trials:
        measures = trial.measures
        accuracies = [f"{measures[k]:.2f}{UNITS.get(k, '')}" if measures else trial.state for k in sweep.metrics]
        chosen = "chosen" if trial in sweep.dev and trial.recipe.lr == sweep.chosen_lr else ""
        purpose = "result" if trial.recipe.validation == "test" else "choosing the lr"
        purpose = "choosing the average" if trial in sweep.dev_seeds else purpose
        rows.append((trial.folder.name, f"{trial.recipe.lr:g}", str(trial.recipe.seed), purpose, *accuracies, chosen))
    names = {name: METRICS[name].removesuffix(" accuracy") for name in sweep.metrics}
    print(table(("trial", ">lr", ">seed", "for", *(f">{name}" for name in names.values()), ""), rows))
    count = len(sweep.values())
    runs = f"mean and standard deviation of {count} runs" if count > 1 else "one run"
    means = [f"{name} {format_mean(sweep.values(key))} {UNITS.get(key, '')}".strip() for key, name in names.items()]
    print(f"\n{', '.join(means)} ({runs})")
    print(f"measured on {sweep.measured_on}")
    best = next(trial for trial in sweep.test if trial.state == "done")
    if sweep.soup is not None:
        print(sweep.soup)
    print(f"report: {sweep.folder / 'report.html'}")
    folder = sweep.folder if sweep.soup and sweep.soup.kept else best.folder
    print(f"model: {folder} (vit predict IMAGES --model {folder})")


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of every study."""

    panel: ClassVar = "Options"
    out: Annotated[Path | None, option("DIR", "Folder of the study [default: in runs/].")] = None
    settings: opt.Changes = None
    as_json: Annotated[bool, flag("--json", "Print one JSON object per cell (JSON Lines).")] = False


@dataclass(frozen=True, kw_only=True)
class TransferOptions(StudyOptions):
    """Options of studies that fine-tune published weights."""

    quick: Quick = False
    recipe: Annotated[str | None, option("NAME", "A recipe to use instead of each task's own.")] = None
    seeds: Seeds = SEEDS
    data_root: opt.DataRoot = None

    @property
    def differs(self) -> str:
        """What differs from the paper's fine-tuning."""
        parts = ["the weights are those of --models"]
        parts += ["one learning rate and one seed (--quick)"] if self.quick else []
        parts += [f"{self.seeds} seeds"] if not self.quick and self.seeds != SEEDS else []
        parts += [f"the recipe {self.recipe}"] if self.recipe else []
        return ", ".join([*parts, *(self.settings or ())])

    def run(
        self, models: str, tasks: Sequence[Task], name: str, recipes: Mapping[str, str] = MappingProxyType({})
    ) -> list[TransferCell]:
        """Fine-tune every model on every task; `recipes` replace those of some tasks."""
        from vitruvian.study.transfer import transfer

        set_data_root(self.data_root)
        names = split_names(models)
        if not names:
            raise typer.BadParameter("give weights to start from", param_hint="--models")
        changes: Any = {"recipe": self.recipe, "settings": self.settings or (), "quick": self.quick}
        out = self.out or Path(f"runs/study-{name}")
        return transfer(names, tasks, out, recipes=recipes, seeds=self.seeds, **changes)


@dataclass(frozen=True, kw_only=True)
class AblationOptions(StudyOptions):
    """Options of studies that train models."""

    recipe: Annotated[str | None, option("NAME", "A recipe or a TOML file, instead of the study's small one.")] = None
    rows: Annotated[str, option("R,R,...", "Rows of the study, or recipes as rows [default: all rows].")] = ""
    columns: Annotated[str, option("C,C,...", "Columns of the study, or other numbers [default: all columns].")] = ""
    seeds: Seeds = SEEDS
    plan: Annotated[bool, flag("--plan", "Print which cells would run and how long; train nothing.")] = False

    def run(self, name: str, data: str) -> None:
        """Run a study and print it, or print its plan."""
        from vitruvian.study.ablation import estimate_seconds, plan_study, run_study

        study = plan_study(
            name,
            data,
            recipe=self.recipe,
            rows=split_names(self.rows),
            columns=split_names(self.columns),
            settings=self.settings or [],
            seeds=self.seeds,
            out=self.out,
        )
        if self.plan:
            rows, total = [], 0.0
            for run, seconds in estimate_seconds(study):
                total += seconds
                numbers = f"{run.recipe.steps:,}", f"{run.multiply_adds:.3g}"
                rows.append((run.folder.name, *numbers, format_duration(seconds) if seconds else "-", run.state))
            print(table(("run", ">steps", ">multiply-adds", ">about", "state"), rows))
            about = f"about {format_duration(total)} in all, as measured now on a few steps"
            print(f"\n{len(study.cells)} cells, {len(rows)} runs in {study.folder}, {about}")
            return
        run_study(study)
        if self.as_json and prints_results():
            print("\n".join(json.dumps(cell.to_json()) for cell in study.cells))
        elif prints_results():
            print(table(study.headings, [cell.texts() for cell in study.cells]))
            print("\n".join(["", *study.remarks()]))
            if study.kind.beside:
                print(f"\n{study.paper_text()}")
            plot = f"; plot: {study.folder / 'study.png'}" if study.kind.x else ""
            print(f"\nreport: {study.folder / 'report.html'}{plot}")


Tasks = Annotated[str, option("T,T,...", "Tasks (`vit datasets`) [default: those of the table].")]


def transfer_study(name: str, about: str) -> Callable[..., None]:
    """The function of `vit study NAME` for a table of fine-tuned models."""

    def run(models: Models, options: TransferOptions, tasks: Tasks = "") -> None:
        from vitruvian.study.transfer import TABLES, find_tasks

        columns, recipes, papers = TABLES[name]
        cells = options.run(models, find_tasks(tasks.split(",") if tasks else columns), name, recipes)
        print_transfer(cells, options, papers)

    missing = "A task without images leaves its cell empty and prints the reason; the others run."
    run.__name__, run.__doc__ = name, f"Fine-tune models on tasks and print the results beside {about}.\n\n{missing}"
    return expand_options(run)


table5 = transfer_study("table5", "the paper's Table 5")
table2 = transfer_study("table2", "the paper's Table 2: ImageNet at 512 pixels, and VTAB")


@expand_options
def vtab(models: Models, options: TransferOptions) -> None:
    """Fine-tune models on the 19 tasks of VTAB-1k and print the means of its groups."""
    from vitruvian.study.transfer import vtab_result

    cells = options.run(models, vtab_tasks(), "vtab")
    for model in dict.fromkeys(cell.model for cell in cells) if prints_results() else ():
        result = vtab_result(model, cells)
        print(json.dumps(result)) if options.as_json else print_vtab(result, cells, options.differs)
    if not any(cell.values for cell in cells):
        raise typer.Exit(1)  # the reasons have been printed


@expand_options
def speed(
    models: Annotated[str, option("M,M,...", "Architectures (`vit models`) [default: small ones].")] = "",
    sizes: Annotated[str, option("N,N,...", "Input sizes in pixels.")] = "64,128,224,320",
    batches: Annotated[str, option("N,N,...", "Batch sizes to try; the fastest is reported.")] = "1,4,16",
    memory: Annotated[float, option("GB", "Memory limit for the largest batch.", min=0.001)] = 16.0,
    rounds: Annotated[int, option("N", "Measurements of each batch size.", min=1)] = 5,
    device: opt.Device = "auto",
    out: Annotated[Path, option("DIR", "Folder of the study.")] = Path("runs/study-speed"),
    as_json: Annotated[bool, flag("--json", "Print one JSON object per cell (JSON Lines).")] = False,
) -> None:
    """Measure images per second and the largest batch in memory over input sizes, without weights (Figure 12)."""
    from vitruvian.study.speed import DIFFERS, FINDING, HEADINGS, MODELS, speed_study

    cells = speed_study(
        out,
        models=split_names(models) or MODELS,
        sizes=parse_numbers(sizes, "--sizes", "64,128"),
        batches=parse_numbers(batches, "--batches", "1,16"),
        memory=memory,
        rounds=rounds,
        device=device,
    )
    missing = [cell for cell in cells if cell.missing]
    if as_json:
        print("\n".join(json.dumps(asdict(cell)) for cell in cells))
    else:
        print(table(HEADINGS, [cell.texts() for cell in cells]))
        for cell in missing:
            print(f"missing: {cell.model} at {cell.image_size}: {cell.missing}")
        print(f"\nthe paper (Figure 12): {FINDING}\n{DIFFERS}\n\nreport: {out / 'report.html'}")
    if missing:
        print_status(f"error: {plural(len(missing), 'cell')} of {len(cells)} could not be measured")
        raise typer.Exit(1)


def training_study(name: str) -> Callable[..., None]:
    """The function of `vit study NAME DATA`."""

    def run(data: TaskData, options: AblationOptions) -> None:
        options.run(name, data)

    return expand_options(run)


@functools.cache
def training_studies() -> MutableMapping[str, Any]:
    """The commands of the studies that train models, by name."""
    from vitruvian.study.ablation import study_kinds

    studies = typer.Typer(rich_markup_mode=None)
    for kind in study_kinds().values():
        studies.command(kind.name, cls=opt.Command, help=f"{kind.about}.")(training_study(kind.name))
    return typer.main.get_group(studies).commands


class StudyGroup(TyperGroup):
    """Adds the studies of `studies.toml` when they are asked for; reading it would slow down every `vit`."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        return {**self.other_studies, **training_studies()}

    @commands.setter
    def commands(self, commands: MutableMapping[str, Any]) -> None:
        self.other_studies = commands


study = typer.Typer(help="Reproduce the paper's tables, figures and ablations.", cls=StudyGroup, no_args_is_help=True)
for command in (table2, table5, vtab, speed):
    study.command(cls=opt.Command)(command)


def print_transfer(cells: list[TransferCell], options: TransferOptions, paper_names: Sequence[str]) -> None:
    """Print the measured rows, then the paper's rows in the same columns; the 19 tasks of VTAB are one column."""
    from vitruvian.study.paper import beside, differs_text
    from vitruvian.study.transfer import vtab_result

    models = list(dict.fromkeys(cell.model for cell in cells))
    by = {(cell.model, cell.task.name): cell.text for cell in cells}
    tasks = list(dict.fromkeys(cell.task.name for cell in cells))
    names = [task.name for task in vtab_tasks()]
    if set(names) <= set(tasks):
        tasks = [*(task for task in tasks if task not in names), "vtab"]
        for model in models:
            mean = vtab_result(model, [cell for cell in cells if cell.task in vtab_tasks()])["vtab_mean"]
            by[model, "vtab"] = "-" if mean is None else f"{mean:.2f}"
    paper = beside(tasks, *paper_names)
    if options.as_json and prints_results():
        print("\n".join(json.dumps(cell.to_json()) for cell in cells))
    elif prints_results():
        rows = [["measured", model, *(by[model, task] for task in tasks)] for model in models]
        print(table(("", "model", *(f">{task}" for task in tasks)), [*rows, *paper]))
        if paper:
            print(differs_text(options.differs))
        means = sorted({cell.task.name for cell in cells if cell.metric == "mean_per_class"})
        if means:
            print(f"\nmean per class: {', '.join(means)}; the others are top-1, in percent")
        print_missing(cells)
    if not any(cell.values for cell in cells):
        raise typer.Exit(1)  # the reasons have been printed


def print_missing(cells: list[TransferCell]) -> None:
    for cell in cells:
        if cell.missing:
            print(f"missing: {cell.model} on {cell.task.name}: {cell.missing}")


def print_vtab(result: dict[str, Any], cells: list[TransferCell], differs: str) -> None:
    """Print each task, the groups and the mean, beside the rows of Table 9."""
    from vitruvian.study.paper import differs_text, paper_rows

    model_cells, paper = [cell for cell in cells if cell.model == result["model"]], paper_rows("table9")
    measured = [(cell.task.name, cell.task.group, cell.text) for cell in model_cells]
    for name, group in result["groups"].items():
        mean_text = "-" if group["mean"] is None else f"{group['mean']:.2f}"
        measured.append((f"vtab-{name}", f"mean of {group['measured']} of {group['tasks']}", mean_text))
    mean_text = "-" if result["mean_of_measured"] is None else f"{result['mean_of_measured']:.2f}"
    measured.append(("vtab", f"mean of {result['measured']} of {len(vtab_tasks())}", mean_text))
    headings = ("task", "group", ">measured", *(f">{row.name}" for row in paper))
    print(result["model"])
    print(table(headings, [(name, group, text, *(row.text(name) for row in paper)) for name, group, text in measured]))
    if result["vtab_mean"] is None:
        print(f"VTAB is the mean over all {len(vtab_tasks())} tasks")
    print(differs_text(differs))
    print_missing(model_cells)
