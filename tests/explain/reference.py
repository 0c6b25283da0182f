"""Tiny models, and their attention computed again: slowly, in float64, one head and one query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitruvian.config import ViTConfig
from vitruvian.model.build import build
from vitruvian.model.vit import ViT

TINY = ViTConfig(image_size=(16, 24), patch_size=8, depth=3, width=16, mlp_dim=24, num_heads=2, num_classes=5)
SHAPES = {
    "token": {},
    "distilled": {"distillation": True},
    "registers": {"reg_tokens": 2, "layer_scale": True},
    "mean": {"pool": "mean"},
    "mean without class token": {"pool": "mean", "cls_token": False, "norm_after_pool": True},
    "token and mean": {"pool": "token_mean"},
    "map": {"pool": "map", "cls_token": False},
    "relative": {"pos_embed": "relative"},
    "sin-cos": {"pos_embed": "sincos"},
}
TOLERANCE = 1e-5
"""Float32 against float64 on values of up to about one."""


def random_model(seed: int = 0, **changes: object) -> ViT:
    """A tiny model in which no parameter is zero, so that nothing is hidden."""
    model = build(TINY.replace(**changes)).eval()
    assert isinstance(model, ViT)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def random_pixels(model: ViT, batch_size: int = 2) -> Tensor:
    shape = (batch_size, model.config.in_channels, *model.config.image_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def normed(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * scale + shift


def softmax(logits: Tensor) -> Tensor:
    powers = (logits - logits.max()).exp()
    return powers / powers.sum()


def forward(model: ViT, image: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of one image (channels, rows, columns): each layer's attention (H, N, N), differentiable, and the logits (K)."""
    double = build(model.config)
    double.load_state_dict(model.state_dict())
    double = double.double().eval()
    weights = {name: value.detach() for name, value in double.state_dict().items()}
    x = double.embed(image[None].double())[0].detach()
    attentions = []
    for layer in range(model.config.depth):
        start = f"blocks.{layer}."
        own = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
        x, attention = block(x, own, model.config)
        attentions.append(attention)
    tokens = x if model.config.norm_after_pool else double.norm(x)
    if model.attn_pool is None:
        return attentions, double.forward_head(tokens[None])[0]
    probe, pooled = probe_attention(tokens, double)
    attentions.append(probe)
    return attentions, double.head(pooled)


def block(x: Tensor, w: dict[str, Tensor], config: ViTConfig) -> tuple[Tensor, Tensor]:
    N, D = x.shape
    H, K = config.num_heads, D // config.num_heads
    y = normed(x, w["norm1.weight"], w["norm1.bias"], config.numerics.norm_eps)
    q, k, v = (y @ w["attn.qkv.weight"].T + w["attn.qkv.bias"]).split(D, dim=1)
    rows = []
    for head in range(H):
        part = slice(head * K, (head + 1) * K)
        for query in range(N):
            logits = torch.stack([q[query, part] @ k[key, part] for key in range(N)])
            if "attn.position.offsets" in w:
                offsets = w["attn.position.offsets"]
                logits = logits + torch.stack([q[query, part] @ offsets[query - key + N - 1] for key in range(N)])
            rows.append(softmax(logits / math.sqrt(K)))
    attention = torch.stack(rows).view(H, N, N).requires_grad_()
    mixed = torch.cat([attention[head] @ v[:, head * K : (head + 1) * K] for head in range(H)], dim=1)
    branch = mixed @ w["attn.proj.weight"].T + w["attn.proj.bias"]
    x = x + branch * w.get("ls1", 1.0)
    y = normed(x, w["norm2.weight"], w["norm2.bias"], config.numerics.norm_eps)
    hidden = y @ w["mlp.fc1.weight"].T + w["mlp.fc1.bias"]
    hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    return x + (hidden @ w["mlp.fc2.weight"].T + w["mlp.fc2.bias"]) * w.get("ls2", 1.0), attention


def probe_attention(tokens: Tensor, model: ViT) -> tuple[Tensor, Tensor]:
    """The pooling probe's attention (H, 1, N), and the pooled vector (D)."""
    pool, D = model.attn_pool, tokens.shape[1]
    assert pool is not None
    K = D // model.config.num_heads
    q = pool.q(pool.probe[0])
    k, v = pool.kv(tokens).split(D, dim=1)
    parts = [slice(head * K, (head + 1) * K) for head in range(model.config.num_heads)]
    attention = torch.stack([softmax(q[:, p] @ k[:, p].T / math.sqrt(K)) for p in parts]).requires_grad_()
    x = pool.proj(torch.cat([attention[head] @ v[:, p] for head, p in enumerate(parts)], dim=1))
    return attention, (x + pool.mlp(pool.norm(x)))[0]
