"""Hugging Face transformers (folder): what its model types share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from vitruvian.config import HUGGINGFACE_NUMERICS, ModelConfig, Numerics, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError
from vitruvian.weights.families.family import Facts, Family, vit_obstacles
from vitruvian.weights.families.huggingface_json import (
    ACTIVATIONS,
    WRITTEN_ACTIVATIONS,
    flag,
    generic_labels,
    image_size_of,
    labels_of,
    number,
    preprocess_of,
    preprocessor_json,
)
from vitruvian.weights.families.positions import FLAT
from vitruvian.weights.families.rules import STACKED, Row, Tensors, pair
from vitruvian.weights.files import Checkpoint

LAYER, ATTENTION = "encoder.layer.{i}", "encoder.layer.{i}.attention"

ROWS = (
    *pair("embed.patch", "embeddings.patch_embeddings.projection"),
    Row("embed.cls_token", ("embeddings.cls_token",)),
    Row(FLAT, ("embeddings.position_embeddings",)),
    *pair(
        "blocks.{i}.attn.qkv",
        *(f"{ATTENTION}.attention.{part}" for part in ("query", "key", "value")),
        kind=STACKED,
    ),
    *pair("blocks.{i}.attn.proj", f"{ATTENTION}.output.dense"),
    *pair("norm", "layernorm"),
    *pair("head", "classifier"),
)

# Names that transformers 5 has in memory, where its files keep the earlier ones.
MEMORY_NAMES = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
MEMORY_MLP = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))

PREFIXES = {"vit_msn": "vit", "data2vec-vision": "data2vec_vision"}
"""What precedes the names of a model with a head, where it is not the model type."""

DEFAULT_LAYERS = 12
"""Of every model type here whose `config.json` leaves the number out."""

STATED = {
    "hidden_size": "width",
    "intermediate_size": "mlp_dim",
    "num_channels": "in_channels",
    "patch_size": "patch_size",
}
"""Numbers of `config.json` that the arrays tell too; the two must agree."""


class HuggingFace(Family):
    """What the model types share; eps and GELU come from `config.json`."""

    numerics = HUGGINGFACE_NUMERICS
    anchor = "embeddings.patch_embeddings.projection.weight"
    renames: ClassVar[tuple[tuple[str, str], ...]] = MEMORY_NAMES
    model_types: tuple[str, ...]
    norm_eps: float
    """What the model type means when its configuration does not say."""
    default_heads = 12

    def __init__(self, kind: str = "") -> None:
        """`kind` is the model type that a model to be written had, where several have the same shape."""
        self.kind = kind

    def model_type(self, config: ViTConfig) -> str:
        """Which of its model types a model is written as."""
        return self.model_types[0]

    @abstractmethod
    def architecture(self, config: ViTConfig) -> str:
        """Name of the transformers class that reads what is written."""

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return checkpoint.settings.get("config.json", {})

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings = self.config_of(checkpoint)
        model_type = settings.get("model_type", self.model_types[0])
        if model_type not in self.model_types:
            names = ", ".join(self.model_types)
            raise CheckpointError(f"config.json says model_type {model_type!r}, the names inside are those of {names}")
        return Facts(
            numerics=self.numerics_of(settings),
            num_heads=number(settings, "num_attention_heads", self.default_heads),
            depth=number(settings, "num_hidden_layers", DEFAULT_LAYERS),
            stated=self.stated(settings) | stated_classes(settings, tensors),
            image_size=image_size_of(settings),
            labels=labels_of(settings),
        )

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        """What `config.json` says of settings that the arrays tell too."""
        numbers = {ours: number(settings, theirs) for theirs, ours in STATED.items()}
        return numbers | {"qkv_bias": flag(settings, "qkv_bias")}

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        activation = settings.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        eps = settings.get("layer_norm_eps", self.norm_eps)
        if not isinstance(eps, float | int):
            raise CheckpointError(f"config.json: layer_norm_eps={eps!r} is not a number")
        return self.numerics.replace(gelu=ACTIVATIONS[activation], norm_eps=float(eps))

    def default_labels(self, num_classes: int) -> None:
        """None: `config.json` names the classes, or says by LABEL_0 that nobody did."""

    def carried(self, checkpoint: Checkpoint) -> Any:
        """None without the JSON files it was written with."""
        carried = checkpoint.carried
        return super().carried(checkpoint) if isinstance(carried, dict) and "files" in carried else None

    def known_as(self, checkpoint: Checkpoint) -> str:
        kind = self.config_of(checkpoint).get("model_type")
        return f"huggingface:{kind}" if isinstance(kind, str) else ""

    def stated_view(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        settings = checkpoint.settings.get("preprocessor_config.json")
        return None if settings is None else preprocess_of(settings, config.image_size)

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from vit_obstacles(config, "huggingface")
        if not isinstance(config, ViTConfig):
            return
        checks = {
            "no pre-logits layer before the head (its classifier bypasses the pooler)": config.representation_size,
            "no attention pooling (MAP)": config.pool == "map",
            "no model that reads the mean of the patches beside a class token, unless its norm follows (BEiT)": (
                config.pool == "mean" and config.cls_token
            ),
            "no norm after the mean of the patches without a class token": (
                config.pool == "mean" and config.norm_after_pool and not config.cls_token
            ),
            "no hybrids with a ResNet stem": config.stem,
        }
        yield from (f"huggingface has {what}" for what, present in checks.items() if present)

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        if not config.num_classes:
            return tensors
        kind = self.model_type(config)
        prefix = PREFIXES.get(kind, kind) + "."
        return {name if "classifier" in name else prefix + name: tensor for name, tensor in tensors.items()}

    def stated_files(self, config: ModelConfig, labels: tuple[str, ...] | None, view: Preprocess) -> dict[str, Any]:
        assert isinstance(config, ViTConfig)
        files = {"config.json": self.config_json(config, labels)}
        return files | ({"preprocessor_config.json": preprocessor_json(view)} if view.stated else {})

    def assumed_view(self, config: ModelConfig, view: Preprocess) -> Preprocess:
        stated = preprocess_of(preprocessor_json(view), config.image_size)
        scaled = view.scaled_size if stated.scaled_size == (view.scaled_size or view.image_size) else stated.scaled_size
        return stated.replace(floor_crop=view.floor_crop, scaled_size=scaled)  # at most a pixel, and always so

    def family_numerics(self, config: ModelConfig) -> ModelConfig:
        """`config.json` states GELU and eps, so only the resampling of positions is the family's."""
        assert isinstance(config, ViTConfig)
        return config.replace(numerics=config.numerics.replace(position_resize=self.numerics.position_resize))

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        """`config.json` as transformers writes it."""
        rows, columns = config.image_size
        names = labels or generic_labels(config.num_classes)
        settings: dict[str, Any] = {
            "architectures": [self.architecture(config)],
            "model_type": self.model_type(config),
            "hidden_size": config.width,
            "num_hidden_layers": config.depth,
            "num_attention_heads": config.num_heads,
            "hidden_act": WRITTEN_ACTIVATIONS[config.numerics.gelu],
            "layer_norm_eps": config.numerics.norm_eps,
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": config.attention_dropout,
            "image_size": rows if rows == columns else [rows, columns],
            "patch_size": config.patch_size,
            "num_channels": config.in_channels,
            "qkv_bias": config.qkv_bias,
            "dtype": "float32",
        }
        if config.num_classes:
            settings["id2label"] = {str(index): name for index, name in enumerate(names)}
            settings["label2id"] = {name: index for index, name in enumerate(names)}
        return settings


def stated_classes(settings: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """How many labels there are, where a head reads them."""
    names = settings.get("id2label")
    count = number(settings, "num_labels") or (len(names) if isinstance(names, dict) and names else None)
    return {"num_classes": count} if "classifier.weight" in tensors else {}


def add_absent_biases(tensors: Tensors, layers: Iterable[str]) -> None:
    """Zeros for those of these dense layers that have no bias where another has."""
    weights = {f"{layer}.bias": tensors.get(f"{layer}.weight") for layer in layers}
    if any(name in tensors for name in weights):
        absent = {name: weight for name, weight in weights.items() if name not in tensors and weight is not None}
        tensors.update({name: weight.new_zeros(len(weight)) for name, weight in absent.items() if weight.dim()})
