"""Parse a checkpoint: recognize its family, infer its settings, and rename its tensors; none is ignored silently."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vitruvian.catalog import find_published, resolve
from vitruvian.config import ModelConfig, ModelMeta, Pool, Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitruvian.errors import CheckpointError, UnknownNameError, argument
from vitruvian.model.build import Model, empty
from vitruvian.settings import Size, as_size
from vitruvian.text import brief
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.description import Description, describe_native, is_native
from vitruvian.weights.families.family import Facts, Family, first_match
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import POSITIONS, Reading, Tensors, find_grid, split_positions
from vitruvian.weights.families.timm_config import rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadHints:
    """Facts that the caller states about a file that does not contain them."""

    num_heads: int | None = None
    grid: Size | None = None
    image_size: Size | None = None
    """The requested size; it determines the grid if nothing else does."""
    family: str | None = None
    config: ModelConfig | str | None = None
    """Settings, or the name of a variant, for a state dict of our own model."""
    preprocess: Preprocess | None = None
    name: str = ""
    """The name of published weights; empty for a file."""

    def __post_init__(self) -> None:
        if self.grid is not None:
            object.__setattr__(self, "grid", as_size(self.grid, "grid"))


def parse_checkpoint(checkpoint: Checkpoint, hints: LoadHints) -> tuple[str, Description, Model, Tensors]:
    """The family's name, the description, an empty model of that shape, and the tensors under our names."""
    if hints.family == "native" or (hints.family is None and is_native(checkpoint)):
        return parse_native(checkpoint, hints)
    family = recognize(checkpoint, hints.family)
    if hints.config is not None:
        if not isinstance(hints.config, str) or family.name != "timm" or "config.json" in checkpoint.settings:
            raise CheckpointError(f"{argument('config')} is for files that do not state their settings; this one does")
        if hints.config not in rows():
            raise UnknownNameError("timm architecture", hints.config, rows())
        checkpoint = replace(checkpoint, settings={"config.json": {"architecture": hints.config}})
    checkpoint = replace(checkpoint, parsed=family.parse_settings(checkpoint))
    tensors = family.to_table_names(checkpoint.tensors)
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("some arrays are stored twice, under an older and a newer name")
    tensors = family.join_arrays(tensors, checkpoint)
    reading = family.table.read(tensors)
    reading = replace(reading, native=unread_token_as_register(reading.native))
    embedded = None if hints.family else family.embedded_description(checkpoint)
    if embedded is not None:
        description = Description.from_json(embedded, "the embedded description")
        check_hints(description.config, hints)
        reading = replace(reading, native=family.restore(reading.native, description.config))
        check_description(description.config, reading.native, hint="pass family= to ignore the description in the file")
    else:
        check_architecture(tensors, family.refused_parts(checkpoint))
        description = describe(checkpoint, family, tensors=tensors, reading=reading, hints=hints)
    config = description.config
    state = split_positions(reading.native, config) if isinstance(config, ViTConfig) else reading.native
    model = empty(config)
    check_names(model, state, family=family, reading=reading)
    return family.name, description, model, state


def parse_native(checkpoint: Checkpoint, hints: LoadHints) -> tuple[str, Description, Model, Tensors]:
    """`parse_checkpoint` for our own names: a native folder, or a state dict whose settings the caller states."""
    state = checkpoint.tensors
    description = describe_native(checkpoint)
    if description is None:
        if hints.config is None:
            raise CheckpointError(
                "a state dict without its settings: arrays do not determine heads, GELU and epsilon",
                hint="add them with `vit convert FILE FOLDER --to native --config ViT-B/16`; in Python, pass "
                "config=model.config or config='ViT-B/16', or write a folder with vt.save(model, 'folder')",
            )
        config = fit_state_dict(hints.config, state)
        preprocess = hints.preprocess or Preprocess(image_size=config.image_size)
        meta = ModelMeta(preprocess=preprocess, origin=f"state dict {checkpoint.path.name}")
        description = Description(config=config, meta=meta)
    elif hints.config is not None:
        raise CheckpointError(f"{argument('config')} is for files that do not state their settings; this one does")
    check_hints(description.config, hints)
    check_description(description.config, state)
    model = empty(description.config)
    check_names(model, state)
    return "native", description, model, state


def fit_state_dict(config: ModelConfig | str, state: Tensors) -> ModelConfig:
    """The caller's settings with the head and the grid of the tensors."""
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
    """Describe a file without an embedded description by its arrays, its JSON files and its family's defaults."""
    if not {"embed.patch.weight", "root.weight"} & reading.native.keys():
        raise CheckpointError(f"{family.name} weights without {family.anchor!r}")
    facts = family.facts(checkpoint, tensors)
    config = infer_config(
        reading.native, facts, num_heads=hints.num_heads, grid=hints.grid, image_size=hints.image_size
    )
    check_hints(config, hints)
    preprocess = hints.preprocess or family.stated_preprocess(checkpoint, config)
    assumed = []
    if isinstance(config, ViTConfig) and facts.num_heads is None and hints.num_heads is None:
        assumed.append(f"num_heads={config.num_heads}")
    is_stated = facts.image_size or hints.grid  # if not, rows * columns + 1 of an oblong grid may be a square
    if isinstance(config, ViTConfig) and config.cls_token and not config.cls_pos_embed and not is_stated:
        assumed.append(f"grid={config.grid[0]}x{config.grid[1]} without a position of the class token")
    is_silent = not facts.settings if family.name == "timm" else "config.json" not in checkpoint.settings
    if isinstance(config, ViTConfig) and family.name in ("timm", "huggingface") and is_silent:
        assumed.append(f"gelu={config.numerics.gelu!r}")
    if preprocess is None:
        preprocess = family.default_preprocess(checkpoint, config)
        if preprocess is not None:
            assumed.append(f"preprocess={preprocess.summary()}")
    ignored = [f"{name} ({reason})" for name in reading.unused if (reason := first_match(name, family.ignored))]
    origin = f"{family.name} weights from {hints.name or checkpoint.path.name}"
    if ignored or checkpoint.other_entries:
        origin += f"; not used: {brief([*ignored, *checkpoint.other_entries])}"
    if assumed and find_published(hints.name) is None:
        origin += f"; assumed: {', '.join(assumed)}"
        warn_once(
            f"{checkpoint.path}: assuming {' and '.join(assumed)}, {family.name}'s default; the file does not say"
        )
    if doubt := family.doubt(checkpoint, config):
        warn_once(f"{checkpoint.path}: {doubt}")
    meta = ModelMeta(
        preprocess=preprocess or Preprocess(image_size=config.image_size, stated=False),
        labels=(facts.labels or family.default_labels(config.num_classes)) if config.num_classes else None,
        origin=origin,
        known_as=family.known_as(checkpoint),
    )
    return Description(config=config, meta=meta)


@cache
def warn_once(text: str) -> None:
    """Log a warning, each text only once."""
    logging.getLogger("vitruvian").warning(text)


def unread_token_as_register(native_tensors: Tensors) -> Tensors:
    """Rename a distillation token without a head (DeiT fine-tuned without a teacher) to a register."""
    names = native_tensors.keys()
    if "embed.dist_token" not in names or "head.weight" not in names or "head_dist.weight" in names:
        return native_tensors
    changed = dict(native_tensors)
    changed["embed.reg_tokens"] = changed.pop("embed.dist_token")
    return changed


def check_hints(config: ModelConfig, hints: LoadHints) -> None:
    """Raise if the caller's hints contradict a description."""
    if isinstance(config, ResNetConfig):
        if hints.num_heads is not None or hints.grid is not None:
            raise CheckpointError("num_heads and grid do not apply to a ResNet")
        return
    find_heads(config.width, hints.num_heads, config.num_heads)
    if hints.grid not in (None, config.grid):
        raise CheckpointError(f"grid={hints.grid} contradicts the file, which says {config.grid[0]}x{config.grid[1]}")


def check_description(config: ModelConfig, tensors: Tensors, hint: str = "") -> None:
    """Raise if the tensors have another shape than described; this also bounds the size of the model."""
    reasons = contradictions(config, tensors)
    if reasons:
        raise CheckpointError(f"the description does not fit the tensors: {'; '.join(reasons)}", hint=hint)


def check_architecture(tensors: Tensors, refused: dict[str, str]) -> None:
    """Raise for parts whose activation, epsilon and rotations depend on an architecture that is not stated."""
    for part, what in refused.items():
        match = next((name for name in tensors if part in name), None)
        if match:
            raise CheckpointError(
                f"the weights have {what} ({match!r}), but no known architecture is stated",
                hint=f"keep timm's config.json beside them, or pass {argument('config')} with the name of the "
                "architecture (`vit convert --config` does)",
            )


def check_names(model: Model, state: Tensors, *, family: Family | None = None, reading: Reading | None = None) -> None:
    """Raise unless every name is used, every parameter is present, and all shapes fit."""
    expected = model.state_dict()
    missing = [name for name in expected if name not in state]
    surplus = [name for name in state if name not in expected]
    if family is not None and reading is not None:
        missing = [POSITIONS if "pos_embed" in name else name for name in missing]  # still one array in the file
        present = {*reading.used, *reading.unused}
        missing = [name for name in family.table.foreign_names(missing, model.config) if name not in present]
        surplus = family.table.foreign_names(surplus, model.config)
        surplus += [name for name in reading.unused if first_match(name, family.ignored) is None]
    missing = list(dict.fromkeys(missing))
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
                f"the model expects {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{' + '.join(map(repr, names))} has dtype {tensor.dtype}, not floating point")


HEADS = {width: width // 64 for width in (192, 384, 512, 640, 768, 896, 1024, 1536)}
HEADS |= dict.fromkeys((1152, 1280, 1408, 1664, 1792), 16)
"""Number of heads of the published models by width: 64 channels per head, except for So400m, H, g and G."""

DEFAULT_SIDE = 224
"""Image side of a model without any array that depends on it."""


def infer_config(
    native: Tensors, facts: Facts, *, num_heads: int | None, grid: Size | None, image_size: Size | None
) -> ModelConfig:
    """The settings of a model with these tensors.

    `num_heads` and `grid` are the caller's hints; `image_size`, the requested size, determines the grid if neither the
    file nor `grid` does.
    """
    if "root.weight" in native:
        config = infer_resnet(native).replace(**facts.settings)
        return config.replace(image_size=facts.image_size or config.image_size)
    shape = read_shape(native, facts)
    width, stem = shape["width"], shape["stem"]
    stride = shape["patch_size"] * (stem.stride if stem else 1)
    rows, columns = trained_grid(native, facts, stride=stride, grid=grid, image_size=image_size)
    positions = native.get(POSITIONS)
    count = positions.shape[1] if positions is not None and positions.dim() == 3 else 0
    before = shape["cls_token"] + shape["distillation"]
    size = facts.image_size  # a requested size is not trimmed: it must be a multiple of the patch
    covered = (rows * stride, columns * stride)
    trim = size is not None and size != covered and as_grid(size, stride) == (rows, columns) and stem is None
    settings: dict[str, Any] = {
        **shape,
        "image_size": size if trim else covered,
        "trim": trim,
        "num_heads": find_heads(width, num_heads, facts.num_heads),
        "pos_embed": "sincos" if positions is None and facts.fixed_positions else "learned",
        "cls_pos_embed": not before or count - rows * columns >= before,
        "norm_after_pool": facts.norm_after_pool,
        "numerics": facts.numerics,
    }
    settings |= facts.settings
    for name, stated in facts.stated.items():
        if stated not in (None, settings[name]):
            raise CheckpointError(f"the settings say {name}={stated}, the arrays have {settings[name]}")
    return ViTConfig(**settings)


def read_shape(native: Tensors, facts: Facts) -> dict[str, Any]:
    """The settings that shapes determine."""
    width, inputs, patch_size = patch_shape(native)
    stem = infer_stem(native, facts)
    layers = count_blocks(native, facts.depth)
    pre_logits, head = shape_of(native, "pre_logits.weight"), shape_of(native, "head.weight")
    fc1, fc2 = shape_of(native, "blocks.0.mlp.fc1.weight"), shape_of(native, "blocks.0.mlp.fc2.weight")
    mlp_width = fc2[1] if len(fc2) == 2 else fc1[0] if fc1 else 1
    root = shape_of(native, "embed.stem.root.weight") or shape_of(native, "embed.stem.root.0.conv.weight")
    pool_mlp = shape_of(native, "attn_pool.mlp.fc1.weight")
    reads = pre_logits[1] if len(pre_logits) == 2 else head[1] if len(head) == 2 else width
    distilled = "embed.dist_token" in native
    out = shape_of(native, "blocks.0.attn.proj.weight")
    return {
        "patch_size": patch_size,
        "in_channels": root[1] if len(root) == 4 else inputs,
        "num_classes": head[0] if head else 0,
        "depth": layers,
        "width": width,
        "mlp_dim": mlp_width,
        "attn_dim": out[1] if len(out) == 2 and out[1] != width else 0,
        "pool": infer_pool(native, facts, two_halves=reads == 2 * width),
        "cls_token": "embed.cls_token" in native,
        "distillation": distilled,
        "reg_tokens": shape_of(native, "embed.reg_tokens")[1] if len(shape_of(native, "embed.reg_tokens")) == 3 else 0,
        "representation_size": pre_logits[0] if pre_logits else 0,
        "mlp": "swiglu" if fc1 and fc1[0] == 2 * mlp_width else "gelu",
        "qkv_bias": "blocks.0.attn.qkv.bias" in native,
        "layer_scale": "blocks.0.ls1" in native,
        "patch_norm": "embed.patch_norm.weight" in native,
        "pre_norm": "embed.norm.weight" in native,
        "patch_bias": "embed.patch.bias" in native or "embed.norm.weight" not in native,
        "qk_norm": "blocks.0.attn.q_norm.weight" in native,
        "attn_norm": "blocks.0.attn.norm.weight" in native,
        "mlp_norm": "blocks.0.mlp.norm.weight" in native,
        "pool_mlp_dim": pool_mlp[0] if pool_mlp and pool_mlp[0] != mlp_width else 0,
        "dense_bias": any(name.endswith(".attn.proj.bias") for name in native),
        "attention": "differential" if "blocks.0.attn.subtracted" in native else "softmax",
        "stem": stem,
    }


def infer_pool(native: Tensors, facts: Facts, *, two_halves: bool) -> Pool:
    if "attn_pool.probe" in native:
        return "map"
    if "embed.cls_token" not in native or facts.norm_after_pool:
        return "mean"
    return "token_mean" if two_halves else "token"


def patch_shape(native: Tensors) -> tuple[int, int, int]:
    """Width, input channels and side of the patch embedding."""
    shape = shape_of(native, "embed.patch.weight")
    if len(shape) != 4 or shape[2] != shape[3]:
        raise CheckpointError(f"the patch embedding has shape {shape}, only square patches are supported")
    return shape[0], shape[1], shape[2]


def infer_stem(native: Tensors, facts: Facts) -> StemConfig | None:
    root, deep = shape_of(native, "embed.stem.root.weight"), shape_of(native, "embed.stem.root.0.conv.weight")
    if deep:
        last = shape_of(native, "embed.stem.root.2.conv.weight")
        stages = count_units(native, "embed.stem.stages.")
        return StemConfig(stages=stages, width=(last or deep)[0], style="resnet_d" if last else "mobile_clip")
    if not root:
        return None
    stages = count_units(native, "embed.stem.stages.")
    plain = [shape_of(native, f"embed.stem.stages.{stage}.0.conv.weight") for stage in range(len(stages))]
    if all(plain) and plain:
        widths = tuple(shape[0] for shape in plain)
        regular = StemConfig(stages=stages, width=widths[0], style="conv")
        return regular if regular.stage_widths == widths else replace(regular, widths=widths)
    return StemConfig(stages=stages, width=root[0], style=facts.stem_style)


def infer_resnet(native: Tensors) -> ResNetConfig:
    root, head = shape_of(native, "root.weight"), shape_of(native, "head.weight")
    stages = count_units(native, "stages.")
    if len(root) != 4:
        raise CheckpointError(f"the first convolution has shape {root}, not 4 dimensions")
    return ResNetConfig(in_channels=root[1], num_classes=head[0] if head else 0, stages=stages, width=root[0])


def trained_grid(native: Tensors, facts: Facts, *, stride: int, grid: Size | None, image_size: Size | None) -> Size:
    """Rows and columns of the grid for which the positions were trained."""
    known = as_grid(facts.image_size, stride)
    if known and grid and known != grid:
        raise CheckpointError(f"grid={grid} contradicts the file, which says {known[0]}x{known[1]}")
    requested = as_grid(image_size, stride)
    positions = native.get(POSITIONS)
    if positions is None:
        side = max(1, round(DEFAULT_SIDE / stride))
        return grid or known or requested or (side, side)
    tokens = ("embed.cls_token" in native) + ("embed.dist_token" in native)
    registers = shape_of(native, "embed.reg_tokens")
    return find_grid(
        positions.shape[1] if positions.dim() == 3 else 0,
        tokens=tokens,
        reg_tokens=registers[1] if len(registers) == 3 else 0,
        grid=grid or known,
        image_grid=requested,
    )


def as_grid(size: Size | None, stride: int) -> Size | None:
    return None if size is None else (size[0] // stride, size[1] // stride)


def find_heads(width: int, asked: int | None, stated: int | None) -> int:
    """The number of heads: stated by the file, else by the caller, else that of published models of this width."""
    if stated is not None:
        if asked not in (None, stated):
            raise CheckpointError(f"{argument('num_heads', asked)} contradicts the file, which has {stated} heads")
        return stated
    if asked is not None:
        return asked
    if width in HEADS:
        return HEADS[width]
    raise CheckpointError(
        f"the file does not state the number of heads, and no published model has width {width}",
        hint=f"pass {argument('num_heads')}",
    )


def count_blocks(native: Tensors, stated: int | None) -> int:
    """The number of blocks, stated or counted; a gap is reported later as missing names."""
    numbers = {int(match[1]) for name in native if (match := re.match(r"blocks\.(\d+)\.", name))}
    if not numbers:
        raise CheckpointError("the file has no Transformer blocks")
    layers = max(numbers) + 1
    if stated is not None and layers > stated:
        raise CheckpointError(f"the settings say {stated} layers, the arrays have {layers}")
    if max(layers, stated or 0) > 2 * len(numbers) + 8:
        raise CheckpointError(f"the file has {len(numbers)} of {max(layers, stated or 0)} blocks")
    return max(layers, stated or 0)


def count_units(native: Tensors, prefix: str) -> tuple[int, ...]:
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.(\d+)\.")
    units = {(int(match[1]), int(match[2])) for name in native if (match := pattern.match(name))}
    stages = 1 + max((stage for stage, _ in units), default=-1)
    if stages > 8 or max((unit for _, unit in units), default=0) > 256:
        raise CheckpointError(f"the file numbers {stages} stages of residual units, more than any ResNet has")
    return tuple(1 + max((u for s, u in units if s == stage), default=-1) for stage in range(stages))


def shape_of(native: Tensors, name: str) -> tuple[int, ...]:
    """A tensor's shape, or () if it is missing."""
    return tuple(native[name].shape) if name in native else ()


def contradictions(config: ModelConfig, native: Tensors) -> list[str]:
    """Settings in which a description differs from the tensors."""
    if isinstance(config, ResNetConfig):
        if "root.weight" not in native:
            return ["it describes a ResNet"]
        resnet = infer_resnet(native)
        actual: dict[str, Any] = {name: getattr(resnet, name) for name in ("stages", "width", "num_classes")}
    else:
        if "embed.patch.weight" not in native:
            return ["it describes a Vision Transformer"]
        shape = read_shape(native, Facts(numerics=config.numerics))
        names = ("depth", "width", "mlp_dim", "patch_size", "in_channels", "num_classes")
        actual = {name: shape[name] for name in names} | {"stages of the stem": shape["stem"] and shape["stem"].stages}
    stated = {name: getattr(config, name, None) for name in actual}
    if isinstance(config, ViTConfig):
        stated["stages of the stem"] = config.stem and config.stem.stages
    return [
        f"{name} is {stated[name]}, the tensors have {actual[name]}" for name in actual if stated[name] != actual[name]
    ]
