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
        return convs + norms + 2 * config.feature_width + (config.feature_width + 1) * config.num_classes
    D, K, H, (rows, columns) = config.width, config.head_width, config.num_heads, config.grid
    norm = 1 if config.norm == "rms" else 2  # parameters per channel
    tokens = rows * columns + config.prefix_tokens
    sides = rows + columns
    tables = {"learned": rows * columns * D, "learned_2d": sides * (D // 2), "factorized": sides * D}
    positions = tables.get(config.pos_embed, 0) + config.prefix_pos_embeds * D
    count = config.prefix_tokens * D + positions * (config.depth if config.pos_embed_at == "every_layer" else 1)
    count += sum((i + has_bias) * o for _, i, o, has_bias in _dense_layers(config, config.image_size))
    if config.stem:
        count += sum(k * k * i * o + 2 * o for k, i, o, _ in _convs(config.stem, config.in_channels))
        count -= ROOT_CHANNELS * config.stem.is_plain  # a bias instead of a norm
    count += (config.patch_norm + config.pre_norm + config.final_norm) * norm * D
    count += (D + norm * D) * (config.pool == "map")
    branches = 1 if config.block == "parallel" else 2  # each with a norm and a scale
    scales = config.layer_scale * (branches if config.mlp_scale else 1)
    block = (branches * norm + scales) * D + norm * (config.attn_norm * K * H + config.mlp_norm * config.mlp_dim)
    is_differential = config.attention == "differential"
    block += (K + 1) * is_differential + 2 * config.qk_norm * norm * (K // 2 if is_differential else K)
    if config.pos_embed == "relative_bias":
        block += ((2 * rows - 1) * (2 * columns - 1) + 3) * H
    if config.pos_embed == "relative":
        block += (2 * tokens - 1) * K
    if config.rope is not None and config.rope.kind == "mixed":
        block += H * K
    return count + config.depth * block


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
    count += sum(times * i * o for times, i, o, _ in _dense_layers(config, size))
    grid, A = config.grid_of(size), config.head_width * config.num_heads
    patches = grid[0] * grid[1]
    # differential attention multiplies with the values twice, at full width
    products = {"mixer": 0, "differential": 3}.get(config.attention, 2)
    for layer, tokens in enumerate(tokens_by_layer(config, patches + config.prefix_tokens)[:-1]):
        attended = grid[1 - layer % 2] if config.attention == "axial" else tokens
        count += products * tokens * attended * A
        if config.pos_embed == "relative":
            count += tokens * (2 * tokens - 1) * A
    return count + (2 * config.width * (patches + config.pool_prefix * config.prefix_tokens)) * (config.pool == "map")


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


def _dense_layers(config: ViTConfig, size: Size) -> Iterator[tuple[int, int, int, bool]]:
    """The dense layers: how often an image uses each, its inputs and outputs, and whether it has a bias."""
    D, M, A = config.width, config.mlp_dim, config.head_width * config.num_heads
    rows, columns = config.grid_of(size)
    channels = config.stem.out_channels if config.stem else config.in_channels
    yield rows * columns, channels * config.patch_size**2, D, config.patch_bias
    # saved by merging, without the cost of matching
    for tokens, merged in pairwise(tokens_by_layer(config, rows * columns + config.prefix_tokens)):
        if config.attention == "mixer":
            yield from ((D, tokens, config.mixer_dim, True), (D, config.mixer_dim, tokens, True))
        else:
            yield from ((tokens, D, 3 * A, config.qkv_bias), (tokens, A, D, config.dense_bias))
        in_mlp = tokens if config.block == "parallel" else merged  # a parallel block merges after its MLP
        yield in_mlp, D, 2 * M if config.mlp == "swiglu" else M, config.dense_bias
        yield in_mlp, M, D, config.dense_bias
    if config.pool == "map":
        M, read = config.pool_mlp_dim or M, rows * columns + config.pool_prefix * config.prefix_tokens
        yield from ((1, D, D, True), (read, D, 2 * D, True), (1, D, D, True), (1, D, M, True), (1, M, D, True))
    if config.representation_size:
        yield 1, config.pooled_width, config.representation_size, config.projection_bias or not config.projection
    for _ in range(1 + config.distillation):
        yield 1, config.feature_width, config.num_classes, True


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
