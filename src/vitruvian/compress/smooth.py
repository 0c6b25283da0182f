"""Channel scales moved from activations into weights, so that eight bits suffice for both (SmoothQuant, RepQ-ViT).

Where a norm, or another linear map, makes the input of a dense layer, its channel j may be divided by s_j if column j
of the layer's weight is multiplied by s_j. All s_j are powers of two, which floats multiply without rounding: the
model's answers stay the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitruvian.errors import ConfigError
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention, Block, ParallelBlock, ResPostNormBlock
from vitruvian.model.vit import ViT

# D channels of a layer's input, O of its output

ALPHA = 0.5
"""How much of the difference between channels moves into the weights; SmoothQuant's value."""
LARGEST = 2.0**12
"""Scales lie between this and its inverse."""


def dense_layers(model: Model) -> dict[str, nn.Linear]:
    """The layers of all blocks that are quantized, by name: nine tenths of the arithmetic and more."""
    if not isinstance(model, ViT):
        raise ConfigError("int8 is for Vision Transformers, and this model is a ResNet")
    names = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    wanted = [f"blocks.{layer}.{name}" for layer in range(len(model.blocks)) for name in names]
    found = {name: model.get_submodule(name) for name in wanted}
    return {name: layer for name, layer in found.items() if isinstance(layer, nn.Linear)}


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that read the same channels, and the parameters that make these, a row a channel."""

    readers: tuple[nn.Linear, ...]
    made_by: tuple[Tensor, ...]
    name: str
    """Of the first reader."""


def folds(model: ViT) -> Iterator[Fold]:
    """Every place where scales can move."""
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        attention, mlp, name = block.attn, block.mlp, f"blocks.{number}"
        if not isinstance(block, ResPostNormBlock):
            shared = (mlp.fc1,) if isinstance(block, ParallelBlock) else ()
            yield from fold((attention.qkv, *shared), affine(block.norm1), f"{name}.attn.qkv")
            if not shared:
                yield from fold((mlp.fc1,), affine(block.norm2), f"{name}.mlp.fc1")
        if not isinstance(attention.norm, nn.Identity):
            made = affine(attention.norm)
        else:  # weighted means of values; a differential attention has a norm in between
            made = rows(attention.qkv, 2 * attention.proj.in_features) if type(attention) is Attention else ()
        yield from fold((attention.proj,), made, f"{name}.attn.proj")
        if not isinstance(mlp.norm, nn.Identity):
            made = affine(mlp.norm)
        else:  # a gate is not linear, what it multiplies is
            made = rows(mlp.fc1, mlp.fc2.in_features) if mlp.gated else ()
        yield from fold((mlp.fc2,), made, f"{name}.mlp.fc2")


def fold(readers: tuple[nn.Linear, ...], made_by: tuple[Tensor, ...], name: str) -> Iterator[Fold]:
    if made_by:
        yield Fold(readers, made_by, name)


def affine(norm: nn.Module) -> tuple[Tensor, ...]:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    found = (norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None)
    return tuple(each.data for each in found if each is not None)


def rows(layer: nn.Linear, start: int) -> tuple[Tensor, ...]:
    """What makes the last outputs of a layer."""
    return tuple(each.data[start:] for each in (layer.weight, layer.bias) if each is not None)


def smoothed(model: ViT, largest: Mapping[str, Tensor], alpha: float = ALPHA) -> ViT:
    """A copy with scales moved, by the largest magnitude (D,) of each channel that enters the named layers."""
    copied = deepcopy(model)
    for each in folds(copied):
        weights = torch.stack([reader.weight.data.abs().amax(dim=0) for reader in each.readers]).amax(dim=0)
        scale = powers_of_two(largest[each.name].to(weights), weights, alpha)
        for reader in each.readers:
            reader.weight.data.mul_(scale)
        for made in each.made_by:
            made.div_(scale if made.dim() == 1 else scale[:, None])
    return copied


def powers_of_two(inputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """inputs^alpha / weights^(1 - alpha), each (D,), as the nearest power of two; 1 for channels without values."""
    exponent = alpha * inputs.log2() - (1 - alpha) * weights.log2()
    exponent = torch.where(exponent.isfinite(), exponent - exponent[exponent.isfinite()].mean(), 0.0)
    return exponent.round().exp2().clamp(1 / LARGEST, LARGEST)


@contextmanager
def watched(layers: Mapping[str, nn.Linear], see: Callable[[str, Tensor], Tensor | None]) -> Iterator[None]:
    """While active, `see` gets what enters each layer, and may replace it."""

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor | None]:
        return lambda _, given: see(name, given[0])

    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(watch(name)).remove)
        yield


def channel_maxima(model: ViT, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """The largest magnitude of each channel (D,) that enters each dense layer."""
    found: dict[str, Tensor] = {}

    def see(name: str, x: Tensor) -> None:
        most = x.detach().abs().flatten(0, -2).amax(dim=0)
        found[name] = torch.maximum(found[name], most) if name in found else most

    with watched(dense_layers(model), see), torch.inference_mode():
        for pixels in batches:
            model(pixels)
    return {name: value.clone() for name, value in found.items()}
