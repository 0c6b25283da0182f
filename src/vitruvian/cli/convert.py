"""`vit convert`: weights from one family to another, with proof."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from vitruvian.cli.options import Heads, ImageSize
from vitruvian.cli.start import quick_imports
from vitruvian.progress import tell


class WritableFamily(StrEnum):
    """The families that can be written."""

    NATIVE = "native"
    GOOGLE = "google"
    TIMM = "timm"
    TORCHVISION = "torchvision"
    HUGGINGFACE = "huggingface"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a folder or a published name.")],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="A folder for native and huggingface, else a file: .npz (google), .safetensors (timm), .pth.",
        ),
    ],
    to: Annotated[WritableFamily, typer.Option(help="The family to write.")],
    heads: Heads = None,
    image_size: ImageSize = None,
    patch_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Resample the patch embedding to this side.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Put a new head of zeros for N classes; 0 leaves it out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as one JSON object.")] = False,
) -> None:
    """Convert weights to another family and prove that they answer the same.

    What was written is read back and compared with the source on a random batch; the certificate with the
    largest difference is printed and saved beside the weights.
    """
    with quick_imports():
        from vitruvian.weights.convert import convert as convert_weights

    certificate = convert_weights(
        source,
        destination,
        to=to.value,
        heads=heads,
        image_size=image_size,
        patch_size=patch_size,
        classes=classes,
        progress=lambda step: tell(f"{step} ..."),
    )
    print(json.dumps(certificate.to_json()) if as_json else f"{certificate}\nwrote {certificate.destination}")
