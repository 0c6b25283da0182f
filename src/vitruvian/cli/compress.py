"""`vit bench`, `vit quantize`, `vit optimize`, `vit cascade` and `vit tome`: measure speed, and make a model faster."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from vitruvian.cli.options import (
    EngineChoice,
    ImageSize,
    ModelName,
    NumHeads,
    ReportFolder,
    Source,
    Split,
    TomeR,
    json_option,
    note_replaced,
    split_names,
    tome_counts,
)
from vitruvian.cli.process import quick_imports
from vitruvian.progress import print_status, track

Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder of the new model.")]
FittingImages = Annotated[
    str, typer.Option("--calibrate", metavar="DATA", help="Images to fit on, such as a folder; labels are not used.")
]
MaxLoss = Annotated[
    float, typer.Option(min=0.0, max=100.0, metavar="POINTS", help="Maximum loss of top-1 accuracy, in points.")
]
SpeedBatch = Annotated[
    int, typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="Batch size at which speed is measured.")
]
MeasuredJson = Annotated[bool, typer.Option("--json", help="Print the measurements as one JSON object.")]


def bench(
    model: ModelName,
    engine: Annotated[
        list[EngineChoice] | None, typer.Option(help="Engine to measure; repeatable [default: all].")
    ] = None,
    batches: Annotated[str, typer.Option(metavar="N,N", help="Batch sizes to measure.")] = "1,16",
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements per engine and batch size.")] = 20,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Image to decode [default: a synthetic JPEG of 500 x 375].")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot images per second over batch size (.png).")
    ] = None,
    as_json: Annotated[bool, json_option(" instead of the tables")] = False,
    num_heads: NumHeads = None,
    image_size: ImageSize = None,
    tome_r: TomeR = None,
) -> None:
    """Measure images per second, latency and memory of a model.

    Also reports how the time divides over the parts of the model.
    """
    sizes = split_names(batches)
    if not sizes or not all(size.isdecimal() and 1 <= int(size) <= 65_536 for size in sizes):
        raise typer.BadParameter(f"{batches!r} is not a list of batch sizes such as 1,16", param_hint="--batches")
    if plot is not None and plot.suffix.lower() != ".png":
        raise typer.BadParameter(f"{str(plot)!r} does not end in .png", param_hint="--plot")
    with quick_imports():
        from vitruvian.engines.bench import bench as run_bench
        from vitruvian.files import atomic_path
        from vitruvian.inference import Encoder

    result = run_bench(
        Encoder(model, num_heads=num_heads, image_size=image_size, tome_r=tome_counts(tome_r)).model,
        engines=[choice.value for choice in engine] if engine else None,
        batches=[int(size) for size in sizes],
        rounds=rounds,
        image=image,
    )
    print(json.dumps(result.to_json()) if as_json else result)
    if plot is not None:
        chart = result.chart().image()
        assert chart is not None
        with atomic_path(plot) as new:
            chart.save(new)
        print_status(f"wrote {plot}")


def quantize(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="The .onnx file to write; it must not exist.")],
    calibrate: Annotated[
        str, typer.Option(metavar="DATA", help="Images for the ranges of activations; labels are not needed.")
    ],
    evaluate: Annotated[
        str, typer.Option(metavar="DATA", help="Other images for measuring the loss, with labels if there are any.")
    ],
    max_loss: MaxLoss = 0.5,
    engine: Annotated[
        Literal["onnxruntime", "openvino"], typer.Option(help="Engine that will run the model and is timed.")
    ] = "onnxruntime",
    weight_bits: Annotated[
        int, typer.Option(min=7, max=8, metavar="N", help="7 is exact on every processor, 8 on those with VNNI.")
    ] = 7,
    report: ReportFolder = None,
    batch_size: SpeedBatch = 16,
    num_heads: NumHeads = None,
    as_json: MeasuredJson = False,
) -> None:
    """Quantize a model to int8, if it stays accurate and gets faster.

    The layers that lose the most stay float. Nothing is written if the loss exceeds --max-loss, or if float is as
    fast.
    """
    with quick_imports():
        from vitruvian.compress.compress_report import write_quantized
        from vitruvian.compress.quantize import quantize as quantize_model

    result = quantize_model(
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
    print(json.dumps(result.to_json()) if as_json else f"{result}\nwrote {result.path}")
    if report is not None:
        print_status(f"wrote {write_quantized(report, result.to_json(), str(result))}")


def optimize(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder of the new model; it must not exist.")],
    calibrate: Annotated[
        str, typer.Option(metavar="DATA", help="Images: some are used for fitting, the others measure the loss.")
    ],
    max_loss: MaxLoss = 0.5,
    images: Annotated[
        int, typer.Option(min=32, max=100_000, metavar="N", help="Maximum number of images that measure the loss.")
    ] = 1000,
    minutes: Annotated[
        float,
        typer.Option(min=0.0, metavar="N", help="Time limit for trying candidates; the final measurement comes after."),
    ] = 7.0,
    batch_size: SpeedBatch = 16,
    num_heads: NumHeads = None,
    as_json: MeasuredJson = False,
) -> None:
    """Write the fastest form that loses at most --max-loss accuracy.

    Engines, int8 and token merging are measured on this machine. The folder works with `vit predict --model` and
    contains report.html with the frontier of speed against loss.
    """
    with quick_imports():
        from vitruvian.compress.optimize import optimize as optimize_model

    result = optimize_model(
        source,
        destination,
        calibrate=calibrate,
        max_loss=max_loss,
        images=images,
        minutes=minutes,
        batch_size=batch_size,
        num_heads=num_heads,
    )
    print(json.dumps(result.to_json()) if as_json else f"{result}\nwrote {result.path}")


def cascade(
    source: Source,
    destination: Destination,
    calibrate: FittingImages,
    image_size: ImageSize = None,
    tome_r: TomeR = None,
    max_loss: MaxLoss = 0.5,
    split: Split = None,
    num_heads: NumHeads = None,
    as_json: Annotated[bool, json_option(" instead of text")] = False,
) -> None:
    """Write a model that classifies easy images with a cheap pass.

    The cheap pass uses --image-size or merges --tome-r tokens; images on which it is not confident take a second,
    full pass. The confidence threshold is fitted so that the expected loss, by the full model's own probabilities, is
    at most --max-loss.
    """
    with quick_imports():
        from vitruvian.compress.fewer_tokens import fit_cascade
        from vitruvian.weights.convert import check_other
        from vitruvian.weights.load import load, locate
        from vitruvian.weights.save import save

    check_other(destination.expanduser(), locate(source))
    note_replaced(destination)
    model = load(source, num_heads=num_heads)
    fit = fit_cascade(
        model,
        calibrate,
        image_size=image_size,
        tome_r=tome_counts(tome_r) or 0,
        max_loss=max_loss,
        split=split,
        track=partial(track, label="images"),
    )
    model.meta = model.meta.replace(cascade=fit.cascade)
    save(model, destination)
    print(json.dumps(fit.to_json()) if as_json else f"{fit}\nwrote {destination}")


def tome(
    source: Source,
    destination: Destination,
    calibrate: FittingImages,
    tome_r: TomeR,
    split: Split = None,
    num_heads: NumHeads = None,
) -> None:
    """Write a model with adaptive token merging.

    R tokens merge per layer on average, more in images with similar patches. The similarity threshold of each layer is
    fitted on the images.
    """
    with quick_imports():
        from vitruvian.compress.fewer_tokens import fit_merging
        from vitruvian.weights.convert import check_other
        from vitruvian.weights.load import load, locate
        from vitruvian.weights.save import save

    check_other(destination.expanduser(), locate(source))
    note_replaced(destination)
    model = fit_merging(load(source, num_heads=num_heads), calibrate, tome_counts(tome_r) or 0, split=split)
    save(model, destination)
    thresholds = ", ".join(f"{value:.3f}" for value in model.config.tome_thresholds)  # type: ignore[union-attr]
    print(f"thresholds of the layers: {thresholds}\nwrote {destination}")
