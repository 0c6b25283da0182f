"""The whole shape of every Vision Transformer that timm names, as our settings, and what it keeps in pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vitruvian as vt
from vitruvian.config import ViTConfig
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.files import Checkpoint
from vitruvian.weights.parse import LoadHints, describe

SHAPES = Path(vt.__file__).parent / "weights" / "families" / "timm_shapes.json"

PIECES = {
    "split_bias": r"blocks\.0\.attn\.q_bias",
    "projections": r"blocks\.0\.attn\.q_proj\.weight",
    "key_bias": r"blocks\.0\.attn\.k_proj\.bias",
    "gate": r"blocks\.0\.mlp\.fc1_g\.weight",
    "parallel": r"blocks\.0\.in_proj\.weight",
    "joined_out": r"blocks\.0\.out_proj\.weight",
    "branches": r"blocks\.0\.attns\.0\.norm\.weight",
    "lambdas": r"blocks\.0\.(attn\.)?lambda_q1",
    "naflex": r"embeds\.proj\.weight",
}
"""Names of pieces, and of an array that tells of them."""


def write_shapes(names: list[str], made: Callable[..., nn.Module]) -> None:
    """One line a name: timm's class, what is not as in ViTConfig(), and the pieces."""
    rows = [json.dumps({"name": name} | row_of(name, made)) for name in names]
    SHAPES.write_text("[\n" + ",\n".join(rows) + "\n]\n")
    print(f"{SHAPES}: {len(rows)} names")


def row_of(name: str, made: Callable[..., nn.Module]) -> dict[str, Any]:
    with torch.device("meta"):
        model = made(name)
        width = model.embed_dim
        ratios = [shape_of(name, made(name, mlp_ratio=(3 * width + more) / width)) for more in (0, 2)]
    config = shape_of(name, model)
    usual = ViTConfig().to_json()
    settings = {key: value for key, value in config.to_json().items() if value != usual[key]}
    pieces = [piece for piece, mark in PIECES.items() if any(re.fullmatch(mark, key) for key in model.state_dict())]
    if ratios[0].mlp_dim * 2 == 3 * config.width:
        pieces.append("halved")  # mlp_ratio is of gate and value together
    if ratios[1].mlp_dim - ratios[0].mlp_dim > 2 and "branches" not in pieces:
        pieces.append("aligned")
    if config.reg_tokens and config.pos_embed == "learned" and position_rows(model, config) > config.cls_token:
        pieces.append("register_rows")
    return {"class": type(model).__name__, "settings": settings, "pieces": pieces}


def shape_of(name: str, model: nn.Module) -> ViTConfig:
    """What our own reading finds in the arrays' shapes."""
    patches = getattr(model, "patch_embed", None)
    sizes = {} if patches is None else {"model_args": {"img_size": list(patches.img_size)}}
    settings = {"config.json": {"architecture": name, **sizes}}
    tensors: dict[str, Tensor] = dict(model.state_dict())
    checkpoint = Checkpoint(path=Path(name), format="safetensors", tensors=tensors, settings=settings)
    family = Timm()
    joined = family.join_arrays(family.to_table_names(tensors), checkpoint)
    reading = family.table.read(joined)
    config = describe(checkpoint, family, tensors=joined, reading=reading, hints=LoadHints()).config
    assert isinstance(config, ViTConfig)
    return config


def position_rows(model: nn.Module, config: ViTConfig) -> int:
    """Rows of the position array before those of the patches."""
    positions = getattr(model, "pos_embed", None)
    return 0 if positions is None else positions.shape[1] - config.grid[0] * config.grid[1]
