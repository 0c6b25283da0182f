"""`vit embed`, `vit merge` and `vit similar`: features of many images, and search in them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitruvian.cli.options import (
    BulkOptions,
    LoadOptions,
    ModelName,
    expand_options,
    json_option,
)
from vitruvian.cli.process import quick_imports
from vitruvian.progress import track, track_amounts
from vitruvian.text import plural, printable

if TYPE_CHECKING:
    from vitruvian.bulk.similar import Neighbor


@expand_options
def embed(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, Parquet files or a URL.")],
    model: ModelName,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Folder or URL to write the parts to.")],
    bulk: BulkOptions,
    options: LoadOptions,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="Data type of the vectors.")] = "float16",
) -> None:
    """Write the features of images as Parquet parts.

    They are for search, probes and other programs. Existing parts are not computed again, so a killed job resumes
    where it stopped; `vit merge` verifies that all parts are present.
    """
    if bulk.on and not options.is_default:
        raise typer.BadParameter("--on loads the model on each node, without --num-heads, --image-size and --device")
    with quick_imports():
        from vitruvian.bulk.job import embed as run_embed
        from vitruvian.inference import Encoder

    run_embed(
        data,
        model if bulk.on else Encoder(model, **options.arguments()),
        out,
        dtype=dtype,
        **vars(bulk),
        track=partial(track_amounts, label="images"),
    )
    print(f"wrote vectors to {out}; `vit merge {out}` verifies them, `vit similar IMAGE --in {out}` searches them")


def merge(
    where: Annotated[str, typer.Argument(metavar="FOLDER", help="Parts of `vit embed` or `vit predict --out`.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write all rows to one Parquet file.")
    ] = None,
    as_json: Annotated[bool, json_option(" instead of text")] = False,
) -> None:
    """Verify that all parts are present; print totals and errors."""
    with quick_imports():
        from vitruvian.bulk.result import merge as run_merge

    summary = run_merge(where, out, track=partial(track, label="parts"))
    if as_json:
        print(json.dumps(summary.to_json()))
        return
    failed = sum(summary.errors.values())
    parts = plural(summary.parts, "part")
    print(f"{plural(summary.images, 'image')} in {parts}, each once; {failed:,} with an error; model {summary.model}")
    for error, count in summary.errors.items():
        print(f"  {count:,} x {printable(error)}, such as {printable(summary.examples[error])}")


def similar(
    where: Annotated[str, typer.Option("--in", metavar="FOLDER", help="Vectors of `vit embed`: a folder or a URL.")],
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]", help="Images to search for.")] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Search for a text, in vectors of a CLIP or SigLIP; repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Number of neighbors per image.")] = 20,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="The model that made the vectors, if it has moved."),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option("--exact/--index", help="Compare all vectors, or use an index [default: by size]."),
    ] = None,
    as_json: Annotated[bool, json_option(" per image (JSON Lines)")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a page with thumbnails (.html).")
    ] = None,
) -> None:
    """Find the images most similar to an image or a text.

    Ranked by cosine similarity of features.
    """
    images, texts = images or [], text or []
    if not images and not texts:
        raise typer.BadParameter("nothing to search for: give an image or --text")
    with quick_imports():
        from vitruvian.bulk.similar import VectorSearch, write_neighbors

    search = VectorSearch(where, exact=exact, track=partial(track, label="parts"))
    results = search.nearest(search.queries(images, texts, model), top)
    if out is not None:
        write_neighbors(out, images, texts, results, search.result)
    queries = [("path", image) for image in images] + [("text", words) for words in texts]
    for (kind, name), neighbors in zip(queries, results):
        print(as_line(kind, name, neighbors) if as_json else as_table(name, neighbors), flush=True)
    if out is not None:
        print(f"thumbnails: {out}")


def as_line(kind: str, name: str, neighbors: list[Neighbor]) -> str:
    rows = [{"key": n.key, "similarity": n.similarity, "label": n.label, "index": n.index} for n in neighbors]
    return json.dumps({kind: name, "neighbors": rows})


def as_table(name: str, neighbors: list[Neighbor]) -> str:
    rows = [f"  {n.similarity:6.3f}  {printable(n.key)}  {printable(n.label or '')}".rstrip() for n in neighbors]
    return "\n".join([printable(name), *rows])
