"""What a checkpoint is: its family, its description, and its tensors under our names, all accounted for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache

from vitruvian.catalog import find_published, resolve
from vitruvian.config import ModelConfig, ModelMeta, Preprocess, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, UnknownNameError, argument
from vitruvian.model.build import Model, empty
from vitruvian.settings import Size, as_size
from vitruvian.text import brief
from vitruvian.weights.description import Description, describe_native, is_native
from vitruvian.weights.families.family import Family, first_match
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import POSITIONS, Reading, Tensors, split_positions
from vitruvian.weights.families.timm_config import rows
from vitruvian.weights.files import Checkpoint
from vitruvian.weights.infer import contradictions, find_heads, infer_config


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadHints:
    """What the caller knows about a file that cannot say it itself."""

    num_heads: int | None = None
    grid: Size | None = None
    image_size: Size | None = None
    """The size asked for; it settles the grid where nothing else does."""
    family: str | None = None
    config: ModelConfig | str | None = None
    """Settings, or the name of a variant, for a state dict of our own model."""
    preprocess: Preprocess | None = None
    """How images are prepared."""
    name: str = ""
    """What published weights are called; files have their own names."""

    def __post_init__(self) -> None:
        if self.grid is not None:
            object.__setattr__(self, "grid", as_size(self.grid, "grid"))


def parse_checkpoint(checkpoint: Checkpoint, hints: LoadHints) -> tuple[str, Description, Model, Tensors]:
    """A checkpoint's family, what it describes, an empty model of that shape, and its tensors under our names."""
    if hints.family == "native" or (hints.family is None and is_native(checkpoint)):
        return parse_native(checkpoint, hints)
    family = recognize(checkpoint, hints.family)
    if hints.config is not None:
        if not isinstance(hints.config, str) or family.name != "timm" or "config.json" in checkpoint.settings:
            raise CheckpointError(f"{argument('config')} is for a state dict of our own model; this file tells its own")
        if hints.config not in rows():
            raise UnknownNameError("timm architecture", hints.config, rows())
        checkpoint = replace(checkpoint, settings={"config.json": {"architecture": hints.config}})
    checkpoint = replace(checkpoint, parsed=family.parse_settings(checkpoint))
    tensors = family.to_table_names(checkpoint.tensors)
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("some arrays are there twice, under an earlier and a later name")
    tensors = family.join_arrays(tensors, checkpoint)
    reading = family.table.read(tensors)
    reading = replace(reading, native=lone_token(reading.native))
    carried = None if hints.family else family.embedded_description(checkpoint)
    if carried is not None:
        description = Description.from_json(carried, "the description it carries")
        check_hints(description.config, hints)
        reading = replace(reading, native=family.restore(reading.native, description.config))
        refuse_contradictions(description.config, reading.native, "; pass family= to read it without")
    else:
        refuse_architectures(tensors, family.refused_parts(checkpoint))
        description = describe(checkpoint, family, tensors=tensors, reading=reading, hints=hints)
    config = description.config
    state = split_positions(reading.native, config) if isinstance(config, ViTConfig) else reading.native
    model = empty(config)
    check_names(model, state, family=family, reading=reading)
    return family.name, description, model, state


def parse_native(checkpoint: Checkpoint, hints: LoadHints) -> tuple[str, Description, Model, Tensors]:
    """The same for our own names: of a native folder, or of a state dict whose settings the caller gives."""
    state = checkpoint.tensors
    description = describe_native(checkpoint)
    if description is None:
        if hints.config is None:
            raise CheckpointError(
                "a state dict without its description: arrays do not tell heads, GELU and epsilon; "
                "`vit convert FILE FOLDER --to native --config ViT-B/16` adds it; in Python, pass config=model.config "
                "or config='ViT-B/16', or write a folder that says it: vt.save(model, 'folder')"
            )
        config = fit_state_dict(hints.config, state)
        view = hints.preprocess or Preprocess(image_size=config.image_size)
        origin = f"state dict {checkpoint.path.name}"
        description = Description(config=config, meta=ModelMeta(preprocess=view, origin=origin))
    elif hints.config is not None:
        raise CheckpointError(f"{argument('config')} is for a state dict without description; this file tells its own")
    check_hints(description.config, hints)
    refuse_contradictions(description.config, state, "")
    model = empty(description.config)
    check_names(model, state)
    return "native", description, model, state


def fit_state_dict(config: ModelConfig | str, state: Tensors) -> ModelConfig:
    """The settings that the caller gives, with the head and the grid that the tensors have."""
    config = resolve(config) if isinstance(config, str) else config
    head = state.get("head.weight")
    config = config.replace(num_classes=0 if head is None else len(head))
    positions = state.get("embed.pos_embed")
    if isinstance(config, ViTConfig) and positions is not None and positions.dim() == 3:
        rows, columns = positions.shape[0] * config.stride, positions.shape[1] * config.stride
        config = config.replace(image_size=(rows, columns))
    return config


def describe(
    checkpoint: Checkpoint, family: Family, *, tensors: Tensors, reading: Reading, hints: LoadHints
) -> Description:
    """The description of a file that carries none: from its arrays, its JSON files and its family's habits."""
    if not {"embed.patch.weight", "root.weight"} & reading.native.keys():
        raise CheckpointError(f"{family.name} weights without {family.anchor!r}")
    facts = family.facts(checkpoint, tensors)
    config = infer_config(
        reading.native, facts, num_heads=hints.num_heads, grid=hints.grid, image_size=hints.image_size
    )
    check_hints(config, hints)
    view = hints.preprocess or family.stated_preprocess(checkpoint, config)
    assumed = []
    if isinstance(config, ViTConfig) and facts.num_heads is None and hints.num_heads is None:
        assumed.append(f"num_heads={config.num_heads}")
    told = facts.image_size or hints.grid  # else rows*columns + 1 of an oblong grid may be a square
    if isinstance(config, ViTConfig) and config.cls_token and not config.cls_pos_embed and not told:
        assumed.append(f"grid={config.grid[0]}x{config.grid[1]} without a position of the class token")
    silent = not facts.settings if family.name == "timm" else "config.json" not in checkpoint.settings
    if isinstance(config, ViTConfig) and family.name in ("timm", "huggingface") and silent:
        assumed.append(f"gelu={config.numerics.gelu!r}")
    if view is None:
        view = family.default_preprocess(checkpoint, config)
        if view is not None:
            assumed.append(f"preprocess={view.summary()}")
    left_out = [f"{name} ({why})" for name in reading.unused if (why := first_match(name, family.ignored))]
    origin = f"{family.name} weights from {hints.name or checkpoint.path.name}"
    if left_out or checkpoint.beside:
        origin += f"; not used: {brief([*left_out, *checkpoint.beside])}"
    if assumed and find_published(hints.name) is None:
        origin += f"; assumed: {', '.join(assumed)}"
        note(f"{checkpoint.path}: the file does not state {' and '.join(assumed)}: assumed as {family.name} has it")
    if doubt := family.doubt(checkpoint, config):
        note(f"{checkpoint.path}: {doubt}")
    meta = ModelMeta(
        preprocess=view or Preprocess(image_size=config.image_size, stated=False),
        labels=(facts.labels or family.default_labels(config.num_classes)) if config.num_classes else None,
        origin=origin,
        known_as=family.known_as(checkpoint),
    )
    return Description(config=config, meta=meta)


@cache
def note(text: str) -> None:
    """Say once, on stderr unless logging is set up otherwise, what was assumed."""
    logging.getLogger("vitruvian").warning(text)


def lone_token(native_tensors: Tensors) -> Tensors:
    """A distillation token that no head reads (DeiT fine-tuned without a teacher) is a register in its place."""
    names = native_tensors.keys()
    if "embed.dist_token" not in names or "head.weight" not in names or "head_dist.weight" in names:
        return native_tensors
    changed = dict(native_tensors)
    changed["embed.reg_tokens"] = changed.pop("embed.dist_token")
    return changed


def check_hints(config: ModelConfig, hints: LoadHints) -> None:
    """What the caller says must not contradict a description."""
    if isinstance(config, ResNetConfig):
        if hints.num_heads is not None or hints.grid is not None:
            raise CheckpointError("heads and grid have no meaning for a ResNet")
        return
    find_heads(config.width, hints.num_heads, config.num_heads)
    if hints.grid not in (None, config.grid):
        raise CheckpointError(f"grid={hints.grid} contradicts the file, which says {config.grid[0]}x{config.grid[1]}")


def refuse_contradictions(config: ModelConfig, tensors: Tensors, advice: str) -> None:
    """A description is believed only where the tensors agree; this also bounds the model that is built."""
    found = contradictions(config, tensors)
    if found:
        raise CheckpointError(f"the description does not fit the tensors: {'; '.join(found)}{advice}")


def refuse_architectures(tensors: Tensors, parts: dict[str, str]) -> None:
    """Arrays do not tell activation, epsilon and rotations, which differ among architectures with these parts."""
    for mark, what in parts.items():
        found = next((name for name in tensors if mark in name), None)
        if found:
            raise CheckpointError(
                f"the weights have {what} ({found!r}), but no known architecture is stated",
                hint=f"keep timm's config.json beside them, or pass {argument('config')} with the name of the "
                "architecture (`vit convert --config` does)",
            )


def check_names(model: Model, state: Tensors, *, family: Family | None = None, reading: Reading | None = None) -> None:
    """Every name must be used, every name needed must be there, and all shapes must fit."""
    expected = model.state_dict()
    lacking = [name for name in expected if name not in state]
    surplus = [name for name in state if name not in expected]
    if family is not None and reading is not None:
        lacking = [POSITIONS if "pos_embed" in name else name for name in lacking]  # still one array in the file
        there = {*reading.used, *reading.unused}
        lacking = [name for name in family.table.foreign_names(lacking, model.config) if name not in there]
        surplus = family.table.foreign_names(surplus, model.config)
        surplus += [name for name in reading.unused if first_match(name, family.ignored) is None]
    missing = list(dict.fromkeys(lacking))
    if missing or surplus:
        raise CheckpointError(
            f"names do not fit a {family.name if family else 'native'} model of this shape: "
            f"{len(missing)} not found: {brief(missing)}; {len(surplus)} not used: {brief(surplus)}"
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
