"""timm's architectures by name: models written as a folder that `timm.create_model("local-dir:...")` loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vitruvian.config import ModelConfig, Preprocess, ResNetConfig, ViTConfig
from vitruvian.errors import ConversionError
from vitruvian.weights.families.bit import TimmBit
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import Tensors, rename
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.timm_arguments import POOLS
from vitruvian.weights.families.timm_choice import Choice, choose
from vitruvian.weights.families.timm_shapes import WITH_TEACHER
from vitruvian.weights.families.timm_split import in_pieces, shared_heads
from vitruvian.weights.families.timm_view import published_view, stated_view


class TimmArchitecture(Timm):
    """One of timm's architectures with the arguments that make it the model; all that it states, `config.json` has."""

    def __init__(self, config: ViTConfig, state: Tensors, known_as: str = "") -> None:
        # added to every key alike, it changes no softmax, unless keys are turned or normalized after it
        acts = config.rope is not None or config.qk_norm
        self.seen = with_projection_as_head(config)
        found = choose(self.seen, known_as, key_bias=acts and has_key_bias(state))
        self.reasons = found if isinstance(found, list) else []
        self.choice: Choice | None = None if isinstance(found, list) else found
        self.kv_heads: list[int] = []
        if self.choice and "key_bias" in self.choice.shape.pieces:  # some of its blocks share keys and values
            self.kv_heads = [config.num_heads // n for n in shared_in_blocks(state, config)]

    @property
    def chosen(self) -> Choice:
        if self.choice is None:
            raise ConversionError("; ".join(self.reasons))
        return self.choice

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from self.reasons

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        if self.chosen.shape.maker == "NaFlexVit" and config.pos_embed == "factorized":
            return dict(state)
        joined = super().write_positions(state, config)
        if self.chosen.shape.config.pos_embed in ("none", "relative_bias"):
            del joined[FLAT]
        return joined

    def prefix_rows(self, config: ViTConfig) -> int:
        shape, arguments = self.chosen.shape, self.chosen.arguments
        own = shape.config.cls_pos_embed if shape.config.cls_token else "register_rows" in shape.pieces
        placed = shape.maker == WITH_TEACHER or not arguments.get("no_embed_class", not own)
        return config.prefix_tokens if placed and shape.maker != "NaFlexVit" else 0

    def rename_parameters(self, native: Tensors, config: ModelConfig) -> Tensors:
        if self.seen.num_classes == config.num_classes:
            return native
        head = rename(native, [(r"^pre_logits\.", "head.")])
        return head | {"head.bias": torch.zeros(self.seen.num_classes)}

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        named = super().from_table_names(tensors, config)
        return in_pieces(named, config, self.chosen.shape.pieces, maker=self.chosen.shape.maker)

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        own = super().family_numerics(config)
        return own.replace(numerics=self.chosen.numerics) if isinstance(own, ViTConfig) else own

    def writes_out(self, config: ViTConfig) -> bool:
        own = self.chosen.shape.maker == "NaFlexVit" and config.pos_embed == "factorized"
        return super().writes_out(config) and not own

    def assumed_view(self, config: ModelConfig, view: Preprocess) -> Preprocess:
        found = published_view(stated_view(view, config), view.image_size)
        return found.replace(floor_crop=view.floor_crop, scaled_size=found.scaled_size or view.scaled_size)

    def stated_files(self, config: ModelConfig, labels: tuple[str, ...] | None, view: Preprocess) -> dict[str, Any]:
        assert isinstance(config, ViTConfig)
        shape, arguments = self.chosen.shape, dict(self.chosen.arguments)
        if self.kv_heads:
            arguments["num_kv_heads"] = self.kv_heads
        classifier = ["head", "head_dist"] if shape.maker == WITH_TEACHER else "head"
        plain = config.stem is None and shape.maker != "NaFlexVit" and config.in_channels == 3
        extra = {"fixed_input_size": shape.maker != "NaFlexVit"} | ({"first_conv": "patch_embed.proj"} if plain else {})
        settings = hub_settings(shape.name, self.seen, labels=labels, view=view, classifier=classifier)
        settings["global_pool"] = POOLS[config.pool]
        settings["pretrained_cfg"] |= extra
        if arguments:
            settings["model_args"] = arguments
        return {"config.json": settings}


class TimmBitFolder(TimmBit):
    """A BiT ResNet as a folder."""

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from super().obstacles(config)
        if isinstance(config, ResNetConfig) and architecture_of(config) is None:
            yield f"timm has no resnetv2_*_bit with stages={config.stages} and width={config.width}"

    def stated_files(self, config: ModelConfig, labels: tuple[str, ...] | None, view: Preprocess) -> dict[str, Any]:
        assert isinstance(config, ResNetConfig)
        name = architecture_of(config)
        assert name is not None
        settings = hub_settings(name, config, labels=labels, view=view, classifier="head.fc")
        return {"config.json": settings}


RESNETS: dict[tuple[int, ...], int] = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
PUBLISHED_RESNETS = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")


def architecture_of(config: ResNetConfig) -> str | None:
    """timm's name of a BiT ResNet."""
    size = f"{RESNETS.get(config.stages)}x{config.width / 64:g}"
    return f"resnetv2_{size}_bit" if size in PUBLISHED_RESNETS else None


def hub_settings(
    name: str, config: ModelConfig, *, labels: tuple[str, ...] | None, view: Preprocess, classifier: str | list[str]
) -> dict[str, Any]:
    """`config.json` as timm saves it for its hub."""
    settings: dict[str, Any] = {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.feature_width,
        "pretrained_cfg": {"custom_load": False, "num_classes": config.num_classes, "classifier": classifier}
        | stated_view(view, config),
    }
    return settings | ({"label_names": list(labels)} if labels else {})


def with_projection_as_head(config: ViTConfig) -> ViTConfig:
    """CLIP's projection is what timm has as its head, with a bias of zeros."""
    if not config.projection or config.num_classes or config.unit_features:
        return config
    return config.replace(num_classes=config.representation_size, representation_size=0, projection=False)


def has_key_bias(state: Tensors) -> bool:
    biases = (tensor for name, tensor in state.items() if name.endswith(".attn.qkv.bias"))
    return any(bool(bias.chunk(3)[1].any()) for bias in biases)


def shared_in_blocks(state: Tensors, config: ViTConfig) -> list[int]:
    """How many heads of each block have the same keys and values."""
    return [shared_heads(state, f"blocks.{layer}", config.num_heads) for layer in range(config.depth)]
