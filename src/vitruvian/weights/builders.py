"""torchvision's builders of Vision Transformers with their weights, so that programs run after changing the import.

`vit_b_16(weights=ViT_B_16_Weights.DEFAULT)` returns a `ViT` of this package with torchvision's numerics (erf GELU, eps
1e-6) and the names that programs for torchvision use: `heads`, `encoder`, `conv_proj`, `class_token`, `hidden_dim`.
Parameters have our names, except those of the head (`heads.head.weight`); `load_state_dict` accepts torchvision's too.
"""

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitruvian.catalog import PUBLISHED, imagenet_labels, resolve
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, NUMERICS, Interpolation, Preprocess, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError
from vitruvian.model.build import initialize
from vitruvian.model.vit import ViT
from vitruvian.progress import hide_progress
from vitruvian.weights.families.tables import split_positions
from vitruvian.weights.families.timm import Torchvision
from vitruvian.weights.hub import resolve_source
from vitruvian.weights.load import load

# B images, N tokens, D width

ARGUMENTS = {
    # torchvision's name: ours
    "image_size": "image_size", "patch_size": "patch_size", "num_layers": "depth", "num_heads": "num_heads",
    "hidden_dim": "width", "mlp_dim": "mlp_dim", "dropout": "dropout", "attention_dropout": "attention_dropout",
    "num_classes": "num_classes", "representation_size": "representation_size",
}  # fmt: skip
CATEGORIES = {"crane (bird)": "crane bird", "crane (machine)": "crane", "maillot (tank suit)": "maillot tank suit"}
"""Our labels of ImageNet that torchvision spells differently."""


class ArchitectureError(ConfigError, AssertionError):
    """Sizes that do not fit; an AssertionError, as in torchvision."""


class ImageClassification(nn.Module):
    """torchvision's evaluation transform: resize the shorter side, center crop, scale to 0..1, normalize.

    Takes a PIL image, or a tensor (C, rows, columns) or (B, C, rows, columns) of uint8, or of floats in 0..1.
    """

    def __init__(
        self,
        *,
        crop_size: int,
        resize_size: int = 256,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        interpolation: Any = "bilinear",
        antialias: bool | None = True,
    ) -> None:
        super().__init__()
        self.crop_size, self.resize_size, self.mean, self.std = [crop_size], [resize_size], list(mean), list(std)
        self.interpolation: Interpolation = getattr(interpolation, "value", interpolation)
        self.antialias = antialias
        self.preprocess = Preprocess(
            image_size=(crop_size, crop_size), fit="crop", scaled_size=(resize_size, resize_size), mean=mean, std=std,
            interpolation=self.interpolation,
        )  # fmt: skip

    def forward(self, image: Image.Image | Tensor) -> Tensor:
        if isinstance(image, Image.Image):
            return apply_preprocess(image.convert("RGB"), self.preprocess)
        rows, columns = image.shape[-2:]
        (size,), (crop,), short = self.resize_size, self.crop_size, min(rows, columns)
        target = tuple(int(size * side / short) for side in (rows, columns))
        pixels = image.reshape(-1, *image.shape[-3:]).float()
        if target != (rows, columns):
            pixels = F.interpolate(pixels, target, mode=self.interpolation, antialias=bool(self.antialias))
        if not image.is_floating_point():
            pixels = pixels.round().clamp(0, 255) / 255
        top, left = (round((side - crop) / 2) for side in target)
        mean, std = (torch.tensor(values, device=image.device).view(-1, 1, 1) for values in (self.mean, self.std))
        pixels = (pixels[..., top : top + crop, left : left + crop] - mean) / std
        return pixels if image.dim() == 4 else pixels[0]

    def __repr__(self) -> str:
        fields = ("crop_size", "resize_size", "mean", "std", "interpolation")
        return "\n    ".join(["ImageClassification(", *(f"{name}={getattr(self, name)}" for name in fields)]) + "\n)"


class WeightsEnum(Enum):
    """The published weights of a builder.

    A value is the size before the crop, the top-5 accuracy on ImageNet in percent, and the size of the file in MB.
    """

    @classmethod
    def verify(cls, weights: object) -> Self | None:
        """The member that is given itself or by name, such as "DEFAULT" or "ViT_B_16_Weights.DEFAULT".

        Raises:
            KeyError: No weights have this name.
            TypeError: The weights are those of another model.
        """
        if isinstance(weights, str):
            return cls[weights.removeprefix(f"{cls.__name__}.")]
        if weights is not None and not isinstance(weights, cls):
            raise TypeError(f"weights must be a {cls.__name__}, not a {type(weights).__name__}")
        return weights

    @property
    def url(self) -> str:
        return PUBLISHED[self.published_name].location

    @property
    def transforms(self) -> partial[ImageClassification]:
        """Call it for the transform: `weights.transforms()`."""
        mode = "bicubic" if "SWAG" in self.name else "bilinear"
        side = PUBLISHED[self.published_name].image_size
        return partial(ImageClassification, crop_size=side, resize_size=self.value[0], interpolation=mode)

    @property
    def meta(self) -> dict[str, Any]:
        row, (_, top5, file_size) = PUBLISHED[self.published_name], self.value
        size = (row.image_size, row.image_size)
        config = resolve(row.variant).replace(image_size=size)
        vision, swag = "https://github.com/pytorch/vision", "https://github.com/facebookresearch/SWAG"
        model = type(self).__name__.removesuffix("_Weights").lower()
        recipes = {"IMAGENET1K_SWAG_E2E_V1": swag, "IMAGENET1K_SWAG_LINEAR_V1": f"{vision}/pull/5793"}
        return {
            "categories": [CATEGORIES.get(label, label) for label in imagenet_labels()],
            "num_params": parameters(config),
            "min_size": size,
            "recipe": recipes.get(self.name, f"{vision}/tree/main/references/classification#{model}"),
            "_metrics": {"ImageNet-1K": {"acc@1": row.top1, "acc@5": top5}},
            "_ops": round(multiply_adds(config) / 1e9, 3),
            "_file_size": file_size,
            "_docs": f"Trained on {row.note}.",
        } | ({"license": f"{swag}/blob/main/LICENSE"} if "SWAG" in self.name else {})

    @property
    def published_name(self) -> str:
        """The name of these weights for `vitruvian.load`."""
        return f"{type(self).__name__}.{self.name}"

    def get_state_dict(self, *, progress: bool = True, check_hash: bool = True) -> dict[str, Tensor]:
        """The tensors under torchvision's names, downloaded if needed; the hash is always checked."""
        with nullcontext() if progress else hide_progress():
            path = resolve_source(self.published_name)
        tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return tensors

    def __repr__(self) -> str:
        return self.published_name


class ViT_B_16_Weights(WeightsEnum):
    """Weights of `vit_b_16`."""

    IMAGENET1K_V1 = (256, 95.318, 330.285)
    IMAGENET1K_SWAG_E2E_V1 = (384, 97.65, 331.398)
    IMAGENET1K_SWAG_LINEAR_V1 = (224, 96.18, 330.285)
    DEFAULT = IMAGENET1K_V1


class ViT_B_32_Weights(WeightsEnum):
    """Weights of `vit_b_32`."""

    IMAGENET1K_V1 = (256, 92.466, 336.604)
    DEFAULT = IMAGENET1K_V1


class ViT_L_16_Weights(WeightsEnum):
    """Weights of `vit_l_16`."""

    IMAGENET1K_V1 = (242, 94.638, 1161.023)
    IMAGENET1K_SWAG_E2E_V1 = (512, 98.512, 1164.258)
    IMAGENET1K_SWAG_LINEAR_V1 = (224, 97.422, 1161.023)
    DEFAULT = IMAGENET1K_V1


class ViT_L_32_Weights(WeightsEnum):
    """Weights of `vit_l_32`."""

    IMAGENET1K_V1 = (256, 93.07, 1169.449)
    DEFAULT = IMAGENET1K_V1


class ViT_H_14_Weights(WeightsEnum):
    """Weights of `vit_h_14`."""

    IMAGENET1K_SWAG_E2E_V1 = (518, 98.694, 2416.643)
    IMAGENET1K_SWAG_LINEAR_V1 = (224, 97.73, 2411.209)
    DEFAULT = IMAGENET1K_SWAG_E2E_V1


class EncoderView(nn.Module):
    """The parts of a model that torchvision's `model.encoder` has, made anew at each access."""

    def __init__(self, model: "VisionTransformer") -> None:
        super().__init__()
        self.prefix_pos_embed, self.pos_embed = model.embed.prefix_pos_embed, model.embed.pos_embed
        self.dropout, self.layers, self.ln = model.embed.dropout, model.blocks, model.norm
        self.forward_blocks: Callable[[Tensor], Tensor] = model.forward_blocks

    @property
    def pos_embedding(self) -> Tensor:  # (1, N, D)
        return torch.cat([self.prefix_pos_embed, self.pos_embed.flatten(0, 1)])[None]

    def forward(self, tokens: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        return self.forward_blocks(self.dropout(tokens + self.pos_embedding))

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise ConfigError("model.encoder is not called by the model", hint="hook model.encoder.ln, its last layer")

    register_forward_pre_hook = register_full_backward_hook = register_forward_hook


class VisionTransformer(ViT):
    """A ViT with the attributes of torchvision's. Images have exactly the model's size.

    `model.heads.head` or `model.heads` can be replaced, as programs do to train other classes.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        names = ("pre_logits", "head") if config.representation_size else ("head",)
        layers = {name: self._modules.pop(name) for name in ("pre_logits", "head")}
        self.heads: nn.Module = nn.Sequential(OrderedDict((name, cast(nn.Module, layers[name])) for name in names))
        for index, block in enumerate(self.blocks):  # other names of modules, which are registered once
            vars(self.blocks)[f"encoder_layer_{index}"] = block
            vars(block).update(ln_1=block.norm1, ln_2=block.norm2)
        self.register_state_dict_post_hook(_to_our_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_any_names)  # type: ignore[no-untyped-call]

    @property
    def has_own_heads(self) -> bool:
        """Whether a caller has replaced `heads` by other layers than `pre_logits` and `head`."""
        return not {"head"} <= {name for name, _ in self.heads.named_children()} <= {"pre_logits", "head"}

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        return self.heads if self.has_own_heads else cast(nn.Module, self.heads.head)

    @property
    def pre_logits(self) -> nn.Module:  # type: ignore[override]
        return nn.Identity() if self.has_own_heads else getattr(self.heads, "pre_logits", nn.Identity())

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        return super().forward_head(tokens, True) if pre_logits else self.heads(self.pool(tokens))

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a part by torchvision's name, as in `model.conv_proj = nn.Conv2d(1, 768, 16, 16)`."""
        if name == "encoder":
            raise ConfigError("model.encoder cannot be replaced", hint="replace layers of model.encoder.layers")
        if name == "conv_proj":
            side = (self.config.patch_size,) * 2
            if not isinstance(value, nn.Conv2d) or (value.kernel_size, value.stride) != (side, side):
                raise ConfigError(f"conv_proj must be a Conv2d with kernel and stride {side}")
            self.config, self.embed.patch = self.config.replace(in_channels=value.in_channels), value
        elif name == "class_token":
            self.embed.cls_token = value
        elif name == "head" and "heads" in self._modules:
            self.heads.head = value
        else:
            super().__setattr__(name, value)

    def check(self, pixels: Tensor) -> None:
        super().check(pixels)
        if tuple(pixels.shape[-2:]) != self.config.image_size:
            expected, actual = ("x".join(map(str, size)) for size in (self.config.image_size, pixels.shape[-2:]))
            raise ArchitectureError(f"the images have {actual} pixels, the model takes {expected}")

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        raise ConfigError("torchvision's models have no reset_classifier", hint="set model.heads.head")

    def _process_input(self, pixels: Tensor) -> Tensor:  # (B, C, rows, columns) -> (B, N, D), patches only
        self.check(pixels)
        return self.embed.patches(pixels)

    @property
    def encoder(self) -> EncoderView:
        return EncoderView(self)

    @property
    def conv_proj(self) -> nn.Conv2d:
        return self.embed.patch

    @property
    def class_token(self) -> nn.Parameter:
        return self.embed.cls_token

    @property
    def seq_length(self) -> int:
        return 1 + self.config.grid[0] * self.config.grid[1]

    def __getattr__(self, name: str) -> Any:
        """torchvision's attributes that are settings here: `hidden_dim`, `image_size` and the like."""
        if name not in ARGUMENTS:
            return super().__getattr__(name)
        value = getattr(self.config, ARGUMENTS[name])
        return value[0] if name == "image_size" else value if name != "representation_size" else value or None


def _to_our_names(module: nn.Module, state: dict[str, Tensor], prefix: str, _: object) -> None:
    """Rename `heads.head.weight` of a state dict to `head.weight`, unless the caller has replaced the heads."""
    assert isinstance(module, VisionTransformer)
    for name in [] if module.has_own_heads else [name for name in state if name.startswith(f"{prefix}heads.")]:
        state[prefix + name.removeprefix(f"{prefix}heads.")] = state.pop(name)


def _from_any_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Rename the tensors of a state dict from torchvision's names, or ours, to those of the module."""
    assert isinstance(module, VisionTransformer)
    inner = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    if Torchvision.table.anchor in inner:
        native, others = Torchvision.table.read(inner := Torchvision().to_table_names(inner))
        inner = split_positions(native, module.config) | {name: inner[name] for name in others}
    state |= {prefix + re.sub(r"^(?=(head|pre_logits)\.)", "heads.", name): tensor for name, tensor in inner.items()}


def _build(
    name: str, function: str, weights: WeightsEnum | None, progress: bool, overrides: dict[str, Any]
) -> VisionTransformer:
    """The model of a builder, in training mode, randomly initialized from torch's generator or with weights."""
    config = resolve(name).replace(numerics=NUMERICS["torchvision"])
    assert isinstance(config, ViTConfig)
    norm, stem = overrides.pop("norm_layer", None), overrides.pop("conv_stem_configs", None)
    if unknown := next((key for key in overrides if key not in ARGUMENTS), None):
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}")
    if stem is not None:
        raise ConfigError("conv_stem_configs is not supported", hint="use create_model(name, stem=StemConfig(...))")
    if norm is not None:
        if getattr(norm, "func", norm) is not nn.LayerNorm:
            raise ConfigError("norm_layer must be LayerNorm, such as partial(nn.LayerNorm, eps=1e-6)")
        numerics = config.numerics.replace(norm_eps=getattr(norm, "keywords", {}).get("eps", 1e-5))
        config = config.replace(numerics=numerics)
    if weights is not None:
        size = weights.meta["min_size"][0]
        fixed = {key: getattr(config, ours) for key, ours in ARGUMENTS.items() if "dropout" not in key}
        for key, value in (fixed | {"image_size": size, "representation_size": None}).items():
            if overrides.pop(key, value) != value:
                raise ConfigError(f"the weights need {key}={value}", hint="without weights it can be chosen")
        config = config.replace(image_size=size)
    try:
        config = config.replace(**{ARGUMENTS[key]: value or 0 for key, value in overrides.items()})
    except ConfigError as error:
        raise error.replace(ArchitectureError) from None
    if not config.num_classes:
        raise ArchitectureError("num_classes=0 is less than 1", hint="for features, set model.heads = nn.Identity()")
    with torch.device("meta"):
        model = VisionTransformer(config)
    if weights is None:
        model = model.to_empty(device="cpu")
        initialize(model, torch.Generator().manual_seed(int(torch.randint(2**62, ()))))
        return model
    with nullcontext() if progress else hide_progress():
        source = load(weights.published_name)
    model.load_state_dict(source.state_dict(), assign=True)
    model.meta = source.meta.replace(preprocess=weights.transforms().preprocess)
    return model


def _call(
    name: str, enum: type[WeightsEnum], args: tuple[Any, ...], weights: Any, progress: Any, overrides: dict[str, Any]
) -> VisionTransformer:
    """Build a variant; also accepts the calls that torchvision accepts with a warning.

    These have arguments by position, or `pretrained` in place of `weights`.
    """
    function = enum.__name__.removesuffix("_Weights").lower()
    if len(args) > 2 or (args and weights is not None):
        raise TypeError(f"{function}() takes 0 positional arguments but {len(args)} were given")
    if args:
        warnings.warn("pass weights and progress by keyword", stacklevel=3)
        weights, progress = (*args, progress)[:2]
    if "pretrained" in overrides or not isinstance(weights, WeightsEnum | str | None):
        is_pretrained = overrides.pop("pretrained", False) or weights
        weights = enum.__members__.get("IMAGENET1K_V1") if is_pretrained else None
        if is_pretrained and weights is None:
            raise ValueError(f"{function} has no weights for pretrained=True; pass weights")
        warnings.warn(f"pretrained is deprecated; pass weights={weights}", stacklevel=3)
    return _build(name, function, enum.verify(weights), progress, overrides)


Choice = WeightsEnum | str | None


def vit_b_16(*args: Any, weights: Choice = None, progress: bool = True, **overrides: Any) -> VisionTransformer:
    """ViT-B/16, as `torchvision.models.vit_b_16` builds it.

    Args:
        args: `weights` and `progress` by position, with a warning.
        weights: Weights to load, as a member of the enum or its name; None for random ones.
        progress: Show a progress bar while downloading.
        overrides: Arguments of torchvision's VisionTransformer: `image_size`, `num_classes`, `dropout`,
            `attention_dropout`, `representation_size` and, without weights, also `patch_size`, `num_layers`,
            `num_heads`, `hidden_dim` and `mlp_dim`.

    Raises:
        KeyError: No weights have this name.
        TypeError: The weights are those of another model, or an argument is unknown.
        ValueError: An argument contradicts the weights, or another.
    """
    return _call("ViT-B/16", ViT_B_16_Weights, args, weights, progress, overrides)


def vit_b_32(*args: Any, weights: Choice = None, progress: bool = True, **overrides: Any) -> VisionTransformer:
    """ViT-B/32; the arguments are those of `vit_b_16`."""
    return _call("ViT-B/32", ViT_B_32_Weights, args, weights, progress, overrides)


def vit_l_16(*args: Any, weights: Choice = None, progress: bool = True, **overrides: Any) -> VisionTransformer:
    """ViT-L/16; the arguments are those of `vit_b_16`."""
    return _call("ViT-L/16", ViT_L_16_Weights, args, weights, progress, overrides)


def vit_l_32(*args: Any, weights: Choice = None, progress: bool = True, **overrides: Any) -> VisionTransformer:
    """ViT-L/32; the arguments are those of `vit_b_16`."""
    return _call("ViT-L/32", ViT_L_32_Weights, args, weights, progress, overrides)


def vit_h_14(*args: Any, weights: Choice = None, progress: bool = True, **overrides: Any) -> VisionTransformer:
    """ViT-H/14; the arguments are those of `vit_b_16`."""
    return _call("ViT-H/14", ViT_H_14_Weights, args, weights, progress, overrides)
