"""Token merging (ToMe, Bolya et al. 2023): between attention and MLP, patches with similar keys become one token.

Every second patch token is a source, the others are targets. A source may join the target whose key, averaged over
heads, has the largest cosine similarity with its own. In each layer the `tome_r` most similar sources join; with
`tome_thresholds`, all sources above the layer's threshold do, so images differ in how many tokens remain. A merged
token is the mean of its patches and weighs as much in attention as it has patches (proportional attention). Class,
distillation and register tokens never merge.

A merged model therefore equals the full model with the patches of each group replaced by their mean after every
attention. `forward_merged` and `token_groups` return that layout, for pooling and for explanations.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.encoder import Block

# B images, N tokens (T before the patches), S sources, E targets, M sources that move, D width, H heads of K channels


class Tokens(NamedTuple):
    """The state passed from layer to layer."""

    x: Tensor  # (B, N, D)
    sizes: Tensor | None = None  # (B, N), number of patches that each token covers, 0 for padding; None: 1 for all
    owners: Tensor | None = None  # (B, N of the first layer), the token that covers each of those; None if not needed


def forward_merged(
    blocks: nn.ModuleList, config: ViTConfig, x: Tensor, first: int | None = None, *, checkpointing: bool = False
) -> Tensor:
    """Run embedded tokens (B, N, D) through all blocks, merging tokens as the config says.

    Returns (B, first, D), or without `first` (B, N, D) with each patch represented by the token that covers it.
    """
    tokens = Tokens(x, owners=None if first is not None else token_indices(x))
    for layer, block in enumerate(blocks):
        computed = first if layer == len(blocks) - 1 else None
        settings = block, config.prefix_tokens, *merging(config, layer), computed
        if checkpointing:
            tokens = checkpoint(run_layer, *settings, tokens, use_reentrant=False)
        else:
            tokens = run_layer(*settings, tokens)
    return tokens.x if tokens.owners is None or tokens.sizes is None else take_rows(tokens.x, tokens.owners)


def token_groups(blocks: nn.ModuleList, config: ViTConfig, x: Tensor) -> list[Tensor | None]:
    """For each layer, the matrix (B, N, N) that replaces every embedded token by the mean of its group.

    The row of a patch shows which patches its token covers after the layer. None if the layer merges nothing.
    """
    if not config.merges_tokens:
        return [None] * len(blocks)
    tokens = Tokens(x, owners=token_indices(x))
    groups: list[Tensor | None] = []
    for layer, block in enumerate(blocks):
        tokens = run_layer(block, config.prefix_tokens, *merging(config, layer), None, tokens)
        assert tokens.owners is not None
        same = (tokens.owners[:, :, None] == tokens.owners[:, None]).to(x.dtype)
        groups.append(None if tokens.sizes is None else same / same.sum(dim=-1, keepdim=True))
    return groups


def fit_thresholds(blocks: nn.ModuleList, config: ViTConfig, x: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """The thresholds with which the images of embedded tokens `x` (B, N, D) merge `counts` tokens per layer on average.

    An image with more similar patches merges more. Where a count is 0, the threshold is one that no key exceeds.
    """
    tokens, T = Tokens(x), config.prefix_tokens
    thresholds: list[float] = []
    for block, r in zip(blocks, counts):
        assert isinstance(block, Block)
        _, k, _ = block.attn.project(block.attn_input(tokens.x))
        sizes = torch.ones(tokens.x.shape[:2], device=k.device) if tokens.sizes is None else tokens.sizes
        likeness, _ = similarities(k, sizes, *halves(T, tokens.x.shape[1]), padded=True)
        ordered = likeness[likeness.isfinite()].sort(descending=True).values
        rank = min(r * len(x), len(ordered) - 1)
        thresholds.append(float(ordered[rank].clamp(-1, 1)) if r else 1.0)
        tokens = run_layer(block, T, 0, thresholds[-1], None, tokens)
    return tuple(thresholds)


def halves(T: int, N: int) -> tuple[slice, slice]:
    """Sources and targets among N tokens: the patches at even and at odd indices."""
    return slice(T + T % 2, N, 2), slice(T + 1 - T % 2, N, 2)


def merging(config: ViTConfig, layer: int) -> tuple[int, float | None]:
    """The number of tokens that a layer merges, or the threshold above which it merges them."""
    return (0, config.tome_thresholds[layer]) if config.tome_thresholds else (config.tome_counts[layer], None)


def run_layer(block: nn.Module, T: int, r: int, threshold: float | None, first: int | None, tokens: Tokens) -> Tokens:
    """Attention, merging and MLP of one layer; with `first`, only that many tokens are computed."""
    assert isinstance(block, Block)
    x, sizes, _ = tokens
    attn_input = block.attn_input(x)
    # proportional attention: a token of s patches counts s times in the softmax, which adds log(s) to its logit
    bias = None if sizes is None else sizes.to(attn_input.dtype).log()[:, None, None]  # (B, 1, 1, N)
    if first is not None:  # merging would have no effect on the output
        return Tokens(block.finish(x[:, :first], block.attn.attend_first(attn_input, first, bias)))
    q, k, v = block.attn.project(attn_input)
    branch = block.attn.output(block.attn.attend(q, k, v, bias))
    after = tokens

    def merge(x: Tensor) -> Tensor:
        nonlocal after
        after = merge_tokens(tokens._replace(x=x), k, T, r, threshold)
        return after.x

    x = block.finish(x, branch, merge if r or threshold is not None else None)
    return after._replace(x=x)


def merge_tokens(tokens: Tokens, k: Tensor, T: int, r: int, threshold: float | None = None) -> Tokens:
    """Merge the `r` most similar sources, or all above the threshold, into the targets that their keys match.

    `k` are the keys (B, H, N, K). Tokens are returned in ToMe's order: T prefix tokens, remaining sources, targets.
    """
    x, N = tokens.x, tokens.x.shape[1]
    source, target = halves(T, N)
    r = min(r, (N - T) // 2)
    if N - T < 2 or (threshold is None and r == 0):
        return tokens
    sizes = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device) if tokens.sizes is None else tokens.sizes
    likeness, match = similarities(k, sizes, source, target, padded=threshold is not None)
    order, source_sizes = likeness.argsort(dim=1, descending=True), sizes[:, source]
    if threshold is None:
        moved, left = order[:, :r], order[:, r:].sort(dim=1).values  # (B, M), (B, S - M)
        moved_sizes, left_sizes = source_sizes.gather(1, moved), source_sizes.gather(1, left)
    else:  # the count differs between images: a source that stays has size 0 among `moved`, one that moves among `left`
        joins = likeness > threshold
        moved, left = order[:, : int(joins.sum(dim=1).max())], token_indices(source_sizes)  # (B, M), (B, S)
        moved_sizes, left_sizes = (source_sizes * joins).gather(1, moved), source_sizes * ~joins
    old = sizes[:, target]
    onto = match.gather(1, moved)[:, None] == torch.arange(old.shape[1], device=x.device)[:, None]  # (B, E, M)
    parts = onto * moved_sizes[:, None]
    new = old + parts.sum(dim=2)
    sums = x[:, target] * old[..., None] + parts @ take_rows(x[:, source], moved)
    mean = sums / (new if threshold is None else new.clamp(min=1))[..., None]
    after = Tokens(
        torch.cat([x[:, :T], take_rows(x[:, source], left), mean], dim=1),
        torch.cat([sizes[:, :T], left_sizes, new], dim=1),
    )
    if tokens.owners is not None:
        ahead = T + left.shape[1]
        index = token_indices(x).clone()  # of each old token among the new ones
        index[:, target] = ahead + token_indices(new)
        left_index = torch.where(left_sizes > 0, T + token_indices(left), ahead + match.gather(1, left))
        index[:, source] = (ahead + match).scatter(1, left, left_index)
        after = after._replace(owners=index.gather(1, tokens.owners))
    return after if threshold is None else trim_padding(after)


def similarities(k: Tensor, sizes: Tensor, source: slice, target: slice, *, padded: bool) -> tuple[Tensor, Tensor]:
    """For each source, the largest cosine similarity with a target's key and that target's index: both (B, S)."""
    metric = F.normalize(k.detach().mean(dim=1), dim=-1)  # (B, N, K)
    cosines = metric[:, source] @ metric[:, target].transpose(1, 2)  # (B, S, E)
    if padded:
        real = sizes > 0
        cosines = cosines.masked_fill(~(real[:, source, None] & real[:, None, target]), -torch.inf)
    return cosines.max(dim=2)


def trim_padding(tokens: Tokens) -> Tokens:
    """Move tokens of size 0 to the end and cut to the longest image of the batch."""
    assert tokens.sizes is not None
    real = tokens.sizes > 0
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # real tokens keep their order
    rows = order[:, : int(real.sum(dim=1).max())]
    owners = None if tokens.owners is None else order.argsort(dim=1).gather(1, tokens.owners)
    return Tokens(take_rows(tokens.x, rows), tokens.sizes.gather(1, rows), owners)


def take_rows(x: Tensor, index: Tensor) -> Tensor:  # (B, N, D), (B, M) -> (B, M, D)
    """Rows by index; faster than `gather` with an index per channel, in every runtime."""
    B, N, D = x.shape
    start = torch.arange(B, device=x.device)[:, None] * N
    return x.reshape(B * N, D).index_select(0, (index + start).flatten()).view(B, -1, D)


def token_indices(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)


def tome_schedule(r: float, layers: int, inflection: float = 0.0) -> tuple[int, ...]:
    """ToMe's schedule: the number of tokens to merge in each layer, `r` on average.

    An inflection of 0 is constant, -1 decreases from 2 r to 0, 1 increases from 0 to 2 r.
    """
    if not -1 <= inflection <= 1:
        raise ConfigError(f"inflection={inflection} is not between -1 and 1")
    start = int(r * (1 - inflection))
    slope = 2 * (r - start) / max(1, layers - 1)
    return tuple(int(start + slope * layer) for layer in range(layers))
