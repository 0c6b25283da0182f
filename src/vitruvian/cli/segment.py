"""`vit segment`: train a segmenter on a few masks, or segment images with one."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import check_new, finish, flag, import_torch, match_value, option, split_names
from vitruvian.progress import print_notes, print_status, track
from vitruvian.text import printable, table


def parse_layers(text: str) -> tuple[int, ...]:
    match_value(r"-?\d{1,4}(\s*,\s*-?\d{1,4})*", text, "not a list of layers such as 5,8,11")
    return tuple(map(int, text.split(",")))


IMAGES = typer.Argument(metavar="IMAGES", help="Images, or folders of images.", show_default=False)
MODEL = option("MODEL", f"Weights to train on: {opt.WEIGHTS}. Or a segmenter, to use it.", "--model", "-m")
MASKS = option("MASKS", "Train on these: a folder of PNG masks called like the images, or COCO polygons (.json).")
CLASSES = option("NAMES", "Classes of PNG masks: background,cat; of colored masks: background=#000000,cat=#ff8800.")
LAYERS = option("N,N", "Layers that the head reads [default: at half, three quarters, the end].", parser=parse_layers)
TILE = option("PIXELS", "Cut larger images into overlapping tiles of this side [default: resize].", min=16)


def segment(
    paths: Annotated[list[str], IMAGES],
    model: Annotated[str, MODEL],
    out: Annotated[Path, option("DIR", "Folder of the new segmenter, or of the predictions.", file_okay=False)],
    masks: Annotated[Path | None, MASKS] = None,
    classes: Annotated[str | None, CLASSES] = None,
    layers: Annotated[Any, LAYERS] = None,
    tile: Annotated[int | None, TILE] = None,
    image_size: opt.ImageSize = None,
    device: opt.Device = "auto",
    as_json: Annotated[bool, flag("--json", "Print JSON: the measurement, or one object per image.")] = False,
) -> None:
    """Give each pixel a class, by a head that a few masks train.

    With --masks, it trains and measures a segmenter; otherwise it uses the one that --model names.
    """
    import_torch()
    from vitruvian.data.folder import find_images

    settings_file = vt.Segmenter.SETTINGS
    is_segmenter = (Path(model).expanduser() / settings_file).is_file()
    if is_segmenter is (masks is not None):
        reason = "a segmenter; --masks needs the weights of a ViT" if masks else "no segmenter; --masks trains one"
        raise typer.BadParameter(f"{model} is {reason}", param_hint="--model")
    if not (out / (settings_file if masks else "overlays")).exists():  # from an earlier run, which is replaced
        check_new(out, "choose another folder")
    if masks is None:
        given = {"--classes": classes, "--layers": layers, "--tile": tile, "--image-size": image_size}
        if stored := [name for name, value in given.items() if value is not None]:
            raise typer.BadParameter("applies to training; the segmenter has its own", param_hint=stored[0])
        segment_paths(vt.Segmenter.load(model, device=device), find_images(paths), out, as_json=as_json)
        return
    settings: Any = {"classes": split_names(classes or ""), "layers": layers or (), "tile": tile, "device": device}
    follow = partial(track, label="images")
    trained = vt.train_segmenter(find_images(paths), masks, model, image_size=image_size, track=follow, **settings)
    trained.save(out)
    if as_json:
        print(json.dumps(trained.to_json()))
    elif trained.predictions:
        rows = [(name, f"{value:.1f}", "{:.1f} to {:.1f}".format(*ends)) for name, value, ends in trained.iou()]
        print(table(("class", ">IoU, %", "95% interval"), rows))
        curve = ", ".join(f"{value:.1f} with {count}" for count, value in trained.curve.items())
        print(f"mean IoU by masks to train on: {curve}")
    print_notes(trained.notes)
    print_status(f"wrote the segmenter and its report to {out}")


def segment_paths(segmenter: "vt.Segmenter", images: list[str], out: Path, *, as_json: bool) -> None:
    """Segment the images, and print the shares of the classes and the mask of each."""
    from vitruvian.explain.segment import segment_images

    failed = 0
    for found in track(segment_images(segmenter, images, out), len(images), "images"):
        failed += "error" in found
        if as_json:
            print(json.dumps(found), flush=True)
        elif "error" in found:
            print_status(f"error: {found['error']}")
        else:
            shares = ", ".join(f"{printable(name)} {share:.1%}" for name, share in found["shares"].items() if share)
            print(f"{printable(found['path'])}: {shares}; {printable(found['mask'])}", flush=True)
    finish(failed, len(images))
