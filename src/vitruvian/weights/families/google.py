"""Google's `.npz`: the paper's own release, with its hybrids, and big_vision, with its poolings and positions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from vitruvian.config import GOOGLE_NUMERICS, ModelConfig, Preprocess, ViTConfig
from vitruvian.weights.families.family import Facts, Family, plain_obstacles, scaled_crop
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import (
    CONV,
    DENSE,
    HEADS_BIAS,
    HEADS_IN,
    HEADS_OUT,
    SAME,
    VECTOR,
    Kind,
    Row,
    Table,
    Tensors,
    rename,
)
from vitruvian.weights.files import Checkpoint

BLOCK = "Transformer/encoderblock_{i}"
UNIT = "block{S}/unit{U}"


def layer(native: str, foreign: str, kind: Kind = DENSE) -> tuple[Row, Row]:
    """Rows for a layer whose weight Flax calls `kernel`."""
    return Row(f"{native}.weight", (f"{foreign}/kernel",), kind), Row(f"{native}.bias", (f"{foreign}/bias",))


def norm(native: str, foreign: str, kind: Kind = SAME) -> tuple[Row, Row]:
    return Row(f"{native}.weight", (f"{foreign}/scale",), kind), Row(f"{native}.bias", (f"{foreign}/bias",), kind)


def attention(native: str, foreign: str, parts: tuple[str, ...]) -> tuple[Row, Row]:
    """Rows for projections into heads, several of which we keep as one."""
    kernels, biases = [tuple(f"{foreign}/{part}/{name}" for part in parts) for name in ("kernel", "bias")]
    return Row(f"{native}.weight", kernels, HEADS_IN), Row(f"{native}.bias", biases, HEADS_BIAS)


def attention_out(native: str, foreign: str) -> tuple[Row, Row]:
    return Row(f"{native}.weight", (f"{foreign}/out/kernel",), HEADS_OUT), Row(
        f"{native}.bias", (f"{foreign}/out/bias",)
    )


def block_rows(first_norm: str, attend: str, second_norm: str, mlp: str) -> tuple[Row, ...]:
    """Rows of one encoder block, under the module names of one generation of the code."""
    return (
        *norm("blocks.{i}.norm1", f"{BLOCK}/{first_norm}"),
        *attention("blocks.{i}.attn.qkv", f"{BLOCK}/{attend}", ("query", "key", "value")),
        *attention_out("blocks.{i}.attn.proj", f"{BLOCK}/{attend}"),
        *norm("blocks.{i}.norm2", f"{BLOCK}/{second_norm}"),
        *layer("blocks.{i}.mlp.fc1", f"{BLOCK}/{mlp}/Dense_0"),
        *layer("blocks.{i}.mlp.fc2", f"{BLOCK}/{mlp}/Dense_1"),
    )


SHARED_ROWS = (
    *layer("embed.patch", "embedding", CONV),
    Row("embed.cls_token", ("cls",)),
    *norm("norm", "Transformer/encoder_norm"),
    *layer("pre_logits", "pre_logits"),
    *layer("head", "head"),
)

STEM_ROWS = (
    Row("embed.stem.root.weight", ("conv_root/kernel",), CONV),
    *norm("embed.stem.root_norm", "gn_root", VECTOR),
    *(Row(f"embed.stem.stages.{{s}}.{{u}}.conv{n}.weight", (f"{UNIT}/conv{n}/kernel",), CONV) for n in (1, 2, 3)),
    *(row for n in (1, 2, 3) for row in norm(f"embed.stem.stages.{{s}}.{{u}}.norm{n}", f"{UNIT}/gn{n}", VECTOR)),
    Row("embed.stem.stages.{s}.{u}.shortcut.weight", (f"{UNIT}/conv_proj/kernel",), CONV),
    *norm("embed.stem.stages.{s}.{u}.shortcut_norm", f"{UNIT}/gn_proj", VECTOR),
)

# The release's files number modules in one sequence; later code counts each sort of module by itself.
LATER_NAMES = (
    ("/MultiHeadDotProductAttention_0/", "/MultiHeadDotProductAttention_1/"),
    ("/LayerNorm_1/", "/LayerNorm_2/"),
    ("/MlpBlock_0/", "/MlpBlock_3/"),
)

IGNORED = {
    "opt/state/": "optimizer state",
    "params/txt/": "text tower",
    "params/t": "temperature of the image-text loss",
    "params/b": "bias of the image-text loss",
}


class Google(Family):
    """`.npz` with tanh GELU, eps 1e-6 and positions resampled with aligned corners."""

    name = "google"
    numerics = GOOGLE_NUMERICS
    anchor = "embedding/kernel"
    prefixes = ("", "opt/target/", "params/img/", "params/")
    ignored = IGNORED
    suffixes = (".npz",)
    table = Table(
        rows=(
            *SHARED_ROWS,
            Row(FLAT, ("Transformer/posembed_input/pos_embedding",)),
            *block_rows("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
            *STEM_ROWS,
        ),
        block=r"Transformer/encoderblock_(\d+)/",
        unit=r"block(\d+)/unit(\d+)/",
        first_unit=1,
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        prefix = self.prefix(checkpoint.tensors)
        marks = ("Transformer/posembed_input/pos_embedding", "conv_root/kernel")
        return prefix is not None and any(prefix + mark in checkpoint.tensors for mark in marks)

    def to_table_names(self, tensors: Tensors) -> Tensors:
        tensors = super().to_table_names(tensors)
        later = any("/MultiHeadDotProductAttention_0/" in name for name in tensors)
        return rename(tensors, LATER_NAMES) if later else tensors

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        return Facts(numerics=self.numerics, num_heads=heads_in(tensors))

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, antialias=False)

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from plain_obstacles(config, "google")
        if not isinstance(config, ViTConfig):
            return
        if config.pool == "mean" and config.norm_after_pool:
            yield "google normalizes every token before the mean, not the mean"
        if config.pool == "mean" and config.cls_token:
            yield "google has no class token where the mean of the patches is read"
        if not config.qkv_bias:
            yield "google's query, key and value always have a bias"

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        assert isinstance(config, ViTConfig)
        stem = config.stem and config.stem.replace(style="hybrid")
        return config.replace(numerics=self.numerics, stem=stem)


def heads_in(tensors: Tensors) -> int | None:
    """The number of heads, which Flax keeps as an axis of every query kernel (D, H, d)."""
    pattern = re.compile(r"Transformer/encoderblock_\d+/MultiHeadDotProductAttention_\d/query/kernel")
    return next((t.shape[1] for name, t in tensors.items() if pattern.fullmatch(name) and t.dim() == 3), None)


POOL_ATTENTION = "MAPHead_0/MultiHeadDotProductAttention_0"


class BigVision(Family):
    """`.npz` with the paper release's numerics; a position row for the class token is added to it."""

    name = "big_vision"
    numerics = GOOGLE_NUMERICS
    anchor = "embedding/kernel"
    prefixes = ("", "opt/target/", "params/img/", "params/")
    renames = (
        (r"^Transformer/pos_embedding$", r"pos_embedding"),
        # Attention pooling stood at the top level while ViT-G was developed.
        (r"^(probe$|(?:MlpBlock_0|MultiHeadDotProductAttention_0|LayerNorm_0)/)", r"MAPHead_0/\1"),
    )
    ignored = IGNORED
    table = Table(
        rows=(
            *SHARED_ROWS,
            Row(FLAT, ("pos_embedding",)),
            *block_rows("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
            Row("attn_pool.probe", ("MAPHead_0/probe",)),
            *attention("attn_pool.q", POOL_ATTENTION, ("query",)),
            *attention("attn_pool.kv", POOL_ATTENTION, ("key", "value")),
            *attention_out("attn_pool.proj", POOL_ATTENTION),
            *norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
            *layer("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
            *layer("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
        ),
        block=r"Transformer/encoderblock_(\d+)/",
    )

    def to_table_names(self, tensors: Tensors) -> Tensors:
        return unstack(super().to_table_names(tensors))

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        kernel, positions = tensors[self.anchor], tensors.get("pos_embedding")
        patches = (kernel.shape[0], positions.shape[-2]) if positions is not None and positions.dim() > 1 else None
        size = TRIMMED_SIGLIP.get(patches) if patches and has_text(checkpoint) else None
        return Facts(numerics=self.numerics, num_heads=heads_in(tensors), fixed_positions=True, image_size=size)

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        size = config.image_size
        if has_text(checkpoint):  # SigLIP: `resize(N)|value_range(-1, 1)`
            return Preprocess(image_size=size, antialias=False)
        return Preprocess(image_size=size, fit="crop", scaled_size=scaled_crop(size, 256, 224), interpolation="area")


TRIMMED_SIGLIP = {(14, 27 * 27): (384, 384)}
"""By patch size and number of patches: So400m/14 is fed 384 pixels, of which its convolution leaves out the last 6."""


def has_text(checkpoint: Checkpoint) -> bool:
    """Whether a text tower lies beside the image tower, as in SigLIP."""
    return any(name.startswith("params/txt/") for name in checkpoint.tensors)


def unstack(tensors: Tensors) -> Tensors:
    """Blocks that `scan` stacked on axis 0 under `encoderblock/`, one by one."""
    stacked = "Transformer/encoderblock/"
    apart: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(stacked) or not tensor.dim():
            apart[name] = tensor
            continue
        for i, part in enumerate(tensor):
            apart[f"Transformer/encoderblock_{i}/{name.removeprefix(stacked)}"] = part
    return apart
