"""MAE whole: an encoder that sees some of the patches, and a decoder that fills in the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT

# B images, N patches of P x P pixels in C channels, S of them seen, D width of the encoder, E of the decoder


class MaskedAutoencoder(nn.Module):
    """Normalized pixels, some patches of which are hidden -> the pixels of every patch."""

    def __init__(self, encoder: ViT, blocks: ViTConfig, *, normalized_patches: bool = False) -> None:
        """`blocks` are the decoder's settings; with `normalized_patches` each patch is told in its own mean and std."""
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

    def forward(self, pixels: Tensor, noise: Tensor, share: float = 0.75) -> tuple[Tensor, Tensor]:
        """What each patch is told to be (B, N, P P C), and which are hidden (B, N): those of the largest noise."""
        order = noise.argsort(dim=1)
        place = order.argsort(dim=1)  # of each patch, in the order of the noise
        seen = int(noise.shape[1] * (1 - share))
        self.check(pixels, noise, seen)
        tokens = self.encoder.embed(pixels)
        kept = order[:, :seen, None].expand(-1, -1, tokens.shape[2])
        tokens = torch.cat([tokens[:, :1], tokens[:, 1:].gather(1, kept)], dim=1)  # (B, 1 + S, D)
        x = self.embed(self.encoder.forward_blocks(tokens))
        filled = torch.cat([x[:, 1:], self.mask_token.expand(len(x), noise.shape[1] - seen, -1)], dim=1)
        filled = filled.gather(1, place[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], filled], dim=1) + self.pos_embed  # (B, 1 + N, E)
        for block in self.blocks:
            x = block(x)
        return self.pixels(self.norm(x))[:, 1:], place >= seen

    def check(self, pixels: Tensor, noise: Tensor, seen: int) -> None:
        self.encoder.check(pixels)
        size, wanted = (pixels.shape[-2], pixels.shape[-1]), self.encoder.config.image_size
        if size != wanted:
            raise ConfigError(
                f"the decoder's positions are those of {wanted[0]}x{wanted[1]} pixels, not {size[0]}x{size[1]}"
            )
        if not 0 < seen <= noise.shape[1]:
            raise ConfigError(f"{seen} of {noise.shape[1]} patches would be seen: hide a smaller share")

    def fill_in(self, pixels: Tensor, noise: Tensor, share: float = 0.75) -> tuple[Tensor, Tensor]:
        """The images with their hidden patches filled in, and which those were (B, rows, columns)."""
        told, hidden = self(pixels, noise, share)
        config = self.encoder.config
        (R, K), P, C = config.grid, config.patch_size, config.in_channels
        own = pixels.view(-1, C, R, P, K, P).permute(0, 2, 4, 3, 5, 1).reshape(len(pixels), R * K, -1)
        if self.normalized_patches:
            told = told * (own.var(dim=-1, keepdim=True) + 1e-6).sqrt() + own.mean(dim=-1, keepdim=True)
        mixed = torch.where(hidden[:, :, None], told, own).view(-1, R, K, P, P, C)
        return mixed.permute(0, 5, 1, 3, 2, 4).reshape(pixels.shape), hidden.view(-1, R, K)
