"""Parameters and multiply-adds of a model, computed from its config alone."""

from collections.abc import Iterator
from itertools import pairwise

from vitruvian.config import AXIAL_HEADS, ROOT_CHANNELS, ModelConfig, ResNetConfig, StemConfig, ViTConfig
from vitruvian.settings import Size, as_size

TRAINING_PASSES = 3  # cost of a training step in forward passes; the backward pass computes twice as many products


def parameters(config: ModelConfig) -> int:
    """Number of parameters."""
    if isinstance(config, ResNetConfig):
        convs = sum(k * k * i * o for k, i, o, _ in _convs(config, config.in_channels))
        norms = sum(2 * (inputs + 2 * inner) for inputs, inner, _, _ in _units(config))
        if config.axial:
            convs += sum(count for count, _ in _axial_changes(config, config.image_size))
        return convs + norms + 2 * config.feature_width + _dense(config.feature_width, config.num_classes)
    D, patches = config.width, config.grid[0] * config.grid[1]
    sides = sum(config.grid)
    tables = {"learned": patches * D, "learned_2d": sides * (D // 2), "factorized": sides * D}
    positions = tables.get(config.pos_embed, 0) + config.prefix_pos_embeds * D
    count = config.prefix_tokens * D + positions * (config.depth if config.pos_embed_at == "every_layer" else 1)
    channels = config.stem.out_channels if config.stem else config.in_channels
    count += _dense(channels * config.patch_size**2, D, config.patch_bias)
    if config.stem:
        count += sum(k * k * i * o + 2 * o for k, i, o, _ in _convs(config.stem, config.in_channels))
        count -= ROOT_CHANNELS * config.stem.is_plain  # a bias instead of a norm
    count += config.depth * _block_parameters(config, patches + config.prefix_tokens)
    count += (config.patch_norm + config.pre_norm + config.final_norm) * _norm(config, D)
    if config.pool == "map":
        M = config.pool_mlp_dim or config.mlp_dim
        count += D + 4 * _dense(D, D) + _norm(config, D) + _dense(D, M) + _dense(M, D)
    if config.representation_size:
        count += _dense(
            config.pooled_width, config.representation_size, not config.projection or config.projection_bias
        )
    return count + (1 + config.distillation) * _dense(config.feature_width, config.num_classes)


def multiply_adds(config: ModelConfig, image_size: int | Size | None = None) -> int:
    """Multiply-adds of a forward pass per image: convolutions, dense layers and the two products of attention."""
    size = config.image_size if image_size is None else as_size(image_size)
    stem = config if isinstance(config, ResNetConfig) else config.stem
    convs = _convs(stem, config.in_channels) if stem else ()
    count = sum(k * k * i * o * (size[0] * size[1] // stride**2) for k, i, o, stride in convs)
    if isinstance(config, ResNetConfig):
        if config.axial:
            count += sum(work for _, work in _axial_changes(config, size))
        return count + config.feature_width * config.num_classes
    D, grid = config.width, config.grid_of(size)
    patches = grid[0] * grid[1]
    tokens = patches + config.prefix_tokens
    channels = config.stem.out_channels if config.stem else config.in_channels
    count += patches * channels * config.patch_size**2 * D
    mlp = D * config.mlp_dim * (3 if config.mlp == "swiglu" else 2)
    A = config.head_width * config.num_heads
    products = 3 if config.attention == "differential" else 2  # it multiplies with the values twice, at full width
    attended = {"axial": sum(grid) / 2}.get(config.attention, tokens)  # rows and columns alternate
    block = tokens * (4 * D * A + mlp) + products * tokens * attended * A
    if config.attention == "mixer":
        block = tokens * (2 * D * config.mixer_dim + mlp)
    if config.pos_embed == "relative":
        block += tokens * (2 * tokens - 1) * D
    if config.rope is not None and config.rope.kind == "mixed":
        block += patches * D
    if config.attention == "axial" and config.depth % 2:  # one more layer attends to rows, of `columns` patches
        count += round(products * tokens * A * (grid[1] - grid[0]) / 2)
    count += round(config.depth * block)
    for before, after in pairwise(tokens_by_layer(config, tokens)):  # saved by merging, without the cost of matching
        in_mlp = before if config.block == "parallel" else after  # a parallel block merges after its MLP
        count -= (tokens - before) * 4 * D * A + (tokens - in_mlp) * mlp + products * (tokens**2 - before**2) * A
    if config.pool == "map":
        read = tokens if config.pool_prefix else patches
        M = config.pool_mlp_dim or config.mlp_dim
        count += 2 * read * D * D + 2 * read * D + 2 * D * D + 2 * D * M
    count += config.pooled_width * config.representation_size
    return count + (1 + config.distillation) * config.feature_width * config.num_classes


def speed_class(work: int) -> str:
    """How fast a model with this many multiply-adds per image is, relative to others: ViT-S/16 is medium."""
    limits = {"fast": 3e9, "medium": 10e9, "slow": 40e9}
    return next((name for name, limit in limits.items() if work < limit), "slowest")


def tokens_by_layer(config: ViTConfig, tokens: int) -> tuple[int, ...]:
    """Tokens that enter each layer of a model with token merging, and tokens that leave the last one.

    Merging by thresholds depends on the image and is counted as no merging.
    """
    counts = [tokens]
    for r in config.tome_counts:
        counts.append(counts[-1] - min(r, (counts[-1] - config.prefix_tokens) // 2))
    return tuple(counts)


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
    if config.attention == "mixer":
        count += _dense(tokens, config.mixer_dim) + _dense(config.mixer_dim, tokens)
    else:
        count += _dense(D, 3 * A, config.qkv_bias) + _dense(A, D, config.dense_bias)
    count += _dense(D, 2 * M if config.mlp == "swiglu" else M, config.dense_bias) + _dense(M, D, config.dense_bias)
    if config.pos_embed == "relative_bias":
        count += ((2 * config.grid[0] - 1) * (2 * config.grid[1] - 1) + 3) * config.num_heads
    if config.rope is not None and config.rope.kind == "mixed":
        count += config.num_heads * K
    return count + ((2 * tokens - 1) * K if config.pos_embed == "relative" else 0)


def _units(config: ResNetConfig | StemConfig) -> Iterator[tuple[int, int, int, int]]:
    """The residual units: input channels, inner width, and total stride before and after."""
    inputs, before = config.width, 4
    for stage, units in enumerate(config.stages):
        inner, after = config.width * 2**stage, 4 * 2**stage
        for _ in range(units):
            yield inputs, inner, before, after
            inputs, before = 4 * inner, after


def _axial_changes(config: ResNetConfig, size: Size) -> Iterator[tuple[int, int]]:
    """What replacing the 3x3 convolution of each unit by axial attention adds: parameters and multiply-adds."""
    for _, width, before, after in _units(config):
        grid = config.axial_grid(width, after // before)
        tables = (2 * sum(grid) - 2) * (width // AXIAL_HEADS)
        sides = [-(-side // before) for side in size]
        pixels = sides[0] * sides[1]
        attention = sum(2 * length + 2 * length - 1 for length in sides) * width  # two products and the offsets
        convolution = 9 * width**2 * (size[0] * size[1] // after**2)
        yield 6 * width**2 + tables - 9 * width**2, pixels * (6 * width**2 + attention) - convolution


def _convs(config: ResNetConfig | StemConfig, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Convolutions: kernel size, input channels, output channels, stride of the output in pixels."""
    width = config.width
    if config.style == "mobile_clip":
        yield from ((4, channels, width, 4), (2, width, width, 8))
        return
    if isinstance(config, StemConfig) and config.is_plain:
        yield 3, channels, ROOT_CHANNELS, 1
        inputs = ROOT_CHANNELS
        for stage, (outputs, convolutions) in enumerate(zip(config.stage_widths, config.stages)):
            for unit in range(convolutions):  # the first one of each stage is computed before pooling
                yield 3, inputs, outputs, 2 ** (stage + bool(unit))
                inputs = outputs
        return
    if config.style == "resnet_d":  # three convolutions instead of the first
        yield from ((3, channels, width // 2, 2), (3, width // 2, width // 2, 2), (3, width // 2, width, 2))
    else:
        yield 7, channels, width, 2
    for inputs, inner, before, after in _units(config):
        yield 1, inputs, inner, before
        yield 3, inner, inner, after
        yield 1, inner, 4 * inner, after
        if inputs != 4 * inner or before != after:
            yield 1, inputs, 4 * inner, after
