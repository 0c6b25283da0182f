"""Convolutional stems with BatchNorm: plain convolutions for small images, timm's ResNet-D, and MobileCLIP's."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import ROOT_CHANNELS, StemConfig
from vitruvian.model.resnet import Stem, bottleneck_stages

# B images, C channels, H rows, W columns


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
