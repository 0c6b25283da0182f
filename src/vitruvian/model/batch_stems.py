"""Stems of published hybrids with BatchNorm: the ResNet-D of timm's and the three convolutions of MobileCLIP's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import StemConfig
from vitruvian.model.conv import BatchNorm

# B images, C channels, H rows, W columns


class ConvNorm(nn.Module):
    """A convolution without bias and its BatchNorm."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ResNetDUnit(nn.Module):
    """Bottleneck whose shortcut averages before it projects, so that no pixel is left out."""

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


class ResNetDStem(nn.Module):
    """Pixels -> feature map: three 3x3 convolutions in place of one of 7x7, then stages of residual units."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        half = config.width // 2
        shapes = (channels, half, 2), (half, half, 1), (half, config.width, 1)
        self.root = nn.ModuleList(ConvNorm(i, o, 3, stride=stride, padding=1) for i, o, stride in shapes)
        self.stages = nn.ModuleList()
        inputs = config.width
        for stage, units in enumerate(config.stages):
            width = config.width * 2**stage
            modules = []
            for unit in range(units):
                modules.append(ResNetDUnit(inputs, width, 2 if stage and not unit else 1))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*modules))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.root:
            x = F.relu(part(x))
        x = F.max_pool2d(x, 3, 2, padding=1)
        for stage in self.stages:
            x = stage(x)
        return x

    def pixel_filters(self) -> Tensor:
        weight: Tensor = self.root[0].conv.weight  # type: ignore[union-attr,assignment]
        return weight


class MobileClipStem(nn.Module):
    """Pixels -> feature map: patches of 4x4 pixels, then of 2x2; the patch embedding, 2x2 again, is the third."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        shapes = (channels, config.width, 4), (config.width, config.width, 2)
        self.root = nn.ModuleList(ConvNorm(i, o, side, stride=side) for i, o, side in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.root:
            x = F.gelu(part(x))
        return x

    def pixel_filters(self) -> Tensor:
        weight: Tensor = self.root[0].conv.weight  # type: ignore[union-attr,assignment]
        return weight
