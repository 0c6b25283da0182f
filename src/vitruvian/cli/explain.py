"""`vit explain`: what a model looks at, and what it has learned."""

import json
import typing
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import vitruvian as vt
from vitruvian.cli import options as opt
from vitruvian.cli.options import expand_options, finish, flag, import_torch, match_value, option
from vitruvian.progress import print_status, track
from vitruvian.text import printable

if TYPE_CHECKING:
    from vitruvian.explain import Explained
    from vitruvian.model.build import Model

MapKind = StrEnum("MapKind", "gradient rollout attention label pca")  # typer has no lists of Literal


def parse_patch(text: str) -> tuple[int, int]:
    match = match_value(r"(\d{1,4})\s*,\s*(\d{1,4})", text, "not ROW,COLUMN such as 7,3")
    return int(match[1]), int(match[2])


PATHS = typer.Argument(metavar="IMAGES", help="Images, or folders of images.", show_default=False)
MAPS = typer.Option("--map", help="Compute only this map; repeatable [default: all but label and pca].")
TARGET = option("NAME", "Explain this class, a label or an index [default: the prediction].", "--class")
LAYER = option("N", "Layer of the raw attention, from 0 [default: -1, the last], or of pca [default: at two thirds].")
PATCH = option("R,C", "Raw attention of this patch [default: of the class token].", parser=parse_patch)
LABELS = option("NAMES", "Draw where each of these is, by a CLIP or SigLIP: a list, or a file with one per line.")
DELETION = flag("--deletion", "Score the maps by deletion curves, which remove their top patches.")
FIGURES = flag("--figures", "Plot filters, position similarity and attention distance of the model.")
RECONSTRUCT = "Mask this fraction of the patches and reconstruct them with an MAE and its decoder."


@expand_options
def explain(
    options: opt.ModelOptions,
    paths: Annotated[list[str] | None, PATHS] = None,
    model: opt.DefaultModel = None,
    out: Annotated[Path, option("DIR", "Output folder.")] = Path("explained"),
    maps: Annotated[list[MapKind] | None, MAPS] = None,
    labels: Annotated[str | None, LABELS] = None,
    template: opt.Template = None,
    target: Annotated[str, TARGET] = "",
    top: Annotated[int, option("N", "Maps of gradient and label for the N best predictions.", min=1)] = 1,
    layer: Annotated[int | None, LAYER] = None,
    head: Annotated[int | None, option("N", "Head of the raw attention [default: the mean of all].", min=0)] = None,
    patch: Annotated[Any, PATCH] = None,
    deletion: Annotated[bool, DELETION] = False,
    figures: Annotated[bool, FIGURES] = False,
    reconstruct: Annotated[float | None, option("SHARE", RECONSTRUCT, min=0.0, max=0.99)] = None,
    count: Annotated[int, option("N", "Number of images for the attention distance.", min=1)] = 128,
    as_json: Annotated[bool, flag("--json", "Print one JSON object per image or figure (JSON Lines).")] = False,
) -> None:
    """Show what a model looks at: overlays, arrays and a page.

    --engine, --precision and --compile are for predictions and deletion curves; maps use torch in float32. With
    --figures, it plots what the model has learned, as in the paper's Figure 7; the attention distance is averaged over
    the images, or over the built-in digits.
    """
    if not paths and not figures:
        raise typer.BadParameter("give images to explain, or --figures for the model itself", param_hint="IMAGES")
    if figures and options.engine not in ("torch", "auto"):
        raise typer.BadParameter("--figures needs torch: leave out --engine", param_hint="--engine")
    if figures and (maps or target or deletion or any(v is not None for v in (labels, layer, head, patch))):
        about_images = "--map, --labels, --class, --layer, --head, --patch and --deletion"
        raise typer.BadParameter(f"plots the model; {about_images} are about images", param_hint="--figures")
    if reconstruct is not None:
        reconstruct_paths(model, paths or [], out, share=reconstruct, as_json=as_json)
        return
    import_torch()
    from vitruvian.data.folder import find_images
    from vitruvian.explain.attention import require_vit
    from vitruvian.explain.explainer import METHODS, AnyMethod
    from vitruvian.inference import Encoder
    from vitruvian.weights.hub import default_source
    from vitruvian.weights.zero_shot import parse_labels

    images = find_images(paths or [])
    words = None if labels is None else parse_labels(labels)
    if words is not None:
        maps, top = maps or [MapKind.label], top if target or top > 1 else len(words)
    methods = tuple(method for method in typing.get_args(AnyMethod) if method in maps) if maps else METHODS
    of_attention: Any = {"layer": layer, "head": head, "patch": patch}
    settings = vt.MapSettings(methods=methods, target=target, top=top, deletion=deletion, **of_attention)
    source = default_source() if model is None else model
    if words is None and template is None:
        encoder = Encoder(source, **vars(options))
    else:
        encoder = vt.Classifier(source, labels=words, template=template, **vars(options))
    if figures:
        plot_figures(require_vit(encoder.model), images, out, count=count, device=encoder.device, as_json=as_json)
    else:
        explainer = vt.Explainer(encoder.model, settings, device=encoder.device, engine=encoder.engine)
        if encoder.model.meta.preprocess.is_stored:
            first = "the first three channels" if encoder.model.config.in_channels > 2 else "the first channel"
            print_status(f"note: images are shown with {first}, each from its smallest to its largest value")
        explain_paths(explainer, images, out, as_json=as_json)


def reconstruct_paths(model: str | None, paths: list[str], out: Path, *, share: float, as_json: bool) -> None:
    """Draw each image masked, reconstructed and original, and print the files."""
    if model is None:
        raise typer.BadParameter("give the weights: --model facebook/vit-mae-base", param_hint="--reconstruct")
    import_torch()
    from vitruvian.data.folder import find_images
    from vitruvian.explain.reconstruct import reconstruct_images
    from vitruvian.weights.load import load_autoencoder

    failed = 0
    for name, result in reconstruct_images(load_autoencoder(model), find_images(paths), out, share=share):
        failed += isinstance(result, str)
        if as_json:
            print(json.dumps({"path": name, "error" if isinstance(result, str) else "file": str(result)}), flush=True)
        elif isinstance(result, str):
            print_status(f"error: {result}")
        else:
            print(f"{name}: {result}", flush=True)
    finish(failed)


def plot_figures(model: "Model", images: list[str], out: Path, *, count: int, device: str, as_json: bool) -> None:
    """Plot the figures, and print their files, or why there is none."""
    from vitruvian.explain.figures import FIGURES_PAGE, draw_figures

    follow = partial(track, label="attention distance")
    unread: tuple[str, ...] = ()
    for figure, paths in draw_figures(model, images, out, count=count, device=device, follow=follow):
        if as_json:
            print(json.dumps({"figure": figure.name, "files": [str(path) for path in paths], "note": figure.note}))
        else:
            print(f"{figure.title}: {', '.join(map(str, paths)) or 'no figure'}\n  {figure.note}", flush=True)
        unread += figure.unreadable
    if not as_json:
        print(f"page: {out / FIGURES_PAGE}")
    for error in unread:
        print_status(f"error: {error}")
    finish(len(unread))


def explain_paths(explainer: "vt.Explainer", images: list[str], out: Path, *, as_json: bool) -> None:
    """Explain the images, and print the prediction and the files of each."""
    from vitruvian.explain.explainer import PAGE, explain_images

    failed = 0
    for explained in track(explain_images(explainer, images, out), len(images), "images"):
        failed += bool(explained.error)
        if as_json:
            print(json.dumps(explanation_json(explained)), flush=True)
            continue
        if explained.error:
            print_status(f"error: {explained.error}")
            continue
        best = explained.predictions[0] if explained.predictions else None
        rejected = "rejected, nearest " if explained.rejected else ""
        prediction_text = f": {rejected}{printable(best.label)} {best.text}" if best else ""
        print(f"{printable(explained.path)}{prediction_text}")
        for map in explained.maps:
            curve = explained.curves.get(map.name)
            score = f" (deletion {curve.area:.3f}, random {explained.curves['random'].area:.3f})" if curve else ""
            print(f"  {printable(map.title)}: {printable(str(explained.files[map.name]))}{score}", flush=True)
    if not as_json and failed < len(images):
        print(f"page: {out / PAGE}")
    finish(failed, len(images))


def explanation_json(explained: "Explained") -> dict[str, object]:
    """The object that `--json` prints for an image."""
    if explained.error:
        return {"path": explained.path, "error": explained.error}
    return {
        "path": explained.path,
        **({"rejected": True} if explained.rejected else {}),
        "predictions": [prediction.to_json() for prediction in explained.predictions],
        "maps": [
            {"map": item.name, "title": item.title, "class": item.index, "file": str(explained.files[item.name])}
            for item in explained.maps
        ],
        "arrays": str(explained.files["arrays"]),
        "deletion": {name: curve.area for name, curve in explained.curves.items()},
    }
