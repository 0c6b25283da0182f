"""The plain convolutional stem of a hybrid for small images: 3x3 convolutions, BatchNorm, max-pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import ROOT_CHANNELS, StemConfig

# B images, C channels, H rows, W columns


class ConvStem(nn.Module):
    """Pixels -> the feature map a hybrid cuts into patches, through stages that each halve its sides."""

    def __init__(self, config: StemConfig, channels: int) -> None:
        super().__init__()
        self.root = nn.Conv2d(channels, ROOT_CHANNELS, 3, padding=1)
        self.stages = nn.ModuleList()
        inputs = ROOT_CHANNELS
        for width, convolutions in zip(config.stage_widths, config.stages):
            units = []
            for unit in range(convolutions):
                units.append(ConvUnit(inputs, width, halve=not unit))
                inputs = width
            self.stages.append(nn.Sequential(*units))

    def forward(self, pixels: Tensor) -> Tensor:
        # On a CPU, convolutions and pooling are much faster with the channels of a pixel side by side.
        x = F.gelu(self.root(pixels.contiguous(memory_format=torch.channels_last)), approximate="tanh")
        for stage in self.stages:
            x = stage(x)
        return x

    def pixel_filters(self) -> Tensor:
        return self.root.weight


class ConvUnit(nn.Module):
    """A convolution, max-pooling if it halves, BatchNorm and GELU."""

    def __init__(self, inputs: int, outputs: int, *, halve: bool) -> None:
        super().__init__()
        self.halve = halve
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, outputs, H / 2, W / 2) if it halves
        x = self.conv(x)
        return F.gelu(self.norm(F.max_pool2d(x, 2) if self.halve else x), approximate="tanh")


class BatchNorm(nn.Module):
    """PyTorch's BatchNorm2d without its count of batches, which would be the only integer among a model's tensors."""

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
    """Kernels (2 n, D) of the n <= `count` directions in which patches vary most, scaled to unit variance.

    `covariance` is that of patches of D values. Each direction comes with both signs, for an activation keeps one of
    them. A network that starts with these sees decorrelated pixels and learns sooner.
    """
    variances, directions = torch.linalg.eigh(covariance)  # ascending
    scaled = (directions / (variances.clamp(min=0) + epsilon).sqrt()).T.flip(0)[:count]
    return torch.cat([scaled, -scaled])
