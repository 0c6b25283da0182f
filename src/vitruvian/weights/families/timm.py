"""timm (safetensors or `.pth`): Vision Transformers with AugReg, DeiT and hybrids, BiT ResNets, and MLP-Mixers."""

import re
from typing import Any, ClassVar

import torch

from vitruvian.catalog import title_of
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, NUMERICS, ModelMeta, Preprocess, ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, argument
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family, mixer_obstacles, vit_obstacles
from vitruvian.weights.families.tables import TABLES, Tensors, rename
from vitruvian.weights.families.timm_config import (
    HARMLESS,
    NAMES,
    NUMERIC_SETTINGS,
    SHAPE_ARGUMENTS,
    TimmConfig,
    crop_preprocess,
    write_config,
)
from vitruvian.weights.families.timm_layout import count_branches, join_parts

STEM_RULES = [(f"^{re.escape(theirs)}", ours) for names in NAMES["stems"].values() for theirs, ours in names.items()]
ANCHORS = ("patch_embed.proj.weight", "patch_embed.backbone.2.conv.weight", "embeds.proj.weight")
"""The patch embedding of most models, behind MobileCLIP's stem, and of NaFlexVit."""


def check_plain(tensors: Tensors) -> None:
    """Raise for parts that depend on an architecture, for a file that does not state it."""
    for part, what in TABLES["timm"].needs_config.items():
        match = next((name for name in tensors if part in name), None)
        if match:
            raise CheckpointError(
                f"the weights have {what} ({match!r}), but no known architecture is stated",
                hint=f"keep timm's config.json beside them, or pass {argument('config')} with the name of the "
                "architecture (`vit convert --config` does)",
            )


class Timm(Family[ViTConfig]):
    """Vision Transformers with erf GELU, eps 1e-6, and positions resampled bicubically with antialiasing."""

    name = "timm"
    numerics = NUMERICS["timm"]
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".pth", ".pt", ".bin")
    table = TABLES["timm"]

    def prefix(self, tensors: Tensors) -> str | None:
        return next((p for p in self.table.prefixes if any(p + anchor in tensors for anchor in ANCHORS)), None)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        renamed = rename(super().to_table_names(tensors), STEM_RULES)
        if "fc_norm.weight" in renamed:
            if "norm.weight" in renamed:
                raise CheckpointError("the file has both 'norm' and 'fc_norm': norms before and after the mean")
            renamed = rename(renamed, [(r"^fc_norm\.", "norm.")])
        return renamed

    def config(self, checkpoint: Checkpoint) -> TimmConfig:
        return TimmConfig.parse(checkpoint.settings.get("config.json", {}))

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        config = self.config(checkpoint)
        return join_parts(tensors, (config.settings or {}) | {"in_channels": config.in_channels})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = self.config(checkpoint)
        if config.settings is None:
            check_plain(tensors)
        after_pool = any(name.endswith("fc_norm.weight") for name in checkpoint.tensors)
        if "dist_token" in tensors:
            check_distilled(tensors, fc_norm=after_pool)
        patch, size = tensors["patch_embed.proj.weight"].shape, config.image_size
        if config.model_args.get("dynamic_img_pad") and size and len(patch) == 4 and any(x % patch[-1] for x in size):
            raise CheckpointError(  # our model drops the pixels past the last whole patch
                f"config.json: dynamic_img_pad pads images of {size[0]}x{size[1]} to whole patches of {patch[-1]}, "
                "which is not supported",
                hint=f"state an img_size that is a multiple of {patch[-1]}",
            )
        settings = dict(config.settings or {})
        stated = self.stated_settings(config, tensors, checkpoint) if settings else {}
        flexible_size = naflex_image_size(tensors, checkpoint, square=bool(settings.get("square_positions")))
        numerics = {name: settings.pop(name) for name in NUMERIC_SETTINGS if name in settings}
        settings.pop("norm_after_pool", None)  # the names of the arrays determine it
        num_heads = settings.pop("num_heads", None)
        return Facts(
            numerics=self.numerics.replace(**numerics),
            num_heads=None if num_heads is None else num_heads * count_branches(checkpoint.tensors),
            settings=settings,
            stated=stated,
            image_size=flexible_size or size,
            norm_after_pool=after_pool,
            stem_style="timm",
            labels=config.labels,
            known_as=f"timm:{config.name}" if config.name else "",
        )

    def stated_settings(self, config: TimmConfig, tensors: Tensors, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings in `config.json` that the arrays determine too, without those that mean something else here."""
        arguments = {"num_classes": config.num_classes} | config.model_args
        stated = {SHAPE_ARGUMENTS[name]: value for name, value in arguments.items() if name in SHAPE_ARGUMENTS}
        size, ratio = stated.get("patch_size"), stated.pop("mlp_dim", None)
        if isinstance(size, list) and size[1:] == size[:-1]:
            stated["patch_size"] = size[0]
        if isinstance(ratio, int | float):
            stated["mlp_dim"] = int(tensors["patch_embed.proj.weight"].shape[0] * ratio)
        if stated.get("cls_pos_embed") is not None:
            stated["cls_pos_embed"] = not stated["cls_pos_embed"]
        if "layer_scale" in stated:  # with 0 some models have no LayerScale, others multiply by arrays of zeros
            stated["layer_scale"] = True if stated["layer_scale"] else None
        settings = config.settings or {}
        if stated.get("norm_after_pool") is None and settings.get("final_norm"):
            stated["norm_after_pool"] = settings["norm_after_pool"]
        fc1, fc2 = (tensors.get(f"blocks.0.mlp.fc{n}.weight", torch.empty(1, 1)).shape for n in (1, 2))
        has_branches = count_branches(checkpoint.tensors) > 1
        differs = {
            "patch_size": any(name.startswith(("patch_embed.backbone.", "patch_embed.root.")) for name in tensors),
            "qkv_bias": has_branches,
            "mlp_dim": has_branches or fc1[:1] != fc2[-1:],  # gated
            "cls_pos_embed": "cls_token" not in tensors or "pos_embed" not in tensors,
        }
        return {name: value for name, value in stated.items() if not differs.get(name)}

    def doubt(self, checkpoint: Checkpoint, config: ViTConfig) -> str:
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

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        stated = self.config(checkpoint)
        is_flexible = any(name.endswith("embeds.proj.weight") for name in checkpoint.tensors)  # not the positions' grid
        return stated.preprocess(stated.input_size[1] if is_flexible and stated.input_size else config.image_size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        # Facebook's models were trained with ImageNet's mean and std, AugReg's with 0.5; this distinguishes them
        is_deit = config.distillation or config.layer_scale or checkpoint.wrapper == "model"
        preprocess = crop_preprocess(config.image_size, 1.0 if min(config.image_size) >= 384 else 0.9)
        return preprocess.replace(mean=IMAGENET_MEAN, std=IMAGENET_STD) if is_deit else preprocess

    def obstacles(self, config: ViTConfig) -> list[str]:
        map_norm = config.pool == "map" and config.norm_after_pool
        checks = {
            "timm has no pre-logits layer before the head (it drops pre_logits)": config.representation_size,
            "timm has no head on class token and mean concatenated": config.pool == "token_mean",
            "timm normalizes the tokens before attention pooling": map_norm,
            "timm has no register tokens beside a distillation token": config.distillation and config.reg_tokens,
        }
        return vit_obstacles(config, "timm", checks, inner_norms=True)

    def prefix_rows(self, config: ViTConfig) -> int:
        """0 with registers, because timm then has positions for the patches only."""
        return super().prefix_rows(config) if config.cls_pos_embed and not config.reg_tokens else 0

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        if config.norm_after_pool and config.pool == "mean":
            tensors = rename(tensors, [(r"^norm\.", "fc_norm.")])
        if config.stem and not config.stem.stages:
            tensors = rename(tensors, [(r"^patch_embed\.backbone\.stem\.", "patch_embed.backbone.")])
        return tensors

    def restore(self, native: Tensors, config: ViTConfig) -> Tensors:
        """Restore a projection of features, which timm stores as a head without bias."""
        if not config.projection or config.num_classes or "head.weight" not in native:
            return native
        return rename({name: t for name, t in native.items() if name != "head.bias"}, [(r"^head\.", "pre_logits.")])

    def reader_config(self, config: ViTConfig) -> ViTConfig:
        stem = config.stem.replace(style="timm") if config.stem and config.stem.style == "hybrid" else config.stem
        return config.replace(numerics=self.numerics, stem=stem)


def check_distilled(tensors: Tensors, *, fc_norm: bool) -> None:
    """Raise for parts of a distilled model that timm's code ignores or treats differently."""
    if "head.weight" not in tensors:
        what = "a distilled model without its heads; timm's features are then the mean of two tokens"
        hint = f"keep the heads and pass {argument('num_classes', 0)} to get the features of the class token"
        raise CheckpointError(what, hint=hint)
    if fc_norm:
        what = "a distilled model with 'fc_norm', which timm's code does not apply before the two heads"
        hint = "create it with fc_norm=False, which has a norm after the blocks, or final_norm=False"
        raise CheckpointError(what, hint=hint)
    if "reg_token" in tensors:
        reason = "a distilled model with 'reg_token', which timm's code ignores"
        raise CheckpointError(reason, hint="create it without register tokens")


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


SIMPLE_ARGUMENTS = frozenset({"num_classes", "in_chans"})
"""`model_args` allowed for architectures outside `timm.json`; the arrays determine them."""


def simple_config(checkpoint: Checkpoint, names: str, what: str) -> TimmConfig:
    """`config.json` of an architecture outside `timm.json`; `names` is the pattern of its names."""
    config = TimmConfig.parse(checkpoint.settings.get("config.json", {}))
    if config.name and not re.fullmatch(names, config.name):
        raise CheckpointError(f"config.json: {config.name!r} is not one of timm's {names.replace('.', '')}")
    config.check_null_arguments()
    for name, value in ({"global_pool": config.global_pool or "avg"} | config.model_args).items():
        if not (HARMLESS.fullmatch(name) or name in SIMPLE_ARGUMENTS or (name, value) == ("global_pool", "avg")):
            raise CheckpointError(f"config.json: {name}={value!r} is not supported for {what}")
    return config


class TimmBit(Family[ResNetConfig]):
    """timm's `resnetv2_*_bit`, which standardizes kernels with another epsilon than Google's release."""

    name = "timm"
    numerics = NUMERICS["timm"]
    suffixes = Timm.suffixes
    table = TABLES["timm_bit"]

    def __init__(self, *, folder: bool = False) -> None:
        """`folder`: whether a model is written as a folder, whose `config.json` names one of timm's models."""
        self.folder = folder

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = simple_config(checkpoint, "resnetv2_.*_bit", "a BiT ResNet")
        size = config.input_size and config.input_size[1]
        return Facts(numerics=self.numerics, settings={"style": "timm_bit"}, image_size=size, labels=config.labels)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ResNetConfig) -> Preprocess | None:
        stated = TimmConfig.parse(checkpoint.settings.get("config.json", {}))
        return stated.preprocess(config.image_size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ResNetConfig) -> Preprocess:
        return crop_preprocess(config.image_size, 0.875).replace(interpolation="bilinear")

    def obstacles(self, config: ResNetConfig) -> list[str]:
        if not self.folder or bit_name(config) in BIT_NAMES:
            return []
        return [f"timm has no resnetv2_*_bit with stages={config.stages} and width={config.width}"]

    def json_files(self, config: ResNetConfig, meta: ModelMeta) -> dict[str, Any]:
        return {"config.json": write_config(bit_name(config), config, meta, "head.fc")} if self.folder else {}

    def reader_config(self, config: ResNetConfig) -> ResNetConfig:
        return config.replace(style="timm_bit")


BIT_NAMES = [f"resnetv2_{size}_bit" for size in ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")]


def bit_name(config: ResNetConfig) -> str:
    return f"resnetv2_{title_of(config).removeprefix('BiT-R')}_bit"


class TimmMixer(Timm):
    """timm's `mixer_*`: erf GELU, where Google's release has the tanh form."""

    table = TABLES["timm_mixer"]

    def __init__(self, *, folder: bool = False) -> None:
        """`folder`: whether a model is written as a folder, whose `config.json` names one of timm's models."""
        self.folder = folder

    def prefix(self, tensors: Tensors) -> str | None:
        return Family.prefix(self, tensors)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        return tensors

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = simple_config(checkpoint, "mixer_.*", "an MLP-Mixer")
        return Facts(numerics=self.numerics, num_heads=1, image_size=config.image_size, labels=config.labels)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        return crop_preprocess(config.image_size, 0.875)

    def obstacles(self, config: ViTConfig) -> list[str]:
        has_name = not self.folder or mixer_name(config) is not None
        return mixer_obstacles(config, "timm") + ([] if has_name else ["timm has no mixer_* of this shape"])

    def expands_positions(self, config: ViTConfig) -> bool:
        return False

    def json_files(self, config: ViTConfig, meta: ModelMeta) -> dict[str, Any]:
        name = mixer_name(config) if self.folder else None
        return {"config.json": write_config(name, config, meta, "head")} if name else {}


def mixer_name(config: ViTConfig) -> str | None:
    """timm's name for an MLP-Mixer of this shape, or None."""
    name = title_of(config)
    return f"mixer_{name[6].lower()}{config.patch_size}_224" if re.fullmatch(r"Mixer-[SBL]/\d+", name) else None
