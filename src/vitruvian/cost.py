"""Parameters and multiply-adds of a model, computed from its config alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from vitruvian.config import ROOT_CHANNELS, ModelConfig, ResNetConfig, StemConfig, ViTConfig
from vitruvian.settings import Size, as_size

TRAINING_PASSES = 3
"""Cost of a training step in forward passes; the backward pass computes two products for each of the forward pass."""


def parameters(config: ModelConfig) -> int:
    """Number of parameters."""
    if isinstance(config, ResNetConfig):
        convs = sum(k * k * i * o for k, i, o, _ in _convs(config.stages, config.width, config.in_channels))
        norms = sum(2 * (inputs + 2 * inner) for inputs, inner, _, _ in _units(config.stages, config.width))
        return convs + norms + 2 * config.feature_width + _dense(config.feature_width, config.num_classes)
    D, patches = config.width, config.grid[0] * config.grid[1]
    count = config.prefix_tokens * D + config.prefix_pos_embeds * D
    sides = sum(config.grid)
    tables = {"learned": patches * D, "learned_2d": sides * (D // 2), "factorized": sides * D}
    count += tables.get(config.pos_embed, 0)
    channels = config.stem.out_channels if config.stem else config.in_channels
    count += _dense(channels * config.patch_size**2, D, config.patch_bias)
    if config.stem:
        count += sum(k * k * i * o + 2 * o for k, i, o, _ in _stem_convs(config))
        count -= ROOT_CHANNELS * config.stem.is_plain  # a bias instead of a norm
    count += config.depth * _block_parameters(config, patches + config.prefix_tokens)
    count += (config.patch_norm + config.pre_norm + config.final_norm) * _norm(config, D)
    if config.pool == "map":
        M = config.pool_mlp_dim or config.mlp_dim
        count += D + 4 * _dense(D, D) + _norm(config, D) + _dense(D, M) + _dense(M, D)
    if config.representation_size:
        count += _dense(config.pooled_width, config.representation_size, not config.projection)
    return count + (1 + config.distillation) * _dense(config.feature_width, config.num_classes)


def multiply_adds(config: ModelConfig, image_size: int | Size | None = None) -> int:
    """Multiply-adds of a forward pass per image: convolutions, dense layers and the two products of attention."""
    size = config.image_size if image_size is None else as_size(image_size)
    pixels = size[0] * size[1]
    if isinstance(config, ResNetConfig):
        convs = sum(
            k * k * i * o * (pixels // stride**2)
            for k, i, o, stride in _convs(config.stages, config.width, config.in_channels)
        )
        return convs + config.feature_width * config.num_classes
    D, grid = config.width, config.grid_of(size)
    patches = grid[0] * grid[1]
    tokens = patches + config.prefix_tokens
    channels = config.stem.out_channels if config.stem else config.in_channels
    count = patches * channels * config.patch_size**2 * D
    if config.stem:
        count += sum(k * k * i * o * (pixels // stride**2) for k, i, o, stride in _stem_convs(config))
    mlp = D * config.mlp_dim * (3 if config.mlp == "swiglu" else 2)
    A = config.head_width * config.num_heads
    products = (
        3 if config.attention == "differential" else 2
    )  # the product with the values is computed twice, at full width
    block = tokens * (4 * D * A + mlp) + products * tokens * tokens * A
    if config.pos_embed == "relative":
        block += tokens * (2 * tokens - 1) * D
    if config.rope is not None and config.rope.kind == "mixed":
        block += patches * D
    count += config.depth * block - _merging_savings(config, tokens, products)
    if config.pool == "map":
        read = tokens if config.pool_prefix else patches
        M = config.pool_mlp_dim or config.mlp_dim
        count += 2 * read * D * D + 2 * read * D + 2 * D * D + 2 * D * M
    count += config.pooled_width * config.representation_size
    return count + (1 + config.distillation) * config.feature_width * config.num_classes


def tokens_by_layer(config: ViTConfig, tokens: int) -> tuple[int, ...]:
    """Tokens that enter each layer of a model with token merging, and tokens that leave the last one.

    Merging by thresholds depends on the image and is counted as no merging.
    """
    counts = [tokens]
    for r in config.tome_counts:
        counts.append(counts[-1] - min(r, (counts[-1] - config.prefix_tokens) // 2))
    return tuple(counts)


def _merging_savings(config: ViTConfig, tokens: int, products: int) -> int:
    """Multiply-adds that token merging saves; the cost of matching tokens is not subtracted."""
    D, A = config.width, config.head_width * config.num_heads
    mlp = D * config.mlp_dim * (3 if config.mlp == "swiglu" else 2)
    counts, saved = tokens_by_layer(config, tokens), 0
    for before, after in pairwise(counts):
        in_mlp = before if config.block == "parallel" else after  # a parallel block merges after its MLP
        saved += (tokens - before) * 4 * D * A + (tokens - in_mlp) * mlp + products * (tokens**2 - before**2) * A
    return saved


def _dense(inputs: int, outputs: int, bias: bool = True) -> int:
    return (inputs + bias) * outputs


def _norm(config: ViTConfig, width: int) -> int:
    return width if config.norm == "rms" else 2 * width


def _block_parameters(config: ViTConfig, tokens: int) -> int:
    D, M, K = config.width, config.mlp_dim, config.head_width
    A = K * config.num_heads
    branches = 1 if config.block == "parallel" else 2  # each with a norm and a scale
    scales = config.layer_scale * (branches if config.mlp_scale else 1)
    count = branches * _norm(config, D) + scales * D + config.attn_norm * _norm(config, A)
    differential = config.attention == "differential"
    count += (K + 1) * differential + 2 * config.qk_norm * _norm(config, K // 2 if differential else K)
    count += config.mlp_norm * _norm(config, M)
    count += _dense(D, 3 * A, config.qkv_bias) + _dense(A, D, config.dense_bias)
    count += _dense(D, 2 * M if config.mlp == "swiglu" else M, config.dense_bias) + _dense(M, D, config.dense_bias)
    if config.pos_embed == "relative_bias":
        count += ((2 * config.grid[0] - 1) * (2 * config.grid[1] - 1) + 3) * config.num_heads
    if config.rope is not None and config.rope.kind == "mixed":
        count += config.num_heads * K
    return count + ((2 * tokens - 1) * K if config.pos_embed == "relative" else 0)


def _units(stages: tuple[int, ...], width: int) -> Iterator[tuple[int, int, int, int]]:
    """Residual units: input channels, inner width, stride in pixels before and after."""
    inputs, before = width, 4
    for stage, units in enumerate(stages):
        inner = width * 2**stage
        after = 4 * 2**stage
        for _ in range(units):
            yield inputs, inner, before, after
            inputs, before = 4 * inner, after


def _convs(stages: tuple[int, ...], width: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Convolutions: kernel size, input channels, output channels, stride of the output in pixels."""
    yield 7, channels, width, 2
    for inputs, inner, before, after in _units(stages, width):
        yield 1, inputs, inner, before
        yield 3, inner, inner, after
        yield 1, inner, 4 * inner, after
        if inputs != 4 * inner or before != after:
            yield 1, inputs, 4 * inner, after


def _stem_convs(config: ViTConfig) -> Iterator[tuple[int, int, int, int]]:
    assert config.stem
    if config.stem.is_plain:
        return _plain_convs(config.stem, config.in_channels)
    convs = {"resnet_d": _deep_convs, "mobile_clip": _patch_convs}.get(config.stem.style, _convs)
    return convs(config.stem.stages, config.stem.width, config.in_channels)


def _deep_convs(stages: tuple[int, ...], width: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Convolutions of ResNet-D, which has three instead of the first."""
    yield 3, channels, width // 2, 2
    yield 3, width // 2, width // 2, 2
    yield 3, width // 2, width, 2
    yield from list(_convs(stages, width, channels))[1:]


def _patch_convs(stages: tuple[int, ...], width: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Convolutions of MobileCLIP's stem."""
    yield 4, channels, width, 4
    yield 2, width, width, 8


def _plain_convs(stem: StemConfig, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Convolutions of a stem without residual units; the first one of each stage is computed before pooling."""
    yield 3, channels, ROOT_CHANNELS, 1
    inputs = ROOT_CHANNELS
    for stage, (width, convolutions) in enumerate(zip(stem.stage_widths, stem.stages)):
        for unit in range(convolutions):
            yield 3, inputs, width, 2 ** (stage + bool(unit))
            inputs = width
