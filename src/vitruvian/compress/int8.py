"""Eight-bit integers for a model's dense layers, and what each layer's rounding changes.

Activations have one scale a layer, found on calibration images; weights have one for each output. Sums, norms,
softmax, the patch embedding and the head stay float. Weights use seven of the eight bits: processors without VNNI add
two products in 16 bits, which larger weights make saturate, and a file that was right on one machine would be wrong on
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.compress.gptq import gptq, nearest
from vitruvian.compress.ranges import Int8Input, inputs_of
from vitruvian.compress.smooth import channel_maxima, dense_layers, smoothed, watched
from vitruvian.engines.export import Forward
from vitruvian.errors import ConfigError, argument
from vitruvian.machine import processor_flags
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Size
from vitruvian.weights.load import with_merging

WEIGHT_BITS = 7
VNNI = {"avx512_vnni", "avx_vnni", "asimddp"}
"""Flags of processors that multiply eight-bit numbers and add them in 32 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Layer:
    """A dense layer in int8."""

    input: Int8Input
    codes: Tensor
    """(O, D) The weights as integers."""
    scale: Tensor
    """(O, 1)"""

    @property
    def weight(self) -> Tensor:
        return self.codes * self.scale


def has_vnni() -> bool:
    """Whether the processor adds eight-bit products without saturation, as far as the system reports it."""
    return bool(VNNI & processor_flags())


def check_bits(bits: int) -> None:
    if bits not in (7, 8):
        raise ConfigError(f"{argument('weight_bits', bits)} is neither 7 nor 8")
    if bits == 8 and not has_vnni():
        raise ConfigError(
            f"{argument('weight_bits', 8)} saturates on this processor, which has no VNNI; leave it out for 7"
        )


def prepared(model: Model, batches: Sequence[Tensor], bits: int = WEIGHT_BITS) -> tuple[ViT, dict[str, Int8Input]]:
    """The model with scales moved into its weights, and what enters each dense layer of it."""
    dense_layers(model)  # refuses what is no Vision Transformer
    assert isinstance(model, ViT)
    ready = smoothed(model, channel_maxima(model, batches)).eval()
    return ready, inputs_of(ready, batches, bits)


def quick_layers(model: ViT, inputs: Mapping[str, Int8Input], bits: int = WEIGHT_BITS) -> dict[str, Int8Layer]:
    """Every dense layer, each weight rounded by itself."""
    layers = dense_layers(model)
    made = {name: nearest(each.in_int8(layers[name].weight.detach(), 0.0), bits) for name, each in inputs.items()}
    return {name: Int8Layer(input=inputs[name], codes=codes, scale=scale) for name, (codes, scale) in made.items()}


@torch.no_grad()
def int8_layers(
    model: ViT, inputs: Mapping[str, Int8Input], batches: Sequence[Tensor], *, bits: int, track: Track = no_tracking
) -> dict[str, Int8Layer]:
    """Every dense layer, with weights rounded by GPTQ; a block at a time, so that the moments of one are held."""
    layers, found = dense_layers(model), dict[str, Int8Layer]()
    tokens, grids = [model.embed(pixels) for pixels in batches], [model.grid_of(pixels) for pixels in batches]
    for number, block in track(list(enumerate(model.blocks)), len(model.blocks)):
        own = {name: layer for name, layer in layers.items() if name.startswith(f"blocks.{number}.")}
        moments: dict[str, Tensor] = {}

        def see(name: str, x: Tensor, moments: dict[str, Tensor] = moments) -> None:
            flat = inputs[name].in_int8(inputs[name].rounded(x), 0.0).flatten(0, -2)  # (n, D)
            moments[name] = moments.get(name, 0) + flat.T @ flat

        with watched(own, see):
            tokens = [block(x, None, grid) for x, grid in zip(tokens, grids)]
        for name, layer in own.items():
            codes, scale = gptq(inputs[name].in_int8(layer.weight, 0.0), moments[name], bits)
            found[name] = Int8Layer(input=inputs[name], codes=codes, scale=scale)
    return found


def simulated(model: ViT, chosen: Mapping[str, Int8Layer], run: Forward | None = None) -> Forward:
    """The model, or a part of it, with these layers rounded as int8 rounds them, computed in float."""
    layers = {name: layer for name, layer in dense_layers(model).items() if name in chosen}

    def forward(pixels: Tensor) -> Tensor:
        kept = {name: layer.weight.data for name, layer in layers.items()}
        try:
            for name, layer in layers.items():
                layer.weight.data = chosen[name].input.in_int8(chosen[name].weight, kept[name])
            with watched(layers, lambda name, x: chosen[name].input.rounded(x)), torch.no_grad():
                return (run or model)(pixels)
        finally:
            for name, layer in layers.items():
                layer.weight.data = kept[name]

    return forward


def sensitivity(
    model: ViT, found: Mapping[str, Int8Layer], pixels: Tensor, *, track: Track = no_tracking
) -> dict[str, float]:
    """How far each layer alone in int8 moves the answers: mean Kullback-Leibler divergence in nats, largest first.

    Where tokens merge, of the same weights without merging.
    """
    if model.config.merges_tokens:
        plain = with_merging(model).eval()
        assert isinstance(plain, ViT)
        model = plain
    inputs: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        for block in model.blocks:
            seen = block.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
            stack.callback(seen.remove)
        wanted = model(pixels).log_softmax(dim=-1)
    moved: dict[str, float] = {}
    for name in track(list(found), len(found)):
        number = int(name.split(".")[1])
        rest = partial(from_block, model, number, model.grid_of(pixels))
        given = simulated(model, {name: found[name]}, rest)(inputs[number]).log_softmax(dim=-1)
        moved[name] = float(F.kl_div(given, wanted, log_target=True, reduction="batchmean"))
    return dict(sorted(moved.items(), key=lambda pair: -pair[1]))


def from_block(model: ViT, number: int, grid: Size, x: Tensor) -> Tensor:
    """The answers (B, K) from what enters a block (B, N, D)."""
    for block in model.blocks[number:]:
        x = block(x, model.tokens_read if block is model.blocks[-1] else None, grid)
    return model.forward_head(x if model.config.norm_after_pool else model.norm(x))
