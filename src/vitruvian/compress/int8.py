"""Int8 for the dense layers of a model: smoothing, activation ranges, GPTQ rounding, sensitivities, the ONNX file.

Activations have one scale per layer, found on calibration images; weights have one per output channel. Residual sums,
norms, softmax, patch embedding and head stay float. Processors without VNNI add two products in 16 bits, which
saturates with weights of 8 bits. So these are for processors with VNNI, and their files are refused on others;
elsewhere weights use 7 bits, which is correct on every processor.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.engines.export import Forward, split_qkv
from vitruvian.engines.runtimes import REQUIRES_KEY
from vitruvian.errors import ConfigError, ConversionError, argument, require
from vitruvian.machine import has_vnni
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention, Block, ParallelBlock, ResPostNormBlock
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking
from vitruvian.weights.load import with_merging

# n tokens, D channels of a layer's input, O of its output

DENSE_LAYERS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")  # of a block
ALPHA = 0.5  # how much of the difference between channels moves into the weights; SmoothQuant's value
MAX_SCALE = 2.0**12  # scales are clamped to this and its inverse


def dense_layers(model: Model) -> dict[str, nn.Linear]:
    """The layers that are quantized, by name: all dense layers of the blocks, over 90% of the arithmetic."""
    if not isinstance(model, ViT):
        raise ConfigError("int8 is for Vision Transformers, this model is a ResNet")
    if model.config.attention == "mixer":
        raise ConfigError("int8 is for Vision Transformers, this model is an MLP-Mixer")
    names = [f"blocks.{block}.{layer}" for block in range(len(model.blocks)) for layer in DENSE_LAYERS]
    modules = {name: model.get_submodule(name) for name in names}
    return {name: layer for name, layer in modules.items() if isinstance(layer, nn.Linear)}


def folds(model: ViT) -> Iterator[tuple[str, tuple[nn.Linear, ...], tuple[Tensor, ...]]]:
    """All places where scales can be moved.

    Yields:
        The name of a layer, the layers that read the same channels, and the parameters that produce them, one row per
        channel.
    """
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, mlp, name = block.attn, block.mlp, f"blocks.{index}"
        if isinstance(block, ParallelBlock):
            yield f"{name}.attn.qkv", (attention.qkv, mlp.fc1), parameters(block.norm1)
        elif not isinstance(block, ResPostNormBlock):
            yield f"{name}.attn.qkv", (attention.qkv,), parameters(block.norm1)
            yield f"{name}.mlp.fc1", (mlp.fc1,), parameters(block.norm2)
        if not isinstance(attention.norm, nn.Identity):
            yield f"{name}.attn.proj", (attention.proj,), parameters(attention.norm)
        elif type(attention) is Attention:  # its output is a weighted mean of values; differential attention has a norm
            values = parameters(attention.qkv, 2 * attention.proj.in_features)
            yield f"{name}.attn.proj", (attention.proj,), values
        if not isinstance(mlp.norm, nn.Identity):
            yield f"{name}.mlp.fc2", (mlp.fc2,), parameters(mlp.norm)
        elif mlp.gated:  # the gate is nonlinear, its factor is linear
            yield f"{name}.mlp.fc2", (mlp.fc2,), parameters(mlp.fc1, mlp.fc2.in_features)


def parameters(module: nn.Module, start: int = 0) -> tuple[Tensor, ...]:
    """Weight and bias of a norm or a dense layer, for its outputs from `start` on."""
    return tuple(parameter.data[start:] for parameter in module.parameters())


def smooth(model: ViT, maxima: Mapping[str, Tensor], alpha: float = ALPHA) -> ViT:
    """A copy with moved scales, given the largest magnitude (D,) of each channel that enters the named layers.

    SmoothQuant moves channel scales from activations into weights, so that 8 bits suffice for both. If a norm or
    another linear map produces the input of a dense layer, its channel j can be divided by s_j and column j of the
    layer's weight multiplied by s_j (Xiao et al., 2023; RepQ-ViT, Li et al., 2023). All s_j are powers of two, by
    which floats are multiplied without rounding: the model's outputs stay bitwise equal.
    """
    smoothed = deepcopy(model)
    for name, readers, producers in folds(smoothed):
        if not producers:  # a norm without parameters
            continue
        weights = torch.stack([reader.weight.data.abs().amax(dim=0) for reader in readers]).amax(dim=0)
        # inputs^alpha / weights^(1 - alpha), each (D,), rounded to powers of two; 1 for channels that are always zero
        exponent = alpha * maxima[name].to(weights).log2() - (1 - alpha) * weights.log2()
        exponent = torch.where(exponent.isfinite(), exponent - exponent[exponent.isfinite()].mean(), 0.0)
        scale = exponent.round().exp2().clamp(1 / MAX_SCALE, MAX_SCALE)
        for reader in readers:
            reader.weight.data.mul_(scale)
        for producer in producers:
            producer.div_(scale if producer.dim() == 1 else scale[:, None])
    return smoothed


@contextmanager
def hook_inputs(layers: Mapping[str, nn.Linear], hook: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """In this block, call `hook(name, x)` with the input of each layer; a returned tensor replaces it."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(lambda _, args, name=name: hook(name, args[0]))
            stack.callback(handle.remove)
        yield


def channel_maxima(model: ViT, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The largest magnitude of each channel (D,) that enters each dense layer."""
    maxima: dict[str, Tensor] = {}

    def update(name: str, x: Tensor) -> None:
        largest = x.detach().abs().flatten(0, -2).amax(dim=0)
        maxima[name] = torch.maximum(maxima[name], largest) if name in maxima else largest

    with hook_inputs(dense_layers(model), update), torch.inference_mode():
        for pixels in batches:
            model(pixels)
    return {name: values.clone() for name, values in maxima.items()}


LEVELS = 255  # steps of an 8-bit activation
TOKENS_PER_BATCH = 256  # number of tokens per batch to fit the range of an activation on
QUANTILES = (1.0, 0.9999, 0.999, 0.998, 0.995)  # fractions of the values that a candidate range covers
MAX_FLOAT_CHANNELS = 2  # maximum number of channels of a layer that stay float
FLOAT_CHANNEL_GAIN = 0.5  # a float channel costs extra operations, so the error must fall below this fraction
DAMPING = 0.01  # added to GPTQ's second moments, as a fraction of their mean, to regularize few images
BLOCK_COLUMNS = 128  # number of columns whose errors GPTQ propagates to later columns in one product
MAX_7_BITS = 63  # largest weight that does not saturate without VNNI

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Input:
    """The input of a dense layer in 8 bits.

    A channel with much larger values than all others would leave them only a few steps of the range. Such channels are
    computed in float instead, as in LLM.int8() (Dettmers et al., 2022).
    """

    ends: Range
    float_channels: tuple[int, ...] = ()

    def mask(self, x: Tensor, float_value: Tensor | float) -> Tensor:
        """x (..., D) with `float_value` in the float channels."""
        if not self.float_channels:
            return x
        is_int8 = torch.ones(x.shape[-1], dtype=torch.bool)
        is_int8[list(self.float_channels)] = False
        return torch.where(is_int8, x, float_value)

    def quantize(self, x: Tensor) -> Tensor:
        """Fake-quantize x (..., D), except the float channels."""
        return self.mask(fake_quantize(x, self.ends), x)


def input_scale(ends: Range) -> tuple[float, int]:
    """The value of one step of a range in 8 bits, and the code of zero."""
    scale = (ends[1] - ends[0]) / LEVELS
    return scale, round(-ends[0] / scale)


def fake_quantize(x: Tensor, ends: Range) -> Tensor:
    """Fake-quantize `x` to 8 bits over this range."""
    return torch.fake_quantize_per_tensor_affine(x, *input_scale(ends), 0, LEVELS)


def best_range(values: Tensor) -> Range:
    """The range, among those that cut off few outliers, whose rounding and clipping have the least squared error."""
    ordered = values.sort().values
    errors: dict[Range, float] = {}
    for quantile in QUANTILES:
        cut = round((1 - quantile) / 2 * (len(ordered) - 1))
        ends = min(0.0, float(ordered[cut])), max(0.0, float(ordered[len(ordered) - 1 - cut]))
        if ends[0] < ends[1]:
            errors[ends] = float(F.mse_loss(fake_quantize(values, ends), values))
    return min(errors, key=errors.__getitem__) if errors else (0.0, 1.0)


def fit_input(x: Tensor, ends: Tensor, weight: Tensor, bits: int) -> Int8Input:
    """Choose the int8 range for tokens x (n, D), and the channels to keep in float.

    `ends` (m, D) are the smallest and largest values of each channel. Float channels are those with the largest
    magnitudes. More of them are used only if the squared error of the layer's int8 output falls below
    FLOAT_CHANNEL_GAIN times the error with fewer.
    """
    by_size = ends.abs().amax(dim=0).argsort(descending=True).tolist()
    values, expected = torch.cat([x, ends]), F.linear(x, weight)
    fits: list[tuple[Int8Input, float]] = []  # each worth its cost over the previous one
    for count in range(min(MAX_FLOAT_CHANNELS, len(by_size) - 1) + 1):
        best = best_range(values[:, sorted(by_size[count:])].flatten())
        layer_input = Int8Input(ends=best, float_channels=tuple(by_size[:count]))
        codes, scale = round_weights(layer_input.mask(weight, 0.0), bits)
        output = F.linear(layer_input.quantize(x), layer_input.mask(codes * scale, weight))
        error = float(F.mse_loss(output, expected))
        if not fits or error < FLOAT_CHANNEL_GAIN * fits[-1][1]:
            fits.append((layer_input, error))
    return fits[-1][0]


def fit_inputs(model: ViT, batches: Sequence[Tensor], bits: int) -> dict[str, Int8Input]:
    """Range and float channels of each dense layer's input, from calibration images."""
    layers, generator = dense_layers(model), torch.Generator().manual_seed(0)
    tokens, ends = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)

    def add(name: str, x: Tensor) -> None:
        flat = x.detach().flatten(0, -2)
        tokens[name].append(flat[torch.randperm(len(flat), generator=generator)[:TOKENS_PER_BATCH]])
        ends[name].append(torch.stack(list(flat.aminmax(dim=0))))

    with torch.inference_mode():
        with hook_inputs(layers, add):
            for pixels in batches:
                model(pixels)
        return {
            name: fit_input(torch.cat(tokens[name]), torch.cat(ends[name]), layers[name].weight, bits)
            for name in tokens
        }


def weight_scale(weight: Tensor, bits: int) -> tuple[int, Tensor]:
    """The largest code, and the value (O, 1) of one step in each row."""
    largest = 2 ** (bits - 1) - 1
    return largest, weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest


def round_weights(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integer codes (O, D) and scales (O, 1), rounding each weight to the nearest."""
    largest, scale = weight_scale(weight, bits)
    return (weight / scale).round().clamp(-largest, largest).to(torch.int8), scale


def gptq(weight: Tensor, moments: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Integer codes (O, D) and scales (O, 1) by GPTQ, given the second moments (D, D) of the layer's input.

    GPTQ (Frantar et al., 2023) minimizes the change of the layer's output. It rounds one column of the weight after the
    other and lets the columns that are not yet rounded compensate the error. With H the moments and U the upper
    Cholesky factor of H^-1, an error e of column j is best compensated by subtracting e / U[j, j] * U[j, k] from each
    later column k. Columns with the largest moments are rounded first, while most columns are left to compensate.
    Errors are applied at once within a block of columns, and to all later columns in one product after the block.
    """
    largest, scale = weight_scale(weight, bits)
    order = moments.diagonal().argsort(descending=True)
    remaining, step = weight.double()[:, order], scale.double()[:, 0]
    U = inverse_cholesky(moments.double()[order][:, order])
    codes = torch.empty_like(remaining)
    for start in range(0, remaining.shape[1], BLOCK_COLUMNS):
        end = min(start + BLOCK_COLUMNS, remaining.shape[1])
        errors = torch.empty_like(remaining[:, start:end])
        for j in range(start, end):
            codes[:, j] = (remaining[:, j] / step).round().clamp(-largest, largest)
            errors[:, j - start] = (remaining[:, j] - codes[:, j] * step) / U[j, j]
            remaining[:, j:end] -= errors[:, j - start, None] * U[j, j:end]
        remaining[:, end:] -= errors @ U[start:end, end:]
    return codes[:, order.argsort()].to(torch.int8), scale


def inverse_cholesky(moments: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of (D, D), with more damping until rounding errors do not matter."""
    mean = float(moments.diagonal().mean())
    damping = torch.eye(len(moments), dtype=moments.dtype) * (DAMPING * mean if mean > 0 else 1.0)
    for exponent in range(8):
        lower, failed = torch.linalg.cholesky_ex(moments + 10**exponent * damping)
        if not failed:
            factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
            return factor
    raise ConversionError(f"int8: the input of a layer is not finite on the images of {argument('calibrate')}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Layer:
    """A dense layer in int8."""

    input: Int8Input
    codes: Tensor  # (O, D) integer weights
    scale: Tensor  # (O, 1)


def default_bits() -> int:
    """8 bits of the weights on processors with VNNI, else 7."""
    return 8 if has_vnni() else 7


def prepare(model: Model, batches: Sequence[Tensor], bits: int = 7) -> tuple[ViT, dict[str, Int8Input]]:
    """The smoothed model in eval mode, and the int8 inputs of its dense layers."""
    dense_layers(model)  # raises if it is not a ViT
    assert isinstance(model, ViT)
    smoothed = smooth(model, channel_maxima(model, batches)).eval()
    return smoothed, fit_inputs(smoothed, batches, bits)


def rounded_layers(model: ViT, inputs: Mapping[str, Int8Input], bits: int = 7) -> dict[str, Int8Layer]:
    """All dense layers in int8, with each weight rounded to the nearest: fast to compute."""
    layers, quantized = dense_layers(model), dict[str, Int8Layer]()
    for name, layer_input in inputs.items():
        codes, scale = round_weights(layer_input.mask(layers[name].weight.detach(), 0.0), bits)
        quantized[name] = Int8Layer(input=layer_input, codes=codes, scale=scale)
    return quantized


@torch.no_grad()
def gptq_layers(
    model: ViT, inputs: Mapping[str, Int8Input], batches: Sequence[Tensor], *, bits: int, track: Track = no_tracking
) -> dict[str, Int8Layer]:
    """All dense layers in int8, with weights rounded by GPTQ; block by block, to hold the moments of one at a time."""
    layers, quantized = dense_layers(model), dict[str, Int8Layer]()
    tokens, grids = [model.embed(pixels) for pixels in batches], [model.grid_of(pixels) for pixels in batches]
    for index, block in track(list(enumerate(model.blocks)), len(model.blocks)):
        block_layers = {name: layer for name, layer in layers.items() if name.startswith(f"blocks.{index}.")}
        moments: dict[str, Tensor] = {}

        def add(name: str, x: Tensor, moments: dict[str, Tensor] = moments) -> None:
            flat = inputs[name].mask(inputs[name].quantize(x), 0.0).flatten(0, -2)  # (n, D)
            moments[name] = moments.get(name, 0) + flat.T @ flat

        with hook_inputs(block_layers, add):
            tokens = [block(x, None, grid) for x, grid in zip(tokens, grids)]
        for name, layer in block_layers.items():
            codes, scale = gptq(inputs[name].mask(layer.weight, 0.0), moments[name], bits)
            quantized[name] = Int8Layer(input=inputs[name], codes=codes, scale=scale)
    return quantized


def simulate(model: ViT, quantized: Mapping[str, Int8Layer], run: Forward | None = None) -> Forward:
    """The forward pass of the model (or its part `run`) with these layers rounded as in int8, computed in float."""
    layers = {name: layer for name, layer in dense_layers(model).items() if name in quantized}

    def forward(pixels: Tensor) -> Tensor:
        weights = {name: layer.weight.data for name, layer in layers.items()}
        try:
            for name, layer in layers.items():
                int8 = quantized[name]
                layer.weight.data = int8.input.mask(int8.codes * int8.scale, weights[name])
            with hook_inputs(layers, lambda name, x: quantized[name].input.quantize(x)), torch.no_grad():
                return (run or model)(pixels)
        finally:
            for name, layer in layers.items():
                layer.weight.data = weights[name]

    return forward


def sensitivity(
    model: ViT, quantized: Mapping[str, Int8Layer], pixels: Tensor, *, track: Track = no_tracking
) -> dict[str, float]:
    """Mean Kullback-Leibler divergence of the outputs, in nats, with one layer at a time in int8; largest first.

    For a model that merges tokens it is measured without merging.
    """
    if model.config.merges_tokens:
        unmerged = with_merging(model).eval()
        assert isinstance(unmerged, ViT)
        model = unmerged
    block_inputs: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        for block in model.blocks:
            hook = block.register_forward_pre_hook(lambda _, args: block_inputs.append(args[0]))
            stack.callback(hook.remove)
        expected = model(pixels).log_softmax(dim=-1)

    def rest(index: int, x: Tensor) -> Tensor:
        """Logits (B, K) from the input (B, N, D) of a block."""
        for block in model.blocks[index:]:
            x = block(x, model.tokens_read if block is model.blocks[-1] else None, model.grid_of(pixels))
        return model.forward_head(x if model.config.norm_after_pool else model.norm(x))

    divergence: dict[str, float] = {}
    for name in track(list(quantized), len(quantized)):
        index = int(name.split(".")[1])
        actual = simulate(model, {name: quantized[name]}, partial(rest, index))(block_inputs[index]).log_softmax(dim=-1)
        divergence[name] = float(F.kl_div(actual, expected, log_target=True, reduction="batchmean"))
    return dict(sorted(divergence.items(), key=lambda item: -item[1]))


class Product(NamedTuple):
    """A product in a graph with the weight of a dense layer, or with one third of the weight of `qkv`."""

    layer: str
    part: int  # 0, 1, 2 for queries, keys and values
    rows: slice  # rows of the layer's weight
    factor: float  # of the weights in the graph: the attention scale is folded into the queries'


def write_int8(graph: Path, path: Path, model: Model, quantized: Mapping[str, Int8Layer]) -> None:
    """Write a copy of an exported ONNX file of the model, with these layers in int8.

    A product reads its input and its weight through QuantizeLinear and DequantizeLinear, which both runtimes fuse into
    an int8 product. Float channels, whose int8 weights are zero, have a float product of their own.
    """
    onnx = require("onnx", "onnx")
    loaded = onnx.load(str(graph))
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in loaded.graph.initializer}
    products = find_products(loaded.graph.node, stored, model)
    missing = set(quantized) - {product.layer for product in products.values()}
    if missing:
        raise ConversionError(f"not written, the product of {min(missing)} is not in the graph", where=path)
    nodes: list[Any] = []
    rounded: dict[tuple[str, Range], str] = {}  # the quantized inputs, which several layers may read

    def constant(name: str, value: Any) -> str:
        loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(onnx.helper.make_node(operator, inputs, [output], f"{output}.{operator}", **attributes))
        return output

    for node in loaded.graph.node:
        product = products.get(node.output[0])
        if product is None or product.layer not in quantized:
            nodes.append(node)
            continue
        layer, name = quantized[product.layer], f"{product.layer}.{product.part}"
        (source, weight), output = node.input, node.output[0]
        ends, channels = layer.input.ends, list(layer.input.float_channels)
        if (source, ends) not in rounded:
            scale, zero = input_scale(ends)
            steps = [constant(f"{name}.step", np.float32(scale)), constant(f"{name}.zero", np.uint8(zero))]
            codes = add("QuantizeLinear", [source, *steps], f"{name}.codes")
            rounded[source, ends] = add("DequantizeLinear", [codes, *steps], f"{name}.input")
        step = layer.scale[product.rows, 0].numpy() * np.float32(product.factor)
        codes = constant(f"{name}.weight_codes", layer.codes[product.rows].numpy().T)
        steps = [constant(f"{name}.weight_step", step), constant(f"{name}.weight_zero", np.zeros(len(step), np.int8))]
        node.input[0] = rounded[source, ends]
        node.input[1] = add("DequantizeLinear", [codes, *steps], f"{name}.weight", axis=1)
        nodes.append(node)
        if channels:
            node.output[0] = f"{name}.int8"
            columns = constant(f"{name}.channels", np.array(channels))
            picked = add("Gather", [source, columns], f"{name}.picked", axis=-1)
            rows = constant(f"{name}.float_weight", stored[weight][channels])
            add("Add", [node.output[0], add("MatMul", [picked, rows], f"{name}.float")], output)
    del loaded.graph.node[:]
    loaded.graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    for tensor in [tensor for tensor in loaded.graph.initializer if tensor.name not in used]:
        loaded.graph.initializer.remove(tensor)
    if any(int(layer.codes.abs().max()) > MAX_7_BITS for layer in quantized.values()):
        properties = {entry.key: entry.value for entry in loaded.metadata_props}
        onnx.helper.set_model_props(loaded, properties | {REQUIRES_KEY: "vnni"})
    onnx.save(loaded, str(path))


def find_products(nodes: Iterable[Any], stored: Mapping[str, NDArray[Any]], model: Model) -> dict[str, Product]:
    """The products of all dense layers by the names of their outputs, recognized by the checksums of their weights."""
    known: dict[bytes, Product] = {}
    for name, layer in dense_layers(model).items():
        attention = model.get_submodule(name.rpartition(".")[0])
        parts = [(layer, 1.0)]
        if type(attention) is Attention and layer is attention.qkv:
            parts = split_qkv(attention)
        count = layer.out_features // len(parts)
        for index, (part, factor) in enumerate(parts):
            key = checksum(part.weight.detach().numpy().T)
            if key in known and known[key].layer != name:
                reason = "have equal weights, so they cannot be distinguished in the graph"
                raise ConversionError(f"{known[key].layer} and {name} {reason}")
            known[key] = Product(name, index, slice(index * count, (index + 1) * count), factor)
    weights = {node.output[0]: stored.get(node.input[1]) for node in nodes if node.op_type == "MatMul"}
    keys = {output: checksum(weight) for output, weight in weights.items() if weight is not None}
    return {output: known[key] for output, key in keys.items() if key in known}


def checksum(array: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
