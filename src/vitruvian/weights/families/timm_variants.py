"""timm's architectures by name: what their arrays do not tell, and arrays that some of them keep in other pieces."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.config import RopeConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.rules import Tensors

POOLS = {"token": "token", "avg": "mean", "map": "map"}
GELUS = {"gelu": "erf", "gelu_tanh": "tanh", "quick_gelu": "quick"}

TOLD_BY_ARRAYS = re.compile(
    r"depth|embed_dim|img_size|patch_size|num_classes|in_chans|mlp_ratio|class_token|no_embed_class|qkv_bias|init_values"
    r"|(num_)?reg_tokens|(\w+_)?drop_rate|dynamic_img_\w+|weight_init|head_init_scale|use_fc_norm|fc_norm|pretrained\w*"
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
    settings = known | changed_arguments(config)
    if known.get("pool_heads") == known["heads"] or settings["pool"] != "map":
        settings.pop("pool_heads", None)  # as many as elsewhere, also where model_args changes that number
    if settings.get("rope"):
        settings["rope"] = RopeConfig.from_json(settings["rope"])
    return settings


def changed_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Settings that `global_pool` and `model_args` state in place of the architecture's own."""
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise CheckpointError("config.json: model_args is not an object")
    changes: dict[str, Any] = {}
    for name, value in ({"global_pool": config["global_pool"]} if config.get("global_pool") else {}).items():
        changes["pool"] = chosen(POOLS, name, value)
    for name, value in arguments.items():
        if name == "global_pool":
            changes["pool"] = chosen(POOLS, name, value)
        elif name == "act_layer":
            changes["gelu"] = chosen(GELUS, name, value)
        elif name == "num_heads" and isinstance(value, int):
            changes["heads"] = value
        elif not TOLD_BY_ARRAYS.fullmatch(name):
            raise CheckpointError(f"config.json: model_args states {name}={value!r}, which is not known here")
    return changes


def chosen(table: dict[str, str], name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in table:
        raise CheckpointError(f"config.json: {name}={value!r} is not one of {', '.join(table)}")
    return table[value]


def in_one_piece(tensors: Tensors) -> Tensors:
    """The same arrays with query, key and value together, gate and value together, and rotations in their blocks."""
    found = dict(tensors)
    try:
        for name in tensors:
            if match := re.fullmatch(r"(blocks\.\d+)\.(attn\.q_bias|attn\.q_proj\.weight|mlp\.fc1_g\.weight)", name):
                JOINS[match[2]](found, match[1])
            elif match := re.fullmatch(r"(blocks\.\d+)\.in_proj\.weight", name):
                split_parallel(found, match[1])
            elif match := re.fullmatch(r"(blocks\.\d+)\.attns\.0\.norm\.weight", name):
                join_branches(found, match[1])
        if "rope.freqs" in found:
            for layer, frequencies in enumerate(found.pop("rope.freqs").unbind(1)):  # (2, layers, H, K / 2)
                found[f"blocks.{layer}.attn.rope_freqs"] = frequencies
    except (RuntimeError, IndexError, KeyError) as error:
        raise CheckpointError(f"arrays of query, key, value or MLP do not fit together: {error}") from error
    return found


def join_split_bias(found: Tensors, block: str) -> None:
    """EVA and BEiT: query and value have a bias, the key has none."""
    q, v = found.pop(f"{block}.attn.q_bias"), found.pop(f"{block}.attn.v_bias")
    found[f"{block}.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])


def join_projections(found: Tensors, block: str) -> None:
    parts = [f"{block}.attn.{part}_proj" for part in "qkv"]
    found[f"{block}.attn.qkv.weight"] = torch.cat([found.pop(f"{part}.weight") for part in parts])
    if f"{parts[0]}.bias" in found:
        q, v = found.pop(f"{parts[0]}.bias"), found.pop(f"{parts[2]}.bias")
        k = found.pop(f"{parts[1]}.bias", torch.zeros_like(q))
        found[f"{block}.attn.qkv.bias"] = torch.cat([q, k, v])


def join_gate(found: Tensors, block: str) -> None:
    for kind in ("weight", "bias"):
        if f"{block}.mlp.fc1_g.{kind}" in found:
            parts = [found.pop(f"{block}.mlp.fc1_{part}.{kind}") for part in "gx"]
            found[f"{block}.mlp.fc1.{kind}"] = torch.cat(parts)


JOINS = {
    "attn.q_bias": join_split_bias,
    "attn.q_proj.weight": join_projections,
    "mlp.fc1_g.weight": join_gate,
}


def branches_in(tensors: Tensors) -> int:
    """Attentions side by side in each block; together they are one of so many times the heads."""
    return max((1 + int(match[1]) for name in tensors if (match := re.search(r"\.attns\.(\d+)\.", name))), default=1)


def join_branches(found: Tensors, block: str) -> None:
    """Attentions side by side, and MLPs, as one of each: norms go into the layers after them, scales into the last.

    What is left of the norms does nothing, so that all branches share them.
    """
    for side, inner, norm, layers in (
        ("attns", "attn", "norm1", ("qkv", "proj")),
        ("ffns", "mlp", "norm2", ("fc1", "fc2")),
    ):
        count = 1 + max(int(name.split(".")[3]) for name in found if name.startswith(f"{block}.{side}."))
        branches = [f"{block}.{side}.{number}" for number in range(count)]
        first, last, biases, out_bias = [], [], [], []
        for branch in branches:
            scale, shift = found.pop(f"{branch}.norm.weight"), found.pop(f"{branch}.norm.bias")
            weight = found.pop(f"{branch}.{inner}.{layers[0]}.weight")
            biases.append(weight @ shift + found.pop(f"{branch}.{inner}.{layers[0]}.bias", torch.zeros(len(weight))))
            first.append(weight * scale)
            gain = found.pop(f"{branch}.ls.gamma", torch.ones(len(scale)))
            last.append(gain[:, None] * found.pop(f"{branch}.{inner}.{layers[1]}.weight"))
            out_bias.append(gain * found.pop(f"{branch}.{inner}.{layers[1]}.bias"))
        parts = 3 if inner == "attn" else 1  # all queries, then all keys, then all values
        found[f"{block}.{inner}.{layers[0]}.weight"] = interleaved(first, parts)
        found[f"{block}.{inner}.{layers[0]}.bias"] = interleaved(biases, parts)
        found[f"{block}.{inner}.{layers[1]}.weight"] = torch.cat(last, dim=1)
        found[f"{block}.{inner}.{layers[1]}.bias"] = torch.stack(out_bias).sum(dim=0)
        found[f"{block}.{norm}.weight"], found[f"{block}.{norm}.bias"] = torch.ones_like(scale), torch.zeros_like(scale)


def interleaved(branches: list[Tensor], parts: int) -> Tensor:
    """The first part of every branch, then the second, and so on."""
    return torch.cat([part for group in zip(*(branch.chunk(parts) for branch in branches)) for part in group])


def split_parallel(found: Tensors, block: str) -> None:
    """ViT-22B's block: one projection for the MLP and for query, key, value."""
    width = found[f"{block}.mlp_out_proj.weight"].shape[1]
    for kind in ("weight", "bias"):
        if f"{block}.in_proj.{kind}" in found:
            joined = found.pop(f"{block}.in_proj.{kind}")
            found[f"{block}.mlp.fc1.{kind}"], found[f"{block}.attn.qkv.{kind}"] = joined[:width], joined[width:]
    renames = {
        "mlp_bias": "mlp.fc1.bias",
        "in_norm.weight": "norm1.weight",
        "in_norm.bias": "norm1.bias",
        "q_norm.weight": "attn.q_norm.weight",
        "k_norm.weight": "attn.k_norm.weight",
        "ls.gamma": "ls1.gamma",
        **{f"attn_out_proj.{kind}": f"attn.proj.{kind}" for kind in ("weight", "bias")},
        **{f"mlp_out_proj.{kind}": f"mlp.fc2.{kind}" for kind in ("weight", "bias")},
    }
    for old, new in renames.items():
        if f"{block}.{old}" in found:
            found[f"{block}.{new}"] = found.pop(f"{block}.{old}")
