"""What a family of weights has to say about itself; its file fills this in."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vitruvian.catalog import imagenet_labels
from vitruvian.config import REGULARIZERS, ConvStyle, ModelConfig, Numerics, Preprocess, ViTConfig
from vitruvian.settings import Size
from vitruvian.weights.description import fingerprint
from vitruvian.weights.families.positions import FLAT, join_positions
from vitruvian.weights.families.rules import Table, Tensors, rename
from vitruvian.weights.files import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a checkpoint says besides the shapes of its arrays; None where it is silent."""

    numerics: Numerics
    num_heads: int | None = None
    depth: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that arrays do not tell, from an architecture that the file states."""
    stated: dict[str, Any] = field(default_factory=dict)
    """Settings that the arrays tell too, and must agree with; None where the file is silent."""
    image_size: Size | None = None
    norm_after_pool: bool = False
    fixed_positions: bool = False
    """A file without a position array means sin-cos positions, not a broken file."""
    stem_style: ConvStyle = "hybrid"
    labels: tuple[str, ...] | None = None


class Family(ABC):
    """One family of weights: its names, its numerics, its evaluation view and what it can express."""

    name: ClassVar[str]
    numerics: ClassVar[Numerics]
    table: ClassVar[Table]
    anchor: ClassVar[str]
    """The array every checkpoint of the family has; what precedes it is the prefix of all names."""
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    renames: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Patterns of names that other versions of the family's code have, and what the table has in their place."""
    ignored: ClassVar[dict[str, str]] = {}
    """Names without a place in the model, or beginnings of names (ending in `.` or `/`), and what they are."""
    refused: ClassVar[dict[str, str]] = {}
    """Parts of names that belong to another architecture, or to one that the file must state, and what that is."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """File name endings it is written with; empty for a folder."""

    def claims(self, checkpoint: Checkpoint) -> bool:
        """Whether the names inside are this family's."""
        return self.prefix(checkpoint.tensors) is not None

    def prefix(self, tensors: Tensors) -> str | None:
        return next((prefix for prefix in self.prefixes if prefix + self.anchor in tensors), None)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        """The same arrays under the names of the table: without prefix, older names renamed."""
        prefix = self.prefix(tensors) or ""
        outer = "module." if prefix.startswith("module.") else ""  # DistributedDataParallel's, on every name
        bare = {name.removeprefix(prefix).removeprefix(outer): tensor for name, tensor in tensors.items()}
        return rename(bare, self.renames)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """The arrays under the names of the table, those that some models keep in pieces put together."""
        return tensors

    def refused_parts(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Parts of names that belong to architectures which the file would have to state, and what they are."""
        return self.refused

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """What the renamed arrays and the files beside them say."""
        return Facts(numerics=self.numerics)

    def carried(self, checkpoint: Checkpoint) -> Any:
        """The description a file carries from a conversion, as JSON; None if there is none that counts.

        In a folder it counts as long as nobody changed the JSON files it was written with.
        """
        carried = checkpoint.carried
        marks = carried.get("files", {}) if isinstance(carried, dict) else {}
        if not isinstance(marks, dict):
            return None
        changed = any(fingerprint(checkpoint.settings.get(name)) != mark for name, mark in marks.items())
        return None if changed else carried

    def default_labels(self, num_classes: int) -> tuple[str, ...] | None:
        """What the classes are called where a file does not say: published heads of 1000 classes are ImageNet-1k's."""
        return imagenet_labels() if num_classes == 1000 else None

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """The evaluation view that the files state; None where they are silent."""
        return None

    @abstractmethod
    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """The evaluation view that all its models ask for; None where they differ."""

    def known_as(self, checkpoint: Checkpoint) -> str:
        """What the family calls this model, after the family's name and a colon; empty where the files do not say."""
        return ""

    def doubt(self, checkpoint: Checkpoint, config: ModelConfig) -> str:
        """What the files do not contradict, but a reader should know; empty where there is nothing."""
        return ""

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        """Why a model of this shape cannot be written; nothing if it can."""
        yield "files of this family are only read"

    def prefix_rows(self, config: ViTConfig) -> int:
        """Rows of the position array before the patches."""
        return config.cls_token + config.distillation

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        """Our arrays with positions as the family keeps them: one array for all tokens, or none."""
        joined = join_positions(state, config, self.prefix_rows(config))
        if config.pos_embed in ("none", "relative_bias") and not any(row.native == FLAT for row in self.table.rows):
            del joined[FLAT]
        return joined

    def restore(self, native: Tensors, config: ModelConfig) -> Tensors:
        """Arrays under our names as a model that was written by us, with these settings, had them."""
        return native

    def rename_parameters(self, native: Tensors, config: ModelConfig) -> Tensors:
        """Our arrays under the names by which the table knows them, where a family uses one for another."""
        return native

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Arrays under the names of the table, renamed as in this model's file; reverses `to_table_names`."""
        return tensors

    def stated_files(self, config: ModelConfig, labels: tuple[str, ...] | None, view: Preprocess) -> dict[str, Any]:
        """The JSON files that state what arrays do not, by name; empty for a family that has none."""
        return {}

    def assumed_view(self, config: ModelConfig, view: Preprocess) -> Preprocess:
        """How a reader that sees only the family's own files would prepare images, where `view` was written."""
        nothing = Checkpoint(path=Path(), format="safetensors", tensors={})
        return self.usual_view(nothing, config) or view

    def writes_out(self, config: ViTConfig) -> bool:
        """Whether positions of another kind become the learned ones of one grid."""
        return config.pos_embed not in ("learned", "relative_bias") and config.rope is None

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        """`config` with the numerics that the family's own implementation would run it with."""
        return config.replace(numerics=self.numerics) if isinstance(config, ViTConfig) else config


def first_match(name: str, table: dict[str, str]) -> str | None:
    """What a table of names and beginnings of names says about a name."""
    for key, reason in table.items():
        if name == key or (key[-1] in "./" and name.startswith(key)):
            return reason
    return None


def vit_obstacles(config: ModelConfig, family: str, *, inner_norms: bool = False) -> Iterator[str]:
    """Obstacles that every foreign family shares; `inner_norms` where norms before and inside the blocks are none."""
    if not isinstance(config, ViTConfig):
        yield f"{family} holds Vision Transformers, this is a ResNet"
        return
    norms = config.qk_norm or config.attn_norm or config.mlp_norm or config.pre_norm or config.patch_norm
    parts = {
        "no relative positions": config.pos_embed in ("relative", "relative_bias"),
        "no rotary positions": config.rope,
        "no norm after the pooling of two tokens": config.norm_after_pool and config.distillation,
        "only blocks of the paper's order": config.block != "pre_norm",
        "no differential attention": config.attention != "softmax",
        "no LayerScale of attention alone": config.layer_scale and not config.mlp_scale,
        "only LayerNorms, one of them after the last block": config.norm != "layer" or not config.final_norm,
        "no norms before the blocks, or inside attention and MLP": norms and not inner_norms,
        "a bias in the patch embedding": not config.patch_bias and not config.pre_norm,
        "biases in every dense layer": not config.dense_bias,
        "no attention of another width": config.attn_dim,
        "no projection of features": config.projection,
        "no stem with BatchNorm": config.stem and config.stem.has_batch_norm,
        "no features of unit length (a head of words)": config.unit_features,
        "a MAP head of the blocks' shape alone": config.pool_num_heads or config.pool_mlp_dim or config.pool_prefix,
    }
    yield from (f"{family} has {what}" for what, present in parts.items() if present)


FREE = frozenset(
    {
        "image_size",
        "patch_size",
        "trim",
        "in_channels",
        "depth",
        "width",
        "mlp_dim",
        "num_heads",
        "numerics",
        *REGULARIZERS,
    }
)
"""Settings that every kind of a family of its own may have as it likes."""


def kind_obstacles(config: ModelConfig, kind: str, *, free: tuple[str, ...] = (), **fixed: Any) -> Iterator[str]:
    """Obstacles of a kind that is one shape: what is neither free nor as `fixed`, or else the paper's, says."""
    if not isinstance(config, ViTConfig):
        yield f"{kind} is a Vision Transformer, this is a ResNet"
        return
    paper = ViTConfig()
    for setting in dataclasses.fields(config):
        wanted, found = fixed.get(setting.name, getattr(paper, setting.name)), getattr(config, setting.name)
        if setting.name not in FREE and setting.name not in free and found != wanted:
            yield f"{kind} has {setting.name}={wanted!r}, this model {found!r}"


def plain_obstacles(config: ModelConfig, family: str) -> Iterator[str]:
    """Obstacles of a family that knows the paper's model only: a class token, one head, plain blocks."""
    yield from vit_obstacles(config, family)
    if not isinstance(config, ViTConfig):
        return
    checks = {
        "LayerScale": config.layer_scale,
        "distillation token": config.distillation,
        "register tokens": config.reg_tokens,
        "attention pooling (MAP)": config.pool == "map",
        "head on class token and mean side by side": config.pool == "token_mean",
        "gated MLP (SwiGLU)": config.mlp == "swiglu",
    }
    yield from (f"{family} has no {what}" for what, present in checks.items() if present)


def scaled_crop(size: Size, numerator: int, denominator: int) -> Size:
    """The size of which `denominator / numerator` is `size`, rounded down, as evaluation recipes give it."""
    return size[0] * numerator // denominator, size[1] * numerator // denominator
