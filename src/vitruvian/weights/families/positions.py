"""Position arrays: families keep one array of rows for all tokens, we keep the grid apart from the tokens before it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.model.embed import sincos_positions
from vitruvian.settings import Size
from vitruvian.weights.families.rules import Tensors

# N patches in R rows and C columns, P tokens (class, distillation) and G registers before them, D width

FLAT = "positions"
"""Name of the family's single array (1, rows, D) among our names, until it is split."""


def split_positions(native: Tensors, config: ViTConfig) -> Tensors:
    """`native` with the single position array split into our parameters.

    The array may have rows for all tokens before the patches, for those without registers, or for
    none. A row for a token that has no position of its own here is added to the token.
    """
    state = dict(native)
    flat = state.pop(FLAT, None)
    if flat is None:
        return state
    rows, columns = config.grid
    fits = flat.dim() == 3 and flat.shape[0] == 1 and flat.shape[2] == config.width
    extra = flat.shape[1] - rows * columns if fits else -1
    placed = config.cls_token + config.distillation
    if extra not in (0, placed, placed + config.reg_tokens):
        raise CheckpointError(
            f"positions have shape {tuple(flat.shape)}, which does not fit a grid of {rows}x{columns} patches "
            f"and {placed} tokens before them"
        )
    prefix, grid = flat[0, :extra], flat[0, extra:].reshape(rows, columns, -1)
    if config.prefix_pos_embeds:
        state["embed.prefix_pos_embed"] = prefix[:placed] if extra else prefix.new_zeros(placed, config.width)
    elif extra:
        tokens = ["embed.cls_token"] * config.cls_token + ["embed.dist_token"] * config.distillation
        for name, row in zip(tokens, prefix):
            add_rows(state, name, row[None])
    if extra > placed:
        add_rows(state, "embed.reg_tokens", prefix[placed:])
    return state | grid_parameters(grid, config)


def add_rows(state: Tensors, name: str, rows: Tensor) -> None:
    """Add positions to tokens; tokens that are missing or misshapen are left for the check of names and shapes."""
    if name in state and state[name].shape == (1, *rows.shape):
        state[name] = state[name] + rows


def grid_parameters(grid: Tensor, config: ViTConfig) -> Tensors:  # (R, C, D)
    """Our parameters for the patches' positions; fixed positions have none, the array must be what is computed."""
    if config.pos_embed == "learned":
        return {"embed.pos_embed": grid}
    if config.pos_embed == "factorized":
        return factored(grid)
    if config.pos_embed == "learned_2d":
        half = config.width // 2
        return {"embed.row_pos_embed": grid[:, 0, :half], "embed.col_pos_embed": grid[0, :, half:]}
    fixed = sincos_positions(config.grid, config.width) if config.pos_embed == "sincos" else torch.zeros_like(grid)
    if not torch.allclose(grid, fixed, atol=1e-5):
        raise CheckpointError(
            f"the file says positions={config.pos_embed!r}, but its position array holds other values; "
            "pass family= to read it without the description it carries"
        )
    return {}


def factored(grid: Tensor) -> Tensors:  # (R, C, D)
    """Positions by row and by column whose sums are the grid's."""
    rows, columns = grid[:, 0], grid[0] - grid[0, :1]
    if not torch.allclose(rows[:, None] + columns, grid, atol=1e-5):
        raise CheckpointError(
            "the file says positions='factorized', but its position array is no sum of rows and columns; "
            "pass family= to read it without the description it carries"
        )
    return {"embed.row_pos_embed": rows, "embed.col_pos_embed": columns}


def join_positions(state: Tensors, config: ViTConfig, prefix_rows: int) -> Tensors:
    """`state` with one position array (1, prefix_rows + N, D), the reverse of `split_positions`.

    Fixed positions are written out. With `prefix_rows=0` the class token's position is added to it; a
    token that has none here gets a row of zeros.
    """
    native = dict(state)
    prefix = native.pop("embed.prefix_pos_embed", torch.zeros(0, config.width))
    if len(prefix) and not prefix_rows:
        native["embed.cls_token"] = native["embed.cls_token"] + prefix[0]
        prefix = prefix[:0]
    prefix = torch.cat([prefix, torch.zeros(prefix_rows - len(prefix), config.width)])
    if config.pos_embed == "learned":
        grid = native.pop("embed.pos_embed")
    elif config.pos_embed == "learned_2d":
        rows, columns = native.pop("embed.row_pos_embed"), native.pop("embed.col_pos_embed")
        halves = [rows[:, None].expand(-1, len(columns), -1), columns[None].expand(len(rows), -1, -1)]
        grid = torch.cat(halves, dim=-1)
    elif config.pos_embed == "factorized":
        grid = native.pop("embed.row_pos_embed")[:, None] + native.pop("embed.col_pos_embed")[None]
    elif config.pos_embed == "sincos":
        grid = sincos_positions(config.grid, config.width)
    else:
        grid = torch.zeros(*config.grid, config.width)
    native[FLAT] = torch.cat([prefix, grid.flatten(0, 1)])[None]
    return native


def find_grid(total: int, *, tokens: int, reg_tokens: int, grid: Size | None, image_grid: Size | None) -> Size:
    """Rows and columns of the trained grid behind `total` position rows.

    LoadHints from `grid`; else a square, or `image_grid`, the grid of the image size asked for. Rows may be
    there for all tokens before the patches, for those without registers, or for none, tried in this order.
    """
    counts = [total - tokens, total - tokens - reg_tokens, total]
    if grid is not None:
        if grid[0] * grid[1] not in counts:
            raise CheckpointError(
                f"a grid of {grid[0]}x{grid[1]} does not fit the {total - tokens} positions in the file"
            )
        return grid
    for count in counts:
        side = math.isqrt(max(count, 0))
        if side and side * side == count:
            return side, side
        if image_grid is not None and image_grid[0] * image_grid[1] == count:
            return image_grid
    pairs = [f"{rows}x{counts[0] // rows}" for rows in range(2, counts[0] // 2 + 1) if counts[0] % rows == 0]
    raise CheckpointError(
        f"{counts[0]} positions are not a square grid and the file does not say its shape; "
        f"pass grid=(rows, columns), one of {', '.join(pairs) or 'none possible'}"
    )
