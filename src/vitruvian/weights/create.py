"""Models by the name of their architecture, with the arguments of `timm.create_model`, and the list of these names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal, overload

from torch import Tensor, nn

from vitruvian.catalog import PUBLISHED, VARIANTS, find_published, published_names, resolve
from vitruvian.config import NUMERICS, TIMM_POOLS, ModelConfig, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError, short_repr
from vitruvian.model.build import Model, build, empty
from vitruvian.model.lora import plain_state
from vitruvian.model.vit import ViT, take_indices
from vitruvian.progress import print_status
from vitruvian.settings import check_choice
from vitruvian.weights.families.timm_config import NAMES, Architecture, find_architecture, rows
from vitruvian.weights.load import assemble, load

TIMM_ARGUMENTS, UNSUPPORTED = NAMES["create"], NAMES["unsupported"]
WHILE_LOADING = ("image_size", "num_classes", "patch_size")  # settings that `load` changes


@overload
def create_model(
    name: str, pretrained: bool = ..., *, seed: int = ..., features_only: Literal[False] = ..., **changes: Any
) -> Model: ...


@overload
def create_model(
    name: str,
    pretrained: bool = ...,
    *,
    seed: int = ...,
    features_only: Literal[True],
    out_indices: int | Sequence[int] | None = ...,
    **changes: Any,
) -> "FeatureModel": ...


def create_model(
    name: str,
    pretrained: bool = False,
    *,
    seed: int = 0,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **changes: Any,
) -> "Model | FeatureModel":
    """A model in training mode, by the name of its architecture.

    Args:
        name: A name of `vit models`, such as "ViT-B/16", or one of timm or torchvision, such as "vit_base_patch16_224"
            or "vit_b_16", which has the numerics of that library.
        pretrained: Load the published weights of that name; `list_models(pretrained=True)` lists the names.
        seed: Seed of the random initialization.
        features_only: Return a model that returns a list of feature maps, without head and final norm.
        out_indices: Blocks whose outputs are these maps: the last n, or their indices. The last three by default.
        changes: Settings of the config that differ from the published ones, such as `num_classes` or `image_size`, or
            timm's arguments `in_chans`, `img_size`, `drop_path_rate`, `attn_drop_rate` and `global_pool`.

    Returns:
        An initialized model. A new head is zero, so all logits are 0.

    Raises:
        UnknownNameError: The architecture or a setting does not exist.
        ConfigError: A setting is invalid, does not fit the weights, or contradicts another.
    """
    config = architecture(name)
    settings = translate(config, name, changes)
    if pretrained:
        tagged = (row for row in PUBLISHED.values() if row.name.startswith(f"{name}."))
        source = find_published(name) or next(tagged, None)
        sizes = {key: settings.pop(key) for key in WHILE_LOADING if key in settings}
        model = adapt(load(source.name if source else name, **sizes), settings).train()
    else:
        model = build(config.replace(**settings), seed=seed)
    if features_only:
        return FeatureModel(model, 3 if out_indices is None else out_indices)
    if out_indices is not None:
        raise ConfigError("out_indices= needs features_only=True")
    return model


def timm_architecture(name: str) -> Architecture | None:
    return find_architecture(name.removeprefix("timm/").partition(".")[0])


def architecture(name: str) -> ModelConfig:
    """The config of an architecture by any name, with the numerics of the library that uses the name."""
    if (known := timm_architecture(name)) is not None:
        return known.config
    config = resolve(name)
    is_torchvision = re.fullmatch(r"vit_[blh]_\d\d", name)
    return config.replace(numerics=NUMERICS["torchvision"]) if is_torchvision else config


def translate(config: ModelConfig, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Our settings for arguments with our names or timm's. None means that an argument is not given, as in timm."""
    names, known, settings = [field.name for field in fields(config)], timm_architecture(name), dict[str, Any]()
    arguments = {key: value for key, value in changes.items() if value is not None}
    for key, value in arguments.items():
        ours = TIMM_ARGUMENTS.get(key, key)
        if key in UNSUPPORTED:
            if value:
                raise ConfigError(f"{key}={short_repr(value)} is not supported: {UNSUPPORTED[key]}")
            continue
        if ours not in names:
            raise UnknownNameError(f"setting of {name}", key, [*names, *TIMM_ARGUMENTS])
        if ours != key and arguments.get(ours, value) != value:
            reason = f"{key}={short_repr(value)} contradicts {ours}={short_repr(arguments[ours])}"
            raise ConfigError(reason, hint="give one")
        if key == "global_pool" and isinstance(config, ViTConfig):
            check_choice(key, value, TIMM_POOLS)
            value = TIMM_POOLS[value]
            if value != config.pool:  # the norm follows the mean, unless the architecture fixes its place
                fixed = known and known.fc_norm
                settings["norm_after_pool"] = value == "mean" if fixed is None else fixed
        settings[ours] = value
    return settings


def adapt(model: Model, settings: Mapping[str, Any]) -> Model:
    """A loaded model with other settings, which must not change the shape of a parameter, and other channels."""
    config, state, meta = model.config.replace(**settings), plain_state(model), model.meta
    if config.in_channels != model.config.in_channels:
        first = next(key for key, tensor in state.items() if tensor.dim() == 4)
        state[first] = adapt_channels(state[first], config.in_channels)
        how = "added to one" if config.in_channels == 1 else f"repeated for {config.in_channels} channels"
        print_status(f"note: the weights of the {model.config.in_channels} input channels are {how}, of the same sum")
        # the preprocessing of gray images has the mean over the colors; otherwise its values are repeated
        channels, before = config.in_channels, (meta.preprocess.mean, meta.preprocess.std)
        mean, std = ((sum(old) / len(old),) if channels == 1 else (old * channels)[:channels] for old in before)
        meta = meta.replace(preprocess=meta.preprocess.replace(mean=mean, std=std), cascade=None)
    if config == model.config:
        return model
    changed = empty(config)
    states = state, changed.state_dict()
    shapes, wanted = ({key: tensor.shape for key, tensor in tensors.items()} for tensors in states)
    if misfits := [key for key in wanted | shapes if shapes.get(key) != wanted.get(key)]:
        names = ", ".join(f"{key}=" for key in settings)
        raise ConfigError(f"{names} cannot be changed with pretrained=True: the weights do not fit {misfits[0]!r}")
    return assemble(changed, state, meta)


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """The first convolution (D, C, P, P) for another number of channels, as timm adapts it.

    For gray images the kernels of the colors are added; otherwise they are repeated, with the same sum.
    """
    if channels == 1:
        return kernel.float().sum(dim=1, keepdim=True).to(kernel.dtype)
    count = kernel.shape[1]
    repeated = kernel.repeat(1, -(-channels // count), 1, 1)[:, :channels].float() * (count / channels)
    return repeated.to(kernel.dtype)


@dataclass(frozen=True, slots=True)
class FeatureInfo:
    """Where the feature maps of a model come from, with timm's methods."""

    out_indices: tuple[int, ...]
    width: int
    stride: int

    def channels(self) -> list[int]:
        return [self.width for _ in self.out_indices]

    def reduction(self) -> list[int]:
        return [self.stride for _ in self.out_indices]

    def module_name(self) -> list[str]:
        return [f"blocks.{index}" for index in self.out_indices]


class FeatureModel(nn.Module):
    """Normalized pixels -> a list of feature maps (B, D, rows, columns), from the outputs of blocks.

    Blocks after the last chosen one, the final norm and the head are removed, so that every parameter has a gradient.

    Args:
        model: A Vision Transformer, whose parts are shared.
        out_indices: The last n blocks, or the indices of blocks.
    """

    def __init__(self, model: Model, out_indices: int | Sequence[int] = 3) -> None:
        super().__init__()
        if not isinstance(model, ViT):
            hint = "vitruvian.features(model, images, layers=[0, 1, 2, 3]) returns the maps of a ResNet's stages"
            raise ConfigError("features_only=True is for Vision Transformers", hint=hint)
        indices = tuple(sorted(set(take_indices(len(model.blocks), out_indices))))
        if not indices:
            raise ConfigError("out_indices= is empty", hint="give at least one block")
        self.feature_info = FeatureInfo(indices, model.config.width, model.config.stride)
        self.model = model
        model.blocks, model.norm = model.blocks[: indices[-1] + 1], nn.Identity()
        model.head = model.head_dist = model.attn_pool = None
        model.pre_logits = nn.Identity()

    def forward(self, pixels: Tensor) -> list[Tensor]:
        options: Any = {"intermediates_only": True, "stop_early": True}
        maps: list[Tensor] = self.model.forward_intermediates(pixels, self.feature_info.out_indices, **options)
        return maps

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """See `ViT.set_grad_checkpointing`."""
        self.model.set_grad_checkpointing(enable)


def list_models(
    filter: str | Iterable[str] = "", *, pretrained: bool = False, exclude_filters: str | Iterable[str] = ()
) -> list[str]:
    """The names that `create_model` takes, in alphabetical order.

    Args:
        filter: Patterns such as "*patch16*"; case does not matter. Empty for all names.
        pretrained: List the names of published weights instead, which `load` takes too.
        exclude_filters: Patterns of names to leave out.
    """
    include, exclude = (
        [names] if isinstance(names, str) else list(names) for names in (filter or "*", exclude_filters)
    )
    names = published_names() if pretrained else [*VARIANTS, *rows()]

    def matches(name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)

    return sorted(name for name in set(names) if matches(name, include) and not matches(name, exclude))
