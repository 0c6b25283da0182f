"""ViT and DeiT as Hugging Face transformers keeps them, and the encoders that have the same names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.weights.families.dino import imagenet_view
from vitruvian.weights.families.huggingface import LAYER, MEMORY_MLP, MEMORY_NAMES, ROWS, HuggingFace
from vitruvian.weights.families.rules import Row, Table, Tensors, pair, rename
from vitruvian.weights.files import Checkpoint


class HuggingFaceViT(HuggingFace):
    """model_type `vit` and `deit`, and the encoders of `vit_mae`, `vit_msn` and `ijepa`, which have the same names."""

    name = "huggingface"
    model_types = ("vit", "deit", "vit_mae", "vit_msn", "ijepa")
    norm_eps = 1e-12
    prefixes = ("vit.", "deit.", "ijepa.", "", "module.vit.")
    renames = (*MEMORY_NAMES, *MEMORY_MLP, (r"cls_classifier\.", "classifier."))  # the last with a teacher
    ignored: ClassVar[dict[str, str]] = {
        "pooler.dense.weight": "pooler, which the classifier bypasses",
        "pooler.dense.bias": "pooler, which the classifier bypasses",
        "embeddings.mask_token": "token of masked training",
        "decoder.": "decoder of masked training",
    }
    table = Table(
        rows=(
            *ROWS,
            Row("embed.dist_token", ("embeddings.distillation_token",)),
            *pair("head_dist", "distillation_classifier"),
            *pair("blocks.{i}.norm1", f"{LAYER}.layernorm_before"),
            *pair("blocks.{i}.norm2", f"{LAYER}.layernorm_after"),
            *pair("blocks.{i}.mlp.fc1", f"{LAYER}.intermediate.dense"),
            *pair("blocks.{i}.mlp.fc2", f"{LAYER}.output.dense"),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and not any(".layer_scale" in name for name in checkpoint.tensors)

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """None for `vit`: some ask for 0.5 (Google's), some for ImageNet statistics (DINO's)."""
        kind = self.config_of(checkpoint).get("model_type", "vit")
        return None if kind == "vit" else imagenet_view(config.image_size)

    def model_type(self, config: ViTConfig) -> str:
        if not config.cls_token:
            return "ijepa"
        if config.distillation or config.reg_tokens:
            return "deit"
        alike = ("vit_msn",) if config.num_classes else ("vit_msn", "vit_mae")
        return self.kind if self.kind in alike else "vit"

    def architecture(self, config: ViTConfig) -> str:
        names = {"vit": "ViT", "deit": "DeiT", "vit_mae": "ViTMAE", "vit_msn": "ViTMSN", "ijepa": "IJepa"}
        name = names[self.model_type(config)]
        name += "ForImageClassification" if config.num_classes else "Model"
        return name + ("WithTeacher" if config.distillation and config.num_classes else "")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from super().obstacles(config)
        if isinstance(config, ViTConfig) and config.reg_tokens and not self.lone_token(config):
            yield "huggingface has register tokens only with LayerScale (DINOv2)"

    def lone_token(self, config: ViTConfig) -> bool:
        """A single register is what DeiT without a teacher has: a distillation token that no head reads."""
        return config.reg_tokens == 1 and config.num_classes > 0 and not config.distillation

    def prefix_rows(self, config: ViTConfig) -> int:
        return super().prefix_rows(config) + config.reg_tokens

    def rename_parameters(self, native: Tensors, config: ModelConfig) -> Tensors:
        return rename(native, [(r"^embed\.reg_tokens$", "embed.dist_token")])

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        renamed = super().from_table_names(tensors, config)
        return rename(renamed, [(r"^classifier\.", "cls_classifier.")]) if config.distillation else renamed

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels) | {"intermediate_size": config.mlp_dim}
        return settings | ({"mask_ratio": 0.0} if self.model_type(config) == "vit_mae" else {})
