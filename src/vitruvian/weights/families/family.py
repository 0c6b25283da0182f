"""The interface of a family of weights: its names, numerics, preprocessing, and the models it can express."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vitruvian.catalog import imagenet_labels
from vitruvian.config import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    REGULARIZERS,
    ConvStyle,
    ModelConfig,
    Numerics,
    Preprocess,
    ViTConfig,
)
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.description import fingerprint
from vitruvian.weights.families.tables import POSITIONS, Table, Tensors, join_positions, rename


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts that a checkpoint states besides the shapes of its arrays; None if it does not."""

    numerics: Numerics
    num_heads: int | None = None
    depth: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that the arrays do not determine, from the architecture that the file names."""
    stated: dict[str, Any] = field(default_factory=dict)
    """Settings that the arrays determine too and must agree with; None if the file does not state one."""
    image_size: Size | None = None
    norm_after_pool: bool = False
    fixed_positions: bool = False
    """A file without a position array has sin-cos positions; otherwise such a file is incomplete."""
    stem_style: ConvStyle = "hybrid"
    labels: tuple[str, ...] | None = None


class Family(ABC):
    """One family of weights. Subclasses fill in tables and override the methods in which they differ."""

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    table: ClassVar[Table]
    anchor: ClassVar[str]
    """An array that every checkpoint of the family has; the text before it is the prefix of all names."""
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of names in other versions of the family's code, and the table's names for them."""
    ignored: ClassVar[dict[str, str]] = {}
    """Arrays that the model does not need, by name or by prefix (ending in `.` or `/`), and what they are."""
    refused: ClassVar[dict[str, str]] = {}
    """Parts of names of architectures that the file must state to be read, and what they are."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """File name endings for writing; empty for a folder."""

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Whether the names in the checkpoint are this family's."""
        return self.prefix(checkpoint.tensors) is not None

    def prefix(self, tensors: Tensors) -> str | None:
        return next((prefix for prefix in self.prefixes if prefix + self.anchor in tensors), None)

    def parse_settings(self, checkpoint: Checkpoint) -> Any:
        """Parse the JSON files once per load; the result is kept as `checkpoint.parsed`."""
        return None

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """Rename to the names of the table: without the prefix, older names replaced."""
        prefix = self.prefix(tensors) or ""
        outer = "module." if prefix.startswith("module.") else ""  # DistributedDataParallel's, on every name
        return rename({name.removeprefix(prefix).removeprefix(outer): t for name, t in tensors.items()}, self.renames)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Join arrays that some models store in parts, under the names of the table."""
        return tensors

    def refused_parts(self, checkpoint: Checkpoint) -> dict[str, str]:
        """`refused`, or nothing if the file states its architecture."""
        return self.refused

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """The facts that the renamed arrays and the JSON files state."""
        return Facts(numerics=self.numerics)

    def embedded_description(self, checkpoint: Checkpoint) -> Any:
        """The description that `save` embedded in the file, as JSON, or None.

        In a folder it is valid only while the JSON files written with it are unchanged.
        """
        description = checkpoint.embedded
        hashes = description.get("files", {}) if isinstance(description, dict) else {}
        if not isinstance(hashes, dict):
            return None
        changed = any(fingerprint(checkpoint.settings.get(name)) != value for name, value in hashes.items())
        return None if changed else description

    def default_labels(self, num_classes: int) -> tuple[str, ...] | None:
        """Class names if a file has none: published heads of 1000 classes are ImageNet-1k's."""
        return imagenet_labels() if num_classes == 1000 else None

    def stated_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """The preprocessing that the JSON files state, or None."""
        return None

    @abstractmethod
    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """The preprocessing that all models of the family need; None if they differ."""

    def known_as(self, checkpoint: Checkpoint) -> str:
        """The family's name for this model as "family:name", or "" if the files do not state it."""
        return ""

    def doubt(self, checkpoint: Checkpoint, config: ModelConfig) -> str:
        """A warning about something suspicious that is not an error, or ""."""
        return ""

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        """Reasons why a model of this shape cannot be written; none if it can."""
        yield "files of this family can only be read"

    def prefix_rows(self, config: ViTConfig) -> int:
        """Rows of the position array before the patches."""
        return config.cls_token + config.distillation

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        """Convert our position parameters to the family's: one array for all tokens, or none."""
        joined = join_positions(state, config, self.prefix_rows(config))
        has_row = any(row.native == POSITIONS for row in self.table.rows)
        if config.pos_embed in ("none", "relative_bias") and not has_row:
            del joined[POSITIONS]
        return joined

    def restore(self, native: Tensors, config: ModelConfig) -> Tensors:
        """Rename arrays back to the parameters of the embedded description, if writing used one for another."""
        return native

    def rename_parameters(self, native: Tensors, config: ModelConfig) -> Tensors:
        """Rename our arrays to the parameters in the table, if the family uses one for another."""
        return native

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Rename from the table's names to those of the file; reverses `to_table_names` and `join_arrays`."""
        return tensors

    def json_files(self, config: ModelConfig, labels: tuple[str, ...] | None, preprocess: Preprocess) -> dict[str, Any]:
        """The JSON files of a written folder, by name; empty for a family that has none."""
        return {}

    def reader_preprocess(self, config: ModelConfig, preprocess: Preprocess) -> Preprocess:
        """The preprocessing that another library uses for a model written with `preprocess`."""
        empty = Checkpoint(path=Path(), format="safetensors", tensors={})
        return self.default_preprocess(empty, config) or preprocess

    def expands_positions(self, config: ViTConfig) -> bool:
        """Whether positions of another kind are written as learned ones for one grid."""
        return config.pos_embed not in ("learned", "relative_bias") and config.rope is None

    def reader_config(self, config: ModelConfig) -> ModelConfig:
        """`config` with the numerics of the family's own implementation."""
        return config.replace(numerics=self.numerics) if isinstance(config, ViTConfig) else config


def first_match(name: str, table: dict[str, str]) -> str | None:
    """Look a name up in a table of names and prefixes (ending in `.` or `/`)."""
    for key, reason in table.items():
        if name == key or (key[-1] in "./" and name.startswith(key)):
            return reason
    return None


def vit_obstacles(
    config: ModelConfig, family: str, *, inner_norms: bool = False, paper_only: bool = False
) -> Iterator[str]:
    """Obstacles that foreign families share.

    `inner_norms` allows norms before and inside the blocks. `paper_only` is for families that have the paper's model
    only: a class token, one head, plain blocks.
    """
    if not isinstance(config, ViTConfig):
        yield f"{family} has Vision Transformers only, this is a ResNet"
        return
    norms = config.qk_norm or config.attn_norm or config.mlp_norm or config.pre_norm or config.patch_norm
    checks = {
        "no relative positions": config.pos_embed in ("relative", "relative_bias"),
        "no rotary positions": config.rope,
        "no norm after the pooling of two tokens": config.norm_after_pool and config.distillation,
        "pre-norm blocks only": config.block != "pre_norm",
        "no differential attention": config.attention != "softmax",
        "no LayerScale of attention alone": config.layer_scale and not config.mlp_scale,
        "LayerNorms only, one of them after the last block": config.norm != "layer" or not config.final_norm,
        "no norms before the blocks, or inside attention and MLP": norms and not inner_norms,
        "a bias in the patch embedding": not config.patch_bias and not config.pre_norm,
        "biases in every dense layer": not config.dense_bias,
        "no attention of another width": config.attn_dim,
        "no projection of features": config.projection,
        "no stem with BatchNorm": config.stem and config.stem.has_batch_norm,
        "no features of unit length (zero-shot head)": config.unit_features,
        "only a MAP head of the blocks' shape": config.pool_num_heads or config.pool_mlp_dim or config.pool_prefix,
    }
    if paper_only:
        checks |= {
            "no LayerScale": config.layer_scale,
            "no distillation token": config.distillation,
            "no register tokens": config.reg_tokens,
            "no attention pooling (MAP)": config.pool == "map",
            "no head on class token and mean concatenated": config.pool == "token_mean",
            "no gated MLP (SwiGLU)": config.mlp == "swiglu",
        }
    yield from (f"{family} has {what}" for what, is_present in checks.items() if is_present)


FREE_SETTINGS = frozenset({"image_size", "patch_size", "trim", "in_channels", "depth", "width", "mlp_dim", "num_heads"})
"""Settings that every model type of transformers supports with any value."""


def model_type_obstacles(
    config: ModelConfig, model_type: str, *, free: tuple[str, ...] = (), **fixed: Any
) -> Iterator[str]:
    """Obstacles of a model type with one architecture: settings that differ from `fixed`, or else from ViTConfig()."""
    if not isinstance(config, ViTConfig):
        yield f"{model_type} is a Vision Transformer, this is a ResNet"
        return
    default = ViTConfig()
    for name in (setting.name for setting in dataclasses.fields(config)):
        expected, actual = fixed.get(name, getattr(default, name)), getattr(config, name)
        if name not in {*FREE_SETTINGS, *REGULARIZERS, *free, "numerics"} and actual != expected:
            yield f"{model_type} has {name}={expected!r}, this model {actual!r}"


def scaled_crop(size: Size, numerator: int, denominator: int) -> Size:
    """`size * numerator / denominator`, rounded down: the resized image that evaluation recipes crop `size` from."""
    return size[0] * numerator // denominator, size[1] * numerator // denominator


def imagenet_preprocess(size: Size) -> Preprocess:
    """Shorter side 256, center crop 224 (or in proportion), bicubic, ImageNet mean and std."""
    return Preprocess(
        image_size=size,
        fit="crop",
        scaled_size=scaled_crop(size, 256, 224),
        interpolation="bicubic",
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
