"""`vit quantize` and `vit optimize`: a faster model, with what it loses measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitruvian.cli.options import Heads
from vitruvian.cli.start import quick_imports
from vitruvian.progress import print_status

Source = Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a folder or a published name.")]
MaxLoss = Annotated[
    float, typer.Option(min=0.0, max=100.0, metavar="POINTS", help="Points of top-1 accuracy that may be lost.")
]
SpeedBatch = Annotated[
    int, typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="The batch that speed is measured at.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print what was measured as one JSON object.")]


def quantize(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="A file .onnx; it must not exist.")],
    calibrate: Annotated[
        str, typer.Option(metavar="DATA", help="Images that ranges are found on; they need no labels.")
    ],
    evaluate: Annotated[
        str, typer.Option(metavar="DATA", help="Other images that the loss is measured on, with labels if there are.")
    ],
    max_loss: MaxLoss = 0.5,
    engine: Annotated[
        Literal["onnxruntime", "openvino"], typer.Option(help="What runs it, and what its speed is measured with.")
    ] = "onnxruntime",
    weight_bits: Annotated[
        int, typer.Option(min=7, max=8, metavar="N", help="7 is right on every processor, 8 on those with VNNI.")
    ] = 7,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Write the numbers as JSON and report.html.")
    ] = None,
    batch_size: SpeedBatch = 16,
    num_heads: Heads = None,
    as_json: AsJson = False,
) -> None:
    """Write a model in int8, if it keeps the answers and is faster.

    Layers that lose the most stay float. Nothing is written if more is lost than --max-loss, or if float is as fast.
    """
    with quick_imports():
        from vitruvian.compress.compress_report import write_quantized
        from vitruvian.compress.quantize import quantize as quantize_model

    done = quantize_model(
        source,
        destination,
        calibrate=calibrate,
        evaluate=evaluate,
        max_loss=max_loss,
        engine=engine,
        batch_size=batch_size,
        weight_bits=weight_bits,
        num_heads=num_heads,
    )
    print(json.dumps(done.to_json()) if as_json else f"{done}\nwrote {done.path}")
    if report is not None:
        print_status(f"the report is {write_quantized(report, done.to_json(), str(done))}")


def optimize(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="A folder for the model; it must not exist.")],
    calibrate: Annotated[
        str, typer.Option(metavar="DATA", help="Images: some are fitted on, the others measure the loss.")
    ],
    max_loss: MaxLoss = 0.5,
    images: Annotated[
        int, typer.Option(min=32, max=100_000, metavar="N", help="Images that measure the loss, at most.")
    ] = 1000,
    minutes: Annotated[
        float, typer.Option(min=0.0, metavar="N", help="After so long nothing new is tried; measuring takes one more.")
    ] = 7.0,
    batch_size: SpeedBatch = 16,
    num_heads: Heads = None,
    as_json: AsJson = False,
) -> None:
    """Write the fastest form of a model within a loss.

    Engines, int8 and merged tokens are measured on this machine. The folder works with `vit predict --model`, and has
    report.html with the frontier of speed against loss.
    """
    with quick_imports():
        from vitruvian.compress.optimize import optimize as optimize_model

    done = optimize_model(
        source,
        destination,
        calibrate=calibrate,
        max_loss=max_loss,
        images=images,
        minutes=minutes,
        batch_size=batch_size,
        num_heads=num_heads,
    )
    print(json.dumps(done.to_json()) if as_json else f"{done}\nwrote {done.path}")
