"""Which patches speak for a class: attention weighted by the gradient of that class's logit.

The rule of Chefer, Gur and Wolf (2021) for self-attention: of each layer the mean over heads of the positive part of
attention times its gradient, A; through the layers R = R + A R; the row where the answer is read. That row is all
that is kept here, multiplied from the last layer to the first, while the gradient walks the same way: each block is
computed again with its attention weights in the open, so one layer is held at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitruvian.errors import ConfigError
from vitruvian.explain.attention import inference, on_grid, require_vit, token_shares
from vitruvian.model.build import Model
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT

# B images, R rows and C columns of patches, N tokens, D width, H heads, K classes


def class_map(model: Model, pixels: Tensor, classes: Sequence[int] | Tensor | None = None) -> Tensor:
    """How much each patch speaks for a class, (B, R, C), not negative.

    `classes` has one index an image; without it, each image's own answer. Where the pooling reads more tokens than
    one, their rows are averaged; the probe of `map` pooling takes part with the gradient of its own attention.
    """
    vit = require_vit(model)
    if vit.head is None:
        raise ConfigError("this model has no head, so there is no class to explain; rollout and attention need none")
    with inference(vit):
        inputs = block_inputs(vit, pixels)
        with torch.enable_grad():
            row, gradient = answer_gradient(vit, inputs.pop(), classes)
            for block in reversed(vit.blocks):
                assert isinstance(block, Block)
                row, gradient = through_block(block, inputs.pop(), row, gradient)
    return on_grid(vit, row, pixels)


def block_inputs(vit: ViT, pixels: Tensor) -> list[Tensor]:
    """What enters each block, and what leaves the last one, each (B, N, D)."""
    kept = []
    for name, value in vit.iter_intermediates(pixels):
        if name == "encoded":
            break
        kept.append(value)
    return kept


def answer_gradient(vit: ViT, tokens: Tensor, classes: Sequence[int] | Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the answer is read, (B, N), and the gradient of its logit at the tokens after the last block, (B, N, D)."""
    tokens = tokens.detach().requires_grad_()
    encoded = tokens if vit.config.norm_after_pool else vit.norm(tokens)
    if vit.attn_pool is None:
        chosen = chosen_logits(vit.forward_head(encoded), classes)
        (gradient,) = torch.autograd.grad(chosen.sum(), tokens)
        return token_shares(vit, tokens.shape[1]).to(tokens).expand(len(tokens), -1), gradient
    assert vit.head is not None
    pooled, weights = vit.attn_pool.explicit(encoded)
    pooled = vit.norm(pooled) if vit.config.norm_after_pool else pooled
    chosen = chosen_logits(vit.head(vit.pre_logits(pooled)), classes)
    gradient, slope = torch.autograd.grad(chosen.sum(), [tokens, weights])
    return speaking(weights, slope)[:, 0], gradient


def chosen_logits(logits: Tensor, classes: Sequence[int] | Tensor | None) -> Tensor:  # (B, K) -> (B)
    B, K = logits.shape
    chosen = logits.argmax(dim=1) if classes is None else torch.as_tensor(classes, device=logits.device)
    if chosen.shape != (B,):
        raise ConfigError(f"{B} images need {B} classes, one each, not {tuple(chosen.shape)}")
    if chosen.min() < 0 or chosen.max() >= K:
        raise ConfigError(f"classes {chosen.tolist()}: the model has classes 0 to {K - 1}")
    return logits.gather(1, chosen[:, None].long())[:, 0]


def through_block(block: Block, x: Tensor, row: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The row, and the gradient, before a block from those after it."""
    x = x.detach().requires_grad_()
    y, weights = block.explicit(x)
    before, slope = torch.autograd.grad(y, [x, weights], gradient)
    return row + (row[:, None] @ speaking(weights, slope))[:, 0], before


def speaking(weights: Tensor, slope: Tensor) -> Tensor:  # (B, H, N, N) -> (B, N, N)
    """The mean over heads of the attention that raises the logit."""
    return (weights.detach() * slope).clamp(min=0).mean(dim=1)
