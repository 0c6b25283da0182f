"""DINO, DINOv2 and DINOv3 as released (`.pth`): mostly timm's names, with other tokens and position resampling."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, NUMERICS, Preprocess, RopeConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family, imagenet_preprocess
from vitruvian.weights.families.tables import TABLES, Tensors
from vitruvian.weights.families.timm import check_plain


class Dino(Family[ViTConfig]):
    """Backbones without a head; from a full training checkpoint, the teacher."""

    name = "dino"
    numerics = NUMERICS["dino"]
    table = TABLES["dino"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        """timm's names without a head: DINO's release if in a `.pth`, a timm model if in safetensors."""
        if self.table.marks or self.prefix(checkpoint.tensors) is None:
            return super().claims(checkpoint)
        names = self.to_table_names(checkpoint.tensors).keys()
        if any(name.startswith(tuple(self.table.ignored)) for name in names):
            return True
        others = {"head.weight", "fc_norm.weight", "dist_token", "attn_pool.latent", "blocks.0.ls1.gamma"}
        is_release = checkpoint.format == "torch" and not checkpoint.settings  # a folder is timm's
        return is_release and "cls_token" in names and not names & others

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        check_plain(tensors)
        return Facts(numerics=self.numerics)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        return imagenet_preprocess(config.image_size)


class DinoV2(Dino):
    """DINOv2: LayerScale, optional registers and gated MLPs, and a mask token for training."""

    name = "dinov2"
    table = TABLES["dinov2"]

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """Positions are resampled to a size with antialiasing if the model has registers, else by a scale factor."""
        facts = super().facts(checkpoint, tensors)
        resize = "bicubic_antialias" if "reg_token" in tensors else NUMERICS["dino"].position_resize
        return replace(facts, numerics=NUMERICS["dino"].replace(position_resize=resize))

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        """Positions are trained at 518 pixels, but models are evaluated at 224."""
        return imagenet_preprocess((224, 224) if config.image_size == (518, 518) else config.image_size)


PERIODS = "rope_embed.periods"
ROPE_BASE = 100.0  # base of the periods in all published models
SATELLITE_MEAN, SATELLITE_STD = (0.430, 0.411, 0.296), (0.213, 0.156, 0.143)


class DinoV3(Dino):
    """DINOv3: rotary positions normalized to the image, registers, LayerScale, eps 1e-5.

    The number of heads and the base of the rotary positions come from the array of periods.
    """

    name = "dinov3"
    numerics = NUMERICS["dinov3"]
    table = TABLES["dinov3"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Multiply biases by their mask (which removes those of keys); join gate and value."""
        state = dict(tensors)
        try:
            for name in tensors:
                if match := re.fullmatch(r"(blocks\.\d+\.attn\.qkv\.bias)_mask", name):
                    bias, mask = state[match[1]], state.pop(name)
                    if mask.shape != bias.shape or not ((mask == 0) | (mask == 1)).all():
                        raise CheckpointError(f"{name!r} is not a mask of zeros and ones for {len(bias)} biases")
                    state[match[1]] = bias * mask
                elif match := re.fullmatch(r"(blocks\.\d+\.mlp)\.w1\.(weight|bias)", name):
                    gate, value = (state.pop(f"{match[1]}.w{part}.{match[2]}") for part in (1, 2))
                    state[f"{match[1]}.fc1.{match[2]}"] = torch.cat([gate, value])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"arrays of query, key, value or MLP do not fit together: {error}") from error
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        if "cls_norm.weight" in tensors:
            raise CheckpointError("separate norms for class token and patches are not supported")
        patch, periods = tensors["patch_embed.proj.weight"], tensors[PERIODS]
        width = patch.shape[0] if patch.dim() else 0
        if periods.dim() != 1 or not len(periods) or width % (4 * len(periods)):
            raise CheckpointError(f"{PERIODS!r} of shape {tuple(periods.shape)} does not fit a width of {width}")
        rope = RopeConfig(kind="normalized", temperature=rope_base(periods), half=True)
        return Facts(
            numerics=self.numerics,
            num_heads=width // (4 * len(periods)),
            settings={"rope": rope, "pos_embed": "none", "pool": "token"},
        )

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        """Squash with ImageNet's mean and std; a ViT-L with a norm for small crops was trained on satellite images."""
        has_crop_norm = any(name.endswith("local_cls_norm.weight") for name in checkpoint.tensors)
        is_satellite = has_crop_norm and config.width == 1024
        mean, std = (SATELLITE_MEAN, SATELLITE_STD) if is_satellite else (IMAGENET_MEAN, IMAGENET_STD)
        return Preprocess(image_size=config.image_size, mean=mean, std=std)


def rope_base(periods: Tensor) -> float:
    """The base b of periods b ** (i / n), i < n: the published one if it is within the precision of the array."""
    exponents = torch.arange(len(periods)) / len(periods)
    estimate = float(periods[-1]) ** (1 / float(exponents[-1])) if len(periods) > 1 else ROPE_BASE
    base = ROPE_BASE if abs(estimate / ROPE_BASE - 1) < 0.05 else estimate
    if not torch.allclose(periods, base**exponents, rtol=0.01):
        raise CheckpointError(f"{PERIODS!r} does not contain powers of one base, which is not supported")
    return base
