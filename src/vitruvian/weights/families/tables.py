"""Two-way tables between our parameter names and a family's, with the layout of each array, and position arrays.

The names are in `names.toml`, which explains its notation.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from vitruvian.config import ModelConfig, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.model.positions import POSITION_TABLES, join_tables, sincos_positions
from vitruvian.text import package_table

# D width, H heads, d = D // H
# N patches in R rows and C columns

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """How a family stores an array that we store in PyTorch's layout."""

    rank: int | None  # dimensions of each foreign array; None for any
    read: Callable[[Sequence[Tensor]], Tensor]
    write: Callable[[Tensor, int, int], Sequence[Tensor]]
    """From our array, the number of foreign arrays it becomes, and the number of heads."""


LAYOUTS = {
    "same": ArrayLayout(None, lambda parts: parts[0], lambda x, n, heads: [x]),
    # GroupNorm's parameters, stored as (C) or (1, 1, 1, C)
    "vector": ArrayLayout(None, lambda parts: parts[0].flatten(), lambda x, n, heads: [x]),
    # a token (D) or positions (N, D), which we store as (1, N, D)
    "token": ArrayLayout(
        None,
        lambda parts: parts[0].view(1, -1, parts[0].shape[-1]),
        lambda x, n, heads: [x[0, 0] if x.shape[1] == 1 else x[0]],
    ),
    # positions (N, D) or (1, N, D), which we store as (N, D)
    "first": ArrayLayout(None, lambda parts: parts[0].view(parts[0].shape[-2:]), lambda x, n, heads: [x]),
    "dense": ArrayLayout(2, lambda parts: parts[0].T, lambda x, n, heads: [x.T]),
    # height, width, in, out
    "conv": ArrayLayout(4, lambda parts: parts[0].permute(3, 2, 0, 1), lambda x, n, heads: [x.permute(2, 3, 1, 0)]),
    # a dense layer stored as a 1x1 convolution: (1, 1, in, out), or in PyTorch's layout
    "pointwise": ArrayLayout(4, lambda parts: parts[0][0, 0].T, lambda x, n, heads: [x.T[None, None]]),
    "kernel": ArrayLayout(4, lambda parts: parts[0][:, :, 0, 0], lambda x, n, heads: [x[:, :, None, None]]),
    # separate projections that we store as one, such as query, key, value
    "stacked": ArrayLayout(None, lambda parts: torch.cat(list(parts)), lambda x, n, heads: x.chunk(n)),
    # Flax's projections (D, H, d), their biases (H, d), and the projection back (H, d, D)
    "heads_in": ArrayLayout(
        3,
        lambda parts: torch.cat([part.flatten(1).T for part in parts]),
        lambda x, n, heads: [part.T.reshape(part.shape[1], heads, -1) for part in x.chunk(n)],
    ),
    "heads_bias": ArrayLayout(
        2,
        lambda parts: torch.cat([part.flatten() for part in parts]),
        lambda x, n, heads: [part.reshape(heads, -1) for part in x.chunk(n)],
    ),
    "heads_out": ArrayLayout(
        3,
        lambda parts: parts[0].reshape(-1, parts[0].shape[-1]).T,
        lambda x, n, heads: [x.T.reshape(heads, -1, len(x))],
    ),
}
"""By the names in `names.toml`."""
for _part in ("in", "bias", "out"):  # LiT's BERT may also store a matrix (D, D)
    LAYOUTS[f"any_{_part}"] = replace(LAYOUTS[f"heads_{_part}"], rank=None)


@dataclass(frozen=True, slots=True)
class Row:
    """One of our names, and the family's name or names for the same array."""

    native: str
    foreign: tuple[str, ...]
    layout: ArrayLayout = LAYOUTS["same"]


@dataclass(frozen=True, slots=True)
class Table:
    """The names of one family: rows, and what else is known about them."""

    rows: tuple[Row, ...]
    name: str = ""  # its section of `names.toml`, and of `obstacles.toml` if the family is written
    block: str = r"(?!)"  # patterns that find the numbers of blocks, or of stages and units, in a name
    unit: str = r"(?!)"
    first_unit: int = 0
    anchor: str = ""  # an array of every checkpoint of the family; all names have the prefix before it
    marks: tuple[str, ...] = ()  # a checkpoint has at least one, if other families have the anchor too
    prefixes: tuple[str, ...] = ("",)
    renames: tuple[tuple[str, str], ...] = ()  # patterns of other versions' names, and the names of the rows
    ignored: dict[str, str] = field(default_factory=dict)
    """Arrays that are not needed, by name or prefix (ending in `.` or `/`), and what they are."""
    needs_config: dict[str, str] = field(default_factory=dict)
    """Parts of names of architectures whose activation, epsilon and rotations must be stated, and what they are."""

    def read(self, tensors: Tensors) -> tuple[Tensors, list[str]]:
        """Convert all `tensors` that a row names to our names and layout; also returns the names of the others."""
        native, used = Tensors(), set[str]()
        block, unit = re.compile(self.block), re.compile(self.unit)
        blocks, units = set[int](), set[tuple[int, int]]()
        for name in tensors:
            if match := block.match(name):
                blocks.add(int(match[1]))
            elif match := unit.match(name):
                units.add((int(match[1]) - self.first_unit, int(match[2]) - self.first_unit))
        for name, foreign, layout in self.entries(sorted(blocks), sorted(units)):
            if not all(part in tensors for part in foreign):
                continue
            used.update(foreign)
            for part in foreign:
                if layout.rank is not None and tensors[part].dim() != layout.rank:
                    shape = tuple(tensors[part].shape)
                    raise CheckpointError(f"{part!r} has shape {shape}, expected {layout.rank} dimensions")
            try:
                native[name] = layout.read([tensors[part] for part in foreign])
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(f"{part!r} {tuple(tensors[part].shape)}" for part in foreign)
                raise CheckpointError(f"these arrays do not fit together: {shapes}") from error
        return native, [name for name in tensors if name not in used]

    def write(self, state: Tensors, config: ModelConfig) -> Tensors:
        """Convert `state` to the family's names and layout; each of our names must have a row."""
        heads = 1 if isinstance(config, ResNetConfig) else config.num_heads
        written, left = Tensors(), dict(state)
        for native, foreign, layout in self.entries(*indices_of(config)):
            if native in left:
                written.update(zip(foreign, layout.write(left.pop(native), len(foreign), heads)))
        assert not left, f"no row for {sorted(left)}"
        return written

    def foreign_names(self, native_names: Iterable[str], config: ModelConfig) -> list[str]:
        """The family's names for ours; a name without a row stays unchanged."""
        known = {native: foreign for native, foreign, _ in self.entries(*indices_of(config))}
        return [name for native in native_names for name in known.get(native, (native,))]

    def entries(
        self, blocks: Iterable[int], units: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[str, tuple[str, ...], ArrayLayout]]:
        """Each row with each of its block numbers, or stage and unit numbers."""
        block_fields = [{"i": i} for i in blocks]
        unit_fields = [{"s": s, "u": u, "S": s + 1, "U": u + 1} for s, u in units]
        for row in self.rows:
            for values in block_fields if "{i}" in row.native else unit_fields if "{u}" in row.native else [{}]:
                yield row.native.format(**values), tuple(name.format(**values) for name in row.foreign), row.layout


def indices_of(config: ModelConfig) -> tuple[range, list[tuple[int, int]]]:
    """The block numbers, and stage and unit numbers, that a model of this shape has."""
    stem = config if isinstance(config, ResNetConfig) else config.stem
    depth = 0 if isinstance(config, ResNetConfig) else config.depth
    return range(depth), [(s, u) for s, units in enumerate(stem.stages if stem else ()) for u in range(units)]


def rename(tensors: Tensors, rules: Iterable[tuple[str, str]]) -> Tensors:
    """Replace each regular expression in the names, one after the other."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _expand(text: str, separator: str) -> list[str]:
    """The names that a text with groups such as `{a,b}` stands for; the last group changes first."""
    parts = re.split(rf"\{{([^{{}}]*[{separator}][^{{}}]*)\}}", text)
    choices = [part.split(separator) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def _parse_rows(line: str) -> Iterator[Row]:
    """The rows of one line of `names.toml`: our names, the family's names, and perhaps their layouts."""
    ours, theirs, *layouts = line.replace("*", "{weight,bias}").split()
    kinds = cycle(layouts[0].split(",") if layouts else ["same"])
    for native, foreign in zip(_expand(ours, ","), _expand(theirs, ","), strict=True):
        yield Row(native, tuple(_expand(foreign, "+")), LAYOUTS[next(kinds)])


def _read_tables(content: dict[str, Any]) -> dict[str, Table]:
    resolved: dict[str, dict[str, Any]] = {}
    for name, section in content.items():
        lines = section.get("rows", "").strip().splitlines()
        stated = {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}
        stated["rows"] = tuple(row for line in lines for row in _parse_rows(line))
        fields = resolved[name] = dict[str, Any]()
        for part in (*(resolved[other] for other in stated.pop("include", ())), stated):
            added = {key: fields[key] + part[key] for key in ("rows", "renames") if key in fields and key in part}
            fields |= part | added | {"ignored": fields.get("ignored", {}) | part.get("ignored", {})}
    return {name: Table(name=name, **fields) for name, fields in resolved.items()}


_CONTENT = package_table("weights/families/names.toml")
REFUSED: dict[str, str] = _CONTENT.pop("refused")
"""Model types of transformers that are not read, and why."""
TABLES = _read_tables(_CONTENT)
"""The tables of `names.toml` by name."""


POSITIONS = "positions"
"""Name among ours of a family's single position array (1, tokens + N, D), until it is split.

We store the grid of the patches' positions apart from the positions of the tokens before it (class, distillation).
"""


def split_positions(native: Tensors, config: ViTConfig) -> Tensors:
    """Split the family's single position array into our parameters.

    The array may have rows for all tokens before the patches, for all but the registers, or for none. A row for a token
    that has no separate position in our model is added to the token.
    """
    state = dict(native)
    joined = state.pop(POSITIONS, None)
    if joined is None:
        return state
    rows, columns = config.grid
    fits = joined.dim() == 3 and joined.shape[0] == 1 and joined.shape[2] == config.width
    extra = joined.shape[1] - rows * columns if fits else -1
    tokens = config.cls_token + config.distillation
    if extra not in (0, tokens, tokens + config.reg_tokens):
        reason = f"positions have shape {tuple(joined.shape)}, which does not fit a grid of {rows}x{columns} patches"
        raise CheckpointError(f"{reason} and {tokens} tokens before them")
    prefix, grid = joined[0, :extra], joined[0, extra:].reshape(rows, columns, -1)
    if config.prefix_pos_embeds:
        state["embed.prefix_pos_embed"] = prefix[:tokens] if extra else prefix.new_zeros(tokens, config.width)
    names = ["embed.cls_token"] * config.cls_token + ["embed.dist_token"] * config.distillation
    added = {} if config.prefix_pos_embeds else dict(zip(names, prefix[:, None]))
    if extra > tokens:
        added["embed.reg_tokens"] = prefix[tokens:]
    for name, array in added.items():
        # the later check of names and shapes reports tokens that are missing or misshapen
        if name in state and state[name].shape == (1, *array.shape):
            state[name] = state[name] + array
    return state | grid_parameters(grid, config)


def grid_parameters(grid: Tensor, config: ViTConfig) -> Tensors:  # (R, C, D)
    """Our parameters for the patches' positions; fixed positions have none, but the array must equal them."""
    if config.pos_embed == "learned":
        return {"embed.pos_embed": grid}
    if config.pos_embed == "factorized":
        rows, columns = grid[:, 0], grid[0] - grid[0, :1]
        expected = rows[:, None] + columns
        parameters = {"embed.row_pos_embed": rows, "embed.col_pos_embed": columns}
    elif config.pos_embed == "learned_2d":
        half = config.width // 2
        return {"embed.row_pos_embed": grid[:, 0, :half], "embed.col_pos_embed": grid[0, :, half:]}
    else:
        is_sincos = config.pos_embed == "sincos"
        expected = sincos_positions(config.grid, config.width) if is_sincos else torch.zeros_like(grid)
        parameters = {}
    if not torch.allclose(grid, expected, atol=1e-5):
        reason = f"the file says pos_embed={config.pos_embed!r}, but its position array has other values"
        raise CheckpointError(reason, hint="pass family= to ignore the description in the file")
    return parameters


def join_positions(state: Tensors, config: ViTConfig, prefix_rows: int) -> Tensors:
    """Join positions into one array (1, prefix_rows + N, D); reverses `split_positions`.

    Fixed positions are expanded. With `prefix_rows=0` the class token's position is added to the token; a token without
    a position gets a row of zeros.
    """
    native = dict(state)
    prefix = native.pop("embed.prefix_pos_embed", torch.zeros(0, config.width))
    if len(prefix) and not prefix_rows:
        native["embed.cls_token"] = native["embed.cls_token"] + prefix[0]
        prefix = prefix[:0]
    prefix = torch.cat([prefix, torch.zeros(prefix_rows - len(prefix), config.width)])
    tables = {name: native.pop(f"embed.{name}") for name in POSITION_TABLES if f"embed.{name}" in native}
    grid = join_tables(tables, config.grid, config)
    grid = torch.zeros(*config.grid, config.width) if grid is None else grid
    native[POSITIONS] = torch.cat([prefix, grid.flatten(0, 1)])[None]
    return native
