"""Two-way tables between our names and a family's: each row has a kind, which says how the arrays differ.

A name may have holes: `{i}` for the block, `{s}` and `{u}` for stage and unit of a stem, `{S}` and `{U}` for
the same counted from 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitruvian.config import ModelConfig, ResNetConfig
from vitruvian.errors import CheckpointError

# D width, H heads, d = D // H

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """How a family stores an array that we store in PyTorch's layout."""

    rank: int | None
    """Dimensions of each foreign array; None for any."""
    read: Callable[[Sequence[Tensor]], Tensor]
    write: Callable[[Tensor, int, int], Sequence[Tensor]]
    """From our array, the number of foreign arrays it becomes, and the number of heads."""


SAME = Kind(None, lambda parts: parts[0], lambda x, n, heads: [x])
VECTOR = Kind(None, lambda parts: parts[0].flatten(), lambda x, n, heads: [x])
"""GroupNorm's parameters, stored as (C) or (1, 1, 1, C)."""
TOKEN = Kind(
    None,
    lambda parts: parts[0].view(1, -1, parts[0].shape[-1]),
    lambda x, n, heads: [x[0, 0] if x.shape[1] == 1 else x[0]],
)
"""A token (D) or positions (N, D) that we keep as (1, N, D)."""
DENSE = Kind(2, lambda parts: parts[0].T, lambda x, n, heads: [x.T])
CONV = Kind(4, lambda parts: parts[0].permute(3, 2, 0, 1), lambda x, n, heads: [x.permute(2, 3, 1, 0)])
"""Height, width, in, out."""
POINTWISE = Kind(4, lambda parts: parts[0][0, 0].T, lambda x, n, heads: [x.T[None, None]])
"""A 1x1 convolution that stands for a dense layer."""
STACKED = Kind(None, lambda parts: torch.cat(list(parts)), lambda x, n, heads: x.chunk(n))
"""Separate projections that we keep in one, such as query, key, value."""
HEADS_IN = Kind(
    3,
    lambda parts: torch.cat([part.flatten(1).T for part in parts]),  # each (D, H, d)
    lambda x, n, heads: [part.T.reshape(part.shape[1], heads, -1) for part in x.chunk(n)],
)
HEADS_BIAS = Kind(
    2,
    lambda parts: torch.cat([part.flatten() for part in parts]),  # each (H, d)
    lambda x, n, heads: [part.reshape(heads, -1) for part in x.chunk(n)],
)
HEADS_OUT = Kind(
    3,
    lambda parts: parts[0].flatten(0, 1).T,  # (H, d, D)
    lambda x, n, heads: [x.T.reshape(heads, -1, len(x))],
)


@dataclass(frozen=True, slots=True)
class Row:
    """One of our names and the family's name or names for the same numbers."""

    native: str
    foreign: tuple[str, ...]
    kind: Kind = SAME

    def at(self, place: Mapping[str, int]) -> tuple[str, tuple[str, ...]]:
        return self.native.format(**place), tuple(name.format(**place) for name in self.foreign)


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint under our names; under its own, what that took and what was left over."""

    native: Tensors = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one family, and the patterns that find block and unit numbers in its names."""

    rows: tuple[Row, ...]
    block: str = r"(?!)"
    unit: str = r"(?!)"
    first_unit: int = 0

    def read(self, tensors: Tensors) -> Reading:
        """Everything in `tensors` that a row knows, in our layout."""
        reading = Reading()
        for native, foreign, kind in self.entries(self.places_in(tensors)):
            if not all(name in tensors for name in foreign):
                continue
            reading.used.update(foreign)
            for name in foreign:
                if kind.rank is not None and tensors[name].dim() != kind.rank:
                    shape = tuple(tensors[name].shape)
                    raise CheckpointError(
                        f"{name!r} has shape {shape}, which is not an array of {kind.rank} dimensions"
                    )
            try:
                reading.native[native] = kind.read([tensors[name] for name in foreign])
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(f"{name!r} {tuple(tensors[name].shape)}" for name in foreign)
                raise CheckpointError(f"these arrays do not fit together: {shapes}") from error
        reading.unused.extend(name for name in tensors if name not in reading.used)
        return reading

    def write(self, state: Tensors, config: ModelConfig) -> Tensors:
        """`state` under the family's names and in its layout; each of our names must have a row."""
        heads = 1 if isinstance(config, ResNetConfig) else config.num_heads
        written: Tensors = {}
        left = dict(state)
        for native, foreign, kind in self.entries(places_of(config)):
            if native in left:
                written.update(zip(foreign, kind.write(left.pop(native), len(foreign), heads)))
        assert not left, f"no row for {sorted(left)}"
        return written

    def foreign_names(self, native_names: Iterable[str], config: ModelConfig) -> list[str]:
        """What the family calls these of our names; a name without a row stays as it is."""
        known = {native: foreign for native, foreign, _ in self.entries(places_of(config))}
        return [name for native in native_names for name in known.get(native, (native,))]

    def entries(self, places: Mapping[str, Sequence[Mapping[str, int]]]) -> Iterator[tuple[str, tuple[str, ...], Kind]]:
        for row in self.rows:
            for place in places["i" if "{i}" in row.native else "u" if "{u}" in row.native else ""]:
                yield *row.at(place), row.kind

    def places_in(self, names: Iterable[str]) -> dict[str, list[dict[str, int]]]:
        """The block and unit numbers that occur in the names."""
        block, unit = re.compile(self.block), re.compile(self.unit)
        blocks, units = set[int](), set[tuple[int, int]]()
        for name in names:
            if match := block.match(name):
                blocks.add(int(match[1]))
            elif match := unit.match(name):
                units.add((int(match[1]) - self.first_unit, int(match[2]) - self.first_unit))
        return numbered(sorted(blocks), sorted(units))


def places_of(config: ModelConfig) -> dict[str, list[dict[str, int]]]:
    """The block and unit numbers a model of this shape has."""
    if isinstance(config, ResNetConfig):
        layers, stages = 0, config.stages
    else:
        layers, stages = config.depth, config.stem.stages if config.stem else ()
    return numbered(range(layers), [(s, u) for s, units in enumerate(stages) for u in range(units)])


def numbered(blocks: Iterable[int], units: Iterable[tuple[int, int]]) -> dict[str, list[dict[str, int]]]:
    return {
        "": [{}],
        "i": [{"i": i} for i in blocks],
        "u": [{"s": s, "u": u, "S": s + 1, "U": u + 1} for s, u in units],
    }


def rename(tensors: Tensors, rules: Iterable[tuple[str, str]]) -> Tensors:
    """The same arrays with each pattern replaced in their names, one after the other."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def pair(native: str, *foreign: str, kind: Kind = SAME) -> tuple[Row, Row]:
    """Rows for `.weight` and `.bias` of a layer that both sides call so."""
    return (
        Row(f"{native}.weight", tuple(f"{name}.weight" for name in foreign), kind),
        Row(f"{native}.bias", tuple(f"{name}.bias" for name in foreign), kind),
    )
