"""Masked-patch pre-training's inputs and targets: which patches are corrupted and how, and the color of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.order import generator_for

# B images, N patches of P x P pixels, M of them corrupted, D width

MASKED, EXCHANGED = 0.8, 0.1
"""Of the corrupted patches, the shares that become the mask embedding and another patch; the others stay."""
LEVELS = 8
"""Of each channel of a mean color: three bits."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """What becomes of each patch of some images; all have equally many corrupted ones."""

    chosen: Tensor
    """bool (B, N): the corrupted patches, whose colors are asked for."""
    masked: Tensor
    """bool (B, N): those that become the mask embedding."""
    taken_from: Tensor
    """int64 (B, N): the number of the patch that stands in each place, mostly its own."""


def draws_for(indices: Iterable[int], patches: int, seed: int, *numbers: int) -> Tensor:
    """Random numbers (B, 3, N) from 0 to 1 that depend on each image's number, the seed and `numbers` alone."""
    rows = [generator_for(seed, *numbers, int(i)).random((3, patches), np.float32) for i in indices]
    return torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, 3, patches)


def corruption_of(draws: Tensor) -> Corruption:
    """Half of the patches corrupted, rounded down: 80% masked, 10% another patch of the image, 10% as they are."""
    order, kind, other = draws.unbind(dim=1)
    N = order.shape[1]
    chosen = order.argsort(dim=1, stable=True).argsort(dim=1) < N // 2
    exchanged = chosen & (kind >= MASKED) & (kind < MASKED + EXCHANGED)
    own = torch.arange(N, device=draws.device).expand_as(order)
    step = 1 + (other * (N - 1)).long().clamp(max=N - 2)
    return Corruption(chosen, chosen & (kind < MASKED), torch.where(exchanged, (own + step) % N, own))


def corrupted(patches: Tensor, mask: Tensor, corruption: Corruption) -> Tensor:
    """Patches (B, N, D) after the corruption; `mask` broadcasts to them."""
    taken = patches.gather(1, corruption.taken_from[..., None].expand_as(patches))
    return torch.where(corruption.masked[..., None], mask.to(patches.dtype), taken)


def cut(pixels: Tensor, side: int) -> Tensor:
    """Pixels (B, C, H, W) -> the pixels of each patch (B, N, C, P, P)."""
    B, C, height, width = pixels.shape
    parts = pixels.reshape(B, C, height // side, side, width // side, side)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C, side, side)


def levels_of(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Normalized pixels as whole levels from 0 to 255, still float."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return ((pixels.float() * std + mean) * 255).round().clamp(0, 255)


def colors_of(pixels: Tensor, side: int, preprocess: Preprocess) -> Tensor:
    """The mean color of each patch as a class, int64 (B, N): three bits a channel, the first channel highest."""
    means = cut(levels_of(pixels, preprocess), side).mean(dim=(-2, -1))  # (B, N, C)
    bits = (means * LEVELS / 256).floor().long()
    places = torch.tensor([LEVELS**power for power in reversed(range(bits.shape[-1]))], device=pixels.device)
    return (bits * places).sum(dim=-1)


def shown_color(color: int, channels: int) -> tuple[int, ...]:
    """The levels in the middle of a class of colors."""
    bits = [color // LEVELS**power % LEVELS for power in reversed(range(channels))]
    return tuple(round((bit + 0.5) * 256 / LEVELS) for bit in bits)
