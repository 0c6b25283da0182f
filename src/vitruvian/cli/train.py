"""`vit train` and `vit finetune`: from images to a model; an interrupted run is resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    DataRoot,
    Quick,
    RecipeOptions,
    Seeds,
    TaskData,
    Weights,
    complete_task,
    data_argument,
    expand_options,
    set_data_root,
)
from vitruvian.cli.process import prints_results
from vitruvian.progress import print_status
from vitruvian.tasks import SEEDS

if TYPE_CHECKING:
    from vitruvian.training import Run
    from vitruvian.training.finetune import Sweep, Trial


@expand_options
def train(
    options: RecipeOptions,
    data: Annotated[str | None, data_argument("a built-in name (digits)")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="A recipe or a TOML file [default: one that suits the data].")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--arch", metavar="NAME", help="Architecture to train from scratch (`vit models`).")
    ] = None,
    weights: Annotated[str | None, Weights] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Folder of the run [default: a new one in runs/].")
    ] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Resume this run.")] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Resume the run in --out if there is one, else start it.")
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what would run, with estimates of time and memory.")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="'N x NAME'", help="With --plan: estimate for other machines, such as '64 x A100'."),
    ] = None,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes and exit.")] = False,
) -> None:
    """Train a model, from scratch or from weights.

    An interrupted run can be resumed exactly with `vit train --resume RUN`. Under torchrun, all processes share the
    work.
    """
    if recipes:
        from vitruvian.text import table
        from vitruvian.training import read_recipe, recipe_names

        rows = [(name, read_recipe(name)) for name in recipe_names()]
        print(table(("recipe", "for", "time", "result"), [(name, r.about, r.time, r.result) for name, r in rows]))
        return
    changes = options.changes()
    if cluster is not None:
        if not plan or recipe is None:
            raise typer.BadParameter("--cluster is for --plan and --recipe NAME")
        from vitruvian.training.planning import cluster_lines, cluster_plan

        print("\n".join(cluster_lines(cluster_plan(recipe, cluster, data=data, model=model, settings=changes))))
        return
    if (data is None) == (resume is None):
        raise typer.BadParameter("give DATA to train on, or --resume RUN")
    if resume is not None and (recipe or model or weights or out or plan):
        raise typer.BadParameter("--resume takes everything but --workers and some --set from the run")
    if auto_resume and out is None:
        raise typer.BadParameter("--auto-resume needs --out RUN")
    from vitruvian import training
    from vitruvian.training.journal import TensorBoard
    from vitruvian.training.planning import plan as make_plan
    from vitruvian.training.planning import plan_lines

    if plan:
        print("\n".join(plan_lines(make_plan(data, recipe=recipe, model=model, weights=weights, settings=changes))))
        return
    listeners = [TensorBoard()]
    if resume is not None:
        run = training.resume(resume, settings=changes, listeners=listeners)
    else:
        run = training.train(
            data,
            recipe=recipe,
            model=model,
            weights=weights,
            out=out,
            settings=changes,
            listeners=listeners,
            auto_resume=auto_resume,
        )
    if prints_results():
        print_run(run)


def print_run(run: Run) -> None:
    """Print the accuracy, and where the model is."""
    last = run.evaluation
    if run.recipe.objective == "masked":
        measured = f"the colors of {last.get('patches')} masked patches in {last['count']} images"
        use = f"vit finetune DATA --from {run.folder}"
    else:
        measured = f"{last['count']} images"
        use = f"vit predict IMAGES --model {run.folder}"
    print(f"accuracy {last['top1']:.2f}% on {measured} ({run.facts['validation']}), in {last['seconds']:.0f} s")
    if run.unreadable:
        print_status(f"{len(run.unreadable)} images could not be read, see {run.folder / 'unreadable.json'}")
    print(f"report: {run.folder / 'report.html'}")
    print(f"model: {run.folder} ({use})")


def parse_lrs(text: str) -> list[float]:
    """`0.001,0.003,0.01`."""
    try:
        rates = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise typer.BadParameter(
            f"{text!r} is not a list of positive numbers, such as 0.001,0.003,0.01", param_hint="--lrs"
        )
    return rates


@expand_options
def finetune(
    data: TaskData,
    weights: Annotated[str, Weights],
    options: RecipeOptions,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of all trials [default: in runs/].")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A recipe or a TOML file [default: the task's, or finetune-small]."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="Use the recipe, preprocessing and metric of this task.",
            autocompletion=complete_task,
        ),
    ] = None,
    quick: Quick = False,
    lrs: Annotated[
        str | None, typer.Option(metavar="LR,LR,...", help="Learning rates to sweep, instead of the recipe's.")
    ] = None,
    seeds: Seeds = SEEDS,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Training steps of each trial.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Input size; the position embedding is resized.")
    ] = None,
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fine-tune weights with the paper's protocol.

    Sweeps the recipe's learning rates on a dev split, trains with the best one on all images with several seeds, and
    reports mean and standard deviation on the test split. The same command resumes after an interruption.
    """
    from vitruvian.tasks import get_task
    from vitruvian.training.finetune import finetune as run_protocol
    from vitruvian.training.finetune import protocol_for
    from vitruvian.training.journal import TensorBoard

    set_data_root(data_root)
    protocol = protocol_for(
        data,
        weights,
        recipe=recipe,
        task=get_task(task) if task else None,
        settings=options.changes(steps=steps, image_size=image_size),
        lrs=() if lrs is None else parse_lrs(lrs),
        seeds=seeds,
    )
    sweep = run_protocol(protocol.quick() if quick else protocol, out, listeners=[TensorBoard()])
    if prints_results():
        print(json.dumps(sweep.to_json())) if as_json else print_sweep(sweep)
        if sweep.unreadable:
            count = len(sweep.unreadable)
            print_status(
                f"{count:,} images could not be read; unreadable.json in the folders of {sweep.folder} lists them"
            )


def print_sweep(sweep: Sweep) -> None:
    """Print every trial, the result, and where the model is."""
    from vitruvian.text import table
    from vitruvian.training.finetune import format_mean

    headings = ("trial", ">lr", ">seed", "for", ">top-1", ">mean per class", "")
    print(table(headings, [trial_row(sweep, trial) for trial in sweep.trials]))
    count = len(sweep.values())
    runs = f"mean and standard deviation of {count} runs" if count > 1 else "one run"
    print(f"\ntop-1 {format_mean(sweep, 'top1')}, mean per class {format_mean(sweep, 'mean_per_class')} ({runs})")
    print(f"measured on {sweep.measured_on}")
    best = next(trial for trial in sweep.test if trial.state == "done")
    print(f"report: {sweep.folder / 'report.html'}")
    print(f"model: {best.folder} (vit predict IMAGES --model {best.folder})")


def trial_row(sweep: Sweep, trial: Trial) -> tuple[str, ...]:
    measures = trial.measures
    accuracies = [f"{measures[key]:.2f}%" if measures else trial.state for key in ("top1", "mean_per_class")]
    chosen = "chosen" if trial.kind == "dev" and trial.lr == sweep.chosen_lr else ""
    purpose = {"dev": "choosing the lr", "test": "result"}[trial.kind]
    return trial.name, f"{trial.lr:g}", str(trial.seed), purpose, *accuracies, chosen
