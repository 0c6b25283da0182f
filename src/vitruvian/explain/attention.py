"""Where a model looks: attention of any layer and head, attention rollout, gradient-weighted attention.

A map says how much each patch counts where the answer is read, and that place depends on the pooling:

- `token`: the class token; with distillation the mean of the class and the distillation token;
- `mean`: the mean of all patches; `token_mean`: half the class token, half that mean;
- `map`: what the probe of the attention pooling attends to.

Tokens before the patches (class, distillation, registers) have no place in the image: what a map leaves to them
is missing from its sum.

Where tokens merge, a map has the whole grid: each patch has its share of the token that covers it.

Gradient-weighted attention follows Chefer, Gur and Wolf (2021) for self-attention: of each layer the mean over heads of
the positive part of attention times the gradient of one class's logit, A; through the layers R = R + A R; the row where
the answer is read. That row is all that is kept here, multiplied from the last layer to the first, while the gradient
walks the same way: each block is computed again with its attention weights in the open, so one layer is held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor

from vitruvian.errors import ConfigError
from vitruvian.model.build import Model
from vitruvian.model.encoder import Block
from vitruvian.model.resnet import ResNet
from vitruvian.model.token_merging import token_groups
from vitruvian.model.vit import ViT
from vitruvian.settings import Size

# B images, R rows and C columns of patches, T tokens before them, N = T + R * C, D width, H heads, K classes


def require_vit(model: Model) -> ViT:
    """The model, if it has attention to show."""
    if isinstance(model, ViT):
        return model
    if isinstance(model, ResNet):
        raise ConfigError("this model is a BiT ResNet, which has no attention to explain; take a Vision Transformer")
    raise ConfigError("an exported graph does not show its attention; take the weights that it was made of")


def require_shares(model: Model, what: str) -> ViT:
    """The model, if each query divides its attention among the keys."""
    vit = require_vit(model)
    if vit.config.attention == "differential":
        raise ConfigError(
            f"{what} has no meaning for differential attention, which may be negative; gradient attention works"
        )
    return vit


@contextmanager
def inference(vit: ViT) -> Iterator[None]:
    """Without dropout and without gradients; the model is left as it was."""
    training = vit.training
    vit.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        vit.train(training)


def attention_rollout(model: Model, pixels: Tensor) -> Tensor:
    """How much of each patch reaches the answer if attention were all that moves information, (B, R, C).

    Figure 6 of the paper, after Abnar and Zuidema (2020). Memory: one layer's attention and one (B, N, N).
    """
    vit = require_shares(model, "attention rollout")
    rolled: Tensor | None = None
    with inference(vit):
        groups = iter(token_groups(vit.blocks, vit.config, vit.embed(pixels)))
        for name, value in vit.iter_intermediates(pixels, range(vit.config.depth)):
            if name.endswith("/attention"):
                rolled, means = roll(value, rolled), next(groups)
                rolled = rolled if means is None else means @ rolled
            elif name == "encoded":
                assert rolled is not None
                row = (readout(vit, value)[:, None] @ rolled)[:, 0]
                break
    return on_grid(vit, row, pixels)


def roll(attention: Tensor, before: Tensor | None = None) -> Tensor:
    """One step of rollout: (B, H, N, N) of a layer, and the product of the layers before it -> (B, N, N).

    The mean over heads plus identity for the residual connection, rows normalized.
    """
    mixed = attention.mean(dim=1)
    mixed = mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
    mixed = mixed / mixed.sum(dim=-1, keepdim=True)
    return mixed if before is None else mixed @ before


def attention_map(
    model: Model,
    pixels: Tensor,
    *,
    layer: int | None = None,
    head: int | None = None,
    patch: tuple[int, int] | None = None,
) -> Tensor:
    """What one layer attends to, (B, R, C): from where the answer is read, or from the patch (row, column).

    `layer` counts from 0, negative from the end; without it, the attention that is nearest to the answer:
    the last layer's, or the pooling probe's. Without `head`, the mean over heads.
    """
    vit = require_vit(model)
    check_head(vit, head)
    with inference(vit):
        if vit.attn_pool is not None and patch is None:
            rows = probe_rows(vit, pixels, layer)
        else:
            rows = token_rows(vit, pixels, -1 if layer is None else layer, patch)
    return on_grid(vit, rows.mean(dim=1) if head is None else rows[:, head], pixels)


def probe_rows(vit: ViT, pixels: Tensor, layer: int | None) -> Tensor:  # (B, H, N)
    if layer is not None:
        raise ConfigError(
            f"layer {layer}: this model is read by a probe after the last layer, so no token of a layer stands for "
            "the answer; choose a patch to look from, or leave the layer out for the probe's attention"
        )
    assert vit.attn_pool is not None
    tokens = next(value for name, value in vit.iter_intermediates(pixels) if name == "encoded")
    return vit.attn_pool.weights(tokens)[:, :, 0]


def token_rows(vit: ViT, pixels: Tensor, layer: int, patch: tuple[int, int] | None) -> Tensor:  # (B, H, N)
    grid = grid_of(vit, pixels)
    if patch is not None and not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
        wanted = f"rows 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}"
        raise ConfigError(f"patch {patch[0]},{patch[1]} does not exist: the grid has {wanted}")
    _, weights = next(vit.attention_maps(pixels, [layer]))
    if patch is not None:
        return weights[:, :, vit.config.prefix_tokens + patch[0] * grid[1] + patch[1]]
    return torch.einsum("n,bhnm->bhm", token_shares(vit, weights.shape[-1]).to(weights), weights)


def check_head(vit: ViT, head: int | None) -> None:
    if head is not None and not 0 <= head < vit.config.num_heads:
        raise ConfigError(f"head {head} does not exist: the model has heads 0 to {vit.config.num_heads - 1}")


def readout(vit: ViT, encoded: Tensor) -> Tensor:
    """How much each token counts where the answer is read, (B, N); a row sums to one."""
    if vit.attn_pool is not None:
        return vit.attn_pool.weights(encoded).mean(dim=1)[:, 0]
    return token_shares(vit, encoded.shape[1]).to(encoded).expand(len(encoded), -1)


def token_shares(vit: ViT, tokens: int) -> Tensor:
    """The readout (N) of pooling that does not depend on the image."""
    config, shares = vit.config, torch.zeros(tokens)
    if config.pool in ("token", "token_mean"):
        shares[: 2 if config.distillation else 1] = 1 / (2 if config.distillation else 1)
    if config.pool in ("mean", "token_mean"):
        shares[config.prefix_tokens :] += 1 / (tokens - config.prefix_tokens)
    return shares / shares.sum()


def grid_of(vit: ViT, pixels: Tensor) -> Size:
    return vit.config.grid_of((pixels.shape[-2], pixels.shape[-1]))


def on_grid(vit: ViT, row: Tensor, pixels: Tensor) -> Tensor:  # (B, N) -> (B, R, C)
    return row[:, vit.config.prefix_tokens :].view(-1, *grid_of(vit, pixels)).float().cpu()


def gradient_attention(model: Model, pixels: Tensor, classes: Sequence[int] | Tensor | None = None) -> Tensor:
    """How much each patch speaks for a class, (B, R, C), not negative.

    `classes` has one index an image; without it, each image's own answer. Where the pooling reads more tokens than
    one, their rows are averaged; the probe of `map` pooling takes part with the gradient of its own attention.
    """
    vit = require_vit(model)
    if vit.head is None:
        raise ConfigError("this model has no head, so there is no class to explain; rollout and attention need none")
    with inference(vit):
        steps = takewhile(lambda step: step[0] != "encoded", vit.iter_intermediates(pixels))
        inputs = [value for _, value in steps]  # what enters each block, and what leaves the last one: (B, N, D)
        with torch.enable_grad():
            row, gradient = answer_gradient(vit, inputs.pop(), classes)
            groups = token_groups(vit.blocks, vit.config, inputs[0])
            for block, means in zip(reversed(vit.blocks), reversed(groups)):
                assert isinstance(block, Block)
                row, gradient = through_block(block, inputs.pop(), vit.grid_of(pixels), (row, gradient), means)
    return on_grid(vit, row, pixels)


def answer_gradient(vit: ViT, tokens: Tensor, classes: Sequence[int] | Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the answer is read, (B, N), and the gradient of its logit at the tokens after the last block, (B, N, D)."""
    tokens = tokens.detach().requires_grad_()
    encoded = tokens if vit.config.norm_after_pool else vit.norm(tokens)
    if vit.attn_pool is None:
        chosen = chosen_logits(vit, vit.forward_head(encoded), classes)
        (gradient,) = torch.autograd.grad(chosen.sum(), tokens)
        return token_shares(vit, tokens.shape[1]).to(tokens).expand(len(tokens), -1), gradient
    assert vit.head is not None
    pooled, weights = vit.attn_pool.forward_with_weights(encoded)
    pooled = vit.norm(pooled) if vit.config.norm_after_pool else pooled
    chosen = chosen_logits(vit, vit.head(vit.pre_logits(pooled)), classes)
    gradient, slope = torch.autograd.grad(chosen.sum(), [tokens, weights])
    return speaking(weights, slope)[:, 0], gradient


def chosen_logits(vit: ViT, logits: Tensor, classes: Sequence[int] | Tensor | None) -> Tensor:  # (B, K) -> (B)
    """Of one class an image; where a threshold is on the energy, without what all logits of the image share.

    That term says how much of any class there is, not of which (evaluation/measuring/energy.py).
    """
    B, K = logits.shape
    if vit.meta.threshold_on == "energy":
        logits = logits - logits.mean(dim=1, keepdim=True)
    chosen = logits.argmax(dim=1) if classes is None else torch.as_tensor(classes, device=logits.device)
    if chosen.shape != (B,):
        raise ConfigError(f"{B} images need {B} classes, one each, not {tuple(chosen.shape)}")
    if chosen.min() < 0 or chosen.max() >= K:
        raise ConfigError(f"classes {chosen.tolist()}: the model has classes 0 to {K - 1}")
    return logits.gather(1, chosen[:, None].long())[:, 0]


def through_block(
    block: Block, x: Tensor, grid: Size, after: tuple[Tensor, Tensor], means: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The row, and the gradient, before a block from those after it; `means` (B, N, N) are of the tokens that merge."""
    x = x.detach().requires_grad_()
    row, gradient = after
    y, weights = block.forward_with_weights(x, grid, None if means is None else means.matmul)
    row = row if means is None else (row[:, None] @ means)[:, 0]
    before, slope = torch.autograd.grad(y, [x, weights], gradient)
    return row + (row[:, None] @ speaking(weights, slope))[:, 0], before


def speaking(weights: Tensor, slope: Tensor) -> Tensor:  # (B, H, N, N) -> (B, N, N)
    """The mean over heads of the attention that raises the logit."""
    return (weights.detach() * slope).clamp(min=0).mean(dim=1)
