"""timm (safetensors or `.pth`): Vision Transformers with AugReg, DeiT, DeiT-III and hybrids, and BiT ResNets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from vitruvian.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    TIMM_NUMERICS,
    ModelConfig,
    Preprocess,
    ResNetConfig,
    ViTConfig,
)
from vitruvian.errors import CheckpointError, argument
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family, vit_obstacles
from vitruvian.weights.families.tables import POSITIONS, ArrayLayout, Row, Table, Tensors, pair, pairs, rename
from vitruvian.weights.families.timm_config import HARMLESS, NUMERICS, TimmConfig, crop_preprocess
from vitruvian.weights.families.timm_layout import STEM_NAMES, count_branches, join_parts

ATTENTION_LAYERS = ("norm1", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.norm", "attn.proj")
BLOCK_LAYERS = (*ATTENTION_LAYERS, "norm2", "mlp.fc1", "mlp.norm", "mlp.fc2")
POOL_LAYERS = ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")

TOKEN_ROWS = (
    *pairs({"embed.patch": "patch_embed.proj", "embed.patch_norm": "patch_embed.norm", "embed.norm": "norm_pre"}),
    Row("embed.cls_token", ("cls_token",)),
    Row("embed.dist_token", ("dist_token",)),
    Row("embed.reg_tokens", ("reg_token",)),
    Row(POSITIONS, ("pos_embed",)),
    *pair("norm", "norm"),
)
BLOCK_ROWS = (
    *pairs(dict(zip(BLOCK_LAYERS, BLOCK_LAYERS)), "blocks.{i}.", "blocks.{i}."),
    Row("blocks.{i}.attn.position.table", ("blocks.{i}.attn.relative_position_bias_table",)),
    Row("blocks.{i}.attn.position.frequencies", ("blocks.{i}.attn.rope_freqs",)),
    Row("blocks.{i}.attn.subtracted", ("blocks.{i}.attn.subtracted",)),
    Row("blocks.{i}.attn.head_norm.weight", ("blocks.{i}.attn.sub_norm.weight",)),
    Row("blocks.{i}.ls1", ("blocks.{i}.ls1.gamma",)),
    Row("blocks.{i}.ls2", ("blocks.{i}.ls2.gamma",)),
)
FACTOR_ROWS = Row("embed.row_pos_embed", ("pos_embed_y",)), Row("embed.col_pos_embed", ("pos_embed_x",))

UNIT, NATIVE_UNIT = "patch_embed.backbone.stages.{s}.blocks.{u}", "embed.stem.stages.{s}.{u}"
STEM_ROWS = (
    Row("embed.stem.root.weight", ("patch_embed.backbone.stem.conv.weight",)),
    *pair("embed.stem.root_norm", "patch_embed.backbone.stem.norm"),
    *(Row(f"{NATIVE_UNIT}.conv{n}.weight", (f"{UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
    *(row for n in (1, 2, 3) for row in pair(f"{NATIVE_UNIT}.norm{n}", f"{UNIT}.norm{n}")),
    Row(f"{NATIVE_UNIT}.shortcut.weight", (f"{UNIT}.downsample.conv.weight",)),
    *pair(f"{NATIVE_UNIT}.shortcut_norm", f"{UNIT}.downsample.norm"),
)


def batch_norm(native: str, foreign: str) -> tuple[Row, ...]:
    kinds = ("weight", "bias", "running_mean", "running_var")
    return tuple(Row(f"{native}.{kind}", (f"{foreign}.{kind}",)) for kind in kinds)


RESNET_D_UNIT = "patch_embed.backbone.stages.{s}.units.{u}"
BATCH_STEM_ROWS = (
    *(Row(f"embed.stem.root.{n}.conv.weight", (f"patch_embed.root.{n}.conv.weight",)) for n in range(3)),
    *(row for n in range(3) for row in batch_norm(f"embed.stem.root.{n}.norm", f"patch_embed.root.{n}.norm")),
    *(Row(f"{NATIVE_UNIT}.part{n}.conv.weight", (f"{RESNET_D_UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
    *(row for n in (1, 2, 3) for row in batch_norm(f"{NATIVE_UNIT}.part{n}.norm", f"{RESNET_D_UNIT}.bn{n}")),
    Row(f"{NATIVE_UNIT}.shortcut.conv.weight", (f"{RESNET_D_UNIT}.downsample.1.weight",)),
    *batch_norm(f"{NATIVE_UNIT}.shortcut.norm", f"{RESNET_D_UNIT}.downsample.2"),
)

ANCHORS = ("patch_embed.proj.weight", "patch_embed.backbone.2.conv.weight", "embeds.proj.weight")
"""The patch embedding of most models, behind MobileCLIP's stem, and of NaFlexVit."""


class Timm(Family):
    """Vision Transformers with erf GELU, eps 1e-6, and positions resampled bicubically with antialiasing."""

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
        (r"^(blocks\.\d+)\.gamma_([12])", r"\1.ls\2.gamma"),  # DeiT-III in Facebook's release
        (r"^patch_embed\.backbone\.(conv|norm)\.", r"patch_embed.backbone.stem.\1."),  # a stem without stages
        *((f"^{re.escape(theirs)}", ours) for names in STEM_NAMES.values() for theirs, ours in names.items()),
    )
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".pth", ".pt", ".bin")
    refused: ClassVar[dict[str, str]] = {
        ".q_norm.": "normalized queries and keys",
        "norm_pre.": "a norm before the blocks (CLIP)",
        ".attn.norm.": "a norm inside attention",
        ".mlp.norm.": "a norm inside the MLP",
        "patch_embed.norm.": "a norm after the patch embedding",
        "relative_position_bias_table": "relative position biases (BEiT)",
        "rope_freqs": "rotary positions",
        "in_proj.": "parallel blocks",
        ".attns.": "parallel branches",
        "subtracted": "differential attention",
        "patch_embed.root.": "a stem with BatchNorm",
        ".attn.q_proj.": "separate arrays for query, key and value",
        "embeds.": "the embedding of NaFlexVit",
    }
    table = Table(
        rows=(
            *TOKEN_ROWS,
            *BLOCK_ROWS,
            Row("attn_pool.probe", ("attn_pool.latent",)),
            *pairs(dict(zip(POOL_LAYERS, POOL_LAYERS)), "attn_pool.", "attn_pool."),
            *pairs({"pre_logits": "pre_logits.fc", "head": "head", "head_dist": "head_dist"}),
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

    def parse_settings(self, checkpoint: Checkpoint) -> TimmConfig:
        return TimmConfig.parse(checkpoint.settings.get("config.json", {}))

    def config(self, checkpoint: Checkpoint) -> TimmConfig:
        parsed = checkpoint.parsed
        return parsed if isinstance(parsed, TimmConfig) else self.parse_settings(checkpoint)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        config = self.config(checkpoint)
        return join_parts(tensors, (config.settings or {}) | {"in_channels": config.in_channels})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = self.config(checkpoint)
        after_pool = any(name.endswith("fc_norm.weight") for name in checkpoint.tensors)
        if "dist_token" in tensors:
            check_distilled(tensors, fc_norm=after_pool)
        check_padding(config, tensors["patch_embed.proj.weight"].shape)
        settings = dict(config.settings or {})
        stated = self.stated_settings(config, tensors, checkpoint) if settings else {}
        flexible_size = naflex_image_size(tensors, checkpoint, square=bool(settings.get("square_positions")))
        numerics = {name: settings.pop(name) for name in NUMERICS if name in settings}
        settings.pop("norm_after_pool", None)  # the names of the arrays determine it
        num_heads = settings.pop("num_heads", None)
        return Facts(
            numerics=self.numerics.replace(**numerics),
            num_heads=None if num_heads is None else num_heads * count_branches(checkpoint.tensors),
            settings=settings,
            stated=stated,
            image_size=flexible_size or config.image_size,
            norm_after_pool=after_pool,
            stem_style="timm",
            labels=config.labels,
        )

    def stated_settings(self, config: TimmConfig, tensors: Tensors, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings in `config.json` that the arrays determine too, without those that mean something else here."""
        stated = config.shape_settings(tensors["patch_embed.proj.weight"].shape[0])
        fc1, fc2 = (tensors.get(f"blocks.0.mlp.fc{n}.weight", torch.empty(1, 1)).shape for n in (1, 2))
        has_branches = count_branches(checkpoint.tensors) > 1
        differs = {
            "patch_size": any(name.startswith(("patch_embed.backbone.", "patch_embed.root.")) for name in tensors),
            "qkv_bias": has_branches,
            "mlp_dim": has_branches or fc1[:1] != fc2[-1:],  # gated
            "cls_pos_embed": "cls_token" not in tensors or "pos_embed" not in tensors,
        }
        return {name: value for name, value in stated.items() if not differs.get(name)}

    def known_as(self, checkpoint: Checkpoint) -> str:
        name = self.config(checkpoint).name
        return f"timm:{name}" if name else ""

    def doubt(self, checkpoint: Checkpoint, config: ModelConfig) -> str:
        """Warn about a file that may have lost its last blocks; if `model_args` states the depth, it is an error."""
        stated = self.config(checkpoint)
        if stated.architecture is None:
            return ""
        usual, arguments = stated.architecture.config, {"depth": "depth", "width": "embed_dim"}
        differing = [
            f"{setting}={getattr(usual, setting)}; the weights have {getattr(config, setting)}"
            for setting, name in arguments.items()
            if name not in stated.model_args and getattr(usual, setting) != getattr(config, setting)
        ]
        return f"config.json names {stated.name}, which has {', '.join(differing)}" if differing else ""

    def refused_parts(self, checkpoint: Checkpoint) -> dict[str, str]:
        return self.refused if self.config(checkpoint).settings is None else {}

    def stated_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        stated = self.config(checkpoint)
        is_flexible = any(name.endswith("embeds.proj.weight") for name in checkpoint.tensors)  # not the positions' grid
        return stated.preprocess(stated.input_size[1] if is_flexible and stated.input_size else config.image_size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        assert isinstance(config, ViTConfig)
        # Facebook's models were trained with ImageNet's mean and std, AugReg's with 0.5; this distinguishes them
        is_deit = config.distillation or config.layer_scale or checkpoint.wrapper == "model"
        preprocess = crop_preprocess(config.image_size, 1.0 if min(config.image_size) >= 384 else 0.9)
        return preprocess.replace(mean=IMAGENET_MEAN, std=IMAGENET_STD) if is_deit else preprocess

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from vit_obstacles(config, "timm", inner_norms=True)
        if not isinstance(config, ViTConfig):
            return
        if config.representation_size:
            yield "timm has no pre-logits layer before the head (it drops pre_logits)"
        if config.pool == "token_mean":
            yield "timm has no head on class token and mean concatenated"
        if config.pool == "map" and config.norm_after_pool:
            yield "timm normalizes the tokens before attention pooling"
        if config.distillation and config.reg_tokens:
            yield "timm has no register tokens beside a distillation token"

    def prefix_rows(self, config: ViTConfig) -> int:
        """0 with registers, because timm then has positions for the patches only."""
        return super().prefix_rows(config) if config.cls_pos_embed and not config.reg_tokens else 0

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        if config.norm_after_pool and config.pool == "mean":
            tensors = rename(tensors, [(r"^norm\.", "fc_norm.")])
        if config.stem and not config.stem.stages:
            tensors = rename(tensors, [(r"^patch_embed\.backbone\.stem\.", "patch_embed.backbone.")])
        return tensors

    def restore(self, native: Tensors, config: ModelConfig) -> Tensors:
        """Restore a projection of features, which timm stores as a head without bias."""
        has_projection = isinstance(config, ViTConfig) and config.projection and not config.num_classes
        if not has_projection or "head.weight" not in native:
            return native
        return rename({name: t for name, t in native.items() if name != "head.bias"}, [(r"^head\.", "pre_logits.")])

    def reader_config(self, config: ModelConfig) -> ModelConfig:
        assert isinstance(config, ViTConfig)
        is_hybrid = config.stem and config.stem.style == "hybrid"
        stem = config.stem.replace(style="timm") if config.stem and is_hybrid else config.stem
        return config.replace(numerics=self.numerics, stem=stem)


def check_padding(config: TimmConfig, patch: tuple[int, ...]) -> None:
    """Raise if timm would pad the image to whole patches; our model drops the pixels past the last whole patch."""
    size = config.image_size
    is_padded = config.model_args.get("dynamic_img_pad") and size and len(patch) == 4
    if is_padded and size and any(side % patch[-1] for side in size):
        raise CheckpointError(
            f"config.json: dynamic_img_pad pads images of {size[0]}x{size[1]} to whole patches of {patch[-1]}, which "
            "is not supported",
            hint=f"state an img_size that is a multiple of {patch[-1]}",
        )


def check_distilled(tensors: Tensors, *, fc_norm: bool) -> None:
    """Raise for parts of a distilled model that timm's code ignores or treats differently."""
    if "head.weight" not in tensors:
        raise CheckpointError(
            "a distilled model without its heads; timm's features are then the mean of two tokens",
            hint=f"keep the heads and pass {argument('num_classes', 0)} to get the features of the class token",
        )
    if fc_norm:
        raise CheckpointError(
            "a distilled model with 'fc_norm', which timm's code does not apply before the two heads",
            hint="create it with fc_norm=False, which has a norm after the blocks, or final_norm=False",
        )
    if "reg_token" in tensors:
        raise CheckpointError(
            "a distilled model with 'reg_token', which timm's code ignores", hint="create it without register tokens"
        )


def naflex_image_size(tensors: Tensors, checkpoint: Checkpoint, *, square: bool) -> Size | None:
    """The image size for which NaFlexVit's positions are trained, if their array has the shape of the grid."""
    patch = tensors["patch_embed.proj.weight"]
    if not patch.dim():  # a damaged file; reading its shapes raises a better error
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
            f"{len(rows)} row positions and {len(columns)} column positions with pos_embed_ar_preserving, which timm's "
            "code resizes even at their own grid; this is not supported"
        )
    return len(rows) * side, len(columns) * side


BIT_STAGE, BIT_UNIT = "stages.{s}.{u}", "stages.{s}.blocks.{u}"
KERNEL = ArrayLayout(4, lambda parts: parts[0][:, :, 0, 0], lambda x, n, heads: [x[:, :, None, None]])
"""A dense layer stored as a 1x1 convolution in PyTorch's layout."""
BIT_ARGUMENTS = frozenset({"num_classes", "in_chans"})
"""`model_args` allowed for BiT ResNets, because the arrays determine them; others make another network."""


class TimmBit(Family):
    """timm's `resnetv2_*_bit`, which standardizes kernels with another epsilon than Google's release."""

    name = "timm"
    numerics = TIMM_NUMERICS
    anchor = "stem.conv.weight"
    prefixes = ("", "module.", "model.")
    suffixes = Timm.suffixes
    table = Table(
        rows=(
            Row("root.weight", ("stem.conv.weight",)),
            *(Row(f"{BIT_STAGE}.conv{n}.weight", (f"{BIT_UNIT}.conv{n}.weight",)) for n in (1, 2, 3)),
            *(row for n in (1, 2, 3) for row in pair(f"{BIT_STAGE}.norm{n}", f"{BIT_UNIT}.norm{n}")),
            Row(f"{BIT_STAGE}.shortcut.weight", (f"{BIT_UNIT}.downsample.conv.weight",)),
            *pair("norm", "norm"),
            Row("head.weight", ("head.fc.weight",), KERNEL),
            Row("head.bias", ("head.fc.bias",)),
        ),
        unit=r"stages\.(\d+)\.blocks\.(\d+)\.",
    )

    def parse_settings(self, checkpoint: Checkpoint) -> TimmConfig:
        return TimmConfig.parse(checkpoint.settings.get("config.json", {}))

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config: TimmConfig = checkpoint.parsed
        if config.name and not re.fullmatch(r"resnetv2_\w*bit", config.name):
            raise CheckpointError(f"config.json: {config.name!r} is not one of timm's resnetv2_*_bit")
        config.check_null_arguments()
        for name, value in ({"global_pool": config.global_pool or "avg"} | config.model_args).items():
            if not (HARMLESS.fullmatch(name) or name in BIT_ARGUMENTS or (name, value) == ("global_pool", "avg")):
                raise CheckpointError(f"config.json: {name}={value!r} is not supported for a BiT ResNet")
        size = config.input_size
        return Facts(
            numerics=self.numerics,
            settings={"style": "timm_bit"},
            image_size=size and size[1],
            labels=config.labels,
        )

    def stated_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        stated: TimmConfig = checkpoint.parsed
        return stated.preprocess(config.image_size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return crop_preprocess(config.image_size, 0.875).replace(interpolation="bilinear")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        if not isinstance(config, ResNetConfig):
            yield "these names are for ResNets, this is a Vision Transformer"

    def reader_config(self, config: ModelConfig) -> ModelConfig:
        return config.replace(style="timm_bit")
