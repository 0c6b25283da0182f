"""A block's MLP with its activations, and the norms of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvian.config import Numerics, ViTConfig


def norm_layer(config: ViTConfig, width: int) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(width, eps=config.numerics.norm_eps)


def gelu(x: Tensor, approximate: str) -> Tensor:
    if x.requires_grad:
        return F.gelu(x, approximate=approximate)
    return torch.ops.aten.gelu_(x, approximate=approximate)  # a second buffer of this size costs more than the sums


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": lambda x: gelu(x, "none"),
    "tanh": lambda x: gelu(x, "tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}


class Mlp(nn.Module):
    """Two dense layers with GELU between them, or a gated SiLU (`swiglu`), optionally a norm before the second."""

    def __init__(self, config: ViTConfig, mlp_dim: int, *, plain: bool = False) -> None:
        super().__init__()
        D, self.gated = config.width, config.mlp == "swiglu" and not plain
        self.numerics: Numerics = config.numerics
        self.fc1 = nn.Linear(D, 2 * mlp_dim if self.gated else mlp_dim, bias=config.dense_bias)
        self.norm = norm_layer(config, mlp_dim) if config.mlp_norm and not plain else nn.Identity()
        self.fc2 = nn.Linear(mlp_dim, D, bias=config.dense_bias)
        self.dropout = nn.Dropout(0.0 if plain else config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        hidden = self.fc1(x)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = ACTIVATIONS[self.numerics.gelu](hidden)
        return self.fc2(self.norm(self.dropout(hidden)))
