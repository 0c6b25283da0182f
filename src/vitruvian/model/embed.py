"""Pixels to tokens: patches, the tokens before them, positions and how positions follow another grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import PositionResize, ViTConfig
from vitruvian.model.batch_stems import MobileClipStem, ResNetDStem
from vitruvian.model.conv import ConvStem
from vitruvian.model.mlp import norm_layer
from vitruvian.model.resample import is_open, matrix, resampled
from vitruvian.model.resnet import Stem
from vitruvian.settings import Size

# B images, R rows and C columns of patches, N = R * C, T tokens before the patches, D width


STEMS: dict[str, type[Stem] | type[ConvStem] | type[ResNetDStem] | type[MobileClipStem]] = {
    **dict.fromkeys(("hybrid", "timm", "bit"), Stem),
    "conv": ConvStem,
    "resnet_d": ResNetDStem,
    "mobile_clip": MobileClipStem,
}
"""By the style that a StemConfig has."""


class Embedding(nn.Module):
    """Pixels (B, channels, height, width) -> tokens (B, T + N, D), positions included."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        D = config.width
        rows, columns = config.grid
        self.stem = STEMS[config.stem.style](config.stem, config.in_channels) if config.stem else None
        channels = config.stem.out_channels if config.stem else config.in_channels
        self.patch = nn.Conv2d(channels, D, config.patch_size, config.patch_size, bias=config.patch_bias)
        if config.cls_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        if config.distillation:
            self.dist_token = nn.Parameter(torch.empty(1, 1, D))
        if config.reg_tokens:
            self.reg_tokens = nn.Parameter(torch.empty(1, config.reg_tokens, D))
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.empty(rows, columns, D))
        elif config.pos_embed in ("learned_2d", "factorized"):
            channels = D // 2 if config.pos_embed == "learned_2d" else D
            self.row_pos_embed = nn.Parameter(torch.empty(rows, channels))
            self.col_pos_embed = nn.Parameter(torch.empty(columns, channels))
        if config.prefix_pos_embeds:
            self.prefix_pos_embed = nn.Parameter(torch.empty(config.prefix_pos_embeds, D))
        self.dropout = nn.Dropout(config.dropout)
        self.patch_norm = norm_layer(config, D) if config.patch_norm else nn.Identity()
        self.norm = norm_layer(config, D) if config.pre_norm else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return self.placed(self.patches(pixels), grid)

    def placed(self, patches: Tensor, grid: Size) -> Tensor:
        """Patch tokens (B, N, D) of this grid with their positions, behind the tokens before them."""
        positions = self.grid_positions(grid)
        if positions is not None:
            patches = patches + positions.flatten(0, 1)
        prefix = self.prefix()
        if prefix is not None:
            patches = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)  # (B, T + N, D)
        return self.norm(self.dropout(patches))

    def patches(self, pixels: Tensor) -> Tensor:
        """The patch tokens (B, N, D) alone, without positions."""
        features = self.stem(pixels) if self.stem else pixels
        B, C, height, width = features.shape
        P = self.config.patch_size
        if self.config.trim:
            features = features[..., : height // P * P, : width // P * P]
        # One product of matrices: the convolution's sums, sooner, and with tokens side by side in memory.
        cut = features.reshape(B, C, height // P, P, width // P, P)
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        patches = F.linear(cut.reshape(B, -1, C * P * P), self.patch.weight.flatten(1), self.patch.bias)
        return self.patch_norm(patches)

    def prefix(self) -> Tensor | None:
        """The tokens before the patches with their positions, (1, T, D)."""
        config = self.config
        placed: list[Tensor] = [self.cls_token] if config.cls_token else []
        if config.distillation:
            placed.append(self.dist_token)
        if config.prefix_pos_embeds:
            placed = [torch.cat(placed, dim=1) + self.prefix_pos_embed]
        tokens = [*placed, self.reg_tokens] if config.reg_tokens else placed
        if not tokens:
            return None
        return torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0]

    def grid_positions(self, grid: Size) -> Tensor | None:
        """What is added to the patch tokens of this grid, (R, C, D); None where positions act elsewhere."""
        place = GRID_POSITIONS.get(self.config.pos_embed)
        return place(self, grid) if place else None


def learned_positions(embed: Embedding, grid: Size) -> Tensor:
    numerics = embed.config.numerics
    return interpolate_positions(embed.pos_embed, grid, numerics.position_resize, square=numerics.square_positions)


def learned_2d_positions(embed: Embedding, grid: Size) -> Tensor:
    rows, columns = embed.config.grid
    halves = embed.row_pos_embed[:, None].expand(-1, columns, -1), embed.col_pos_embed[None].expand(rows, -1, -1)
    return interpolate_positions(torch.cat(halves, dim=-1), grid, embed.config.numerics.position_resize)


def factorized_positions(embed: Embedding, grid: Size) -> Tensor:
    tables = embed.row_pos_embed, embed.col_pos_embed
    rows, columns = interpolate_factors(tables, grid, square=embed.config.numerics.square_positions)
    return rows[:, None] + columns[None]


GRID_POSITIONS: dict[str, Callable[[Embedding, Size], Tensor]] = {
    "learned": learned_positions,
    "learned_2d": learned_2d_positions,
    "factorized": factorized_positions,
    "sincos": lambda embed, grid: sincos_positions(grid, embed.config.width).to(embed.patch.weight),
}


def sincos_positions(grid: Size, width: int) -> Tensor:
    """Fixed 2-D positions (R, C, width): [sin x, cos x, sin y, cos y], wavelengths up to 10000."""
    quarter = width // 4
    omega = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y = torch.arange(grid[0], dtype=torch.float64)[:, None, None] * omega  # (R, 1, D/4)
    x = torch.arange(grid[1], dtype=torch.float64)[None, :, None] * omega  # (1, C, D/4)
    parts = [x.sin(), x.cos(), y.sin(), y.cos()]
    return torch.cat([part.expand(grid[0], grid[1], quarter) for part in parts], dim=-1).float()


def interpolate_positions(positions: Tensor, grid: Size, method: PositionResize, *, square: bool = False) -> Tensor:
    """Position interpolation: (R, C, D) resampled to another grid, in the way of one family of weights.

    With `square`, to the square around the grid, of which the grid has its part.
    """
    old = positions.shape[0], positions.shape[1]
    if not is_open(grid) and old == tuple(grid):
        return positions
    found = resampled(positions.float(), square_around(grid) if square else grid, method).to(positions.dtype)
    return found[: grid[0], : grid[1]] if square else found


def interpolate_factors(tables: tuple[Tensor, Tensor], grid: Size, *, square: bool = False) -> tuple[Tensor, Tensor]:
    """Positions by row (R, D) and by column (C, D) for another grid, linear as in timm's NaFlex."""
    if not is_open(grid) and (len(tables[0]), len(tables[1])) == tuple(grid):
        return tables
    sides = zip(tables, square_around(grid) if square else grid)
    rows, columns = (matrix(len(table), side, "bilinear", table) @ table for table, side in sides)
    return rows[: grid[0]], columns[: grid[1]]


def square_around(grid: Size) -> Size:
    side: int = torch.sym_max(grid[0], grid[1])  # type: ignore[no-untyped-call]
    return side, side


def resize_patch_kernel(weight: Tensor, patch_size: int, method: PositionResize) -> Tensor:
    """A patch embedding (D, channels, P, P) for another patch size.

    Pseudo-inverse resize: the new kernel gives, on a patch enlarged or reduced with the family's own
    interpolation, the closest answer to the old kernel on the original patch.
    """
    old = weight.shape[-1]
    if old == patch_size:
        return weight
    way = "bicubic" if method in ("dino", "bilinear_antialias") else method
    enlarge = matrix(old, patch_size, way, torch.empty(0, dtype=torch.float64))  # (new, old)
    enlarged = torch.kron(enlarge, enlarge).T  # (old^2, new^2)
    inverse = torch.linalg.pinv(enlarged)  # (new^2, old^2)
    flat = weight.double().flatten(2) @ inverse.T
    return flat.view(*weight.shape[:2], patch_size, patch_size).to(weight.dtype)
