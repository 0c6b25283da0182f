"""Where tokens merge with the least change of the answers: a few layers of the middle, found on a few images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.config import INNER_POSITIONS, ViTConfig
from vitruvian.cost import multiply_adds
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_cores
from vitruvian.progress import print_status, track
from vitruvian.weights.load import with_merging

Counts = tuple[int, ...]
"""Tokens that merge in each layer; empty where none do."""

PLACES = 3
"""Layers that merge: each costs time of its own, whatever it merges."""
SHARES = (0.03, 0.05, 0.07, 0.09, 0.12, 0.15, 0.2)
"""Of an image's patches that merge in each of these layers, from few to many."""
TRIED_SHARE = 0.12
"""What the places are compared with."""


def can_merge(model: Model) -> bool:
    config = model.config
    if not isinstance(config, ViTConfig) or config.merges_tokens:
        return False
    return not (config.rope or config.pos_embed in INNER_POSITIONS)


def merging(model: Model, counts: Counts) -> Model:
    """The model with so many tokens merged in each layer; the same weights."""
    return with_merging(model, counts) if counts else model


def ladder(model: Model, pixels: Tensor) -> list[Counts]:
    """More and more merged tokens, in the layers where that changes the answers to these pixels the least."""
    if not can_merge(model):
        return []
    assert isinstance(model.config, ViTConfig)
    depth, patches = model.config.depth, model.config.grid[0] * model.config.grid[1]
    places = candidates_of(depth)
    if not places:
        return []
    wanted = answers(model, pixels)
    moved = {}
    for place in track(places, len(places), "where tokens merge"):
        moved[place] = cost_of(model, counts_at(place, depth, patches, TRIED_SHARE), pixels, wanted)
    best = min(moved, key=moved.__getitem__)
    print_status(f"tokens merge in blocks {', '.join(map(str, best))}, where the answers change the least")
    return list(dict.fromkeys(counts_at(best, depth, patches, share) for share in SHARES))


def candidates_of(depth: int) -> list[tuple[int, ...]]:
    """Layers, evenly apart, from the second sixth on: later ones save too little, earlier ones change too much."""
    apart = max(1, depth // 6)
    found = [tuple(range(start, depth - 1, apart))[:PLACES] for start in range(depth // 6, depth // 3 + 1)]
    return list(dict.fromkeys(place for place in found if place))


def counts_at(place: tuple[int, ...], depth: int, patches: int, share: float) -> Counts:
    r = max(1, round(share * patches))
    return tuple(r if layer in place else 0 for layer in range(depth))


def cost_of(model: Model, counts: Counts, pixels: Tensor, wanted: Tensor) -> float:
    """How far the answers move for what is saved.

    Roots of divergences: they grow with the number of tokens, as what is saved does, and a few images do not decide.
    """
    merged = merging(model, counts)
    saved = 1 - multiply_adds(merged.config) / multiply_adds(model.config)
    moved = F.kl_div(answers(merged, pixels), wanted, log_target=True, reduction="none").sum(dim=1)
    return float(moved.clamp(min=0).sqrt().mean()) / saved


def answers(model: Model, pixels: Tensor) -> Tensor:
    """Logarithms of the probabilities (B, K)."""
    with torch.inference_mode():
        return map_over_cores(model, pixels).log_softmax(dim=-1)


def words_of(counts: Counts) -> str:
    """`16 tokens merged in blocks 4, 6, 8`."""
    places = ", ".join(str(layer) for layer, r in enumerate(counts) if r)
    amounts = dict.fromkeys(r for r in counts if r)
    return f"{' and '.join(map(str, amounts))} tokens merged in {'blocks' if ',' in places else 'block'} {places}"
