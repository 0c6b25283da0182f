"""`vit convert`: weights from one family to another, with proof."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from vitruvian.cli.options import Heads, ImageSize, Labels, Template
from vitruvian.cli.start import note_replaced, quick_imports
from vitruvian.progress import print_status

WritableFamily = Literal["native", "google", "timm", "torchvision", "huggingface"]


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a folder or a published name.")],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="A folder for native, huggingface and timm, or a file: .npz (google), .safetensors (timm), .pth.",
        ),
    ],
    to: Annotated[WritableFamily, typer.Option(help="The family to write.")] = "native",
    labels: Labels = None,
    template: Template = None,
    num_heads: Heads = None,
    image_size: ImageSize = None,
    patch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Resample the patch embedding to this side.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Put a new head of zeros for N classes; 0 leaves it out.")
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Store matrices in float16: half the size.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model, such as ViT-B/16, whose bare state dict SRC is.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object.")] = False,
) -> None:
    """Convert weights to another family, and compare the answers.

    What was written is read back and compared with the source on a random batch; the certificate with the
    largest difference is printed and saved beside the weights. With --labels, the words become the head of a CLIP or
    SigLIP: an ordinary classifier, which needs its text tower no more.
    """
    with quick_imports():
        from vitruvian.weights.convert import convert as convert_weights
        from vitruvian.weights.words import read_words

    note_replaced(destination)
    certificate = convert_weights(
        source,
        destination,
        to=to,
        labels=None if labels is None else read_words(labels),
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
