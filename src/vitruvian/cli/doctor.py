"""`vit doctor`: what is wrong with these images, before a model learns from them?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vitruvian.cli.options import Readers
from vitruvian.progress import tell, track

COLORS = {"hurts": "red", "look": "yellow", "fine": "green"}


def doctor(
    data: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a manifest, shards, or a built-in name.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with the images, as HTML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the report.")] = False,
    workers: Readers = 2,
) -> None:
    """Examine a dataset before training.

    Finds files that cannot be read, copies, images in two splits or under two labels, missing and unbalanced
    classes, odd images and doubtful labels. The exit code is 1 if training would suffer.
    """
    from vitruvian.data.doctor import diagnose
    from vitruvian.data.doctor.findings import report
    from vitruvian.data.doctor.page import page
    from vitruvian.data.sources import open_dataset
    from vitruvian.files import write_text

    opened = open_dataset(data)
    diagnosis = diagnose(opened, workers=workers, track=partial(track, label="examining"))
    if as_json:
        print(json.dumps(diagnosis.to_json()))
    else:
        for level, line in report(diagnosis):
            typer.secho(line, fg=COLORS[level] if level else None)  # colored if stdout is a terminal
    if out is not None:
        write_text(out, page(diagnosis, opened))
        tell(f"the images are in {out}")
    if not diagnosis.healthy:
        raise typer.Exit(1)
