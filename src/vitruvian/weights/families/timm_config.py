"""timm's architectures by name, the `config.json` of its folders, and the architecture and arguments to write.

`timm.json` has one row per architecture; `benchmarks/architectures.py table` generates it.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, get_args

from vitruvian.config import (
    CHANGEABLE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    TIMM_POOLS,
    Fit,
    Interpolation,
    ModelConfig,
    ModelMeta,
    Numerics,
    PositionResize,
    Preprocess,
    RopeConfig,
    ViTConfig,
)
from vitruvian.errors import CheckpointError
from vitruvian.settings import Size, as_size
from vitruvian.text import package_table

DISTILLED = "VisionTransformerDistilled"

SETTINGS = (
    "block", "pos_embed", "norm", "final_norm", "norm_after_pool", "pool", "pool_prefix", "pool_num_heads", "mlp_scale",
    "rope",
)  # fmt: skip
"""Settings of ViTConfig that the arrays of a timm model do not determine, besides its heads."""
NUMERIC_SETTINGS = ("gelu", "norm_eps", "position_resize", "square_positions")

NAMES = package_table("weights/families/timm.toml")
SHAPE_ARGUMENTS, HEADS, ROTARY = NAMES["shape"], NAMES["heads"], NAMES["rotary"]
CHOICES: dict[str, tuple[str, Mapping[Any, Any]]] = {
    "global_pool": ("pool", TIMM_POOLS),
    **{name: (choice["setting"], choice["values"]) for name, choice in NAMES["choices"].items()},
    **{name: (setting, {False: False, True: True}) for name, setting in NAMES["switches"].items()},
}
"""Arguments with a fixed set of values: our setting, and its value for each of theirs."""

RESIZING = ("pos_embed_interp_mode", "pos_embed_antialias", "pos_embed_align_corners")
RESIZE_METHODS: dict[PositionResize, tuple[Any, ...]] = {
    "bicubic_antialias": ("bicubic", True, False),
    "bicubic": ("bicubic", False, False),
    "bicubic_aligned": ("bicubic", False, True),
    "bilinear_antialias": ("bilinear", True, False),
    "bilinear": ("bilinear", False, False),
    "zoom": ("bilinear", False, True),
}
"""How positions of NaFlexVit follow another grid: the values of the arguments in `RESIZING`."""

HARMLESS = re.compile(
    r"img_size|qkv_fused|(\w+_)?drop_rate|drop_path_rate|dynamic_img_\w+|weight_init|fix_init|head_init_scale"
    r"|pretrained\w*|num_kv_heads|swiglu_align_to|attn_pool_mlp_ratio|pos_embed_grid_size|scriptable|exportable|checkpoint_path|use_naflex"
)
"""Arguments that change nothing but arrays, or matter in training only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One of timm's architectures, as published."""

    name: str
    maker: str  # timm's class
    config: ViTConfig
    pieces: frozenset[str]  # arrays that it stores in other parts than the table of names (see timm_layout)
    fc_norm: bool | None = None
    """Where the last norm is at every pooling (True: after it); None if it follows the mean only."""

    @property
    def branches(self) -> int:
        """Number of parallel attentions and MLPs per block; we join them into one with the heads of all."""
        return 2 if "branches" in self.pieces else 1

    @property
    def has_silu(self) -> bool:
        """Whether `act_layer` is SiLU, which timm then also uses in the MLP of attention pooling."""
        return self.maker == "VisionTransformer" and self.config.mlp == "swiglu"

    def settings(self) -> dict[str, Any]:
        """The settings that arrays do not determine, including numerics; heads are those of one branch."""
        numerics = {name: getattr(self.config.numerics, name) for name in NUMERIC_SETTINGS}
        settings = {name: getattr(self.config, name) for name in SETTINGS}
        return {"num_heads": self.config.num_heads // self.branches} | settings | numerics


@cache
def rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(Path(__file__).with_name("timm.json").read_text(encoding="utf-8"))}


@cache
def find_architecture(name: str) -> Architecture | None:
    row = rows().get(name)
    if row is None or "unsupported" in row:
        return None
    config, pieces = ViTConfig.from_json(row["settings"]), frozenset(row["pieces"])
    return Architecture(name=name, maker=row["class"], config=config, pieces=pieces, fc_norm=row.get("fc_norm"))


@cache
def architectures() -> tuple[Architecture, ...]:
    return tuple(known for name in rows() if (known := find_architecture(name)))


PREPROCESS_KEYS = frozenset({"input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std"})


@dataclass(frozen=True, kw_only=True, slots=True)
class TimmConfig:
    """A parsed `config.json`."""

    name: str  # of the architecture, without its tag; empty if not stated
    architecture: Architecture | None
    settings: dict[str, Any] | None = None  # which the arrays do not determine; None without a known architecture
    model_args: dict[str, Any]  # without nulls
    null_args: frozenset[str]
    global_pool: Any
    num_classes: Any
    pretrained_cfg: dict[str, Any]
    labels: tuple[str, ...] | None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Parse the content of `config.json`, or {} without it; raises CheckpointError for unsupported arguments."""
        stated = data.get("architecture")
        name = stated.split(".")[0] if isinstance(stated, str) else ""
        architecture = find_architecture(name)
        if architecture is None and name in rows():
            raise CheckpointError(f"{name} has a part that we do not support: {rows()[name]['unsupported']}")
        arguments = data.get("model_args") or {}
        if not isinstance(arguments, dict):
            if architecture:
                raise CheckpointError("config.json: model_args is not an object")
            arguments = {}
        # older versions of timm wrote the keys of pretrained_cfg at the top level
        flat = data if "architecture" in data and data.keys() & PREPROCESS_KEYS else {}
        cfg = data.get("pretrained_cfg", flat)
        cfg = dict(cfg) if isinstance(cfg, Mapping) else {}
        names = (data.get("label_names"), cfg.get("label_names"), cfg.get("labels"))
        config = cls(
            name=name,
            architecture=architecture,
            model_args={key: value for key, value in arguments.items() if value is not None},
            null_args=frozenset(key for key, value in arguments.items() if value is None),
            global_pool=data.get("global_pool"),
            num_classes=data.get("num_classes"),
            pretrained_cfg=cfg,
            labels=next((tuple(map(str, labels)) for labels in names if isinstance(labels, list)), None),
        )
        return replace(config, settings=combine_settings(architecture, config)) if architecture else config

    @property
    def input_size(self) -> tuple[int, Size] | None:
        """Channels, and rows and columns, of the input as `pretrained_cfg` states them."""
        size = self.pretrained_cfg.get("input_size")
        if size is None:
            return None
        if not isinstance(size, list) or len(size) != 3 or not all(type(side) is int and side > 0 for side in size):
            raise CheckpointError(f"config.json: input_size {size!r} is not [channels, rows, columns]")
        return size[0], (size[1], size[2])

    @property
    def image_size(self) -> Size | None:
        if self.model_args.get("img_size"):
            return as_size(self.model_args["img_size"])
        return self.input_size and self.input_size[1]

    @property
    def in_channels(self) -> int:
        return self.model_args.get("in_chans") or (self.input_size[0] if self.input_size else 3)

    def preprocess(self, size: Size) -> Preprocess | None:
        return read_preprocess(self.pretrained_cfg, size) if self.pretrained_cfg else None

    def check_null_arguments(self) -> None:
        """Raise for a null argument unless it is harmless, or the arrays determine the setting."""
        stated = self.null_args - {"act_layer", *SHAPE_ARGUMENTS}
        unknown = sorted(name for name in stated if not HARMLESS.fullmatch(name))
        if unknown:
            raise CheckpointError(f"config.json: model_args {unknown[0]}=None is not supported")


def combine_settings(architecture: Architecture, config: TimmConfig) -> dict[str, Any]:
    """The architecture's settings with the changes of `global_pool` and `model_args`."""
    config.check_null_arguments()
    changes: dict[str, Any] = {}
    if config.global_pool is not None:
        changes["pool"] = our_value("global_pool", config.global_pool)
    for name, value in config.model_args.items():
        if name in CHOICES:
            changes[CHOICES[name][0]] = our_value(name, value)
        elif name in HEADS and isinstance(value, int):
            changes[HEADS[name]] = value
        elif name in ROTARY:
            changes["rope"] = changes.get("rope", {}) | {ROTARY[name]: value}
        elif name in RESIZING and architecture.maker == "NaFlexVit":
            changes["position_resize"] = resize_method(architecture, config.model_args)
        elif name not in SHAPE_ARGUMENTS and not HARMLESS.fullmatch(name):
            raise CheckpointError(f"config.json: model_args {name}={value!r} is not supported")
    # nulls that timm drops when it creates a model, but passes on when it reads the folder again
    ambiguous = {"act_layer"} if architecture.config.numerics.gelu != "erf" else set()
    ambiguous |= {"fc_norm", "use_fc_norm"} if architecture.fc_norm is not None else set()
    if names := sorted(config.null_args & ambiguous):
        what = f"config.json: model_args {names[0]}=None may mean the architecture's value or timm's default"
        raise CheckpointError(what, hint="state a value, or leave it out")
    known = architecture.settings()
    settings = known | changes
    adds_map_pool = settings["pool"] == "map" != known["pool"]
    if architecture.has_silu and ("gelu" in changes or adds_map_pool):
        raise CheckpointError(
            f"config.json: {'global_pool' if adds_map_pool else 'act_layer'} gives {architecture.name}, whose MLPs are "
            "gated by SiLU, another activation, which is not supported"
        )
    if "rope" in changes:
        if known["rope"] is None:
            reason = f"states rotary positions, which {architecture.name} does not have"
            raise CheckpointError(f"config.json: model_args {reason}")
        rope, changed = known["rope"], changes["rope"]
        if changed.get("half", rope.half) != rope.half:  # timm then rotates halves by angles laid out for pairs
            raise CheckpointError("config.json: changing rope_rotate_half in model_args is not supported")
        if rope.kind == "normalized" and changed.get("offset"):
            raise CheckpointError(
                f"config.json: model_args rope_grid_offset={changed['offset']!r} is not supported for rotary positions "
                "normalized to the image (DINOv3)"
            )
        used = {name: value for name, value in changed.items() if name not in NAMES["ignored_rotary"][rope.kind]}
        settings["rope"] = RopeConfig.from_json(rope.to_json() | used)
    if settings["pool"] != known["pool"]:  # the norm follows the mean, unless the architecture fixes its place
        fixed = architecture.fc_norm
        settings["norm_after_pool"] = settings["pool"] == "mean" if fixed is None else fixed
    if settings["pool"] != "map":
        settings["pool_num_heads"] = 0
    has_prefix = settings["pool_prefix"] and (architecture.maker != "Eva" or "pool_prefix" in changes)
    if has_prefix and settings["pool"] == "mean":  # Eva's mean never includes it
        raise CheckpointError("config.json: pool_include_prefix with a mean of all tokens is not supported")
    return settings


def resize_method(architecture: Architecture, arguments: Mapping[str, Any]) -> PositionResize:
    """How positions follow another grid: the architecture's way with the changes of `arguments`."""
    known = dict(zip(RESIZING, RESIZE_METHODS[architecture.config.numerics.position_resize]))
    changed = known | {name: arguments[name] for name in RESIZING if name in arguments}
    method = next((name for name, values in RESIZE_METHODS.items() if list(values) == list(changed.values())), None)
    if method is None:
        stated = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        raise CheckpointError(f"config.json: model_args {stated} are not supported")
    return method


def our_value(name: str, value: Any) -> Any:
    table = CHOICES[name][1]
    if not isinstance(value, str | bool) or value not in table:
        raise CheckpointError(f"config.json: {name}={value!r} is not one of {', '.join(map(repr, table))}")
    return table[value]


INTERPOLATIONS = {"area": "box"}  # our names for Pillow's filters -> timm's, where they differ


def read_preprocess(cfg: dict[str, Any], size: Size) -> Preprocess:
    theirs = cfg.get("interpolation") or "bicubic"
    interpolation = next((ours for ours, name in INTERPOLATIONS.items() if name == theirs), theirs)
    if interpolation not in get_args(Interpolation):
        raise CheckpointError(f"config.json: unknown interpolation {interpolation!r}")
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise CheckpointError(f"config.json: crop_mode {mode!r} is not 'center' or 'squash'")
    try:
        preprocess = crop_preprocess(size, float(cfg.get("crop_pct") or 0.875), squash=mode == "squash")
        default = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
        mean, std = (tuple(float(x) for x in cfg.get(key) or default[key]) for key in default)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: pretrained_cfg cannot be read: {error}") from error
    return preprocess.replace(interpolation=interpolation, mean=mean, std=std)


def crop_preprocess(size: Size, crop_pct: float, *, squash: bool = False) -> Preprocess:
    """Bicubic resize to `size / crop_pct`, then a center crop."""
    if squash and crop_pct == 1.0:
        return Preprocess(image_size=size, interpolation="bicubic")
    scaled = int(size[0] / crop_pct), int(size[1] / crop_pct)
    fit: Fit = "squash" if squash else "crop"
    return Preprocess(image_size=size, fit=fit, scaled_size=scaled, interpolation="bicubic")


def write_preprocess(preprocess: Preprocess, config: ModelConfig) -> dict[str, Any]:
    """The keys of `pretrained_cfg` for our preprocessing; settings without a key are left out."""
    settings: dict[str, Any] = {"input_size": [config.in_channels, *config.image_size]}
    if not preprocess.stated:
        return settings
    return settings | {
        "interpolation": INTERPOLATIONS.get(preprocess.interpolation, preprocess.interpolation),
        "crop_pct": crop_pct(preprocess.image_size, preprocess.scaled_size or preprocess.image_size),
        "crop_mode": "center" if preprocess.fit == "crop" else "squash",
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
    }


def crop_pct(size: Size, scaled: Size) -> float:
    """The shortest decimal fraction from which timm computes the scaled size."""
    for digits in range(1, 7):
        fraction = math.floor(size[0] / scaled[0] * 10**digits) / 10**digits
        if fraction and all(int(side / fraction) == expected for side, expected in zip(size, scaled)):
            return fraction
    return size[0] / (scaled[0] + 0.5)


def write_config(name: str, config: ModelConfig, meta: ModelMeta, classifier: str | list[str]) -> dict[str, Any]:
    """`config.json` as timm saves it for the Hub."""
    pretrained_cfg = {"custom_load": False, "num_classes": config.num_classes, "classifier": classifier}
    settings: dict[str, Any] = {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.feature_width,
        "pretrained_cfg": pretrained_cfg | write_preprocess(meta.preprocess, config),
    }
    return settings | ({"label_names": list(meta.labels)} if meta.labels else {})


# The architecture that a model is written as, and its arguments (`model_args`).

POOLS = {"token": "token", "mean": "avg", "map": "map"}


def ratio(hidden: int, width: int) -> float:
    """A number whose product with `width`, rounded down, is `hidden`."""
    exact = hidden / width
    return exact if int(width * exact) == hidden else (hidden + 0.5) / width


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


def arguments_for(config: ViTConfig, arch: Architecture) -> dict[str, dict[str, Any]]:
    """The arguments that give an architecture the settings of `config`, by setting; others cannot be changed."""
    maker, has_map, (rows, columns) = arch.maker, config.pool == "map", config.image_size
    is_eva, is_naflex = maker == "Eva", maker == "NaFlexVit"
    hidden, pooling = config.mlp_dim // arch.branches * (2 if "halved" in arch.pieces else 1), global_pool(config, arch)
    pool_ratio = {"attn_pool_mlp_ratio": ratio(config.pool_mlp_dim or config.mlp_dim, config.width)} if is_eva else None
    mlp = {"mlp_ratio": ratio(hidden, config.width)} | ({"swiglu_align_to": 1} if "aligned" in arch.pieces else {})
    mlp |= (pool_ratio or {}) if has_map else {}
    arguments: dict[str, dict[str, Any] | None] = {
        "image_size": {"img_size": rows if rows == columns else [rows, columns]},
        "patch_size": {"patch_size": config.patch_size},
        "in_channels": {"in_chans": config.in_channels},
        "num_classes": {"num_classes": config.num_classes},
        "depth": {"depth": config.depth},
        "width": {"embed_dim": config.width} | mlp,
        "mlp_dim": mlp,
        "num_heads": {"num_heads": config.num_heads // arch.branches},
        "qkv_bias": {"qkv_bias": config.qkv_bias},
        "layer_scale": {"init_values": 1e-5 if config.layer_scale else 0.0},
        **dict.fromkeys(("pool", "norm_after_pool"), pooling),
    }
    refused = {
        # timm reads the biases as those of a square
        "image_size": rows != columns and config.pos_embed == "relative_bias",
        "num_heads": config.num_heads % arch.branches,
        # Eva and Beit store it in parts that the table does not have for this architecture
        "qkv_bias": config.qkv_bias and maker in ("Eva", "Beit"),
        # Eva multiplies by zeros where others have none; post-norm blocks never have one
        "layer_scale": config.block == "res_post_norm" or (is_eva and not config.layer_scale),
    }
    if maker not in (DISTILLED, "Beit"):
        tokens = {"class_token": config.cls_token, "num_reg_tokens" if is_eva else "reg_tokens": config.reg_tokens}
        tokens |= {} if is_naflex else {"no_embed_class": not (config.cls_token and config.cls_pos_embed)}
        # timm's patch embedding has a bias if and only if no norm follows
        norm = None
        if config.patch_bias != config.pre_norm:
            norm = {"use_pre_transformer_norm" if is_eva else "pre_norm": config.pre_norm}
        heads = {"attn_pool_num_heads": config.pool_num_heads or config.num_heads}
        arguments |= {
            **dict.fromkeys(("final_norm", "pool_prefix"), pooling),
            **dict.fromkeys(("cls_token", "reg_tokens", "cls_pos_embed"), None if config.distillation else tokens),
            **dict.fromkeys(("pre_norm", "patch_bias"), norm),
            "pool_num_heads": heads if is_eva and has_map else {},
            "pool_mlp_dim": pool_ratio,
        }
        refused["pool_num_heads"] = not is_eva and has_map and config.pool_num_heads not in (0, config.num_heads)
    if maker == "VisionTransformer":
        arguments["qk_norm"] = {"qk_norm": config.qk_norm}
    elif is_eva:
        arguments["rope"] = rope(config, arch)
    elif is_naflex:
        arguments |= {
            "image_size": {"pos_embed_grid_size": list(config.grid)},
            "pos_embed": {"pos_embed": config.pos_embed},
        }
        refused["pos_embed"] = config.pos_embed not in ("learned", "factorized")
        # timm resizes factors to the longer side, even at this grid
        is_square = config.grid[0] == config.grid[1] or not config.numerics.square_positions
        refused["image_size"] = config.pos_embed == "factorized" and not is_square
    return {name: added for name, added in arguments.items() if added is not None and not refused.get(name)}


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
    """The arguments that turn an architecture into this model, or the differences that no argument can express."""
    theirs, ours = comparable_settings(arch.config, arch), comparable_settings(config, arch)
    arguments, others, known = dict[str, Any](), list[str](), arguments_for(config, arch)
    fixed = STEM_SETTINGS if config.stem and config.stem.style == "mobile_clip" else ()
    for name in (name for name in theirs if theirs[name] != ours[name]):
        if name in known and name not in fixed:
            arguments |= known[name]
        else:
            others.append(f"{name}={theirs[name]!r}, this model {ours[name]!r}")
    if key_bias and {"split_bias", "projections"} & arch.pieces and "key_bias" not in arch.pieces:
        others.append("no bias of keys")
    if others:
        return others
    # the numerics of timm's code, with arguments for what they can state
    numerics, wanted = arch.config.numerics, config.numerics
    has_gelu, is_naflex = config.mlp == "gelu", arch.maker == "NaFlexVit"
    if arch.maker not in ("Eva", "Beit") and wanted.gelu != numerics.gelu and has_gelu:
        arguments["act_layer"], numerics = ACTIVATIONS[wanted.gelu], numerics.replace(gelu=wanted.gelu)
    resizing = RESIZE_METHODS.get(wanted.position_resize, ())
    if is_naflex and wanted.position_resize != numerics.position_resize and resizing:
        changed = zip(RESIZING, resizing, RESIZE_METHODS[numerics.position_resize])
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
def comparable_settings(config: ViTConfig, arch: Architecture) -> dict[str, Any]:
    """The settings to compare with an architecture's, in timm's terms, without those that make no difference here."""
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
