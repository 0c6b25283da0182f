"""The text tower of CLIP, SigLIP and LiT: a Transformer over tokens, pooled at one token and projected."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from vitruvian.config import NUMERICS, Numerics, NumHeads, ViTConfig, Width
from vitruvian.errors import ConfigError, argument
from vitruvian.model.encoder import Block
from vitruvian.settings import Range, Settings

# B texts, N tokens, D width, E width of the embeddings that both towers share

TextPool = Literal["argmax", "eos", "last", "first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextConfig(Settings):
    """Shape and numerics of one text tower."""

    vocabulary: Annotated[int, Range(1, 10_000_000)] = 49_408
    context_length: Annotated[int, Range(1, 65_536)] = 77  # tokens per text, including special tokens and padding
    depth: Annotated[int, Range(1, 1024)] = 12
    width: Width = 512
    mlp_dim: Annotated[int, Range(1, 262_144)] = 2048
    num_heads: NumHeads = 8
    causal: bool = True  # causal attention (CLIP); otherwise every token attends to all (SigLIP)
    pool: TextPool = "argmax"  # the token that represents the text: largest id, first `eos`, last or first
    eos: Annotated[int, Range(0)] = 2  # id of the end-of-text token, for `pool="eos"`
    embedding_width: Annotated[int, Range(0, 65_536)] = 512  # of the projection; 0 for none
    projection_bias: bool = False
    layer_scale: bool = False
    post_norm: bool = False
    """BERT (LiT): norms follow the embedding and the residual sums, and token 0 is padding."""
    numerics: Numerics = NUMERICS["clip"]

    def check(self) -> None:
        if self.width % self.num_heads:
            raise ConfigError(f"width={self.width} is not divisible by {argument('num_heads', self.num_heads)}")

    @property
    def blocks(self) -> ViTConfig:
        """The settings of the encoder blocks, which are those of a ViT."""
        shared = ("depth", "width", "mlp_dim", "num_heads", "layer_scale", "numerics")
        return ViTConfig(pos_embed="none", **{name: getattr(self, name) for name in shared})


class TextTower(nn.Module):
    """Token ids (B, N) -> embeddings (B, E), not normalized."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        D, E, blocks = config.width, config.embedding_width, config.blocks
        self.tokens = nn.Embedding(config.vocabulary, D)
        self.pos_embed = nn.Parameter(torch.empty(config.context_length, D))
        self.blocks = nn.ModuleList(Block(blocks) for _ in range(config.depth))
        self.embed_norm = nn.LayerNorm(D, eps=config.numerics.norm_eps) if config.post_norm else nn.Identity()
        self.norm = nn.Identity() if config.post_norm else nn.LayerNorm(D, eps=config.numerics.norm_eps)
        self.projection = nn.Linear(D, E, bias=config.projection_bias) if E else nn.Identity()

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        """`real` (B, N) is False for padding that must not be attended to; None: attend to all tokens."""
        is_bert = self.config.post_norm
        mask = self.mask(tokens, tokens != 0 if is_bert else real)
        x = self.embed_norm(self.tokens(tokens) + self.pos_embed[: tokens.shape[1]])  # (B, N, D)
        for block in self.blocks:
            assert isinstance(block, Block)
            attention = block.attn
            qkv = attention.project(x if is_bert else block.attn_input(x))
            branch = attention.output(attention.attend(*qkv, mask))
            if is_bert:
                x = block.norm1(x + branch)
                x = block.norm2(x + block.mlp(x))
            else:
                x = block.finish(x, branch)
        pooled = POOLS[self.config.pool](tokens, self.config.eos)
        return self.projection(self.norm(x[torch.arange(len(x)), pooled]))

    def mask(self, tokens: Tensor, real: Tensor | None) -> Tensor | None:
        """The attention mask (N, N) or (B, 1, N, N); None if every query attends to all keys."""
        N = tokens.shape[1]
        causal = torch.ones(N, N, dtype=torch.bool, device=tokens.device).tril() if self.config.causal else None
        if real is None:
            return causal
        keys = real.bool()[:, None, None].expand(-1, 1, N, -1)
        return keys if causal is None else keys & causal


POOLS: dict[TextPool, Callable[[Tensor, int], Tensor]] = {
    "argmax": lambda tokens, eos: tokens.argmax(dim=1),
    "eos": lambda tokens, eos: (tokens == eos).int().argmax(dim=1),
    "last": lambda tokens, eos: torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device),
    "first": lambda tokens, eos: torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device),
}
"""Indices (B,) of the tokens that represent the texts."""
