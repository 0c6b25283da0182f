"""DINOv2 and DINOv3 in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, ModelConfig, Numerics, Preprocess, RopeConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, imagenet_preprocess, model_type_obstacles
from vitruvian.weights.families.huggingface import (
    EMBEDDING_ROWS,
    LAYER,
    MASK_TOKEN,
    MEMORY_NAMES,
    QKV,
    HuggingFace,
    add_missing_biases,
    attention_rows,
    read_bool,
    read_int,
)
from vitruvian.weights.families.tables import Row, Table, Tensors, pairs, rename

REGISTERS = "embeddings.register_tokens"
REGISTER_ROW = Row("embed.reg_tokens", (REGISTERS,))


def scale_rows(layer: str) -> tuple[Row, ...]:
    return tuple(Row(f"blocks.{{i}}.ls{n}", (f"{layer}.layer_scale{n}.lambda1",)) for n in (1, 2))


def mlp_kind(settings: dict[str, Any], key: str) -> str | None:
    is_gated = read_bool(settings, key)
    return None if is_gated is None else "swiglu" if is_gated else "gelu"


class HuggingFaceDinoV2(HuggingFace):
    """model_type `dinov2` and `dinov2_with_registers`; the classifier reads class token and mean concatenated."""

    name = "huggingface"
    model_types = ("dinov2", "dinov2_with_registers")
    norm_eps = 1e-6
    prefixes = ("dinov2.", "dinov2_with_registers.", "")
    renames = (*MEMORY_NAMES, (r"\.mlp\.weights_in\.", ".mlp.fc1."), (r"\.mlp\.weights_out\.", ".mlp.fc2."))
    ignored: ClassVar[dict[str, str]] = MASK_TOKEN
    table = Table(
        rows=(
            *EMBEDDING_ROWS,
            REGISTER_ROW,
            *attention_rows(LAYER),
            *scale_rows(LAYER),
            *pairs({name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}, "blocks.{i}.", f"{LAYER}."),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Drop the empty array that models without registers store."""
        return {name: tensor for name, tensor in tensors.items() if name != REGISTERS or tensor.numel()}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """transformers resamples positions with antialiasing only in models with registers."""
        facts = super().facts(checkpoint, tensors)
        rows, columns = facts.image_size or (1, 1)
        if rows != columns:
            raise CheckpointError(
                f"config.json: image_size={rows}x{columns} is not square, but DINOv2 in transformers reads positions "
                "as those of a square"
            )
        stated = self.config_of(checkpoint).get("model_type")
        has_registers = REGISTERS in tensors if stated is None else stated == self.model_types[1]
        resize = "bicubic_antialias" if has_registers else facts.numerics.position_resize
        return replace(facts, numerics=facts.numerics.replace(position_resize=resize))

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The MLP's width is stated as a ratio of the model's."""
        stated, ratio = super().shape_settings(settings), settings.get("mlp_ratio")
        mlp = mlp_kind(settings, "use_swiglu_ffn")
        is_stated = isinstance(ratio, int | float) and stated["width"] is not None and mlp is not None
        has_registers = settings.get("model_type") == "dinov2_with_registers"
        return stated | {
            "mlp": mlp,
            "mlp_dim": hidden_width(int(stated["width"] * ratio), gated=mlp == "swiglu") if is_stated else None,
            "reg_tokens": read_int(settings, "num_register_tokens", minimum=0) if has_registers else None,
        }

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return imagenet_preprocess((224, 224))

    def model_type(self, config: ViTConfig) -> str:
        return self.model_types[bool(config.reg_tokens)]

    def architecture(self, config: ViTConfig) -> str:
        name = "Dinov2WithRegisters" if config.reg_tokens else "Dinov2"
        return name + ("ForImageClassification" if config.num_classes else "Model")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from super().obstacles(config)
        if not isinstance(config, ViTConfig):
            return
        if not config.layer_scale:
            yield "huggingface has gated MLPs and a head on class token and mean only with LayerScale (DINOv2)"
        if config.num_classes and config.pool == "token":
            yield "huggingface's model with LayerScale (DINOv2) reads class token and mean concatenated"
        if not config.cls_token:
            yield "huggingface's DINOv2 always has a class token"
        if config.grid[0] != config.grid[1]:
            yield "huggingface's DINOv2 has positions of a square grid only"
        if config.distillation:
            yield "huggingface has no LayerScale beside a distillation token"
        if mlp_ratio(config) is None:
            yield f"huggingface's DINOv2 has no MLP of {config.mlp_dim} at a width of {config.width}"

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        mask = tensors["embeddings.cls_token"].new_zeros(1, config.width)
        renamed = super().from_table_names(tensors | {"embeddings.mask_token": mask}, config)
        gated = [(r"\.fc1\.", ".weights_in."), (r"\.fc2\.", ".weights_out.")]
        return rename(renamed, gated) if config.mlp == "swiglu" else renamed

    def reader_config(self, config: ModelConfig) -> ModelConfig:
        config = super().reader_config(config)
        assert isinstance(config, ViTConfig)
        if config.reg_tokens:
            config = config.replace(numerics=config.numerics.replace(position_resize="bicubic_antialias"))
        return config

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        extra: dict[str, Any] = {"use_swiglu_ffn": config.mlp == "swiglu", "mlp_ratio": mlp_ratio(config)}
        if config.reg_tokens:
            extra["num_register_tokens"] = config.reg_tokens
        settings = super().config_json(config, labels) | extra
        del settings["intermediate_size"]
        return settings


def mlp_ratio(config: ViTConfig) -> int | None:
    """The integer from which transformers computes the width of DINOv2's MLP, or None."""
    for ratio in range(1, 65):
        if hidden_width(config.width * ratio, gated=config.mlp == "swiglu") == config.mlp_dim:
            return ratio
    return None


def hidden_width(hidden: int, *, gated: bool) -> int:
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


class HuggingFaceDinoV3(HuggingFace):
    """model_type `dinov3_vit`: rotary positions normalized to the image, registers, LayerScale."""

    name = "huggingface"
    model_types = ("dinov3_vit",)
    norm_eps = 1e-5
    default_heads = 6
    anchor = "embeddings.patch_embeddings.weight"
    prefixes = ("", "model.", "dinov3_vit.")
    ignored: ClassVar[dict[str, str]] = MASK_TOKEN
    table = Table(
        rows=(
            *pairs({"embed.patch": "embeddings.patch_embeddings", "norm": "norm"}),
            Row("embed.cls_token", ("embeddings.cls_token",)),
            REGISTER_ROW,
            *attention_rows("layer.{i}"),
            *scale_rows("layer.{i}"),
            *pairs(
                {"norm1": "norm1", "norm2": "norm2", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
                "blocks.{i}.",
                "layer.{i}.",
            ),
        ),
        block=r"layer\.(\d+)\.",
    )

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add missing biases, join gate and value, and drop the empty array of models without registers."""
        state = dict(tensors)
        registers = state.get(REGISTERS)
        if registers is not None and registers.numel() == 0:
            del state[REGISTERS]
        self.check_biases(state, self.config_of(checkpoint))
        for layer in sorted({name.split(".")[1] for name in state if name.startswith("layer.")}):
            attention, mlp = f"layer.{layer}.attention", f"layer.{layer}.mlp"
            add_missing_biases(state, (f"{attention}.attention.{part}" for part in QKV))
            dense = (f"{attention}.output.dense", *(f"{mlp}.{part}_proj" for part in ("gate", "up", "down")))
            add_missing_biases(state, dense)
            for kind in ("weight", "bias"):
                gate, value = state.pop(f"{mlp}.gate_proj.{kind}", None), state.get(f"{mlp}.up_proj.{kind}")
                if gate is not None and value is not None and gate.shape == value.shape:
                    state[f"{mlp}.up_proj.{kind}"] = torch.cat([gate, value])
        return state

    def check_biases(self, tensors: Tensors, settings: dict[str, Any]) -> None:
        """Raise if `config.json` states other biases than the arrays have."""
        layers = {part: f"attention.attention.{part}" for part in QKV}
        for part, layer in (layers | {"proj": "attention.output.dense", "mlp": "mlp.down_proj"}).items():
            stated, is_present = read_bool(settings, f"{part}_bias"), f"layer.0.{layer}.bias" in tensors
            if stated not in (None, is_present):
                raise CheckpointError(f"the settings say {part}_bias={stated}, the arrays have {is_present}")

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings = self.config_of(checkpoint)
        if not settings:
            raise CheckpointError("DINOv3 weights without config.json, which states heads and rotary positions")
        theta = settings.get("rope_theta", 100.0)
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise CheckpointError(f"config.json: rope_theta={theta!r} is not a number")
        rope = RopeConfig(kind="normalized", temperature=float(theta), half=True)
        return replace(super().facts(checkpoint, tensors), settings={"rope": rope, "pos_embed": "none"})

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        biases = [read_bool(settings, f"{part}_bias") for part in QKV]
        dense = [read_bool(settings, f"{part}_bias") for part in ("proj", "mlp")]
        return super().shape_settings(settings) | {
            "reg_tokens": read_int(settings, "num_register_tokens", minimum=0),
            "mlp": mlp_kind(settings, "use_gated_mlp"),
            "qkv_bias": None if None in biases else any(biases),
            "dense_bias": None if None in dense else any(dense),
            "layer_scale": True,
        }

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        if not settings.get("use_gated_mlp"):
            return super().numerics_of(settings)
        if settings.get("hidden_act", "gelu") not in ("silu", "swish"):
            raise CheckpointError(
                f"config.json: a gated MLP with {settings.get('hidden_act')!r} is not supported, only silu is"
            )
        return super().numerics_of(settings | {"hidden_act": "gelu"})

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, mean=IMAGENET_MEAN, std=IMAGENET_STD)

    def architecture(self, config: ViTConfig) -> str:
        return "DINOv3ViTModel"

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        rope = config.rope if isinstance(config, ViTConfig) else None
        rope = RopeConfig(kind="normalized", temperature=rope.temperature if rope else 100.0, half=True)
        free = ("reg_tokens", "mlp", "qkv_bias", "cls_pos_embed")
        shape = {"rope": rope, "pos_embed": "none", "layer_scale": True, "num_classes": 0}
        yield from model_type_obstacles(config, "DINOv3 of transformers", free=free, **shape)

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Split gate and value; add the mask token and registers, which are always stored."""
        assert isinstance(config, ViTConfig)
        state = dict(tensors)
        if config.mlp == "swiglu":
            for name in [name for name in state if ".mlp.up_proj." in name]:
                state[name.replace("up_proj", "gate_proj")], state[name] = state[name].chunk(2)
        token = state["embeddings.cls_token"]
        state.setdefault(REGISTERS, token.new_zeros(1, 0, config.width))
        parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        rules = [(rf"\.attention\.attention\.{old}\.", f".attention.{new}.") for old, new in parts.items()]
        rules.append((r"\.attention\.output\.dense\.", ".attention.o_proj."))
        return rename(state, rules) | {"embeddings.mask_token": torch.zeros_like(token)}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        assert config.rope is not None
        settings = super().config_json(config, labels)
        biases = {f"{part}_bias": config.qkv_bias for part in QKV}
        gated = {"use_gated_mlp": True, "hidden_act": "silu"} if config.mlp == "swiglu" else {}
        settings |= {"num_register_tokens": config.reg_tokens, "rope_theta": config.rope.temperature}
        return settings | biases | gated
