"""`vit bench`: how fast is a model here, and where does the time go?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitruvian.cli.options import EngineChoice, Heads, ImageSize, ModelName, TomeR, names_in, tome_of
from vitruvian.cli.start import quick_imports
from vitruvian.progress import print_status


def bench(
    model: ModelName,
    engine: Annotated[
        list[EngineChoice] | None,
        typer.Option(help="Measure this engine; may be given again. Else all."),
    ] = None,
    batches: Annotated[str, typer.Option(metavar="N,N", help="Batches to measure.")] = "1,16",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="How often each is measured, in turn.")] = 20,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image to decode; else a JPEG of 500 x 375 made for it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw images per second by batch: out.png.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the tables.")] = False,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    tome_r: TomeR = None,
) -> None:
    """Measure images per second, latency and memory of a model.

    Also how much of the time each part of it takes.
    """
    counts = names_in(batches)
    if not counts or not all(each.isdecimal() and 1 <= int(each) <= 65_536 for each in counts):
        raise typer.BadParameter(f"{batches!r} is not a list of batches such as 1,16", param_hint="--batches")
    if plot is not None and plot.suffix.lower() != ".png":
        raise typer.BadParameter(f"{str(plot)!r} does not end in .png", param_hint="--plot")
    with quick_imports():
        from vitruvian.engines.bench import bench as run_bench
        from vitruvian.files import atomic_path
        from vitruvian.predict import Encoder

    found = run_bench(
        Encoder(model, num_heads=num_heads, image_size=image_size, tome_r=tome_of(tome_r)).model,
        engines=[each.value for each in engine] if engine else None,
        batches=[int(each) for each in counts],
        rounds=rounds,
        image=image,
    )
    print(json.dumps(found.to_json()) if as_json else found)
    if plot is not None:
        drawn = found.chart().image()
        assert drawn is not None
        with atomic_path(plot) as new:
            drawn.save(new)
        print_status(f"the plot is {plot}")
