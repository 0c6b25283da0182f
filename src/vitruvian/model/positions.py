"""Position encodings: added to the tokens or inside attention, and how they follow another grid of patches.

Position embeddings are resampled with one matrix per axis. That gives the numbers of `F.interpolate`, and it also works
while a graph with open sizes is being traced.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitruvian.config import PositionResize, RopeConfig, ViTConfig
from vitruvian.settings import Size

# B images, N tokens (T before the patches), H heads of K channels, D width, R rows and C columns of patches

Table = TypeVar("Table")
TIMM_RESIZE: PositionResize = "bicubic_antialias"
"""The resize method of timm's models. timm also resizes relative biases differently from transformers."""


def sincos_positions(grid: Size, width: int) -> Tensor:
    """Fixed 2-D sin-cos embeddings (R, C, width): [sin x, cos x, sin y, cos y], wavelengths up to 10000."""
    quarter = width // 4
    omega = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64) / (quarter - 1))
    y = torch.arange(grid[0], dtype=torch.float64)[:, None, None] * omega  # (R, 1, D/4)
    x = torch.arange(grid[1], dtype=torch.float64)[None, :, None] * omega  # (1, C, D/4)
    parts = [x.sin(), x.cos(), y.sin(), y.cos()]
    return torch.cat([part.expand(grid[0], grid[1], quarter) for part in parts], dim=-1).float()


def interpolate_positions(positions: Tensor, grid: Size, method: PositionResize, *, square: bool = False) -> Tensor:
    """Resample position embeddings (R, C, D) to another grid, with the method of one family of weights.

    With `square`, they are resampled to the smallest square that contains the grid, and then cropped (NaFlex).
    """
    if same_sizes(positions.shape[:2], grid):
        return positions
    resized = resample(positions.float(), square_around(grid) if square else grid, method).to(positions.dtype)
    return resized[: grid[0], : grid[1]] if square else resized


def square_around(grid: Size) -> Size:
    side: int = torch.sym_max(grid[0], grid[1])  # type: ignore[no-untyped-call]
    return side, side


POSITION_TABLES = ("pos_embed", "row_pos_embed", "col_pos_embed")
"""Learned embeddings of the patches' positions, or of their rows and columns."""


def resize_tables(tables: Mapping[str, Tensor], grid: Size, config: ViTConfig) -> dict[str, Tensor]:
    """Resample the POSITION_TABLES of a model to another grid, as its config says."""
    method, square = config.numerics.position_resize, config.numerics.square_positions
    if "pos_embed" in tables:
        return {"pos_embed": interpolate_positions(tables["pos_embed"], grid, method, square=square)}
    if "row_pos_embed" not in tables:
        return {}
    rows, columns = tables["row_pos_embed"], tables["col_pos_embed"]
    if same_sizes((len(rows), len(columns)), grid):
        return dict(tables)
    if config.pos_embed == "factorized":  # linearly, as timm's NaFlex does
        sides = square_around(grid) if square else grid
        rows = (matrix(len(rows), sides[0], "bilinear", rows) @ rows)[: grid[0]]
        columns = (matrix(len(columns), sides[1], "bilinear", columns) @ columns)[: grid[1]]
    else:
        rows = interpolate_positions(rows[:, None], (grid[0], 1), method)[:, 0]
        columns = interpolate_positions(columns[None], (1, grid[1]), method)[0]
    return {"row_pos_embed": rows, "col_pos_embed": columns}


def join_tables(tables: Mapping[str, Tensor], grid: Size, config: ViTConfig) -> Tensor | None:
    """Position embeddings (R, C, D) of the patches from tables of this grid; None if none are added to tokens."""
    if config.pos_embed == "sincos":
        return sincos_positions(grid, config.width)
    if "row_pos_embed" not in tables:
        return tables.get("pos_embed")
    rows, columns = tables["row_pos_embed"][:, None], tables["col_pos_embed"][None]
    if config.pos_embed == "factorized":
        return rows + columns
    return torch.cat([rows.expand(-1, grid[1], -1), columns.expand(grid[0], -1, -1)], dim=-1)


class Positions(nn.Module):
    """Position embeddings that are added to tokens: learned tables, or computed for `sincos`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.add_tables(config)

    def add_tables(self, config: ViTConfig) -> None:
        self.config = config
        D, (rows, columns) = config.width, config.grid
        if config.pos_embed == "learned":
            self.pos_embed = nn.Parameter(torch.empty(rows, columns, D))
        elif config.pos_embed in ("learned_2d", "factorized"):
            channels = D // 2 if config.pos_embed == "learned_2d" else D
            self.row_pos_embed = nn.Parameter(torch.empty(rows, channels))
            self.col_pos_embed = nn.Parameter(torch.empty(columns, channels))
        if config.prefix_pos_embeds:
            self.prefix_pos_embed = nn.Parameter(torch.empty(config.prefix_pos_embeds, D))

    def grid_positions(self, grid: Size) -> Tensor | None:
        """Position embeddings (R, C, D) of the patches, or None if positions are encoded inside attention."""
        tables = {name: getattr(self, name) for name in POSITION_TABLES if hasattr(self, name)}
        return join_tables(resize_tables(tables, grid, self.config), grid, self.config)

    def add_to(self, x: Tensor, grid: Size | None) -> Tensor:
        """Add the positions to a sequence (B, T + N, D); tokens without a position embedding stay."""
        positions = self.grid_positions(grid or self.config.grid)
        assert positions is not None
        positions = positions.flatten(0, 1).to(x)
        if self.config.prefix_tokens:
            prefix = x.new_zeros(self.config.prefix_tokens, x.shape[-1])
            if self.config.prefix_pos_embeds:
                prefix = torch.cat([self.prefix_pos_embed.to(x), prefix[self.config.prefix_pos_embeds :]])
            positions = torch.cat([prefix, positions])
        return x + positions


class AttentionPosition(nn.Module):
    """Position encoding inside attention: rotates queries and keys, or adds a bias to the attention logits."""

    def rotate(self, q: Tensor, k: Tensor, grid: Size) -> tuple[Tensor, Tensor]:  # each (B, H, N, K)
        return q, k

    def bias(self, q: Tensor, grid: Size) -> Tensor | None:  # (B, H, N, K) -> (B or 1, H, N, N)
        return None


class Offsets(AttentionPosition):
    """The paper's relative positions: each query also attends to the embedding of the offset to its key.

    Offsets are one-dimensional, along the token sequence; the table is interpolated for other sequence lengths.
    """

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.empty(2 * tokens - 1, channels))

    def bias(self, q: Tensor, grid: Size | None = None) -> Tensor:
        N = q.shape[2]
        table: Tensor = self.offsets
        if not same_sizes(table.shape[:1], [2 * N - 1]):
            table = matrix(len(table), 2 * N - 1, "bilinear_aligned", table) @ table
        token = torch.arange(N, device=q.device)
        index = token[:, None] - token[None] + N - 1  # (N, N)
        products = q @ table.T * q.shape[-1] ** -0.5  # (B, H, N, 2 N - 1)
        return products.gather(-1, index.expand(*q.shape[:2], -1, -1))


class RelativeBias(AttentionPosition):
    """BEiT's relative position bias: one number per head and 2-D offset, and three for the class token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.method = config.numerics.position_resize
        rows, columns = config.grid
        self.table = nn.Parameter(torch.empty((2 * rows - 1) * (2 * columns - 1) + 3, config.num_heads))

    def bias(self, q: Tensor, grid: Size) -> Tensor:
        table = resize_bias_table(self.table, self.grid, grid, self.method)
        index = cached(relative_index, grid).to(q.device)
        return table[index].permute(2, 0, 1)[None].to(q.dtype)  # (1, H, N, N)


@lru_cache(maxsize=24)
def _cached(make: Callable[..., Table], *settings: Hashable) -> Table:
    with torch.inference_mode(False):  # a table that inference made first must also be usable in training
        return make(*settings)


def cached(make: Callable[..., Table], *settings: Hashable) -> Table:
    """`make(*settings)`, computed once. A graph that is being traced computes its own, from symbolic sizes."""
    return make(*settings) if torch.compiler.is_compiling() else _cached(make, *settings)


def geometric_biases(config: ViTConfig) -> bool:
    """Whether relative biases are resized geometrically, as in timm, which needs a known grid size."""
    return config.pos_embed == "relative_bias" and config.numerics.position_resize == TIMM_RESIZE


def resize_bias_table(table: Tensor, old: Size, new: Size, method: PositionResize) -> Tensor:
    """Resize a bias table (offsets + 3, H) to another grid: geometrically as timm, or bilinearly as transformers.

    The `method` for position embeddings decides which. The class token's biases stay.
    """
    if same_sizes(old, new):
        return table
    offsets = [(2 * before - 1, 2 * after - 1) for before, after in zip(old, new)]
    if method == TIMM_RESIZE:
        down, across = (geometric_matrix(before, after, table) for before, after in offsets)
    else:
        down, across = (matrix(before, after, "bilinear", table) for before, after in offsets)
    image = table[:-3].reshape(2 * old[0] - 1, 2 * old[1] - 1, -1)
    return torch.cat([torch.einsum("rp,pqh,cq->rch", down, image, across).flatten(0, 1), table[-3:]])


def relative_index(grid: Size) -> Tensor:
    """The row of the bias table for each pair of tokens, class token first, (N, N)."""
    rows, columns = grid
    patch = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")).flatten(1)
    down, across = patch[:, :, None] - patch[:, None]
    index = (down + rows - 1) * (2 * columns - 1) + across + columns - 1
    offsets = torch.full((1, rows * columns + 1), (2 * rows - 1) * (2 * columns - 1))
    index = torch.cat([offsets[:, 1:].T + 1, index], dim=1)  # every token to the class token
    return torch.cat([torch.cat([offsets[:, :1] + 2, offsets[:, 1:]], dim=1), index])


class Rotary(AttentionPosition):
    """RoPE: rotates the queries and keys of patches by angles proportional to row and column; other tokens stay."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        assert config.rope is not None
        self.rope, self.prefix, self.size = config.rope, config.prefix_tokens, config.head_width
        self.frequencies: nn.Parameter | None = None
        if self.rope.kind == "mixed":  # by row and column, for each head
            self.frequencies = nn.Parameter(torch.empty(2, config.num_heads, self.size // 2))

    def rotate(self, q: Tensor, k: Tensor, grid: Size) -> tuple[Tensor, Tensor]:
        sin, cos = (table.to(q.device) for table in self.tables(grid))
        return self.apply_rotation(q, sin, cos), self.apply_rotation(k, sin, cos)

    def apply_rotation(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        """Turn each pair of channels: two halves of the channels, or neighbors, by `RopeConfig.half`.

        The angles, and thus the products, are in float32 or better, whatever the precision of `x`.
        """
        T = self.prefix
        patches = x[:, :, T:]
        if self.rope.half:
            first, second = patches.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        else:
            turned = torch.stack([-patches[..., 1::2], patches[..., ::2]], dim=-1).flatten(-2)
        patches = (patches * cos + turned * sin).to(x.dtype)
        return torch.cat([x[:, :, :T], patches], dim=2) if T else patches

    def tables(self, grid: Size) -> tuple[Tensor, Tensor]:
        if self.frequencies is None:
            return cached(axial_tables, self.rope, grid, self.size)
        # a matrix product would lose precision under autocast, and angles of many turns need it
        first, second = rope_coordinates(self.rope, grid).to(self.frequencies.device).unbind(1)
        f = self.frequencies[:, :, None]  # (2, H, 1, K / 2)
        return sin_cos(first[:, None] * f[0] + second[:, None] * f[1], half=self.rope.half)  # of (H, R C, K / 2)


def axial_tables(rope: RopeConfig, grid: Size, size: int) -> tuple[Tensor, Tensor]:
    """Sine and cosine (R C, K) of the angles, with separate frequencies for rows and columns."""
    bands = 1 / rope.temperature ** (torch.arange(size // 4, dtype=torch.float32) / (size // 4))
    angles = (rope_coordinates(rope, grid)[:, :, None] * bands).flatten(1)
    return sin_cos(angles, half=rope.half)


def rope_coordinates(rope: RopeConfig, grid: Size) -> Tensor:
    """Row and column (or column and row) of each patch, in the units of the model's angles, (R C, 2)."""
    axes = [torch.arange(side, dtype=torch.float32) for side in grid]
    if rope.kind == "normalized":
        axes = [2 * math.pi * (2 * (axis + 0.5) / side - 1) for axis, side in zip(axes, grid)]
    else:
        axes = [axis + rope.offset for axis in axes]
        if rope.reference_grid is not None:
            axes = [axis / side * reference for axis, side, reference in zip(axes, grid, rope.reference_grid)]
    coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
    return coordinates.flip(-1) if rope.columns_first else coordinates


def sin_cos(angles: Tensor, *, half: bool) -> tuple[Tensor, Tensor]:
    """Sine and cosine of angles (..., K / 2) for every channel, laid out in two halves or in adjacent pairs."""
    angles = torch.cat([angles, angles], dim=-1) if half else angles.repeat_interleave(2, dim=-1)
    return angles.sin(), angles.cos()


def attention_position(config: ViTConfig) -> AttentionPosition | None:
    """The position encoding inside attention that the config asks for, if any."""
    if config.rope is not None:
        return Rotary(config)
    if config.pos_embed == "relative":
        return Offsets(config.prefix_tokens + math.prod(config.grid), config.head_width)
    return RelativeBias(config) if config.pos_embed == "relative_bias" else None


def same_sizes(old: Iterable[int], new: Sequence[int]) -> bool:
    """Whether sizes are known and equal. In a graph being traced they may be symbolic; comparing would fix them."""
    return not any(isinstance(size, torch.SymInt) for size in new) and list(old) == list(new)


def resample(image: Tensor, grid: Size, method: PositionResize) -> Tensor:
    """Resample (R, C, D) to another grid, as `F.interpolate` does with one family's options."""
    sizes = list(zip(image.shape[:2], grid))
    if method == "dino":  # DINO passes a scale factor computed from size + 0.1, which shifts the sampling points
        moved = torch.stack([_count(new, image) != old for old, new in sizes]).any()
        down, across = (matrix(old, new, "bicubic", image, excess=0.1 * moved) for old, new in sizes)
    else:
        down, across = (matrix(old, new, method, image) for old, new in sizes)
    return torch.einsum("rp,pqd,cq->rcd", down, image, across)


def matrix(old: int, new: int, method: str, like: Tensor, *, excess: Tensor | float = 0.0) -> Tensor:
    """The resampling matrix (new, old) along one axis.

    Methods are `bilinear`, `bicubic`, either with `_antialias` or `_aligned` (align_corners), and `zoom`, which is
    `bilinear_aligned`. `excess` is added to the new length when the step is computed.
    """
    method = "bilinear_aligned" if method == "zoom" else method
    index = torch.arange(new, dtype=torch.float64, device=like.device)
    sources = torch.arange(old, dtype=torch.float64, device=like.device)
    count = _count(new, like)
    if method.endswith("_antialias"):
        step = old / count
        distance = ((index[:, None] + 0.5) * step - sources - 0.5) / step.clamp(min=1)
        weights = cubic(distance, -0.5) if method.startswith("bicubic") else (1 - distance.abs()).clamp(min=0)
        return (weights / weights.sum(dim=1, keepdim=True)).to(like)
    if method.endswith("_aligned"):
        center = index * ((old - 1) / (count - 1).clamp(min=1))
    else:
        center = (index + 0.5) * (old / (count + excess)) - 0.5
    below = center.floor()
    weights = torch.zeros_like(center)[:, None] * sources
    for tap in (-1, 0, 1, 2) if method.startswith("bicubic") else (0, 1):
        distance = center - below - tap
        share = cubic(distance, -0.75) if method.startswith("bicubic") else 1 - distance.abs()
        weights = weights + share[:, None] * ((below + tap).clamp(0, old - 1)[:, None] == sources)
    return weights.to(like)


def geometric_matrix(old: int, new: int, like: Tensor) -> Tensor:
    """The matrix (new, old) that resamples offsets around zero, with the old ones at geometrically growing distances.

    Near offsets then keep their biases when a grid grows (BEiT's release; timm interpolates linearly). Both lengths
    are odd. Beyond the outermost old offset its bias is repeated. The ratio of the geometric series is found by
    bisection so that the old offsets span the new ones.
    """
    steps = old // 2
    if not steps:
        return like.new_ones(new, 1)
    low, high, ratio = 1.01, 1.5, 1.01
    while high - low > 1e-6:
        ratio = (low + high) / 2
        low, high = (low, ratio) if (ratio**steps - 1) / (ratio - 1) > new // 2 else (ratio, high)
    side = (ratio ** torch.arange(steps, dtype=torch.float64)).cumsum(0)
    knots = torch.cat([-side.flip(0), side.new_zeros(1), side])
    offset = torch.arange(-(new // 2), new // 2 + 1, dtype=torch.float64).clamp(knots[0], knots[-1])
    right = torch.bucketize(offset, knots).clamp(1, old - 1)[:, None]
    share = (offset[:, None] - knots[right - 1]) / (knots[right] - knots[right - 1])
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
