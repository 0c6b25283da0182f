"""BEiT and data2vec as Hugging Face transformers keeps them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.family import Facts, kind_obstacles
from vitruvian.weights.families.huggingface import (
    ATTENTION,
    LAYER,
    MEMORY_MLP,
    MEMORY_NAMES,
    ROWS,
    HuggingFace,
    add_absent_biases,
)
from vitruvian.weights.families.huggingface_json import flag
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import Row, Table, Tensors, pair, rename
from vitruvian.weights.files import Checkpoint

BIAS = "relative_position_bias.relative_position_bias_table"
SHARED_BIAS = f"encoder.{BIAS}"
WITHOUT_ARRAY = ("relative_bias", "none")
"""Kinds of positions that have no array of their own."""
SHARED_IN_MEMORY = "shared_position_bias.relative_position_bias_table"


OTHER_HEADS = {
    "lm_head.": "the head of masked image modelling, which predicts visual tokens of hidden patches",
    "decode_head.": "a head of segmentation",
}
"""Beginnings of arrays of models that give neither answers nor features of an image, and what they are."""


class HuggingFaceBeit(HuggingFace):
    """model_type `beit` and `data2vec-vision`: relative biases, and a norm after the mean of the patches."""

    name = "huggingface"
    model_types = ("beit", "data2vec-vision")
    norm_eps = 1e-12
    prefixes = ("beit.", "data2vec_vision.", "")
    renames = (*MEMORY_NAMES, *MEMORY_MLP, (r"^pooler\.layernorm\.", "layernorm."))
    ignored: ClassVar[dict[str, str]] = {"embeddings.mask_token": "token of masked training"}
    table = Table(
        rows=(
            *ROWS,
            *pair("blocks.{i}.norm1", f"{LAYER}.layernorm_before"),
            Row("blocks.{i}.ls1", (f"{LAYER}.lambda_1",)),
            *pair("blocks.{i}.norm2", f"{LAYER}.layernorm_after"),
            Row("blocks.{i}.ls2", (f"{LAYER}.lambda_2",)),
            *pair("blocks.{i}.mlp.fc1", f"{LAYER}.intermediate.dense"),
            *pair("blocks.{i}.mlp.fc2", f"{LAYER}.output.dense"),
            Row("blocks.{i}.attn.position.table", (f"{ATTENTION}.attention.{BIAS}",)),
        ),
        block=r"encoder\.layer\.(\d+)\.",
    )

    def claims(self, checkpoint: Checkpoint) -> bool:
        stated = self.config_of(checkpoint).get("model_type") in self.model_types
        return super().claims(checkpoint) and (stated or any(BIAS in name for name in checkpoint.tensors))

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Keys have no bias; a table that all layers share is added to each; indices of older files are computed."""
        for mark, what in OTHER_HEADS.items():
            if any(name.startswith(mark) for name in tensors):
                raise CheckpointError(
                    f"the weights have {what} ({mark}*); take a checkpoint that was fine-tuned to classify, "
                    "or save the encoder alone (BeitModel, Data2VecVisionModel)"
                )
        found = {name: tensor for name, tensor in tensors.items() if not name.endswith("relative_position_index")}
        shared = found.pop(SHARED_BIAS, None)
        for layer in sorted({name.split(".")[2] for name in found if name.startswith("encoder.layer.")}):
            attention = f"encoder.layer.{layer}.attention.attention"
            add_absent_biases(found, (f"{attention}.{part}" for part in ("query", "key", "value")))
            if shared is not None:
                own = found.get(f"{attention}.{BIAS}")
                if own is not None and own.shape != shared.shape:
                    raise CheckpointError(f"{SHARED_BIAS!r} and that of layer {layer} have different shapes")
                found[f"{attention}.{BIAS}"] = shared.clone() if own is None else shared + own
        return found

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        mean = flag(self.config_of(checkpoint), "use_mean_pooling") is not False
        normed = "layernorm.weight" in tensors
        pooled = any(name.endswith("pooler.layernorm.weight") for name in checkpoint.tensors)
        relative = any(BIAS in name for name in tensors)
        placed = "embeddings.position_embeddings" in tensors
        self.check_positions(checkpoint)
        if relative and facts.image_size and facts.image_size[0] != facts.image_size[1]:
            raise CheckpointError(
                "relative biases of an image that is not square, whose table transformers reads as columns by rows"
            )
        if relative and placed:
            raise CheckpointError("the model has both relative biases and absolute positions, which is not known here")
        return replace(
            facts,
            norm_after_pool=pooled or not normed,
            stated=facts.stated | {"norm_after_pool": mean},
            settings={
                "pool": "mean" if mean else "token",
                "pos_embed": "relative_bias" if relative else "learned" if placed else "none",
                "final_norm": normed,
            },
        )

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        """LayerScale is stated by its first value, where 0 is none."""
        scale = settings.get("layer_scale_init_value")
        return super().stated(settings) | {"layer_scale": scale > 0 if isinstance(scale, int | float) else None}

    def check_positions(self, checkpoint: Checkpoint) -> None:
        """Each kind of positions is stated by itself, and the arrays must have it."""
        settings, names = self.config_of(checkpoint), checkpoint.tensors
        shared = any(name.endswith((SHARED_BIAS, SHARED_IN_MEMORY)) for name in names)
        own = any(f".attention.{BIAS}" in name or f".attention.attention.{BIAS}" in name for name in names)
        found = {
            "use_relative_position_bias": own,
            "use_shared_relative_position_bias": shared,
            "use_absolute_position_embeddings": any(name.endswith("embeddings.position_embeddings") for name in names),
        }
        for key, there in found.items():
            if flag(settings, key) not in (None, there):
                raise CheckpointError(f"the settings say {key}={not there}, the arrays have {there}")

    def usual_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess:
        return Preprocess(image_size=config.image_size, interpolation="bicubic")

    def model_type(self, config: ViTConfig) -> str:
        """data2vec's model without a head does not normalize the mean."""
        same = self.kind == "data2vec-vision" and config.num_classes
        return "data2vec-vision" if same or not config.final_norm else "beit"

    def architecture(self, config: ViTConfig) -> str:
        name = "Beit" if self.model_type(config) == "beit" else "Data2VecVision"
        return name + ("ForImageClassification" if config.num_classes else "Model")

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        free = ("num_classes", "layer_scale", "pos_embed", "cls_pos_embed", "pool", "norm_after_pool", "final_norm")
        yield from kind_obstacles(config, "BEiT of transformers", free=free)
        if not isinstance(config, ViTConfig):
            return
        if config.pos_embed == "relative":
            yield "BEiT of transformers has biases for offsets, no embeddings of them"
        if config.pos_embed != "none" and config.grid[0] != config.grid[1]:
            yield "BEiT of transformers has positions of a square grid alone"
        mean = config.pool == "mean"
        if config.pool not in ("token", "mean") or (config.final_norm and config.norm_after_pool != mean):
            yield "BEiT of transformers has a norm after the mean of the patches, or before the class token is read"
        if not config.final_norm and (config.num_classes or not mean):
            yield "BEiT and data2vec of transformers have a norm before their head"

    def write_positions(self, state: Tensors, config: ViTConfig) -> Tensors:
        joined = super().write_positions(state, config)
        if config.pos_embed in WITHOUT_ARRAY:
            del joined[FLAT]
        return joined

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        """Keys have no bias: added to every key alike, it changes no softmax."""
        assert isinstance(config, ViTConfig)
        found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attention.key.bias")}
        if config.pool == "mean":
            found = rename(found, [(r"^layernorm\.", "pooler.layernorm.")])
        return super().from_table_names(found, config)

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        return super().config_json(config, labels) | {
            "intermediate_size": config.mlp_dim,
            "use_mask_token": False,
            "use_absolute_position_embeddings": config.pos_embed not in WITHOUT_ARRAY,
            "use_relative_position_bias": config.pos_embed == "relative_bias",
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1 if config.layer_scale else 0.0,
            "drop_path_rate": config.drop_path,
            "use_mean_pooling": config.pool == "mean",
        }
