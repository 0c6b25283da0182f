"""DINOv3 as Hugging Face transformers keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, ModelConfig, Numerics, Preprocess, RopeConfig, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.family import Facts, kind_obstacles
from vitruvian.weights.families.huggingface import HuggingFace, add_absent_biases
from vitruvian.weights.families.huggingface_json import flag, number
from vitruvian.weights.families.rules import STACKED, Row, Table, Tensors, pair, rename
from vitruvian.weights.files import Checkpoint


class HuggingFaceDinoV3(HuggingFace):
    """model_type `dinov3_vit`: rotary positions in shares of the image, registers, LayerScale."""

    name = "huggingface"
    model_types = ("dinov3_vit",)
    norm_eps = 1e-5
    default_heads = 6
    anchor = "embeddings.patch_embeddings.weight"
    prefixes = ("", "model.", "dinov3_vit.")
    ignored: ClassVar[dict[str, str]] = {"embeddings.mask_token": "token of masked training"}
    table = Table(
        rows=(
            *pair("embed.patch", "embeddings.patch_embeddings"),
            Row("embed.cls_token", ("embeddings.cls_token",)),
            Row("embed.reg_tokens", ("embeddings.register_tokens",)),
            *pair("blocks.{i}.norm1", "layer.{i}.norm1"),
            *pair(
                "blocks.{i}.attn.qkv",
                *(f"layer.{{i}}.attention.attention.{part}" for part in ("query", "key", "value")),
                kind=STACKED,
            ),
            *pair("blocks.{i}.attn.proj", "layer.{i}.attention.output.dense"),
            Row("blocks.{i}.ls1", ("layer.{i}.layer_scale1.lambda1",)),
            *pair("blocks.{i}.norm2", "layer.{i}.norm2"),
            *pair("blocks.{i}.mlp.fc1", "layer.{i}.mlp.up_proj"),
            *pair("blocks.{i}.mlp.fc2", "layer.{i}.mlp.down_proj"),
            Row("blocks.{i}.ls2", ("layer.{i}.layer_scale2.lambda1",)),
            *pair("norm", "norm"),
        ),
        block=r"layer\.(\d+)\.",
    )

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Not every dense layer has a bias; gate and value are one layer; no registers are no array."""
        found = dict(tensors)
        registers = found.get("embeddings.register_tokens")
        if registers is not None and registers.numel() == 0:
            del found["embeddings.register_tokens"]
        self.check_biases(found, self.config_of(checkpoint))
        for layer in sorted({name.split(".")[1] for name in found if name.startswith("layer.")}):
            attention, mlp = f"layer.{layer}.attention", f"layer.{layer}.mlp"
            add_absent_biases(found, (f"{attention}.attention.{part}" for part in ("query", "key", "value")))
            dense = (f"{attention}.output.dense", *(f"{mlp}.{part}_proj" for part in ("gate", "up", "down")))
            add_absent_biases(found, dense)
            for kind in ("weight", "bias"):
                gate, value = found.pop(f"{mlp}.gate_proj.{kind}", None), found.get(f"{mlp}.up_proj.{kind}")
                if gate is not None and value is not None and gate.shape == value.shape:
                    found[f"{mlp}.up_proj.{kind}"] = torch.cat([gate, value])
        return found

    def check_biases(self, tensors: Tensors, settings: dict[str, Any]) -> None:
        """Each dense layer says by itself whether it has a bias."""
        layers = {part: f"attention.attention.{part}" for part in ("query", "key", "value")}
        for part, layer in (layers | {"proj": "attention.output.dense", "mlp": "mlp.down_proj"}).items():
            stated, found = flag(settings, f"{part}_bias"), f"layer.0.{layer}.bias" in tensors
            if stated not in (None, found):
                raise CheckpointError(f"the settings say {part}_bias={stated}, the arrays have {found}")

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings = self.config_of(checkpoint)
        if not settings:
            raise CheckpointError("DINOv3 weights without config.json, which states heads and rotary positions")
        theta = settings.get("rope_theta", 100.0)
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise CheckpointError(f"config.json: rope_theta={theta!r} is not a number")
        rope = RopeConfig(kind="normalized", temperature=float(theta), half=True)
        return replace(super().facts(checkpoint, tensors), settings={"rope": rope, "pos_embed": "none"})

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        gated = flag(settings, "use_gated_mlp")
        biases = [flag(settings, f"{part}_bias") for part in ("query", "key", "value")]
        dense = [flag(settings, f"{part}_bias") for part in ("proj", "mlp")]
        return super().stated(settings) | {
            "reg_tokens": number(settings, "num_register_tokens", least=0),
            "mlp": None if gated is None else "swiglu" if gated else "gelu",
            "qkv_bias": None if None in biases else any(biases),
            "dense_bias": None if None in dense else any(dense),
            "layer_scale": True,
        }

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        if not settings.get("use_gated_mlp"):
            return super().numerics_of(settings)
        if settings.get("hidden_act", "gelu") not in ("silu", "swish"):
            raise CheckpointError(f"config.json: a gated MLP of {settings.get('hidden_act')!r}, only silu is known")
        return super().numerics_of(settings | {"hidden_act": "gelu"})

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, mean=IMAGENET_MEAN, std=IMAGENET_STD)

    def architecture(self, config: ViTConfig) -> str:
        return "DINOv3ViTModel"

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        rope = config.rope if isinstance(config, ViTConfig) else None
        own = RopeConfig(kind="normalized", temperature=rope.temperature if rope else 100.0, half=True)
        free = ("reg_tokens", "mlp", "qkv_bias", "cls_pos_embed")
        shape = {"rope": own, "pos_embed": "none", "layer_scale": True, "num_classes": 0}
        yield from kind_obstacles(config, "DINOv3 of transformers", free=free, **shape)

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Gate and value apart; the token of masked training and registers are always there."""
        assert isinstance(config, ViTConfig)
        found = dict(tensors)
        if config.mlp == "swiglu":
            for name in [name for name in found if ".mlp.up_proj." in name]:
                found[name.replace("up_proj", "gate_proj")], found[name] = found[name].chunk(2)
        token = found["embeddings.cls_token"]
        found.setdefault("embeddings.register_tokens", token.new_zeros(1, 0, config.width))
        parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        rules = [(rf"\.attention\.attention\.{old}\.", f".attention.{new}.") for old, new in parts.items()]
        rules.append((r"\.attention\.output\.dense\.", ".attention.o_proj."))
        return rename(found, rules) | {"embeddings.mask_token": torch.zeros_like(token)}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        assert config.rope is not None
        settings = super().config_json(config, labels) | {"intermediate_size": config.mlp_dim}
        biases = {f"{part}_bias": config.qkv_bias for part in ("query", "key", "value")}
        gated = {"use_gated_mlp": True, "hidden_act": "silu"} if config.mlp == "swiglu" else {}
        own = {"num_register_tokens": config.reg_tokens, "rope_theta": config.rope.temperature}
        return settings | biases | gated | own
