"""Settings of models and of preprocessing: frozen, validated when made, with a JSON round trip."""

from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass
from typing import Annotated, Any, Literal, Self

from vitruvian.errors import ConfigError, argument
from vitruvian.settings import Range, Settings, Share, Size, as_size
from vitruvian.targets import SINGLE, Target

Pool = Literal["token", "mean", "map", "token_mean", "prefix_mean", "prefix_concat"]
Positions = Literal["none", "learned", "learned_2d", "factorized", "relative", "relative_bias", "sincos"]
PositionResize = Literal[
    "zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "bilinear", "bilinear_antialias", "dino"
]
Gelu = Literal["erf", "tanh", "quick"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layer", "rms"]
PosEmbedAt = Literal["input", "every_layer", "every_layer_shared"]
AttentionKind = Literal["softmax", "differential", "axial", "mixer"]
BlockOrder = Literal["pre_norm", "res_post_norm", "parallel"]
Rope = Literal["axial", "normalized", "mixed"]
ConvStyle = Literal["hybrid", "timm", "bit", "conv", "resnet_d", "mobile_clip"]
ResNetStyle = Literal["bit", "timm_bit"]
Fit = Literal["squash", "crop", "naflex"]
ScoreFunction = Literal["softmax", "sigmoid", "identity"]
"""How outputs become scores: one label among all (softmax), each label by itself (sigmoid), or numbers (identity)."""
ThresholdOn = Literal["probability", "energy"]
"""The score that is compared with the rejection threshold: the largest probability, or logsumexp(logits)."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]
Precision = Literal["float32", "bf16", "fp16", "auto"]
"""The dtype that inference computes in (autocast); weights and outputs stay float32."""


NumClasses = Annotated[int, Range(0, 1_000_000)]
InChannels = Annotated[int, Range(1, 4096)]
Width = Annotated[int, Range(1, 65_536)]
NumHeads = Annotated[int, Range(1, 4096)]
Chance = Annotated[float, Range(0.0, 0.99)]
MergedTokens = Annotated[int, Range(0, 65_536)]
"""Limits well beyond every published model, but within the memory of a machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics(Settings):
    """Numerical choices that differ between families of weights."""

    gelu: Gelu = "tanh"
    """Exact (`erf`), the `tanh` approximation (up to 4.7e-4 per element away) or CLIP's x sigmoid(1.702 x) (`quick`,
    up to 0.02)."""
    norm_eps: Annotated[float, Range(0.0, 1e-2)] = 1e-6
    """Epsilon of every LayerNorm."""
    position_resize: PositionResize = "zoom"
    """How position embeddings are resized to another grid."""
    square_positions: bool = False
    """Resize to the smallest square around the grid and crop, so that rows and columns have equal steps (NaFlex)."""


ENGINES: dict[str, dict[str, str]] = {
    "torch": dict.fromkeys(("bf16", "fp16", "compile", "bf16+compile", "fp16+compile"), ""),
    "onnxruntime": {"cuda": "CUDA", "tensorrt": "Tensorrt", "coreml": "CoreML", "directml": "Dml"},
    "openvino": {"gpu": "GPU", "npu": "NPU"},
    "auto": {},
}
"""Engines and their variants, spelled `torch:bf16` or `onnxruntime:cuda`; a runtime's own names of its devices."""
ENGINE_NAMES = [f"{engine}:{name}" if name else engine for engine, names in ENGINES.items() for name in ("", *names)]
TOLERANCE = 1e-4  # of an engine, relative to the largest output if that is above 1; float32 sums differ
NUMERICS = {
    "google": Numerics(gelu="tanh", norm_eps=1e-6, position_resize="zoom"),
    "timm": Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_antialias"),
    "torchvision": Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_aligned"),
    "huggingface": Numerics(gelu="erf", norm_eps=1e-12, position_resize="bicubic"),
    "clip": Numerics(gelu="quick", norm_eps=1e-5, position_resize="bicubic"),
    "siglip": Numerics(gelu="tanh", norm_eps=1e-6, position_resize="bicubic"),
    "dinov3": Numerics(gelu="erf", norm_eps=1e-5, position_resize="bicubic"),
    "dino": Numerics(gelu="erf", norm_eps=1e-6, position_resize="dino"),
}
"""Numerics by family of weights."""

AXIAL_HEADS = 8
"""Attention heads of an AxialResNet."""
ROOT_CHANNELS = 24
"""Channels of the first convolution of a `conv` stem: 12 directions of a 3x3 patch, each with both signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StemConfig(Settings):
    """The convolutional network in front of a hybrid's patch embedding."""

    stages: tuple[Annotated[int, Range(1, 1024)], ...] = (3, 4, 9)
    """Residual units (or plain convolutions) per stage; empty for the root only."""
    width: Annotated[int, Range(8, 4096)] = 64
    """Channels after the root. Stage k of a ResNet ends with 4 * width * 2**k channels, of `conv` with width * 2**k."""
    widths: tuple[Annotated[int, Range(8, 4096)], ...] = ()
    """Channels of each stage of a `conv` stem, in place of `width`."""
    style: ConvStyle = "hybrid"
    """`hybrid`: the ResNet of the paper's release; `timm`: with timm's standardization epsilon; `conv`: plain 3x3
    convolutions with BatchNorm for small images, each stage halves the image; `resnet_d`: a ResNet-D with BatchNorm;
    `mobile_clip`: two convolutions with BatchNorm and no stages, stride 8."""

    def check(self) -> None:
        if self.width % 32 and not self.has_batch_norm:
            raise ConfigError(f"stem width={self.width} is not a multiple of GroupNorm's 32 groups")
        if self.width % 2 and self.style == "resnet_d":
            raise ConfigError(f"stem width={self.width} is odd; style='resnet_d' needs an even width")
        if bool(self.stages) == (self.style == "mobile_clip") and self.has_batch_norm:
            wanted = "no stages" if self.stages else "at least one stage"
            raise ConfigError(f"a stem of style={self.style!r} needs {wanted}")
        if len(self.stages) > 8:
            raise ConfigError(f"stages={self.stages} has more than 8 stages")
        if self.widths and (len(self.widths) != len(self.stages) or not self.is_plain):
            raise ConfigError(f"widths={self.widths} need style='conv' and one width for each of stages={self.stages}")

    @property
    def has_batch_norm(self) -> bool:
        """Whether the stem uses BatchNorm, whose running statistics are part of a checkpoint."""
        return self.style in ("conv", "resnet_d", "mobile_clip")

    @property
    def is_plain(self) -> bool:
        """Whether the stem consists of plain convolutions, without residual units."""
        return self.style == "conv"

    @property
    def stride(self) -> int:
        """Stride of the feature map, in pixels."""
        if self.style == "mobile_clip":
            return 8
        return 2 ** len(self.stages) if self.is_plain else 4 * 2 ** max(0, len(self.stages) - 1)

    @property
    def out_channels(self) -> int:
        """Channels of the feature map."""
        if not self.stages:
            return self.width
        return self.stage_widths[-1] * (1 if self.is_plain else 4)

    @property
    def stage_widths(self) -> tuple[int, ...]:
        """Channels of each stage, before the last convolution of a residual unit."""
        return self.widths or tuple(self.width * 2**stage for stage in range(len(self.stages)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(Settings):
    """Rotary position embedding (RoPE) of the queries and keys of patches."""

    kind: Rope = "axial"
    """`axial`: by row and column, in patches; `normalized`: by row and column, scaled to -1..1 (DINOv3); `mixed`: by
    learned mixtures of both, per layer and head."""
    temperature: Annotated[float, Range(1e-3, 1e9)] = 10_000.0  # longest wavelength, in units of 2 pi
    reference_grid: Size | None = None
    """Coordinates are scaled to this grid, so that other image sizes span the same angles (EVA-02)."""
    offset: float = 0.0  # coordinate of the first row and column
    columns_first: bool = False  # the first half of the channels rotates by column, the second by row
    half: bool = False  # rotate channel i with channel i + K / 2, rather than adjacent channels


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeConfig(Settings):
    """A cheap first pass over every image; only uncertain images go through the full model."""

    threshold: Share = 1.0
    """The first pass decides if its largest probability is above this threshold; at 1 it never does."""
    image_size: Size | None = None  # image size of the first pass; None for the size of the full model
    tome_r: MergedTokens | tuple[MergedTokens, ...] = 0  # token merging in the first pass, like `ViTConfig.tome_r`


TIMM_POOLS: dict[str, Pool] = {"token": "token", "avg": "mean", "map": "map"}
"""timm's `global_pool`, and ours."""
INNER_POSITIONS = ("relative", "relative_bias")  # position encodings inside attention, besides RoPE

REGULARIZERS = ("dropout", "attention_dropout", "drop_path")
"""ViT settings that only affect training, not parameters or predictions."""
CHANGEABLE = (*REGULARIZERS, "tome_r", "tome_thresholds")  # ViT settings that do not change any parameter's shape


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(Settings):
    """Architecture and numerics of a Vision Transformer."""

    image_size: Size = (224, 224)
    """Input rows and columns, in pixels; a single number means a square."""
    patch_size: Annotated[int, Range(1, 1024)] = 16
    """Side of one patch, in pixels (in stem features for a hybrid)."""
    trim: bool = False
    """Ignore pixels beyond the last full patch, as a convolution does (SigLIP So400m/14 at 384). By default an image
    size that the patches do not divide is an error."""
    in_channels: InChannels = 3
    num_classes: NumClasses = 1000
    """Number of classes; 0 for no head, and the model returns features."""
    depth: Annotated[int, Range(1, 1024)] = 12
    width: Width = 768
    mlp_dim: Annotated[int, Range(1, 262_144)] = 3072
    num_heads: NumHeads = 12
    attn_dim: Annotated[int, Range(0, 65_536)] = 0
    """Total width of all attention heads; 0 for `width`."""
    pool: Pool = "token"
    """`token`: class token; `mean`: mean of the patch tokens; `map`: MAP head, attention pooling by a learned probe;
    `token_mean`: class token and mean of the patch tokens, concatenated; `prefix_mean`: mean of the class and register
    tokens (Pixio); `prefix_concat`: the first `pool_tokens` of them, concatenated (RADIO)."""
    pool_tokens: Annotated[int, Range(0, 4096)] = 0
    norm_after_pool: bool = False
    """The final LayerNorm acts on the pooled vector instead of on every token."""
    cls_token: bool = True
    distillation: bool = False
    """DeiT's distillation token with its own head; the logits of both heads are averaged."""
    reg_tokens: Annotated[int, Range(0, 4096)] = 0
    """Number of register tokens."""
    pos_embed: Positions = "learned"
    """Added to the tokens: `learned`; `learned_2d` (rows in one half of the channels, columns in the other);
    `factorized` (row plus column); fixed `sincos`. Inside attention: the paper's `relative` offsets, BEiT's
    `relative_bias`."""
    pos_embed_at: PosEmbedAt = "input"
    """Where `pos_embed` is added (Table 8 of the paper): to the input of the first layer only, or to the input of every
    layer, with a table per layer or one shared table."""
    rope: RopeConfig | None = None
    """Rotary position embedding, alone or in addition to `pos_embed`."""
    cls_pos_embed: bool = True
    """The class and distillation tokens have position embeddings."""
    representation_size: Annotated[int, Range(0, 65_536)] = 0
    """Width of the pre-logits layer (linear, tanh) before the head; 0 for none."""
    projection: bool = False
    """The pre-logits layer is CLIP's projection, without bias and tanh."""
    projection_bias: bool = False
    """The projection has a bias (LiT)."""
    unit_features: bool = False
    """Normalize features to unit length before the head, whose rows are text embeddings (CLIP)."""
    block: BlockOrder = "pre_norm"
    """`pre_norm` (the paper), `res_post_norm` (norms after the branches), `parallel` (both branches share one norm)."""
    attention: AttentionKind = "softmax"
    """`differential`: the difference of two softmax attentions with half the channels each; `axial`: within the rows
    of patches in even layers, within the columns in odd layers; `mixer`: an MLP over the patches (MLP-Mixer)."""
    mixer_dim: Annotated[int, Range(0, 65_536)] = 0
    """Hidden width of the MLP over the patches with `attention="mixer"`."""
    norm: Norm = "layer"
    """LayerNorm, or RMSNorm (`rms`)."""
    patch_norm: bool = False
    """Norm of the patch tokens before position embeddings are added (AIMv2)."""
    pre_norm: bool = False
    """Norm of the embedded tokens before the first block (CLIP)."""
    final_norm: bool = True
    """Norm after the last block."""
    qk_norm: bool = False
    """Normalize queries and keys per head."""
    attn_norm: bool = False
    """Norm before the output projection of attention (EVA-02)."""
    mlp: Mlp = "gelu"
    """`gelu`: two dense layers with GELU between them; `swiglu`: a gated SiLU, whose first layer computes the gate and
    the value (EVA-02, DINOv2)."""
    mlp_norm: bool = False
    """Norm before the second layer of the MLP (EVA-02)."""
    patch_bias: bool = True
    qkv_bias: bool = True
    dense_bias: bool = True
    """Bias of the attention output projection and of the MLP."""
    layer_scale: bool = False
    mlp_scale: bool = True
    """LayerScale also acts on the MLP branch (not in Sapiens 2)."""
    pool_num_heads: Annotated[int, Range(0, 4096)] = 0
    """Attention heads of the MAP head; 0 for `num_heads`."""
    pool_mlp_dim: Annotated[int, Range(0, 262_144)] = 0
    """MLP width of the MAP head; 0 for `mlp_dim`."""
    pool_prefix: bool = False
    """The MAP head also attends to class and register tokens."""
    dropout: Chance = 0.0
    """Dropout after the position embedding and every dense layer except qkv."""
    attention_dropout: Chance = 0.0
    drop_path: Chance = 0.0
    """Stochastic depth rate of the last block; it increases linearly from 0 in the first."""
    stem: StemConfig | None = None
    tome_r: MergedTokens | tuple[MergedTokens, ...] = 0
    """Token merging (ToMe): number of tokens merged in every layer, or one number per layer."""
    tome_thresholds: tuple[Annotated[float, Range(-1.0, 1.0)], ...] = ()
    """Adaptive merging, in place of `tome_r`: per layer, the cosine similarity of keys above which tokens merge."""
    numerics: Numerics = NUMERICS["google"]

    def check(self) -> None:
        if self.projection_bias and not self.projection:
            raise ConfigError("projection_bias=True needs projection=True")
        if self.trim and self.stem:
            raise ConfigError("trim=True cannot be combined with a convolutional stem, which pads images")
        if self.rope is not None and self.head_width % 4:
            raise ConfigError(f"rope needs a multiple of 4 channels per head, not {self.head_width}")
        if self.width % (self.pool_num_heads or 1):
            raise ConfigError(f"width={self.width} is not divisible by pool_num_heads={self.pool_num_heads}")
        if self.pos_embed == "relative_bias" and (self.prefix_tokens != 1 or not self.cls_token or self.rope):
            raise ConfigError("pos_embed='relative_bias' needs a class token, no other token and no rope")
        if self.pos_embed == "relative" and self.rope:
            raise ConfigError("pos_embed='relative' cannot be combined with rope")
        if self.attention == "differential" and (self.head_width % 2 or self.rope or self.pos_embed in INNER_POSITIONS):
            raise ConfigError("attention='differential' needs an even width per head and no positions inside attention")
        if self.attention in ("axial", "mixer") and (
            self.prefix_tokens or self.rope or self.pos_embed in INNER_POSITIONS
        ):
            raise ConfigError(
                f"attention={self.attention!r} needs the patches alone: no class, distillation or register tokens, and "
                "no positions inside attention",
                hint="set cls_token=False and pool='mean'",
            )
        if bool(self.mixer_dim) != (self.attention == "mixer"):
            raise ConfigError(f"mixer_dim={self.mixer_dim}: attention='mixer' needs a width, other kinds need 0")
        if self.pos_embed_at != "input" and self.pos_embed in ("none", *INNER_POSITIONS):
            raise ConfigError(f"pos_embed={self.pos_embed!r} is not added to tokens; set pos_embed_at='input'")
        if (self.attn_dim or self.width) % self.num_heads:
            total = f"attn_dim={self.attn_dim}" if self.attn_dim else f"width={self.width}"
            raise ConfigError(f"{total} is not divisible by {argument('num_heads', self.num_heads)}")
        if self.pos_embed == "sincos" and (self.width % 4 or self.width < 8):
            raise ConfigError(f"pos_embed='sincos' needs a width divisible by 4, not {self.width}")
        if self.pos_embed == "learned_2d" and self.width % 2:
            raise ConfigError(f"pos_embed='learned_2d' needs an even width, not {self.width}")
        if self.pool not in ("mean", "map") and not self.cls_token:
            raise ConfigError(f"pool={self.pool!r} needs cls_token=True")
        if self.unit_features and self.distillation:
            raise ConfigError("unit_features=True cannot be combined with distillation=True")
        if self.pool in ("token_mean", "prefix_concat") and self.norm_after_pool:
            reason = f"cannot be combined with pool={self.pool!r}, which normalizes the tokens"
            raise ConfigError(f"norm_after_pool=True {reason}")
        concatenates = self.pool == "prefix_concat"
        if not concatenates <= self.pool_tokens <= concatenates * self.prefix_tokens:
            needs = f"pool='prefix_concat' needs 1 to {self.prefix_tokens}, other kinds need 0"
            raise ConfigError(f"pool_tokens={self.pool_tokens}: {needs}")
        if self.distillation and (self.pool != "token" or not self.cls_token):
            raise ConfigError("distillation=True needs cls_token=True and pool='token'")
        if len(self.tome_counts) != self.depth:
            raise ConfigError(f"tome_r has {len(self.tome_counts)} values for {self.depth} layers")
        if self.tome_thresholds and len(self.tome_thresholds) != self.depth:
            raise ConfigError(f"tome_thresholds has {len(self.tome_thresholds)} values for {self.depth} layers")
        if self.tome_thresholds and any(self.tome_counts):
            raise ConfigError("tome_r and tome_thresholds cannot be combined; set one of them to 0 or []")
        if self.merges_tokens and self.needs_all_patches:
            name = "tome_thresholds" if self.tome_thresholds else "tome_r"
            raise ConfigError(f"{name} cannot be combined with {self.needs_all_patches}, which need every patch")
        self.grid_of(self.image_size)

    @property
    def needs_all_patches(self) -> str:
        """The part of the blocks that relies on the grid, so that no patch can be dropped or merged; empty if none."""
        if self.rope or self.pos_embed in INNER_POSITIONS:
            return "positions inside attention"
        if self.pos_embed_at != "input":
            return "positions added in every layer"
        needs = {"axial": "rows and columns of axial attention", "mixer": "MLPs over the patches"}
        return needs.get(self.attention, "")

    @property
    def tome_counts(self) -> tuple[int, ...]:
        """Number of tokens to merge in each layer."""
        return self.tome_r if isinstance(self.tome_r, tuple) else (self.tome_r,) * self.depth

    @property
    def merges_tokens(self) -> bool:
        """Whether any layer merges tokens."""
        return bool(self.tome_thresholds) or any(self.tome_counts)

    @property
    def stride(self) -> int:
        """Patch stride, in pixels."""
        return self.patch_size * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        return self.grid_of(self.image_size)

    def grid_of(self, image_size: Size) -> Size:
        """Rows and columns of patches for an image of this size. Raises ConfigError if the patches do not divide it."""
        rows, columns = image_size
        over = not self.trim and (rows % self.stride or columns % self.stride)
        if rows < self.stride or columns < self.stride or over:
            what = "patch and stem stride together" if self.stem else "patch"
            raise ConfigError(f"image of {rows}x{columns} pixels is not divisible by the {what} of {self.stride}")
        return rows // self.stride, columns // self.stride

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches: class, distillation, registers."""
        return self.cls_token + self.distillation + self.reg_tokens

    @property
    def tokens_read(self) -> int | None:
        """Number of leading tokens that the head reads; None for all."""
        counts = {"token": 1 + self.distillation, "prefix_mean": self.prefix_tokens, "prefix_concat": self.pool_tokens}
        return counts.get(self.pool)

    @property
    def prefix_pos_embeds(self) -> int:
        """Number of prefix tokens with a learned position embedding."""
        learned = self.cls_pos_embed and self.pos_embed in ("learned", "learned_2d")
        return (self.cls_token + self.distillation) if learned else 0

    @property
    def head_width(self) -> int:
        """Channels per attention head."""
        return (self.attn_dim or self.width) // self.num_heads

    @property
    def pooled_width(self) -> int:
        """Width of the pooled vector, before a pre-logits layer."""
        return self.width * {"token_mean": 2, "prefix_concat": self.pool_tokens}.get(self.pool, 1)

    @property
    def feature_width(self) -> int:
        """Width of the features that the head reads."""
        return self.representation_size or self.pooled_width


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(Settings):
    """Architecture of a BiT ResNet: pre-activation, GroupNorm, standardized convolutions."""

    image_size: Size = (224, 224)
    in_channels: InChannels = 3
    num_classes: NumClasses = 1000
    stages: tuple[Annotated[int, Range(1, 1024)], ...] = (3, 4, 6, 3)
    width: Annotated[int, Range(32, 4096)] = 64
    """Channels after the root convolution: 64 times the width factor."""
    style: ResNetStyle = "bit"
    """`bit`: as released; `timm_bit`: with timm's standardization epsilon."""
    axial: bool = False
    """Attention within rows, then within columns, in place of the 3x3 convolutions (AxialResNet)."""

    def check(self) -> None:
        if self.width % 32:
            raise ConfigError(f"width={self.width} is not a multiple of GroupNorm's 32 groups")
        if not 1 <= len(self.stages) <= 8:
            raise ConfigError(f"stages={self.stages} must have 1 to 8 stages")

    def axial_grid(self, width: int, stride: int) -> Size:
        """Rows and columns of the feature map that enters the axial attention of a unit of this width and stride."""
        pixels = 4 * (width // self.width) // stride
        return -(-self.image_size[0] // pixels), -(-self.image_size[1] // pixels)

    @property
    def feature_width(self) -> int:
        """Width of the features that the head reads."""
        return self.width * 4 * 2 ** (len(self.stages) - 1)


ModelConfig = ViTConfig | ResNetConfig


def _refuse_change(self: ModelConfig, name: str, value: object) -> None:
    """Settings are frozen. transformers' Trainer sets `use_cache` on every config; it has no meaning here."""
    if name != "use_cache":
        raise FrozenInstanceError(f"settings cannot be changed: make a copy with config.replace({name}=...)")


ViTConfig.__setattr__ = ResNetConfig.__setattr__ = _refuse_change  # type: ignore[method-assign, assignment]

MODEL_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


DEFAULT_BATCH_SIZE = 16  # default inference batch size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess(Settings):
    """The evaluation preprocessing that a checkpoint expects.

    Apply it with `vitruvian.preprocess_image(image, preprocess)` or `vitruvian.transform(preprocess)`.
    """

    image_size: Size = (224, 224)
    fit: Fit = "squash"
    """`squash`: resize to `scaled_size`, ignoring the aspect ratio; `crop`: resize to cover `scaled_size`. Both then
    take the center crop. `naflex`: each image keeps its aspect ratio, so images differ in size."""
    scaled_size: Size | None = None
    """Size before the center crop; None for `image_size`. Shorter side 256, crop 224 is (256, 256)."""
    patch_size: Annotated[int, Range(1, 2**14)] | None = None
    max_num_patches: Annotated[int, Range(1, 2**20)] | None = None
    """For `naflex`: an image becomes as many full patches as its aspect ratio allows, up to this number."""
    floor_crop: bool = False
    """Round the crop offset down (transformers) instead of to even (torchvision)."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    """False: no low-pass filter when downsampling, like TensorFlow's resize."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from pixel values in 0..1; one value per channel."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    pixels: Literal["rgb", "stored"] = "rgb"
    """`rgb`: 8-bit RGB or gray, whatever a file contains; `stored`: the channels of the file at their depth, integers
    divided by the largest value of their type. Always `stored` for other than 1 or 3 channels."""
    stated: bool = True
    """False if no file states the preprocessing and the models of the family differ: applying it is an error."""

    def check(self) -> None:
        if {self.patch_size is not None, self.max_num_patches is not None} != {self.fit == "naflex"}:
            needs = f"needs {argument('patch_size')} and max_num_patches=, other fits have neither"
            raise ConfigError(f"fit='naflex' {needs}")
        scaled = self.scaled_size or self.image_size
        if scaled[0] < self.image_size[0] or scaled[1] < self.image_size[1]:
            size = argument("image_size", self.image_size)
            raise ConfigError(f"scaled_size={self.scaled_size} does not cover {size}")
        if len(self.mean) != len(self.std) or not self.std or not all(0 < x < 1e9 for x in self.std):
            raise ConfigError(f"mean={self.mean} and std={self.std} must have equal lengths, and std must be positive")

    @property
    def is_stored(self) -> bool:
        """Whether images are read with their stored channels."""
        return self.pixels == "stored" or len(self.mean) not in (1, 3)

    def require_rgb(self, what: str) -> None:
        """Raise ConfigError naming `what` if images are read with their stored channels."""
        if self.is_stored:
            raise ConfigError(f"{what} works with 8-bit RGB or gray images; this model reads stored channels")

    def summary(self) -> str:
        """A one-line summary."""
        size = "x".join(map(str, dict.fromkeys(self.image_size)))
        scaled = "x".join(map(str, dict.fromkeys(self.scaled_size or self.image_size)))
        cut = f"{scaled} -> {size}" if self.fit == "crop" or scaled != size else size
        flexible = f"naflex, at most {self.max_num_patches} patches of {self.patch_size}"
        how = {"crop": cut, "squash": f"squash {cut}", "naflex": flexible}[self.fit]
        return f"({how}, {self.interpolation}, mean {', '.join(f'{m:g}' for m in dict.fromkeys(self.mean))})"

    def with_changes(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other settings. `squash` without a `scaled_size` in `changes` has no crop."""
        reset = {"scaled_size": None} if changes.get("fit") == "squash" else {}
        return (self.with_image_size(self.image_size) if "fit" in changes else self).replace(**reset, **changes)

    def require_one_size(self, what: str) -> Size:
        """The common size of all images. Raises ConfigError naming `what` if each image has its own (NaFlex)."""
        if self.fit == "naflex":
            reason = "needs images of one size, and this model keeps each image's shape (NaFlex)"
            size = argument("image_size", self.image_size[0])
            raise ConfigError(f"{what} {reason}: load it with {size}, which squashes all images to that size")
        return self.image_size

    def with_image_size(self, image_size: int | Size) -> Self:
        """A copy for another, common input size; the crop keeps the same fraction of the image."""
        size = as_size(image_size)
        if self.fit == "naflex":
            return self.replace(image_size=size, fit="squash", patch_size=None, max_num_patches=None)
        if self.scaled_size is None or size == self.image_size:
            return self.replace(image_size=size)
        scaled = tuple(max(new, new * old // was) for new, old, was in zip(size, self.scaled_size, self.image_size))
        return self.replace(image_size=size, scaled_size=scaled)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphConfig(Settings):
    """Input and output shape of an exported graph whose architecture is unknown."""

    image_size: Size = (224, 224)
    in_channels: InChannels = 3
    num_classes: NumClasses = 1000


LoraTarget = Literal["all", "q", "k", "v", "qkv", "proj", "fc1", "fc2"]
DENSE_PARTS = ("q", "k", "v", "proj", "fc1", "fc2")  # all dense layers of a block


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Settings):
    """LoRA: which layers get low-rank updates, and of what rank. Everything else is frozen, except the head."""

    rank: Annotated[int, Range(0, 4096)] = 0
    """Rank of the updates; 0: no LoRA."""
    alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    """The updates are multiplied by alpha / rank; 0: twice the rank."""
    targets: tuple[LoraTarget, ...] = ("q", "v")
    """Layers of each block with updates: queries `q`, keys `k`, values `v` (`qkv`: one update for the three), `proj`,
    `fc1`, `fc2`; `all`: all of them."""
    dora: bool = False
    """DoRA: also learn the length of each row of the updated weights."""
    lr_scale: Annotated[float, Range(1e-6, 1e6)] = 10.0
    """Learning rate of the updates as a multiple of `lr`, which is that of the head, in all layers."""

    def check(self) -> None:
        parts = self.parts
        if not parts or len(set(parts)) < len(parts) or ("qkv" in parts and set("qkv") & set(parts)):
            raise ConfigError(f"lora.targets={list(self.targets)} is empty, or has a layer twice")

    @property
    def parts(self) -> tuple[str, ...]:
        """The targets, with `all` expanded."""
        return DENSE_PARTS if "all" in self.targets else self.targets

    @property
    def scale(self) -> float:
        """Factor of the updates."""
        return (self.alpha or 2 * self.rank) / self.rank


THRESHOLD_RANGES = {"probability": Range(0.0, 1.0), "energy": Range(-1e6, 1e6)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMeta(Settings):
    """A model's metadata: everything besides its architecture and its parameters.

    It is saved, loaded, replaced and reset as a whole: `model.meta = model.meta.replace(labels=("cat", "dog"))`.
    """

    preprocess: Preprocess = Preprocess()
    """How an image becomes the model's input."""
    labels: tuple[str, ...] | None = None
    """Class names, in the order of the outputs."""
    origin: str = ""
    """Where the weights come from, and what was assumed when they were read."""
    known_as: str = ""
    """The model's name in its own family, such as `timm:vit_base_patch16_224`; `save` writes that name again."""
    temperature: Annotated[float, Range(1e-9, 1e9)] = 1.0
    """Divides the logits before they become probabilities; `vit evaluate --calibrated` fits it."""
    score_function: ScoreFunction = "softmax"
    threshold: float = 0.0
    """Images with a lower score are rejected: they show none of the classes."""
    threshold_on: ThresholdOn = "probability"
    coverage: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Target coverage of prediction sets: the probability that an image's set contains its class. 0: no sets."""
    set_threshold: Annotated[float, Range(0.0, 1.0)] = 0.0
    """Classes of at least this probability are in an image's set."""
    target: Target = SINGLE
    """The kind of output: one class, several labels or numbers, with fitted thresholds or intervals."""
    cascade: CascadeConfig | None = None
    """A cheaper first pass. `Classifier` runs it; calling the model does not."""
    source: str = ""
    """The file or directory that the weights were loaded from. It is not saved."""

    def check(self) -> None:
        THRESHOLD_RANGES[self.threshold_on].check("threshold", self.threshold)
        for name in ("thresholds", "mean", "std", "margins"):
            values = getattr(self.target, name)
            if values and self.labels is not None and len(values) != len(self.labels):
                raise ConfigError(f"target.{name} has {len(values)} values for {len(self.labels)} labels")

    def to_json(self) -> dict[str, Any]:
        unset = {"source"} | ({"target"} if self.target == SINGLE else set())
        return {name: value for name, value in Settings.to_json(self).items() if name not in unset}

    def for_new_head(self, labels: tuple[str, ...] | None = None) -> "ModelMeta":
        """The metadata of the same model with a new, untrained head: everything fitted to the old head is reset."""
        return ModelMeta(
            preprocess=self.preprocess, labels=labels, origin=self.origin, known_as=self.known_as, source=self.source
        )
