"""Weights changed at load time: another image size, patch size or head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from vitruvian.config import ModelConfig, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, argument
from vitruvian.model.embed import resize_patch_kernel
from vitruvian.model.positions import interpolate_factors, interpolate_positions, resize_bias_table
from vitruvian.settings import Size, as_size, validate_field
from vitruvian.weights.families.tables import Tensors

Head = Literal["keep", "new"]

HEAD_NAMES = ("head.weight", "head.bias", "head_dist.weight", "head_dist.bias")
PRE_LOGITS_NAMES = ("pre_logits.weight", "pre_logits.bias")


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What the caller wants other than the file has it; None leaves it."""

    image_size: int | Size | None = None
    patch_size: int | None = None
    num_classes: int | None = None
    head: Head = "keep"

    def __post_init__(self) -> None:
        if self.head not in ("keep", "new"):
            raise CheckpointError(f"{argument('head', self.head)} is not 'keep' or 'new'")
        for name in ("patch_size", "num_classes"):
            if getattr(self, name) is not None:
                validate_field(ViTConfig, name, getattr(self, name))

    @property
    def size(self) -> Size | None:
        return None if self.image_size is None else as_size(self.image_size)


def adapt(config: ModelConfig, state: Tensors, changes: Changes) -> tuple[ModelConfig, Tensors]:
    if isinstance(config, ViTConfig):
        config, state = change_patches(config, state, changes)
    elif changes.patch_size is not None:
        raise CheckpointError("patch_size has no meaning for a ResNet")
    elif changes.size is not None:
        config = config.replace(image_size=changes.size)
    return change_head(config, state, changes)


def change_patches(config: ViTConfig, state: Tensors, changes: Changes) -> tuple[ViTConfig, Tensors]:
    """Positions on the new grid and patch embedding of the new size, each resampled as the family does it."""
    new = config.replace(
        patch_size=changes.patch_size or config.patch_size, image_size=changes.size or config.image_size
    )
    method, square = config.numerics.position_resize, config.numerics.square_positions
    state = dict(state)
    if new.patch_size != config.patch_size:
        state["embed.patch.weight"] = resize_patch_kernel(state["embed.patch.weight"], new.patch_size, method)
    if new.grid == config.grid:
        return new, state
    if "embed.pos_embed" in state:
        state["embed.pos_embed"] = interpolate_positions(state["embed.pos_embed"], new.grid, method, square=square)
    factors = "embed.row_pos_embed", "embed.col_pos_embed"
    if config.pos_embed == "factorized":
        tables = state[factors[0]], state[factors[1]]
        state |= zip(factors, interpolate_factors(tables, new.grid, square=square))
    elif config.pos_embed == "learned_2d":
        rows, columns = state[factors[0]][:, None], state[factors[1]][None]
        state[factors[0]] = interpolate_positions(rows, (new.grid[0], 1), method)[:, 0]
        state[factors[1]] = interpolate_positions(columns, (1, new.grid[1]), method)[0]
    for name in [name for name in state if name.endswith(".attn.position.offsets")]:
        length = 2 * (new.prefix_tokens + new.grid[0] * new.grid[1]) - 1
        state[name] = F.interpolate(state[name].T[None], length, mode="linear", align_corners=True)[0].T
    for name in [name for name in state if name.endswith(".attn.position.table")]:
        state[name] = resize_bias_table(state[name], config.grid, new.grid, method)
    return new, state


def change_head(config: ModelConfig, state: Tensors, changes: Changes) -> tuple[ModelConfig, Tensors]:
    """The head kept, left out, or a fresh one of zeros.

    A fresh head is a single linear layer, as in the paper's fine-tuning: a pre-logits layer before the
    old head goes with it. Without a head, the pre-logits layer stays and gives the features.
    """
    classes = config.num_classes if changes.num_classes is None else changes.num_classes
    if changes.head == "new" and not classes:
        raise CheckpointError(
            f"{argument('head', 'new')} needs {argument('num_classes')}, the file has no head to take the number from"
        )
    fresh = changes.head == "new" or classes != config.num_classes
    if not fresh:
        return config, state
    state = {name: tensor for name, tensor in state.items() if name not in HEAD_NAMES}
    config = config.replace(num_classes=classes)
    if not classes:
        return config, state
    if isinstance(config, ViTConfig):
        config = config.replace(representation_size=0, projection=False, unit_features=False)
        state = {name: tensor for name, tensor in state.items() if name not in PRE_LOGITS_NAMES}
    two_heads = not isinstance(config, ResNetConfig) and config.distillation
    for name in ("head", "head_dist") if two_heads else ("head",):
        state[f"{name}.weight"] = torch.zeros(classes, config.feature_width)
        state[f"{name}.bias"] = torch.zeros(classes)
    return config, state
