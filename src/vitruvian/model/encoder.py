"""The Transformer encoder's parts: attention, MLP and the pre-norm block around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import Gelu, ViTConfig

# B images, N tokens, D width, H heads, K = D // H, M MLP width


class Attention(nn.Module):
    """Multi-head self-attention; with relative positions each query also attends to the offset of its key."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(D, 3 * D, bias=config.qkv_bias)
        self.out = nn.Linear(D, D)
        self.offsets: nn.Parameter | None = None
        if config.positions == "relative":
            tokens = config.prefix_tokens + config.grid[0] * config.grid[1]
            self.offsets = nn.Parameter(torch.empty(2 * tokens - 1, D // config.heads))

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:  # (B, N, D) -> (B, N or first, D)
        q, k, v = self.project(x)
        bias = None if self.offsets is None else self.relative_logits(q)
        if first is not None:  # a slice of everything would still cost a copy in the backward pass
            q, bias = q[:, :, :first], None if bias is None else bias[:, :, :first]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor) -> Tensor:
        """The attention each query pays to each key, (B, H, N, N); rows sum to one."""
        q, k, _ = self.project(x)
        return self.shares(q, k)

    def shares(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if self.offsets is not None:
            logits = logits + self.relative_logits(q)
        return logits.softmax(dim=-1)

    def explicit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output computed from weights that are there to be differentiated, and those weights."""
        q, k, v = self.project(x)
        weights = self.shares(q, k)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = x.shape
        qkv = self.qkv(x).view(B, N, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, N, K)
        return q, k, v

    def relative_logits(self, q: Tensor) -> Tensor:
        """The scaled product of each query with the embedding of its offset to each key, (B, H, N, N).

        Offsets are one-dimensional, along the sequence of tokens, as in the paper; another number of
        tokens interpolates the table.
        """
        assert self.offsets is not None
        N = q.shape[2]
        table: Tensor = self.offsets
        if len(table) != 2 * N - 1:
            table = F.interpolate(table.T[None], 2 * N - 1, mode="linear", align_corners=True)[0].T
        place = torch.arange(N, device=q.device)
        index = place[:, None] - place[None] + N - 1  # (N, N)
        products = q @ table.T * q.shape[-1] ** -0.5  # (B, H, N, 2 N - 1)
        return products.gather(-1, index.expand(*q.shape[:2], -1, -1))


class Mlp(nn.Module):
    """Two dense layers with GELU between them, or a gated SiLU (`swiglu`)."""

    def __init__(self, width: int, mlp_width: int, *, gelu: Gelu, gated: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.approximate = "none" if gelu == "erf" else "tanh"
        self.gated = gated
        self.fc1 = nn.Linear(width, 2 * mlp_width if gated else mlp_width)
        self.fc2 = nn.Linear(mlp_width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        hidden = self.fc1(x)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        elif hidden.requires_grad:
            hidden = F.gelu(hidden, approximate=self.approximate)
        else:  # in place: a second buffer of this size costs more than the arithmetic
            hidden = torch.ops.aten.gelu_(hidden, approximate=self.approximate)
        return self.fc2(self.dropout(hidden))


class Block(nn.Module):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'; optionally with LayerScale and stochastic depth."""

    def __init__(self, config: ViTConfig, *, drop_path: float = 0.0) -> None:
        super().__init__()
        D, eps = config.width, config.numerics.norm_eps
        self.drop_path = drop_path
        """Stochastic depth: chance that a branch is skipped, for one image, while training."""
        self.norm1 = nn.LayerNorm(D, eps=eps)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(D, eps=eps)
        self.mlp = Mlp(
            D,
            config.mlp_width,
            gelu=config.numerics.gelu,
            gated=config.mlp == "swiglu",
            dropout=config.dropout,
        )
        self.scale1 = nn.Parameter(torch.empty(D)) if config.layer_scale else None
        self.scale2 = nn.Parameter(torch.empty(D)) if config.layer_scale else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or (B, first, D) where only the first tokens are read afterwards."""
        branch = self.attention(self.norm1(x), first)
        x = self.add(x if first is None else x[:, :first], branch, self.scale1)
        return self.add(x, self.mlp(self.norm2(x)), self.scale2)

    def explicit(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the attention weights (B, H, N, N) that it depends on, for gradients between them."""
        y, weights = self.attention.explicit(self.norm1(x))
        x = self.add(x, y, self.scale1)
        return self.add(x, self.mlp(self.norm2(x)), self.scale2), weights

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


def drop_path_mask(x: Tensor, drop_path: float) -> Tensor:
    """Stochastic depth, one factor an image: 0 with chance `drop_path`, else 1 / (1 - drop_path)."""
    mask = torch.empty(len(x), *[1] * (x.dim() - 1), dtype=x.dtype, device=x.device)
    return mask.bernoulli_(1 - drop_path).div_(1 - drop_path)
