"""DINO and DINOv2 (`.pth`): timm's names, their own tokens, and positions resampled by a factor."""

from __future__ import annotations

from typing import ClassVar

from vitruvian.config import DINO_NUMERICS, IMAGENET_MEAN, IMAGENET_STD, ModelConfig, Preprocess
from vitruvian.settings import Size
from vitruvian.weights.families.family import Facts, Family, scaled_crop
from vitruvian.weights.families.rules import Table, Tensors, pair
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.timm_rows import BLOCK_ROWS, TOKEN_ROWS
from vitruvian.weights.files import Checkpoint


class Dino(Family):
    """Headless backbones; of a full training checkpoint, the teacher."""

    name = "dino"
    numerics = DINO_NUMERICS
    anchor = Timm.anchor
    prefixes = Timm.prefixes
    ignored: ClassVar[dict[str, str]] = {
        "head.mlp.": "projection head of the training",
        "head.last_layer.": "projection head of the training",
    }
    refused = Timm.refused
    table = Table(rows=(*TOKEN_ROWS, *BLOCK_ROWS), block=Timm.table.block)

    def claims(self, checkpoint: Checkpoint) -> bool:
        """timm's names without a head: in a `.pth` it is DINO's release, in safetensors a timm model."""
        if self.prefix(checkpoint.tensors) is None:
            return False
        names = self.to_table_names(checkpoint.tensors).keys()
        if any(name.startswith(tuple(self.ignored)) for name in names):
            return True
        others = {"head.weight", "fc_norm.weight", "dist_token", "attn_pool.latent", "blocks.0.ls1.gamma"}
        bare = checkpoint.format == "torch" and not checkpoint.settings  # a folder is from timm's hub
        return bare and "cls_token" in names and not names & others

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return imagenet_view(config.image_size)


class DinoV2(Dino):
    """LayerScale, optional registers and gated MLPs, a mask token that only training uses."""

    name = "dinov2"
    renames = (
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),  # blocks in chunks, numbered through
        (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
        (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
        (r"^register_tokens", "reg_token"),
    )
    ignored: ClassVar[dict[str, str]] = {
        "mask_token": "token of masked training",
        "dino_head.": "projection head of the training",
        "ibot_head.": "projection head of the training",
    }
    table = Table(rows=(*TOKEN_ROWS, *BLOCK_ROWS, *pair("head", "head")), block=Timm.table.block)

    def claims(self, checkpoint: Checkpoint) -> bool:
        prefix = self.prefix(checkpoint.tensors)
        marks = ("mask_token", "register_tokens", "blocks.0.mlp.w12.weight")
        return prefix is not None and any(prefix + mark in checkpoint.tensors for mark in marks)

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """The release's models with registers give the size, with antialiasing, where the first ones gave a factor."""
        registers = "reg_token" in tensors
        numerics = DINO_NUMERICS.replace(position_resize="bicubic_antialias") if registers else DINO_NUMERICS
        return Facts(numerics=numerics)

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        """The release trains positions at 518 pixels and evaluates at 224."""
        return imagenet_view((224, 224) if config.image_size == (518, 518) else config.image_size)


def imagenet_view(size: Size) -> Preprocess:
    """Shorter side 256, center 224, or the same share of another size; bicubic, ImageNet statistics."""
    return Preprocess(
        image_size=size,
        fit="crop",
        scaled_size=scaled_crop(size, 256, 224),
        interpolation="bicubic",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
