"""torchvision's Vision Transformers (`.pth`)."""

from __future__ import annotations

from collections.abc import Iterator

from vitruvian.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    TORCHVISION_NUMERICS,
    ModelConfig,
    Preprocess,
    ViTConfig,
)
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Family, scaled_crop, vit_obstacles
from vitruvian.weights.families.tables import POSITIONS, Row, Table, pair, pairs

BLOCK = "encoder.layers.encoder_layer_{i}."


class Torchvision(Family):
    """erf GELU, eps 1e-6, positions resampled bicubically with aligned corners."""

    name = "torchvision"
    numerics = TORCHVISION_NUMERICS
    anchor = "conv_proj.weight"
    prefixes = ("", "module.", "model.", "_orig_mod.")
    renames = ((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3."))  # older files
    suffixes = (".pth", ".pt", ".safetensors")
    table = Table(
        rows=(
            *pair("embed.patch", "conv_proj"),
            Row("embed.cls_token", ("class_token",)),
            Row(POSITIONS, ("encoder.pos_embedding",)),
            *pairs({"norm1": "ln_1", "norm2": "ln_2"}, "blocks.{i}.", BLOCK),
            Row("blocks.{i}.attn.qkv.weight", (f"{BLOCK}self_attention.in_proj_weight",)),
            Row("blocks.{i}.attn.qkv.bias", (f"{BLOCK}self_attention.in_proj_bias",)),
            *pair("blocks.{i}.attn.proj", f"{BLOCK}self_attention.out_proj"),
            *pairs({"mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}, "blocks.{i}.", BLOCK),
            *pairs({"norm": "encoder.ln", "pre_logits": "heads.pre_logits", "head": "heads.head"}),
        ),
        block=r"encoder\.layers\.encoder_layer_(\d+)\.",
    )

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        """Shorter side 256, center crop 224, bilinear; L/16 resizes to 242, SWAG's models (384 and up) do not crop."""
        assert isinstance(config, ViTConfig)
        size = config.image_size
        is_swag = min(size) >= 384
        numerator = 242 if (config.width, config.patch_size) == (1024, 16) else 256
        return Preprocess(
            image_size=size,
            fit="crop",
            scaled_size=size if is_swag else scaled_crop(size, numerator, 224),
            interpolation="bicubic" if is_swag else "bilinear",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from vit_obstacles(config, "torchvision", paper_only=True)
        if not isinstance(config, ViTConfig):
            return
        if not config.cls_token or config.pool == "mean":
            yield "torchvision's model always pools the class token"
        if config.image_size[0] != config.image_size[1]:
            yield "torchvision's model takes square images only"
        if config.stem:
            yield "torchvision has no hybrids with a ResNet stem"
        if not config.qkv_bias:
            yield "torchvision's query, key and value always have a bias"
        if not config.num_classes:
            yield "torchvision's model always has a head"
        if config.in_channels != 3:
            yield f"torchvision's model takes 3 channels, this one {config.in_channels}"
