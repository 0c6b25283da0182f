"""What a checkpoint is: its family, its description, and its tensors under our names, all accounted for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from vitruvian.config import ModelConfig, ResNetConfig, Size, ViTConfig, as_size
from vitruvian.errors import CheckpointError
from vitruvian.model.build import Model, empty
from vitruvian.weights import native
from vitruvian.weights.description import Description
from vitruvian.weights.families.family import Family, first_match
from vitruvian.weights.families.positions import FLAT, split_positions
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.rules import Reading, Tensors
from vitruvian.weights.files import Checkpoint
from vitruvian.weights.infer import contradictions, find_heads, infer_config

MOST_NAMES = 8
"""Names an error lists before it only counts the rest."""

MAX_SIDE = 2**14
"""Pixels of the longest side that a file may state for its model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What the caller knows about a file that cannot say it itself."""

    heads: int | None = None
    grid: Size | None = None
    image_size: Size | None = None
    """The size asked for; it settles the grid where nothing else does."""
    family: str | None = None
    name: str = ""
    """What published weights are called; files have their own names."""

    def __post_init__(self) -> None:
        if self.grid is not None:
            object.__setattr__(self, "grid", as_size(self.grid, "grid"))


def understand(checkpoint: Checkpoint, known: Known) -> tuple[str, Description, Model, Tensors]:
    """A checkpoint's family, what it describes, an empty model of that shape, and its tensors under our names."""
    if known.family == "native" or (known.family is None and native.claims(checkpoint)):
        description = native.describe(checkpoint)
        check_known(description.config, known)
        state = checkpoint.tensors
        refuse_contradictions(description.config, state, "")
        check_size(description.config)
        model = empty(description.config)
        check_names(model, state)
        return "native", description, model, state
    family = recognize(checkpoint, known.family)
    tensors = family.tidy(checkpoint.tensors)
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("some arrays are there twice, under an earlier and a later name")
    refuse_architectures(tensors, family)
    reading = family.table.read(tensors)
    reading = replace(reading, native=lone_token(reading.native))
    carried = None if known.family else family.carried(checkpoint)
    if carried is not None:
        description = Description.from_json(carried, "the description it carries")
        check_known(description.config, known)
        refuse_contradictions(description.config, reading.native, "; pass family= to read it without")
    else:
        description = describe(checkpoint, family, tensors=tensors, reading=reading, known=known)
    config = description.config
    check_size(config)
    state = split_positions(reading.native, config) if isinstance(config, ViTConfig) else reading.native
    model = empty(config)
    check_names(model, state, family=family, reading=reading)
    return family.name, description, model, state


def describe(
    checkpoint: Checkpoint, family: Family, *, tensors: Tensors, reading: Reading, known: Known
) -> Description:
    """The description of a file that carries none: from its arrays, its JSON files and its family's habits."""
    if not {"embed.patch.weight", "root.weight"} & reading.native.keys():
        raise CheckpointError(f"{family.name} weights without {family.anchor!r}")
    facts = family.facts(checkpoint, tensors)
    config = infer_config(reading.native, facts, heads=known.heads, grid=known.grid, image_size=known.image_size)
    check_known(config, known)
    left_out = [f"{name} ({why})" for name in reading.unused if (why := first_match(name, family.idle))]
    origin = f"{family.name} weights from {known.name or checkpoint.path.name}"
    if left_out or checkpoint.beside:
        origin += f"; not used: {shortened([*left_out, *checkpoint.beside])}"
    return Description(
        config=config,
        preprocess=family.preprocess(checkpoint, config),
        labels=facts.labels if config.classes else None,
        origin=origin,
    )


def lone_token(native_tensors: Tensors) -> Tensors:
    """A distillation token that no head reads (DeiT fine-tuned without a teacher) is a register in its place."""
    names = native_tensors.keys()
    if "embed.distillation_token" not in names or "head.weight" not in names or "distillation_head.weight" in names:
        return native_tensors
    changed = dict(native_tensors)
    changed["embed.registers"] = changed.pop("embed.distillation_token")
    return changed


def check_known(config: ModelConfig, known: Known) -> None:
    """What the caller says must not contradict a description."""
    if isinstance(config, ResNetConfig):
        if known.heads is not None or known.grid is not None:
            raise CheckpointError("heads and grid have no meaning for a ResNet")
        return
    find_heads(config.width, known.heads, config.heads)
    if known.grid not in (None, config.grid):
        raise CheckpointError(f"grid={known.grid} contradicts the file, which says {config.grid[0]}x{config.grid[1]}")


def refuse_contradictions(config: ModelConfig, tensors: Tensors, advice: str) -> None:
    """A description is believed only where the tensors agree; this also bounds the model that is built."""
    found = contradictions(config, tensors)
    if found:
        raise CheckpointError(f"the description does not fit the tensors: {'; '.join(found)}{advice}")


def check_size(config: ModelConfig) -> None:
    """An image size comes from a file as well, and must not decide how much memory is asked for."""
    if max(config.image_size) > MAX_SIDE:
        raise CheckpointError(f"image_size={config.image_size} is larger than {MAX_SIDE} pixels a side")


def refuse_architectures(tensors: Tensors, family: Family) -> None:
    for mark, what in family.refused.items():
        found = next((name for name in tensors if mark in name), None)
        if found:
            raise CheckpointError(f"the weights have {what} ({found!r}), which this Vision Transformer has not")


def check_names(model: Model, state: Tensors, *, family: Family | None = None, reading: Reading | None = None) -> None:
    """Every name must be used, every name needed must be there, and all shapes must fit."""
    expected = model.state_dict()
    lacking = [name for name in expected if name not in state]
    surplus = [name for name in state if name not in expected]
    if family is not None and reading is not None:
        lacking = [FLAT if "positions" in name else name for name in lacking]  # still one array in the file
        lacking = [name for name in family.table.foreign_names(lacking, model.config) if name not in reading.used]
        surplus = family.table.foreign_names(surplus, model.config)
        surplus += [name for name in reading.unused if first_match(name, family.idle) is None]
    missing = list(dict.fromkeys(lacking))
    if missing or surplus:
        raise CheckpointError(
            f"names do not fit a {family.name if family else 'native'} model of this shape: "
            f"{len(missing)} not found: {shortened(missing)}; {len(surplus)} not used: {shortened(surplus)}"
        )
    for name, tensor in state.items():
        names = family.table.foreign_names([name], model.config) if family else [name]
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{' + '.join(map(repr, names))} has shape {tuple(tensor.shape)} in our layout, "
                f"the model wants {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{' + '.join(map(repr, names))} holds {tensor.dtype}, not floating-point numbers")


def shortened(names: Iterable[str]) -> str:
    """A list for an error text: the first few, and how many more."""
    listed = list(names)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return (", ".join(listed[:MOST_NAMES]) + more) or "none"
