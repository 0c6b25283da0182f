"""`vit finetune`: the paper's protocol as one command, continued where it was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    FROM,
    BatchSize,
    Changes,
    DataRoot,
    Epochs,
    LearningRate,
    Seed,
    Workers,
    place_data,
    task_names,
    with_everyday,
)
from vitruvian.cli.start import speaks
from vitruvian.progress import print_status
from vitruvian.tasks import SEEDS

if TYPE_CHECKING:
    from vitruvian.training.sweep import Sweep, Trial


def parse_lrs(text: str) -> list[float]:
    """`0.001,0.003,0.01`"""
    try:
        found = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or not all(0 < lr < float("inf") for lr in found):
        raise typer.BadParameter(f"{text!r} is not a list of numbers above 0, such as 0.001,0.003,0.01")
    return found


def finetune(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, or a task (`vit tasks`).")],
    weights: Annotated[str, FROM],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of all trials; else one in runs/.")] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="A recipe or a TOML file; else the task's, or finetune-small.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="The task whose recipe, view and metric DATA is to have.",
            autocompletion=task_names,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One learning rate and one seed.")] = False,
    lrs: Annotated[
        str | None, typer.Option(metavar="LR,LR,...", help="Learning rates to choose among, in place of the recipe's.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Runs that are averaged.")] = SEEDS,
    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="Steps of each trial.")] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, metavar="PIXELS", help="Side of the input; positions follow.")
    ] = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    workers: Workers = None,
    settings: Changes = None,
    data_root: DataRoot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Fine-tune weights on images as the paper does it.

    Tries the learning rates of the recipe on a dev split, trains with the best one on everything, with several seeds,
    and gives mean and deviation on the test split. The same command goes on after an interruption.
    """
    from vitruvian.tasks import task_named
    from vitruvian.training.finetune import finetune as run_protocol
    from vitruvian.training.finetune import protocol_for
    from vitruvian.training.journal import TensorBoard

    place_data(data_root)
    lengths = {"epochs": epochs, "steps": steps, "lr": lr, "batch_size": batch_size, "image_size": image_size}
    changes = with_everyday(settings, {**lengths, "seed": seed, "workers": workers})
    protocol = protocol_for(
        data,
        weights,
        recipe=recipe,
        task=task_named(task) if task else None,
        settings=changes,
        lrs=() if lrs is None else parse_lrs(lrs),
        seeds=seeds,
    )
    chosen = protocol.quickly() if quick else protocol
    sweep = run_protocol(chosen, out, listeners=[TensorBoard()])
    if speaks():
        print(json.dumps(sweep.to_json())) if as_json else show(sweep)
        if sweep.unreadable:
            count = len(sweep.unreadable)
            print_status(
                f"{count:,} images could not be read; unreadable.json in the folders of {sweep.folder} names them"
            )


def show(sweep: Sweep) -> None:
    """Every trial, the result and where the model is, on stdout."""
    from vitruvian.text import table
    from vitruvian.training.sweep import format_mean

    headings = ("trial", ">lr", ">seed", "for", ">top-1", ">mean per class", "")
    print(table(headings, [row(sweep, trial) for trial in sweep.trials]))
    count = len(sweep.values())
    runs = f"mean and standard deviation of {count} runs" if count > 1 else "one run"
    print(f"\ntop-1 {format_mean(sweep, 'top1')}, mean per class {format_mean(sweep, 'mean_per_class')} ({runs})")
    print(f"measured on {sweep.measured_on}")
    best = next(trial for trial in sweep.test if trial.state == "done")
    print(f"the report is {sweep.folder / 'report.html'}")
    print(f"a model is in {best.folder}: vit predict IMAGES --model {best.folder}")


def row(sweep: Sweep, trial: Trial) -> tuple[str, ...]:
    measures = trial.measures
    numbers = [f"{measures[key]:.2f}%" if measures else trial.state for key in ("top1", "mean_per_class")]
    chosen = "chosen" if trial.kind == "dev" and trial.lr == sweep.chosen_lr else ""
    return (
        trial.name,
        f"{trial.lr:g}",
        str(trial.seed),
        {"dev": "choosing the lr", "test": "result"}[trial.kind],
        *numbers,
        chosen,
    )
