"""Which of timm's architectures a model is written as, and the arguments that make it so."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from vitruvian.config import CHANGEABLE, Numerics, ViTConfig
from vitruvian.weights.families.timm_arguments import ARGUMENTS
from vitruvian.weights.families.timm_shapes import BRANCHES, WITH_TEACHER, Shape, shapes

UNEXPRESSED_COST, NAFLEX_COST = 100, 5
"""In arguments: an architecture that differs in numerics no argument states; NaFlexVit for a model of one size."""
GIVEN_BY_STEM = ("width", "patch_size")
UNPOOLED = {"pool_num_heads": 0, "pool_mlp_dim": 0, "pool_prefix": False}
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An architecture, and the arguments with which it is the model."""

    shape: Shape
    arguments: dict[str, Any]
    numerics: Numerics
    """Those of timm's code."""
    cost: int


def choose(config: ViTConfig, name: str = "", *, key_bias: bool = False) -> Choice | list[str]:
    """The architecture with the fewest arguments, `name` before all others; or why none is this model.

    `key_bias` tells whether keys have a bias that changes anything.
    """
    choices, reasons = [], dict[str, list[str]]()
    for shape in shapes():
        found = fitted(shape, config, key_bias=key_bias)
        if isinstance(found, list):
            reasons[shape.name] = found
        else:
            choices.append(found)
    if choices:
        return min(choices, key=lambda choice: (choice.shape.name != name, choice.cost))
    nearest = name if name in reasons else min(reasons, key=lambda name: len(reasons[name]))
    return [f"timm has no architecture of this shape; nearest is {nearest}, which has {', '.join(reasons[nearest])}"]


def fitted(shape: Shape, config: ViTConfig, *, key_bias: bool) -> Choice | list[str]:
    """The arguments that turn an architecture into this model; or what it has otherwise."""
    theirs, ours = compared(shape.config, shape), compared(config, shape)
    arguments, others, known = dict[str, Any](), list[str](), ARGUMENTS[shape.maker]
    changed = [name for name in theirs if theirs[name] != ours[name]]
    fixed = GIVEN_BY_STEM if config.stem and config.stem.style == "mobile_clip" else ()
    for name in changed:
        found = known[name](config, shape) if name in known and name not in fixed else None
        if found is None:
            others.append(f"{name}={theirs[name]!r}, this model {ours[name]!r}")
        else:
            arguments |= found
    if key_bias and {"split_bias", "projections"} & shape.pieces and "key_bias" not in shape.pieces:
        others.append("no bias of keys")
    if others:
        return others
    numerics, unexpressed = stated_numerics(shape, config, arguments)
    cost = len(arguments) + UNEXPRESSED_COST * unexpressed
    flexible = config.numerics.square_positions or config.pos_embed == "factorized"
    if shape.maker == "NaFlexVit" and not (flexible or config.numerics.position_resize == "bilinear_antialias"):
        cost += NAFLEX_COST
    return Choice(shape=shape, arguments=arguments, numerics=numerics, cost=cost)


def compared(config: ViTConfig, shape: Shape) -> dict[str, Any]:
    """A model's settings without those that change nothing in it, or are written in another way."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in (*CHANGEABLE, "numerics", "trim"):
        del settings[name]
    flexible = shape.maker == "NaFlexVit"
    written_out = config.pos_embed in ("learned_2d", "sincos") or (config.pos_embed == "factorized" and not flexible)
    zeros = config.pos_embed == "none" and config.rope is None and shape.config.pos_embed == "learned"
    if written_out or zeros:
        settings["pos_embed"] = "learned"
    if settings["pos_embed"] != "learned" or not config.cls_token or flexible or shape.maker == WITH_TEACHER:
        settings["cls_pos_embed"] = True
    settings |= {"pool_num_heads": config.pool_num_heads or config.num_heads} if config.pool == "map" else UNPOOLED
    if (config.pool == "token" and not config.distillation) or not config.final_norm:
        settings["norm_after_pool"] = False
    if not config.layer_scale:
        settings["mlp_scale"] = True
    if not config.prefix_tokens:
        settings["pool_prefix"] = shape.config.pool_prefix and config.pool == "map"
    if config.stem is not None and config.stem.style == "hybrid":
        settings["stem"] = config.stem.replace(style="timm")
    if config.attn_dim == BRANCHES * config.width:
        settings["attn_dim"] = "of two branches"
    return settings


def stated_numerics(shape: Shape, config: ViTConfig, arguments: dict[str, Any]) -> tuple[Numerics, int]:
    """The numerics that timm's code has, with arguments for what they can state; and how many differ."""
    own, wanted = shape.config.numerics, config.numerics
    plain_mlp = config.mlp == "gelu"
    if shape.maker not in ("Eva", "Beit") and wanted.gelu != own.gelu and plain_mlp:
        arguments["act_layer"], own = ACTIVATIONS[wanted.gelu], own.replace(gelu=wanted.gelu)
    if shape.maker == "NaFlexVit":
        ways = {"bicubic_antialias": "bicubic", "bilinear_antialias": "bilinear"}
        if wanted.position_resize != own.position_resize and wanted.position_resize in ways:
            arguments["pos_embed_interp_mode"] = ways[wanted.position_resize]
            own = own.replace(position_resize=wanted.position_resize)
        if wanted.square_positions != own.square_positions:
            arguments["pos_embed_ar_preserving"] = wanted.square_positions
            own = own.replace(square_positions=wanted.square_positions)
    acts = plain_mlp or config.pool == "map"
    differ = (acts and own.gelu != wanted.gelu, own.norm_eps != wanted.norm_eps)
    resized = own.square_positions != wanted.square_positions or wanted.position_resize == "bilinear_antialias"
    return own, sum(differ) + (resized and shape.maker != "NaFlexVit")
