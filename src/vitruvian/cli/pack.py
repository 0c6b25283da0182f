"""`vit pack`: the same images, smaller and quicker to read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitruvian.progress import print_status, track


def pack(
    data: Annotated[str, typer.Argument(metavar="SRC", help="A folder, a manifest, shards, or a built-in name.")],
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Where the shards go: a new folder.")],
    side: Annotated[int, typer.Option(metavar="PIXELS", help="The shorter side; smaller images stay.")] = 256,
    form: Annotated[
        Literal["auto", "jpeg", "pixels"],
        typer.Option("--format", help="pixels: raw, the quickest; jpeg: a tenth as large; auto: pixels up to 8 GB."),
    ] = "auto",
    quality: Annotated[int, typer.Option(metavar="N", help="Of JPEG, 1 to 100.")] = 90,
    shard_mb: Annotated[int, typer.Option(metavar="MB", help="Most megabytes of a shard.")] = 256,
    workers: Annotated[int, typer.Option(min=0, metavar="N", help="Processes that encode images.")] = 2,
) -> None:
    """Resize and repack a dataset into shards that read faster.

    Labels and order stay. Stopped anywhere, the same command goes on from there. What cannot be read is left out and
    listed in DST/pack.json.
    """
    from vitruvian.data.pack import PackSettings
    from vitruvian.data.pack import pack as pack_data

    settings = PackSettings(side=side, format=form, quality=quality, shard_mb=shard_mb)
    state = pack_data(data, folder, settings, workers=workers, track=partial(track, label="packing"))
    for name, split in state.splits.items():
        shards = "1 shard" if len(split.shards) == 1 else f"{len(split.shards):,} shards"
        print(f"{name}: {split.images:,} images in {shards}, {split.bytes / 1e6:,.1f} MB as {state.settings.format}")
    skipped = sum(len(split.skipped) for split in state.splits.values())
    if skipped:
        print_status(f"left out because they cannot be read: {skipped:,}, listed in {folder / 'pack.json'}")
    for note in state.notes:
        print_status(f"note: {note}")
