"""`vit embed` and `vit merge`: features of millions of images, by many processes, and whether nothing is missing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitruvian.cli.options import (
    Batch,
    Device,
    Heads,
    ImageSize,
    MaxUnreadable,
    ModelName,
    On,
    Piece,
    Readers,
    Shard,
    Split,
)
from vitruvian.cli.start import quick_imports
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.progress import track, track_amounts
from vitruvian.text import plural, printable


def embed(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a manifest, shards, Parquet files or a URL.")],
    model: ModelName,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="Where the parts go: a folder or a URL.")],
    shard: Shard = None,
    on: On = None,
    split: Split = None,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="Numbers of the vectors.")] = "float16",
    piece: Piece = 4096,
    max_unreadable: MaxUnreadable = 0.25,
    workers: Readers = 0,
    batch_size: Batch = DEFAULT_BATCH_SIZE,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
) -> None:
    """Write the features of images as Parquet parts.

    They are for search, probes and other programs. A part that is there is not made again, so a job that was killed
    goes on where it was; `vit merge` tells whether all is there.
    """
    if on and (num_heads or image_size or device != "cpu"):
        raise typer.BadParameter("--on loads the model on each node, without --num-heads, --image-size and --device")
    with quick_imports():
        from vitruvian.bulk.run import embed as run_embed
        from vitruvian.predict import Encoder

    run_embed(
        data,
        model if on else Encoder(model, num_heads=num_heads, image_size=image_size, device=device),
        out,
        shard=shard,
        on=on,
        split=split,
        dtype=dtype,
        piece=piece,
        batch_size=batch_size,
        max_unreadable=max_unreadable,
        workers=workers,
        track=partial(track_amounts, label="images"),
    )
    print(f"the vectors are in {out}: `vit merge {out}` checks them, `vit similar IMAGE --in {out}` searches them")


def merge(
    where: Annotated[str, typer.Argument(metavar="FOLDER", help="Parts of `vit embed` or `vit predict --out`.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write all rows as one Parquet file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the lines.")] = False,
) -> None:
    """Check that a bulk result is whole; print totals and errors."""
    with quick_imports():
        from vitruvian.bulk.merge import merge as run_merge

    found = run_merge(where, out, track=partial(track, label="parts"))
    if as_json:
        print(json.dumps(found.to_json()))
        return
    bad = sum(found.errors.values())
    parts = plural(found.parts, "part")
    print(f"{plural(found.images, 'image')} in {parts}, each once; {bad:,} with an error; model {found.model}")
    for error, count in found.errors.items():
        print(f"  {count:,} x {printable(error)}, such as {printable(found.examples[error])}")
