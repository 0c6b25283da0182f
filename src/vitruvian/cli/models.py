"""`vit models`, `vit convert` and `vit export`: the known models, and their weights in other formats."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitruvian.cli.options import ImageSize, Labels, NumHeads, Source, Template, json_option, note_replaced
from vitruvian.cli.process import quick_imports
from vitruvian.progress import print_status
from vitruvian.text import table

if TYPE_CHECKING:
    from vitruvian.catalog import Published

WritableFamily = Literal["native", "google", "timm", "torchvision", "huggingface"]
HEADINGS = ("model", ">parameters", ">multiply-adds", ">input", "published weights")
WEIGHTS_HEADINGS = ("weights", "model", "family", ">input", ">classes", "trained on")


class GraphFormat(StrEnum):
    """Formats of exported graphs."""

    ONNX = "onnx"
    OPENVINO = "openvino"
    TORCH = "torch"


def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, such as B/16, augreg or dinov2.")] = "",
    as_json: Annotated[bool, json_option(" per model (JSON Lines)")] = False,
) -> None:
    """List models: parameters, multiply-adds, published weights.

    With a PATTERN, all matching published names are listed; `--model` accepts these names.
    """
    matches = find_models(pattern)
    if as_json:
        for name, weights in matches.items():
            print(json.dumps(as_object(name, weights)))
        return
    print(table(HEADINGS, [as_row(name, weights) for name, weights in matches.items()]))
    published = [row for weights in matches.values() for row in weights]
    if pattern and published:
        rows = [
            (row.name, row.variant, row.family, str(row.image_size), str(row.classes or "-"), row.note)
            for row in published
        ]
        print("\n" + table(WEIGHTS_HEADINGS, rows))
    elif not pattern:
        print("\n`vit models PATTERN` lists weights by name, for instance `vit models B/16`.")


def find_models(pattern: str) -> dict[str, list[Published]]:
    """Matching models with their published weights: all weights if the model's name matches, else those that match."""
    from vitruvian.catalog import PUBLISHED, VARIANTS, canonical

    weights: dict[str, list[Published]] = {name: [] for name in VARIANTS}
    for row in PUBLISHED.values():
        weights[row.variant].append(row)
    part = pattern.lower()
    matches = {}
    for name, rows in weights.items():
        matching_rows = [row for row in rows if any(part in alias.lower() for alias in (row.name, *row.aliases))]
        if part in name.lower():
            matches[name] = rows
        elif matching_rows:
            matches[name] = matching_rows
    if not matches:
        name, _ = canonical(pattern)
        matches[name] = weights[name]
    return matches


def as_object(name: str, weights: list[Published]) -> dict[str, Any]:
    from vitruvian.catalog import VARIANTS
    from vitruvian.cost import multiply_adds, parameters

    config = VARIANTS[name]
    return {
        "name": name,
        "parameters": parameters(config),
        "multiply_adds": multiply_adds(config),
        "image_size": config.image_size,
        "published": [
            {"name": row.name, "family": row.family, "image_size": row.image_size, "classes": row.classes}
            for row in weights
        ],
    }


def as_row(name: str, weights: list[Published]) -> tuple[str, ...]:
    facts = as_object(name, weights)
    rows, columns = facts["image_size"]
    more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
    return (
        name,
        f"{facts['parameters'] / 1e6:.1f} M",
        f"{facts['multiply_adds'] / 1e9:.2f} G",
        f"{rows}x{columns}",
        f"{weights[0].name}{more}" if weights else "-",
    )


def convert(
    source: Source,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="A folder for native, huggingface and timm, or a file: .npz (google), .safetensors (timm), .pth.",
        ),
    ],
    to: Annotated[WritableFamily, typer.Option(help="Format to write.")] = "native",
    labels: Labels = None,
    template: Template = None,
    num_heads: NumHeads = None,
    image_size: ImageSize = None,
    patch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Resample the patch embedding to this patch size.")
    ] = None,
    num_classes: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Replace the head by a zero-initialized one; 0 removes it."),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Store matrices in float16: half the size.")] = False,
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Architecture of SRC, such as ViT-B/16, if it is a bare state dict."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object.")] = False,
) -> None:
    """Convert weights to another format, and compare the outputs.

    The written weights are read back and compared with the source on a random batch; a certificate with the largest
    difference is printed and saved beside the weights. With --labels, the texts become the head of a CLIP or SigLIP:
    an ordinary classifier that no longer needs its text tower.
    """
    with quick_imports():
        from vitruvian.weights.convert import convert as convert_weights
        from vitruvian.weights.zero_shot import parse_labels

    note_replaced(destination)
    certificate = convert_weights(
        source,
        destination,
        to=to,
        labels=None if labels is None else parse_labels(labels),
        template=template,
        num_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
        num_classes=num_classes,
        half=half,
        config=config,
        progress=lambda step: print_status(f"{step} ..."),
    )
    print(json.dumps(certificate.to_json()) if as_json else f"{certificate}\nwrote {certificate.destination}")


def export(
    source: Source,
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="An .onnx file, a folder for openvino, or a .pt2 file for torch.")
    ],
    to: Annotated[GraphFormat, typer.Option(help="Format to write.")] = GraphFormat.ONNX,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="Fixed batch size [default: dynamic]."),
    ] = None,
    image_size: ImageSize = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Accept any image size; the graph resizes the position embedding.")
    ] = False,
    num_heads: NumHeads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as one JSON object.")] = False,
) -> None:
    """Write a model as ONNX, OpenVINO or a torch.export program.

    The graph is run at several shapes and compared with the model before anything is written. It contains
    preprocessing and labels, so that `vit predict --model model.onnx` works.
    """
    with quick_imports():
        from vitruvian.engines.export import export as export_model

    note_replaced(destination)
    print_status("tracing the model and comparing the graph with it ...")
    certificate = export_model(
        source,
        destination,
        to=to.value,
        batch_size=batch_size,
        image_size=image_size,
        dynamic_size=dynamic_size,
        num_heads=num_heads,
    )
    print(json.dumps(certificate.to_json()) if as_json else f"{certificate}\nwrote {certificate.path}")
