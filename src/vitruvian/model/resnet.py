"""ResNets with GroupNorm and standardized convolutions: a hybrid's stem and the paper's BiT baseline."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import (
    ConvStyle,
    ModelMeta,
    Preprocess,
    ResNetConfig,
    ResNetStyle,
    StemConfig,
)
from vitruvian.errors import ConfigError

GROUPS = 32
ALMOST_ZERO = torch.finfo(torch.float32).tiny
"""Padding value in place of 0, which ONNX Runtime's Pad_Fusion would turn into the -inf padding of max pooling."""


class StdConv(nn.Conv2d):
    """Convolution whose kernel is standardized over all but the output axis, without bias.

    The styles differ in numerics: `hybrid` divides by std + 1e-5 and pads like TensorFlow's SAME; `timm` divides by
    sqrt(var + 1e-8) with the same padding; `bit` divides by sqrt(var + 1e-10) and pads symmetrically; `timm_bit`
    divides like `timm` and pads like `bit`.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, *, style: ConvStyle | ResNetStyle
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        self.style = style

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.pad(x), self.standardized(), stride=self.stride)

    def standardized(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        if self.style == "hybrid":
            return (self.weight - mean) / (variance.sqrt() + 1e-5)
        return (self.weight - mean) * torch.rsqrt(variance + (1e-10 if self.style == "bit" else 1e-8))

    def pad(self, x: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if self.style.endswith("bit"):
            side = (kernel - 1) // 2
            return F.pad(x, (side, side, side, side)) if side else x
        return pad_same(x, kernel, stride)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's SAME padding: an odd pixel is added at the bottom and right."""
    pads: list[int] = []
    for size in (x.shape[-1], x.shape[-2]):
        total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


class PostActivationUnit(nn.Module):
    """Bottleneck with the norm after each convolution (ResNet v1), used by hybrids."""

    def __init__(self, inputs: int, width: int, stride: int, style: ConvStyle) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = StdConv(inputs, width, 1, style=style)
        self.norm1 = nn.GroupNorm(GROUPS, width, eps=group_eps(style))
        self.conv2 = StdConv(width, width, 3, stride, style=style)
        self.norm2 = nn.GroupNorm(GROUPS, width, eps=group_eps(style))
        self.conv3 = StdConv(width, outputs, 1, style=style)
        self.norm3 = nn.GroupNorm(GROUPS, outputs, eps=group_eps(style))
        self.shortcut = self.shortcut_norm = None
        if inputs != outputs or stride != 1:
            self.shortcut = StdConv(inputs, outputs, 1, stride, style=style)
            self.shortcut_norm = nn.GroupNorm(GROUPS, outputs, eps=group_eps(style))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(x + y)


class PreActivationUnit(nn.Module):
    """Bottleneck with the norm before each convolution (ResNet v2), used by BiT."""

    def __init__(self, inputs: int, width: int, stride: int, style: ResNetStyle) -> None:
        super().__init__()
        outputs = 4 * width
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=group_eps(style))
        self.conv1 = StdConv(inputs, width, 1, style=style)
        self.norm2 = nn.GroupNorm(GROUPS, width, eps=group_eps(style))
        self.conv2 = StdConv(width, width, 3, stride, style=style)
        self.norm3 = nn.GroupNorm(GROUPS, width, eps=group_eps(style))
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


def group_eps(style: ConvStyle | ResNetStyle) -> float:
    return 1e-6 if style == "hybrid" else 1e-5


class Stem(nn.Module):
    """Pixels -> the feature map that a hybrid cuts into patches."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.root = StdConv(channels, config.width, 7, 2, style=config.style)
        self.root_norm = nn.GroupNorm(GROUPS, config.width, eps=group_eps(config.style))
        self.stages = nn.ModuleList()
        inputs = config.width
        for stage, units in enumerate(config.stages):
            width = config.width * 2**stage
            modules = []
            for unit in range(units):
                stride = 2 if stage and not unit else 1
                modules.append(PostActivationUnit(inputs, width, stride, config.style))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*modules))

    def forward(self, pixels: Tensor) -> Tensor:
        x = F.relu(self.root_norm(self.root(pixels)))
        x = F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2)
        for stage in self.stages:
            x = stage(x)
        return x

    def pixel_filters(self) -> Tensor:
        """The standardized kernels of the first convolution."""
        return self.root.standardized()


class ResNet(nn.Module):
    """The BiT ResNet: normalized pixels (B, channels, height, width) -> logits (B, num_classes)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.meta = ModelMeta(preprocess=Preprocess(image_size=config.image_size))
        self.root = StdConv(config.in_channels, config.width, 7, 2, style=config.style)
        self.stages = nn.ModuleList()
        inputs = config.width
        for stage, units in enumerate(config.stages):
            width = config.width * 2**stage
            modules: list[nn.Module] = []
            for unit in range(units):
                modules.append(PreActivationUnit(inputs, width, 2 if stage and not unit else 1, config.style))
                inputs = 4 * width
            self.stages.append(nn.Sequential(*modules))
        self.norm = nn.GroupNorm(GROUPS, inputs, eps=group_eps(config.style))
        self.head = nn.Linear(inputs, config.num_classes) if config.num_classes else None

    def forward(self, pixels: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(pixels))

    def forward_features(self, pixels: Tensor) -> Tensor:
        """The last feature map, normalized, (B, feature_width, height, width)."""
        x = self.forward_root(pixels)
        for stage in self.stages:
            x = stage(x)
        return F.relu(self.norm(x))

    def forward_root(self, pixels: Tensor) -> Tensor:
        """The feature map that enters the first stage."""
        return F.max_pool2d(F.pad(self.root(pixels), (1, 1, 1, 1), value=ALMOST_ZERO), 3, 2)

    def stage_maps(self, pixels: Tensor, stages: Iterable[int]) -> list[Tensor]:
        """Feature maps (B, channels, height, width) after the given stages; negative indices count from the end."""
        x, maps = self.forward_root(pixels), []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        indices = list(stages)
        for index in indices:
            if not -len(maps) <= index < len(maps):
                raise ConfigError(f"stage {index} does not exist: the model has stages 0 to {len(maps) - 1}")
        return [maps[index] for index in indices]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits from the map of `forward_features`; features with `pre_logits` or without a head."""
        pooled = x.mean(dim=(2, 3))
        return pooled if self.head is None or pre_logits else self.head(pooled)

    def features(self, pixels: Tensor) -> Tensor:
        """The features (B, feature_width) that the head reads."""
        return self.forward_head(self.forward_features(pixels), pre_logits=True)
