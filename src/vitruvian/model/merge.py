"""Token merging (ToMe): between attention and MLP, patches with similar keys become one token; later layers cost less.

After Bolya et al. (2023). Every second token is a source, the others are targets; a source may join the target whose
key, averaged over heads, has the largest cosine with its own. In each layer the `tome_r` sources with the largest do;
or, with `tome_thresholds`, all that exceed the layer's threshold, as many as an image has. A merged token is the mean
of its patches and is attended to as often as it has patches (proportional attention). Tokens before the patches never
merge.

So a merged model is the whole model in which the patches of a group are replaced by their mean, after the attention of
each layer. `forward_merged` and `token_groups` give that layout, for pooling and explanations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitruvian.errors import ConfigError
from vitruvian.model.encoder import Block, Merge

if TYPE_CHECKING:
    from vitruvian.model.vit import ViT

# B images, N tokens (T before the patches), S sources, E targets, M of the sources that move, D width, H heads, K
# channels of a head


class Tokens(NamedTuple):
    """What goes from layer to layer."""

    x: Tensor
    """(B, N, D)"""
    sizes: Tensor | None = None
    """Patches that each token covers, (B, N); 0 where an image has fewer tokens than others. None: 1 for all."""
    owners: Tensor | None = None
    """Which token covers each token of the first layer, (B, N there); None where nobody asks."""


def forward_merged(vit: ViT, x: Tensor, first: int | None) -> Tensor:
    """Embedded tokens (B, N, D) through all blocks: (B, first, D), or (B, N, D) with each patch as its merged token."""
    tokens = Tokens(x, owners=None if first is not None else numbered(x))
    for layer in range(len(vit.blocks)):
        tokens = run_layer(vit, layer, tokens, first, merging_of(vit, layer))
    return tokens.x if tokens.owners is None or tokens.sizes is None else rows_of(tokens.x, tokens.owners)


def token_groups(vit: ViT, x: Tensor) -> list[Tensor | None]:
    """For each layer a matrix (B, N, N) that gives each of the embedded tokens the mean of its group; None: no groups.

    Its row of a patch says which patches the token stands for that covers this patch after the layer.
    """
    if not vit.config.merges_tokens:
        return [None] * len(vit.blocks)
    tokens = Tokens(x, owners=numbered(x))
    found: list[Tensor | None] = []
    for layer in range(len(vit.blocks)):
        tokens = run_layer(vit, layer, tokens, None, merging_of(vit, layer))
        assert tokens.owners is not None
        same = (tokens.owners[:, :, None] == tokens.owners[:, None]).to(x.dtype)
        found.append(None if tokens.sizes is None else same / same.sum(dim=-1, keepdim=True))
    return found


def merges_of(vit: ViT, x: Tensor) -> list[Merge | None]:
    """What each layer does to all of the embedded tokens (B, N, D) in place of merging them."""
    return [None if means is None else means.matmul for means in token_groups(vit, x)]


def fit_thresholds(vit: ViT, pixels: Tensor, counts: Sequence[int]) -> tuple[float, ...]:
    """The threshold of each layer with which these images (B, channels, rows, columns) merge `counts` on average.

    An image merges more or fewer, as alike as its patches are. Where a count is 0, the threshold is one that no key
    exceeds.
    """
    tokens, T = Tokens(vit.embed(pixels)), vit.config.prefix_tokens
    found: list[float] = []
    for layer, r in enumerate(counts):
        block = vit.blocks[layer]
        assert isinstance(block, Block)
        _, k, _ = block.attn.project(block.attention_input(tokens.x))
        sizes = torch.ones(tokens.x.shape[:2], device=k.device) if tokens.sizes is None else tokens.sizes
        likeness, _ = similarities(k, sizes, *halves(T, tokens.x.shape[1]), padded=True)
        ordered = likeness[likeness.isfinite()].sort(descending=True).values
        place = min(r * len(pixels), len(ordered) - 1)
        found.append(float(ordered[place].clamp(-1, 1)) if r else 1.0)
        tokens = run_layer(vit, layer, tokens, None, (0, found[-1]))
    return tuple(found)


def merging_of(vit: ViT, layer: int) -> tuple[int, float | None]:
    """How many tokens merge in a layer, or its threshold."""
    thresholds = vit.config.tome_thresholds
    return (0, thresholds[layer]) if thresholds else (vit.config.tome_counts[layer], None)


def halves(T: int, N: int) -> tuple[slice, slice]:
    """Sources and targets among N tokens: the patches at even and at odd places."""
    return slice(T + T % 2, N, 2), slice(T + 1 - T % 2, N, 2)


def run_layer(vit: ViT, layer: int, tokens: Tokens, first: int | None, merging: tuple[int, float | None]) -> Tokens:
    """Attention, merging and MLP; the last layer computes only the `first` tokens, if that is asked for."""
    block, kept = vit.blocks[layer], first if layer == len(vit.blocks) - 1 else None
    assert isinstance(block, Block)
    r, threshold = merging

    def run(*given: Tensor | None) -> Tokens:
        before = Tokens(*given)  # type: ignore[arg-type]
        seen = block.attention_input(before.x)
        bias = None if before.sizes is None else before.sizes.to(seen.dtype).log()[:, None, None]  # (B, 1, 1, N)
        if kept is not None:  # nobody reads what would merge
            return Tokens(block.finish(before.x[:, :kept], block.attn.few(seen, kept, bias)))
        q, k, v = block.attn.project(seen)
        branch = block.attn.joined(block.attn.attend(q, k, v, bias))
        after = before

        def merge(x: Tensor) -> Tensor:
            nonlocal after
            after = merged(before._replace(x=x), k, vit.config.prefix_tokens, r, threshold)
            return after.x

        return Tokens(block.finish(before.x, branch, merge if r or threshold is not None else None), *after[1:])

    if vit.training and vit.grad_checkpointing:
        return Tokens(*checkpoint(run, *tokens, use_reentrant=False))
    return run(*tokens)


def merged(tokens: Tokens, k: Tensor, T: int, r: int, threshold: float | None = None) -> Tokens:
    """The tokens after `r` sources, or all above the threshold, joined the targets whose keys (B, H, N, K) they match.

    In the order of ToMe: the T tokens before the patches, the sources that stay, the targets.
    """
    x, N = tokens.x, tokens.x.shape[1]
    source, target = halves(T, N)
    r = min(r, (N - T) // 2)
    if N - T < 2 or (threshold is None and r == 0):
        return tokens
    sizes = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device) if tokens.sizes is None else tokens.sizes
    likeness, match = similarities(k, sizes, source, target, padded=threshold is not None)
    moves = moves_of(likeness, sizes[:, source], r, threshold)
    old = sizes[:, target]
    onto = match.gather(1, moves.moved)[:, None] == torch.arange(old.shape[1], device=x.device)[:, None]  # (B, E, M)
    parts = onto * moves.moved_sizes[:, None]
    new = old + parts.sum(dim=2)
    sums = x[:, target] * old[..., None] + parts @ rows_of(x[:, source], moves.moved)
    mean = sums / (new if threshold is None else new.clamp(min=1))[..., None]
    after = Tokens(
        torch.cat([x[:, :T], rows_of(x[:, source], moves.left), mean], dim=1),
        torch.cat([sizes[:, :T], moves.left_sizes, new], dim=1),
    )
    if tokens.owners is not None:
        ahead = T + moves.left.shape[1]
        places = numbered(x).clone()
        places[:, target] = ahead + numbered(new)
        left_places = torch.where(moves.left_sizes > 0, T + numbered(moves.left), ahead + match.gather(1, moves.left))
        places[:, source] = (ahead + match).scatter(1, moves.left, left_places)
        after = after._replace(owners=places.gather(1, tokens.owners))
    return after if threshold is None else without_padding(after)


class Moves(NamedTuple):
    """Which sources join their targets and which are left, by number and with the patches that each brings."""

    moved: Tensor  # (B, M)
    moved_sizes: Tensor
    left: Tensor  # (B, L)
    left_sizes: Tensor


def moves_of(likeness: Tensor, sizes: Tensor, r: int, threshold: float | None) -> Moves:  # each (B, S)
    order = likeness.argsort(dim=1, descending=True)
    if threshold is None:
        moved, left = order[:, :r], order[:, r:].sort(dim=1).values
        return Moves(moved, sizes.gather(1, moved), left, sizes.gather(1, left))
    joins = likeness > threshold
    moved = order[:, : int(joins.sum(dim=1).max())]
    return Moves(moved, (sizes * joins).gather(1, moved), numbered(sizes), sizes * ~joins)


def similarities(k: Tensor, sizes: Tensor, source: slice, target: slice, *, padded: bool) -> tuple[Tensor, Tensor]:
    """The largest cosine of each source's key with a target's, and the number of that target: both (B, S)."""
    metric = F.normalize(k.detach().mean(dim=1), dim=-1)  # (B, N, K)
    found = metric[:, source] @ metric[:, target].transpose(1, 2)  # (B, S, E)
    if padded:
        real = sizes > 0
        found = found.masked_fill(~(real[:, source, None] & real[:, None, target]), -torch.inf)
    return found.max(dim=2)


def without_padding(tokens: Tokens) -> Tokens:
    """The tokens with those of size 0 behind the others, as many as the image with the most tokens leaves over."""
    assert tokens.sizes is not None
    real = tokens.sizes > 0
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)  # the real tokens are ordered as if alone
    kept = order[:, : int(real.sum(dim=1).max())]
    owners = None if tokens.owners is None else order.argsort(dim=1).gather(1, tokens.owners)
    return Tokens(rows_of(tokens.x, kept), tokens.sizes.gather(1, kept), owners)


def rows_of(x: Tensor, index: Tensor) -> Tensor:  # (B, N, D), (B, M) -> (B, M, D)
    """Rows by number; quicker than `gather` with an index for each channel, in every runtime."""
    B, N, D = x.shape
    start = torch.arange(B, device=x.device)[:, None] * N
    return x.reshape(B * N, D).index_select(0, (index + start).flatten()).view(B, -1, D)


def numbered(x: Tensor) -> Tensor:
    """0, 1, ... for the second axis, (B, N)."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)


def tome_schedule(r: float, layers: int, inflection: float = 0.0) -> tuple[int, ...]:
    """Tokens that merge in each layer, `r` on average, as ToMe has it.

    `inflection` 0 is the same number in each, -1 falls from 2 r to 0, 1 rises from 0 to 2 r.
    """
    if not -1 <= inflection <= 1:
        raise ConfigError(f"inflection={inflection} is not between -1 and 1")
    start = int(r * (1 - inflection))
    slope = 2 * (r - start) / max(1, layers - 1)
    return tuple(int(start + slope * layer) for layer in range(layers))
