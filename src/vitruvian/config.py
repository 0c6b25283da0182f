"""Settings of models and of preprocessing: frozen, validated when made, with a JSON round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vitruvian.errors import ConfigError, argument
from vitruvian.settings import Range, Settings, Share, Size, as_size

Pool = Literal["token", "mean", "map", "token_mean"]
Positions = Literal["none", "learned", "learned_2d", "factorized", "relative", "relative_bias", "sincos"]
PositionResize = Literal[
    "zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "bilinear", "bilinear_antialias", "dino"
]
Gelu = Literal["erf", "tanh", "quick"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layer", "rms"]
AttentionKind = Literal["softmax", "differential"]
BlockOrder = Literal["pre_norm", "res_post_norm", "parallel"]
Rope = Literal["axial", "normalized", "mixed"]
ConvStyle = Literal["hybrid", "timm", "bit", "conv", "resnet_d", "mobile_clip"]
ResNetStyle = Literal["bit", "timm_bit"]
Fit = Literal["squash", "crop", "naflex"]
ScoreFunction = Literal["softmax", "sigmoid"]
"""How logits become probabilities: of one label among all, or of each label by itself."""
ThresholdOn = Literal["probability", "energy"]
"""What a threshold for "none of these" is compared with: the best probability, or log(sum(exp(logits)))."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]


NumClasses = Annotated[int, Range(0, 1_000_000)]
InChannels = Annotated[int, Range(1, 4096)]
Width = Annotated[int, Range(1, 65_536)]
NumHeads = Annotated[int, Range(1, 4096)]
Chance = Annotated[float, Range(0.0, 0.99)]
MergedTokens = Annotated[int, Range(0, 65_536)]
"""Limits far past every published model, and within what a machine can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics(Settings):
    """The choices that differ between families of weights and change the numbers."""

    gelu: Gelu = "tanh"
    """Exact (`erf`), the `tanh` approximation (they differ by up to 4.7e-4 an element) or CLIP's x sigmoid(1.702 x)
    (`quick`, up to 0.02)."""
    norm_eps: Annotated[float, Range(0.0, 1e-2)] = 1e-6
    """Epsilon of every LayerNorm."""
    position_resize: PositionResize = "zoom"
    """How learned positions follow another grid."""
    square_positions: bool = False
    """Another grid has its part of the positions of a square around it, so that all its steps are the same (NaFlex)."""


GOOGLE_NUMERICS = Numerics(gelu="tanh", norm_eps=1e-6, position_resize="zoom")
TIMM_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_antialias")
TORCHVISION_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_aligned")
HUGGINGFACE_NUMERICS = Numerics(gelu="erf", norm_eps=1e-12, position_resize="bicubic")
CLIP_NUMERICS = Numerics(gelu="quick", norm_eps=1e-5, position_resize="bicubic")
SIGLIP_NUMERICS = Numerics(gelu="tanh", norm_eps=1e-6, position_resize="bicubic")
DINOV3_NUMERICS = Numerics(gelu="erf", norm_eps=1e-5, position_resize="bicubic")
DINO_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="dino")

ROOT_CHANNELS = 24
"""Of a plain convolutional stem's first convolution: 12 directions of a patch of 3x3 pixels, each with both signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StemConfig(Settings):
    """The convolutional network in front of a hybrid's patch embedding."""

    stages: tuple[Annotated[int, Range(1, 1024)], ...] = (3, 4, 9)
    """Residual units, or plain convolutions, in each stage; empty for the root alone."""
    width: Annotated[int, Range(8, 4096)] = 64
    """Channels after a ResNet's root, whose stage k ends with 4 * width * 2**k; of `conv`, stage k has width * 2**k."""
    widths: tuple[Annotated[int, Range(8, 4096)], ...] = ()
    """Of `conv`: the channels of each stage, in place of `width`."""
    style: ConvStyle = "hybrid"
    """`hybrid`: the ResNet of the paper's release; `timm`: the same with timm's standardization epsilon; `conv`: plain
    3x3 convolutions with BatchNorm for small images, each stage of which halves the image; `resnet_d`: a ResNet-D with
    BatchNorm; `mobile_clip`: two convolutions with BatchNorm, without stages, that reduce the image eight times."""

    def check(self) -> None:
        if self.width % 32 and not self.has_batch_norm:
            raise ConfigError(f"stem width={self.width} is not a multiple of GroupNorm's 32 groups")
        if self.width % 2 and self.style == "resnet_d":
            raise ConfigError(f"stem width={self.width} is not even, as style='resnet_d' needs it")
        if bool(self.stages) == (self.style == "mobile_clip") and self.has_batch_norm:
            wanted = "no stages" if self.stages else "at least one stage"
            raise ConfigError(f"a stem of style={self.style!r} needs {wanted}")
        if len(self.stages) > 8:
            raise ConfigError(f"stages={self.stages} are more than 8")
        if self.widths and (len(self.widths) != len(self.stages) or not self.is_plain):
            raise ConfigError(f"widths={self.widths} need style='conv' and one width for each of stages={self.stages}")

    @property
    def has_batch_norm(self) -> bool:
        """Whether it normalizes with BatchNorm, whose statistics a checkpoint keeps."""
        return self.style in ("conv", "resnet_d", "mobile_clip")

    @property
    def is_plain(self) -> bool:
        """Whether its convolutions are plain ones, without residual units."""
        return self.style == "conv"

    @property
    def stride(self) -> int:
        """Pixels from one place of the feature map to the next."""
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
        """Channels of each stage, before a residual unit's last convolution."""
        return self.widths or tuple(self.width * 2**stage for stage in range(len(self.stages)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(Settings):
    """Rotary positions: how patches' queries and keys are turned."""

    kind: Rope = "axial"
    """`axial`: by row and by column, in patches; `normalized`: the same in shares of the image from -1 to 1 (DINOv3);
    `mixed`: by learned mixtures of both, for each layer and head."""
    temperature: Annotated[float, Range(1e-3, 1e9)] = 10_000.0
    """Longest wavelength, in units of 2 pi."""
    reference_grid: Size | None = None
    """Places are scaled to this grid (EVA-02), so that another image size spans the same angles."""
    offset: float = 0.0
    """Place of the first row and column."""
    columns_first: bool = False
    """The first half of the channels turns by column, the second by row."""
    half: bool = False
    """Channel i turns with channel i + K / 2; else neighbors turn together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeConfig(Settings):
    """A cheap pass over every image, and the whole model for those that it is unsure of."""

    threshold: Share = 1.0
    """The first pass answers where its best answer has a larger probability; at 1 it never does."""
    image_size: Size | None = None
    """Of the first pass, in pixels; None for the whole model's."""
    tome_r: MergedTokens | tuple[MergedTokens, ...] = 0
    """Tokens that merge in each layer of the first pass, as a ViT's `tome_r`."""


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
    in_channels: InChannels = 3
    num_classes: NumClasses = 1000
    """Outputs of the head; 0 leaves the head out, and the model gives features."""
    depth: Annotated[int, Range(1, 1024)] = 12
    width: Width = 768
    mlp_dim: Annotated[int, Range(1, 262_144)] = 3072
    num_heads: NumHeads = 12
    attn_dim: Annotated[int, Range(0, 65_536)] = 0
    """Of all heads together; 0 for `width`. Two attentions side by side are one of twice the heads and width."""
    pool: Pool = "token"
    """`token`: the class token; `mean`: of the patch tokens; `map`: the MAP head, attention pooling by a
    learned probe; `token_mean`: class token and mean of patches side by side."""
    norm_after_pool: bool = False
    """The final LayerNorm acts on the pooled vector instead of on every token."""
    cls_token: bool = True
    distillation: bool = False
    """A second token with a head of its own; the two heads are averaged."""
    reg_tokens: Annotated[int, Range(0, 4096)] = 0
    """Extra tokens without position that no head reads."""
    pos_embed: Positions = "learned"
    """Added to the tokens (`learned`, `learned_2d` by row in half the channels and by column in the others,
    `factorized` by row plus by column, `sincos`), or inside attention: the paper's `relative` offsets or
    BEiT's `relative_bias`."""
    rope: RopeConfig | None = None
    """Rotary positions, alone or beside others."""
    cls_pos_embed: bool = True
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
    attn_norm: bool = False
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
    pool_num_heads: Annotated[int, Range(0, 4096)] = 0
    """Heads of the MAP head; 0 for as many as elsewhere."""
    pool_mlp_dim: Annotated[int, Range(0, 262_144)] = 0
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
        if self.width % (self.pool_num_heads or 1):
            raise ConfigError(f"width={self.width} is not divisible by pool_num_heads={self.pool_num_heads}")
        if self.pos_embed == "relative_bias" and (self.prefix_tokens != 1 or not self.cls_token or self.rope):
            raise ConfigError("pos_embed='relative_bias' needs a class token, no other token and no rope")
        if self.pos_embed == "relative" and self.rope:
            raise ConfigError("pos_embed='relative' has no meaning beside rope")
        if self.attention == "differential" and (self.head_width % 2 or self.rope or self.pos_embed in INNER_POSITIONS):
            raise ConfigError("attention='differential' needs an even width a head and no positions inside attention")
        if (self.attn_dim or self.width) % self.num_heads:
            name = "attn_dim" if self.attn_dim else "width"
            raise ConfigError(
                f"{name}={getattr(self, name)} is not divisible by {argument('num_heads', self.num_heads)}"
            )
        if self.pos_embed == "sincos" and (self.width % 4 or self.width < 8):
            raise ConfigError(f"sin-cos positions need a width divisible by 4, not {self.width}")
        if self.pos_embed == "learned_2d" and self.width % 2:
            raise ConfigError(f"2-D learned positions need an even width, not {self.width}")
        if self.pool in ("token", "token_mean") and not self.cls_token:
            raise ConfigError(f"pool={self.pool!r} needs cls_token=True")
        if self.unit_features and self.distillation:
            raise ConfigError("unit_features=True has no meaning with distillation=True")
        if self.pool == "token_mean" and self.norm_after_pool:
            raise ConfigError("norm_after_pool=True has no meaning with pool='token_mean', which normalizes the tokens")
        if self.distillation and (self.pool != "token" or not self.cls_token):
            raise ConfigError("distillation=True needs cls_token=True and pool='token'")
        self.check_merging()
        self.grid_of(self.image_size)

    def check_merging(self) -> None:
        for name in ("tome_r", "tome_thresholds"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) not in (0 if name == "tome_thresholds" else -1, self.depth):
                raise ConfigError(f"{name} has {len(value)} numbers for {self.depth} layers")
        name = "tome_thresholds" if self.tome_thresholds else "tome_r"
        if self.tome_thresholds and any(self.tome_counts):
            raise ConfigError("tome_r and tome_thresholds are two ways to merge tokens: set one of them to 0 or []")
        if self.merges_tokens and (self.rope or self.pos_embed in INNER_POSITIONS):
            raise ConfigError(f"{name} has no meaning with positions inside attention, which need every patch")

    @property
    def tome_counts(self) -> tuple[int, ...]:
        """Tokens that merge in each layer, before the threshold of any."""
        return self.tome_r if isinstance(self.tome_r, tuple) else (self.tome_r,) * self.depth

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
        return self.cls_token + self.distillation + self.reg_tokens

    @property
    def tokens_read(self) -> int | None:
        """How many of the first tokens the head reads; None is all of them."""
        return 1 + self.distillation if self.pool == "token" else None

    @property
    def prefix_pos_embeds(self) -> int:
        """Tokens before the patches that have a learned position."""
        learned = self.cls_pos_embed and self.pos_embed in ("learned", "learned_2d")
        return (self.cls_token + self.distillation) if learned else 0

    @property
    def head_width(self) -> int:
        """Channels of one head of attention."""
        return (self.attn_dim or self.width) // self.num_heads

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
    in_channels: InChannels = 3
    num_classes: NumClasses = 1000
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


DEFAULT_BATCH_SIZE = 16
"""Images that a model answers at a time, unless told."""

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
    """`squash`: straight to `scaled_size`; `crop`: scale to just cover `scaled_size`. Then the center is cut.
    `naflex`: each image keeps its shape, in whole patches, so that images differ in size."""
    scaled_size: Size | None = None
    """None means `image_size`. Shorter side 256, crop 224 is (256, 256)."""
    patch_size: Annotated[int, Range(1, 2**14)] | None = None
    max_num_patches: Annotated[int, Range(1, 2**20)] | None = None
    """Of `naflex`: an image has as many whole patches of this size as its shape allows, at most so many."""
    floor_crop: bool = False
    """A center that falls between two pixels is cut from the first (transformers), not from the even (torchvision)."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    """False samples without a low-pass filter, as TensorFlow's resize does."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    stated: bool = True
    """False where no file says how images are prepared and models of the family differ: to prepare one is an error."""

    def check(self) -> None:
        if {self.patch_size is not None, self.max_num_patches is not None} != {self.fit == "naflex"}:
            raise ConfigError(
                f"fit='naflex' needs {argument('patch_size')} and max_num_patches=, other fits have neither"
            )
        scaled = self.scaled_size or self.image_size
        if scaled[0] < self.image_size[0] or scaled[1] < self.image_size[1]:
            raise ConfigError(
                f"scaled_size={self.scaled_size} does not cover {argument('image_size', self.image_size)}"
            )
        if len(self.mean) != len(self.std) or not self.std or not all(0 < x < 1e9 for x in self.std):
            raise ConfigError(f"mean={self.mean} and std={self.std} do not fit together")

    def brief(self) -> str:
        """The view in one phrase, for a line of text."""
        size = "x".join(map(str, dict.fromkeys(self.image_size)))
        scaled = "x".join(map(str, dict.fromkeys(self.scaled_size or self.image_size)))
        cut = f"{scaled} -> {size}" if self.fit == "crop" or scaled != size else size
        flexible = f"naflex, at most {self.max_num_patches} patches of {self.patch_size}"
        how = {"crop": cut, "squash": f"squash {cut}", "naflex": flexible}[self.fit]
        return f"({how}, {self.interpolation}, mean {', '.join(f'{m:g}' for m in dict.fromkeys(self.mean))})"

    def changed(self, changes: Mapping[str, Any]) -> Preprocess:
        """The view with other settings by name; one that squashes has nothing to cut from."""
        reset = {"scaled_size": None} if changes.get("fit") == "squash" else {}
        return (self.at(self.image_size) if "fit" in changes else self).replace(**reset, **changes)

    def one_size(self, what: str) -> Size:
        """The size of all images; `what` needs one, and is refused where each image has its own."""
        if self.fit == "naflex":
            raise ConfigError(
                f"{what} needs images of one size, and this model keeps each image's shape (NaFlex): "
                f"load it with {argument('image_size', self.image_size[0])}, which squashes all images to that size"
            )
        return self.image_size

    def at(self, image_size: int | Size) -> Preprocess:
        """The same view for another input size, the same for all images; the share that the crop keeps is as before."""
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


THRESHOLD_RANGES = {"probability": Range(0.0, 1.0), "energy": Range(-1e6, 1e6)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMeta(Settings):
    """Everything that a model has beside its architecture and its parameters.

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
    cascade: CascadeConfig | None = None
    """A cheaper first pass. `Classifier` runs it; calling the model does not."""
    source: str = ""
    """The file or directory that the weights were loaded from. It is not saved."""

    def check(self) -> None:
        THRESHOLD_RANGES[self.threshold_on].check("threshold", self.threshold)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in Settings.to_json(self).items() if name != "source"}

    def for_new_head(self, labels: tuple[str, ...] | None = None) -> ModelMeta:
        """The metadata of the same model with a new, untrained head: everything fitted to the old head is reset."""
        return ModelMeta(
            preprocess=self.preprocess, labels=labels, origin=self.origin, known_as=self.known_as, source=self.source
        )
