"""timm's architectures by name: what their arrays do not tell."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from vitruvian.config import RopeConfig
from vitruvian.errors import CheckpointError

EITHER = {False: False, True: True}
CHOICES: dict[str, tuple[str, dict[Any, Any]]] = {
    "global_pool": ("pool", {"token": "token", "avg": "mean", "map": "map"}),
    "act_layer": ("gelu", {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}),
    "attn_layer": ("attention", {"": "softmax", "attn": "softmax", "diff": "differential"}),
    "pos_embed": (
        "pos_embed",
        {"learn": "learned", "learned": "learned", "factorized": "factorized", "none": "none", "": "none"},
    ),
    "pos_embed_interp_mode": ("position_resize", {way: f"{way}_antialias" for way in ("bicubic", "bilinear")}),
    "pos_embed_ar_preserving": ("square_positions", EITHER),
    "pool_include_prefix": ("pool_prefix", EITHER),
    "final_norm": ("final_norm", EITHER),
    "use_post_transformer_norm": ("final_norm", EITHER),
}
"""Arguments of a timm model whose values are words, the setting that each has here, and its values."""

TOLD_BY_ARRAYS = {
    "depth": "depth",
    "embed_dim": "width",
    "patch_size": "patch_size",
    "num_classes": "num_classes",
    "in_chans": "in_channels",
    "mlp_ratio": "mlp_dim",
    "class_token": "cls_token",
    "no_embed_class": "cls_pos_embed",
    "reg_tokens": "reg_tokens",
    "num_reg_tokens": "reg_tokens",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "scale_attn_norm": "attn_norm",
    "scale_attn_inner": "attn_norm",
    "scale_mlp_norm": "mlp_norm",
    "scale_mlp": "mlp_norm",
    "proj_bias": "dense_bias",
    "init_values": "layer_scale",
    "pre_norm": "pre_norm",
    "use_pre_transformer_norm": "pre_norm",
    "fc_norm": "norm_after_pool",
    "use_fc_norm": "norm_after_pool",
}
"""Arguments of a timm model that its arrays tell too, and the setting that each has here; the two must agree."""

HEADS = {"num_heads": "num_heads", "attn_pool_num_heads": "pool_num_heads"}
ROTARY = {
    "rope_temperature": "temperature",
    "rope_grid_offset": "offset",
    "rope_rotate_half": "half",
    "ref_feat_shape": "reference_grid",
}
"""Arguments of a timm model with rotary positions, and the setting of RopeConfig that each is."""

IGNORED_ROTARY = {"axial": (), "mixed": ("temperature", "offset", "reference_grid"), "normalized": ("reference_grid",)}
"""Settings that timm's code does not use with a kind of rotary positions; the angles of `mixed` are arrays."""

HARMLESS = re.compile(
    r"img_size|qkv_fused|(\w+_)?drop_rate|drop_path_rate|dynamic_img_\w+|weight_init|fix_init|head_init_scale"
    r"|pretrained\w*|num_kv_heads|swiglu_align_to|attn_pool_mlp_ratio|pos_embed_grid_size|scriptable|exportable|checkpoint_path|use_naflex"
)
"""Arguments of a timm model that change nothing but arrays, or nothing outside training."""


@cache
def architectures() -> dict[str, dict[str, Any]]:
    """Settings of every name that timm 1.0 has; `other` names a part that our model has not."""
    groups = json.loads(Path(__file__).with_name("timm.json").read_text(encoding="utf-8"))
    return {name: group["settings"] for group in groups for name in group["names"]}


def stated_settings(config: dict[str, Any]) -> dict[str, Any] | None:
    """The settings that a hub folder's `config.json` states; None without an architecture that is known."""
    architecture = config.get("architecture")
    known = architectures().get(architecture.split(".")[0]) if isinstance(architecture, str) else None
    if known is None:
        return None
    if "other" in known:
        raise CheckpointError(f"{architecture} has a part that this Vision Transformer has not: {known['other']}")
    changes = changed_arguments(config)
    refuse_null(known, config)
    settings = known | changes
    added_pool = settings["pool"] == "map" != known["pool"]
    if settings.pop("silu", False) and ("gelu" in changes or added_pool):
        raise CheckpointError(
            f"config.json: {'global_pool' if added_pool else 'act_layer'} gives {architecture}, whose MLPs are gated "
            "by SiLU, an MLP with another activation, which is not known here"
        )
    if "rope" in changes:
        if not known.get("rope"):
            raise CheckpointError(f"config.json: model_args states rotary positions, which {architecture} has not")
        settings["rope"] = changed_rope(known["rope"], changes["rope"])
    if settings["pool"] != known["pool"]:  # the pooling decides where the norm is, unless the architecture does
        settings["norm_after_pool"] = known.get("fc_norm", settings["pool"] == "mean")
    settings.pop("fc_norm", None)
    as_elsewhere = known.get("pool_num_heads") == known["num_heads"] and "pool_num_heads" not in changes
    if as_elsewhere or settings["pool"] != "map":
        settings.pop("pool_num_heads", None)  # as many as elsewhere, also where model_args changes that number
    if changes.get("pool_prefix") and settings["pool"] == "mean":
        raise CheckpointError("config.json: pool_include_prefix means a mean of all tokens, which is not known here")
    if settings.get("rope"):
        settings["rope"] = RopeConfig.from_json(settings["rope"])
    return settings


def changed_rope(known: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of an architecture with what `model_args` changes in them, as far as timm's code uses it."""
    if changes.get("half", known["half"]) != known["half"]:  # timm turns halves by angles laid out for pairs
        raise CheckpointError("config.json: model_args states rope_rotate_half other than the architecture's own")
    if known["kind"] == "normalized" and changes.get("offset"):
        raise CheckpointError(
            f"config.json: model_args states rope_grid_offset={changes['offset']!r}, "
            "which is not known here for places in shares of the image (DINOv3)"
        )
    ignored = IGNORED_ROTARY[known["kind"]]
    return known | {name: value for name, value in changes.items() if name not in ignored}


def stated_shape(config: dict[str, Any], settings: dict[str, Any], width: int) -> dict[str, Any]:
    """What `config.json` says of settings that the arrays tell too; `settings` are those of `stated_settings`."""
    found = {"num_classes": config.get("num_classes")} | arguments_of(config)
    stated = {TOLD_BY_ARRAYS[name]: value for name, value in found.items() if name in TOLD_BY_ARRAYS}
    size, ratio = stated.get("patch_size"), stated.pop("mlp_dim", None)
    if isinstance(size, list) and size[1:] == size[:-1]:
        stated["patch_size"] = size[0]
    if isinstance(ratio, int | float):
        stated["mlp_dim"] = int(width * ratio)
    if stated.get("cls_pos_embed") is not None:
        stated["cls_pos_embed"] = not stated["cls_pos_embed"]
    if "layer_scale" in stated:  # of 0 some models have none, and others scale by arrays of zeros
        stated["layer_scale"] = True if stated["layer_scale"] else None
    if stated.get("norm_after_pool") is None and settings.get("final_norm"):
        stated["norm_after_pool"] = settings["norm_after_pool"]
    return stated


def changed_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that `global_pool` and `model_args` state in place of the architecture's own."""
    changes: dict[str, Any] = {}
    if config.get("global_pool") is not None:
        changes["pool"] = chosen("global_pool", config["global_pool"])
    for name, value in arguments_of(config).items():
        if name in CHOICES:
            changes[CHOICES[name][0]] = chosen(name, value)
        elif name in HEADS and isinstance(value, int):
            changes[HEADS[name]] = value
        elif name in ROTARY:
            changes["rope"] = changes.get("rope", {}) | {ROTARY[name]: value}
        elif name not in TOLD_BY_ARRAYS and not HARMLESS.fullmatch(name):
            raise CheckpointError(f"config.json: model_args states {name}={value!r}, which is not known here")
    return changes


def arguments_of(config: dict[str, Any]) -> dict[str, Any]:
    """`model_args` without those that are null, where the arrays tell the same."""
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise CheckpointError("config.json: model_args is not an object")
    known = {"act_layer", *TOLD_BY_ARRAYS}
    null = {name for name, value in arguments.items() if value is None}
    if unknown := sorted(name for name in null - known if not HARMLESS.fullmatch(name)):
        raise CheckpointError(f"config.json: model_args states {unknown[0]}=None, which is not known here")
    return {name: value for name, value in arguments.items() if name not in null}


def refuse_null(known: dict[str, Any], config: dict[str, Any]) -> None:
    """timm leaves out a null when it makes a model, and passes it on when it reads the folder again."""
    null = {name for name, value in (config.get("model_args") or {}).items() if value is None}
    unclear = {"act_layer"} if known["gelu"] != "erf" else set()
    unclear |= {"fc_norm", "use_fc_norm"} if "fc_norm" in known else set()
    if found := sorted(null & unclear):
        raise CheckpointError(
            f"config.json: model_args states {found[0]}=None, which may be the architecture's own or timm's default; "
            "state a value, or leave it out"
        )


def chosen(name: str, value: Any) -> Any:
    """Our value for one of an argument whose values are words."""
    table = CHOICES[name][1]
    if not isinstance(value, str | bool) or value not in table:
        raise CheckpointError(f"config.json: {name}={value!r} is not one of {', '.join(map(repr, table))}")
    return table[value]
