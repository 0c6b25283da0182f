"""Parse a checkpoint: recognize its family, infer its settings, and rename its tensors; none is ignored silently."""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from vitruvian.catalog import find_published, imagenet_labels, resolve
from vitruvian.config import ConvStyle, ModelConfig, ModelMeta, Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitruvian.errors import CheckpointError, UnknownNameError, argument
from vitruvian.files import fingerprint
from vitruvian.model.build import Model, empty
from vitruvian.settings import Size, as_size
from vitruvian.text import brief
from vitruvian.weights.checkpoint_files import Checkpoint, Description, describe_native, is_native
from vitruvian.weights.families.family import Facts, Family, check_settings, first_match
from vitruvian.weights.families.registry import recognize
from vitruvian.weights.families.tables import POSITIONS, Tensors, split_positions
from vitruvian.weights.families.timm_config import rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadHints:
    """Facts that the caller states about a file that does not contain them."""

    num_heads: int | None = None
    grid: Size | None = None
    image_size: Size | None = None  # the requested size; it determines the grid if nothing else does
    family: str | None = None
    config: ModelConfig | str | None = None  # settings, or the name of a variant, for a state dict of our own model
    preprocess: Preprocess | None = None
    name: str = ""  # the name of published weights; empty for a file

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
    tensors = family.to_table_names(checkpoint.tensors)
    if len(tensors) < len(checkpoint.tensors):
        raise CheckpointError("some arrays are stored twice, under an older and a newer name")
    tensors = family.join_arrays(tensors, checkpoint)
    state, unused = family.table.read(tensors)
    if "embed.dist_token" in state and "head.weight" in state and "head_dist.weight" not in state:
        # a DeiT fine-tuned without a teacher: its distillation token has no head, like a register
        state["embed.reg_tokens"] = state.pop("embed.dist_token")
    embedded = None if hints.family else embedded_description(checkpoint, family)
    if embedded is not None:
        description = Description.from_json(embedded, "the embedded description")
        check_hints(description.config, hints)
        state = family.restore(state, description.config)
        check_description(description.config, state, hint="pass family= to ignore the description in the file")
    else:
        description = describe(checkpoint, family, tensors, (state, unused), hints)
    if isinstance(description.config, ViTConfig):
        state = split_positions(state, description.config)
    model = empty(description.config)

    def foreign(names: Iterable[str]) -> list[str]:  # positions are still one array in the file
        joined = (POSITIONS if "pos_embed" in name and name not in state else name for name in names)
        return family.table.foreign_names(joined, description.config)

    unknown = [name for name in unused if first_match(name, family.table.ignored) is None]
    check_names(model.state_dict(), state, f"{family.name} model", foreign, tensors, unknown)
    return family.name, description, model, state


def embedded_description(checkpoint: Checkpoint, family: Family[Any]) -> Any:
    """The description that `save` embedded in the file, as JSON, or None.

    In a folder it is valid only while the JSON files written with it are unchanged.
    """
    description = checkpoint.embedded
    hashes = description.get("files", {}) if isinstance(description, dict) else {}
    is_alone = family.name == "huggingface" and not hashes  # a folder without its JSON files
    if is_alone or not isinstance(hashes, dict):
        return None
    changed = any(fingerprint(checkpoint.settings.get(name)) != value for name, value in hashes.items())
    return None if changed else description


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
        config = resolve(hints.config) if isinstance(hints.config, str) else hints.config
        config = config.replace(num_classes=len(state.get("head.weight", ())))
        positions = state.get("embed.pos_embed")
        if isinstance(config, ViTConfig) and positions is not None and positions.dim() == 3:
            size = positions.shape[0] * config.stride, positions.shape[1] * config.stride
            config = config.replace(image_size=size)
        preprocess = hints.preprocess or Preprocess(image_size=config.image_size)
        meta = ModelMeta(preprocess=preprocess, origin=f"state dict {checkpoint.path.name}")
        description = Description(config=config, meta=meta)
    elif hints.config is not None:
        raise CheckpointError(f"{argument('config')} is for files that do not state their settings; this one does")
    check_hints(description.config, hints)
    check_description(description.config, state)
    model = empty(description.config)
    check_names(model.state_dict(), state, "native model")
    return "native", description, model, state


def describe(
    checkpoint: Checkpoint, family: Family[Any], tensors: Tensors, reading: tuple[Tensors, list[str]], hints: LoadHints
) -> Description:
    """Describe a file without an embedded description by its arrays, its JSON files and its family's defaults.

    `tensors` have the names of the family's table, which read them as `reading`.
    """
    native, unused = reading
    if not {"embed.patch.weight", "root.weight"} & native.keys():
        raise CheckpointError(f"{family.name} weights without {family.table.anchor!r}")
    facts = family.facts(checkpoint, tensors)
    config = infer_config(native, facts, hints, family.stem_style)
    check_hints(config, hints)
    preprocess = hints.preprocess or family.stated_preprocess(checkpoint, config)
    assumed, is_huggingface = [], family.name == "huggingface"
    if isinstance(config, ViTConfig):
        if facts.num_heads is None and hints.num_heads is None:
            assumed.append(f"num_heads={config.num_heads}")
        is_stated = facts.image_size or hints.grid  # if not, rows * columns + 1 of an oblong grid may be a square
        if config.cls_token and not config.cls_pos_embed and not is_stated:
            assumed.append(f"grid={config.grid[0]}x{config.grid[1]} without a position of the class token")
        is_silent = is_huggingface and "config.json" not in checkpoint.settings
        if is_silent or (family.name == "timm" and not facts.settings):
            assumed.append(f"gelu={config.numerics.gelu!r}")
    if preprocess is None:
        preprocess = family.default_preprocess(checkpoint, config)
        if preprocess is not None:
            assumed.append(f"preprocess={preprocess.summary()}")
    ignored = [f"{name} ({reason})" for name in unused if (reason := first_match(name, family.table.ignored))]
    origin = f"{family.name} weights from {hints.name or checkpoint.path.name}"
    if ignored or checkpoint.other_entries:
        origin += f"; not used: {brief([*ignored, *checkpoint.other_entries])}"
    if assumed and find_published(hints.name) is None:
        origin += f"; assumed: {', '.join(assumed)}"
        warn_once(checkpoint.path, f"assuming {' and '.join(assumed)}, {family.name}'s default; the file does not say")
    if doubt := family.doubt(checkpoint, config):
        warn_once(checkpoint.path, doubt)
    # published heads of 1000 classes are ImageNet-1k's; transformers names the classes, or has LABEL_0 and so on
    labels = imagenet_labels() if config.num_classes == 1000 and not is_huggingface else None
    meta = ModelMeta(
        preprocess=preprocess or Preprocess(image_size=config.image_size, stated=False),
        labels=(facts.labels or labels) if config.num_classes else None,
        origin=origin,
        known_as=facts.known_as,
    )
    return Description(config=config, meta=meta)


@cache
def warn_once(path: Path, text: str) -> None:
    """Log a warning about a file, each only once; commands print it once per file (`vitruvian.cli.options`)."""
    logging.getLogger("vitruvian").warning(f"{path}: {text}", extra={"file": path})


def check_hints(config: ModelConfig, hints: LoadHints) -> None:
    if isinstance(config, ResNetConfig):
        if hints.num_heads is not None or hints.grid is not None:
            raise CheckpointError("num_heads and grid do not apply to a ResNet")
        return
    find_heads(config.width, hints.num_heads, config.num_heads)
    if hints.grid not in (None, config.grid):
        raise CheckpointError(f"grid={hints.grid} contradicts the file, which says {config.grid[0]}x{config.grid[1]}")


def check_description(config: ModelConfig, native: Tensors, hint: str = "") -> None:
    """Raise if the tensors have another shape than described; this also bounds the size of the model."""
    is_resnet, reasons, settings = isinstance(config, ResNetConfig), list[str](), dict[str, tuple[Any, Any]]()
    if ("root.weight" if is_resnet else "embed.patch.weight") not in native:
        reasons.append(f"it describes a {'ResNet' if is_resnet else 'Vision Transformer'}")
    elif isinstance(config, ResNetConfig):
        resnet = infer_resnet(native)
        settings = {name: (getattr(config, name), getattr(resnet, name)) for name in ("stages", "width", "num_classes")}
    else:
        shape = read_shape(native, Facts(numerics=config.numerics))
        names = ("depth", "width", "mlp_dim", "patch_size", "in_channels", "num_classes")
        settings = {name: (getattr(config, name), shape[name]) for name in names}
        settings["stages of the stem"] = config.stem and config.stem.stages, shape["stem"] and shape["stem"].stages
    for name, (stated, actual) in settings.items():
        if stated != actual:
            reasons.append(f"{name} is {stated}, the tensors have {actual}")
    if reasons:
        raise CheckpointError(f"the description does not fit the tensors: {'; '.join(reasons)}", hint=hint)


def check_names(
    expected: Tensors,
    state: Tensors,
    what: str,
    foreign: Callable[[Iterable[str]], list[str]] = list,
    tensors: Collection[str] = (),
    unused: Sequence[str] = (),
) -> None:
    """Raise unless every name is used, every parameter is present, and all shapes fit.

    Errors have the names in the file, to which `foreign` converts ours: its `tensors`, of which some are `unused`.
    """
    missing = [name for name in foreign(name for name in expected if name not in state) if name not in tensors]
    missing, surplus = list(dict.fromkeys(missing)), [*foreign(name for name in state if name not in expected), *unused]
    if missing or surplus:
        counts = f"{len(missing)} not found: {brief(missing)}; {len(surplus)} not used: {brief(surplus)}"
        raise CheckpointError(f"names do not fit a {what} of this shape: {counts}")
    for name, tensor in state.items():
        problem, shape = "", tuple(expected[name].shape)
        if tensor.shape != shape:
            problem = f"has shape {tuple(tensor.shape)} in our layout, the model expects {shape}"
        elif not tensor.is_floating_point():
            problem = f"has dtype {tensor.dtype}, not floating point"
        if problem:
            raise CheckpointError(f"{' + '.join(map(repr, foreign([name])))} {problem}")


HEADS = {width: width // 64 for width in (192, 384, 512, 640, 768, 896, 1024, 1536)}
HEADS |= dict.fromkeys((1152, 1280, 1408, 1664, 1792), 16)
"""Number of heads of the published models by width: 64 channels per head, except for So400m, H, g and G."""
MIXING = "blocks.0.attn.fc1.weight"  # (hidden, patches), of an MLP-Mixer only
DEFAULT_SIDE = 224  # image side of a model without any array that depends on it


def infer_config(native: Tensors, facts: Facts, hints: LoadHints, stem_style: ConvStyle) -> ModelConfig:
    """The settings of a model with these tensors."""
    if "root.weight" in native:
        config = infer_resnet(native).replace(**facts.settings)
        return config.replace(image_size=facts.image_size or config.image_size)
    shape = read_shape(native, facts, stem_style)
    stem, size = shape["stem"], facts.image_size  # a requested size is not trimmed: it must be a multiple of the patch
    stride = shape["patch_size"] * (stem.stride if stem else 1)
    rows, columns = trained_grid(native, facts, hints, stride)
    positions = native.get(POSITIONS)
    count = positions.shape[1] if positions is not None and positions.dim() == 3 else 0
    before = shape["cls_token"] + shape["distillation"]
    covered = (rows * stride, columns * stride)
    is_fixed = positions is None and facts.fixed_positions
    trim = size is not None and size != covered and as_grid(size, stride) == (rows, columns) and stem is None
    settings: dict[str, Any] = {
        **shape,
        "image_size": size if trim else covered,
        "trim": trim,
        "num_heads": find_heads(shape["width"], hints.num_heads, facts.num_heads),
        "pos_embed": "none" if shape["mixer_dim"] else "sincos" if is_fixed else "learned",
        "cls_pos_embed": not before or count - rows * columns >= before,
        "norm_after_pool": facts.norm_after_pool,
        "numerics": facts.numerics,
        **facts.settings,
    }
    check_settings(facts.stated, settings)
    return ViTConfig(**settings)


def read_shape(native: Tensors, facts: Facts, stem_style: ConvStyle = "hybrid") -> dict[str, Any]:
    """The settings that shapes determine."""
    patch = shape_of(native, "embed.patch.weight")
    if len(patch) != 4 or patch[2] != patch[3]:
        raise CheckpointError(f"the patch embedding has shape {patch}, only square patches are supported")
    width, stem = patch[0], infer_stem(native, stem_style)
    pre_logits, head = shape_of(native, "pre_logits.weight"), shape_of(native, "head.weight")
    fc1, fc2 = shape_of(native, "blocks.0.mlp.fc1.weight"), shape_of(native, "blocks.0.mlp.fc2.weight")
    mlp_width = fc2[1] if len(fc2) == 2 else fc1[0] if fc1 else 1
    root = shape_of(native, "embed.stem.root.weight") or shape_of(native, "embed.stem.root.0.conv.weight")
    pool_mlp = shape_of(native, "attn_pool.mlp.fc1.weight")
    reads = pre_logits[1] if len(pre_logits) == 2 else head[1] if len(head) == 2 else width
    out, mixing = shape_of(native, "blocks.0.attn.proj.weight"), shape_of(native, MIXING)
    pool = "token_mean" if reads == 2 * width else "token"
    if "embed.cls_token" not in native or facts.norm_after_pool:
        pool = "mean"
    return {
        "patch_size": patch[2],
        "in_channels": root[1] if len(root) == 4 else patch[1],
        "num_classes": head[0] if head else 0,
        "depth": count_blocks(native, facts.depth),
        "width": width,
        "mlp_dim": mlp_width,
        "attn_dim": out[1] if len(out) == 2 and out[1] != width and not mixing else 0,
        "mixer_dim": mixing[0] if mixing else 0,
        "pool": "map" if "attn_pool.probe" in native else pool,
        "cls_token": "embed.cls_token" in native,
        "distillation": "embed.dist_token" in native,
        "reg_tokens": count_registers(native),
        "representation_size": pre_logits[0] if pre_logits else 0,
        "mlp": "swiglu" if fc1 and fc1[0] == 2 * mlp_width else "gelu",
        "qkv_bias": "blocks.0.attn.qkv.bias" in native or bool(mixing),
        "layer_scale": "blocks.0.ls1" in native,
        "patch_norm": "embed.patch_norm.weight" in native,
        "pre_norm": "embed.norm.weight" in native,
        "patch_bias": "embed.patch.bias" in native or "embed.norm.weight" not in native,
        "qk_norm": "blocks.0.attn.q_norm.weight" in native,
        "attn_norm": "blocks.0.attn.norm.weight" in native,
        "mlp_norm": "blocks.0.mlp.norm.weight" in native,
        "pool_mlp_dim": pool_mlp[0] if pool_mlp and pool_mlp[0] != mlp_width else 0,
        "dense_bias": any(name.endswith(".attn.proj.bias") for name in native),
        "attention": "mixer" if mixing else "differential" if "blocks.0.attn.subtracted" in native else "softmax",
        "stem": stem,
    }


def infer_stem(native: Tensors, style: ConvStyle) -> StemConfig | None:
    root, deep = shape_of(native, "embed.stem.root.weight"), shape_of(native, "embed.stem.root.0.conv.weight")
    if not root and not deep:
        return None
    stages = count_units(native, "embed.stem.stages.")
    if deep:
        last = shape_of(native, "embed.stem.root.2.conv.weight")
        return StemConfig(stages=stages, width=(last or deep)[0], style="resnet_d" if last else "mobile_clip")
    plain = [shape_of(native, f"embed.stem.stages.{stage}.0.conv.weight") for stage in range(len(stages))]
    if all(plain) and plain:
        widths = tuple(shape[0] for shape in plain)
        regular = StemConfig(stages=stages, width=widths[0], style="conv")
        return regular if regular.stage_widths == widths else replace(regular, widths=widths)
    return StemConfig(stages=stages, width=root[0], style=style)


def infer_resnet(native: Tensors) -> ResNetConfig:
    root, head = shape_of(native, "root.weight"), shape_of(native, "head.weight")
    stages = count_units(native, "stages.")
    if len(root) != 4:
        raise CheckpointError(f"the first convolution has shape {root}, not 4 dimensions")
    return ResNetConfig(in_channels=root[1], num_classes=head[0] if head else 0, stages=stages, width=root[0])


def trained_grid(native: Tensors, facts: Facts, hints: LoadHints, stride: int) -> Size:
    """Rows and columns of the grid for which the positions were trained.

    Taken from the caller or the file if stated, else a square, else the grid of the requested image size. The rows of
    the position array may include all tokens before the patches, all but the registers, or none, tried in this order.
    """
    known, requested = as_grid(facts.image_size, stride), as_grid(hints.image_size, stride)
    if known and hints.grid and known != hints.grid:
        raise CheckpointError(f"grid={hints.grid} contradicts the file, which says {known[0]}x{known[1]}")
    grid, positions, mixing = hints.grid or known, native.get(POSITIONS), shape_of(native, MIXING)
    if positions is None and not mixing:
        side = max(1, round(DEFAULT_SIDE / stride))
        return grid or requested or (side, side)
    total = mixing[-1] if mixing else positions.shape[1] if positions is not None and positions.dim() == 3 else 0
    patches = total - ("embed.cls_token" in native) - ("embed.dist_token" in native)
    counts = [patches, patches - count_registers(native), total]
    if grid is not None:
        if grid[0] * grid[1] not in counts:
            raise CheckpointError(f"a grid of {grid[0]}x{grid[1]} does not fit the {patches} positions in the file")
        return grid
    for count in counts:
        side = math.isqrt(max(count, 0))
        if side and side * side == count:
            return side, side
        if requested is not None and requested[0] * requested[1] == count:
            return requested
    grids = [f"{rows}x{patches // rows}" for rows in range(2, patches // 2 + 1) if patches % rows == 0]
    reason = f"{patches} positions are not a square grid and the file does not state its shape"
    raise CheckpointError(reason, hint=f"pass grid=(rows, columns), one of {', '.join(grids) or 'none possible'}")


def as_grid(size: Size | None, stride: int) -> Size | None:
    return None if size is None else (size[0] // stride, size[1] // stride)


def find_heads(width: int, asked: int | None, stated: int | None) -> int:
    """The number of heads: stated by the file, else by the caller, else that of published models of this width."""
    if stated is not None and asked not in (None, stated):
        raise CheckpointError(f"{argument('num_heads', asked)} contradicts the file, which has {stated} heads")
    heads = next((count for count in (stated, asked, HEADS.get(width)) if count is not None), None)
    if heads is None:
        reason = f"the file does not state the number of heads, and no published model has width {width}"
        raise CheckpointError(reason, hint=f"pass {argument('num_heads')}")
    return heads


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
        raise CheckpointError(f"the file has {stages} stages of residual units, more than any ResNet has")
    return tuple(1 + max((u for s, u in units if s == stage), default=-1) for stage in range(stages))


def count_registers(native: Tensors) -> int:
    shape = shape_of(native, "embed.reg_tokens")
    return shape[1] if len(shape) == 3 else 0


def shape_of(native: Tensors, name: str) -> tuple[int, ...]:
    return tuple(native[name].shape) if name in native else ()
