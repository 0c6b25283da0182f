"""Arguments of timm's models (`model_args`): what gives an architecture another setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vitruvian.config import ViTConfig
from vitruvian.weights.families.timm_shapes import BRANCHES, WITH_TEACHER, Shape
from vitruvian.weights.families.timm_variants import ROTARY

POOLS = {"token": "token", "mean": "avg", "map": "map"}
Argument = Callable[[ViTConfig, Shape], dict[str, Any] | None]
"""Arguments for a setting that differs from the architecture's; None where none gives it."""


def same(argument: str, setting: str) -> Argument:
    return lambda config, shape: {argument: getattr(config, setting)}


def sides(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    rows, columns = config.image_size
    if rows != columns and config.pos_embed == "relative_bias":
        return None  # timm's reading takes the biases for those of a square
    return {"img_size": rows if rows == columns else [rows, columns]}


def heads(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    branches = BRANCHES if "branches" in shape.pieces else 1
    return {"num_heads": config.num_heads // branches} if config.num_heads % branches == 0 else None


def mlp(config: ViTConfig, shape: Shape) -> dict[str, Any]:
    """`mlp_ratio`, also where the width alone is another one."""
    hidden = config.mlp_dim
    if "branches" in shape.pieces:
        hidden //= BRANCHES
    arguments: dict[str, Any] = {"mlp_ratio": ratio(hidden * (2 if "halved" in shape.pieces else 1), config.width)}
    if "aligned" in shape.pieces:
        arguments["swiglu_align_to"] = 1
    if shape.maker == "Eva" and config.pool == "map":
        arguments |= pool_mlp(config, shape) or {}
    return arguments


def pool_mlp(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    if shape.maker == "Eva":
        return {"attn_pool_mlp_ratio": ratio(config.pool_mlp_dim or config.mlp_dim, config.width)}
    return None


def ratio(hidden: int, width: int) -> float:
    """A number that times `width`, rounded down, is `hidden`."""
    exact = hidden / width
    return exact if int(width * exact) == hidden else (hidden + 0.5) / width


def width(config: ViTConfig, shape: Shape) -> dict[str, Any]:
    return {"embed_dim": config.width} | mlp(config, shape)


def qkv_bias(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """Eva and Beit keep it in pieces, which an architecture without does not show."""
    added = config.qkv_bias and shape.maker in ("Eva", "Beit")
    return None if added else {"qkv_bias": config.qkv_bias}


def layer_scale(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """Eva scales by zeros where others have no LayerScale; blocks with norms behind the branches never have one."""
    if config.block == "res_post_norm" or (shape.maker == "Eva" and not config.layer_scale):
        return None
    return {"init_values": 1e-5 if config.layer_scale else 0.0}


def prefix(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """Class token and registers, and whether positions are theirs too."""
    if config.distillation:
        return None
    registers = "num_reg_tokens" if shape.maker == "Eva" else "reg_tokens"
    tokens = {"class_token": config.cls_token, registers: config.reg_tokens}
    if shape.maker == "NaFlexVit":
        return tokens
    return tokens | {"no_embed_class": not (config.cls_token and config.cls_pos_embed)}


def pool(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """The pooling, and where the last norm stands."""
    if config.pool not in POOLS or (config.norm_after_pool and (config.pool == "map" or config.distillation)):
        return None
    after = config.norm_after_pool and config.pool == "mean"
    if shape.maker == "Beit":  # the pooling says it
        return {"global_pool": POOLS[config.pool]} if after == (config.pool == "mean") and config.final_norm else None
    if shape.maker == "Eva":
        if config.pool == "map" and config.prefix_tokens and not config.pool_prefix:
            return None  # its pooling reads all tokens
        norms = {"use_fc_norm": after and config.final_norm}
        norms |= {} if config.final_norm else {"use_post_transformer_norm": False}
        return {"global_pool": POOLS[config.pool]} | norms
    if config.pool == "map" and shape.maker == "VisionTransformer" and shape.config.mlp == "swiglu":
        return None  # its pooling has the SiLU of the blocks
    if config.pool == "map" and config.pool_mlp_dim != (2 * config.mlp_dim if "halved" in shape.pieces else 0):
        return None
    arguments = {"global_pool": POOLS[config.pool], "fc_norm": after, "final_norm": config.final_norm}
    included = config.pool == "map" and config.pool_prefix
    return arguments | ({"pool_include_prefix": included} if shape.config.pool_prefix or included else {})


def pool_heads(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """As many as elsewhere, or of Eva's own number."""
    if config.pool != "map":
        return {}
    if shape.maker == "Eva":
        return {"attn_pool_num_heads": config.pool_num_heads or config.num_heads}
    return {} if config.pool_num_heads in (0, config.num_heads) else None


def pre_norm(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """timm's patch embedding has a bias just where no norm follows."""
    name = "use_pre_transformer_norm" if shape.maker == "Eva" else "pre_norm"
    return {name: config.pre_norm} if config.patch_bias != config.pre_norm else None


def rope(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    """Other rotary positions of the same kind, as far as timm's code follows its arguments."""
    own, wanted = shape.config.rope, config.rope
    if own is None or wanted is None:
        return None
    found = {name: setting for name, setting in ROTARY.items() if getattr(own, setting) != getattr(wanted, setting)}
    followed = {"temperature", "offset", "reference_grid"} if own.kind == "axial" else {"temperature"}
    if own.kind != wanted.kind or own.columns_first != wanted.columns_first or {*found.values()} - followed:
        return None
    if own.reference_grid and not wanted.reference_grid:
        return None
    values = {name: getattr(wanted, setting) for name, setting in found.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def positions(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    return {"pos_embed": config.pos_embed} if config.pos_embed in ("learned", "factorized") else None


def grid(config: ViTConfig, shape: Shape) -> dict[str, Any] | None:
    rows, columns = config.grid
    if rows != columns and config.pos_embed == "factorized" and config.numerics.square_positions:
        return None  # timm resizes both to the longer side, even at this grid
    return {"pos_embed_grid_size": list(config.grid)}


SHARED: dict[str, Argument] = {
    "image_size": sides,
    "patch_size": same("patch_size", "patch_size"),
    "in_channels": same("in_chans", "in_channels"),
    "num_classes": same("num_classes", "num_classes"),
    "depth": same("depth", "depth"),
    "width": width,
    "mlp_dim": mlp,
    "num_heads": heads,
    "qkv_bias": qkv_bias,
    "layer_scale": layer_scale,
    "pool": pool,
    "norm_after_pool": pool,
}
POOLED: dict[str, Argument] = {
    **dict.fromkeys(("final_norm", "pool_prefix"), pool),
    "pool_num_heads": pool_heads,
    "pool_mlp_dim": pool_mlp,
}
TOKENS: dict[str, Argument] = {
    **dict.fromkeys(("cls_token", "reg_tokens", "cls_pos_embed"), prefix),
    **dict.fromkeys(("pre_norm", "patch_bias"), pre_norm),
}
PLAIN: dict[str, Argument] = SHARED | POOLED | TOKENS | {"qk_norm": same("qk_norm", "qk_norm")}
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "VisionTransformer": PLAIN,
    WITH_TEACHER: SHARED,
    "Eva": SHARED | POOLED | TOKENS | {"rope": rope},
    "Beit": SHARED,
    "NaFlexVit": SHARED | POOLED | TOKENS | {"image_size": grid, "pos_embed": positions},
}
"""By timm's class: the settings that its arguments change."""
