"""PyTorch files: timm (Vision Transformers with AugReg, DeiT and hybrids, BiT ResNets, MLP-Mixers) and torchvision.

DINO, DINOv2 and DINOv3 as released (`.pth`) have mostly the same names, with other tokens and position resampling.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitruvian.catalog import title_of
from vitruvian.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NUMERICS,
    ModelMeta,
    Preprocess,
    ResNetConfig,
    RopeConfig,
    ViTConfig,
)
from vitruvian.errors import CheckpointError, argument
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import ConfigT, Facts, Family, find_obstacles, imagenet_preprocess, scaled_size
from vitruvian.weights.families.tables import TABLES, Tensors, rename
from vitruvian.weights.families.timm_config import (
    DISTILLED,
    HARMLESS,
    NAMES,
    NUMERIC_SETTINGS,
    POOLS,
    SHAPE_ARGUMENTS,
    Architecture,
    TimmChoice,
    TimmConfig,
    choose,
    crop_preprocess,
    read_preprocess,
    write_config,
    write_preprocess,
)
from vitruvian.weights.families.timm_layout import count_branches, join_parts, shared_heads, split_parts

STEM_RULES = [(f"^{re.escape(theirs)}", ours) for names in NAMES["stems"].values() for theirs, ours in names.items()]
ANCHORS = ("patch_embed.proj.weight", "patch_embed.backbone.2.conv.weight", "embeds.proj.weight")
"""The patch embedding of most models, behind MobileCLIP's stem, and of NaFlexVit."""


def check_plain(tensors: Tensors) -> None:
    """Raise for parts that depend on an architecture, for a file that does not state it."""
    for part, what in TABLES["timm"].needs_config.items():
        if match := next((name for name in tensors if part in name), None):
            name = f"pass {argument('config')} with the name of the architecture (`vit convert --config` does)"
            reason = f"the weights have {what} ({match!r}), but no known architecture is stated"
            raise CheckpointError(reason, hint=f"keep timm's config.json beside them, or {name}")


class Timm(Family[ViTConfig]):
    """Vision Transformers with erf GELU, eps 1e-6, and positions resampled bicubically with antialiasing."""

    name = "timm"
    numerics = NUMERICS["timm"]
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".pth", ".pt", ".bin")
    stem_style = "timm"
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
            # our model drops the pixels past the last whole patch
            reason = f"dynamic_img_pad pads images of {size[0]}x{size[1]} to whole patches of {patch[-1]}"
            hint = f"state an img_size that is a multiple of {patch[-1]}"
            raise CheckpointError(f"config.json: {reason}, which is not supported", hint=hint)
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
            labels=config.labels,
            known_as=f"timm:{config.name}" if config.name else "",
        )

    def stated_settings(self, config: TimmConfig, tensors: Tensors, checkpoint: Checkpoint) -> dict[str, Any]:
        """Settings in `config.json` that can be checked against the arrays, under our names and with our meaning."""
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


def check_distilled(tensors: Tensors, *, fc_norm: bool) -> None:
    """Raise for parts of a distilled model that timm's code ignores or treats differently."""
    reason = hint = ""
    if "head.weight" not in tensors:
        reason = "without its heads; timm's features are then the mean of two tokens"
        hint = f"keep the heads and pass {argument('num_classes', 0)} to get the features of the class token"
    elif fc_norm:
        reason = "with 'fc_norm', which timm's code does not apply before the two heads"
        hint = "create it with fc_norm=False, which has a norm after the blocks, or final_norm=False"
    elif "reg_token" in tensors:
        reason, hint = "with 'reg_token', which timm's code ignores", "create it without register tokens"
    if reason:
        raise CheckpointError(f"a distilled model {reason}", hint=hint)


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
            f"pos_embed_ar_preserving is only supported for square grids, not {len(rows)}x{len(columns)}: timm's code "
            "resamples other grids even at the trained size"
        )
    return len(rows) * side, len(columns) * side


class TimmArchitecture(Timm):
    """A model written as one of timm's architectures, with all its settings in `config.json`."""

    choice: TimmChoice  # if there are no `reasons` why it cannot be written
    architecture: Architecture

    def __init__(self, config: ViTConfig, state: Tensors, known_as: str = "") -> None:
        is_head = config.projection and not config.num_classes and not config.unit_features
        changes = {"num_classes": config.representation_size, "representation_size": 0, "projection": False}
        # timm has CLIP's projection as the head, with a bias of zeros
        self.timm_config = config.replace(**changes) if is_head else config
        # a bias that is the same for all keys does not change the softmax, unless keys are rotated or normalized
        matters = config.rope is not None or config.qk_norm
        biases = (tensor for name, tensor in state.items() if matters and name.endswith(".attn.qkv.bias"))
        key_bias = any(bool(bias.chunk(3)[1].any()) for bias in biases)
        result = choose(self.timm_config, known_as, key_bias=key_bias)
        self.reasons = result if isinstance(result, list) else []
        self.kv_heads: list[int] = []
        if not isinstance(result, list):
            self.choice, self.architecture = result, result.architecture
            if "key_bias" in self.architecture.pieces:  # some of its blocks share keys and values
                groups = (shared_heads(state, f"blocks.{layer}", config.num_heads) for layer in range(config.depth))
                self.kv_heads = [config.num_heads // group for group in groups]

    def obstacles(self, config: ViTConfig) -> list[str]:
        return self.reasons

    def keeps_factors(self, config: ViTConfig) -> bool:
        return self.architecture.maker == "NaFlexVit" and config.pos_embed == "factorized"

    def has_position_array(self, config: ViTConfig) -> bool:
        return self.architecture.config.pos_embed not in ("none", "relative_bias")

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        return dict(state) if self.keeps_factors(config) else super().write_positions(state, config)

    def prefix_rows(self, config: ViTConfig) -> int:
        arch = self.architecture
        default = arch.config.cls_pos_embed if arch.config.cls_token else "register_rows" in arch.pieces
        has_rows = arch.maker == DISTILLED or not self.choice.arguments.get("no_embed_class", not default)
        return config.prefix_tokens if has_rows and arch.maker != "NaFlexVit" else 0

    def rename_parameters(self, native: Tensors, config: ViTConfig) -> Tensors:
        if self.timm_config.num_classes == config.num_classes:
            return native
        head = rename(native, [(r"^pre_logits\.", "head.")])
        return head | {"head.bias": torch.zeros(self.timm_config.num_classes)}

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        return split_parts(super().from_table_names(tensors, config), config, self.architecture)

    def reader_config(self, config: ViTConfig) -> ViTConfig:
        return super().reader_config(config).replace(numerics=self.choice.numerics)

    def expands_positions(self, config: ViTConfig) -> bool:
        return super().expands_positions(config) and not self.keeps_factors(config)

    def reader_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        read = read_preprocess(write_preprocess(preprocess, config), preprocess.image_size)
        return read.replace(floor_crop=preprocess.floor_crop, scaled_size=read.scaled_size or preprocess.scaled_size)

    def json_files(self, config: ViTConfig, meta: ModelMeta) -> dict[str, Any]:
        arch, arguments = self.architecture, dict(self.choice.arguments)
        if self.kv_heads:
            arguments["num_kv_heads"] = self.kv_heads
        classifier = ["head", "head_dist"] if arch.maker == DISTILLED else "head"
        settings = write_config(arch.name, self.timm_config, meta, classifier) | {"global_pool": POOLS[config.pool]}
        settings["pretrained_cfg"]["fixed_input_size"] = arch.maker != "NaFlexVit"
        if config.stem is None and arch.maker != "NaFlexVit" and config.in_channels == 3:
            settings["pretrained_cfg"]["first_conv"] = "patch_embed.proj"
        return {"config.json": settings | ({"model_args": arguments} if arguments else {})}


class TimmNamed(Family[ConfigT]):
    """Base of timm's models outside `timm.json`: the whole of their settings is the name of the architecture."""

    numerics = NUMERICS["timm"]
    name = "timm"
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors", ".pth", ".pt", ".bin")
    names: ClassVar[str]  # pattern of timm's names
    titles: ClassVar[str]  # pattern of our titles of the models that timm has
    name_format: ClassVar[str]  # of timm's name, with the groups of the title
    what: ClassVar[str]
    classifier: ClassVar[str]  # timm's name of the head

    def __init__(self, *, folder: bool = False) -> None:
        """`folder`: whether a model is written as a folder, whose `config.json` names one of timm's models."""
        self.folder = folder

    def config(self, checkpoint: Checkpoint) -> TimmConfig:
        """`config.json`, which may state what the arrays determine."""
        config = TimmConfig.parse(checkpoint.settings.get("config.json", {}))
        if config.name and not re.fullmatch(self.names, config.name):
            raise CheckpointError(f"config.json: {config.name!r} is not one of timm's {self.names.replace('.', '')}")
        config.check_null_arguments()
        for name, value in ({"global_pool": config.global_pool or "avg"} | config.model_args).items():
            is_stated = HARMLESS.fullmatch(name) or name in ("num_classes", "in_chans")
            if not is_stated and (name, value) != ("global_pool", "avg"):
                raise CheckpointError(f"config.json: {name}={value!r} is not supported for {self.what}")
        return config

    def stated_preprocess(self, checkpoint: Checkpoint, config: ConfigT) -> Preprocess | None:
        return self.config(checkpoint).preprocess(config.image_size)

    def default_preprocess(self, checkpoint: Checkpoint, config: ConfigT) -> Preprocess:
        return crop_preprocess(config.image_size, 0.875)

    def timm_name(self, config: ConfigT) -> str:
        """timm's name for a model of this shape; empty if it has none."""
        match = re.fullmatch(self.titles, title_of(config))
        return self.name_format.format(*match.groups()).lower() if match else ""

    def obstacles(self, config: ConfigT) -> list[str]:
        is_known = not self.folder or self.timm_name(config)
        return [] if is_known else [f"timm has no {self.names.replace('.', '')} of this shape"]

    def json_files(self, config: ConfigT, meta: ModelMeta) -> dict[str, Any]:
        name = self.timm_name(config) if self.folder else ""
        return {"config.json": write_config(name, config, meta, self.classifier)} if name else {}


class TimmBit(TimmNamed[ResNetConfig]):
    """timm's `resnetv2_*_bit`, which standardizes kernels with another epsilon than Google's release."""

    table = TABLES["timm_bit"]
    names, what, classifier = "resnetv2_.*_bit", "a BiT ResNet", "head.fc"
    titles, name_format = "BiT-R(50x1|50x3|101x1|101x3|152x2|152x4)", "resnetv2_{}_bit"

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = self.config(checkpoint)
        size = config.input_size and config.input_size[1]
        return Facts(numerics=self.numerics, settings={"style": "timm_bit"}, image_size=size, labels=config.labels)

    def default_preprocess(self, checkpoint: Checkpoint, config: ResNetConfig) -> Preprocess:
        return super().default_preprocess(checkpoint, config).replace(interpolation="bilinear")

    def reader_config(self, config: ResNetConfig) -> ResNetConfig:
        return config.replace(style="timm_bit")


class TimmMixer(TimmNamed[ViTConfig]):
    """timm's `mixer_*`: erf GELU, where Google's release has the tanh form."""

    table = TABLES["timm_mixer"]
    names, what, classifier = "mixer_.*", "an MLP-Mixer", "head"
    titles, name_format = r"Mixer-([SBL])/(\d+)", "mixer_{}{}_224"

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        config = self.config(checkpoint)
        return Facts(numerics=self.numerics, num_heads=1, image_size=config.image_size, labels=config.labels)

    def obstacles(self, config: ViTConfig) -> list[str]:
        return find_obstacles(config, "timm_mixer") + super().obstacles(config)


class Torchvision(Family[ViTConfig]):
    """erf GELU, eps 1e-6, positions resampled bicubically with aligned corners."""

    name = "torchvision"
    suffixes = (".pth", ".pt", ".safetensors")
    numerics = NUMERICS["torchvision"]
    table = TABLES["torchvision"]

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        """Shorter side 256, center crop 224, bilinear; L/16 resizes to 242, SWAG's models do not crop."""
        size = config.image_size
        is_swag = min(size) >= 384 or "swag" in checkpoint.path.name
        shorter_side = 242 if (config.width, config.patch_size) == (1024, 16) else 256
        return Preprocess(
            image_size=size,
            fit="crop",
            scaled_size=size if is_swag else scaled_size(size, shorter_side),
            interpolation="bicubic" if is_swag else "bilinear",
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
        )


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
