"""The interface of a family of weights: its names, numerics, preprocessing, and the models it can express."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from vitruvian.config import (
    CHANGEABLE,
    IMAGENET_MEAN,
    IMAGENET_STD,
    ConvStyle,
    ModelMeta,
    Numerics,
    Preprocess,
    ResNetConfig,
    ViTConfig,
)
from vitruvian.errors import CheckpointError
from vitruvian.settings import Size
from vitruvian.text import package_table
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.tables import POSITIONS, Table, Tensors, join_positions, rename

ConfigT = TypeVar("ConfigT", ViTConfig, ResNetConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that a checkpoint states besides the shapes of its arrays; None if it does not."""

    numerics: Numerics
    num_heads: int | None = None
    depth: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # not determined by the arrays, from the named architecture
    stated: dict[str, Any] = field(default_factory=dict)  # the arrays must agree; None if the file does not state it
    image_size: Size | None = None
    norm_after_pool: bool = False
    fixed_positions: bool = False  # a file without a position array has sin-cos positions; otherwise it is incomplete
    labels: tuple[str, ...] | None = None
    known_as: str = ""  # the family's name for this model as "family:name"


class Family(Generic[ConfigT]):
    """One family of weights. Subclasses fill in tables and override the methods in which they differ."""

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    table: ClassVar[Table]
    suffixes: ClassVar[tuple[str, ...]] = ()  # file name endings for writing; empty for a folder
    stem_style: ClassVar[ConvStyle] = "hybrid"  # numerics of a ResNet stem with GroupNorm
    preprocess: ClassVar[dict[str, Any]] = {}  # settings of the preprocessing that all models need

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Whether the names in the checkpoint are this family's."""
        prefix, marks = self.prefix(checkpoint.tensors), self.table.marks
        return prefix is not None and (not marks or any(prefix + mark in checkpoint.tensors for mark in marks))

    def prefix(self, tensors: Tensors) -> str | None:
        return next((prefix for prefix in self.table.prefixes if prefix + self.table.anchor in tensors), None)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """Rename to the names of the table: without the prefix, older names replaced."""
        prefix = self.prefix(tensors) or ""
        outer = "module." if prefix.startswith("module.") else ""  # DistributedDataParallel's, on every name
        plain = {name.removeprefix(prefix).removeprefix(outer): tensor for name, tensor in tensors.items()}
        return rename(plain, self.table.renames)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Join arrays that some models store in parts, under the names of the table."""
        return tensors

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """The facts that the renamed arrays and the JSON files state."""
        return Facts(numerics=self.numerics)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ConfigT) -> Preprocess | None:
        """The preprocessing that the JSON files state, or None."""
        return None

    def default_preprocess(self, checkpoint: Checkpoint, config: ConfigT) -> Preprocess | None:
        """The preprocessing that all models of the family need; None if they differ."""
        return Preprocess(image_size=config.image_size, **self.preprocess)

    def doubt(self, checkpoint: Checkpoint, config: ConfigT) -> str:
        """A warning about something suspicious that is not an error, or ""."""
        return ""

    def obstacles(self, config: ConfigT) -> list[str]:
        """Reasons why a model of this shape cannot be written; empty if it can."""
        if self.table.name not in OBSTACLES:
            return ["files of this family can only be read"]
        return find_obstacles(config, self.table.name, self.name) if isinstance(config, ViTConfig) else []

    def prefix_rows(self, config: ViTConfig) -> int:
        """Rows of the position array before the patches."""
        return config.cls_token + config.distillation

    def has_position_array(self, config: ViTConfig) -> bool:
        """Whether a model is written with one array of positions for all tokens."""
        has_row = any(row.native == POSITIONS for row in self.table.rows)
        return has_row or config.pos_embed not in ("none", "relative_bias")

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        """Convert our position parameters to the family's: one array for all tokens, or none."""
        joined = join_positions(state, config, self.prefix_rows(config))
        if not self.has_position_array(config):
            del joined[POSITIONS]
        return joined

    def restore(self, native: Tensors, config: ConfigT) -> Tensors:
        """Rename arrays back to the parameters of the embedded description, if writing used one for another."""
        return native

    def rename_parameters(self, native: Tensors, config: ConfigT) -> Tensors:
        """Rename our arrays to the parameters in the table, if the family uses one for another."""
        return native

    def from_table_names(self, tensors: Tensors, config: ConfigT) -> Tensors:
        """Rename from the table's names to those of the file; reverses `to_table_names` and `join_arrays`."""
        return tensors

    def json_files(self, config: ConfigT, meta: ModelMeta) -> dict[str, Any]:
        """The JSON files of a written folder, by name; empty for a family that has none."""
        return {}

    def reader_preprocess(self, config: ConfigT, preprocess: Preprocess) -> Preprocess:
        """The preprocessing that another library uses for a model written with `preprocess`."""
        empty = Checkpoint(path=Path(), format="safetensors", tensors={})
        return self.default_preprocess(empty, config) or preprocess

    def expands_positions(self, config: ViTConfig) -> bool:
        """Whether positions of another kind are written as learned ones for one grid."""
        return config.pos_embed not in ("learned", "relative_bias") and not config.rope and config.attention != "mixer"

    def reader_config(self, config: ConfigT) -> ConfigT:
        """`config` with the numerics of the family's own implementation."""
        if not isinstance(config, ViTConfig):
            return config
        is_resnet = config.stem is not None and config.stem.style in ("hybrid", "timm")
        stem = config.stem.replace(style=self.stem_style) if config.stem and is_resnet else config.stem
        return config.replace(numerics=self.numerics, stem=stem)


def check_settings(stated: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
    """Raise if a setting in a file, unless None, differs from that of the arrays."""
    for name, value in stated.items():
        if value not in (None, actual[name]):
            raise CheckpointError(f"the settings say {name}={value}, the arrays have {actual[name]}")


def first_match(name: str, table: dict[str, str]) -> str | None:
    """Look a name up in a table of names and prefixes (ending in `.` or `/`)."""
    matches = (key for key in table if name == key or (key[-1] in "./" and name.startswith(key)))
    return next((table[key] for key in matches), None)


OBSTACLES = package_table("weights/families/obstacles.toml")
FREE_SETTINGS = {"image_size", "patch_size", "trim", "in_channels", "depth", "width", "mlp_dim", "num_heads"}
"""Settings that every model type of transformers supports with any value."""


def find_obstacles(config: ViTConfig, section: str, family: str = "", **fixed: Any) -> list[str]:
    """The reasons in a section of `obstacles.toml` that are true of a model; `fixed` adds to those of the section."""
    rules, default = OBSTACLES[section], ViTConfig()
    reasons = [reason for other in rules.get("include", ()) for reason in find_obstacles(config, other, family)]
    settings = {setting.name: getattr(config, setting.name) for setting in dataclasses.fields(config)}
    if "model" in rules:
        fixed, free = rules.get("fixed", {}) | fixed, {*FREE_SETTINGS, *CHANGEABLE, *rules.get("free", ()), "numerics"}
        for name in (name for name in settings if name not in free):
            expected = fixed.get(name, getattr(default, name))
            if settings[name] != expected:
                reasons.append(f"{rules['model']} has {name}={expected!r}, this model {settings[name]!r}")
    settings |= {
        "rgb": config.in_channels == 3,
        "square_image": config.image_size[0] == config.image_size[1],
        "square_grid": config.grid[0] == config.grid[1],
        "positions": config.pos_embed != "none",
        "odd_mlp": config.mlp_dim % config.width,
        "several_registers": config.reg_tokens > 1,
        "batch_norm_stem": config.stem is not None and config.stem.has_batch_norm,
    }
    for reason, conditions in rules.get("reasons", {}).items():
        for condition in conditions if isinstance(conditions, list) else [conditions]:
            if all(settings[n] in v if isinstance(v, list) else bool(settings[n]) == v for n, v in condition.items()):
                reasons.append(reason.format(family=family, **settings))
                break
    return reasons


def scaled_size(size: Size, shorter_side: int = 256) -> Size:
    """The resized image that evaluation recipes crop `size` from: of `shorter_side` for a crop of 224 pixels."""
    return size[0] * shorter_side // 224, size[1] * shorter_side // 224


def imagenet_preprocess(size: Size) -> Preprocess:
    """Shorter side 256, center crop 224 (or in proportion), bicubic, ImageNet mean and std."""
    crop = Preprocess(image_size=size, fit="crop", scaled_size=scaled_size(size), interpolation="bicubic")
    return crop.replace(mean=IMAGENET_MEAN, std=IMAGENET_STD)
