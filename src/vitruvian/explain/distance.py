"""How far each head looks: the mean attention distance of the paper's Figure 7, right."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitruvian.config import Size
from vitruvian.errors import DataError
from vitruvian.explain.attention import grid_of, inference, require_vit
from vitruvian.model.build import Model

# B images, R rows and C columns of patches, P = R * C, T tokens before them, N = T + P, H heads, L layers


def attention_distance(model: Model, batches: Iterable[Tensor]) -> Tensor:
    """Pixels between a query patch and what it attends to, (L, H), averaged over queries and images.

    `batches` are normalized pixels (B, channels, height, width). One layer of one batch is held at a time.
    """
    vit = require_vit(model)
    sums = torch.zeros(vit.config.layers, vit.config.heads, dtype=torch.float64)
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
