"""The Transformer encoder's parts: attention and the orders of a block around it, chosen by the settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.model.mlp import Mlp, norm_layer
from vitruvian.model.positions import attention_position
from vitruvian.settings import Size

# B images, N tokens, D width, H heads of K channels (H K = D, but for `attention_width`), M MLP width

Merge = Callable[[Tensor], Tensor]
"""Token merging: (B, N, D) -> (B, fewer, D)."""


class Attention(nn.Module):
    """Multi-head self-attention; positions may turn queries and keys, or add to their products."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D, K = config.width, config.head_width
        A = K * config.num_heads
        self.num_heads = config.num_heads
        self.grid = config.grid
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(D, 3 * A, bias=config.qkv_bias)
        self.q_norm = norm_layer(config, K) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, K) if config.qk_norm else nn.Identity()
        self.position = attention_position(config)
        self.norm = norm_layer(config, A) if config.attn_norm else nn.Identity()
        self.proj = nn.Linear(A, D, bias=config.dense_bias)

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        """(B, N, D) -> (B, N or first, D); `grid` is that of the patches, where it is not the trained one."""
        q, k, v = self.project(x, grid)
        bias = None if self.position is None else self.position.bias(q, grid or self.grid)
        if first is not None:  # a slice of everything would still cost a copy in the backward pass
            q, bias = q[:, :, :first], None if bias is None else bias[:, :, :first]
        return self.joined(self.attend(q, k, v, bias))

    def few(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:  # (B, N, D) -> (B, first, D)
        q, k, v = self.project(x)
        return self.joined(self.attend(q[:, :, :first], k, v, bias))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

    def joined(self, y: Tensor) -> Tensor:  # (B, H, N, K) -> (B, N, D)
        return self.proj(self.norm(y.transpose(1, 2).flatten(2)))

    def weights(self, x: Tensor, grid: Size | None = None) -> Tensor:
        """The attention each query pays to each key, (B, H, N, N); rows sum to one."""
        q, k, _ = self.project(x, grid)
        return self.shares(q, k, grid)

    def shares(self, q: Tensor, k: Tensor, grid: Size | None) -> Tensor:
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = None if self.position is None else self.position.bias(q, grid or self.grid)
        return (logits if bias is None else logits + bias).softmax(dim=-1)

    def explicit(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor]:
        """The output computed from weights that are there to be differentiated, and those weights."""
        q, k, v = self.project(x, grid)
        weights = self.shares(q, k, grid)
        return self.joined(weights @ v), weights

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.split(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.position is not None:
            q, k = self.position.rotate(q, k, grid or self.grid)
        return q, k, v

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (B, H, N, K)."""
        B, N, _ = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.num_heads, -1)
        return qkv.permute(2, 0, 3, 1, 4).unbind()


class DifferentialAttention(Attention):
    """Two attentions with half the channels each, one subtracted from the other (Differential Transformer).

    `subtracted`, how much of the second is taken away, is the sum that others compute from a constant of the layer and
    vectors of its own; the constant factor after the norm of each head is in that norm's scale.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        K = config.head_width
        self.q_norm = norm_layer(config, K // 2) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, K // 2) if config.qk_norm else nn.Identity()
        self.subtracted = nn.Parameter(torch.empty(()))
        self.head_norm = nn.RMSNorm(K, eps=1e-5)

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (B, 2 H, N, K / 2), those of a head side by side; values (B, H, N, K)."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (part.view(B, N, 2 * self.num_heads, -1).transpose(1, 2) for part in (q, k))
        return self.q_norm(q), self.k_norm(k), v.view(B, N, self.num_heads, -1).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        first, second = (super(DifferentialAttention, self).attend(q[:, i::2], k[:, i::2], v, bias) for i in (0, 1))
        return first - self.subtracted * second

    def shares(self, q: Tensor, k: Tensor, grid: Size | None) -> Tensor:
        """The difference of both; it may be negative."""
        both = super().shares(q, k, grid)
        return both[:, ::2] - self.subtracted * both[:, 1::2]

    def joined(self, y: Tensor) -> Tensor:
        return super().joined(self.head_norm(y))


def differential_share(layer: int) -> float:
    """What a differential attention of this layer subtracts before it has learned anything."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


ATTENTIONS = {"softmax": Attention, "differential": DifferentialAttention}


class Block(nn.Module):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'; optionally with LayerScale and stochastic depth."""

    def __init__(self, config: ViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        D = config.width
        self.drop_path = drop_path
        """Stochastic depth: chance that a branch is skipped, for one image, while training."""
        self.norm1 = norm_layer(config, D)
        self.attn = ATTENTIONS[config.attention](config)
        self.norm2 = norm_layer(config, D)
        self.mlp = Mlp(config, config.mlp_dim)
        self.ls1 = nn.Parameter(torch.empty(D)) if config.layer_scale else None
        self.ls2 = nn.Parameter(torch.empty(D)) if config.layer_scale and config.mlp_scale else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, first: int | None = None, grid: Size | None = None, merge: Merge | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D), or (B, first, D) where only the first tokens are read afterwards."""
        branch = self.attn(self.attention_input(x), first, grid)
        return self.finish(x if first is None else x[:, :first], branch, merge)

    def explicit(self, x: Tensor, grid: Size | None = None, merge: Merge | None = None) -> tuple[Tensor, Tensor]:
        """The output and the attention weights (B, H, N, N) that it depends on, for gradients between them."""
        branch, weights = self.attn.explicit(self.attention_input(x), grid)
        return self.finish(x, branch, merge), weights

    def attention_input(self, x: Tensor) -> Tensor:
        return self.norm1(x)

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        """The block's output from its input and what attention gave; `merge` acts on the tokens between the two."""
        x = self.add(x, branch, self.ls1)
        x = x if merge is None else merge(x)
        return self.add(x, self.mlp(self.norm2(x)), self.ls2)

    def add(self, x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            branch = branch * scale
        if self.training:
            branch = self.dropout(branch)
            if self.drop_path:
                branch = branch * drop_path_mask(branch, self.drop_path)
        if torch.is_grad_enabled() or branch.dtype != x.dtype:
            return x + branch
        return branch.add_(x)  # nobody else holds the branch; x may be an intermediate somebody keeps


class ResPostNormBlock(Block):
    """z' = LN(MSA(z)) + z; z = LN(MLP(z')) + z': the norms stand after the branches (EVA-CLIP, Swin v2)."""

    def attention_input(self, x: Tensor) -> Tensor:
        return x

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        x = self.add(x, self.norm1(branch), self.ls1)
        x = x if merge is None else merge(x)
        return self.add(x, self.norm2(self.mlp(x)), self.ls2)


class ParallelBlock(Block):
    """z' = MSA(LN(z)) + MLP(LN(z)) + z, with one norm for both (ViT-22B)."""

    def __init__(self, config: ViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__(config, drop_path=drop_path)
        del self.norm2, self.ls2

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        x = self.add(x, branch + self.mlp(self.norm1(x)), self.ls1)
        return x if merge is None else merge(x)


BLOCKS = {"pre_norm": Block, "res_post_norm": ResPostNormBlock, "parallel": ParallelBlock}


def drop_path_mask(x: Tensor, drop_path: float) -> Tensor:
    """Stochastic depth, one factor an image: 0 with chance `drop_path`, else 1 / (1 - drop_path)."""
    mask = torch.empty(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
    return mask.bernoulli_(1 - drop_path).div_(1 - drop_path)
