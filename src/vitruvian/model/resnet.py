"""Convolutional networks: the paper's BiT ResNet, and the stems of hybrids.

BiT and the paper's hybrids have GroupNorm and standardized convolutions. Other stems have BatchNorm: plain convolutions
for small images, timm's ResNet-D, and MobileCLIP's.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import AXIAL_HEADS, ROOT_CHANNELS, ConvStyle, ResNetConfig, ResNetStyle, StemConfig
from vitruvian.model.interface import ImageNetwork
from vitruvian.model.positions import Offsets
from vitruvian.settings import Size, check_index

# B images, C channels, H rows, W columns

Style = ConvStyle | ResNetStyle
ALMOST_ZERO = torch.finfo(torch.float32).tiny
"""Padding value in place of 0, which ONNX Runtime's Pad_Fusion would turn into the -inf padding of max pooling."""


class StdConv(nn.Conv2d):
    """Convolution whose kernel is standardized over all but the output axis, without bias.

    The styles differ in numerics: `hybrid` divides by std + 1e-5 and pads like TensorFlow's SAME; `timm` divides by
    sqrt(var + 1e-8) with the same padding; `bit` divides by sqrt(var + 1e-10) and pads symmetrically; `timm_bit`
    divides like `timm` and pads like `bit`.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, style: Style) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if not self.style.endswith("bit"):
            x = pad_same(x, kernel, stride)
        elif kernel > 1:
            x = F.pad(x, [(kernel - 1) // 2] * 4)
        return F.conv2d(x, self.standardized(), stride=stride)

    def standardized(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        if self.style == "hybrid":
            return (self.weight - mean) / (variance.sqrt() + 1e-5)
        return (self.weight - mean) * torch.rsqrt(variance + (1e-10 if self.style == "bit" else 1e-8))


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's SAME padding: an odd pixel is added at the bottom and right."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def group_norm(channels: int, style: Style) -> nn.GroupNorm:
    return nn.GroupNorm(32, channels, eps=1e-6 if style == "hybrid" else 1e-5)


def bottleneck_stages(units: Sequence[int], width: int, unit: Callable[[int, int, int], nn.Module]) -> nn.Sequential:
    """Stages of bottlenecks `unit(inputs, width, stride)`; each stage but the first halves the sides."""
    stages, inputs = nn.Sequential(), width
    for stage, count in enumerate(units):
        inner = width * 2**stage
        first = unit(inputs, inner, 2 if stage else 1)
        stages.append(nn.Sequential(first, *(unit(4 * inner, inner, 1) for _ in range(count - 1))))
        inputs = 4 * inner
    return stages


class PostActivationUnit(nn.Module):
    """Bottleneck with the norm after each convolution (ResNet v1), used by hybrids."""

    def __init__(self, inputs: int, width: int, stride: int, style: ConvStyle) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = StdConv(inputs, width, 1, style=style)
        self.norm1 = group_norm(width, style)
        self.conv2 = StdConv(width, width, 3, stride, style=style)
        self.norm2 = group_norm(width, style)
        self.conv3 = StdConv(width, outputs, 1, style=style)
        self.norm3 = group_norm(outputs, style)
        self.shortcut = self.shortcut_norm = None
        if inputs != outputs or stride != 1:
            self.shortcut = StdConv(inputs, outputs, 1, stride, style=style)
            self.shortcut_norm = group_norm(outputs, style)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


class LineAttention(nn.Module):
    """Self-attention within each line of a feature map (B, lines, length, C), with relative positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.position = Offsets(length, width // AXIAL_HEADS)

    def forward(self, x: Tensor) -> Tensor:
        B, lines, length, C = x.shape
        qkv = self.qkv(x).view(B * lines, length, 3, AXIAL_HEADS, C // AXIAL_HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B * lines, heads, length, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.position.bias(q))
        return y.transpose(1, 2).reshape(B, lines, length, C)


class AxialAttention2d(nn.Module):
    """Row attention, then column attention, then average pooling by the stride: AxialResNet's 3x3 convolution."""

    def __init__(self, width: int, grid: Size, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.row, self.column = LineAttention(width, grid[1]), LineAttention(width, grid[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.column(self.row(x.permute(0, 2, 3, 1)).transpose(1, 2))  # (B, W, H, C)
        x = x.permute(0, 3, 2, 1)
        return x if self.stride == 1 else F.avg_pool2d(x, self.stride, ceil_mode=True)


class PreActivationUnit(nn.Module):
    """Bottleneck with the norm before each convolution (ResNet v2), used by BiT; `grid` is that of axial attention."""

    def __init__(self, inputs: int, width: int, stride: int, style: ResNetStyle, grid: Size | None = None) -> None:
        super().__init__()
        outputs = 4 * width
        self.norm1 = group_norm(inputs, style)
        self.conv1 = StdConv(inputs, width, 1, style=style)
        self.norm2 = group_norm(width, style)
        axial = None if grid is None else AxialAttention2d(width, grid, stride)
        self.conv2 = axial or StdConv(width, width, 3, stride, style=style)
        self.norm3 = group_norm(width, style)
        self.conv3 = StdConv(width, outputs, 1, style=style)
        project = inputs != outputs or stride != 1
        self.shortcut = StdConv(inputs, outputs, 1, stride, style=style) if project else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.norm2(y)))
        y = self.conv3(F.relu(self.norm3(y)))
        return x + y


class Stem(nn.Module):
    """Pixels -> the feature map that a hybrid cuts into patches."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.root = StdConv(channels, config.width, 7, 2, style=config.style)
        self.root_norm = group_norm(config.width, config.style)
        unit = partial(PostActivationUnit, style=config.style)
        self.stages = bottleneck_stages(config.stages, config.width, unit)

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.root_norm(self.root(pixels)))
        return self.stages(F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2))


class ResNet(ImageNetwork):
    """The BiT ResNet: normalized pixels (B, channels, height, width) -> logits (B, num_classes)."""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__(config)
        self.root = StdConv(config.in_channels, config.width, 7, 2, style=config.style)

        def unit(inputs: int, width: int, stride: int) -> PreActivationUnit:
            grid = config.axial_grid(width, stride) if config.axial else None
            return PreActivationUnit(inputs, width, stride, config.style, grid)

        self.stages = bottleneck_stages(config.stages, config.width, unit)
        self.norm = group_norm(config.feature_width, config.style)
        self.head = nn.Linear(config.feature_width, config.num_classes) if config.num_classes else None

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        """Logits (B, K), or with labels {"loss", "logits"}."""
        return self.with_loss(self.forward_head(self.forward_features(pixels)), labels)

    def forward_features(self, pixels: Tensor) -> Tensor:
        """The last feature map, normalized, (B, feature_width, height, width)."""
        return F.relu(self.norm(self.stages(self.forward_root(pixels))))

    def forward_root(self, pixels: Tensor) -> Tensor:
        """The feature map that enters the first stage."""
        self.check(pixels)
        return F.max_pool2d(F.pad(self.root(pixels), (1, 1, 1, 1), value=ALMOST_ZERO), 3, 2)

    def stage_maps(self, pixels: Tensor, stages: Iterable[int]) -> list[Tensor]:
        """Feature maps (B, channels, height, width) after the given stages; negative indices count from the end."""
        indices = [check_index("stage", index, len(self.stages)) for index in stages]
        maps = list(accumulate(self.stages, lambda x, stage: stage(x), initial=self.forward_root(pixels)))[1:]
        return [maps[index] for index in indices]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits from the map of `forward_features`; features with `pre_logits` or without a head."""
        pooled = x.mean(dim=(2, 3))
        return pooled if self.head is None or pre_logits else self.head(pooled)

    def features(self, pixels: Tensor) -> Tensor:
        """The features (B, feature_width) that the head reads."""
        return self.forward_head(self.forward_features(pixels), pre_logits=True)


class ConvStem(nn.Module):
    """Pixels -> the feature map that a hybrid cuts into patches: 3x3 convolutions, each stage halves the sides."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.root = nn.Conv2d(channels, ROOT_CHANNELS, 3, padding=1)
        self.stages = nn.Sequential()
        inputs = ROOT_CHANNELS
        for width, convolutions in zip(config.stage_widths, config.stages):
            units = []
            for unit in range(convolutions):
                units.append(ConvUnit(inputs, width, halve=not unit))
                inputs = width
            self.stages.append(nn.Sequential(*units))

    def forward(self, pixels: Tensor) -> Tensor:
        # On a CPU, convolutions and pooling are much faster with the channels of a pixel side by side.
        x = self.root(pixels.contiguous(memory_format=torch.channels_last))
        return self.stages(F.gelu(x, approximate="tanh"))


class BatchNorm(nn.Module):
    """BatchNorm2d without the counter of batches, which would be the only integer among a model's tensors."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def whitening_kernels(covariance: Tensor, count: int, epsilon: float = 5e-4) -> Tensor:
    """Whitening kernels (2 n, D) for the n <= `count` directions of largest variance, scaled to unit variance.

    `covariance` (D, D) is that of image patches with D values. Each direction appears with both signs because the
    activation keeps only one. A network that starts with these kernels sees decorrelated pixels and learns faster.
    """
    variances, directions = torch.linalg.eigh(covariance)  # ascending
    scaled = (directions / (variances.clamp(min=0) + epsilon).sqrt()).T.flip(0)[:count]
    return torch.cat([scaled, -scaled])


class ConvNorm(nn.Module):
    """A convolution without bias and its BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ConvUnit(ConvNorm):
    """A 3x3 convolution, max-pooling if it halves, BatchNorm and GELU."""

    def __init__(self, inputs: int, outputs: int, *, halve: bool) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, outputs, H / 2, W / 2) if it halves
        x = self.conv(x)
        return F.gelu(self.norm(F.max_pool2d(x, 2) if self.halve else x), approximate="tanh")


class ResNetDUnit(nn.Module):
    """Bottleneck whose shortcut averages before it projects, so that no pixel is skipped."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.stride = stride
        self.part1 = ConvNorm(inputs, width, 1)
        self.part2 = ConvNorm(width, width, 3, stride=stride, padding=1)
        self.part3 = ConvNorm(width, outputs, 1)
        self.shortcut = ConvNorm(inputs, outputs, 1) if inputs != outputs or stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.part3(F.relu(self.part2(F.relu(self.part1(x)))))
        if self.shortcut is not None:
            pooled = F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False) if self.stride > 1 else x
            x = self.shortcut(pooled)
        return F.relu(x + y)


class DeepStem(nn.Module):
    """Pixels -> feature map: several convolutions with BatchNorm in place of one.

    `resnet_d` has three of 3x3, then stages of residual units. `mobile_clip` embeds patches of 4x4 pixels, then of 2x2;
    the patch embedding, 2x2 again, follows.
    """

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        half, D = config.width // 2, config.width
        shapes = [(channels, half, 3, 2), (half, half, 3, 1), (half, D, 3, 1)]
        shapes = shapes if config.stages else [(channels, D, 4, 4), (D, D, 2, 2)]
        self.root = nn.ModuleList(ConvNorm(i, o, k, stride=s, padding=k % 2) for i, o, k, s in shapes)
        self.stages = bottleneck_stages(config.stages, D, ResNetDUnit) if config.stages else None

    def forward(self, x: Tensor) -> Tensor:
        for part in self.root:
            x = F.gelu(part(x)) if self.stages is None else F.relu(part(x))
        return x if self.stages is None else self.stages(F.max_pool2d(x, 3, 2, padding=1))


STEMS: dict[str, Callable[[StemConfig, int], nn.Module]] = {
    **dict.fromkeys(("hybrid", "timm", "bit"), Stem),
    **dict.fromkeys(("resnet_d", "mobile_clip"), DeepStem),
    "conv": ConvStem,
}
"""By `StemConfig.style`."""
