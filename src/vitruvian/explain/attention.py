"""Attention maps: raw attention, attention rollout, gradient-weighted attention; and the logits of each patch.

A map has one number per patch: how much the patch contributes to the tokens that the head reads, which depend on the
pooling:

- `token`: the class token; with distillation the mean of the class and the distillation token;
- `mean`: the mean of all patches; `token_mean`: half the class token, half that mean;
- `prefix_mean`, `prefix_concat`: the mean of the tokens that they read;
- `map`: the output of the attention pooling, weighted by what its probe attends to.

Tokens before the patches (class, distillation, registers) have no position in the image; their part is missing from the
sum of a map. With token merging, a map still has the whole grid: a patch has its part of the token that contains it.

Gradient-weighted attention follows Chefer, Gur and Wolf (2021) for self-attention. For each layer, A is the mean over
heads of the positive part of attention times the gradient of one class's logit; through the layers, R = R + A R; the
map is the row of R for the tokens that the head reads. Only this row is needed: it is multiplied from the last layer to
the first, as the gradient is propagated. Each block is computed again with explicit attention weights, so that only one
layer is in memory.
"""

from collections.abc import Sequence
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from vitruvian.engines.graph import ImageModel
from vitruvian.errors import ConfigError
from vitruvian.model.batching import eval_mode
from vitruvian.model.build import Model
from vitruvian.model.encoder import Attention, Block
from vitruvian.model.resnet import ResNet
from vitruvian.model.token_merging import token_groups
from vitruvian.model.vit import ViT
from vitruvian.settings import Size

# B images, R rows and C columns of patches, T tokens before them, N = T + R * C, D width, H heads, K classes


def require_vit(model: ImageModel) -> ViT:
    """The model if it is a ViT. Raises ConfigError for models without attention."""
    if isinstance(model, ViT) and model.config.attention == "mixer":
        raise ConfigError("an MLP-Mixer has no attention to explain; use a Vision Transformer")
    if isinstance(model, ViT):
        return model
    if isinstance(model, ResNet):
        raise ConfigError("a BiT ResNet has no attention to explain; use a Vision Transformer")
    raise ConfigError("an exported graph does not expose its attention; load the original weights instead")


def require_shares(model: Model, what: str) -> ViT:
    """The model if its attention weights are not negative. Raises ConfigError for differential attention."""
    vit = require_vit(model)
    if vit.config.attention == "differential":
        reason = f"{what} is not defined for differential attention, which may be negative; use gradient attention"
        raise ConfigError(reason)
    return vit


def attention_rollout(model: Model, pixels: Tensor) -> Tensor:
    """Attention rollout (Abnar and Zuidema, 2020), as in Figure 6 of the paper.

    Args:
        model: A ViT.
        pixels: Normalized pixels (B, channels, height, width).

    Returns:
        Maps (B, R, C): how much of each patch reaches the output if attention alone moves information.

    Raises:
        ConfigError: The model has no attention, or its weights may be negative.
    """
    vit = require_shares(model, "attention rollout")
    rolled: Tensor | None = None
    with eval_mode(vit), torch.no_grad():
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
    """One step of rollout: attention (B, H, N, N) of a layer, and the product of the layers before it -> (B, N, N).

    The mean over heads plus the identity for the residual connection, with normalized rows.
    """
    mixed = attention.mean(dim=1)
    mixed = mixed + torch.eye(mixed.shape[-1], dtype=mixed.dtype, device=mixed.device)
    mixed = mixed / mixed.sum(dim=-1, keepdim=True)
    return mixed if before is None else mixed @ before


def attention_map(
    model: Model, pixels: Tensor, *, layer: int | None = None, head: int | None = None, patch: Size | None = None
) -> Tensor:
    """Attention weights of one layer.

    Args:
        model: A ViT.
        pixels: Normalized pixels (B, channels, height, width).
        layer: Index from 0, negative from the end. By default the last layer, or the probe of the attention pooling.
        head: Index of a head; by default the mean over heads.
        patch: Row and column of the query patch; by default the tokens that the head reads.

    Returns:
        Maps (B, R, C).

    Raises:
        ConfigError: The model has no attention, or the layer, head or patch does not exist.
    """
    vit = require_vit(model)
    check_head(vit, head)
    grid = vit.grid_of(pixels)
    if patch is not None and not (0 <= patch[0] < grid[0] and 0 <= patch[1] < grid[1]):
        sides = f"rows 0 to {grid[0] - 1} and columns 0 to {grid[1] - 1}"
        raise ConfigError(f"patch {patch[0]},{patch[1]} does not exist: the grid has {sides}")
    with eval_mode(vit), torch.no_grad():
        if vit.attn_pool is not None and patch is None:
            if layer is not None:
                reason = f"layer {layer}: the head reads a pooling probe after the last layer, not a token of a layer"
                hint = "choose a query patch, or leave out the layer for the attention of the probe"
                raise ConfigError(reason, hint=hint)
            tokens = next(value for name, value in vit.iter_intermediates(pixels) if name == "encoded")
            rows = vit.attn_pool.forward_with_weights(tokens)[1][:, :, 0]  # (B, H, N)
        else:
            _, weights = next(vit.attention_maps(pixels, [-1 if layer is None else layer]))
            if patch is None:
                shares = token_shares(vit, weights.shape[-1]).to(weights)
                rows = torch.einsum("n,bhnm->bhm", shares, weights)
            else:
                rows = weights[:, :, vit.config.prefix_tokens + patch[0] * grid[1] + patch[1]]
    return on_grid(vit, rows.mean(dim=1) if head is None else rows[:, head], pixels)


def check_head(vit: ViT, head: int | None) -> None:
    if head is not None and not 0 <= head < vit.config.num_heads:
        raise ConfigError(f"head {head} does not exist: the model has heads 0 to {vit.config.num_heads - 1}")


def readout(vit: ViT, encoded: Tensor) -> Tensor:
    """The weight of each token in what the head reads, (B, N); rows sum to one."""
    if vit.attn_pool is not None:
        return vit.attn_pool.forward_with_weights(encoded)[1].mean(dim=1)[:, 0]
    return token_shares(vit, encoded.shape[1]).to(encoded).expand(len(encoded), -1)


def token_shares(vit: ViT, tokens: int) -> Tensor:
    """The readout (N,) of pooling that does not depend on the image."""
    config, shares = vit.config, torch.zeros(tokens)
    if config.pool != "mean":
        shares[: config.tokens_read or 1] = 1 / (config.tokens_read or 1)
    if config.pool in ("mean", "token_mean"):
        shares[config.prefix_tokens :] += 1 / (tokens - config.prefix_tokens)
    return shares / shares.sum()


def on_grid(vit: ViT, row: Tensor, pixels: Tensor) -> Tensor:  # (B, N) -> (B, R, C)
    return row[:, vit.config.prefix_tokens :].view(-1, *vit.grid_of(pixels)).float().cpu()


def gradient_attention(model: Model, pixels: Tensor, classes: Sequence[int] | Tensor | None = None) -> Tensor:
    """Gradient-weighted attention (Chefer, Gur and Wolf, 2021).

    If the head reads several tokens, their rows are averaged; the probe of `map` pooling contributes the gradient of
    its own attention.

    Args:
        model: A ViT with a head.
        pixels: Normalized pixels (B, channels, height, width).
        classes: One class index per image; by default the predicted class.

    Returns:
        Maps (B, R, C): how much each patch supports the class, not negative.

    Raises:
        ConfigError: The model has no attention or no head, or a class does not exist.
    """
    vit = require_vit(model)
    if vit.head is None:
        raise ConfigError("this model has no head, so there is no class to explain; use rollout or attention")
    with eval_mode(vit), torch.no_grad():
        steps = takewhile(lambda step: step[0] != "encoded", vit.iter_intermediates(pixels))
        inputs = [value for _, value in steps]  # inputs of the blocks and output of the last one, (B, N, D)
        with torch.enable_grad():
            row, gradient = head_gradient(vit, inputs.pop(), classes)
            groups = token_groups(vit.blocks, vit.config, inputs[0])
            for block, means in zip(reversed(vit.blocks), reversed(groups)):  # `means` (B, N, N) average merged tokens
                assert isinstance(block, Block)
                x = inputs.pop().detach().requires_grad_()
                merge = None if means is None else means.matmul
                y, weights = block.forward_with_weights(x, vit.grid_of(pixels), merge)
                gradient, slope = torch.autograd.grad(y, [x, weights], gradient)
                row = row if means is None else (row[:, None] @ means)[:, 0]
                row = row + (row[:, None] @ positive_attention(weights, slope))[:, 0]
    return on_grid(vit, row, pixels)


def patch_logits(model: Model, pixels: Tensor) -> Tensor:
    """The logits that each patch would have by itself, (B, R, C, K): where the classes apply.

    As in MaskCLIP (Zhou, Loy and Dai, 2022), the values of the last block's attention stand for its output, so that a
    patch is described by what it shows instead of what it attends to, and the head reads each of them.

    Args:
        model: A ViT with a head, or a CLIP or SigLIP with the labels of `with_words`.
        pixels: Normalized pixels (B, channels, height, width).

    Raises:
        ConfigError: The model has no head, or its last block or its pooling is of another kind.
    """
    vit = require_vit(model)
    block, config = vit.blocks[-1], vit.config
    if vit.head is None:
        raise ConfigError("this model has no head, so there is no class to find in its patches; name labels")
    if type(block) is not Block or type(block.attn) is not Attention or config.pool not in ("token", "mean", "map"):
        raise ConfigError("the head of this model cannot read single patches; use gradient attention")
    before = f"block_{config.depth - 2}" if config.depth > 1 else "embedded"
    with eval_mode(vit), torch.no_grad():
        x = next(value for name, value in vit.iter_intermediates(pixels) if name == before)
        grid = vit.grid_of(pixels)
        values = block.attn.split_heads(block.attn_input(block.add_positions(x, grid)))[2]  # (B, H, N, D // H)
        patches = block.attn.output(values)[:, config.prefix_tokens :]  # (B, P, D)
        patches = patches if block.ls1 is None else patches * block.ls1
        tokens = patches.flatten(0, 1)[:, None]  # each patch as an image of one token
        tokens = tokens if config.norm_after_pool else vit.norm(tokens)
        pool = vit.attn_pool
        features = tokens[:, 0] if pool is None else pool.finish(pool.project(tokens)[2])
        features = vit.pre_logits(vit.norm(features) if config.norm_after_pool else features)
        logits = vit.head(F.normalize(features, dim=-1) if config.unit_features else features)
    return logits.view(len(pixels), *grid, -1).float().cpu()


def head_gradient(vit: ViT, tokens: Tensor, classes: Sequence[int] | Tensor | None) -> tuple[Tensor, Tensor]:
    """The readout (B, N), and the gradient of the class's logit at the tokens after the last block (B, N, D)."""
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
    return positive_attention(weights, slope)[:, 0], gradient


def chosen_logits(vit: ViT, logits: Tensor, classes: Sequence[int] | Tensor | None) -> Tensor:  # (B, K) -> (B)
    """The logit of one class per image.

    With a threshold on the energy, the mean of the logits is subtracted: the term that `shift_energy` adds to all of
    them says whether there is any class, not which.
    """
    B, K = logits.shape
    if vit.meta.threshold_on == "energy":
        logits = logits - logits.mean(dim=1, keepdim=True)
    chosen = logits.argmax(dim=1) if classes is None else torch.as_tensor(classes, device=logits.device)
    if chosen.shape != (B,):
        raise ConfigError(f"expected one class per image ({B}), got {tuple(chosen.shape)}")
    if chosen.min() < 0 or chosen.max() >= K:
        raise ConfigError(f"classes {chosen.tolist()}: the model has classes 0 to {K - 1}")
    return logits.gather(1, chosen[:, None].long())[:, 0]


def positive_attention(weights: Tensor, slope: Tensor) -> Tensor:  # (B, H, N, N) -> (B, N, N)
    """The mean over heads of attention times gradient, where it is positive."""
    return (weights.detach() * slope).clamp(min=0).mean(dim=1)
