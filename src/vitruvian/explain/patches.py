"""Patch tokens of a frozen model, and their principal components as colors that mean the same in all images."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.model.batching import eval_mode
from vitruvian.model.vit import ViT

# B images, R rows and C columns of patches, D width, P patches of all images

SINK = 2.0
"""A patch is an attention sink if its norm exceeds this many times the median of its image.

In ViT-Ti/16 of AugReg, a fiftieth of the patches has more than 20 times the median; the norms of the others reach 1.7.
"""
MOST_PATCHES = 2**16  # components are fitted on at most this many patches, an equal share of each image
PART_COLORS = ("red", "green", "blue")
TAILS = (0.02, 0.98)  # quantiles of a component over the foreground that get the darkest and the brightest level


def patch_tokens(vit: ViT, pixels: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Patch tokens after some layers, normalized so that each has the same influence.

    Attention sinks (Darcet and others, 2024) hold no local information: each is replaced by the mean of the patches
    around it. Tokens before the patches are left out.

    Args:
        vit: A ViT.
        pixels: Normalized pixels (B, channels, height, width).
        layers: Layers from 0, negative from the end. The tokens of several layers are concatenated.

    Returns:
        Tokens (B, R, C, D * layers), and whether a patch is a sink in one of the layers (B, R, C).
    """
    chosen = sorted({vit.layer(layer) for layer in layers})
    with eval_mode(vit), torch.no_grad():
        grids = vit.forward_intermediates(pixels, chosen, stop_early=True, intermediates_only=True)
    tokens, sinks = zip(*(without_sinks(grid.float().cpu()) for grid in grids))
    return torch.cat(tokens, dim=-1), torch.stack(sinks).any(dim=0)


def without_sinks(grid: Tensor) -> tuple[Tensor, Tensor]:
    """Normalized tokens (B, R, C, D) of one layer's grid (B, D, R, C), and its sinks (B, R, C)."""
    norms = grid.norm(dim=1)  # (B, R, C)
    sinks = norms > SINK * norms.flatten(1).median(dim=1).values[:, None, None]
    tokens = F.layer_norm(grid.movedim(1, -1), grid.shape[1:2]).movedim(-1, 1)  # (B, D, R, C)
    known = (~sinks[:, None]).to(tokens)
    sums, counts = (F.avg_pool2d(x, 3, stride=1, padding=1) for x in (tokens * known, known))
    whole = (tokens * known).mean(dim=(2, 3), keepdim=True) / known.mean(dim=(2, 3), keepdim=True)
    around = torch.where(counts > 0, sums / counts.clamp(min=1e-6), whole)
    return torch.where(sinks[:, None], around, tokens).movedim(1, -1), sinks


def default_layer(vit: ViT) -> int:
    """The layer whose tokens the components are fitted on: the one after two thirds of the blocks.

    The last layers of a model that classifies by its class token encode less and less of what a patch shows.
    """
    return max(0, round(vit.config.depth * 2 / 3) - 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Components:
    """Principal components of patch tokens, fitted over many images, and how they become colors."""

    mean: Tensor  # (D,)
    first: Tensor  # (D,) the first component of all patches; the foreground is above `threshold`
    threshold: float
    foreground_mean: Tensor  # (D,)
    parts: Tensor  # (D, 3) the first components of the foreground: red, green and blue
    low: Tensor  # (3,) values with the darkest level
    high: Tensor  # (3,) values with the brightest level

    def scores(self, tokens: Tensor) -> Tensor:
        """The first component (...) of tokens (..., D): positive for the foreground."""
        return (tokens.double() - self.mean) @ self.first - self.threshold

    def colors(self, tokens: Tensor) -> NDArray[np.float32]:
        """Levels of red, green and blue from 0 to 1 (..., 3) of tokens (..., D); NaN for the background."""
        values = ((tokens.double() - self.foreground_mean) @ self.parts - self.low) / (self.high - self.low)
        shown = torch.where(self.scores(tokens)[..., None] > 0, values.clamp(0, 1), torch.nan)
        return np.asarray(shown.float().numpy())


def fit_components(grids: Iterable[Tensor], images: int) -> Components:
    """Fit components over the patches of all images, so that a part has the same color in each.

    The first component of all patches separates foreground and background: of its two sides, cut where the variance
    within them is least (Otsu), the foreground is the one with fewer patches at the border of the images. The colors
    are the first three components of the foreground alone, with the signs that make their largest weight positive.

    Args:
        grids: Tokens (R, C, D) of each image.
        images: Number of images, at least as many as there are grids.
    """
    kept, at_border = [], []
    generator = torch.Generator().manual_seed(0)
    for grid in grids:
        rows, columns, width = grid.shape
        border = torch.ones(rows, columns, dtype=torch.bool)
        border[1:-1, 1:-1] = False
        chosen = torch.randperm(rows * columns, generator=generator)[: max(1, MOST_PATCHES // images)]
        kept.append(grid.reshape(-1, width)[chosen])
        at_border.append(border.flatten()[chosen])
    tokens, border = torch.cat(kept).double(), torch.cat(at_border)  # (P, D)
    mean, axes = principal_axes(tokens, 1)
    first = axes[:, 0]
    values = (tokens - mean) @ first
    if border.any() and not border.all() and values[border].mean() > values[~border].mean():
        first, values = -first, -values
    threshold = otsu_threshold(values)
    is_foreground = values > threshold
    foreground = tokens[is_foreground] if is_foreground.sum() > len(PART_COLORS) else tokens
    foreground_mean, parts = principal_axes(foreground, len(PART_COLORS))
    low, high = ((foreground - foreground_mean) @ parts).quantile(torch.tensor(TAILS).double(), dim=0)
    return Components(
        mean=mean,
        first=first,
        threshold=threshold,
        foreground_mean=foreground_mean,
        parts=parts,
        low=low,
        high=torch.maximum(high, low + 1e-6),
    )


def principal_axes(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean (D,) of tokens (P, D), and the components (D, count) of most variance, their largest weight positive."""
    mean = tokens.mean(dim=0)
    centered = tokens - mean
    _, axes = torch.linalg.eigh(centered.T @ centered)
    axes = axes.flip(1)[:, :count]
    strongest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    return mean, axes * strongest.sign()


def otsu_threshold(values: Tensor) -> float:
    """The cut with the least variance within the two sides (Otsu, 1979)."""
    ordered = values.sort().values
    n = len(ordered)
    if n < 2:
        return float(ordered[0]) - 1.0
    below = torch.arange(1, n, dtype=torch.float64)  # number of values below each cut
    sums = ordered.cumsum(dim=0)
    gap = sums[:-1] / below - (sums[-1] - sums[:-1]) / (n - below)
    return float(ordered[int((below * (n - below) * gap.square()).argmax())])
