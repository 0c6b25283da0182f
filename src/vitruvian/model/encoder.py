"""The parts of the Transformer encoder: norms, MLP, attention, kinds of blocks, and the layers before the head."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from vitruvian.config import Gelu, ViTConfig
from vitruvian.errors import ConfigError
from vitruvian.model.positions import Positions, attention_position
from vitruvian.settings import Size

# B images, N tokens, D width, H heads of K channels (H K = D unless the config has `attn_dim`)

Merge = Callable[[Tensor], Tensor]  # token merging: (B, N, D) -> (B, fewer, D)


def norm_layer(config: ViTConfig, width: int) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(width, eps=config.numerics.norm_eps)


def may_overwrite(*producers: nn.Module) -> bool:
    """Whether the tensor that these modules just returned can be changed in place.

    That saves a buffer in inference. It is not allowed under autograd, nor where a forward hook may have stored the
    tensor: hooks must keep seeing what the module returned.
    """
    if torch.is_grad_enabled() or torch_module._global_forward_hooks:
        return False
    return not any(producer._forward_hooks for producer in producers)


def gelu(x: Tensor, kind: Gelu, in_place: bool) -> Tensor:
    if kind == "quick":
        return x * torch.sigmoid(1.702 * x)
    approximate = "none" if kind == "erf" else "tanh"
    if in_place:  # a second buffer of this size costs more time than the activation itself
        return torch.ops.aten.gelu_(x, approximate=approximate)
    return F.gelu(x, approximate=approximate)


class Mlp(nn.Module):
    """Two dense layers with GELU between them, or a gated SiLU (`swiglu`); optionally a norm before the second."""

    def __init__(self, config: ViTConfig, mlp_dim: int, *, plain: bool = False) -> None:
        super().__init__()
        D, self.gated = config.width, config.mlp == "swiglu" and not plain
        self.gelu = config.numerics.gelu
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
            hidden = gelu(hidden, self.gelu, may_overwrite(self.fc1))
        return self.fc2(self.norm(self.dropout(hidden)))


MAX_STORED_WEIGHTS = 2**20  # per image and layer: L/16 at 224 pixels, but not at 384


def attend_with_stored_weights(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """Scaled dot-product attention from three plain operations: (..., N, K) -> (..., N, K).

    PyTorch's fused kernel computes the attention weights again in its backward pass, and in bfloat16 on a CPU it does
    so without the processor's matrix units. There these three operations are faster, although they store the weights.
    """
    *batch, N, K = q.shape
    q, k = q.flatten(0, -3), k.flatten(0, -3)
    logits = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=K**-0.5)  # (..., N, N)
    if bias is not None:
        logits = (logits.view(*batch, N, -1) + bias).flatten(0, -3)
    weights = F.dropout(logits.softmax(dim=-1), dropout)
    return torch.bmm(weights.to(v.dtype), v.flatten(0, -3)).view(*batch, N, -1)


class Attention(nn.Module):
    """Multi-head self-attention; position encodings may rotate queries and keys or add a bias to the logits."""

    def __init__(self, config: ViTConfig, layer: int = 0) -> None:
        super().__init__()
        D, K = config.width, config.head_width
        A = K * config.num_heads
        self.num_heads = config.num_heads
        self.grid = config.grid
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(D, 3 * A, bias=config.qkv_bias)
        self.q_norm = norm_layer(config, K) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, K) if config.qk_norm else nn.Identity()
        self.position = attention_position(config)
        self.norm = norm_layer(config, A) if config.attn_norm else nn.Identity()
        self.proj = nn.Linear(A, D, bias=config.dense_bias)

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or (B, first, D): that many leading tokens, which attend to all.

        `grid` is the number of rows and columns of patches, if they are not those of the config.
        """
        q, k, v = self.project(x, grid)
        bias = None if self.position is None else self.position.bias(q, grid or self.grid)
        if first is not None:  # slicing everything would still cost a copy in the backward pass
            q, bias = q[:, :, :first], None if bias is None else bias[:, :, :first]
        return self.output(self.attend(q, k, v, bias))

    def attend_first(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:  # (B, N, D) -> (B, first, D)
        q, k, v = self.project(x)
        return self.output(self.attend(q[:, :, :first], k, v, bias))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        can_store = math.prod(q.shape[1:-1]) * k.shape[-2] <= MAX_STORED_WEIGHTS
        if can_store and q.requires_grad and q.dtype is torch.bfloat16 and q.device.type == "cpu":
            return attend_with_stored_weights(q, k, v, bias, dropout)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)

    def output(self, y: Tensor) -> Tensor:  # (B, H, N, K) -> (B, N, D)
        return self.proj(self.norm(y.transpose(1, 2).flatten(2)))

    def softmax(self, q: Tensor, k: Tensor, grid: Size | None) -> Tensor:
        """Attention weights (B, H, N, N); each row, that of one query, sums to one."""
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        bias = None if self.position is None else self.position.bias(q, grid or self.grid)
        return (logits if bias is None else logits + bias).softmax(dim=-1)

    def forward_with_weights(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor]:
        """The output and the weights (B, H, N, N) it was computed from, so that gradients can flow between them."""
        q, k, v = self.project(x, grid)
        weights = self.softmax(q, k, grid)
        return self.output(weights @ v), weights

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, H, N, K), normalized and rotated where the config says so."""
        q, k, v = self.split_heads(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.position is not None:
            q, k = self.position.rotate(q, k, grid or self.grid)
        return q, k, v

    def split_heads(self, x: Tensor) -> tuple[Tensor, ...]:
        B, N, _ = x.shape
        return self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind()


class DifferentialAttention(Attention):
    """Two attentions with half the channels each, one subtracted from the other (Differential Transformer).

    `subtracted` is lambda, the share of the second that is subtracted. The published models compute it from a constant
    of the layer and four learned vectors; here it is one number. The constant factor after the norm of each head is
    part of that norm's scale.
    """

    def __init__(self, config: ViTConfig, layer: int = 0) -> None:
        super().__init__(config)
        K = config.head_width
        self.q_norm = norm_layer(config, K // 2) if config.qk_norm else nn.Identity()
        self.k_norm = norm_layer(config, K // 2) if config.qk_norm else nn.Identity()
        self.subtracted = nn.Parameter(torch.empty(()))
        self.head_norm = nn.RMSNorm(K, eps=1e-5)

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (B, 2 H, N, K / 2), the two of a head next to each other; values (B, H, N, K)."""
        B, N, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = (part.view(B, N, 2 * self.num_heads, -1).transpose(1, 2) for part in (q, k))
        return self.q_norm(q), self.k_norm(k), v.view(B, N, self.num_heads, -1).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        first, second = (super(DifferentialAttention, self).attend(q[:, i::2], k[:, i::2], v, bias) for i in (0, 1))
        return first - self.subtracted * second

    def softmax(self, q: Tensor, k: Tensor, grid: Size | None) -> Tensor:
        """The difference of the two softmaxes; it may be negative."""
        both = super().softmax(q, k, grid)
        return both[:, ::2] - self.subtracted * both[:, 1::2]

    def output(self, y: Tensor) -> Tensor:
        return super().output(self.head_norm(y))


def initial_lambda(layer: int) -> float:
    """The initial value of `subtracted` in a differential attention of this layer."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class AxialAttention(Attention):
    """Attention within the rows of patches in even layers, within the columns in odd layers (Axial-ViT)."""

    def __init__(self, config: ViTConfig, layer: int = 0) -> None:
        super().__init__(config)
        self.in_columns = bool(layer % 2)

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        q, k, v = (self.lines(part, grid) for part in self.project(x, grid))
        y = self.attend(q, k, v, None)  # (B, H, lines, length, K)
        y = (y.transpose(2, 3) if self.in_columns else y).flatten(2, 3)
        return self.output(y if first is None else y[:, :, :first])

    def lines(self, x: Tensor, grid: Size | None) -> Tensor:  # (B, H, N, K) -> (B, H, lines, length, K)
        B, H, _, K = x.shape
        x = x.reshape(B, H, *(grid or self.grid), K)
        return x.transpose(2, 3) if self.in_columns else x

    def softmax(self, q: Tensor, k: Tensor, grid: Size | None) -> Tensor:
        """Weights (B, H, N, N) that are zero outside the query's own row or column."""
        rows, columns = grid or self.grid
        patch = torch.arange(rows * columns, device=q.device)
        line = patch % columns if self.in_columns else patch // columns
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return logits.masked_fill(line[:, None] != line[None], -torch.inf).softmax(dim=-1)


def fixed_size_error(grid: Size) -> ConfigError:
    return ConfigError(f"an MLP-Mixer works only at its own image size, with {grid[0]}x{grid[1]} patches")


class TokenMixing(Attention):
    """MLP-Mixer's replacement for attention: an MLP over the patches, the same for every channel."""

    def __init__(self, config: ViTConfig, layer: int = 0) -> None:
        nn.Module.__init__(self)
        self.grid, self.gelu = config.grid, config.numerics.gelu
        patches = math.prod(config.grid)
        self.fc1 = nn.Linear(patches, config.mixer_dim)
        self.proj = nn.Linear(config.mixer_dim, patches)

    def forward(self, x: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:  # (B, N, D)
        if grid is not None and tuple(grid) != self.grid:
            raise fixed_size_error(self.grid)
        hidden = gelu(self.fc1(x.transpose(1, 2)), self.gelu, may_overwrite(self.fc1))  # (B, D, mixer_dim)
        return self.proj(hidden).transpose(1, 2)[:, :first]

    def project(self, x: Tensor, grid: Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
        raise ConfigError("an MLP-Mixer has no attention: no queries, keys and attention weights")


ATTENTION = {"softmax": Attention, "differential": DifferentialAttention, "axial": AxialAttention, "mixer": TokenMixing}


class Block(nn.Module):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'; optionally with LayerScale and stochastic depth."""

    def __init__(self, config: ViTConfig, layer: int = 0, positions: Positions | None = None) -> None:
        super().__init__()
        D = config.width
        # stochastic depth: probability that a branch is skipped for one image in training
        self.drop_path = config.drop_path * layer / max(1, config.depth - 1)
        self.pos = Positions(config) if layer and config.pos_embed_at == "every_layer" else None
        is_shared = layer and config.pos_embed_at == "every_layer_shared"
        self.shared = (positions,) if is_shared else ()  # in a tuple: these parameters belong to the embedding
        self.norm1 = norm_layer(config, D)
        self.attn = ATTENTION[config.attention](config, layer)
        self.norm2 = norm_layer(config, D)
        self.mlp = Mlp(config, config.mlp_dim)
        self.ls1 = nn.Parameter(torch.empty(D)) if config.layer_scale else None
        self.ls2 = nn.Parameter(torch.empty(D)) if config.layer_scale and config.mlp_scale else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, first: int | None = None, grid: Size | None = None, merge: Merge | None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N, D), or (B, first, D) if only the first tokens are used afterwards."""
        x = self.add_positions(x, grid)
        branch = self.attn(self.attn_input(x), first, grid)
        return self.finish(x if first is None else x[:, :first], branch, merge)

    def forward_with_weights(
        self, x: Tensor, grid: Size | None = None, merge: Merge | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output and the attention weights (B, H, N, N), connected for gradients."""
        x = self.add_positions(x, grid)
        branch, weights = self.attn.forward_with_weights(self.attn_input(x), grid)
        return self.finish(x, branch, merge), weights

    def attention_weights(self, x: Tensor, grid: Size | None = None) -> Tensor:
        """Attention weights (B, H, N, N) for the input of the block."""
        q, k, _ = self.attn.project(self.attn_input(self.add_positions(x, grid)), grid)
        return self.attn.softmax(q, k, grid)

    def add_positions(self, x: Tensor, grid: Size | None) -> Tensor:
        """Add the positions of this layer, if the config has any besides those of the input."""
        for positions in self.shared or [self.pos]:
            x = x if positions is None else positions.add_to(x, grid)
        return x

    def attn_input(self, x: Tensor) -> Tensor:
        return self.norm1(x)

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        """The block's output, given its input and the output of attention; `merge` acts between attention and MLP."""
        x = self.add(x, branch, self.ls1, self.attn, self.attn.proj)
        x = x if merge is None else merge(x)
        return self.add(x, self.mlp(self.norm2(x)), self.ls2, self.mlp, self.mlp.fc2)

    def add(self, x: Tensor, branch: Tensor, scale: Tensor | None, *producers: nn.Module) -> Tensor:
        """x + branch, with LayerScale, dropout and stochastic depth; `producers` are the modules that made `branch`."""
        if scale is not None:
            branch = branch * scale
        if self.training:
            branch = self.dropout(branch)
            if self.drop_path:  # one factor per image: 0, or 1 / (1 - drop_path) to keep the mean
                mask = branch.new_empty(branch.shape[0], *[1] * (branch.dim() - 1))
                branch = branch * mask.bernoulli_(1 - self.drop_path).div_(1 - self.drop_path)
        if branch.dtype == x.dtype and may_overwrite(*producers):
            return branch.add_(x)  # not x: it may have been returned to the caller as an intermediate
        return x + branch


class ResPostNormBlock(Block):
    """z' = LN(MSA(z)) + z; z = LN(MLP(z')) + z': norms after the branches (EVA-CLIP, Swin v2)."""

    def attn_input(self, x: Tensor) -> Tensor:
        return x

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        x = self.add(x, self.norm1(branch), self.ls1, self.norm1)
        x = x if merge is None else merge(x)
        return self.add(x, self.norm2(self.mlp(x)), self.ls2, self.norm2)


class ParallelBlock(Block):
    """z' = MSA(LN(z)) + MLP(LN(z)) + z, with one norm for both branches (ViT-22B)."""

    def __init__(self, config: ViTConfig, layer: int = 0, positions: Positions | None = None) -> None:
        super().__init__(config, layer, positions)
        del self.norm2, self.ls2

    def finish(self, x: Tensor, branch: Tensor, merge: Merge | None = None) -> Tensor:
        x = self.add(x, branch + self.mlp(self.norm1(x)), self.ls1)
        return x if merge is None else merge(x)


BLOCKS = {"pre_norm": Block, "res_post_norm": ResPostNormBlock, "parallel": ParallelBlock}


class PreLogits(nn.Linear):
    """The layer between pooling and head: linear and tanh as in the paper's pre-training, or CLIP's bare projection."""

    def __init__(self, config: ViTConfig) -> None:
        has_bias = config.projection_bias or not config.projection
        super().__init__(config.pooled_width, config.representation_size, bias=has_bias)
        self.has_tanh = not config.projection

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.tanh() if self.has_tanh else x


class AttentionPool(nn.Module):
    """MAP head (multi-head attention pooling): a learned probe attends to the tokens; LayerNorm and residual MLP."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        D = config.width
        self.num_heads = config.pool_num_heads or config.num_heads
        self.skipped = 0 if config.pool_prefix else config.prefix_tokens
        self.probe = nn.Parameter(torch.empty(1, 1, D))
        self.q = nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * D)
        self.proj = nn.Linear(D, D)
        self.norm = norm_layer(config, D)
        self.mlp = Mlp(config.replace(dense_bias=True), config.pool_mlp_dim or config.mlp_dim, plain=True)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D)
        return self.finish(F.scaled_dot_product_attention(*self.project(tokens[:, self.skipped :])))

    def finish(self, x: Tensor) -> Tensor:  # (B, H, 1, D // H) -> (B, D)
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, 1, D)
        return (x + self.mlp(self.norm(x)))[:, 0]

    def forward_with_weights(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The pooled vector, and the probe's attention to each token (B, H, 1, N), 0 for tokens that it skips.

        They are connected for gradients.
        """
        q, k, v = self.project(tokens)
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        skipped = torch.arange(logits.shape[-1], device=logits.device) < self.skipped
        weights = logits.masked_fill(skipped, -torch.inf).softmax(dim=-1)
        return self.finish(weights @ v), weights

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        B, N, D = tokens.shape
        q = self.q(self.probe).expand(B, -1, -1).view(B, 1, self.num_heads, D // self.num_heads).transpose(1, 2)
        kv = self.kv(tokens).view(B, N, 2, self.num_heads, D // self.num_heads)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()
        return q, k, v
