"""`vit doctor`, `vit pack` and `vit datasets`: check datasets, make them faster to read, and find those of papers."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitruvian.cli import options as opt
from vitruvian.cli.options import check_suffix, expand_options, flag, import_torch, option, split_names
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import print_notes, print_status, track
from vitruvian.tasks import Task, all_tasks, describe_pattern, find_task, get_task
from vitruvian.tasks import data_root as find_data_root
from vitruvian.text import plural, table

COLORS = {"problem": "red", "warning": "yellow", "ok": "green", "unchecked": None}
METRICS = {"top1": "top-1", "mean_per_class": "mean per class", "real": "ReaL"}
TASK_HEADINGS = ("task", "title", ">classes", ">train", ">val", ">test", "metric", "images")
SourceData = Annotated[str, typer.Argument(metavar="SRC", help="A folder, a manifest, shards, or a built-in name.")]
PREDICTIONS = option("FILE", "Out-of-fold predictions (`vit train --folds`), to find suspicious labels with.")
REVIEW = option("FILE", "Write a page for reviewing suspicious labels with the keyboard (.html).")
APPLY = option("FILE", "Write the manifest --out with the corrections from that page, and exit.")
AGAINST = option("TEST...", "Find images of SRC that are also in these; --out clean.csv lists SRC without them.")
MODEL = option("MODEL", "Compare labels and images by the features of this model.", "-m", "--model")
DROP = option("NAMES", "broken, duplicates or both: --out clean.csv lists SRC without these images.")
FORM = typer.Option("--format", help="pixels: raw, fastest; jpeg: a tenth of the size; auto: pixels up to 8 GB.")


@expand_options
def doctor(
    data: SourceData,
    options: opt.ModelOptions,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="TEST", hidden=True, help="Further datasets for --against.")
    ] = None,
    out: Annotated[Path | None, option("FILE", "Write a page with the images (.html).")] = None,
    model: Annotated[str | None, MODEL] = None,
    drop: Annotated[str | None, DROP] = None,
    against: Annotated[list[str] | None, AGAINST] = None,
    vectors: Annotated[str | None, option("FOLDER", "Vectors of `vit embed` of these images, to compare them.")] = None,
    predictions: Annotated[Path | None, PREDICTIONS] = None,
    review: Annotated[Path | None, REVIEW] = None,
    target: opt.TargetName = None,
    apply: Annotated[Path | None, APPLY] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the report.")] = False,
    workers: opt.Readers = 2,
    batch_size: opt.Batch = DEFAULT_BATCH_SIZE,
) -> None:
    """Check a dataset before training.

    Finds unreadable files, duplicates, images in two splits or under two labels, missing and unbalanced classes,
    unusual images and suspicious labels. The exit code is 1 if there are problems.
    """
    from vitruvian.data.doctor import DROPPABLE, diagnose
    from vitruvian.data.doctor.corrections import check_manifest, write_manifest
    from vitruvian.data.doctor.findings import report
    from vitruvian.data.formats import open_dataset
    from vitruvian.files import write_text
    from vitruvian.targets import KINDS

    compared = model or vectors or drop or review or predictions
    if apply is not None:
        if out is None or as_json or compared:
            raise typer.BadParameter("--apply needs --out corrected.csv, and no other option")
        from vitruvian.data.doctor.corrections import apply_corrections

        result = apply_corrections(data, apply, out)
        print(
            f"wrote {out} with {plural(result.images, 'image')}: {plural(result.changed, 'label')} changed, "
            f"{result.confirmed:,} confirmed, {plural(result.excluded, 'image')} excluded; {data} is unchanged"
        )
        return
    if against or more:
        if not against or compared:
            raise typer.BadParameter("--against TEST... allows only more datasets, --out, --json and --workers")
        compare_datasets(data, [*against, *(more or [])], out, as_json=as_json, workers=workers)
        return
    if model is not None and vectors is not None:
        raise typer.BadParameter("--model computes the features, --vectors reads them: give one of the two")
    if drop is not None:
        if out is None:
            raise typer.BadParameter("--drop needs --out clean.csv")
        if unknown := set(split_names(drop)).difference(DROPPABLE):
            raise typer.BadParameter(f"{min(unknown)!r} is not {' or '.join(DROPPABLE)}", param_hint="--drop")
        check_manifest(data, out)  # before all images are read
    elif out is not None and out.suffix.lower() == ".csv":
        raise typer.BadParameter("a .csv needs --drop, --apply or --against; the page is .html", param_hint="--out")
    else:
        check_suffix(out, ".html", "--out")
    check_suffix(review, ".html", "--review")
    dataset = open_dataset(data, target=target or "auto", accepts=KINDS)
    if dataset.target != "single" and review is not None:
        raise typer.BadParameter("--review supports only one class per image; --out page.html lists doubtful labels")
    values = None
    if model is not None:
        import_torch()
        import numpy as np

        from vitruvian.evaluation.features import feature_rows, open_store
        from vitruvian.inference import Encoder

        encoder = Encoder(model, **vars(options))
        how: Any = {"batch_size": batch_size, "track": partial(track, label="features")}
        store = open_store(encoder)
        parts = [feature_rows(encoder, source, store, **how)[0] for source in dataset.splits.values()]
        values = np.concatenate(parts)
    elif vectors is not None:
        from vitruvian.bulk.result import open_vectors

        computed = open_vectors(vectors, track=partial(track, label="vectors"))
        computed.check_data(data)
        values = computed.values
    diagnosis = diagnose(
        dataset, vectors=values, predictions=predictions, workers=workers, track=partial(track, label="examining")
    )
    if as_json:
        print(json.dumps(diagnosis.to_json()))
    else:
        for level, line in report(diagnosis):
            typer.secho(line, fg=COLORS[level] if level else None)  # colored if stdout is a terminal
    from vitruvian.data.doctor.doctor_report import diagnosis_page, review_page

    if out is not None and drop is not None:
        dropped = {name: diagnosis.droppable[name] for name in split_names(drop)}
        removed = frozenset().union(*dropped.values())
        count = write_manifest(
            data, out, lambda position, label: None if position in removed else label, target=target or "auto"
        )
        left_out = ", ".join(f"{len(images):,} {name}" for name, images in dropped.items())
        print_status(f"wrote {out} with {plural(count, 'image')}; left out: {left_out}; {data} is unchanged")
    elif out is not None:
        write_text(out, diagnosis_page(diagnosis, dataset))
        print_status(f"wrote {out}")
    if review is not None:
        write_text(review, review_page(diagnosis, dataset))
        steps = f"open it, review the labels, download the result, then run `vit doctor {data} --apply ...`"
        print_status(f"wrote {review}: {steps}")
    if not diagnosis.healthy and drop is None:
        raise typer.Exit(1)


def compare_datasets(data: str, against: list[str], out: Path | None, *, as_json: bool, workers: int) -> None:
    """Report images of a dataset that are in others, and write the manifest without them."""
    from vitruvian.data.doctor.corrections import check_manifest
    from vitruvian.data.doctor.overlap import find_overlap, write_clean

    if out is not None:
        check_manifest(data, out)  # before all images are read
    overlap = find_overlap(data, against, workers=workers, track=partial(track, label="comparing"))
    print(json.dumps(overlap.to_json()) if as_json else "\n".join(overlap.report()))
    if out is not None:
        count = write_clean(data, overlap, out)
        print_status(f"wrote {out} with {plural(count, 'image')}; {plural(len(overlap.matches), 'image')} left out")
    elif overlap.matches:
        raise typer.Exit(1)


def pack(
    data: SourceData,
    folder: Annotated[Path, typer.Argument(metavar="DST", help="A new folder for the shards.")],
    side: Annotated[int, option("PIXELS", "Shorter side; smaller images are not enlarged.")] = 256,
    form: Annotated[Literal["auto", "jpeg", "pixels"], FORM] = "auto",
    quality: Annotated[int, option("N", "JPEG quality, 1 to 100.")] = 90,
    shard_mb: Annotated[int, option("MB", "Maximum size of a shard.")] = 256,
    workers: Annotated[int, option("N", "Processes that encode images.", min=0)] = 2,
) -> None:
    """Resize and repack a dataset into shards that load faster.

    Labels and order are kept. The same command resumes an interrupted run. Unreadable images are skipped and listed in
    DST/pack.json.
    """
    from vitruvian.data.pack import PackSettings
    from vitruvian.data.pack import pack as pack_data

    settings = PackSettings(side=side, format=form, quality=quality, shard_mb=shard_mb)
    state = pack_data(data, folder, settings, workers=workers, track=partial(track, label="packing"))
    for name, split in state.splits.items():
        shards = plural(len(split.shards), "shard")
        print(f"{name}: {split.images:,} images in {shards}, {split.bytes / 1e6:,.1f} MB as {state.settings.format}")
    skipped = sum(len(split.skipped) for split in state.splits.values())
    if skipped:
        print_status(f"skipped {plural(skipped, 'unreadable image')}, listed in {folder / 'pack.json'}")
    print_notes(state.notes)


def datasets(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A task or part of a name, such as pets or vtab.")] = "",
    data_root: opt.DataRoot = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per task (JSON Lines).")] = False,
) -> None:
    """List the datasets of papers, and which images are present.

    With a NAME, also prints what to download and where to put it. Commands that take DATA accept these names.
    """
    root = find_data_root(data_root)
    exact = find_task(name) if name else None
    similar = [task for key, task in all_tasks().items() if name.lower() in key]
    matches = [exact] if exact else similar or [get_task(name)]
    if as_json:
        for task in matches:
            print(json.dumps(task.to_json(root), ensure_ascii=False))
    elif len(matches) == 1:
        print("\n".join(describe_task(matches[0], root)))
    else:
        rows = []
        for task in matches:
            counts = [f"{count:,}" if count else "-" for count in map(task.splits.get, ("train", "val", "test"))]
            present = "present" if task.present(root) else "missing"
            classes = f"{task.classes:,}" if task.classes else "-"
            rows.append((task.name, task.title, classes, *counts, METRICS[task.metric], present))
        print(table(TASK_HEADINGS, rows))
        print(f"\nImages belong in {root}. `vit datasets NAME` prints what to download and where to put it.")


def describe_task(task: Task, root: Path) -> list[str]:
    """Describe a task, one line per known fact."""
    missing = ", ".join(map(describe_pattern, task.missing(root)))
    facts = {
        "task": task.name + (f" (also {', '.join(task.aliases)})" if task.aliases else ""),
        "title": task.title,
        "group": task.group,
        "classes": f"{task.classes:,}" if task.classes else "as in its lists",
        "splits": ", ".join(f"{split} {count:,}" if count else split for split, count in task.splits.items()),
        "metric": METRICS[task.metric],
        "preprocess": ", ".join(f"{key}={value}" for key, value in task.preprocess.items()),
        "recipe": task.recipe,
        "note": task.note,
        "folder": str(task.path(root)),
        "contains": ", ".join(map(describe_pattern, task.files)),
        "images": f"missing: {missing}" if missing else "present",
        "download": task.download,
    }
    return [f"{name:12}{fact}" for name, fact in facts.items() if fact]
