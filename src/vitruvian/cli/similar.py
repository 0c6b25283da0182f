"""`vit similar`: which of the images of `vit embed` look like this one, or are what these words say?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitruvian.cli.start import quick_imports
from vitruvian.progress import track
from vitruvian.text import printable

if TYPE_CHECKING:
    from vitruvian.bulk.similar import Neighbor


def similar(
    where: Annotated[str, typer.Option("--in", metavar="FOLDER", help="Vectors of `vit embed`: a folder or a URL.")],
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]", help="What to look for.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(metavar="WORDS", help="Look for words, in vectors of a CLIP or SigLIP.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="How many neighbors an image.")] = 20,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="The model of the vectors, if it has moved.")
    ] = None,
    exact: Annotated[
        bool | None, typer.Option("--exact/--index", help="Compare all vectors, or use an index; else by their number.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each image.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a page with thumbnails (.html).")
    ] = None,
) -> None:
    """Find the images nearest to others, or to words.

    Near is what has a high cosine of the model's features.
    """
    images, texts = images or [], text or []
    if not images and not texts:
        raise typer.BadParameter("nothing to look for: give an image or --text")
    with quick_imports():
        from vitruvian.bulk.similar import Search

    search = Search(where, exact=exact, track=partial(track, label="parts"))
    found = search.nearest(search.queries(images, texts, model), top)
    if out is not None:
        from vitruvian.bulk.similar import write_neighbors

        write_neighbors(out, images, texts, found, search.result)
    asked = [("path", image) for image in images] + [("text", words) for words in texts]
    for (kind, name), neighbors in zip(asked, found):
        print(as_line(kind, name, neighbors) if as_json else as_table(name, neighbors), flush=True)
    if out is not None:
        print(f"thumbnails: {out}")


def as_line(kind: str, name: str, neighbors: list[Neighbor]) -> str:
    rows = [{"key": n.key, "similarity": n.similarity, "label": n.label, "index": n.index} for n in neighbors]
    return json.dumps({kind: name, "neighbors": rows})


def as_table(name: str, neighbors: list[Neighbor]) -> str:
    rows = [f"  {n.similarity:6.3f}  {printable(n.key)}  {printable(n.label or '')}".rstrip() for n in neighbors]
    return "\n".join([printable(name), *rows])
