"""ViT, DeiT, BEiT and data2vec in transformers, and the model types with the same names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, imagenet_preprocess, model_type_obstacles
from vitruvian.weights.families.huggingface import (
    EMBEDDING_ROWS,
    LAYER,
    MASK_TOKEN,
    MEMORY_MLP,
    MEMORY_NAMES,
    QKV,
    HuggingFace,
    add_missing_biases,
    attention_rows,
    read_bool,
)
from vitruvian.weights.families.tables import POSITIONS, Row, Table, Tensors, pair, pairs, rename

BLOCK_LAYERS = {
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def vit_block_rows(layer: str) -> tuple[Row, ...]:
    """Rows of ViT's encoder block, which MAE's decoder uses too."""
    return *attention_rows(layer), *pairs(BLOCK_LAYERS, "blocks.{i}.", f"{layer}.")


class HuggingFaceViT(HuggingFace):
    """model_type `vit` and `deit`, and the encoders of `vit_mae`, `vit_msn` and `ijepa`."""

    name = "huggingface"
    model_types = ("vit", "deit", "vit_mae", "vit_msn", "ijepa")
    norm_eps = 1e-12
    prefixes = ("vit.", "deit.", "ijepa.", "", "module.vit.")
    renames = (*MEMORY_NAMES, *MEMORY_MLP, (r"cls_classifier\.", "classifier."))  # the last in distilled models
    ignored: ClassVar[dict[str, str]] = {
        "pooler.dense.weight": "pooler, which the classifier bypasses",
        "pooler.dense.bias": "pooler, which the classifier bypasses",
        "decoder.": "decoder of masked training",
    } | MASK_TOKEN
    table = Table(
        rows=(
            *EMBEDDING_ROWS,
            Row("embed.dist_token", ("embeddings.distillation_token",)),
            *pair("head_dist", "distillation_classifier"),
            *vit_block_rows(LAYER),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and not any(".layer_scale" in name for name in checkpoint.tensors)

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        """None for `vit`: some need mean and std 0.5 (Google's), some those of ImageNet (DINO's)."""
        kind = self.config_of(checkpoint).get("model_type", "vit")
        return None if kind == "vit" else imagenet_preprocess(config.image_size)

    def model_type(self, config: ViTConfig) -> str:
        if not config.cls_token:
            return "ijepa"
        if config.distillation or config.reg_tokens:
            return "deit"
        same_shape = ("vit_msn",) if config.num_classes else ("vit_msn", "vit_mae")
        return self.kind if self.kind in same_shape else "vit"

    def architecture(self, config: ViTConfig) -> str:
        names = {"vit": "ViT", "deit": "DeiT", "vit_mae": "ViTMAE", "vit_msn": "ViTMSN", "ijepa": "IJepa"}
        name = names[self.model_type(config)]
        name += "ForImageClassification" if config.num_classes else "Model"
        return name + ("WithTeacher" if config.distillation and config.num_classes else "")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from super().obstacles(config)
        if isinstance(config, ViTConfig) and config.reg_tokens and not self.has_unread_token(config):
            yield "huggingface has register tokens only with LayerScale (DINOv2)"

    def has_unread_token(self, config: ViTConfig) -> bool:
        """Whether a single register is the distillation token of a DeiT without a second head."""
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
        settings = super().config_json(config, labels)
        return settings | ({"mask_ratio": 0.0} if self.model_type(config) == "vit_mae" else {})


BIAS = "relative_position_bias.relative_position_bias_table"
SHARED_BIAS = f"encoder.{BIAS}"
SHARED_BIAS_IN_MEMORY = "shared_position_bias.relative_position_bias_table"
WITHOUT_ARRAY = ("relative_bias", "none")
"""Kinds of positions for which no position array is written."""
OTHER_HEADS = {
    "lm_head.": "the head of masked image modelling, which predicts visual tokens of hidden patches",
    "decode_head.": "a segmentation head",
}
"""Prefixes of heads that return neither classes nor features, and what they are."""


class HuggingFaceBeit(HuggingFace):
    """model_type `beit` and `data2vec-vision`: relative biases, and a norm after the mean of the patches."""

    name = "huggingface"
    model_types = ("beit", "data2vec-vision")
    norm_eps = 1e-12
    prefixes = ("beit.", "data2vec_vision.", "")
    renames = (*MEMORY_NAMES, *MEMORY_MLP, (r"^pooler\.layernorm\.", "layernorm."))
    ignored: ClassVar[dict[str, str]] = MASK_TOKEN
    table = Table(
        rows=(
            *EMBEDDING_ROWS,
            *vit_block_rows(LAYER),
            Row("blocks.{i}.ls1", (f"{LAYER}.lambda_1",)),
            Row("blocks.{i}.ls2", (f"{LAYER}.lambda_2",)),
            Row("blocks.{i}.attn.position.table", (f"{LAYER}.attention.attention.{BIAS}",)),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        stated = self.config_of(checkpoint).get("model_type") in self.model_types
        return super().claims(checkpoint) and (stated or any(BIAS in name for name in checkpoint.tensors))

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add zero biases for keys, and a bias table shared by all layers to each; drop the indices of older files."""
        for prefix, what in OTHER_HEADS.items():
            if any(name.startswith(prefix) for name in tensors):
                raise CheckpointError(
                    f"the weights have {what} ({prefix}*)",
                    hint="use a checkpoint fine-tuned for classification, or save the encoder only (BeitModel, "
                    "Data2VecVisionModel)",
                )
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith("relative_position_index")}
        shared = state.pop(SHARED_BIAS, None)
        for layer in sorted({name.split(".")[2] for name in state if name.startswith("encoder.layer.")}):
            attention = f"encoder.layer.{layer}.attention.attention"
            add_missing_biases(state, (f"{attention}.{part}" for part in QKV))
            if shared is not None:
                bias = state.get(f"{attention}.{BIAS}")
                if bias is not None and bias.shape != shared.shape:
                    raise CheckpointError(f"{SHARED_BIAS!r} and that of layer {layer} have different shapes")
                state[f"{attention}.{BIAS}"] = shared.clone() if bias is None else shared + bias
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        is_mean = read_bool(self.config_of(checkpoint), "use_mean_pooling") is not False
        has_norm = "layernorm.weight" in tensors
        has_pool_norm = any(name.endswith("pooler.layernorm.weight") for name in checkpoint.tensors)
        has_biases = any(BIAS in name for name in tensors)
        has_positions = "embeddings.position_embeddings" in tensors
        self.check_positions(checkpoint)
        if has_biases and facts.image_size and facts.image_size[0] != facts.image_size[1]:
            raise CheckpointError(
                "relative biases of an image that is not square, whose table transformers reads as columns by rows"
            )
        if has_biases and has_positions:
            raise CheckpointError("relative biases together with absolute positions are not supported")
        return replace(
            facts,
            norm_after_pool=has_pool_norm or not has_norm,
            stated=facts.stated | {"norm_after_pool": is_mean},
            settings={
                "pool": "mean" if is_mean else "token",
                "pos_embed": "relative_bias" if has_biases else "learned" if has_positions else "none",
                "final_norm": has_norm,
            },
        )

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """LayerScale is stated by its initial value; 0 means none."""
        scale = settings.get("layer_scale_init_value")
        return super().shape_settings(settings) | {"layer_scale": scale > 0 if isinstance(scale, int | float) else None}

    def check_positions(self, checkpoint: Checkpoint) -> None:
        """Raise if `config.json` states another kind of positions than the arrays have."""
        settings, names = self.config_of(checkpoint), checkpoint.tensors
        present = {
            "use_relative_position_bias": any(
                f".attention.{BIAS}" in name or f".attention.attention.{BIAS}" in name for name in names
            ),
            "use_shared_relative_position_bias": any(
                name.endswith((SHARED_BIAS, SHARED_BIAS_IN_MEMORY)) for name in names
            ),
            "use_absolute_position_embeddings": any(name.endswith("embeddings.position_embeddings") for name in names),
        }
        for key, is_present in present.items():
            if read_bool(settings, key) not in (None, is_present):
                raise CheckpointError(f"the settings say {key}={not is_present}, the arrays have {is_present}")

    def default_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, interpolation="bicubic")

    def model_type(self, config: ViTConfig) -> str:
        """data2vec's model without a head does not normalize the mean."""
        is_data2vec = self.kind == "data2vec-vision" and config.num_classes
        return "data2vec-vision" if is_data2vec or not config.final_norm else "beit"

    def architecture(self, config: ViTConfig) -> str:
        name = "Beit" if self.model_type(config) == "beit" else "Data2VecVision"
        return name + ("ForImageClassification" if config.num_classes else "Model")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        free = ("num_classes", "layer_scale", "pos_embed", "cls_pos_embed", "pool", "norm_after_pool", "final_norm")
        yield from model_type_obstacles(config, "BEiT of transformers", free=free)
        if not isinstance(config, ViTConfig):
            return
        if config.pos_embed == "relative":
            yield "BEiT of transformers has relative position biases, not embeddings"
        if config.pos_embed != "none" and config.grid[0] != config.grid[1]:
            yield "BEiT of transformers has positions of a square grid only"
        is_mean = config.pool == "mean"
        if config.pool not in ("token", "mean") or (config.final_norm and config.norm_after_pool != is_mean):
            yield "BEiT of transformers has a norm after the mean of the patches, or before the class token"
        if not config.final_norm and (config.num_classes or not is_mean):
            yield "BEiT and data2vec of transformers have a norm before their head"

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        joined = super().write_positions(state, config)
        if config.pos_embed in WITHOUT_ARRAY:
            del joined[POSITIONS]
        return joined

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Drop the bias of keys: it is the same for every key, so it does not change the softmax."""
        assert isinstance(config, ViTConfig)
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attention.key.bias")}
        if config.pool == "mean":
            state = rename(state, [(r"^layernorm\.", "pooler.layernorm.")])
        return super().from_table_names(state, config)

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        return super().config_json(config, labels) | {
            "use_mask_token": False,
            "use_absolute_position_embeddings": config.pos_embed not in WITHOUT_ARRAY,
            "use_relative_position_bias": config.pos_embed == "relative_bias",
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1 if config.layer_scale else 0.0,
            "drop_path_rate": config.drop_path,
            "use_mean_pooling": config.pool == "mean",
        }
