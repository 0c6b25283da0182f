"""`vit train`: from images to a model, continued where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.options import (
    FROM,
    BatchSize,
    Changes,
    Epochs,
    LearningRate,
    Seed,
    Workers,
    with_everyday,
)
from vitruvian.cli.start import speaks
from vitruvian.progress import print_status

if TYPE_CHECKING:
    from vitruvian.training import Run


def train(
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, or a built-in name (digits).")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="A recipe or a TOML file; else one that suits the data.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model to train from scratch.")] = None,
    weights: Annotated[str | None, FROM] = None,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder of the run; else a new one in runs/.")] = None,
    epochs: Epochs = None,
    lr: LearningRate = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    workers: Workers = None,
    settings: Changes = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Continue this run.")] = None,
    auto_resume: Annotated[
        bool, typer.Option("--auto-resume", help="Continue the run in --out if there is one, else begin it.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run, how long and in how much memory.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="'N x NAME'", help="With --plan: what the recipe costs on other machines ('64 x A100')."),
    ] = None,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes and exit.")] = False,
) -> None:
    """Train a model on images, from scratch or from weights.

    Stopped anywhere, `vit train --resume RUN` goes on as if nothing had happened. Under torchrun, all processes
    share the work.
    """
    if recipes:
        from vitruvian.text import table
        from vitruvian.training import read_recipe, recipe_names

        rows = [(name, read_recipe(name)) for name in recipe_names()]
        print(table(("recipe", "for", "time", "result"), [(name, r.about, r.time, r.result) for name, r in rows]))
        return
    changes = with_everyday(
        settings, {"epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed, "workers": workers}
    )
    if cluster is not None:
        if not plan or recipe is None:
            raise typer.BadParameter("--cluster is for --plan and --recipe NAME")
        from vitruvian.training.cluster import cluster_lines, cluster_plan

        print("\n".join(cluster_lines(cluster_plan(recipe, cluster, data=data, model=model, settings=changes))))
        return
    if (data is None) == (resume is None):
        raise typer.BadParameter("give DATA to train on, or --resume RUN")
    if resume is not None and (recipe or model or weights or out or plan):
        raise typer.BadParameter("--resume takes everything but --workers and some --set from the run")
    if auto_resume and out is None:
        raise typer.BadParameter("--auto-resume needs --out RUN, where a run begins or goes on")
    from vitruvian import training
    from vitruvian.training.journal import TensorBoard
    from vitruvian.training.plan import plan as plan_of
    from vitruvian.training.plan import plan_lines

    if plan:
        found = plan_of(data, recipe=recipe, model=model, weights=weights, settings=changes)
        print("\n".join(plan_lines(found)))
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
    if speaks():
        show(run)


def show(run: Run) -> None:
    """Where the model is and how good it is, on stdout."""
    last = run.evaluation
    facts = run.facts
    masked = run.recipe.objective == "masked"
    what = f"the colors of {last.get('patches')} hidden patches in {last['count']}" if masked else str(last["count"])
    print(f"{last['top1']:.2f}% of {what} images right ({facts['validation']}), in {last['seconds']:.0f} s")
    if run.unreadable:
        print_status(f"{len(run.unreadable)} images could not be read, see {run.folder / 'unreadable.json'}")
    print(f"the report is {run.folder / 'report.html'}")
    use = f"vit finetune DATA --from {run.folder}" if masked else f"vit predict IMAGES --model {run.folder}"
    print(f"the model is in {run.folder}: {use}")
