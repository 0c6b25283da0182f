"""Shape and numerics of a Vision Transformer, and of a BiT ResNet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vitruvian.config.parts import (
    GOOGLE_NUMERICS,
    AttentionKind,
    BlockOrder,
    Chance,
    Channels,
    Classes,
    Heads,
    MergedTokens,
    Mlp,
    Norm,
    Numerics,
    Pool,
    Positions,
    ResNetStyle,
    RopeConfig,
    StemConfig,
    Width,
)
from vitruvian.errors import ConfigError, argument
from vitruvian.settings import Range, Settings, Size

INNER_POSITIONS = ("relative", "relative_bias")
"""Kinds of positions that act inside attention, as rotary ones do."""

REGULARIZERS = ("dropout", "attention_dropout", "drop_path")
"""Settings of a ViT that act in training alone: they change neither its weights nor its answers."""
CHANGEABLE = (*REGULARIZERS, "tome_r", "tome_thresholds")
"""Settings of a ViT that weights fit whatever they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(Settings):
    """Shape and numerics of one Vision Transformer."""

    image_size: Size = (224, 224)
    """Rows and columns of the input, in pixels; a single number means a square."""
    patch_size: Annotated[int, Range(1, 1024)] = 16
    """Side of one patch, in pixels (in stem features for a hybrid)."""
    trim: bool = False
    """Pixels past the last whole patch are left out, as a convolution does (SigLIP's So400m/14 at 384); else such a
    size is an error."""
    channels: Channels = 3
    classes: Classes = 1000
    """Outputs of the head; 0 leaves the head out, and the model gives features."""
    layers: Annotated[int, Range(1, 1024)] = 12
    width: Width = 768
    mlp_width: Annotated[int, Range(1, 262_144)] = 3072
    heads: Heads = 12
    attention_width: Annotated[int, Range(0, 65_536)] = 0
    """Of all heads together; 0 for `width`. Two attentions side by side are one of twice the heads and width."""
    pool: Pool = "token"
    """`token`: the class token; `mean`: of the patch tokens; `map`: the MAP head, attention pooling by a
    learned probe; `token_mean`: class token and mean of patches side by side."""
    norm_after_pool: bool = False
    """The final LayerNorm acts on the pooled vector instead of on every token."""
    class_token: bool = True
    distillation: bool = False
    """A second token with a head of its own; the two heads are averaged."""
    registers: Annotated[int, Range(0, 4096)] = 0
    """Extra tokens without position that no head reads."""
    positions: Positions = "learned"
    """Added to the tokens (`learned`, `learned_2d` by row in half the channels and by column in the others,
    `factorized` by row plus by column, `sincos`), or inside attention: the paper's `relative` offsets or
    BEiT's `relative_bias`."""
    rope: RopeConfig | None = None
    """Rotary positions, alone or beside others."""
    class_position: bool = True
    """The class and distillation tokens have positions of their own."""
    representation_size: Annotated[int, Range(0, 65_536)] = 0
    """Width of the pre-logits layer (linear, tanh) before the head; 0 for none."""
    projection: bool = False
    """The pre-logits layer is CLIP's projection: without bias and tanh."""
    unit_features: bool = False
    """Features are scaled to unit length before the head, whose rows are embeddings of words (CLIP)."""
    block: BlockOrder = "pre_norm"
    """`pre_norm`: the paper's; `res_post_norm`: norms after the branches; `parallel`: both branches read one norm."""
    attention: AttentionKind = "softmax"
    """`differential`: the difference of two attentions with half the channels each."""
    norm: Norm = "layer"
    patch_norm: bool = False
    """A norm of the patches before positions are added (AIMv2)."""
    pre_norm: bool = False
    """A norm of the embedded tokens before the first block (CLIP)."""
    final_norm: bool = True
    qk_norm: bool = False
    """Queries and keys are normalized, each head by itself."""
    attention_norm: bool = False
    """A norm between attention's heads and its output layer (EVA-02)."""
    mlp: Mlp = "gelu"
    mlp_norm: bool = False
    """A norm before the MLP's second layer (EVA-02)."""
    patch_bias: bool = True
    qkv_bias: bool = True
    dense_bias: bool = True
    """Of attention's output layer and of the MLP."""
    layer_scale: bool = False
    mlp_scale: bool = True
    """LayerScale acts on the MLP's branch, too (not in Sapiens 2)."""
    pool_heads: Annotated[int, Range(0, 4096)] = 0
    """Heads of the MAP head; 0 for as many as elsewhere."""
    pool_mlp_width: Annotated[int, Range(0, 262_144)] = 0
    """Width of the MAP head's MLP; 0 for that of the blocks."""
    pool_prefix: bool = False
    """The MAP head reads the tokens before the patches too."""
    dropout: Chance = 0.0
    """After the position sum and every dense layer except qkv, while training."""
    attention_dropout: Chance = 0.0
    drop_path: Chance = 0.0
    """Chance that the last block is skipped while training; earlier blocks less, linearly."""
    stem: StemConfig | None = None
    tome_r: MergedTokens | tuple[MergedTokens, ...] = 0
    """Token merging (ToMe): tokens that merge into others in each layer; one number, or one for each layer."""
    tome_thresholds: tuple[Annotated[float, Range(-1.0, 1.0)], ...] = ()
    """In place of `tome_r`: cosine of keys, for each layer, above which tokens merge, as many as an image has."""
    numerics: Numerics = GOOGLE_NUMERICS

    def check(self) -> None:
        if self.trim and self.stem:
            raise ConfigError("trim=True has no meaning behind a convolutional stem, which pads images")
        if self.rope is not None and self.head_width % 4:
            raise ConfigError(f"rotary positions need 4 channels a head or a multiple, not {self.head_width}")
        if self.width % (self.pool_heads or 1):
            raise ConfigError(f"width={self.width} is not divisible by pool_heads={self.pool_heads}")
        if self.positions == "relative_bias" and (self.prefix_tokens != 1 or not self.class_token or self.rope):
            raise ConfigError("positions='relative_bias' needs a class token, no other token and no rope")
        if self.positions == "relative" and self.rope:
            raise ConfigError("positions='relative' has no meaning beside rope")
        if self.attention == "differential" and (self.head_width % 2 or self.rope or self.positions in INNER_POSITIONS):
            raise ConfigError("attention='differential' needs an even width a head and no positions inside attention")
        if (self.attention_width or self.width) % self.heads:
            name = "attention_width" if self.attention_width else "width"
            raise ConfigError(f"{name}={getattr(self, name)} is not divisible by {argument('heads', self.heads)}")
        if self.positions == "sincos" and (self.width % 4 or self.width < 8):
            raise ConfigError(f"sin-cos positions need a width divisible by 4, not {self.width}")
        if self.positions == "learned_2d" and self.width % 2:
            raise ConfigError(f"2-D learned positions need an even width, not {self.width}")
        if self.pool in ("token", "token_mean") and not self.class_token:
            raise ConfigError(f"pool={self.pool!r} needs class_token=True")
        if self.unit_features and self.distillation:
            raise ConfigError("unit_features=True has no meaning with distillation=True")
        if self.pool == "token_mean" and self.norm_after_pool:
            raise ConfigError("norm_after_pool=True has no meaning with pool='token_mean', which normalizes the tokens")
        if self.distillation and (self.pool != "token" or not self.class_token):
            raise ConfigError("distillation=True needs class_token=True and pool='token'")
        self.check_merging()
        self.grid_of(self.image_size)

    def check_merging(self) -> None:
        for name in ("tome_r", "tome_thresholds"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) not in (0 if name == "tome_thresholds" else -1, self.layers):
                raise ConfigError(f"{name} has {len(value)} numbers for {self.layers} layers")
        name = "tome_thresholds" if self.tome_thresholds else "tome_r"
        if self.tome_thresholds and any(self.tome_counts):
            raise ConfigError("tome_r and tome_thresholds are two ways to merge tokens: set one of them to 0 or []")
        if self.merges_tokens and (self.rope or self.positions in INNER_POSITIONS):
            raise ConfigError(f"{name} has no meaning with positions inside attention, which need every patch")

    @property
    def tome_counts(self) -> tuple[int, ...]:
        """Tokens that merge in each layer, before the threshold of any."""
        return self.tome_r if isinstance(self.tome_r, tuple) else (self.tome_r,) * self.layers

    @property
    def merges_tokens(self) -> bool:
        """Whether any layer merges tokens."""
        return bool(self.tome_thresholds) or any(self.tome_counts)

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next."""
        return self.patch_size * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        return self.grid_of(self.image_size)

    def grid_of(self, image_size: Size) -> Size:
        """Rows and columns of patches of an image of this size."""
        rows, columns = image_size
        over = not self.trim and (rows % self.stride or columns % self.stride)
        if rows < self.stride or columns < self.stride or over:
            what = "patch and stem stride together" if self.stem else "patch"
            raise ConfigError(f"image of {rows}x{columns} pixels is not divisible by the {what} of {self.stride}")
        return rows // self.stride, columns // self.stride

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return self.class_token + self.distillation + self.registers

    @property
    def tokens_read(self) -> int | None:
        """How many of the first tokens the head reads; None is all of them."""
        return 1 + self.distillation if self.pool == "token" else None

    @property
    def prefix_positions(self) -> int:
        """Tokens before the patches that have a learned position."""
        learned = self.class_position and self.positions in ("learned", "learned_2d")
        return (self.class_token + self.distillation) if learned else 0

    @property
    def head_width(self) -> int:
        """Channels of one head of attention."""
        return (self.attention_width or self.width) // self.heads

    @property
    def pooled_width(self) -> int:
        """Length of the pooled vector, before a pre-logits layer."""
        return self.width * 2 if self.pool == "token_mean" else self.width

    @property
    def feature_width(self) -> int:
        """Length of the vector the head reads."""
        return self.representation_size or self.pooled_width


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(Settings):
    """Shape of one BiT ResNet: pre-activation, GroupNorm, standardized convolutions."""

    image_size: Size = (224, 224)
    channels: Channels = 3
    classes: Classes = 1000
    stages: tuple[Annotated[int, Range(1, 1024)], ...] = (3, 4, 6, 3)
    width: Annotated[int, Range(32, 4096)] = 64
    """Channels after the root: 64 times the width factor."""
    style: ResNetStyle = "bit"
    """`bit`: the release's; `timm_bit`: the same with timm's standardization epsilon."""

    def check(self) -> None:
        if self.width % 32:
            raise ConfigError(f"width={self.width} is not a multiple of GroupNorm's 32 groups")
        if not 1 <= len(self.stages) <= 8:
            raise ConfigError(f"stages={self.stages} are not 1 to 8")

    @property
    def feature_width(self) -> int:
        """Length of the vector the head reads."""
        return self.width * 4 * 2 ** (len(self.stages) - 1)


ModelConfig = ViTConfig | ResNetConfig

MODEL_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
