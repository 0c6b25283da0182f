"""Resampling along an axis as one matrix: right for every length, also where a traced graph leaves the length open."""

from __future__ import annotations

import torch
from torch import Tensor

from vitruvian.config import PositionResize
from vitruvian.settings import Size


def is_open(grid: Size) -> bool:
    """Whether the sizes are symbols of a graph that is being traced, which no comparison may fix."""
    return any(isinstance(side, torch.SymInt) for side in grid)


def resampled(image: Tensor, grid: Size, method: PositionResize) -> Tensor:
    """(R, C, D) resampled to another grid, as `F.interpolate` does it with one family's options."""
    sizes = list(zip(image.shape[:2], grid))
    if method == "dino":  # DINO hands over a factor, not a size; sampling points shift by its 0.1
        moved = torch.stack([_count(new, image) != old for old, new in sizes]).any()
        down, across = (matrix(old, new, "bicubic", image, excess=0.1 * moved) for old, new in sizes)
    else:
        down, across = (matrix(old, new, method, image) for old, new in sizes)
    return torch.einsum("rp,pqd,cq->rcd", down, image, across)


def matrix(old: int, new: int, method: str, like: Tensor, *, excess: Tensor | float = 0.0) -> Tensor:
    """Weights (new, old) of the old samples in each new one.

    Methods are `bilinear`, `bicubic`, either `_antialias` or `_aligned` (outer samples stay in place), and `zoom`,
    which is aligned and bilinear. `excess` adds to the length that the step is computed from.
    """
    method = "bilinear_aligned" if method == "zoom" else method
    place = torch.arange(new, dtype=torch.float64, device=like.device)
    sources = torch.arange(old, dtype=torch.float64, device=like.device)
    count = _count(new, like)
    if method.endswith("_antialias"):
        step = old / count
        distance = ((place[:, None] + 0.5) * step - sources - 0.5) / step.clamp(min=1)
        weights = cubic(distance, -0.5) if method.startswith("bicubic") else (1 - distance.abs()).clamp(min=0)
        return (weights / weights.sum(dim=1, keepdim=True)).to(like)
    if method.endswith("_aligned"):
        center = place * ((old - 1) / (count - 1).clamp(min=1))
    else:
        center = (place + 0.5) * (old / (count + excess)) - 0.5
    below = center.floor()
    weights = torch.zeros_like(center)[:, None] * sources
    for tap in (-1, 0, 1, 2) if method.startswith("bicubic") else (0, 1):
        distance = center - below - tap
        share = cubic(distance, -0.75) if method.startswith("bicubic") else 1 - distance.abs()
        weights = weights + share[:, None] * ((below + tap).clamp(0, old - 1)[:, None] == sources)
    return weights.to(like)


def geometric_matrix(old: int, new: int, like: Tensor) -> Tensor:
    """Weights (new, old) of offsets around a middle: the old ones are laid out at distances that grow geometrically.

    So that near offsets keep their biases when a grid grows (BEiT's release, with linear interpolation in timm). Both
    lengths are odd; past the outermost old offset its bias stays.
    """
    steps = old // 2
    if not steps:
        return like.new_ones(new, 1)
    low, high, ratio = 1.01, 1.5, 1.01
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if (ratio**steps - 1) / (ratio - 1) > new // 2 else (ratio, high)
    side = (ratio ** torch.arange(steps, dtype=torch.float64)).cumsum(0)
    places = torch.cat([-side.flip(0), side.new_zeros(1), side])
    wanted = torch.arange(-(new // 2), new // 2 + 1, dtype=torch.float64).clamp(places[0], places[-1])
    right = torch.bucketize(wanted, places).clamp(1, old - 1)[:, None]
    share = (wanted[:, None] - places[right - 1]) / (places[right] - places[right - 1])
    weights = torch.zeros(new, old, dtype=torch.float64).scatter(1, right, share).scatter(1, right - 1, 1 - share)
    return weights.to(like)


def cubic(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel."""
    x = distance.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = a * (((x - 5) * x + 8) * x - 4)
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0.0))


def _count(length: int, like: Tensor) -> Tensor:
    return torch.scalar_tensor(length, dtype=torch.float64, device=like.device)
