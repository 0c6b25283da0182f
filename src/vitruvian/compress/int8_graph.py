"""An ONNX file of a model with dense layers in int8, as ONNX Runtime and OpenVINO run it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.compress.int8 import Int8Layer
from vitruvian.compress.smooth import dense_layers
from vitruvian.engines.export_attention import query_scale, split_qkv
from vitruvian.errors import ConversionError, require
from vitruvian.model.encoder import Attention
from vitruvian.model.vit import ViT

UNROUNDED = ".unrounded"
"""How the names of nodes end that read what another node reads in int8, as it was before."""


def write_int8(graph: Path, path: Path, model: ViT, chosen: Mapping[str, Int8Layer]) -> None:
    """An exported ONNX file of the model with these layers in int8, for ONNX Runtime and OpenVINO."""
    onnx = require("onnx", "onnx")
    tools = require("onnxruntime.quantization", "onnx")
    quantizers = require("onnxruntime.quantization.qdq_quantizer", "onnx")
    loaded = onnx.load(str(graph))
    del loaded.graph.value_info[:]  # stated shapes would contradict the quantizer's own
    products = products_of(loaded, model)
    missing = set(chosen) - {each.layer for each in products}
    if missing:
        raise ConversionError(f"{path}: not written, the graph does not show the product of {min(missing)}")
    wanted = [each for each in products if each.layer in chosen]
    ends: dict[str, tuple[Any, ...]] = {}
    for each in wanted:
        each.node.name = f"{each.layer}.{each.part}"
        own = tuple(map(np.float32, chosen[each.layer].input.ends))
        if ends.get(each.node.input[0], own) != own:
            read_apart(loaded.graph, each)
        ends[each.node.input[0]] = own
        keep_channels(loaded.graph, each, chosen[each.layer].input.float_channels)
    options = {
        "WeightSymmetric": True,
        "ActivationSymmetric": False,
        "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
        "DefaultTensorType": onnx.TensorProto.FLOAT,
    }
    settings: dict[str, Any] = {
        "per_channel": True,
        "reduce_range": True,
        "weight_qType": tools.QuantType.QInt8,
        "activation_qType": tools.QuantType.QUInt8,
        "tensors_range": tools.calibrate.TensorsData(tools.CalibrationMethod.MinMax, ends),
        "nodes_to_quantize": [each.node.name for each in wanted],
        "nodes_to_exclude": [],
        "op_types_to_quantize": ["MatMul", "Gemm"],
        "extra_options": options,
    }
    names = [each.node.input[1] for each in wanted]  # the quantizer puts others in their place
    quantizer = quantizers.QDQQuantizer(loaded, **settings)
    quantizer.quantize_model()
    undo_rounding(quantizer.model.model.graph)
    held = {each.name: each for each in quantizer.model.model.graph.initializer}
    for each, name in zip(wanted, names):
        layer, rows = chosen[each.layer], each.rows
        codes = layer.codes[rows].numpy()
        overwrite(held[f"{name}_quantized"], codes if each.turned else codes.T)
        overwrite(held[f"{name}_scale"], layer.scale[rows, 0].numpy() * np.float32(each.factor))
    onnx.save(quantizer.model.model, str(path))


def read_apart(graph: Any, product: Product) -> None:
    """A name of its own for what enters a product, where another layer that reads the same has another range."""
    from onnx import helper

    name, given = product.node.name, product.node.input[0]
    product.node.input[0] = f"{name}.given"
    made = helper.make_node("Identity", [given], [f"{name}.given"], f"{name}.give{UNROUNDED}")
    insert(graph, place_of(graph, name), [made])


def place_of(graph: Any, name: str) -> int:
    return next(number for number, node in enumerate(graph.node) if node.name == name)


def insert(graph: Any, place: int, nodes: Sequence[Any]) -> None:
    for number, node in enumerate(nodes, start=place):
        graph.node.insert(number, node)


def keep_channels(graph: Any, product: Product, channels: tuple[int, ...]) -> None:
    """A product in float of these channels, added to that in int8, whose weights for them are zero."""
    if not channels:
        return
    from onnx import helper
    from onnx.numpy_helper import from_array, to_array

    node, name = product.node, product.node.name
    held = to_array(next(each for each in graph.initializer if each.name == node.input[1]))
    weight = (held.T if product.turned else held)[list(channels)]  # (channels, O)
    graph.initializer.append(from_array(np.array(channels), f"{name}.channels"))
    graph.initializer.append(from_array(np.ascontiguousarray(weight), f"{name}.float_weight"))
    given, answer = node.input[0], node.output[0]
    node.output[0] = f"{name}.int8"
    made = [
        helper.make_node("Gather", [given, f"{name}.channels"], [f"{name}.picked"], f"{name}.pick{UNROUNDED}", axis=-1),
        helper.make_node("MatMul", [f"{name}.picked", f"{name}.float_weight"], [f"{name}.float"], f"{name}.kept"),
        helper.make_node("Add", [f"{name}.int8", f"{name}.float"], [answer], f"{name}.sum"),
    ]
    insert(graph, place_of(graph, name) + 1, made)


def undo_rounding(graph: Any) -> None:
    """The quantizer gives what it rounds to all readers; some need it unrounded."""
    read_by = {node.output[0]: node.input[0] for node in graph.node if node.input}
    for node in graph.node:
        if node.name.endswith(UNROUNDED):
            node.input[0] = read_by[read_by[node.input[0]]]  # by DequantizeLinear, which reads QuantizeLinear


def overwrite(held: Any, values: NDArray[Any]) -> None:
    """The numbers of an initializer by others of its type and shape."""
    from onnx.numpy_helper import from_array

    assert list(held.dims) == list(values.shape)
    held.CopyFrom(from_array(np.ascontiguousarray(values), held.name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A product of a graph with the weights of a dense layer, or with some rows of them."""

    node: Any
    layer: str
    part: int
    """Of queries, keys and values, which have a product each."""
    rows: slice
    factor: float
    """Of these weights in the graph; queries have theirs in it."""
    turned: bool
    """Whether the graph has outputs as rows."""


def products_of(loaded: Any, model: ViT) -> list[Product]:
    """The products of each dense layer in a graph, told by their weights."""
    from onnx.numpy_helper import to_array

    known: dict[bytes, dict[str, Any]] = {}
    for name, layer in dense_layers(model).items():
        attention = model.get_submodule(name.rpartition(".")[0])
        parts, factors = [layer], [1.0]
        if type(attention) is Attention and layer is attention.qkv:
            parts, factors = split_qkv(attention), [query_scale(attention), 1.0, 1.0]
        count = layer.out_features // len(parts)
        for part, (each, factor) in enumerate(zip(parts, factors)):
            rows = slice(part * count, (part + 1) * count)
            shown = digest(each.weight.detach().numpy().T)
            other = known.get(shown, {"layer": name})["layer"]
            if other != name:
                raise ConversionError(f"{other} and {name} have equal weights, which a graph in int8 cannot tell apart")
            known[shown] = {"layer": name, "part": part, "rows": rows, "factor": factor}
    held = {each.name: each for each in loaded.graph.initializer}
    found: list[Product] = []
    for node in loaded.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in held:
            array = to_array(held[node.input[1]])
            turned = any(each.name == "transB" and each.i for each in node.attribute)
            told = known.get(digest(array.T if turned else array))
            if told is not None:
                found.append(Product(node=node, turned=turned, **told))
    return found


def digest(array: Any) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
