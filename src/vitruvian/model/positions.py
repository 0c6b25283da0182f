"""Positions that act inside attention: offsets of tokens, relative biases, rotations of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitruvian.config import PositionResize, RopeConfig, ViTConfig
from vitruvian.model.resample import geometric_matrix, is_open, matrix
from vitruvian.settings import Size

Table = TypeVar("Table")
TIMM_RESIZE: PositionResize = "bicubic_antialias"
"""How learned positions follow another grid in timm, which has a way of its own for relative biases."""

# B images, N tokens (T before the patches), H heads, K = D // H, R rows and C columns of patches


class AttentionPosition(nn.Module):
    """What an attention layer knows of places: it may turn queries and keys, and add to their products."""

    def rotate(self, q: Tensor, k: Tensor, grid: Size) -> tuple[Tensor, Tensor]:  # each (B, H, N, K)
        return q, k

    def bias(self, q: Tensor, grid: Size) -> Tensor | None:  # (B, H, N, K) -> (B or 1, H, N, N)
        return None


class Offsets(AttentionPosition):
    """The paper's relative positions: each query also attends to the embedding of its key's offset.

    Offsets are one-dimensional, along the sequence of tokens; another number of tokens interpolates the table.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        tokens = config.prefix_tokens + config.grid[0] * config.grid[1]
        self.offsets = nn.Parameter(torch.empty(2 * tokens - 1, config.head_width))

    def bias(self, q: Tensor, grid: Size) -> Tensor:
        N = q.shape[2]
        table: Tensor = self.offsets
        if is_open(grid) or len(table) != 2 * N - 1:
            table = matrix(len(table), 2 * N - 1, "bilinear_aligned", table) @ table
        place = torch.arange(N, device=q.device)
        index = place[:, None] - place[None] + N - 1  # (N, N)
        products = q @ table.T * q.shape[-1] ** -0.5  # (B, H, N, 2 N - 1)
        return products.gather(-1, index.expand(*q.shape[:2], -1, -1))


class RelativeBias(AttentionPosition):
    """BEiT's relative position bias: a number a head for each two-dimensional offset, and three for the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.method = config.numerics.position_resize
        rows, columns = config.grid
        self.table = nn.Parameter(torch.empty((2 * rows - 1) * (2 * columns - 1) + 3, config.num_heads))

    def bias(self, q: Tensor, grid: Size) -> Tensor:
        table = resize_bias_table(self.table, self.grid, grid, self.method)
        index = kept(relative_index, grid).to(q.device)
        return table[index].permute(2, 0, 1)[None].to(q.dtype)  # (1, H, N, N)


@lru_cache(maxsize=24)
def _kept(make: Callable[..., Table], *settings: Hashable) -> Table:
    with torch.inference_mode(False):  # a table first made for a prediction is used in training, too
        return make(*settings)


def kept(make: Callable[..., Table], *settings: Hashable) -> Table:
    """The table of these settings, made once; a graph that is being traced makes its own, of symbols."""
    return make(*settings) if torch.compiler.is_compiling() else _kept(make, *settings)


def geometric_biases(config: ViTConfig) -> bool:
    """Whether relative biases follow another grid as timm resizes them, which needs to know its size."""
    return config.pos_embed == "relative_bias" and config.numerics.position_resize == TIMM_RESIZE


def resize_bias_table(table: Tensor, old: Size, new: Size, method: PositionResize) -> Tensor:
    """The biases (offsets + 3, H) for another grid, as timm does it, or bilinear as in transformers.

    `method` is that of learned positions, which tells the two apart. Biases of the class token stay.
    """
    if not is_open(new) and tuple(old) == tuple(new):
        return table
    offsets = [(2 * was - 1, 2 * side - 1) for was, side in zip(old, new)]
    if method == TIMM_RESIZE:
        down, across = (geometric_matrix(was, side, table) for was, side in offsets)
    else:
        down, across = (matrix(was, side, "bilinear", table) for was, side in offsets)
    image = table[:-3].reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
    return torch.cat([torch.einsum("rp,pqh,cq->rch", down, image, across).flatten(0, 1), table[-3:]])


def relative_index(grid: Size) -> Tensor:
    """Row of the bias table for each two tokens, the class token first, (N, N)."""
    rows, columns = grid
    place = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
    down, across = place[:, :, None] - place[:, None]
    index = (down + rows - 1) * (2 * columns - 1) + across + columns - 1
    offsets = torch.full((1, rows * columns + 1), (2 * rows - 1) * (2 * columns - 1))
    index = torch.cat([offsets[:, 1:].T + 1, index], dim=1)  # every token to the class token
    return torch.cat([torch.cat([offsets[:, :1] + 2, offsets[:, 1:]], dim=1), index])


class Rotary(AttentionPosition):
    """RoPE: patches' queries and keys are turned by angles that grow with row and column; other tokens stay."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        assert config.rope is not None
        self.rope, self.prefix, self.size = config.rope, config.prefix_tokens, config.head_width
        self.frequencies: nn.Parameter | None = None
        if self.rope.kind == "mixed":  # by row and column, for each head
            self.frequencies = nn.Parameter(torch.empty(2, config.num_heads, self.size // 2))

    def rotate(self, q: Tensor, k: Tensor, grid: Size) -> tuple[Tensor, Tensor]:
        sin, cos = (table.to(q) for table in self.tables(grid))
        return self.turned(q, sin, cos), self.turned(k, sin, cos)

    def turned(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        T = self.prefix
        patches = x[:, :, T:]
        patches = patches * cos + (turn_halves if self.rope.half else turn_pairs)(patches) * sin
        return torch.cat([x[:, :, :T], patches], dim=2) if T else patches

    def tables(self, grid: Size) -> tuple[Tensor, Tensor]:
        if self.frequencies is None:
            return kept(axial_tables, self.rope, grid, self.size)
        place = rope_places(self.rope, grid).to(self.frequencies)
        angles = torch.einsum("na,ahk->hnk", place, self.frequencies)  # (H, R C, K / 2)
        return laid_out(angles, half=self.rope.half)


def axial_tables(rope: RopeConfig, grid: Size, size: int) -> tuple[Tensor, Tensor]:
    """Sine and cosine (R C, K) of angles with frequencies of their own for the rows and for the columns."""
    bands = 1 / rope.temperature ** (torch.arange(size // 4, dtype=torch.float32) / (size // 4))
    angles = (rope_places(rope, grid)[:, :, None] * bands).flatten(1)
    return laid_out(angles, half=rope.half)


def rope_places(rope: RopeConfig, grid: Size) -> Tensor:
    """Row and column (or column and row) of each patch, in the unit of the model's angles, (R C, 2)."""
    axes = [torch.arange(side, dtype=torch.float32) for side in grid]
    if rope.kind == "normalized":
        axes = [2 * math.pi * (2 * (axis + 0.5) / side - 1) for axis, side in zip(axes, grid)]
    else:
        axes = [axis + rope.offset for axis in axes]
        if rope.reference_grid is not None:
            axes = [axis / side * was for axis, side, was in zip(axes, grid, rope.reference_grid)]
    place = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return place.flip(-1) if rope.columns_first else place


def laid_out(angles: Tensor, *, half: bool) -> tuple[Tensor, Tensor]:
    """Sine and cosine of angles (..., K / 2) for every channel: halves side by side, or pairs of neighbors."""
    angles = torch.cat([angles, angles], dim=-1) if half else angles.repeat_interleave(2, dim=-1)
    return angles.sin(), angles.cos()


def turn_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def turn_pairs(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def attention_position(config: ViTConfig) -> AttentionPosition | None:
    """The part that a model's attention needs for its positions, if any."""
    if config.rope is not None:
        return Rotary(config)
    kinds = {"relative": Offsets, "relative_bias": RelativeBias}
    return kinds[config.pos_embed](config) if config.pos_embed in kinds else None
