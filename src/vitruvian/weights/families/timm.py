"""timm (safetensors or `.pth`), also AugReg, DeiT, DeiT-III and their hybrids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from vitruvian.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    TIMM_NUMERICS,
    ModelConfig,
    Preprocess,
    ViTConfig,
)
from vitruvian.errors import CheckpointError
from vitruvian.settings import as_size
from vitruvian.weights.families.family import Facts, Family, vit_obstacles
from vitruvian.weights.families.rules import Table, Tensors, pair, rename
from vitruvian.weights.families.timm_checks import check_distilled, naflex_size, refuse_padding
from vitruvian.weights.families.timm_pieces import branches_in, in_one_piece
from vitruvian.weights.families.timm_rows import (
    BATCH_STEM_NAMES,
    BATCH_STEM_ROWS,
    BLOCK_ROWS,
    FACTOR_ROWS,
    POOL_ROWS,
    STEM_ROWS,
    TOKEN_ROWS,
)
from vitruvian.weights.families.timm_shapes import config_named
from vitruvian.weights.families.timm_variants import stated_settings, stated_shape
from vitruvian.weights.families.timm_view import crop_view, published, published_labels, published_size, published_view
from vitruvian.weights.files import Checkpoint

ANCHORS = ("patch_embed.proj.weight", "patch_embed.backbone.2.conv.weight", "embeds.proj.weight")
"""The patch embedding: of most models, behind MobileCLIP's stem, of NaFlexVit."""


class Timm(Family):
    """erf GELU, eps 1e-6, positions resampled bicubically with antialiasing."""

    name = "timm"
    numerics = TIMM_NUMERICS
    anchor = "patch_embed.proj.weight"
    prefixes: ClassVar[tuple[str, ...]] = (
        "",
        "module.",
        "backbone.",
        "module.backbone.",
        "model.",
        "module.model.",
        "_orig_mod.",
    )
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"^(blocks\.\d+)\.gamma_([12])", r"\1.ls\2.gamma"),  # DeiT-III as Facebook wrote it
        (r"^patch_embed\.backbone\.(conv|norm)\.", r"patch_embed.backbone.stem.\1."),  # a stem without stages
        *BATCH_STEM_NAMES,
    )
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".pth", ".pt", ".bin")
    refused: ClassVar[dict[str, str]] = {
        ".q_norm.": "normalized queries and keys",
        "norm_pre.": "a norm before the blocks (CLIP)",
        ".attn.norm.": "a norm inside attention",
        ".mlp.norm.": "a norm inside the MLP",
        "patch_embed.norm.": "a norm of the patches",
        "relative_position_bias_table": "relative position biases (BEiT)",
        "rope_freqs": "rotary positions",
        "in_proj.": "parallel blocks",
        ".attns.": "parallel branches",
        "subtracted": "differential attention",
        "patch_embed.root.": "a stem with BatchNorm",
        ".attn.q_proj.": "queries, keys and values in arrays of their own",
        "embeds.": "the embedding of NaFlexVit",
    }
    table = Table(
        rows=(
            *TOKEN_ROWS,
            *BLOCK_ROWS,
            *POOL_ROWS,
            *pair("pre_logits", "pre_logits.fc"),
            *pair("head", "head"),
            *pair("head_dist", "head_dist"),
            *STEM_ROWS,
            *BATCH_STEM_ROWS,
            *FACTOR_ROWS,
        ),
        block=r"blocks\.(\d+)\.",
        unit=r"patch_embed\.backbone\.stages\.(\d+)\.(?:blocks|units)\.(\d+)\.",
    )

    def prefix(self, tensors: Tensors) -> str | None:
        return next((p for p in self.prefixes if any(p + anchor in tensors for anchor in ANCHORS)), None)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        renamed = super().to_table_names(tensors)
        if "fc_norm.weight" in renamed:
            if "norm.weight" in renamed:
                raise CheckpointError("the file has both 'norm' and 'fc_norm': norms before and after the mean")
            renamed = rename(renamed, [(r"^fc_norm\.", "norm.")])
        return renamed

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        settings = self.settings_of(checkpoint) or {}
        stated = published_size(published(checkpoint))
        channels = self.arguments(checkpoint).get("in_chans") or (stated[0] if stated else 3)
        return in_one_piece(tensors, settings | {"in_channels": channels})

    def arguments(self, checkpoint: Checkpoint) -> dict[str, Any]:
        found = self.config_of(checkpoint).get("model_args")
        return found if isinstance(found, dict) else {}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        after_pool = any(name.endswith("fc_norm.weight") for name in checkpoint.tensors)
        if "dist_token" in tensors:
            check_distilled(tensors, fc_norm=after_pool)
        arguments, published_as = self.arguments(checkpoint), published_size(published(checkpoint))
        size = as_size(arguments["img_size"]) if arguments.get("img_size") else published_as and published_as[1]
        refuse_padding(arguments, size, tensors["patch_embed.proj.weight"].shape)
        settings = self.settings_of(checkpoint) or {}
        stated = self.stated(checkpoint, tensors, settings) if settings else {}
        flexible_size = naflex_size(tensors, checkpoint, square=bool(settings.get("square_positions")))
        numbers = {name: settings.pop(name) for name in NUMBERS if name in settings}
        settings.pop("norm_after_pool", None)  # the arrays' names tell it
        if "num_heads" in settings:
            settings["num_heads"] *= branches_in(checkpoint.tensors)
        return Facts(
            numerics=self.numerics.replace(**numbers),
            num_heads=settings.pop("num_heads", None),
            settings=settings,
            stated=stated,
            image_size=flexible_size or size,
            norm_after_pool=after_pool,
            stem_style="timm",
            labels=published_labels(checkpoint),
        )

    def stated(self, checkpoint: Checkpoint, tensors: Tensors, settings: dict[str, Any]) -> dict[str, Any]:
        """What `config.json` says of settings that the arrays tell too, but for those that they have in other words."""
        stated = stated_shape(self.config_of(checkpoint), settings, tensors["patch_embed.proj.weight"].shape[0])
        fc1, fc2 = (tensors.get(f"blocks.0.mlp.fc{n}.weight", torch.empty(1, 1)).shape for n in (1, 2))
        words = {
            "patch_size": any(name.startswith(("patch_embed.backbone.", "patch_embed.root.")) for name in tensors),
            "qkv_bias": branches_in(checkpoint.tensors) > 1,
            "mlp_dim": branches_in(checkpoint.tensors) > 1 or fc1[:1] != fc2[-1:],  # gated
            "cls_pos_embed": "cls_token" not in tensors or "pos_embed" not in tensors,
        }
        return {name: value for name, value in stated.items() if not words.get(name)}

    def settings_of(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        return stated_settings(self.config_of(checkpoint))

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return checkpoint.settings.get("config.json", {})

    def known_as(self, checkpoint: Checkpoint) -> str:
        architecture = self.config_of(checkpoint).get("architecture")
        return f"timm:{architecture.split('.')[0]}" if isinstance(architecture, str) else ""

    def doubt(self, checkpoint: Checkpoint, config: ModelConfig) -> str:
        """A file may have lost its last blocks; where `model_args` states their number, another one is refused."""
        assert isinstance(config, ViTConfig)
        name = self.known_as(checkpoint).removeprefix("timm:")
        usual, stated = config_named(name), self.arguments(checkpoint)
        if usual is None:
            return ""
        names = {"depth": "depth", "width": "embed_dim"}
        differing = [
            f"{setting}={getattr(usual, setting)}; the weights have {getattr(config, setting)}"
            for setting, argument in names.items()
            if argument not in stated and getattr(usual, setting) != getattr(config, setting)
        ]
        return f"config.json names {name}, which has {', '.join(differing)}" if differing else ""

    def refused_parts(self, checkpoint: Checkpoint) -> dict[str, str]:
        return self.refused if self.settings_of(checkpoint) is None else {}

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        assert isinstance(config, ViTConfig)
        cfg = published(checkpoint)
        stated = published_size(cfg)
        flexible = any(name.endswith("embeds.proj.weight") for name in checkpoint.tensors)  # positions of another grid
        at = stated[1] if flexible and stated else config.image_size
        return published_view(cfg, at) if cfg else None

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        assert isinstance(config, ViTConfig)
        # A file cannot say; these marks tell Facebook's models, trained with ImageNet statistics, from AugReg's.
        deit = config.distillation or config.layer_scale or checkpoint.wrapper == "model"
        view = crop_view(config.image_size, 1.0 if min(config.image_size) >= 384 else 0.9)
        return view.replace(mean=IMAGENET_MEAN, std=IMAGENET_STD) if deit else view

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from vit_obstacles(config, "timm", inner_norms=True)
        if not isinstance(config, ViTConfig):
            return
        if config.representation_size:
            yield "timm has no pre-logits layer before the head (it drops pre_logits)"
        if config.pool == "token_mean":
            yield "timm has no head on class token and mean side by side"
        if config.pool == "map" and config.norm_after_pool:
            yield "timm normalizes the tokens before attention pooling"
        if config.distillation and config.reg_tokens:
            yield "timm has no register tokens beside a distillation token"

    def prefix_rows(self, config: ViTConfig) -> int:
        """None with registers: timm then keeps positions for the patches alone."""
        return super().prefix_rows(config) if config.cls_pos_embed and not config.reg_tokens else 0

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        if config.norm_after_pool and config.pool == "mean":
            tensors = rename(tensors, [(r"^norm\.", "fc_norm.")])
        if config.stem and not config.stem.stages:
            tensors = rename(tensors, [(r"^patch_embed\.backbone\.stem\.", "patch_embed.backbone.")])
        return tensors

    def restore(self, native: Tensors, config: ModelConfig) -> Tensors:
        """A projection of features, which timm has as a head without bias."""
        if (
            not isinstance(config, ViTConfig)
            or not config.projection
            or "head.weight" not in native
            or config.num_classes
        ):
            return native
        return rename({name: t for name, t in native.items() if name != "head.bias"}, [(r"^head\.", "pre_logits.")])

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        assert isinstance(config, ViTConfig)
        released = config.stem and config.stem.style == "hybrid"
        stem = config.stem.replace(style="timm") if config.stem and released else config.stem
        return config.replace(numerics=self.numerics, stem=stem)


NUMBERS = ("gelu", "norm_eps", "position_resize", "square_positions")
