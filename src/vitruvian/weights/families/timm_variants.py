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
    "pos_embed": ("positions", {"learn": "learned", "learned": "learned", "factorized": "factorized", "none": "none"}),
    "pos_embed_interp_mode": ("position_resize", {way: f"{way}_antialias" for way in ("bicubic", "bilinear")}),
    "pos_embed_ar_preserving": ("square_positions", EITHER),
    "pool_include_prefix": ("pool_prefix", EITHER),
    "final_norm": ("final_norm", EITHER),
    "use_post_transformer_norm": ("final_norm", EITHER),
}
"""Arguments of a timm model whose values are words, the setting that each has here, and its values."""

TOLD_BY_ARRAYS = re.compile(
    r"depth|embed_dim|img_size|patch_size|num_classes|in_chans|mlp_ratio|class_token|no_embed_class|qkv_bias|qkv_fused"
    r"|qk_norm|scale_attn_norm|scale_mlp_norm|scale_attn_inner|scale_mlp|proj_bias|init_values|(num_)?reg_tokens"
    r"|pre_norm|use_pre_transformer_norm|use_fc_norm|fc_norm"
    r"|(\w+_)?drop_rate|drop_path_rate|dynamic_img_\w+|weight_init|fix_init|head_init_scale|pretrained\w*"
    r"|pos_embed_grid_size|scriptable|exportable|checkpoint_path|use_naflex"
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
    settings = known | changes
    if known.get("pool_heads") == known["heads"] or settings["pool"] != "map":
        settings.pop("pool_heads", None)  # as many as elsewhere, also where model_args changes that number
    if changes.get("pool_prefix") and settings["pool"] == "mean":
        raise CheckpointError("config.json: pool_include_prefix means a mean of all tokens, which is not known here")
    if settings.get("rope"):
        settings["rope"] = RopeConfig.from_json(settings["rope"])
    return settings


def changed_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that `global_pool` and `model_args` state in place of the architecture's own."""
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise CheckpointError("config.json: model_args is not an object")
    changes: dict[str, Any] = {}
    if config.get("global_pool") is not None:
        changes["pool"] = chosen("global_pool", config["global_pool"])
    for name, value in arguments.items():
        if name in CHOICES:
            changes |= {} if value is None else {CHOICES[name][0]: chosen(name, value)}
        elif name == "num_heads" and isinstance(value, int):
            changes["heads"] = value
        elif not TOLD_BY_ARRAYS.fullmatch(name):
            raise CheckpointError(f"config.json: model_args states {name}={value!r}, which is not known here")
    return changes


def chosen(name: str, value: Any) -> Any:
    """Our value for one of an argument whose values are words."""
    table = CHOICES[name][1]
    if not isinstance(value, str | bool) or value not in table:
        raise CheckpointError(f"config.json: {name}={value!r} is not one of {', '.join(map(repr, table))}")
    return table[value]
