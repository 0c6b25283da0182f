"""A model as a graph that other runtimes execute, written only where it answers like the model."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitruvian.config import ViTConfig
from vitruvian.engines.layout import three_products
from vitruvian.engines.runtimes import BATCH_AXIS
from vitruvian.engines.sessions import open_session
from vitruvian.errors import ConversionError, UnknownNameError, argument, require
from vitruvian.files import atomic_path, check_writable
from vitruvian.model.build import Model
from vitruvian.model.positions import geometric_biases
from vitruvian.settings import BatchSize, Size, as_size, validate
from vitruvian.weights.description import Description
from vitruvian.weights.files import CARRIED
from vitruvian.weights.load import check_finite, load

Format = Literal["onnx", "openvino", "torch"]
Forward = Callable[[Tensor], Tensor]
TOLERANCE = 1e-4
"""Largest difference allowed, times the largest answer where that is above 1: float32 sums in another order."""
OPSET = 23
"""Of ONNX: the first with RMS norms and attention as operators; the latter is written for poolers alone, see layout."""
MAX_ONNX_BYTES = 2**31 - 2**24
"""An ONNX file is a protocol buffer, which holds at most 2 GiB."""
LARGEST_SIDE = 4096
"""Patches along a side, for graphs of any image size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Where a graph was written, and how it compares with its model."""

    path: str
    format: Format
    batch_size: int | None
    """None for any."""
    image_size: Size | None
    """None for any that the patches divide."""
    largest_difference: float
    largest_answer: float
    checked: tuple[tuple[int, ...], ...]
    """The shapes of pixels that were compared."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        size = "any size" if self.image_size is None else "x".join(map(str, self.image_size))
        batch = "any batch" if self.batch_size is None else f"batch {self.batch_size}"
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.checked)
        return (
            f"{self.format}: {batch}, {size}; largest difference "
            f"{self.largest_difference:.2g} among answers up to {self.largest_answer:.3g} (pixels {shapes})"
        )


def export(
    model: Model | str | Path,
    path: str | Path,
    *,
    to: Format = "onnx",
    batch_size: int | None = None,
    image_size: int | Size | None = None,
    dynamic_size: bool = False,
    num_heads: int | None = None,
) -> Exported:
    """Write a model, or weights by name or path, as a graph: normalized pixels to logits (features without a head).

    `onnx` is a file `.onnx`, `openvino` a folder with `model.xml`, `torch` a `torch.export` program `.pt2`. The batch
    is open unless given; with `dynamic_size`, so are rows and columns, and positions are resized inside the graph. What
    was written is run at several shapes before it takes its name. The file carries preprocessing and labels.
    """
    check_destination(Path(path).expanduser(), to)
    if isinstance(model, str | Path):
        model = load(model, num_heads=num_heads, image_size=image_size)
    validate("batch_size", BatchSize, 1 if batch_size is None else batch_size)
    if image_size is None and not dynamic_size:
        model.meta.preprocess.one_size(f"a graph without {argument('dynamic_size', True)}")
    size = as_size(model.config.image_size if image_size is None else image_size)
    view = model.meta.preprocess if image_size is None and dynamic_size else model.meta.preprocess.at(size)
    check_model(model, to, dynamic_size=dynamic_size)
    stride = model.config.stride if isinstance(model.config, ViTConfig) else 1
    with atomic_path(Path(path).expanduser()) as new, evaluating(model):
        with nullcontext() if to == "torch" else three_products(model):
            program = trace(model, size, batch_size=batch_size, stride=stride if dynamic_size else 0)
        described = Description(config=model.config, meta=model.meta.replace(preprocess=view, cascade=None))
        run = WRITERS[to](
            program, new, json.dumps(described.to_json()), "logits" if model.head is not None else "features"
        )
        sizes = [size] if not dynamic_size else [size, (size[0] + stride, 2 * stride), (3 * stride, size[1] + stride)]
        shapes = [
            (n, model.config.in_channels, *each) for each in sizes for n in ([batch_size] if batch_size else [1, 3])
        ]
        differences, answers = zip(*(compare(model, run, shape) for shape in shapes))
        if not max(differences) <= TOLERANCE * max(1.0, *answers):  # also refuses NaN
            raise ConversionError(
                f"{path}: not written, the {to} graph differs by {max(differences):.2g} where "
                f"{TOLERANCE * max(1.0, *answers):.2g} is allowed; please report this"
            )
    return Exported(
        path=str(path),
        format=to,
        batch_size=batch_size,
        image_size=None if dynamic_size else size,
        largest_difference=max(differences),
        largest_answer=max(answers),
        checked=tuple(shapes),
    )


def check_destination(path: Path, to: str) -> None:
    if to not in get_args(Format):
        raise UnknownNameError("format", to, get_args(Format), see="(onnx, openvino, torch)")
    suffix = {"onnx": ".onnx", "torch": ".pt2"}.get(to, "")
    if suffix and (path.suffix != suffix or path.is_dir()):
        raise ConversionError(f"{path}: a graph for {to} is a file that ends in {suffix}")
    if not suffix and (path.is_file() or path.suffix in (".xml", ".onnx", ".pt2")):
        raise ConversionError(f"{path}: a graph for {to} is a folder, give the name of a folder")
    check_writable(path)


def check_model(model: Model, to: str, *, dynamic_size: bool) -> None:
    """Refuse what cannot be exported, or not be checked."""
    if to == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, "onnx")
        if not fits_onnx(model):
            raise ConversionError(
                f"the weights take {float_bytes(model) / 2**30:.1f} GiB, an ONNX file at most 2",
                hint=f"use {argument('to', 'openvino')}",
            )
    elif to == "openvino":
        require("openvino", "openvino")
    check_finite(model, model.meta.origin or "the model", raises=ConversionError)
    if dynamic_size and (not isinstance(model.config, ViTConfig) or model.config.stem is not None):
        raise ConversionError(
            f"{argument('dynamic_size', True)} is for Vision Transformers without a stem; export one graph a size"
        )
    if dynamic_size and isinstance(model.config, ViTConfig) and model.config.trim:
        raise ConversionError(
            "images that the patches do not divide are trimmed by this model; export one graph a size"
        )
    if dynamic_size and isinstance(model.config, ViTConfig) and geometric_biases(model.config):
        raise ConversionError("relative biases that timm resizes need a known grid; export one graph a size")
    if isinstance(model.config, ViTConfig) and model.config.tome_thresholds:
        raise ConversionError("tome_thresholds give each image another number of tokens, a graph has one: set tome_r")
    if dynamic_size and isinstance(model.config, ViTConfig) and model.config.merges_tokens:
        raise ConversionError(f"{argument('dynamic_size', True)} has no meaning with tome_r; export one graph a size")
    if model.head is not None and not model.head.weight.any():
        raise ConversionError("the head is all zeros, so there is nothing to check a graph against; train it first")


def float_bytes(model: Model) -> int:
    return sum(value.numel() * 4 for value in model.state_dict().values())


def fits_onnx(model: Model) -> bool:
    """Whether one file can hold the weights."""
    return float_bytes(model) <= MAX_ONNX_BYTES


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Without gradients and dropout, and without what torch and its exporters say to developers."""
    training, loggers = (
        model.training,
        [logging.getLogger(name) for name in ("torch.__trace", "torch.onnx", "torch.export", "onnxscript")],
    )
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.eval()
            yield
    finally:
        model.train(training)
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def trace(model: Model, size: Size, *, batch_size: int | None, stride: int) -> ExportedProgram:
    """The model as a program; rows and columns are multiples of `stride`, or fixed where it is 0."""
    Dim = torch.export.Dim
    shape = [batch_size or 2, model.config.in_channels, *((3 * stride, 5 * stride) if stride else size)]
    device = next(model.parameters()).device
    open_axes: dict[int, Any] = {} if batch_size else {0: Dim("batch", min=1)}
    if stride:
        open_axes |= {axis: stride * Dim(name, min=2, max=LARGEST_SIDE) for axis, name in ((2, "rows"), (3, "columns"))}
    return torch.export.export(model, (torch.zeros(shape, device=device),), dynamic_shapes=(open_axes,))


def write_onnx(program: ExportedProgram, path: Path, carried: str, output: str) -> Forward:
    written = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["pixels"], output_names=[output], verbose=False
    )
    assert written is not None
    written.model.metadata_props[CARRIED] = carried
    name_batch(written.model.graph)
    written.save(str(path), external_data=False)
    return open_session(path, "onnxruntime")


def name_batch(graph: Any) -> None:
    """Call an open batch by its name, in place of the tracer's symbol."""
    symbol = graph.inputs[0].shape[0]
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values if not isinstance(symbol, int) else []:
        for axis, side in enumerate(value.shape or ()):
            if side == symbol:
                value.shape[axis] = BATCH_AXIS


def write_openvino(program: ExportedProgram, path: Path, carried: str, output: str) -> Forward:
    openvino = require("openvino", "openvino")
    with without_telemetry():
        graph = openvino.convert_model(program)
    given = program.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape
    graph.reshape([side if isinstance(side, int) else -1 for side in given])
    graph.inputs[0].get_tensor().set_names({"pixels"})
    graph.outputs[0].get_tensor().set_names({output})
    graph.set_rt_info(carried, [CARRIED])
    path.mkdir()
    openvino.save_model(graph, path / "model.xml", compress_to_fp16=False)
    return open_session(path / "model.xml", "openvino")


@contextmanager
def without_telemetry() -> Iterator[None]:
    """OpenVINO's converter reports each use to its makers, except where it believes to run in CI."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        os.environ.pop("CI")
        if before is not None:
            os.environ["CI"] = before


def write_program(program: ExportedProgram, path: Path, carried: str, output: str) -> Forward:
    torch.export.save(program, path, extra_files={f"{CARRIED}.json": carried})
    run: Forward = torch.export.load(path).module()
    return run


WRITERS = {"onnx": write_onnx, "openvino": write_openvino, "torch": write_program}


def compare(model: Model, run: Forward, shape: tuple[int, ...]) -> tuple[float, float]:
    """The largest difference from the model on random pixels, and its largest answer."""
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = model(pixels.to(next(model.parameters()).device)).cpu()
    return float((wanted - run(pixels)).abs().max()), float(wanted.abs().max())
