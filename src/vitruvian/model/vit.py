"""The Vision Transformer whole: embedding, blocks, pooling and head, naming its intermediates on request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitruvian.config import Preprocess, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.embed import Embedding
from vitruvian.model.encoder import Block, Mlp

# B images, N tokens (T before the patches), D width, F features the head reads, K classes


class ViT(nn.Module):
    """Normalized pixels (B, channels, height, width) -> logits (B, K), or features (B, F) without a head."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.preprocess = Preprocess(image_size=config.image_size)
        self.labels: tuple[str, ...] | None = None
        self.origin = ""
        self.temperature = 1.0
        """Logits are divided by it before they become probabilities; `vit evaluate` can fit it."""
        self.drop_tokens = 0.0
        """Share of an image's patch tokens that are left out while training, drawn anew each time."""
        self.checkpoint_activations = False
        """While training, keep only what enters each block and compute the rest again for its gradients."""
        self.embed = Embedding(config)
        last = max(1, config.layers - 1)
        self.blocks = nn.ModuleList(
            Block(config, skip=config.stochastic_depth * layer / last) for layer in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.numerics.norm_eps)
        self.pool = AttentionPool(config) if config.pool == "map" else None
        self.hidden = nn.Linear(config.pooled_width, config.head_hidden) if config.head_hidden else None
        self.head = nn.Linear(config.feature_width, config.classes) if config.classes else None
        two_heads = config.distillation and config.classes
        self.distillation_head = nn.Linear(config.feature_width, config.classes) if two_heads else None

    def forward(self, pixels: Tensor) -> Tensor:
        self.check(pixels)
        return self.answer(self.encode(pixels, self.tokens_read))

    def check(self, pixels: Tensor) -> None:
        if pixels.dim() != 4 or pixels.shape[1] != self.config.channels:
            raise ConfigError(
                f"pixels have shape {tuple(pixels.shape)}, the model wants (B, {self.config.channels}, height, width)"
            )

    @property
    def tokens_read(self) -> int | None:
        """How many of the first tokens pooling and heads read; None is all of them.

        The last block need not compute the others: a sixteenth of ViT-B/16's arithmetic.
        """
        return 1 + self.config.distillation if self.config.pool == "token" else None

    def encode(self, pixels: Tensor, first: int | None = None) -> Tensor:
        """Tokens after the last block and, unless it waits for the pooled vector, the final norm: (B, N, D).

        With `first`, only that many tokens; the numbers are the same.
        """
        return self.contextual(self.embed(pixels), first)

    def contextual(self, tokens: Tensor, first: int | None = None) -> Tensor:
        """Embedded tokens (B, N, D) through all blocks; the rest of `encode`."""
        x = self.thinned(tokens) if self.training and self.drop_tokens else tokens
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            kept = first if layer == last else None
            if self.training and self.checkpoint_activations:
                x = checkpoint(block, x, kept, use_reentrant=False)
            else:
                x = block(x, kept)
        return x if self.config.norm_after_pool else self.norm(x)

    def thinned(self, tokens: Tensor) -> Tensor:
        """The tokens before the patches, and as many random patches of each image as `drop_tokens` leaves."""
        if self.config.positions == "relative":
            raise ConfigError("tokens cannot be left out of a model with relative positions: they are its order")
        B, N, D = tokens.shape
        T = self.config.prefix_tokens
        kept = max(1, round((N - T) * (1 - self.drop_tokens)))
        chosen = torch.rand(B, N - T, device=tokens.device).argsort(dim=1)[:, :kept, None].expand(-1, -1, D)
        return torch.cat([tokens[:, :T], tokens[:, T:].gather(1, chosen)], dim=1)  # (B, T + kept, D)

    def features(self, pixels: Tensor) -> Tensor:
        """What the head reads, (B, F)."""
        return self.represent(self.pooled(self.encode(pixels, self.tokens_read)))

    def pooled(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D), or (B, 2 D) for token_mean
        config = self.config
        if self.pool is not None:
            pooled: Tensor = self.pool(tokens)
        elif config.pool == "token":
            pooled = tokens[:, 0]
        else:
            pooled = tokens[:, config.prefix_tokens :].mean(dim=1)
            if config.pool == "token_mean":
                pooled = torch.cat([tokens[:, 0], pooled], dim=-1)
        return self.norm(pooled) if config.norm_after_pool else pooled

    def represent(self, pooled: Tensor) -> Tensor:
        return pooled if self.hidden is None else self.hidden(pooled).tanh()

    def answer(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, K)
        features = self.represent(self.pooled(tokens))
        if self.head is None:
            return features
        logits: Tensor = self.head(features)
        if self.distillation_head is not None:
            logits = (logits + self.distillation_head(self.represent(tokens[:, 1]))) / 2
        return logits

    def walk(self, pixels: Tensor, attention: Iterable[int] = ()) -> Iterator[tuple[str, Tensor]]:
        """The forward pass step by step: each intermediate's name and value, in order.

        `embedded`, then for each layer i `block_i/attention` (B, H, N, N) if asked for and `block_i`
        (B, N, D), then `encoded`, `pooled`, `features` and `logits`. Nothing is kept that the caller
        does not keep.
        """
        self.check(pixels)
        wanted = set(attention)
        x = self.embed(pixels)
        yield "embedded", x
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            if layer in wanted:
                yield f"block_{layer}/attention", block.attention.weights(block.norm1(x))
            x = block(x)
            yield f"block_{layer}", x
        tokens = x if self.config.norm_after_pool else self.norm(x)
        yield "encoded", tokens
        yield "pooled", self.pooled(tokens)
        yield "features", self.represent(self.pooled(tokens))
        if self.head is not None:
            yield "logits", self.answer(tokens)

    @property
    def intermediate_names(self) -> list[str]:
        layers = range(self.config.layers)
        blocks = [name for i in layers for name in (f"block_{i}/attention", f"block_{i}")]
        return ["embedded", *blocks, "encoded", "pooled", "features", *(["logits"] if self.head is not None else [])]

    def intermediates(self, pixels: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """The named intermediates of one forward pass; see `walk` for the names."""
        names = list(names)
        known = self.intermediate_names
        for name in names:
            if name not in known:
                raise UnknownNameError("intermediate", name, known)
        attention = [int(name[6:].split("/")[0]) for name in names if name.endswith("/attention")]
        found = {name: value for name, value in self.walk(pixels, attention) if name in names}
        return {name: found[name] for name in names}

    def attention_maps(self, pixels: Tensor, layers: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Layer number and its attention (B, H, N, N), one layer at a time, so that one map is held at once."""
        wanted = range(self.config.layers) if layers is None else [self.layer(i) for i in layers]
        for name, value in self.walk(pixels, wanted):
            if name.endswith("/attention"):
                yield int(name[6:].split("/")[0]), value

    def layer(self, index: int) -> int:
        """A layer's number from 0; negative counts from the end."""
        layers = self.config.layers
        if not -layers <= index < layers:
            raise ConfigError(f"layer {index} does not exist: the model has layers 0 to {layers - 1}")
        return index % layers


class AttentionPool(nn.Module):
    """MAP pooling: a learned probe attends to all tokens, then LayerNorm and a residual MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.query = nn.Linear(D, D)
        self.key_value = nn.Linear(D, 2 * D)
        self.out = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D, eps=config.numerics.norm_eps)
        self.mlp = Mlp(D, config.mlp_width, gelu=config.numerics.gelu)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        B, _, D = tokens.shape
        q, k, v = self.project(tokens)
        x = F.scaled_dot_product_attention(q, k, v)  # (B, H, 1, D // H)
        x = self.out(x.transpose(1, 2).reshape(B, 1, D))
        return (x + self.mlp(self.norm(x)))[:, 0]

    def explicit(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the probe's weights (B, H, 1, N) that it depends on, for gradients between them."""
        weights = self.weights(tokens)
        _, _, v = self.project(tokens)
        x = self.out((weights @ v).transpose(1, 2).flatten(2))  # (B, 1, D)
        return (x + self.mlp(self.norm(x)))[:, 0], weights

    def weights(self, tokens: Tensor) -> Tensor:
        """The attention the probe pays to each token, (B, H, 1, N)."""
        q, k, _ = self.project(tokens)
        return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = tokens.shape
        q = self.query(self.probe).expand(B, -1, -1).view(B, 1, self.heads, D // self.heads).transpose(1, 2)
        kv = self.key_value(tokens).view(B, N, 2, self.heads, D // self.heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()
        return q, k, v
