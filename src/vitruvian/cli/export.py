"""`vit export`: a model as a graph for other runtimes."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from vitruvian.cli.options import Heads, ImageSize
from vitruvian.cli.start import note_replaced, quick_imports
from vitruvian.progress import print_status


class GraphFormat(StrEnum):
    """What can be written."""

    ONNX = "onnx"
    OPENVINO = "openvino"
    TORCH = "torch"


def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Weights: a file, a folder or a published name.")],
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="A file .onnx, a folder for openvino, or a file .pt2 for torch.")
    ],
    to: Annotated[GraphFormat, typer.Option(help="What to write.")] = GraphFormat.ONNX,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, max=65_536, metavar="N", help="Fix the batch; else it is open.")
    ] = None,
    image_size: ImageSize = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Any image size; positions are resized inside the graph.")
    ] = False,
    num_heads: Heads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was checked as one JSON object.")] = False,
) -> None:
    """Write a model as ONNX, OpenVINO or a torch.export program.

    The graph is run at several shapes and compared with the model before anything is written. It carries preprocessing
    and labels, so that `vit predict --model model.onnx` works.
    """
    with quick_imports():
        from vitruvian.engines.export import export as export_model

    note_replaced(destination)
    print_status("tracing the model and comparing the graph with it ...")
    done = export_model(
        source,
        destination,
        to=to.value,
        batch_size=batch_size,
        image_size=image_size,
        dynamic_size=dynamic_size,
        num_heads=num_heads,
    )
    print(json.dumps(done.to_json()) if as_json else f"{done}\nwrote {done.path}")
