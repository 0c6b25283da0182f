"""Pixels to tokens: patch embedding, class and register tokens, position embeddings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import PositionResize, ViTConfig
from vitruvian.model.encoder import norm_layer
from vitruvian.model.interface import check_floats
from vitruvian.model.positions import Positions, matrix
from vitruvian.model.resnet import STEMS
from vitruvian.settings import Size

# B images, R rows and C columns of patches, N = R * C, T tokens before the patches, D width


class Embedding(Positions):
    """Pixels (B, channels, height, width) -> tokens (B, T + N, D), positions included."""

    def __init__(self, config: ViTConfig) -> None:
        nn.Module.__init__(self)
        D = config.width
        self.stem = STEMS[config.stem.style](config.stem, config.in_channels) if config.stem else None
        channels = config.stem.out_channels if config.stem else config.in_channels
        self.patch = nn.Conv2d(channels, D, config.patch_size, config.patch_size, bias=config.patch_bias)
        if config.cls_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        if config.distillation:
            self.dist_token = nn.Parameter(torch.empty(1, 1, D))
        if config.reg_tokens:
            self.reg_tokens = nn.Parameter(torch.empty(1, config.reg_tokens, D))
        self.add_tables(config)  # after the tokens: their order is that of the parameters
        self.dropout = nn.Dropout(config.dropout)
        self.patch_norm = norm_layer(config, D) if config.patch_norm else nn.Identity()
        self.norm = norm_layer(config, D) if config.pre_norm else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        check_floats(pixels)
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return self.with_positions(self.patches(pixels), grid)

    def with_positions(self, patches: Tensor, grid: Size) -> Tensor:
        """Add position embeddings to patch tokens (B, N, D) and prepend the other tokens: (B, T + N, D)."""
        positions = self.grid_positions(grid)
        if positions is not None:
            patches = patches + positions.flatten(0, 1).to(self.patch.weight)
        prefix = self.prefix()
        if prefix is not None:
            patches = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)  # (B, T + N, D)
        return self.norm(self.dropout(patches))

    def patches(self, pixels: Tensor) -> Tensor:
        """The patch tokens (B, N, D), without position embeddings."""
        features = self.stem(pixels) if self.stem else pixels
        B, C, height, width = features.shape
        P = self.config.patch_size
        if self.config.trim:
            features = features[..., : height // P * P, : width // P * P]
        # One matrix product instead of a convolution: the same sums, faster, and tokens are contiguous in memory.
        cut = features.reshape(B, C, height // P, P, width // P, P)
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        patches = F.linear(cut.reshape(B, -1, C * P * P), self.patch.weight.flatten(1), self.patch.bias)
        return self.patch_norm(patches)

    def prefix(self) -> Tensor | None:
        """Class, distillation and register tokens with their position embeddings, (1, T, D)."""
        config = self.config
        tokens: list[Tensor] = [self.cls_token] if config.cls_token else []
        if config.distillation:
            tokens.append(self.dist_token)
        if config.prefix_pos_embeds:
            tokens = [torch.cat(tokens, dim=1) + self.prefix_pos_embed]
        if config.reg_tokens:
            tokens.append(self.reg_tokens)
        if not tokens:
            return None
        return torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0]


def resize_patch_kernel(weight: Tensor, patch_size: int, method: PositionResize) -> Tensor:
    """Resize a patch embedding (D, channels, P, P) to another patch size by pseudo-inverse (FlexiViT).

    The new kernel, applied to a patch resized with the family's own interpolation, gives the closest possible output
    to that of the old kernel on the original patch.
    """
    old = weight.shape[-1]
    if old == patch_size:
        return weight
    interpolation = "bicubic" if method in ("dino", "bilinear_antialias") else method
    enlarge = matrix(old, patch_size, interpolation, torch.empty(0, dtype=torch.float64))  # (new, old)
    enlarged = torch.kron(enlarge, enlarge).T  # (old^2, new^2)
    inverse = torch.linalg.pinv(enlarged)  # (new^2, old^2)
    flat = weight.double().flatten(2) @ inverse.T
    return flat.view(*weight.shape[:2], patch_size, patch_size).to(weight.dtype)
