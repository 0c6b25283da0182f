"""Masked autoencoder (MAE): the encoder sees some patches, the decoder reconstructs the others."""

import torch
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT

# B images, N patches of P x P pixels in C channels, S visible patches, D width of the encoder, E of the decoder


class MaskedAutoencoder(nn.Module):
    """MAE: predicts the pixels of every patch from an image with masked patches.

    Combines an encoder with a new decoder, which has the settings `blocks`. With `normalized_patches`, each patch is
    predicted relative to its own mean and standard deviation.
    """

    def __init__(self, encoder: ViT, blocks: ViTConfig, *, normalized_patches: bool = False) -> None:
        super().__init__()
        if encoder.config.rope or encoder.config.prefix_tokens != 1 or encoder.config.pos_embed != "learned":
            raise ConfigError("a masked autoencoder needs a class token, no other token and learned positions")
        self.encoder, self.normalized_patches = encoder, normalized_patches
        rows, columns = encoder.config.grid
        E, eps = blocks.width, blocks.numerics.norm_eps
        self.embed = nn.Linear(encoder.config.width, E)
        self.mask_token = nn.Parameter(torch.empty(1, 1, E))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + rows * columns, E))
        self.blocks = nn.ModuleList(Block(blocks) for _ in range(blocks.depth))
        self.norm = nn.LayerNorm(E, eps=eps)
        self.pixels = nn.Linear(E, encoder.config.in_channels * encoder.config.patch_size**2)

    def forward(self, pixels: Tensor, noise: Tensor, mask_ratio: float = 0.75) -> tuple[Tensor, Tensor]:
        """Predicted pixels (B, N, P*P*C) and the mask (B, N); the patches with the largest noise are masked."""
        order = noise.argsort(dim=1)
        rank = order.argsort(dim=1)  # of each patch by its noise
        visible = int(noise.shape[1] * (1 - mask_ratio))
        self.encoder.check(pixels)
        (height, width), expected = pixels.shape[-2:], self.encoder.config.image_size
        if (height, width) != expected:
            reason = f"the decoder's positions are for {expected[0]}x{expected[1]} pixels, not {height}x{width}"
            raise ConfigError(reason)
        if not 0 < visible <= noise.shape[1]:
            raise ConfigError(f"{visible} of {noise.shape[1]} patches would be visible", hint="mask a smaller share")
        tokens = self.encoder.embed(pixels)
        index = order[:, :visible, None].expand(-1, -1, tokens.shape[2])
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, index)], dim=1)  # (B, 1 + S, D)
        x = self.embed(self.encoder.forward_blocks(tokens))
        filled = torch.cat([x[:, 1:], self.mask_token.expand(len(x), noise.shape[1] - visible, -1)], dim=1)
        filled = filled.gather(1, rank[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], filled], dim=1) + self.pos_embed  # (B, 1 + N, E)
        for block in self.blocks:
            x = block(x)
        return self.pixels(self.norm(x))[:, 1:], rank >= visible

    def fill_in(self, pixels: Tensor, noise: Tensor, mask_ratio: float = 0.75) -> tuple[Tensor, Tensor]:
        """The images with their masked patches filled in, and the mask (B, rows, columns)."""
        predicted, masked = self(pixels, noise, mask_ratio)
        config = self.encoder.config
        (R, K), P, C = config.grid, config.patch_size, config.in_channels
        original = pixels.view(-1, C, R, P, K, P).permute(0, 2, 4, 3, 5, 1).reshape(len(pixels), R * K, -1)
        if self.normalized_patches:
            std = (original.var(dim=-1, keepdim=True) + 1e-6).sqrt()
            predicted = predicted * std + original.mean(dim=-1, keepdim=True)
        mixed = torch.where(masked[:, :, None], predicted, original).view(-1, R, K, P, P, C)
        return mixed.permute(0, 5, 1, 3, 2, 4).reshape(pixels.shape), masked.view(-1, R, K)
