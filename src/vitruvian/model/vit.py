"""The Vision Transformer: embedding, blocks, pooling and head, with named intermediates."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitruvian.config import PositionResize, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.model.encoder import BLOCKS, AttentionPool, Block, PreLogits, norm_layer
from vitruvian.model.interface import ImageNetwork, check_floats
from vitruvian.model.positions import Positions, matrix
from vitruvian.model.resnet import STEMS
from vitruvian.model.token_merging import forward_merged, token_groups
from vitruvian.settings import Size, check_choice, check_index, check_range

# B images, N patches or tokens, T tokens before the patches, D width, F features the head reads, K classes


class Embedding(Positions):
    """Pixels (B, channels, height, width) -> tokens (B, T + N, D), positions included."""

    def __init__(self, config: ViTConfig) -> None:
        nn.Module.__init__(self)
        D = config.width
        self.stem = STEMS[config.stem.style](config.stem, config.in_channels) if config.stem else None
        channels = config.stem.out_channels if config.stem else config.in_channels
        self.patch = nn.Conv2d(channels, D, config.patch_size, config.patch_size, bias=config.patch_bias)
        if config.cls_token:
            self.cls_token = nn.Parameter(torch.empty(1, 1, D))
        if config.distillation:
            self.dist_token = nn.Parameter(torch.empty(1, 1, D))
        if config.reg_tokens:
            self.reg_tokens = nn.Parameter(torch.empty(1, config.reg_tokens, D))
        self.add_tables(config)  # after the tokens: their order is that of the parameters
        self.dropout = nn.Dropout(config.dropout)
        self.patch_norm = norm_layer(config, D) if config.patch_norm else nn.Identity()
        self.norm = norm_layer(config, D) if config.pre_norm else nn.Identity()

    def forward(self, pixels: Tensor) -> Tensor:
        check_floats(pixels)
        grid = self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))
        return self.with_positions(self.patches(pixels), grid)

    def with_positions(self, patches: Tensor, grid: Size) -> Tensor:
        """Add position embeddings to patch tokens (B, N, D) and prepend the other tokens: (B, T + N, D)."""
        positions = self.grid_positions(grid)
        if positions is not None:
            patches = patches + positions.flatten(0, 1).to(self.patch.weight)
        prefix = self.prefix()
        if prefix is not None:
            patches = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)  # (B, T + N, D)
        return self.norm(self.dropout(patches))

    def patches(self, pixels: Tensor) -> Tensor:
        """The patch tokens (B, N, D), without position embeddings."""
        features = self.stem(pixels) if self.stem else pixels
        B, C, height, width = features.shape
        P = self.config.patch_size
        if self.config.trim:
            features = features[..., : height // P * P, : width // P * P]
        # One matrix product instead of a convolution: the same sums, faster, and tokens are contiguous in memory.
        cut = features.reshape(B, C, height // P, P, width // P, P)
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, P, P)
        patches = F.linear(cut.reshape(B, -1, C * P * P), self.patch.weight.flatten(1), self.patch.bias)
        return self.patch_norm(patches)

    def prefix(self) -> Tensor | None:
        """Class, distillation and register tokens with their position embeddings, (1, T, D)."""
        config = self.config
        tokens: list[Tensor] = [self.cls_token] if config.cls_token else []
        if config.distillation:
            tokens.append(self.dist_token)
        if config.prefix_pos_embeds:
            tokens = [torch.cat(tokens, dim=1) + self.prefix_pos_embed]
        if config.reg_tokens:
            tokens.append(self.reg_tokens)
        if not tokens:
            return None
        return torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0]


class ViT(ImageNetwork):
    """Normalized pixels (B, channels, height, width) -> logits (B, K), or features (B, F) without a head.

    If the head reads only the class token, the last block of `forward` computes only that token, and a forward hook on
    `model.blocks[-1]` sees (B, 1, D). Set `model.shorten_last_block = False` to give hooks all tokens; the logits are
    the same. `forward_features` and `forward_intermediates` always return all tokens.

    Args:
        config: Architecture and numerics. Parameters are not initialized; see `vitruvian.build`.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.patch_drop = 0.0
        """Patch dropout: fraction of patch tokens dropped at random in training."""
        self.grad_checkpointing = False
        """In training, store only the input of each block and recompute the rest in the backward pass."""
        self.shorten_last_block = True
        """Compute only the tokens that the head reads in the last block."""
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(BLOCKS[config.block](config, layer, self.embed) for layer in range(config.depth))
        self.norm = norm_layer(config, config.width) if config.final_norm else nn.Identity()
        self.attn_pool = AttentionPool(config) if config.pool == "map" else None
        self.pre_logits = PreLogits(config) if config.representation_size else nn.Identity()
        features, K = config.feature_width, config.num_classes
        self.head = nn.Linear(features, K) if K else None
        self.head_dist = nn.Linear(features, K) if K and config.distillation else None

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Any:
        """Logits (B, K), or with labels {"loss", "logits"}."""
        self.check(pixels)
        return self.with_loss(self.forward_head(self.forward_features(pixels, self.tokens_read)), labels)

    @property
    def embed_dim(self) -> int:
        """Width of the tokens."""
        return self.config.width

    @property
    def tokens_read(self) -> int | None:
        """Number of leading tokens that the last block computes for the head; None for all.

        Skipping the others saves a sixteenth of ViT-B/16's arithmetic.
        """
        return self.config.tokens_read if self.shorten_last_block else None

    def forward_features(self, pixels: Tensor, first: int | None = None) -> Tensor:
        """Tokens (B, N, D) after the last block and, unless it acts on the pooled vector, the final norm.

        With `first`, only that many leading tokens are returned.
        """
        return self.forward_blocks(self.embed(pixels), first, self.grid_of(pixels))

    def grid_of(self, pixels: Tensor) -> Size:
        """Rows and columns of patches."""
        return self.config.grid_of((pixels.shape[-2], pixels.shape[-1]))

    def forward_blocks(self, tokens: Tensor, first: int | None = None, grid: Size | None = None) -> Tensor:
        """Run embedded tokens (B, N, D) through all blocks and the final norm."""
        x = self.drop_patches(tokens) if self.training and self.patch_drop else tokens
        if self.config.merges_tokens:
            checkpointing = self.training and self.grad_checkpointing
            x = forward_merged(self.blocks, self.config, x, first, checkpointing=checkpointing)
        else:
            last = self.blocks[-1]
            for block in self.blocks:
                x = self.run_block(block, x, first if block is last else None, grid)
        return x if self.config.norm_after_pool else self.norm(x)

    def run_block(self, block: nn.Module, *inputs: Any) -> Any:
        """The output of a block; in training with `grad_checkpointing`, only its input is stored for the gradient."""
        if self.training and self.grad_checkpointing:
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def drop_patches(self, tokens: Tensor) -> Tensor:
        """Patch dropout: keep a random fraction 1 - `patch_drop` of each image's patches, and all other tokens."""
        if part := self.config.needs_all_patches:
            raise ConfigError(f"patch_drop cannot be combined with {part}, which need every patch")
        B, N, D = tokens.shape
        T = self.config.prefix_tokens
        count = max(1, round((N - T) * (1 - self.patch_drop)))
        index = torch.rand(B, N - T, device=tokens.device).argsort(dim=1)[:, :count, None].expand(-1, -1, D)
        return torch.cat([tokens[:, :T], tokens[:, T:].gather(1, index)], dim=1)  # (B, T + count, D)

    def features(self, pixels: Tensor) -> Tensor:
        """The features (B, F) that the head reads."""
        self.check(pixels)
        return self.forward_head(self.forward_features(pixels, self.tokens_read), pre_logits=True)

    def pool(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, D), or a multiple of D if tokens are concatenated
        """Pool the encoded tokens into one vector per image."""
        config = self.config
        if self.attn_pool is not None:
            pooled: Tensor = self.attn_pool(tokens)
        elif config.pool == "token":
            pooled = tokens[:, 0]
        elif config.pool == "prefix_mean":
            pooled = tokens[:, : config.prefix_tokens].mean(dim=1)
        elif config.pool == "prefix_concat":
            pooled = tokens[:, : config.pool_tokens].flatten(1)
        else:
            pooled = tokens[:, config.prefix_tokens :].mean(dim=1)
            if config.pool == "token_mean":
                pooled = torch.cat([tokens[:, 0], pooled], dim=-1)
        return self.norm(pooled) if config.norm_after_pool else pooled

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:  # (B, N, D) -> (B, K)
        """Logits from the tokens of `forward_features`; features with `pre_logits` or without a head."""
        features: Tensor = self.pre_logits(self.pool(tokens))
        if self.config.unit_features:
            features = F.normalize(features, dim=-1)
        if self.head is None or pre_logits:
            return features
        logits: Tensor = self.head(features)
        if self.head_dist is not None:
            logits = (logits + self.head_dist(self.pre_logits(tokens[:, 1]))) / 2
        return logits

    def iter_intermediates(self, pixels: Tensor, attention: Iterable[int] = ()) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the forward pass: the name and value of each intermediate, in order.

        `embedded`; for each layer i `block_i/attention` (B, H, N, N), if i is in `attention`, and `block_i` (B, N, D);
        then `encoded`, `pooled`, `features` and `logits`. The model stores none of them. With token merging, each patch
        is represented by the token that covers it.
        """
        self.check(pixels)
        wanted = set(attention)
        x, grid = self.embed(pixels), self.grid_of(pixels)
        groups = token_groups(self.blocks, self.config, x)
        yield "embedded", x
        for layer, (block, means) in enumerate(zip(self.blocks, groups)):
            assert isinstance(block, Block)
            if layer in wanted:
                yield f"block_{layer}/attention", block.attention_weights(x, grid)
            x = self.run_block(block, x, None, grid, None if means is None else means.matmul)
            yield f"block_{layer}", x
        tokens = x if self.config.norm_after_pool else self.norm(x)
        yield "encoded", tokens
        yield "pooled", self.pool(tokens)
        yield "features", self.forward_head(tokens, pre_logits=True)
        if self.head is not None:
            yield "logits", self.forward_head(tokens)

    @property
    def intermediate_names(self) -> list[str]:
        """Names accepted by `forward_intermediates`."""
        layers = range(self.config.depth)
        kinds = ("",) if self.config.attention == "mixer" else ("/attention", "")
        blocks = [f"block_{i}{kind}" for i in layers for kind in kinds]
        return ["embedded", *blocks, "encoded", "pooled", "features", *(["logits"] if self.head is not None else [])]

    def forward_intermediates(
        self,
        pixels: Tensor,
        indices: int | Iterable[int] | Iterable[str] | None = None,
        *,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Intermediates of one forward pass: by name, or the outputs of blocks as timm returns them.

        Args:
            pixels: Normalized pixels (B, channels, height, width).
            indices: Names (see `iter_intermediates`, or the property `intermediate_names`), or indices of blocks;
                negative ones count from the end. An integer selects that many last blocks, None all blocks. The
                arguments below are for indices.
            return_prefix_tokens: Return pairs of patches and prefix tokens (class, distillation, registers).
            norm: Apply the final norm to all outputs.
            stop_early: Do not compute the blocks after the last selected one; needs `intermediates_only`.
            output_fmt: Patches as a grid (B, D, rows, columns), or as a sequence "NLC" (B, N, D).
            intermediates_only: Return the list of outputs alone.

        Returns:
            With names, a dictionary. With indices, the tokens (B, N, D) after the final norm, and the list of the
            outputs of the selected blocks, in the order of the blocks.

        Raises:
            UnknownNameError: The model has no intermediate of that name.
            ConfigError: The model has no such block.
        """
        chosen: int | list[Any] | None = indices if indices is None or isinstance(indices, int) else list(indices)
        if isinstance(chosen, list) and any(isinstance(name, str) for name in chosen):
            return self.named_intermediates(pixels, chosen)
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        if stop_early and not intermediates_only:
            raise ConfigError("stop_early=True needs intermediates_only=True: the final tokens need every block")
        layers = {f"block_{i}" for i in take_indices(len(self.blocks), chosen)}
        T, grid, outputs, final = self.config.prefix_tokens, self.grid_of(pixels), [], None
        for name, x in self.iter_intermediates(pixels):
            if name in layers:
                x = self.norm(x) if norm and not self.config.norm_after_pool else x
                patches, prefix = x[:, T:], x[:, :T]
                if output_fmt == "NCHW":
                    patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
                outputs.append((patches, prefix) if return_prefix_tokens and T else patches)
            if name == "encoded" or (stop_early and len(outputs) == len(layers)):
                final = x
                break
        return outputs if intermediates_only else (final, outputs)

    def named_intermediates(self, pixels: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """The intermediates of these names; see `iter_intermediates`."""
        known = self.intermediate_names
        for name in names:
            if name not in known:
                raise UnknownNameError("intermediate", name, known)
        attention = [int(name[6:].split("/")[0]) for name in names if name.endswith("/attention")]
        values = {name: value for name, value in self.iter_intermediates(pixels, attention) if name in names}
        return {name: values[name] for name in names}

    def attention_maps(self, pixels: Tensor, layers: Iterable[int] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (layer, attention weights (B, H, N, N)); only one layer's weights are in memory at a time."""
        wanted = range(self.config.depth) if layers is None else [self.layer(i) for i in layers]
        for name, value in self.iter_intermediates(pixels, wanted):
            if name.endswith("/attention"):
                yield int(name[6:].split("/")[0]), value

    def layer(self, index: int) -> int:
        """The index of a layer, counted from 0; a negative index counts from the end."""
        return check_index("layer", index, self.config.depth)


def take_indices(depth: int, indices: int | Iterable[Any] | None) -> list[int]:
    """Indices of blocks from 0, given as in timm: the last n, any that exist, or None for all."""
    if isinstance(indices, int):
        check_range("indices", indices, 1, depth)
        indices = range(depth - indices, depth)
    return [check_index("block", index, depth) for index in (range(depth) if indices is None else indices)]


def resize_patch_kernel(weight: Tensor, patch_size: int, method: PositionResize) -> Tensor:
    """Resize a patch embedding (D, channels, P, P) to another patch size by pseudo-inverse (FlexiViT).

    The new kernel, applied to a patch resized with the family's own interpolation, gives the closest possible output
    to that of the old kernel on the original patch.
    """
    old = weight.shape[-1]
    if old == patch_size:
        return weight
    interpolation = "bicubic" if method in ("dino", "bilinear_antialias") else method
    enlarge = matrix(old, patch_size, interpolation, torch.empty(0, dtype=torch.float64))  # (new, old)
    enlarged = torch.kron(enlarge, enlarge).T  # (old^2, new^2)
    inverse = torch.linalg.pinv(enlarged)  # (new^2, old^2)
    flat = weight.double().flatten(2) @ inverse.T
    return flat.view(*weight.shape[:2], patch_size, patch_size).to(weight.dtype)
