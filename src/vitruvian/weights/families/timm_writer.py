"""Models written as one of timm's architectures: the choice of the architecture, and its arguments (`model_args`)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vitruvian.config import CHANGEABLE, ModelMeta, Numerics, Preprocess, ViTConfig
from vitruvian.weights.families.tables import Tensors, rename
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.timm_config import (
    DISTILLED,
    RESIZING,
    ROTARY,
    Architecture,
    architectures,
    find_architecture,
    read_preprocess,
    resize_arguments,
    write_config,
    write_preprocess,
)
from vitruvian.weights.families.timm_layout import shared_heads, split_parts

POOLS = {"token": "token", "mean": "avg", "map": "map"}
Argument = Callable[[ViTConfig, Architecture], dict[str, Any] | None]
"""Arguments for a setting that differs from the architecture's; None if there is none."""


def same(argument: str, setting: str) -> Argument:
    return lambda config, arch: {argument: getattr(config, setting)}


def img_size(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    rows, columns = config.image_size
    if rows != columns and config.pos_embed == "relative_bias":
        return None  # timm reads the biases as those of a square
    return {"img_size": rows if rows == columns else [rows, columns]}


def num_heads(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    return {"num_heads": config.num_heads // arch.branches} if config.num_heads % arch.branches == 0 else None


def mlp_ratio(config: ViTConfig, arch: Architecture) -> dict[str, Any]:
    hidden = config.mlp_dim // arch.branches
    arguments: dict[str, Any] = {"mlp_ratio": ratio(hidden * (2 if "halved" in arch.pieces else 1), config.width)}
    if "aligned" in arch.pieces:
        arguments["swiglu_align_to"] = 1
    if arch.maker == "Eva" and config.pool == "map":
        arguments |= pool_mlp_ratio(config, arch) or {}
    return arguments


def pool_mlp_ratio(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    if arch.maker == "Eva":
        return {"attn_pool_mlp_ratio": ratio(config.pool_mlp_dim or config.mlp_dim, config.width)}
    return None


def ratio(hidden: int, width: int) -> float:
    """A number whose product with `width`, rounded down, is `hidden`."""
    exact = hidden / width
    return exact if int(width * exact) == hidden else (hidden + 0.5) / width


def qkv_bias(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """None to add one to Eva or Beit, which store it in parts that the table does not have for this architecture."""
    is_added = config.qkv_bias and arch.maker in ("Eva", "Beit")
    return None if is_added else {"qkv_bias": config.qkv_bias}


def init_values(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """LayerScale. Eva multiplies by zeros where others have none; post-norm blocks never have one."""
    if config.block == "res_post_norm" or (arch.maker == "Eva" and not config.layer_scale):
        return None
    return {"init_values": 1e-5 if config.layer_scale else 0.0}


def prefix_tokens(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """Class token and registers, and whether they have positions."""
    if config.distillation:
        return None
    registers = "num_reg_tokens" if arch.maker == "Eva" else "reg_tokens"
    tokens = {"class_token": config.cls_token, registers: config.reg_tokens}
    if arch.maker == "NaFlexVit":
        return tokens
    return tokens | {"no_embed_class": not (config.cls_token and config.cls_pos_embed)}


def global_pool(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """The pooling, and the position of the last norm."""
    if config.pool not in POOLS or (config.norm_after_pool and (config.pool == "map" or config.distillation)):
        return None
    after = config.norm_after_pool and config.pool == "mean"
    if arch.maker == "Beit":  # the pooling determines the norm
        return {"global_pool": POOLS[config.pool]} if after == (config.pool == "mean") and config.final_norm else None
    if arch.maker == "Eva":
        if config.pool == "map" and config.prefix_tokens and not config.pool_prefix:
            return None  # its pooling reads all tokens
        norms = {"use_fc_norm": after and config.final_norm}
        norms |= {} if config.final_norm else {"use_post_transformer_norm": False}
        return {"global_pool": POOLS[config.pool]} | norms
    if config.pool == "map" and arch.has_silu:
        return None  # its pooling has the SiLU of the blocks
    if config.pool == "map" and config.pool_mlp_dim != (2 * config.mlp_dim if "halved" in arch.pieces else 0):
        return None
    arguments = {"global_pool": POOLS[config.pool], "fc_norm": after, "final_norm": config.final_norm}
    includes = config.pool == "map" and config.pool_prefix
    return arguments | ({"pool_include_prefix": includes} if arch.config.pool_prefix or includes else {})


def pool_num_heads(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    if config.pool != "map":
        return {}
    if arch.maker == "Eva":
        return {"attn_pool_num_heads": config.pool_num_heads or config.num_heads}
    return {} if config.pool_num_heads in (0, config.num_heads) else None


def pre_norm(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """timm's patch embedding has a bias if and only if no norm follows."""
    name = "use_pre_transformer_norm" if arch.maker == "Eva" else "pre_norm"
    return {name: config.pre_norm} if config.patch_bias != config.pre_norm else None


def rope(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    """Rotary positions of the same kind, with the arguments that timm's code uses."""
    theirs, ours = arch.config.rope, config.rope
    if theirs is None or ours is None:
        return None
    differing = {name: field for name, field in ROTARY.items() if getattr(theirs, field) != getattr(ours, field)}
    usable = {"temperature", "offset", "reference_grid"} if theirs.kind == "axial" else {"temperature"}
    if theirs.kind != ours.kind or theirs.columns_first != ours.columns_first or {*differing.values()} - usable:
        return None
    if theirs.reference_grid and not ours.reference_grid:
        return None
    values = {name: getattr(ours, setting) for name, setting in differing.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def pos_embed(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    return {"pos_embed": config.pos_embed} if config.pos_embed in ("learned", "factorized") else None


def grid_size(config: ViTConfig, arch: Architecture) -> dict[str, Any] | None:
    rows, columns = config.grid
    if rows != columns and config.pos_embed == "factorized" and config.numerics.square_positions:
        return None  # timm resizes both to the longer side, even at this grid
    return {"pos_embed_grid_size": list(config.grid)}


SHARED: dict[str, Argument] = {
    "image_size": img_size,
    "patch_size": same("patch_size", "patch_size"),
    "in_channels": same("in_chans", "in_channels"),
    "num_classes": same("num_classes", "num_classes"),
    "depth": same("depth", "depth"),
    "width": lambda config, arch: {"embed_dim": config.width} | mlp_ratio(config, arch),
    "mlp_dim": mlp_ratio,
    "num_heads": num_heads,
    "qkv_bias": qkv_bias,
    "layer_scale": init_values,
    "pool": global_pool,
    "norm_after_pool": global_pool,
}
POOLED_TOKENS: dict[str, Argument] = {
    **dict.fromkeys(("final_norm", "pool_prefix"), global_pool),
    "pool_num_heads": pool_num_heads,
    "pool_mlp_dim": pool_mlp_ratio,
    **dict.fromkeys(("cls_token", "reg_tokens", "cls_pos_embed"), prefix_tokens),
    **dict.fromkeys(("pre_norm", "patch_bias"), pre_norm),
}
ARGUMENTS: dict[str, dict[str, Argument]] = {
    "VisionTransformer": SHARED | POOLED_TOKENS | {"qk_norm": same("qk_norm", "qk_norm")},
    DISTILLED: SHARED,
    "Eva": SHARED | POOLED_TOKENS | {"rope": rope},
    "Beit": SHARED,
    "NaFlexVit": SHARED | POOLED_TOKENS | {"image_size": grid_size, "pos_embed": pos_embed},
}
"""Settings that arguments can change, by timm's class."""

INEXACT_COST, NAFLEX_COST = 100, 5
"""Cost, in arguments, of numerics that differ and no argument states, and of NaFlexVit for a model of one size."""
STEM_SETTINGS = ("width", "patch_size")  # settings that MobileCLIP's stem determines
NO_MAP_POOL = {"pool_num_heads": 0, "pool_mlp_dim": 0, "pool_prefix": False}
ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_tanh", "quick": "quick_gelu"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmChoice:
    """An architecture, and the arguments with which it is the model."""

    architecture: Architecture
    arguments: dict[str, Any]
    numerics: Numerics  # of timm's code with these arguments
    cost: int


def choose(config: ViTConfig, name: str = "", *, key_bias: bool = False) -> TimmChoice | list[str]:
    """The architecture with the fewest arguments, preferring `name`; or the reasons why there is none.

    `key_bias` says whether keys have a bias that changes the output.
    """
    results = {arch.name: fit_arguments(arch, config, key_bias=key_bias) for arch in architectures()}
    choices = [result for result in results.values() if isinstance(result, TimmChoice)]
    if choices:
        return min(choices, key=lambda choice: (choice.architecture.name != name, choice.cost))
    reasons = {name: result for name, result in results.items() if isinstance(result, list)}
    nearest = name if name in reasons else min(reasons, key=lambda name: len(reasons[name]))
    return [f"timm has no architecture of this shape; nearest is {nearest}, which has {', '.join(reasons[nearest])}"]


def fit_arguments(arch: Architecture, config: ViTConfig, *, key_bias: bool) -> TimmChoice | list[str]:
    """The arguments that turn an architecture into this model; or the settings in which it differs."""
    theirs, ours = architecture_settings(arch.name), comparable_settings(config, arch)
    arguments, others, known = dict[str, Any](), list[str](), ARGUMENTS[arch.maker]
    fixed = STEM_SETTINGS if config.stem and config.stem.style == "mobile_clip" else ()
    for name in (name for name in theirs if theirs[name] != ours[name]):
        added = known[name](config, arch) if name in known and name not in fixed else None
        if added is None:
            others.append(f"{name}={theirs[name]!r}, this model {ours[name]!r}")
        else:
            arguments |= added
    if key_bias and {"split_bias", "projections"} & arch.pieces and "key_bias" not in arch.pieces:
        others.append("no bias of keys")
    if others:
        return others
    # the numerics of timm's code, with arguments for what they can state
    numerics, wanted = arch.config.numerics, config.numerics
    has_gelu, is_naflex = config.mlp == "gelu", arch.maker == "NaFlexVit"
    if arch.maker not in ("Eva", "Beit") and wanted.gelu != numerics.gelu and has_gelu:
        arguments["act_layer"], numerics = ACTIVATIONS[wanted.gelu], numerics.replace(gelu=wanted.gelu)
    resizing = resize_arguments(wanted.position_resize)
    if is_naflex and wanted.position_resize != numerics.position_resize and resizing:
        changed = zip(RESIZING, resizing, resize_arguments(numerics.position_resize))
        arguments |= {name: value for name, value, usual in changed if value != usual}
        numerics = numerics.replace(position_resize=wanted.position_resize)
    if is_naflex and wanted.square_positions != numerics.square_positions:
        arguments["pos_embed_ar_preserving"] = wanted.square_positions
        numerics = numerics.replace(square_positions=wanted.square_positions)
    is_bilinear = wanted.position_resize == "bilinear_antialias"
    differences = (
        (has_gelu or config.pool == "map") and numerics.gelu != wanted.gelu,
        numerics.norm_eps != wanted.norm_eps,
        not is_naflex and (numerics.square_positions != wanted.square_positions or is_bilinear),
    )
    cost = len(arguments) + INEXACT_COST * sum(differences)
    is_flexible = wanted.square_positions or config.pos_embed == "factorized" or is_bilinear
    cost += NAFLEX_COST if is_naflex and not is_flexible else 0
    return TimmChoice(architecture=arch, arguments=arguments, numerics=numerics, cost=cost)


@cache
def architecture_settings(name: str) -> dict[str, Any]:
    """The comparable settings of an architecture itself."""
    arch = find_architecture(name)
    assert arch is not None
    return comparable_settings(arch.config, arch)


def comparable_settings(config: ViTConfig, arch: Architecture) -> dict[str, Any]:
    """Settings of a model without those that do not change it, or are written differently."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name in (*CHANGEABLE, "numerics", "trim"):
        del settings[name]
    is_naflex = arch.maker == "NaFlexVit"
    expanded = config.pos_embed in ("learned_2d", "sincos") or (config.pos_embed == "factorized" and not is_naflex)
    zeros = config.pos_embed == "none" and config.rope is None and arch.config.pos_embed == "learned"
    if expanded or zeros:
        settings["pos_embed"] = "learned"
    if settings["pos_embed"] != "learned" or not config.cls_token or is_naflex or arch.maker == DISTILLED:
        settings["cls_pos_embed"] = True
    settings |= {"pool_num_heads": config.pool_num_heads or config.num_heads} if config.pool == "map" else NO_MAP_POOL
    if (config.pool == "token" and not config.distillation) or not config.final_norm:
        settings["norm_after_pool"] = False
    if not config.layer_scale:
        settings["mlp_scale"] = True
    if not config.prefix_tokens:
        settings["pool_prefix"] = arch.config.pool_prefix and config.pool == "map"
    if config.stem is not None and config.stem.style == "hybrid":
        settings["stem"] = config.stem.replace(style="timm")
    if config.attn_dim == 2 * config.width:
        settings["attn_dim"] = "two branches"
    return settings


class TimmArchitecture(Timm):
    """A model written as one of timm's architectures, with all its settings in `config.json`."""

    choice: TimmChoice  # if there are no `reasons` why it cannot be written
    architecture: Architecture

    def __init__(self, config: ViTConfig, state: Tensors, known_as: str = "") -> None:
        self.timm_config = config
        if config.projection and not config.num_classes and not config.unit_features:
            # timm has CLIP's projection as the head, with a bias of zeros
            classes = config.representation_size
            self.timm_config = config.replace(num_classes=classes, representation_size=0, projection=False)
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
