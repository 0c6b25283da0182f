"""Settings of timm's models that its code follows in a way of its own, seen from arrays and arguments: refused."""

from __future__ import annotations

from typing import Any

from vitruvian.errors import CheckpointError, argument
from vitruvian.settings import Size
from vitruvian.weights.families.rules import Tensors
from vitruvian.weights.files import Checkpoint


def refuse_padding(arguments: dict[str, Any], size: Size | None, patch: tuple[int, ...]) -> None:
    """timm then adds zeros up to whole patches, where this model leaves out what is past the last whole one."""
    if arguments.get("dynamic_img_pad") and size and len(patch) == 4 and any(side % patch[-1] for side in size):
        raise CheckpointError(
            f"config.json: dynamic_img_pad pads images of {size[0]}x{size[1]} to whole patches of {patch[-1]}, which "
            f"is not known here; state an img_size that {patch[-1]} divides"
        )


def check_distilled(tensors: Tensors, *, fc_norm: bool) -> None:
    """Refuse what timm's distilled models have, but its code leaves out or takes in another way."""
    if "head.weight" not in tensors:
        raise CheckpointError(
            "a distilled model without its heads, whose features timm takes from the mean of two tokens; "
            f"keep the heads, and load it with {argument('num_classes', 0)} for the features of the class token"
        )
    if fc_norm:
        raise CheckpointError(
            "a distilled model with 'fc_norm', which timm's code does not apply before the two heads; "
            "make it with fc_norm=False, which has a norm after the blocks, or final_norm=False"
        )
    if "reg_token" in tensors:
        raise CheckpointError("a distilled model with 'reg_token', which timm's code leaves out; make it without")


def naflex_size(tensors: Tensors, checkpoint: Checkpoint, *, square: bool) -> Size | None:
    """Where NaFlexVit's positions state their grid, the image that has it."""
    patch = tensors["patch_embed.proj.weight"]
    if not patch.dim():  # a damaged file, which the reading of its shapes names
        return None
    side = patch.shape[-1]
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("embeds.pos_embed") and tensor.dim() == 4:
            return tensor.shape[1] * side, tensor.shape[2] * side
    rows, columns = tensors.get("pos_embed_y"), tensors.get("pos_embed_x")
    if rows is None or columns is None:
        return None
    if square and len(rows) != len(columns):
        raise CheckpointError(
            f"{len(rows)} positions of rows and {len(columns)} of columns with pos_embed_ar_preserving, for which "
            "timm's code resizes both even at their own grid, which is not known here"
        )
    return len(rows) * side, len(columns) * side
