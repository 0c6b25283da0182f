"""Between the encoder and the head: the MAP head, and the layer before the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.model.mlp import Mlp, norm_layer

# B images, N tokens, D width, H heads


class PreLogits(nn.Linear):
    """The layer between pooling and head: linear and tanh, as the paper pre-trains, or CLIP's bare projection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config.pooled_width, config.representation_size, bias=not config.projection)
        self.squashed = not config.projection

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.tanh() if self.squashed else x


class AttentionPool(nn.Module):
    """MAP head (multi-head attention pooling): a learned probe attends to the tokens; LayerNorm and residual MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.num_heads = config.pool_num_heads or config.num_heads
        self.unread = 0 if config.pool_prefix else config.prefix_tokens
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)
        self.norm = norm_layer(config, D)
        self.mlp = Mlp(config.replace(dense_bias=True), config.pool_mlp_dim or config.mlp_dim, plain=True)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        q, k, v = self.project(tokens[:, self.unread :])
        return self.finish(F.scaled_dot_product_attention(q, k, v))  # (B, H, 1, D // H)

    def finish(self, x: Tensor) -> Tensor:
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, 1, D)
        return (x + self.mlp(self.norm(x)))[:, 0]

    def explicit(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the probe's weights (B, H, 1, N) that it depends on, for gradients between them."""
        weights = self.weights(tokens)
        _, _, v = self.project(tokens)
        return self.finish(weights @ v), weights

    def weights(self, tokens: Tensor) -> Tensor:
        """The attention the probe pays to each token, (B, H, 1, N)."""
        q, k, _ = self.project(tokens)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        unread = torch.arange(logits.shape[-1], device=logits.device) < self.unread
        return logits.masked_fill(unread, -torch.inf).softmax(dim=-1)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = tokens.shape
        q = self.q(self.probe).expand(B, -1, -1).view(B, 1, self.num_heads, D // self.num_heads).transpose(1, 2)
        kv = self.kv(tokens).view(B, N, 2, self.num_heads, D // self.num_heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()
        return q, k, v
