"""The settings of a model from its tensors under our names, and the facts its file states."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from vitruvian.config import ModelConfig, Pool, ResNetConfig, StemConfig, ViTConfig
from vitruvian.errors import CheckpointError, argument
from vitruvian.settings import Size
from vitruvian.weights.families.family import Facts
from vitruvian.weights.families.tables import POSITIONS, Tensors, find_grid

HEADS = {
    192: 3,
    384: 6,
    512: 8,
    640: 10,
    768: 12,
    896: 14,
    1024: 16,
    1152: 16,
    1280: 16,
    1408: 16,
    1536: 24,
    1664: 16,
    1792: 16,
}
"""Heads of the published models by width; not all have 64 a head (So400m 72, H 80, g 88, G 104)."""

DEFAULT_SIDE = 224
"""Image side of a model whose file holds nothing that depends on it."""


def infer_config(
    native: Tensors, facts: Facts, *, num_heads: int | None, grid: Size | None, image_size: Size | None
) -> ModelConfig:
    """The settings behind these tensors.

    `heads` and `grid` are what the caller knows; `image_size` is what the caller asks for, and settles the
    grid where the file and `grid` do not.
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
    size = facts.image_size  # what a caller asks for is not trimmed: patches have to divide it
    whole = (rows * stride, columns * stride)
    trim = size is not None and size != whole and as_grid(size, stride) == (rows, columns) and stem is None
    settings: dict[str, Any] = {
        **shape,
        "image_size": size if trim else whole,
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
    """The settings that shapes alone decide."""
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
        raise CheckpointError(f"the patch embedding has shape {shape}, only square patches are known")
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
    """Rows and columns of patches the positions were trained for."""
    known = as_grid(facts.image_size, stride)
    if known and grid and known != grid:
        raise CheckpointError(f"grid={grid} contradicts the file, which says {known[0]}x{known[1]}")
    wanted = as_grid(image_size, stride)
    flat = native.get(POSITIONS)
    if flat is None:
        side = max(1, round(DEFAULT_SIDE / stride))
        return grid or known or wanted or (side, side)
    tokens = ("embed.cls_token" in native) + ("embed.dist_token" in native)
    registers = shape_of(native, "embed.reg_tokens")
    return find_grid(
        flat.shape[1] if flat.dim() == 3 else 0,
        tokens=tokens,
        reg_tokens=registers[1] if len(registers) == 3 else 0,
        grid=grid or known,
        image_grid=wanted,
    )


def as_grid(size: Size | None, stride: int) -> Size | None:
    return None if size is None else (size[0] // stride, size[1] // stride)


def find_heads(width: int, asked: int | None, stated: int | None) -> int:
    """The number of heads: what the file states, what the caller says, or what published models of this width have."""
    if stated is not None:
        if asked not in (None, stated):
            raise CheckpointError(f"{argument('num_heads', asked)} contradicts the file, which has {stated} heads")
        return stated
    if asked is not None:
        return asked
    if width in HEADS:
        return HEADS[width]
    raise CheckpointError(
        f"the file does not state its heads, and none is published of width {width}; pass {argument('num_heads')}"
    )


def count_blocks(native: Tensors, stated: int | None) -> int:
    """The number of blocks the file states or numbers; a gap shows later, as names that are not found."""
    numbers = {int(match[1]) for name in native if (match := re.match(r"blocks\.(\d+)\.", name))}
    if not numbers:
        raise CheckpointError("the file has no Transformer blocks")
    layers = max(numbers) + 1
    if stated is not None and layers > stated:
        raise CheckpointError(f"the settings say {stated} layers, the arrays have {layers}")
    if max(layers, stated or 0) > 2 * len(numbers) + 8:
        raise CheckpointError(f"the file has {len(numbers)} of {max(layers, stated or 0)} blocks")
    return max(layers, stated or 0)


def count_units(native: Tensors, beginning: str) -> tuple[int, ...]:
    pattern = re.compile(re.escape(beginning) + r"(\d+)\.(\d+)\.")
    units = {(int(match[1]), int(match[2])) for name in native if (match := pattern.match(name))}
    stages = 1 + max((stage for stage, _ in units), default=-1)
    if stages > 8 or max((unit for _, unit in units), default=0) > 256:
        raise CheckpointError(f"the file numbers {stages} stages of residual units, more than any ResNet has")
    return tuple(1 + max((u for s, u in units if s == stage), default=-1) for stage in range(stages))


def shape_of(native: Tensors, name: str) -> tuple[int, ...]:
    """A tensor's shape; empty if it is not there."""
    return tuple(native[name].shape) if name in native else ()


def contradictions(config: ModelConfig, native: Tensors) -> list[str]:
    """Where a description and the tensors it came with disagree about the shape of the model."""
    if isinstance(config, ResNetConfig):
        if "root.weight" not in native:
            return ["it describes a ResNet"]
        found: dict[str, Any] = {
            name: getattr(infer_resnet(native), name) for name in ("stages", "width", "num_classes")
        }
    else:
        if "embed.patch.weight" not in native:
            return ["it describes a Vision Transformer"]
        shape = read_shape(native, Facts(numerics=config.numerics))
        found = {
            name: shape[name] for name in ("depth", "width", "mlp_dim", "patch_size", "in_channels", "num_classes")
        }
        found |= {"stages of the stem": shape["stem"] and shape["stem"].stages}
    stated = {name: getattr(config, name, None) for name in found}
    if isinstance(config, ViTConfig):
        stated["stages of the stem"] = config.stem and config.stem.stages
    return [
        f"{name} is {stated[name]}, the tensors have {found[name]}" for name in found if stated[name] != found[name]
    ]
