"""SmoothQuant: move channel scales from activations into weights, so that 8 bits suffice for both.

If a norm or another linear map produces the input of a dense layer, its channel j can be divided by s_j and column j
of the layer's weight multiplied by s_j (Xiao et al., 2023; RepQ-ViT, Li et al., 2023). All s_j are powers of two, by
which floats are multiplied without rounding: the model's outputs stay bitwise equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitruvian.errors import ConfigError
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention, Block, ParallelBlock, ResPostNormBlock
from vitruvian.model.vit import ViT

# D channels of a layer's input, O of its output

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


class Fold(NamedTuple):
    """Layers that read the same channels, and the parameters that produce them, one row per channel."""

    readers: tuple[nn.Linear, ...]
    producers: tuple[Tensor, ...]
    name: str  # of the first reader


def folds(model: ViT) -> Iterator[Fold]:
    """All places where scales can be moved."""
    for index, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, mlp, name = block.attn, block.mlp, f"blocks.{index}"
        if isinstance(block, ParallelBlock):
            yield Fold((attention.qkv, mlp.fc1), affine(block.norm1), f"{name}.attn.qkv")
        elif not isinstance(block, ResPostNormBlock):
            yield Fold((attention.qkv,), affine(block.norm1), f"{name}.attn.qkv")
            yield Fold((mlp.fc1,), affine(block.norm2), f"{name}.mlp.fc1")
        if not isinstance(attention.norm, nn.Identity):
            yield Fold((attention.proj,), affine(attention.norm), f"{name}.attn.proj")
        elif type(attention) is Attention:  # its output is a weighted mean of values; differential attention has a norm
            values = last_rows(attention.qkv, 2 * attention.proj.in_features)
            yield Fold((attention.proj,), values, f"{name}.attn.proj")
        if not isinstance(mlp.norm, nn.Identity):
            yield Fold((mlp.fc2,), affine(mlp.norm), f"{name}.mlp.fc2")
        elif mlp.gated:  # the gate is nonlinear, its factor is linear
            yield Fold((mlp.fc2,), last_rows(mlp.fc1, mlp.fc2.in_features), f"{name}.mlp.fc2")


def affine(norm: nn.Module) -> tuple[Tensor, ...]:
    """Weight and bias of a norm."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    parameters = (norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None)
    return tuple(parameter.data for parameter in parameters if parameter is not None)


def last_rows(layer: nn.Linear, start: int) -> tuple[Tensor, ...]:
    """Weight and bias of the outputs from `start` on."""
    return tuple(parameter.data[start:] for parameter in (layer.weight, layer.bias) if parameter is not None)


def smooth(model: ViT, maxima: Mapping[str, Tensor], alpha: float = ALPHA) -> ViT:
    """A copy with moved scales, given the largest magnitude (D,) of each channel that enters the named layers."""
    smoothed = deepcopy(model)
    for readers, producers, name in folds(smoothed):
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
