"""Frozen settings of models and images, validated when made, with a JSON round trip."""

from __future__ import annotations

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from vitruvian.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]
"""Rows, columns."""
MAX_SIDE = 2**14
"""Pixels of the longest side that a model or its view may ask for."""
BATCH = 16
"""Images that a model answers at a time, unless told."""

Pool = Literal["token", "mean", "map", "token_mean"]
Positions = Literal["none", "learned", "learned_2d", "relative", "relative_bias", "sincos"]
PositionResize = Literal["zoom", "bicubic", "bicubic_antialias", "bicubic_aligned", "bilinear_antialias", "dino"]
Gelu = Literal["erf", "tanh", "quick"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layer", "rms"]
BlockOrder = Literal["pre_norm", "res_post_norm", "parallel"]
Rope = Literal["axial", "normalized", "mixed"]
ConvStyle = Literal["hybrid", "timm", "bit"]
Fit = Literal["squash", "crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "area", "lanczos"]


class Settings:
    """JSON round trip for a dataclass of numbers, strings, tuples and other settings."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The settings written by `to_json`; an unknown key is answered with the nearest."""
        hints = typing.get_type_hints(cls)
        values = {}
        for key, value in data.items():
            if key not in hints:
                raise UnknownNameError(f"{cls.__name__} setting", key, hints)
            values[key] = _restore(hints[key], value)
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]


def _restore(kind: Any, value: Any) -> Any:
    """`value` as JSON gives it, with lists back as tuples and objects back as settings."""
    if isinstance(value, dict):
        choices = get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        for choice in choices:
            if isinstance(choice, type) and issubclass(choice, Settings):
                return choice.from_json(value)
    return tuple(_restore(None, item) for item in value) if isinstance(value, list) else value


def as_size(value: int | Size | list[int], name: str = "image_size") -> Size:
    """`384` or `(rows, columns)` as (rows, columns)."""
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ConfigError(f"{name}={value!r} is not a positive number or (rows, columns)")
    if max(pair) > MAX_SIDE:
        raise ConfigError(f"{name}={value} is larger than {MAX_SIDE} a side")
    return pair[0], pair[1]


def check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(get_args(choices))}")


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        wanted = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise ConfigError(f"{name}={value} is not {wanted}")


LIMITS: dict[str, Size] = {
    # setting of a model: least, most. Far past every published model, and within what a machine can hold.
    "patch_size": (1, 1024),
    "channels": (1, 4096),
    "layers": (1, 1024),
    "width": (1, 65_536),
    "mlp_width": (1, 262_144),
    "heads": (1, 4096),
    "pool_heads": (0, 4096),
    "pool_mlp_width": (0, 262_144),
    "classes": (0, 1_000_000),
    "registers": (0, 4096),
    "representation_size": (0, 65_536),
}


def check_limits(config: Settings) -> None:
    """Refuse numbers of a model that no machine could hold."""
    for name, (least, most) in LIMITS.items():
        if hasattr(config, name):
            check_range(name, getattr(config, name), least, most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics(Settings):
    """The choices that differ between families of weights and change the numbers."""

    gelu: Gelu = "tanh"
    """Exact (`erf`), the `tanh` approximation (they differ by up to 4.7e-4 an element) or CLIP's x sigmoid(1.702 x)
    (`quick`, up to 0.02)."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    position_resize: PositionResize = "zoom"
    """How learned positions follow another grid."""

    def __post_init__(self) -> None:
        check_choice("gelu", self.gelu, Gelu)
        check_choice("position_resize", self.position_resize, PositionResize)
        check_range("norm_eps", self.norm_eps, 0.0, 1e-2)


@dataclass(frozen=True, kw_only=True, slots=True)
class StemConfig(Settings):
    """The ResNet in front of a hybrid's patch embedding."""

    stages: tuple[int, ...] = (3, 4, 9)
    """Residual units in each stage; empty for the root alone."""
    width: int = 64
    """Channels after the root; stage k ends with 4 * width * 2**k."""
    style: ConvStyle = "hybrid"
    """`hybrid`: the paper's release; `timm`: the same with timm's standardization epsilon."""

    def __post_init__(self) -> None:
        check_choice("style", self.style, ConvStyle)
        check_range("stem width", self.width, 32)
        if self.width % 32:
            raise ConfigError(f"stem width={self.width} is not a multiple of GroupNorm's 32 groups")

    @property
    def stride(self) -> int:
        return 4 * 2 ** max(0, len(self.stages) - 1)

    @property
    def out_channels(self) -> int:
        return self.width * 4 * 2 ** (len(self.stages) - 1) if self.stages else self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig(Settings):
    """Rotary positions: how patches' queries and keys are turned."""

    kind: Rope = "axial"
    """`axial`: by row and by column, in patches; `normalized`: the same in shares of the image from -1 to 1 (DINOv3);
    `mixed`: by learned mixtures of both, for each layer and head."""
    temperature: float = 10_000.0
    """Longest wavelength, in units of 2 pi."""
    reference_grid: Size | None = None
    """Places are scaled to this grid (EVA-02), so that another image size spans the same angles."""
    offset: float = 0.0
    """Place of the first row and column."""
    columns_first: bool = False
    """The first half of the channels turns by column, the second by row."""
    half: bool = False
    """Channel i turns with channel i + K / 2; else neighbors turn together."""

    def __post_init__(self) -> None:
        check_choice("rope kind", self.kind, Rope)
        check_range("rope temperature", self.temperature, 1e-3, 1e9)
        if self.reference_grid is not None:
            object.__setattr__(self, "reference_grid", as_size(self.reference_grid, "reference_grid"))


REGULARISERS = ("dropout", "attention_dropout", "drop_path")
"""Settings of a ViT that act in training alone: they change neither its weights nor its answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig(Settings):
    """Shape and numerics of one Vision Transformer."""

    image_size: Size = (224, 224)
    """Rows and columns of the input, in pixels; a single number means a square."""
    patch_size: int = 16
    """Side of one patch, in pixels (in stem features for a hybrid)."""
    channels: int = 3
    classes: int = 1000
    """Outputs of the head; 0 leaves the head out, and the model gives features."""
    layers: int = 12
    width: int = 768
    mlp_width: int = 3072
    heads: int = 12
    pool: Pool = "token"
    """`token`: the class token; `mean`: of the patch tokens; `map`: the MAP head, attention pooling by a
    learned probe; `token_mean`: class token and mean of patches side by side."""
    norm_after_pool: bool = False
    """The final LayerNorm acts on the pooled vector instead of on every token."""
    class_token: bool = True
    distillation: bool = False
    """A second token with a head of its own; the two heads are averaged."""
    registers: int = 0
    """Extra tokens without position that no head reads."""
    positions: Positions = "learned"
    """Added to the tokens (`learned`, `learned_2d`, `sincos`), or inside attention: the paper's `relative` offsets or
    BEiT's `relative_bias`."""
    rope: RopeConfig | None = None
    """Rotary positions, alone or beside others."""
    class_position: bool = True
    """The class and distillation tokens have positions of their own."""
    representation_size: int = 0
    """Width of the pre-logits layer (linear, tanh) before the head; 0 for none."""
    projection: bool = False
    """The pre-logits layer is CLIP's projection: without bias and tanh."""
    block: BlockOrder = "pre_norm"
    """`pre_norm`: the paper's; `res_post_norm`: norms after the branches; `parallel`: both branches read one norm."""
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
    pool_heads: int = 0
    """Heads of the MAP head; 0 for as many as elsewhere."""
    pool_mlp_width: int = 0
    """Width of the MAP head's MLP; 0 for that of the blocks."""
    pool_prefix: bool = False
    """The MAP head reads the tokens before the patches too."""
    dropout: float = 0.0
    """After the position sum and every dense layer except qkv, while training."""
    attention_dropout: float = 0.0
    drop_path: float = 0.0
    """Chance that the last block is skipped while training; earlier blocks less, linearly."""
    stem: StemConfig | None = None
    numerics: Numerics = Numerics()

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", as_size(self.image_size))
        check_limits(self)
        for name in REGULARISERS:
            check_range(name, getattr(self, name), 0.0, 0.99)
        check_choice("pool", self.pool, Pool)
        check_choice("positions", self.positions, Positions)
        check_choice("mlp", self.mlp, Mlp)
        check_choice("block", self.block, BlockOrder)
        check_choice("norm", self.norm, Norm)
        if self.rope is not None and self.width // self.heads % 4:
            raise ConfigError(f"rotary positions need 4 channels a head or a multiple, not {self.width // self.heads}")
        if self.width % (self.pool_heads or 1):
            raise ConfigError(f"width={self.width} is not divisible by pool_heads={self.pool_heads}")
        if self.positions == "relative_bias" and (self.prefix_tokens != 1 or not self.class_token or self.rope):
            raise ConfigError("positions='relative_bias' needs a class token, no other token and no rope")
        if self.positions == "relative" and self.rope:
            raise ConfigError("positions='relative' has no meaning beside rope")
        if self.width % self.heads:
            raise ConfigError(f"width={self.width} is not divisible by heads={self.heads}")
        if self.positions == "sincos" and (self.width % 4 or self.width < 8):
            raise ConfigError(f"sin-cos positions need a width divisible by 4, not {self.width}")
        if self.positions == "learned_2d" and self.width % 2:
            raise ConfigError(f"2-D learned positions need an even width, not {self.width}")
        if self.pool in ("token", "token_mean") and not self.class_token:
            raise ConfigError(f"pool={self.pool!r} needs class_token=True")
        if self.pool == "token_mean" and self.norm_after_pool:
            raise ConfigError("norm_after_pool=True has no meaning with pool='token_mean', which normalizes the tokens")
        if self.distillation and (self.pool != "token" or not self.class_token):
            raise ConfigError("distillation=True needs class_token=True and pool='token'")
        self.grid_of(self.image_size)

    @property
    def stride(self) -> int:
        """Pixels from one patch to the next."""
        return self.patch_size * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> Size:
        """Rows and columns of patches at `image_size`."""
        return self.grid_of(self.image_size)

    def grid_of(self, image_size: Size) -> Size:
        """Rows and columns of patches of an image of this size."""
        rows, columns = image_size
        if rows < self.stride or columns < self.stride or rows % self.stride or columns % self.stride:
            what = "patch and stem stride together" if self.stem else "patch"
            raise ConfigError(f"image of {rows}x{columns} pixels is not divisible by the {what} of {self.stride}")
        return rows // self.stride, columns // self.stride

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: class, distillation, registers."""
        return self.class_token + self.distillation + self.registers

    @property
    def prefix_positions(self) -> int:
        """Tokens before the patches that have a learned position."""
        learned = self.class_position and self.positions in ("learned", "learned_2d")
        return (self.class_token + self.distillation) if learned else 0

    @property
    def pooled_width(self) -> int:
        return self.width * 2 if self.pool == "token_mean" else self.width

    @property
    def feature_width(self) -> int:
        """Length of the vector the head reads."""
        return self.representation_size or self.pooled_width


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig(Settings):
    """Shape of one BiT ResNet: pre-activation, GroupNorm, standardized convolutions."""

    image_size: Size = (224, 224)
    channels: int = 3
    classes: int = 1000
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    """Channels after the root: 64 times the width factor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", as_size(self.image_size))
        check_limits(self)
        if self.width < 32 or self.width % 32:
            raise ConfigError(f"width={self.width} is not a multiple of GroupNorm's 32 groups")
        if not self.stages or min(self.stages) < 1:
            raise ConfigError(f"stages={self.stages} must each have at least one unit")

    @property
    def feature_width(self) -> int:
        """Length of the vector the head reads."""
        return self.width * 4 * 2 ** (len(self.stages) - 1)


ModelConfig = ViTConfig | ResNetConfig

MODEL_KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocess(Settings):
    """The evaluation view of an image that a checkpoint asks for.

    Callable, so that `model.preprocess` is the transform of a data set: an image to normalized pixels.
    """

    image_size: Size = (224, 224)
    fit: Fit = "squash"
    """`squash`: straight to `image_size`; `crop`: scale to just cover `scaled_size`, cut the center."""
    scaled_size: Size | None = None
    """For `crop`; None means `image_size`. Shorter side 256, crop 224 is (256, 256)."""
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    """False samples without a low-pass filter, as TensorFlow's resize does."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    stated: bool = True
    """False where no file says how images are prepared and models of the family differ: to prepare one is an error."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", as_size(self.image_size))
        check_choice("fit", self.fit, Fit)
        check_choice("interpolation", self.interpolation, Interpolation)
        if self.scaled_size is not None:
            object.__setattr__(self, "scaled_size", as_size(self.scaled_size, "scaled_size"))
            if self.fit == "squash":
                raise ConfigError("scaled_size has no meaning with fit='squash'")
            if self.scaled_size[0] < self.image_size[0] or self.scaled_size[1] < self.image_size[1]:
                raise ConfigError(f"scaled_size={self.scaled_size} does not cover image_size={self.image_size}")
        if len(self.mean) != len(self.std) or not self.std or not all(0 < x < 1e9 for x in self.std):
            raise ConfigError(f"mean={self.mean} and std={self.std} do not fit together")

    def __call__(self, image: Any) -> Tensor:
        """Normalized float32 pixels (channels, rows, columns) of a Pillow image, a path, bytes or an 8-bit array."""
        public = importlib.import_module("vitruvian")  # the code that carries out these settings lies above them
        pixels: Tensor = public.preprocess_image(image, self)
        return pixels

    def brief(self) -> str:
        """The view in one phrase, for a line of text."""
        size = "x".join(map(str, dict.fromkeys(self.image_size)))
        scaled = "x".join(map(str, dict.fromkeys(self.scaled_size or self.image_size)))
        how = f"{scaled} -> {size}" if self.fit == "crop" else f"squash {size}"
        return f"({how}, {self.interpolation}, mean {', '.join(f'{m:g}' for m in dict.fromkeys(self.mean))})"

    def changed(self, changes: Mapping[str, Any]) -> Preprocess:
        """The view with other settings by name; one that squashes has nothing to cut from."""
        return self.replace(**({"scaled_size": None} if changes.get("fit") == "squash" else {}), **changes)

    def at(self, image_size: int | Size) -> Preprocess:
        """The same view for another input size; the share that the crop keeps stays the same."""
        size = as_size(image_size)
        if self.scaled_size is None or size == self.image_size:
            return self.replace(image_size=size)
        scaled = tuple(max(new, new * old // was) for new, old, was in zip(size, self.scaled_size, self.image_size))
        return self.replace(image_size=size, scaled_size=scaled)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

GOOGLE_NUMERICS = Numerics(gelu="tanh", norm_eps=1e-6, position_resize="zoom")
TIMM_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_antialias")
TORCHVISION_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="bicubic_aligned")
HUGGINGFACE_NUMERICS = Numerics(gelu="erf", norm_eps=1e-12, position_resize="bicubic")
DINO_NUMERICS = Numerics(gelu="erf", norm_eps=1e-6, position_resize="dino")
