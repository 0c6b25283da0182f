"""What a model has learned, in numbers: filters of its embedding, similarity of positions, mean attention distance.

These are the three parts of the paper's Figure 7.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError, DataError
from vitruvian.explain.attention import grid_of, inference, require_shares, require_vit
from vitruvian.model.build import Model
from vitruvian.settings import Size

# B images, R rows and C columns of patches, P = R * C, T tokens before them, N = T + P, H heads, L layers
# D filters of S x S pixels

COMPONENTS = 28
"""As many as the paper shows."""

NO_POSITIONS = {
    "rope": "the model's positions turn queries and keys inside its attention: no patch has an embedding of its own",
    "none": "the model has no positions: it sees its patches as a set",
    "relative": "the model's positions are offsets inside its attention: no patch has an embedding of its own place",
    "relative_bias": "the model's positions are biases inside its attention: no patch has an embedding of its own",
}


def filter_components(model: Model, count: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    """Principal components of the filters that read pixels, (count, S, S, channels), and each one's share of variance.

    The filters are the patch embedding's, or for a hybrid those of the stem's first convolution, as it uses them.
    Components have length one; of the two signs, the one whose strongest value is positive.
    """
    embed = require_vit(model).embed
    filters = embed.patch.weight if embed.stem is None else embed.stem.pixel_filters()
    kernels = filters.detach().double().cpu()  # (D, channels, S, S)
    flat = kernels.permute(0, 2, 3, 1).flatten(1)
    _, strengths, components = torch.linalg.svd(flat - flat.mean(dim=0), full_matrices=False)
    variance = strengths.square()
    kept = components[:count]
    strongest = kept.gather(1, kept.abs().argmax(dim=1, keepdim=True))
    kept = kept * strongest.sign()
    side, channels = kernels.shape[-1], kernels.shape[1]
    return kept.view(-1, side, side, channels).float(), (variance / variance.sum())[:count].float()


def position_kind(config: ViTConfig) -> str:
    """The kind of positions that are added to patches; `rope` where only rotations tell places."""
    return "rope" if config.rope is not None and config.pos_embed == "none" else config.pos_embed


def position_similarity(model: Model, grid: Size | None = None) -> Tensor:
    """Cosine similarity of each position's embedding with every other's, (R, C, R, C).

    Positions are learned, learned by row and column, or fixed (sin-cos), on the model's own grid or resized to `grid`.
    """
    vit = require_vit(model)
    config = vit.config
    if (kind := position_kind(config)) in NO_POSITIONS:
        raise ConfigError(NO_POSITIONS[kind])
    positions = vit.embed.grid_positions(grid or config.grid)
    assert positions is not None
    directions = torch.nn.functional.normalize(positions.detach().double().cpu(), dim=-1)
    return torch.einsum("rcd,xyd->rcxy", directions, directions).float()


def attention_distance(model: Model, batches: Iterable[Tensor]) -> Tensor:
    """Pixels between a query patch and what it attends to, (L, H), averaged over queries and images.

    `batches` are normalized pixels (B, channels, height, width). One layer of one batch is held at a time.
    """
    vit = require_shares(model, "attention distance")
    sums = torch.zeros(vit.config.depth, vit.config.num_heads, dtype=torch.float64)
    images = 0
    with inference(vit):
        for pixels in batches:
            grid = grid_of(vit, pixels)
            for layer, weights in vit.attention_maps(pixels):
                sums[layer] += distances(weights, grid, vit.config.stride).sum(dim=0).double().cpu()
            images += len(pixels)
    if not images:
        raise DataError("no image to measure the attention distance on")
    return sums / images


def distances(weights: Tensor, grid: Size, stride: int) -> Tensor:
    """Attention (B, H, N, N) -> mean distance in pixels, (B, H).

    Tokens before the patches have no place: as queries they are left out, and as keys too, so that the
    weights on patches sum to one again.
    """
    apart = patch_distances(grid).to(weights) * stride
    among = weights[:, :, -len(apart) :, -len(apart) :]  # (B, H, P, P)
    on_patches = among.sum(dim=-1).clamp(min=torch.finfo(weights.dtype).tiny)
    return ((among * apart).sum(dim=-1) / on_patches).mean(dim=-1)


def patch_distances(grid: Size) -> Tensor:
    """Euclidean distance between the centers of any two patches, in patches, (P, P)."""
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float32) for side in grid), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], dim=1)
    return (places[:, None] - places[None]).square().sum(dim=-1).sqrt()
