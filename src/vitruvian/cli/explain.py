"""`vit explain`: what does the model look at, and what has it learned to see?"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vitruvian.cli.options import DefaultModel, Device, Engine, EngineChoice, Heads, ImageSize, TomeR, tome_of
from vitruvian.cli.start import quick_imports
from vitruvian.progress import print_status, track

if TYPE_CHECKING:
    from vitruvian.engines.runtimes import EngineName
    from vitruvian.explain import MapSettings, Written
    from vitruvian.model.build import Model


class MapKind(StrEnum):
    """A map to make, as typer takes several."""

    GRADIENT = "gradient"
    ROLLOUT = "rollout"
    ATTENTION = "attention"


class Patch(NamedTuple):
    """Row and column of a patch, as a type that typer does not take for two arguments."""

    row: int
    column: int


def parse_patch(text: str) -> Patch:
    match = re.fullmatch(r"(\d{1,4}),(\d{1,4})", text.replace(" ", ""))
    if match is None:
        raise typer.BadParameter(f"{text!r} is not ROW,COLUMN such as 7,3")
    return Patch(int(match[1]), int(match[2]))


Maps = Annotated[
    list[MapKind] | None,
    typer.Option("--map", help="Make only this map; may be given again. Else all that the model has."),
]
Layer = Annotated[
    int | None, typer.Option(metavar="N", help="Layer of the raw attention, from 0; -1 is the last. Else the last.")
]
Head = Annotated[int | None, typer.Option(min=0, metavar="N", help="Head of the raw attention. Else the mean of all.")]
FromPatch = Annotated[
    Patch | None,
    typer.Option(parser=parse_patch, metavar="R,C", help="Raw attention from this patch. Else from the class token."),
]
Target = Annotated[
    str, typer.Option("--class", metavar="NAME", help="Explain this class, by label or number. Else the answer.")
]
Reconstruct = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=0.99,
        metavar="SHARE",
        help="Of MAE with its decoder: hide this share of the patches and fill it in.",
    ),
]
Figures = Annotated[
    bool, typer.Option("--figures", help="Draw filters, positions and attention distance of the model instead.")
]


def explain(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGES", help="Images, or folders of them.", show_default=False)
    ] = None,
    model: DefaultModel = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write into.")] = Path("explained"),
    maps: Maps = None,
    target: Target = "",
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="Gradient-weighted attention of the N best answers.")
    ] = 1,
    layer: Layer = None,
    head: Head = None,
    patch: FromPatch = None,
    deletion: Annotated[
        bool, typer.Option("--deletion", help="Score the maps by deletion curves: remove their top patches.")
    ] = False,
    figures: Figures = False,
    reconstruct: Reconstruct = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Images for the attention distance.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each image or figure.")] = False,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    device: Device = "cpu",
    tome_r: TomeR = None,
    engine: Engine = EngineChoice.TORCH,
) -> None:
    """Show what a model looks at: overlays, arrays and a page.

    --engine computes the answers and deletion curves; maps are always torch's. With --figures, what the model has
    learned, as in the paper's Figure 7; attention distance is then taken over the images, or over the built-in digits.
    """
    if not paths and not figures:
        raise typer.BadParameter("give images to explain, or --figures for the model itself", param_hint="IMAGES")
    if figures and engine != EngineChoice.TORCH:
        raise typer.BadParameter("--figures need torch: leave out --engine", param_hint="--engine")
    if figures and (maps or target or deletion or any(v is not None for v in (layer, head, patch))):
        about_images = "--map, --class, --layer, --head, --patch and --deletion"
        raise typer.BadParameter(f"this is about the model, and {about_images} about images", param_hint="--figures")
    if reconstruct is not None:
        show_reconstructions(model, paths or [], out, share=reconstruct, as_json=as_json)
        return
    with quick_imports():
        from vitruvian.data.folder import find_images
        from vitruvian.explain import MapSettings
        from vitruvian.explain.explainer import METHODS
        from vitruvian.weights.hub import default_source
        from vitruvian.weights.load import load, with_merging

    images = find_images(paths or [])
    methods = tuple(method for method in METHODS if not maps or method in maps)
    settings = MapSettings(
        methods=methods, layer=layer, head=head, patch=patch, target=target, top=top, deletion=deletion
    )
    loaded = load(default_source() if model is None else model, num_heads=num_heads, image_size=image_size)
    counts = tome_of(tome_r)
    loaded = loaded if counts is None else with_merging(loaded, counts)
    if figures:
        show_figures(loaded, images, out, count=count, device=device, as_json=as_json)
    else:
        show_images(loaded, settings, images, out, device=device, engine=engine.value, as_json=as_json)


def show_reconstructions(model: str | None, paths: list[str], out: Path, *, share: float, as_json: bool) -> None:
    """Draw each image without hidden patches, filled in and whole, and tell where."""
    if model is None:
        raise typer.BadParameter("name the weights: --model facebook/vit-mae-base", param_hint="--reconstruct")
    with quick_imports():
        from vitruvian.data.folder import find_images
        from vitruvian.explain.reconstruct import reconstruct_images
        from vitruvian.weights.mae import load_autoencoder

    failed = 0
    for name, found in reconstruct_images(load_autoencoder(model), find_images(paths), out, share=share):
        failed += isinstance(found, str)
        if as_json:
            print(json.dumps({"path": name, "error" if isinstance(found, str) else "file": str(found)}), flush=True)
        elif isinstance(found, str):
            print_status(f"error: {found}")
        else:
            print(f"{name}: {found}", flush=True)
    if failed:
        raise typer.Exit(1)


def show_figures(model: Model, images: list[str], out: Path, *, count: int, device: str, as_json: bool) -> None:
    """Draw the figures and tell where they are, or why there is none."""
    from vitruvian.explain.run import FIGURES_PAGE, draw_figures

    follow = partial(track, label="attention distance")
    unread: tuple[str, ...] = ()
    for figure, paths in draw_figures(model, images, out, count=count, device=device, follow=follow):
        if as_json:
            print(json.dumps({"figure": figure.name, "files": [str(path) for path in paths], "note": figure.note}))
        else:
            print(f"{figure.title}: {', '.join(map(str, paths)) or 'no figure'}\n  {figure.note}", flush=True)
        unread += figure.unread
    if not as_json:
        print(f"page: {out / FIGURES_PAGE}")
    for error in unread:
        print_status(f"error: {error}")
    if unread:
        raise typer.Exit(1)


def show_images(
    model: Model, settings: MapSettings, images: list[str], out: Path, *, device: str, engine: EngineName, as_json: bool
) -> None:
    """Explain the images and tell of each what was answered and where its files are."""
    from vitruvian.explain.explainer import Explainer
    from vitruvian.explain.run import PAGE, explain_images

    explainer = Explainer(model, settings, device=device, engine=engine)
    failed = 0
    for written in track(explain_images(explainer, images, out), len(images), "images"):
        failed += bool(written.explained.error)
        show(written, as_json=as_json)
    if not as_json and failed < len(images):
        print(f"page: {out / PAGE}")
    if failed:
        if len(images) > 1:
            print_status(f"{failed} of {len(images)} images could not be read")
        raise typer.Exit(1)


def show(written: Written, *, as_json: bool) -> None:
    from vitruvian.text import printable

    explained = written.explained
    if as_json:
        print(json.dumps(as_object(written)), flush=True)
    elif explained.error:
        print_status(f"error: {explained.error}")
    else:
        best = explained.predictions[0] if explained.predictions else None
        none = "none of these, nearest " if explained.rejected else ""
        answer = f": {none}{printable(best.label)} {best.probability:.1%}" if best else ""
        print(f"{printable(explained.path)}{answer}")
        for each in explained.maps:
            curve = explained.curves.get(each.name)
            score = f" (deletion {curve.area:.3f}, random {explained.curves['random'].area:.3f})" if curve else ""
            print(f"  {printable(each.title)}: {printable(str(written.images[each.name]))}{score}", flush=True)


def as_object(written: Written) -> dict[str, object]:
    """What `--json` tells of an image."""
    explained = written.explained
    if explained.error:
        return {"path": explained.path, "error": explained.error}
    return {
        "path": explained.path,
        **({"rejected": True} if explained.rejected else {}),
        "predictions": [prediction.to_json() for prediction in explained.predictions],
        "maps": [
            {"map": each.name, "title": each.title, "class": each.index, "file": str(written.images[each.name])}
            for each in explained.maps
        ],
        "arrays": str(written.arrays),
        "deletion": {name: curve.area for name, curve in explained.curves.items()},
    }
