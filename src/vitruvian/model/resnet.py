"""ResNets with GroupNorm and standardized convolutions: a hybrid's stem and the paper's BiT baseline."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import AXIAL_HEADS, ConvStyle, ResNetConfig, ResNetStyle, StemConfig
from vitruvian.model.interface import ImageNetwork
from vitruvian.model.positions import Offsets
from vitruvian.settings import Size, check_index

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
