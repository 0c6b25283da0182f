"""Write an ONNX file with dense layers in int8, for ONNX Runtime and OpenVINO."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.compress.int8 import Int8Layer, dense_layers
from vitruvian.engines.export import split_qkv
from vitruvian.engines.runtimes import REQUIRES_KEY
from vitruvian.errors import ConversionError, require
from vitruvian.model.encoder import Attention
from vitruvian.model.vit import ViT

MAX_7_BITS = 63  # largest weight that does not saturate without VNNI
UNROUNDED = ".unrounded"  # suffix of the names of nodes that read a quantized tensor as it was before quantization


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """A MatMul or Gemm with the weight of a dense layer, or with one third of the weight of `qkv`."""

    node: Any
    layer: str
    part: int  # 0, 1, 2 for queries, keys and values
    rows: slice  # rows of the layer's weight
    factor: float  # of the weights in the graph: the attention scale is folded into the queries'
    transposed: bool  # whether the graph stores the weight as (outputs, inputs)


def write_int8(graph: Path, path: Path, model: ViT, quantized: Mapping[str, Int8Layer]) -> None:
    """Write a copy of an exported ONNX file of the model, with these layers in int8.

    ONNX Runtime's quantizer inserts QuantizeLinear and DequantizeLinear with our ranges; then its own rounding of the
    weights is replaced by ours.
    """
    onnx = require("onnx", "onnx")
    tools = require("onnxruntime.quantization", "onnx")
    quantizers = require("onnxruntime.quantization.qdq_quantizer", "onnx")
    loaded = onnx.load(str(graph))
    properties = {entry.key: entry.value for entry in loaded.metadata_props}
    del loaded.graph.value_info[:]  # these shapes would contradict the quantizer's own
    products = find_products(loaded, model)
    missing = set(quantized) - {product.layer for product in products}
    if missing:
        raise ConversionError(f"not written, the product of {min(missing)} is not in the graph", where=path)
    products = [product for product in products if product.layer in quantized]
    ranges: dict[str, tuple[Any, ...]] = {}
    for product in products:
        layer_input = quantized[product.layer].input
        product.node.name = f"{product.layer}.{product.part}"
        ends = tuple(map(np.float32, layer_input.ends))
        if ranges.get(product.node.input[0], ends) != ends:
            # another layer quantizes this tensor with another range: read it through an Identity node instead
            name, source = product.node.name, product.node.input[0]
            product.node.input[0] = f"{name}.input"
            identity = onnx.helper.make_node("Identity", [source], [f"{name}.input"], f"{name}.identity{UNROUNDED}")
            loaded.graph.node.insert(list(loaded.graph.node).index(product.node), identity)
        ranges[product.node.input[0]] = ends
        add_float_channels(loaded.graph, product, layer_input.float_channels)
    settings: dict[str, Any] = {
        "per_channel": True,
        "reduce_range": True,
        "weight_qType": tools.QuantType.QInt8,
        "activation_qType": tools.QuantType.QUInt8,
        "tensors_range": tools.calibrate.TensorsData(tools.CalibrationMethod.MinMax, ranges),
        "nodes_to_quantize": [product.node.name for product in products],
        "nodes_to_exclude": [],
        "op_types_to_quantize": ["MatMul", "Gemm"],
        "extra_options": {
            "WeightSymmetric": True,
            "ActivationSymmetric": False,
            "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            "DefaultTensorType": onnx.TensorProto.FLOAT,
        },
    }
    weight_names = [product.node.input[1] for product in products]  # the quantizer changes the nodes' inputs
    quantizer = quantizers.QDQQuantizer(loaded, **settings)
    quantizer.quantize_model()
    source = {node.output[0]: node.input[0] for node in quantizer.model.model.graph.node if node.input}
    for node in quantizer.model.model.graph.node:
        if node.name.endswith(UNROUNDED):  # back through DequantizeLinear and QuantizeLinear, which all readers got
            node.input[0] = source[source[node.input[0]]]
    initializers = {tensor.name: tensor for tensor in quantizer.model.model.graph.initializer}
    for product, name in zip(products, weight_names):
        layer = quantized[product.layer]
        codes = layer.codes[product.rows].numpy()
        overwrite(initializers[f"{name}_quantized"], codes if product.transposed else codes.T)
        overwrite(initializers[f"{name}_scale"], layer.scale[product.rows, 0].numpy() * np.float32(product.factor))
    if any(int(layer.codes.abs().max()) > MAX_7_BITS for layer in quantized.values()):
        onnx.helper.set_model_props(quantizer.model.model, properties | {REQUIRES_KEY: "vnni"})
    onnx.save(quantizer.model.model, str(path))


def find_products(loaded: Any, model: ViT) -> list[Product]:
    """The products of all dense layers in a graph, recognized by the checksums of their weights."""
    from onnx.numpy_helper import to_array

    known: dict[bytes, dict[str, Any]] = {}
    for name, layer in dense_layers(model).items():
        attention = model.get_submodule(name.rpartition(".")[0])
        parts = [(layer, 1.0)]
        if type(attention) is Attention and layer is attention.qkv:
            parts = split_qkv(attention)
        count = layer.out_features // len(parts)
        for index, (part, factor) in enumerate(parts):
            key = checksum(part.weight.detach().numpy().T)
            twin = known.get(key, {"layer": name})["layer"]
            if twin != name:
                reason = f"{twin} and {name} have equal weights, so they cannot be distinguished in the graph"
                raise ConversionError(reason)
            rows = slice(index * count, (index + 1) * count)
            known[key] = {"layer": name, "part": index, "rows": rows, "factor": factor}
    initializers = {tensor.name: tensor for tensor in loaded.graph.initializer}
    products: list[Product] = []
    for node in loaded.graph.node:
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in initializers:
            weight = to_array(initializers[node.input[1]])
            transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            match = known.get(checksum(weight.T if transposed else weight))
            if match is not None:
                products.append(Product(node=node, transposed=transposed, **match))
    return products


def checksum(array: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def add_float_channels(graph: Any, product: Product, channels: tuple[int, ...]) -> None:
    """Add a float product of these channels to the int8 product, whose weights for them are zero."""
    if not channels:
        return
    from onnx import helper
    from onnx.numpy_helper import from_array, to_array

    node, name = product.node, product.node.name
    stored = to_array(next(tensor for tensor in graph.initializer if tensor.name == node.input[1]))
    weight = (stored.T if product.transposed else stored)[list(channels)]  # (channels, O)
    graph.initializer.append(from_array(np.array(channels), f"{name}.channels"))
    graph.initializer.append(from_array(np.ascontiguousarray(weight), f"{name}.float_weight"))
    source, output = node.input[0], node.output[0]
    node.output[0] = f"{name}.int8"
    picked, product_output = f"{name}.picked", f"{name}.float"
    nodes = [
        helper.make_node("Gather", [source, f"{name}.channels"], [picked], f"{name}.pick{UNROUNDED}", axis=-1),
        helper.make_node("MatMul", [picked, f"{name}.float_weight"], [product_output], f"{name}.float_product"),
        helper.make_node("Add", [f"{name}.int8", product_output], [output], f"{name}.sum"),
    ]
    after = list(graph.node).index(node) + 1
    for index, new in enumerate(nodes, after):
        graph.node.insert(index, new)


def overwrite(tensor: Any, values: NDArray[Any]) -> None:
    """Replace the values of an initializer by others of its type and shape."""
    from onnx.numpy_helper import from_array

    assert list(tensor.dims) == list(values.shape)
    tensor.CopyFrom(from_array(np.ascontiguousarray(values), tensor.name))
