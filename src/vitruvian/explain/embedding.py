"""What the embedding has learnt: principal components of its filters, and how alike its positions are."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvian.config import Size
from vitruvian.errors import ConfigError
from vitruvian.explain.attention import require_vit
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT

# D filters of P x P pixels, R rows and C columns of patches

COMPONENTS = 28
"""As many as the paper shows."""

NO_POSITIONS = {
    "none": "the model has no positions: it sees its patches as a set",
    "relative": "the model's positions are offsets inside its attention: no patch has an embedding of its own place",
}


def filter_components(model: Model, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """Principal components of the filters that read pixels, (count, P, P, channels), and each one's share of variance.

    The filters are the patch embedding's, or for a hybrid the standardized ones of the stem's first convolution.
    Components have length one; of the two signs, the one whose strongest value is positive.
    """
    kernels = pixel_filters(require_vit(model)).detach().double().cpu()  # (D, channels, P, P)
    flat = kernels.permute(0, 2, 3, 1).flatten(1)
    _, strengths, components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    variance = strengths.square()
    kept = components[:count]
    strongest = kept.gather(1, kept.abs().argmax(dim=1, keepdim=True))
    kept = kept * strongest.sign()
    side, channels = kernels.shape[-1], kernels.shape[1]
    return kept.view(-1, side, side, channels).float(), (variance / variance.sum())[:count].float()


def pixel_filters(vit: ViT) -> Tensor:
    return vit.embed.patch.weight if vit.embed.stem is None else vit.embed.stem.root.standardized()


def position_similarity(model: Model, grid: Size | None = None) -> Tensor:
    """Cosine similarity of each position's embedding with every other's, (R, C, R, C).

    Positions are learned, learned by row and column, or fixed (sin-cos), on the model's own grid or resized to `grid`.
    """
    vit = require_vit(model)
    config = vit.config
    if config.positions in NO_POSITIONS:
        raise ConfigError(NO_POSITIONS[config.positions])
    positions = vit.embed.grid_positions(grid or config.grid)
    assert positions is not None
    directions = torch.nn.functional.normalize(positions.detach().double().cpu(), dim=-1)
    return torch.einsum("rcd,xyd->rcxy", directions, directions).float()
