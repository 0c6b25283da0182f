"""`vit bench` and `vit optimize`: measure speed, and make a model faster."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import check_new, expand_options, flag, import_torch, option, parse_numbers
from vitruvian.progress import print_status, track

ENGINE = option("NAME", "Engine to measure; repeatable [default: all].", parser=opt.parse_engine)
CSV = option("FILE", "Write a row per engine and batch size, with this machine and versions (.csv).", dir_okay=False)
SEARCH, INT8, TOKENS = "The search", "int8 (--only int8)", "Fewer tokens (--only merge, --only cascade)"
USED = {
    "": {"max_loss", "images", "minutes", "batch_size"},
    "int8": {"max_loss", "evaluate", "engine", "weight_bits", "batch_size"},
    "merge": {"tome_r", "split"},
    "cascade": {"tome_r", "image_size", "max_loss", "split"},
}
"""Options of `vit optimize` that --only uses, besides those that it always uses; "" without --only."""
NEEDED = {"int8": "evaluate", "merge": "tome_r"}
MAX_LOSS = option("POINTS", "Maximum loss of top-1 accuracy, in points.", min=0.0, max=100.0)
ONLY = typer.Option(help="Apply one technique instead of the search: int8, token merging or a cascade.")
IMAGES = option("N", "Maximum number of images that measure the loss.", panel=SEARCH, min=32, max=100_000)
MINUTES = option("N", "Time limit for trying candidates; the final measurement comes after.", panel=SEARCH, min=0.0)
EVALUATE = option("DATA", "Other images for measuring the loss, with labels if there are any.", panel=INT8)
INT8_ENGINE = typer.Option(help="Engine that will run the model and is timed.", rich_help_panel=INT8)
WEIGHT_BITS = option("N", "7 for every processor, 8 with VNNI [default: for this one].", panel=INT8, min=7, max=8)
TOME_R = option("R", "Tokens to merge per layer, such as 8.", panel=TOKENS, parser=opt.parse_tome_r)
FIRST_SIZE = option("SIZE", "Input size of a cascade's first pass.", panel=TOKENS, parser=opt.parse_size)
SPEED_BATCH = option("N", "Batch size of the speed measurement.", "--batch-size", panel=opt.ADVANCED, min=1, max=65_536)


@expand_options
def bench(
    model: opt.ModelName,
    options: opt.ModelOptions,
    engine: Annotated[list[str] | None, ENGINE] = None,
    batches: Annotated[str, option("N,N", "Batch sizes to measure.")] = "1,16",
    rounds: Annotated[int, option("N", "Measurements per engine and batch size.", min=1)] = 20,
    image: Annotated[Path | None, option("FILE", "Image to decode [default: a synthetic JPEG of 500 x 375].")] = None,
    csv: Annotated[Path | None, CSV] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object instead of the tables.")] = False,
) -> None:
    """Measure images per second, latency and memory of a model.

    Also reports how the time divides over the parts of the model. Engines other than torch are measured on the CPU.
    With --precision or --compile, torch is measured both with and without them.
    """
    counts = parse_numbers(batches, "--batches", "1,16")
    opt.check_suffix(csv, ".csv", "--csv")
    import_torch()
    from vitruvian.engines.bench import bench as run_bench
    from vitruvian.files import open_table
    from vitruvian.inference import Encoder
    from vitruvian.machine import choose_device

    first = next((name for name in engine or () if not name.startswith("torch")), "torch")
    device = choose_device(options.device, first)
    plain = replace(options, engine="torch", device=device, precision="float32", compile=False)
    how: Any = {"precision": options.precision, "compile": options.compile, "engines": engine or None}
    result = run_bench(Encoder(model, **vars(plain)).model, **how, batches=counts, rounds=rounds, image=image)
    print(json.dumps(result.to_json()) if as_json else result)
    if csv is not None:
        with open_table(csv, {}) as write:
            write(result.rows())
        print_status(f"wrote {csv}")


def optimize(
    ctx: typer.Context,
    source: opt.Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder of the new model; for int8, a .onnx file.")],
    calibrate: Annotated[str, option("DATA", "Images to fit on, and to measure the loss; labels are not needed.")],
    max_loss: Annotated[float, MAX_LOSS] = 0.5,
    only: Annotated[Literal["int8", "merge", "cascade"] | None, ONLY] = None,
    as_json: Annotated[bool, flag("--json", "Print the measurements as one JSON object.")] = False,
    images: Annotated[int, IMAGES] = 1000,
    minutes: Annotated[float, MINUTES] = 7.0,
    evaluate: Annotated[str | None, EVALUATE] = None,
    engine: Annotated[Literal["onnxruntime", "openvino"], INT8_ENGINE] = "onnxruntime",
    weight_bits: Annotated[int | None, WEIGHT_BITS] = None,
    tome_r: Annotated[Any, TOME_R] = None,
    image_size: Annotated[Any, FIRST_SIZE] = None,
    split: Annotated[str | None, option("NAME", "Use only this split of --calibrate.", panel=TOKENS)] = None,
    batch_size: Annotated[int, SPEED_BATCH] = 16,
    num_heads: opt.NumHeads = None,
) -> None:
    """Make a model faster, at a loss of at most --max-loss accuracy.

    Engines, int8 and token merging are measured on this machine; DST has report.html with speed against loss. With
    --only, one technique is applied. int8: a .onnx file whose most sensitive layers stay float; nothing is written if
    the loss exceeds --max-loss or float is as fast. merge: adaptive token merging, R tokens per layer on average, more
    in images with similar patches. cascade: a cheap first pass, which uses --image-size or merges --tome-r tokens, and
    a second, full pass for images on which it is not confident.
    """
    check_used(ctx, only)
    import_torch()
    loss: Any = {"max_loss": max_loss}
    if only in ("merge", "cascade"):
        from vitruvian.compress.fewer_tokens import fit_cascade, fit_merging
        from vitruvian.weights.load import locate
        from vitruvian.weights.save import check_other

        check_other(Path(destination).expanduser(), locate(source))
        check_new(destination)
        model = vt.load(source, num_heads=num_heads)
        if only == "merge":
            model = fit_merging(model, calibrate, tome_r, split=split)
            thresholds = model.config.tome_thresholds  # type: ignore[union-attr]
            text = f"thresholds of the layers: {', '.join(f'{value:.3f}' for value in thresholds)}"
            facts: dict[str, Any] = {"thresholds": list(thresholds)}
        else:
            follow = partial(track, label="images")
            first_pass = {"image_size": image_size, "tome_r": tome_r or 0}
            fit = fit_cascade(model, calibrate, **first_pass, **loss, split=split, track=follow)
            model.meta = model.meta.replace(cascade=fit.cascade)
            text, facts = str(fit), fit.to_json()
        vt.save(model, destination)
        print(json.dumps(facts) if as_json else f"{text}\nwrote {destination}")
        return
    fitting: Any = {"calibrate": calibrate, "batch_size": batch_size, "num_heads": num_heads} | loss
    result: Any
    if only == "int8":
        int8: Any = {"evaluate": evaluate, "engine": engine, "weight_bits": weight_bits}
        result = vt.quantize(source, destination, **fitting, **int8)
    else:
        result = vt.optimize(source, destination, **fitting, images=images, minutes=minutes)
    print(json.dumps(result.to_json()) if as_json else f"{result}\nwrote {result.path}")


def check_used(ctx: typer.Context, only: str | None) -> None:
    """Raise for options that have no effect with this --only, and for a required option that is missing."""
    needed = NEEDED.get(only or "")
    if needed is not None and ctx.params[needed] is None:
        raise typer.BadParameter(f"--only {only} needs {flag_of(needed)}")
    for name in sorted(set().union(*USED.values()) - USED[only or ""]):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            ways = [f"--only {kind}" if kind else "the search" for kind, names in USED.items() if name in names]
            beside = f"with --only {only}" if only else "without --only"
            raise typer.BadParameter(f"{flag_of(name)} has no effect {beside}; it is for {' and '.join(ways)}")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
