"""`vit doctor`: what is wrong with these images, before a model learns from them?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vitruvian.cli.options import Readers
from vitruvian.progress import print_status, track
from vitruvian.text import plural

COLORS = {"hurts": "red", "look": "yellow", "fine": "green"}


def doctor(
    data: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a manifest, shards, or a built-in name.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the images, as HTML.")] = None,
    vectors: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Vectors of `vit embed` of these images, to compare them by.")
    ] = None,
    review: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page to look through doubtful labels with the keyboard."),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the manifest --out with the corrections of that page; examine nothing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the report.")] = False,
    workers: Readers = 2,
) -> None:
    """Examine a dataset before training.

    Finds files that cannot be read, copies, images in two splits or under two labels, missing and unbalanced
    classes, odd images and doubtful labels. The exit code is 1 if training would suffer.
    """
    from vitruvian.data.doctor import diagnose
    from vitruvian.data.doctor.findings import report
    from vitruvian.data.formats import open_dataset
    from vitruvian.files import write_text

    if apply is not None:
        if out is None or as_json or review is not None or vectors is not None:
            raise typer.BadParameter("--apply needs --out corrected.csv, and no other option")
        apply_to(data, apply, out)
        return
    opened = open_dataset(data)
    values = None
    if vectors is not None:
        from vitruvian.bulk.store import open_store

        store = open_store(vectors, track=partial(track, label="vectors"))
        store.check_of(data)
        values = store.values
    diagnosis = diagnose(opened, vectors=values, workers=workers, track=partial(track, label="examining"))
    if as_json:
        print(json.dumps(diagnosis.to_json()))
    else:
        for level, line in report(diagnosis):
            typer.secho(line, fg=COLORS[level] if level else None)  # colored if stdout is a terminal
    if out is not None:
        from vitruvian.data.doctor.doctor_report import diagnosis_page

        write_text(out, diagnosis_page(diagnosis, opened))
        print_status(f"the images are in {out}")
    if review is not None:
        from vitruvian.data.doctor.doctor_report import review_page

        write_text(review, review_page(diagnosis, opened))
        print_status(
            f"the doubtful labels are in {review}: open it, decide, download, then `vit doctor {data} --apply ...`"
        )
    if not diagnosis.healthy:
        raise typer.Exit(1)


def apply_to(data: str, corrections: Path, out: Path) -> None:
    from vitruvian.data.doctor.corrections import apply_corrections

    done = apply_corrections(data, corrections, out)
    print(
        f"{out}: {plural(done.images, 'image')}; {plural(done.changed, 'label')} changed, {done.kept:,} confirmed, "
        f"{plural(done.left_out, 'image')} left out; {data} is as it was"
    )
