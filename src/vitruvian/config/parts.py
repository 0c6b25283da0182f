"""The parts of a model's settings: choices and limits, numerics of the families, stems, rotary positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitruvian.errors import ConfigError
from vitruvian.settings import Range, Settings, Share, Size

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


Classes = Annotated[int, Range(0, 1_000_000)]
Channels = Annotated[int, Range(1, 4096)]
Width = Annotated[int, Range(1, 65_536)]
Heads = Annotated[int, Range(1, 4096)]
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
