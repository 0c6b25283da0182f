"""What enters dense layers, in eight bits: a range for each, and the few channels that stay float.

A channel whose values exceed all others by far would leave the others a few steps of the range. It is computed in
float instead, as LLM.int8() does (Dettmers et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.compress.gptq import nearest
from vitruvian.compress.smooth import dense_layers, watched
from vitruvian.model.vit import ViT

# n tokens, D channels of a layer's input

LEVELS = 255
"""Steps of an activation."""
SAMPLED = 256
"""Tokens that are looked at, of each batch."""
SHARES = (1.0, 0.9999, 0.999, 0.998, 0.995)
"""Quantiles of the values among which the range is chosen."""
MOST_FLOAT = 2
"""Channels of a layer that may stay float."""
WORTH_IT = 0.5
"""A channel in float costs operations of its own: it has to leave less than this share of the error."""

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Input:
    """What enters a dense layer, in eight bits."""

    ends: Range
    float_channels: tuple[int, ...] = ()

    def in_int8(self, x: Tensor, otherwise: Tensor | float) -> Tensor:
        """(..., D), with something else in the channels that stay float."""
        if not self.float_channels:
            return x
        chosen = torch.ones(x.shape[-1], dtype=torch.bool)
        chosen[list(self.float_channels)] = False
        return torch.where(chosen, x, otherwise)

    def rounded(self, x: Tensor) -> Tensor:
        return self.in_int8(rounded(x, self.ends), x)


@dataclass(slots=True)
class Seen:
    """Inputs of a layer: some tokens, and the ends of every channel."""

    tokens: list[Tensor] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)

    def input_of(self, weight: Tensor, bits: int) -> Int8Input:
        """With as few channels in float as are worth it, those with the largest values."""
        x, ends = torch.cat(self.tokens), torch.cat(self.ends)
        largest = ends.abs().amax(dim=0).argsort(descending=True).tolist()
        found, error = self.error_with(x, ends, weight, bits, ())
        for count in range(1, min(MOST_FLOAT, len(largest) - 1) + 1):
            other, less = self.error_with(x, ends, weight, bits, tuple(largest[:count]))
            if less < WORTH_IT * error:
                found, error = other, less
        return found

    def error_with(
        self, x: Tensor, ends: Tensor, weight: Tensor, bits: int, float_channels: tuple[int, ...]
    ) -> tuple[Int8Input, float]:
        """These channels in float, and the mean square of what int8 then changes in what the layer gives."""
        values = torch.cat([x, ends])
        others = [channel for channel in range(values.shape[1]) if channel not in float_channels]
        found = Int8Input(ends=best_range(values[:, others].flatten()), float_channels=float_channels)
        codes, scale = nearest(found.in_int8(weight, 0.0), bits)
        changed = F.linear(found.rounded(x), found.in_int8(codes * scale, weight))
        return found, float(F.mse_loss(changed, F.linear(x, weight)))


def inputs_of(model: ViT, batches: Sequence[Tensor], bits: int) -> dict[str, Int8Input]:
    """For each dense layer the range whose rounding and clipping leave the least mean squared error."""
    layers, seen = dense_layers(model), dict[str, Seen]()
    generator = torch.Generator().manual_seed(0)

    def see(name: str, x: Tensor) -> None:
        flat = x.detach().flatten(0, -2)
        held = seen.setdefault(name, Seen())
        held.tokens.append(flat[torch.randperm(len(flat), generator=generator)[:SAMPLED]])
        held.ends.append(torch.stack(list(flat.aminmax(dim=0))))

    with torch.inference_mode():
        with watched(layers, see):
            for pixels in batches:
                model(pixels)
        return {name: held.input_of(layers[name].weight, bits) for name, held in seen.items()}


def best_range(values: Tensor) -> Range:
    ordered = values.sort().values
    found: dict[Range, float] = {}
    for share in SHARES:
        cut = round((1 - share) / 2 * (len(ordered) - 1))
        ends = min(0.0, float(ordered[cut])), max(0.0, float(ordered[len(ordered) - 1 - cut]))
        if ends[0] < ends[1]:
            found[ends] = float(F.mse_loss(rounded(values, ends), values))
    return min(found, key=found.__getitem__) if found else (0.0, 1.0)


def rounded(x: Tensor, ends: Range) -> Tensor:
    """As an activation of eight bits has it."""
    scale = (ends[1] - ends[0]) / LEVELS
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-ends[0] / scale), 0, LEVELS)
