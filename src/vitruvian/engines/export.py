"""Export a model to a graph for other runtimes; the graph is written only if its outputs equal the model's."""

import dataclasses
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vitruvian.config import TOLERANCE, ViTConfig
from vitruvian.engines.graph import find_graph, open_graph, single_graph
from vitruvian.engines.runtimes import BATCH_AXIS, FEATURES, Session
from vitruvian.engines.web import check_page, copy_runtime, write_site
from vitruvian.errors import ConversionError, UnknownNameError, argument, require
from vitruvian.files import atomic_path, check_writable
from vitruvian.model.batching import eval_mode
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention
from vitruvian.model.positions import Offsets, geometric_biases
from vitruvian.model.vit import ViT
from vitruvian.settings import BatchSize, Record, Size, as_size, validate
from vitruvian.text import describe_error
from vitruvian.weights.checkpoint_files import METADATA_KEY, Description
from vitruvian.weights.load import check_finite, load, merged

Format = Literal["onnx", "openvino", "torch", "executorch", "web"]
Forward = Callable[[Tensor], Tensor]
EngineForward = Callable[..., Tensor]  # of pixels and the name of an output, by default the logits
OPSET = 23  # the first with RMSNormalization and Attention (we use the latter only in attention poolers)
MAX_ONNX_BYTES = 2**31 - 2**24  # an ONNX file is a protocol buffer, which holds at most 2 GiB
MAX_PATCHES = 4096  # maximum number of patches per side in a graph with dynamic image size


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported(Record):
    """Where a graph was written, and how its outputs compare with the model's."""

    path: str
    format: Format
    batch_size: int | None  # None for any
    image_size: Size | None  # None for any multiple of the patch size
    largest_difference: float
    largest_output: float
    checked: tuple[tuple[int, ...], ...]  # shapes of the pixels that were compared
    browser_difference: float | None = None  # of the probabilities of a photo in Chromium, if it is installed

    def __str__(self) -> str:
        size = "any image size" if self.image_size is None else "x".join(map(str, self.image_size))
        batch = "any batch size" if self.batch_size is None else f"batch size {self.batch_size}"
        shapes = ", ".join("x".join(map(str, shape)) for shape in self.checked)
        differ = "; in Chromium, probabilities differ by at most"
        browser = "" if self.browser_difference is None else f"{differ} {self.browser_difference:.2g}"
        return (
            f"{self.format}: {batch}, {size}; largest difference {self.largest_difference:.2g}, "
            f"largest output {self.largest_output:.3g} (pixels {shapes}){browser}"
        )


def export(
    model: Model | str | Path,
    path: str | Path,
    *,
    to: Format = "onnx",
    batch_size: int | None = None,
    image_size: int | Size | None = None,
    dynamic_size: bool = False,
    features: bool = False,
    num_heads: int | None = None,
    adapter: str | Path | None = None,
) -> Exported:
    """Export a model as a graph from normalized pixels to logits (to features if it has no head).

    The graph is run at several shapes and compared with the model before it is moved to `path`. The file contains
    preprocessing and labels, so that `vt.Classifier(path)` works.

    Args:
        model: A model, or a file, directory or published name to load.
        path: Where to write: a file `.onnx`, `.pt2` or `.pte`, or a directory for OpenVINO and the browser.
        to: `onnx`, `openvino` (a directory with `model.xml`), `torch` (a `torch.export` program), `executorch` (a
            program for phones), or `web` (a new folder with a page that runs the model in the browser, or the ONNX
            graph of `optimize`).
        batch_size: Fixed batch size; any if None, but 1 for ExecuTorch.
        image_size: Image size of the graph; the model's own if None.
        dynamic_size: Accept any image size; position embeddings are resized inside the graph.
        features: Add a second output `features`, the input of the head.
        num_heads: Number of attention heads, if the weight file does not store it.
        adapter: Folder of a LoRA adapter to apply to the loaded weights.

    Returns:
        What was written, with the largest difference from the model.

    Raises:
        ConversionError: The model cannot be exported, or the graph's outputs differ from the model's.
        MissingExtraError: The packages of the format are not installed.
    """
    out = Path(path).expanduser()
    check_destination(out, to)
    if to == "web":
        settings: dict[str, Any] = {"image_size": image_size, "dynamic_size": dynamic_size, "features": features}
        settings |= {"batch_size": batch_size, "num_heads": num_heads, "adapter": adapter}
        return export_site(model, out, settings)
    if isinstance(model, str | Path):
        model = load(model, num_heads=num_heads, image_size=image_size, adapter=adapter)
    model = merged(model)
    validate("batch_size", BatchSize, 1 if batch_size is None else batch_size)
    if to == "executorch":
        batch_size = batch_size or 1
    if image_size is None and not dynamic_size:
        model.meta.preprocess.require_one_size(f"a graph without {argument('dynamic_size', True)}")
    size = as_size(model.config.image_size if image_size is None else image_size)
    preprocess = model.meta.preprocess
    if image_size is not None or not dynamic_size:
        preprocess = preprocess.with_image_size(size)
    with evaluating(model):  # without the warnings of packages that it imports
        check_model(model, to, dynamic_size=dynamic_size)
    stride = model.config.stride if isinstance(model.config, ViTConfig) else 1
    outputs = [FEATURES] if model.head is None else ["logits", FEATURES] if features else ["logits"]
    with atomic_path(out) as new, evaluating(model):
        with nullcontext() if to in ("torch", "executorch") else exported_attention(model):
            traced = WithFeatures(model) if len(outputs) > 1 else model
            program = trace(traced, model, size, batch_size=batch_size, stride=stride if dynamic_size else 0)
        description = Description(config=model.config, meta=model.meta.replace(preprocess=preprocess, cascade=None))
        run = WRITERS[to](program, new, json.dumps(description.to_json()), outputs)
        sizes = [size] if not dynamic_size else [size, (size[0] + stride, 2 * stride), (3 * stride, size[1] + stride)]
        batches = [batch_size] if batch_size else [1, 3]
        shapes = [(batch, model.config.in_channels, *size) for size in sizes for batch in batches]
        what, about = f"not written, the outputs of the {to} graph", {"where": path, "hint": "please report this"}
        difference, largest = check_outputs(model, run, shapes, what, features=len(outputs) > 1, **about)
    return Exported(
        path=str(path),
        format=to,
        batch_size=batch_size,
        image_size=None if dynamic_size else size,
        largest_difference=difference,
        largest_output=largest,
        checked=tuple(shapes),
    )


def export_site(model: Model | str | Path, path: Path, settings: dict[str, Any]) -> Exported:
    """Write a folder with a page that runs a model, or an ONNX graph without other settings, in the browser."""
    graphs: list[Path | None] = []
    if isinstance(model, str | Path) and not any(settings.values()):
        graphs = [single_graph(Path(model).expanduser()), find_graph(model)]
    existing = next((graph for graph in graphs if graph is not None and graph.suffix == ".onnx"), None)
    if existing is None:
        if isinstance(model, str | Path):
            how = {name: settings.pop(name) for name in ("num_heads", "adapter")}
            model = load(model, image_size=settings["image_size"], **how)
        size, meta = settings["image_size"], model.meta
        meta = meta if size is None else meta.replace(preprocess=meta.preprocess.with_image_size(as_size(size)))
        check_page(meta, model.config.num_classes, settings["batch_size"])
    with atomic_path(path) as new:
        (new / "page").mkdir(parents=True)
        copy_runtime(new / "page")  # first, because it may fail
        if existing is None:
            report = export(model, new / "model.onnx", **settings)
        else:
            shutil.copyfile(existing, new / "model.onnx")
        graph = open_graph(new / "model.onnx")
        if existing is not None:
            check_page(graph.meta, graph.config.num_classes, graph.graph.single.shape[0])
            shape = (1, graph.config.in_channels, *graph.config.image_size)
            largest = float(graph(torch.zeros(shape)).abs().max())
            same: Any = {"largest_difference": 0.0, "largest_output": largest, "checked": (shape,)}
            report = Exported(path="", format="onnx", batch_size=1, image_size=shape[2:], **same)
        difference = write_site(new, graph)
    return dataclasses.replace(report, path=str(path), format="web", browser_difference=difference)


def check_destination(path: Path, to: str) -> None:
    if to not in get_args(Format):
        raise UnknownNameError("format", to, get_args(Format), see=f"({', '.join(get_args(Format))})")
    suffix = {"onnx": ".onnx", "torch": ".pt2", "executorch": ".pte"}.get(to, "")
    if suffix and (path.suffix != suffix or path.is_dir()):
        raise ConversionError(f"the file name of a graph for {to} must end in {suffix}", where=path)
    if not suffix and (path.is_file() or path.suffix in (".xml", ".onnx", ".pt2")):
        raise ConversionError(f"a graph for {to} is a folder; give the name of a folder", where=path)
    if to == "web" and path.is_dir() and any(path.iterdir()):
        raise ConversionError("already exists", where=path, hint="choose another name or remove it")
    check_writable(path)


def check_model(model: Model, to: str, *, dynamic_size: bool) -> None:
    """Raise if a package is missing or the model cannot be exported."""
    if to == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, "onnx")
        if not fits_onnx(model):
            gibibytes = f"{float_bytes(model) / 2**30:.1f} GiB"
            hint = f"use {argument('to', 'openvino')}"
            raise ConversionError(f"the weights take {gibibytes}, an ONNX file holds at most 2", hint=hint)
    elif to == "openvino":
        require("openvino", "openvino")
    elif to == "executorch":
        require("executorch.exir", "executorch")
    check_finite(model, model.meta.source or "the model", raises=ConversionError)
    if model.head is not None and not model.head.weight.any():
        raise ConversionError("the head is all zeros, so its graph cannot be checked", hint="train it first")
    config = model.config
    if isinstance(config, ViTConfig) and config.tome_thresholds:
        what = "with tome_thresholds the number of tokens depends on the image, which a graph cannot express"
        raise ConversionError(what, hint="set tome_r")
    if not dynamic_size:
        return
    if to == "executorch":
        raise ConversionError(f"a program for ExecuTorch has one image size, not {argument('dynamic_size', True)}")
    if not isinstance(config, ViTConfig) or config.stem is not None:
        reason = f"{argument('dynamic_size', True)} is for Vision Transformers without a stem"
    elif config.trim:
        reason = "this model trims images that the patches do not divide"
    elif geometric_biases(config):
        reason = "the relative position biases of this model need a fixed grid"
    elif config.attention == "mixer":
        reason = "an MLP-Mixer works only at its own image size"
    elif config.merges_tokens:
        reason = f"{argument('dynamic_size', True)} does not support token merging"
    else:
        return
    raise ConversionError(reason, hint="export one graph per image size")


def float_bytes(model: Model) -> int:
    return sum(value.numel() * 4 for value in model.state_dict().values())


def fits_onnx(model: Model) -> bool:
    return float_bytes(model) <= MAX_ONNX_BYTES


@contextmanager
def evaluating(model: Model) -> Iterator[None]:
    """Evaluation mode without gradients, and without the warnings of torch's exporters."""
    names = ("torch.__trace", "torch.onnx", "torch.export", "torch.utils._pytree", "torchao", "onnxscript")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with eval_mode(model), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


class WithFeatures(nn.Module):
    """A model with a head that returns logits (B, K) and features (B, F)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        first = (self.model.tokens_read,) if isinstance(self.model, ViT) else ()
        x = self.model.forward_features(pixels, *first)
        return self.model.forward_head(x), self.model.forward_head(x, pre_logits=True)


def trace(module: nn.Module, model: Model, size: Size, *, batch_size: int | None, stride: int) -> ExportedProgram:
    """The module of a model as an exported program; rows and columns are multiples of `stride`, or fixed if it is 0."""
    Dim = torch.export.Dim
    shape = [batch_size or 2, model.config.in_channels, *((3 * stride, 5 * stride) if stride else size)]
    device = next(model.parameters()).device
    dynamic: dict[int, Any] = {} if batch_size else {0: Dim("batch", min=1)}
    if stride:
        dynamic |= {axis: stride * Dim(name, min=2, max=MAX_PATCHES) for axis, name in ((2, "rows"), (3, "columns"))}
    return torch.export.export(module, (torch.zeros(shape, device=device),), dynamic_shapes=(dynamic,))


def write_onnx(program: ExportedProgram, path: Path, description: str, outputs: list[str]) -> EngineForward:
    written = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, input_names=["pixels"], output_names=outputs, verbose=False
    )
    assert written is not None
    written.model.metadata_props[METADATA_KEY] = description
    graph: Any = written.model.graph
    symbol = graph.inputs[0].shape[0]  # the tracer's name of a dynamic batch axis
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values if not isinstance(symbol, int) else []:
        for axis, side in enumerate(value.shape or ()):
            if side == symbol:
                value.shape[axis] = BATCH_AXIS
    written.save(str(path), external_data=False)
    return Session(path, "onnxruntime")


def write_openvino(program: ExportedProgram, path: Path, description: str, outputs: list[str]) -> EngineForward:
    openvino = require("openvino", "openvino")
    before = os.environ.get("CI")
    os.environ["CI"] = "true"  # the converter sends no usage statistics from continuous integration
    try:
        graph = openvino.convert_model(program)
    finally:
        os.environ.pop("CI")
        if before is not None:
            os.environ["CI"] = before
    shape = program.graph_module.graph.find_nodes(op="placeholder")[-1].meta["val"].shape
    graph.reshape([side if isinstance(side, int) else -1 for side in shape])
    graph.inputs[0].get_tensor().set_names({"pixels"})
    for node, name in zip(graph.outputs, outputs):
        node.get_tensor().set_names({name})
    graph.set_rt_info(description, [METADATA_KEY])
    path.mkdir()
    openvino.save_model(graph, path / "model.xml", compress_to_fp16=False)
    return Session(path / "model.xml", "openvino")


def write_program(program: ExportedProgram, path: Path, description: str, outputs: list[str]) -> EngineForward:
    torch.export.save(program, path, extra_files={f"{METADATA_KEY}.json": description})
    module = torch.export.load(path).module()

    def run(pixels: Tensor, output: str = "") -> Tensor:
        values = module(pixels)
        return values if len(outputs) == 1 else values[outputs.index(output or outputs[0])]

    return run


def write_executorch(program: ExportedProgram, path: Path, description: str, outputs: list[str]) -> EngineForward:
    exir, runtime = require("executorch.exir", "executorch"), require("executorch.runtime", "executorch")
    xnnpack = "executorch.backends.xnnpack.partition"
    configs, partitioner = (require(f"{xnnpack}.{name}", "executorch") for name in ("config", "xnnpack_partitioner"))
    # XNNPACK computes GELU by tanh, which changes logits by a thousandth
    exact = [kind for kind in configs.ALL_PARTITIONER_CONFIGS if kind.__name__ != "GeluConfig"]
    try:
        lowered = exir.to_edge_transform_and_lower(
            program,
            partitioner=[partitioner.XnnpackPartitioner(configs=exact)],
            constant_methods={METADATA_KEY: description},
        )
        path.write_bytes(lowered.to_executorch().buffer)
    except Exception as error:  # of any kind: it has no class of its own
        raise ConversionError(f"ExecuTorch cannot express this model: {describe_error(error)}") from error
    forward = runtime.Runtime.get().load_program(path).load_method("forward")

    def run(pixels: Tensor, output: str = "") -> Tensor:
        values: list[Tensor] = forward.execute([pixels])
        return values[outputs.index(output or outputs[0])].clone()

    return run


WRITERS = {
    "onnx": write_onnx,
    "openvino": write_openvino,
    "torch": write_program,
    "executorch": write_executorch,
}


def check_outputs(
    model: Model, run: EngineForward, shapes: Iterable[tuple[int, ...]], what: str, *, features: bool, **details: Any
) -> tuple[float, float]:
    """Largest difference of `run` from the model's logits on random pixels, and the largest logit.

    Raises ConversionError with these details if the logits, or with `features` these, differ by more than TOLERANCE;
    `what` names the outputs.
    """
    expected: dict[str, Forward] = {"": model} | ({FEATURES: model.features} if features else {})
    compared: dict[str, tuple[float, float]] = {}
    for output, compute in expected.items():
        differences, values = [], []
        for shape in shapes:
            pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            value = compute(pixels.to(next(model.parameters()).device)).cpu()
            differences.append(float((value - run(pixels, *([output] if output else []))).abs().max()))
            values.append(float(value.abs().max()))
        compared[output] = difference, largest = max(differences), max(values)
        allowed = TOLERANCE * max(1.0, largest)
        if not all(difference <= allowed for difference in differences):  # also refuses NaN
            text = f"{what} differ from the model's by {difference:.2g}, {allowed:.2g} is allowed"
            raise ConversionError(text, **details)
    return compared[""]


# B images, N tokens, D width, H heads of K channels, F tokens that are read


class ExportedAttention(Attention):
    """Attention in the form that the runtimes execute fastest; its `qkv` holds the three layers of `split_qkv`.

    Queries, keys and values have one product each, because ONNX Runtime copies the parts of a joint product. Softmax is
    written between two products, which OpenVINO fuses into one kernel, and the scale of the queries is folded into
    their weights. The last block, which computes few queries, never computes keys and values for each token: it sums
    over tokens first.
    """

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        if first is None or self.position is not None:
            return super().forward(x, first, grid)
        return self.attend_first(x, first, None)

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        B, N, _ = x.shape
        assert isinstance(self.qkv, nn.ModuleList)
        return tuple(layer(x).view(B, N, self.num_heads, -1).transpose(1, 2) for layer in self.qkv)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:  # each (B, H, N, K)
        scaled = q if folds_scale(self) else q * q.shape[-1] ** -0.5
        logits = scaled @ k.transpose(-2, -1)
        return (logits if bias is None else logits + bias).softmax(dim=-1) @ v

    def attend_first(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:
        """Attention of the first F tokens without keys and values of all N.

        With key weights W_k and value weights W_v, q (x W_k)^T = (q W_k^T) x^T and softmax(..) (x W_v) =
        (softmax(..) x) W_v: the weights are applied to F tokens instead of N. The bias of the keys adds the same number
        to all logits of a query, which softmax ignores.
        """
        if not folds_scale(self):
            return super().attend_first(x, first, bias)
        assert isinstance(self.qkv, nn.ModuleList)
        query, key, value = self.qkv
        assert isinstance(key, nn.Linear)
        assert isinstance(value, nn.Linear)
        B, _, D = x.shape
        H, K = self.num_heads, self.proj.in_features // self.num_heads
        q = query(x[:, :first]).view(B, first, H, K).transpose(1, 2)
        projected = (q @ key.weight.view(H, K, D)).reshape(B, H * first, D)
        logits = projected @ x.transpose(1, 2)  # (B, H F, N)
        # Heads and queries stay one axis up to the sums: onnxscript removes reshapes around a product, even if a fixed
        # batch size that equals the number of heads then meets the wrong axis.
        weights = (logits if bias is None else logits + bias[:, 0]).softmax(dim=-1)
        sums = (weights @ x).view(B, H, first, D)
        y = sums @ value.weight.view(H, K, D).transpose(1, 2)  # (B, H, F, K)
        return self.output(y if value.bias is None else y + value.bias.view(H, 1, K))


def folds_scale(attention: Attention) -> bool:
    """Whether the scale can be folded into the query weights.

    A norm of the queries would undo it, and the paper's relative positions would apply it twice.
    """
    return isinstance(attention.q_norm, nn.Identity) and not isinstance(attention.position, Offsets)


def split_qkv(attention: Attention) -> list[tuple[nn.Linear, float]]:
    """The layers of queries, keys and values, and the factor by which the weights of each were multiplied."""
    qkv, layers = attention.qkv, []
    scale = (attention.proj.in_features // attention.num_heads) ** -0.5 if folds_scale(attention) else 1.0
    biases = [None] * 3 if qkv.bias is None else qkv.bias.detach().chunk(3)
    for weight, bias, factor in zip(qkv.weight.detach().chunk(3), biases, (scale, 1.0, 1.0)):
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight * factor)
        layer.bias = None if bias is None else nn.Parameter(bias * factor)
        layers.append((layer, factor))
    return layers


@contextmanager
def exported_attention(model: Model) -> Iterator[None]:
    """Replace the model's attention by ExportedAttention while it is traced."""
    replaced = [(module, module.qkv) for module in model.modules() if type(module) is Attention]
    for attention, _ in replaced:
        attention.add_module("qkv", nn.ModuleList(layer for layer, _ in split_qkv(attention)))
        attention.__class__ = ExportedAttention
    try:
        yield
    finally:
        for attention, qkv in replaced:
            attention.__class__ = Attention
            attention.qkv = qkv
