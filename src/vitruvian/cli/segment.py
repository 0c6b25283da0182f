"""`vit segment` and `vit anomaly`: what patch tokens show, after a few masks or good images."""

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
    polygons: Annotated[bool, flag("--polygons", "Also write the predictions as COCO polygons.")] = False,
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
    if masks and polygons:
        raise typer.BadParameter("is about predictions; leave out --masks", param_hint="--polygons")
    if not (out / (settings_file if masks else "overlays")).exists():  # from an earlier run, which is replaced
        check_new(out, "choose another folder")
    if masks is None:
        training_options = {"--classes": classes, "--layers": layers, "--tile": tile, "--image-size": image_size}
        if stored := [name for name, value in training_options.items() if value is not None]:
            raise typer.BadParameter("applies to training; the segmenter has its own", param_hint=stored[0])
        segment_paths(
            vt.Segmenter.load(model, device=device), find_images(paths), out, polygons=polygons, as_json=as_json
        )
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


def segment_paths(segmenter: "vt.Segmenter", images: list[str], out: Path, *, polygons: bool, as_json: bool) -> None:
    """Segment the images, and print the shares of the classes and the mask of each."""
    from vitruvian.explain.segment import segment_images

    failed = 0
    for result in track(segment_images(segmenter, images, out, polygons=polygons), len(images), "images"):
        failed += "error" in result
        if as_json:
            print(json.dumps(result), flush=True)
        elif "error" in result:
            print_status(f"error: {result['error']}")
        else:
            shares = ", ".join(f"{printable(name)} {share:.1%}" for name, share in result["shares"].items() if share)
            print(f"{printable(result['path'])}: {shares}; {printable(result['mask'])}", flush=True)
    finish(failed, len(images))


GOOD = option("DIR", "Train on the good images in this folder; repeatable.", "--good")
TRUTH = option("MASKS", "Measure on these: PNG masks, not black where IMAGES have an anomaly.", exists=True)
KEPT = option("N", "Maximum number of patches of good images to keep [default: 10000].", min=1)
FALSE_ALARMS = option("SHARE", "Fraction of good images above the threshold [default: 0.05].", min=0.0, max=1.0)
COMPARED = option("N,N", "Layers to compare [default: at half, three quarters, the end].", parser=parse_layers)


def anomaly(
    model: Annotated[str, option("MODEL", f"Weights: {opt.WEIGHTS}. Or a detector, to use it.", "--model", "-m")],
    out: Annotated[Path, option("DIR", "Folder of the new detector, or of the results.", file_okay=False)],
    paths: Annotated[list[str] | None, IMAGES] = None,
    good: Annotated[list[str] | None, GOOD] = None,
    masks: Annotated[Path | None, TRUTH] = None,
    layers: Annotated[Any, COMPARED] = None,
    tile: Annotated[int | None, TILE] = None,
    patches: Annotated[int | None, KEPT] = None,
    false_alarms: Annotated[float | None, FALSE_ALARMS] = None,
    image_size: opt.ImageSize = None,
    device: opt.Device = "auto",
    as_json: Annotated[
        bool, flag("--json", "Print JSON: the detector, or one object per image and the measurement.")
    ] = False,
) -> None:
    """Find what good images do not show, without examples of it.

    With --good, it makes a detector; otherwise it scores IMAGES with the one that --model names.
    """
    training = {
        "layers": layers,
        "tile": tile,
        "patches": patches,
        "false_alarms": false_alarms,
        "image_size": image_size,
    }
    training = {name: value for name, value in training.items() if value is not None}
    if good and (paths or masks):
        raise typer.BadParameter("makes a detector; score IMAGES with it in a second command", param_hint="--good")
    if not good and not paths:
        raise typer.BadParameter("give images to score, or --good to make a detector", param_hint="IMAGES")
    if not good and training:
        flags = f"--{next(iter(training)).replace('_', '-')}"
        raise typer.BadParameter("applies to --good; the detector has its own", param_hint=flags)
    import_torch()
    from vitruvian.data.folder import find_images
    from vitruvian.explain.anomaly import Anomalies, find_anomalies, find_masks, measure

    settings_file = vt.AnomalyDetector.SETTINGS
    if (Path(model).expanduser() / settings_file).is_file() is bool(good):
        reason = "a detector; --good needs the weights of a ViT" if good else "no detector; --good makes one"
        raise typer.BadParameter(f"{model} is {reason}", param_hint="--model")
    if not (out / (settings_file if good else "overlays")).exists():  # from an earlier run, which is replaced
        check_new(out, "choose another folder")
    follow = partial(track, label="images")
    if good:
        trained = vt.train_anomaly_detector(find_images(good), model, device=device, track=follow, **training)
        trained.save(out)
        detector, above = trained.detector, sum(finding.is_anomalous for finding in trained.findings)
        text = f"threshold {detector.threshold:.4f}: {above} of {len(trained.findings)} good images are above it"
        print(json.dumps(trained.to_json()) if as_json else f"{text}; {len(detector.bank):,} patches kept")
        print_notes(trained.notes)
        print_status(f"wrote the detector and its report to {out}")
        return
    detector, images, findings = vt.AnomalyDetector.load(model, device=device), find_images(paths or []), []
    if masks is not None:
        find_masks([Path(image) for image in images], masks)  # raises if they do not fit, before anything is written
    for finding in track(find_anomalies(detector, images, out), len(images), "images"):
        findings.append(finding)
        if as_json:
            print(json.dumps(finding.to_json()), flush=True)
        elif finding.error:
            print_status(f"error: {finding.error}")
        else:
            verdict = ": anomalous" if finding.is_anomalous else ""
            print(f"{printable(finding.path)}: {finding.score:.4f}{verdict}", flush=True)
    anomalies = Anomalies(detector=detector, findings=findings, measured=measure(findings, masks))
    anomalies.write(out)
    if anomalies.measured and as_json:
        print(json.dumps(anomalies.measured))
    elif anomalies.measured:
        names = {"image_auroc": "image AUROC", "pixel_auroc": "pixel AUROC", "pro": "PRO"}
        values = [f"{name} {anomalies.measured[key]:.1f} %" for key, name in names.items() if key in anomalies.measured]
        if "interval" in anomalies.measured:
            values[0] += " (95% interval: {:.1f} to {:.1f})".format(*anomalies.measured["interval"])
        print(", ".join(values))
    print_status(f"wrote the maps and the report to {out}")
    finish(sum(bool(finding.error) for finding in findings), len(images))
