"""torchvision (`.pth`)."""

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
from vitruvian.weights.families.family import Family, plain_obstacles, scaled_crop
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import Row, Table, pair
from vitruvian.weights.files import Checkpoint

BLOCK = "encoder.layers.encoder_layer_{i}"


class Torchvision(Family):
    """erf GELU, eps 1e-6, positions resampled bicubically with aligned corners."""

    name = "torchvision"
    numerics = TORCHVISION_NUMERICS
    anchor = "conv_proj.weight"
    prefixes = ("", "module.", "model.", "_orig_mod.")
    renames = ((r"\.mlp\.linear_1\.", ".mlp.0."), (r"\.mlp\.linear_2\.", ".mlp.3."))  # of older files
    suffixes = (".pth", ".pt", ".safetensors")
    table = Table(
        rows=(
            *pair("embed.patch", "conv_proj"),
            Row("embed.cls_token", ("class_token",)),
            Row(FLAT, ("encoder.pos_embedding",)),
            *pair("blocks.{i}.norm1", f"{BLOCK}.ln_1"),
            Row("blocks.{i}.attn.qkv.weight", (f"{BLOCK}.self_attention.in_proj_weight",)),
            Row("blocks.{i}.attn.qkv.bias", (f"{BLOCK}.self_attention.in_proj_bias",)),
            *pair("blocks.{i}.attn.proj", f"{BLOCK}.self_attention.out_proj"),
            *pair("blocks.{i}.norm2", f"{BLOCK}.ln_2"),
            *pair("blocks.{i}.mlp.fc1", f"{BLOCK}.mlp.0"),
            *pair("blocks.{i}.mlp.fc2", f"{BLOCK}.mlp.3"),
            *pair("norm", "encoder.ln"),
            *pair("pre_logits", "heads.pre_logits"),
            *pair("head", "heads.head"),
        ),
        block=r"encoder\.layers\.encoder_layer_(\d+)\.",
    )

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        """Shorter side 256, center 224, bilinear; L/16 scales to 242, the SWAG models (384 and up) cut nothing."""
        assert isinstance(config, ViTConfig)
        size = config.image_size
        swag = min(size) >= 384
        numerator = 242 if (config.width, config.patch_size) == (1024, 16) else 256
        return Preprocess(
            image_size=size,
            fit="crop",
            scaled_size=size if swag else scaled_crop(size, numerator, 224),
            interpolation="bicubic" if swag else "bilinear",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from plain_obstacles(config, "torchvision")
        if not isinstance(config, ViTConfig):
            return
        if not config.cls_token or config.pool == "mean":
            yield "torchvision always reads a class token, not the mean of the patches"
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
