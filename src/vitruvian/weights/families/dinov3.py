"""DINOv3 as its release has it (`.pth`): rotary positions in shares of the image, storage tokens, LayerScale."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from torch import Tensor

from vitruvian.config import DINOV3_NUMERICS, IMAGENET_MEAN, IMAGENET_STD, ModelConfig, Preprocess, RopeConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.dino import Dino
from vitruvian.weights.families.family import Facts
from vitruvian.weights.families.rules import Tensors
from vitruvian.weights.files import Checkpoint

PERIODS = "rope_embed.periods"
BASE = 100.0
"""Of the periods of every published model."""
SATELLITE_MEAN, SATELLITE_STD = (0.430, 0.411, 0.296), (0.213, 0.156, 0.143)


class DinoV3(Dino):
    """Heads and the base of rotary positions come from the array of periods; eps 1e-5, as all published models have."""

    name = "dinov3"
    numerics = DINOV3_NUMERICS
    renames = (
        (r"^storage_tokens", "reg_token"),
        (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
    )
    ignored: ClassVar[dict[str, str]] = {
        "mask_token": "token of masked training",
        "local_cls_norm.": "norm of small crops in training",
        PERIODS: "wavelengths, which are computed",
        "dino_head.": "projection head of the training",
        "ibot_head.": "projection head of the training",
        "projectors.": "projection heads of the training",
    }
    refused: ClassVar[dict[str, str]] = {}

    def claims(self, checkpoint: Checkpoint) -> bool:
        prefix = self.prefix(checkpoint.tensors)
        return prefix is not None and prefix + PERIODS in checkpoint.tensors

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Biases without those that the mask leaves out (of keys); gate and value as one layer."""
        found = dict(tensors)
        try:
            for name in tensors:
                if match := re.fullmatch(r"(blocks\.\d+\.attn\.qkv\.bias)_mask", name):
                    found[match[1]] = masked(found[match[1]], found.pop(name), name)
                elif match := re.fullmatch(r"(blocks\.\d+\.mlp)\.w1\.(weight|bias)", name):
                    gate, value = (found.pop(f"{match[1]}.w{part}.{match[2]}") for part in (1, 2))
                    found[f"{match[1]}.fc1.{match[2]}"] = torch.cat([gate, value])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"arrays of query, key, value or MLP do not fit together: {error}") from error
        return found

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        if "cls_norm.weight" in tensors:
            raise CheckpointError("the weights have a norm for the class token and one for patches, not known here")
        patch, periods = tensors["patch_embed.proj.weight"], tensors[PERIODS]
        width = patch.shape[0] if patch.dim() else 0
        if periods.dim() != 1 or not len(periods) or width % (4 * len(periods)):
            raise CheckpointError(f"{PERIODS!r} of shape {tuple(periods.shape)} does not fit a width of {width}")
        rope = RopeConfig(kind="normalized", temperature=base_of(periods), half=True)
        return Facts(
            numerics=self.numerics,
            num_heads=width // (4 * len(periods)),
            settings={"rope": rope, "pos_embed": "none", "pool": "token"},
        )

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        """A squash with ImageNet's statistics; ViT-L with a norm of small crops was trained on satellite images."""
        crops = any(name.endswith("local_cls_norm.weight") for name in checkpoint.tensors)
        satellite = crops and getattr(config, "width", 0) == 1024
        mean, std = (SATELLITE_MEAN, SATELLITE_STD) if satellite else (IMAGENET_MEAN, IMAGENET_STD)
        return Preprocess(image_size=config.image_size, mean=mean, std=std)


def masked(bias: Tensor, mask: Tensor, name: str) -> Tensor:
    if mask.shape != bias.shape or not ((mask == 0) | (mask == 1)).all():
        raise CheckpointError(f"{name!r} is not a mask of zeros and ones for {len(bias)} biases")
    return bias * mask


def base_of(periods: Tensor) -> float:
    """The number whose powers 0, 1 / n, 2 / n ... the n periods are; the published one within their precision."""
    exponents = torch.arange(len(periods)) / len(periods)
    found = float(periods[-1]) ** (1 / float(exponents[-1])) if len(periods) > 1 else BASE
    base = BASE if abs(found / BASE - 1) < 0.05 else found
    if not torch.allclose(periods, base**exponents, rtol=0.01):
        raise CheckpointError(f"{PERIODS!r} does not hold the powers of one base, which is not known here")
    return base
