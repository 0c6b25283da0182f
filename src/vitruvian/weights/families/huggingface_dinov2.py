"""DINOv2 as Hugging Face transformers keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.dino import imagenet_view
from vitruvian.weights.families.family import Facts
from vitruvian.weights.families.huggingface import LAYER, MEMORY_NAMES, ROWS, HuggingFace
from vitruvian.weights.families.huggingface_json import flag, number
from vitruvian.weights.families.rules import Row, Table, Tensors, pair, rename
from vitruvian.weights.files import Checkpoint


class HuggingFaceDinoV2(HuggingFace):
    """model_type `dinov2` and `dinov2_with_registers`; the classifier reads class token and mean side by side."""

    name = "huggingface"
    model_types = ("dinov2", "dinov2_with_registers")
    norm_eps = 1e-6
    prefixes = ("dinov2.", "dinov2_with_registers.", "")
    renames = (*MEMORY_NAMES, (r"\.mlp\.weights_in\.", ".mlp.fc1."), (r"\.mlp\.weights_out\.", ".mlp.fc2."))
    ignored: ClassVar[dict[str, str]] = {"embeddings.mask_token": "token of masked training"}
    table = Table(
        rows=(
            *ROWS,
            Row("embed.reg_tokens", ("embeddings.register_tokens",)),
            *pair("blocks.{i}.norm1", f"{LAYER}.norm1"),
            Row("blocks.{i}.ls1", (f"{LAYER}.layer_scale1.lambda1",)),
            *pair("blocks.{i}.norm2", f"{LAYER}.norm2"),
            Row("blocks.{i}.ls2", (f"{LAYER}.layer_scale2.lambda1",)),
            *pair("blocks.{i}.mlp.fc1", f"{LAYER}.mlp.fc1"),
            *pair("blocks.{i}.mlp.fc2", f"{LAYER}.mlp.fc2"),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """No registers are no array."""
        name = "embeddings.register_tokens"
        return {key: tensor for key, tensor in tensors.items() if key != name or tensor.numel()}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        """transformers resamples positions with antialiasing in the model with registers alone."""
        facts = super().facts(checkpoint, tensors)
        rows, columns = facts.image_size or (1, 1)
        if rows != columns:
            raise CheckpointError(
                f"config.json: image_size={rows}x{columns} is not square, and DINOv2 in transformers takes its "
                "positions for those of a square"
            )
        stated = self.config_of(checkpoint).get("model_type")
        registered = "embeddings.register_tokens" in tensors if stated is None else stated == self.model_types[1]
        if not registered:
            return facts
        return replace(facts, numerics=facts.numerics.replace(position_resize="bicubic_antialias"))

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The MLP's width is stated as a ratio of the model's."""
        stated = super().stated(settings)
        gated, ratio, width = flag(settings, "use_swiglu_ffn"), settings.get("mlp_ratio"), stated["width"]
        known = isinstance(ratio, int | float) and width is not None and gated is not None
        registered = settings.get("model_type") == "dinov2_with_registers"
        return stated | {
            "mlp": None if gated is None else "swiglu" if gated else "gelu",
            "mlp_dim": hidden_width(int(width * ratio), gated=bool(gated)) if known else None,
            "reg_tokens": number(settings, "num_register_tokens", least=0) if registered else None,
        }

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return imagenet_view((224, 224))

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
            yield "huggingface's model with LayerScale (DINOv2) reads class token and mean side by side"
        if not config.cls_token:
            yield "huggingface's DINOv2 always has a class token"
        if config.grid[0] != config.grid[1]:
            yield "huggingface's DINOv2 has positions of a square grid alone"
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

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        own = super().family_numerics(config)
        assert isinstance(own, ViTConfig)
        if own.reg_tokens:
            own = own.replace(numerics=own.numerics.replace(position_resize="bicubic_antialias"))
        return own

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        extra: dict[str, Any] = {"use_swiglu_ffn": config.mlp == "swiglu", "mlp_ratio": mlp_ratio(config)}
        if config.reg_tokens:
            extra["num_register_tokens"] = config.reg_tokens
        return super().config_json(config, labels) | extra


def mlp_ratio(config: ViTConfig) -> int | None:
    """The whole number from which transformers computes the width of DINOv2's MLP; None if none gives it."""
    for ratio in range(1, 65):
        if hidden_width(config.width * ratio, gated=config.mlp == "swiglu") == config.mlp_dim:
            return ratio
    return None


def hidden_width(hidden: int, *, gated: bool) -> int:
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden
