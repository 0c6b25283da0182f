"""Folders of Hugging Face transformers: the base of all model types, and their JSON files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from vitruvian.config import (
    HUGGINGFACE_NUMERICS,
    Gelu,
    Interpolation,
    ModelConfig,
    Numerics,
    Preprocess,
    ViTConfig,
)
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family, vit_obstacles
from vitruvian.weights.families.tables import POSITIONS, STACKED, Row, Tensors, pair, pairs

LAYER = "encoder.layer.{i}"
QKV = ("query", "key", "value")


def attention_rows(layer: str) -> tuple[Row, ...]:
    return (
        *pair("blocks.{i}.attn.qkv", *(f"{layer}.attention.attention.{part}" for part in QKV), layout=STACKED),
        *pair("blocks.{i}.attn.proj", f"{layer}.attention.output.dense"),
    )


EMBEDDING_ROWS = (
    *pair("embed.patch", "embeddings.patch_embeddings.projection"),
    Row("embed.cls_token", ("embeddings.cls_token",)),
    Row(POSITIONS, ("embeddings.position_embeddings",)),
    *pairs({"norm": "layernorm", "head": "classifier"}),
)

# Names that transformers 5 has in memory; its files have the earlier names.
MEMORY_NAMES = (
    (r"^layers\.", "encoder.layer."),
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
MEMORY_MLP = ((r"\.mlp\.fc1\.", ".intermediate.dense."), (r"\.mlp\.fc2\.", ".output.dense."))
MASK_TOKEN = {"embeddings.mask_token": "token of masked training"}

PREFIXES = {"vit_msn": "vit", "data2vec-vision": "data2vec_vision"}
"""Prefix of the names in a model with a head, if it is not the model type."""
DEFAULT_DEPTH = 12
"""`num_hidden_layers` of all these model types if `config.json` does not state it."""
SHAPE_SETTINGS = {
    "hidden_size": "width",
    "intermediate_size": "mlp_dim",
    "num_channels": "in_channels",
    "patch_size": "patch_size",
}
"""Numbers in `config.json` that the arrays determine too; the two must agree."""


class HuggingFace(Family):
    """Base of all model types; eps and GELU come from `config.json`."""

    numerics = HUGGINGFACE_NUMERICS
    anchor = "embeddings.patch_embeddings.projection.weight"
    renames: ClassVar[tuple[tuple[str, str], ...]] = MEMORY_NAMES
    model_types: tuple[str, ...]
    norm_eps: float
    """Default of the model type's configuration."""
    default_heads = 12

    def __init__(self, kind: str = "") -> None:
        """`kind` is the former model type of a model to be written, if several have the same shape."""
        self.kind = kind

    def model_type(self, config: ViTConfig) -> str:
        """The model type with which a model is written."""
        return self.model_types[0]

    @abstractmethod
    def architecture(self, config: ViTConfig) -> str:
        """Name of the transformers class that reads the written folder."""

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
            num_heads=read_int(settings, "num_attention_heads", self.default_heads),
            depth=read_int(settings, "num_hidden_layers", DEFAULT_DEPTH),
            stated=self.shape_settings(settings) | stated_classes(settings, tensors),
            image_size=read_image_size(settings),
            labels=read_labels(settings),
        )

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings in `config.json` that the arrays determine too."""
        numbers = {ours: read_int(settings, theirs) for theirs, ours in SHAPE_SETTINGS.items()}
        return numbers | {"qkv_bias": read_bool(settings, "qkv_bias")}

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        activation = settings.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        eps = settings.get("layer_norm_eps", self.norm_eps)
        if not isinstance(eps, float | int):
            raise CheckpointError(f"config.json: layer_norm_eps={eps!r} is not a number")
        return self.numerics.replace(gelu=ACTIVATIONS[activation], norm_eps=float(eps))

    def default_labels(self, num_classes: int) -> None:
        """None: `config.json` names the classes, or has LABEL_0 and so on for unnamed ones."""

    def embedded_description(self, checkpoint: Checkpoint) -> Any:
        """None without the JSON files it was written with."""
        has_files = isinstance(checkpoint.embedded, dict) and "files" in checkpoint.embedded
        return super().embedded_description(checkpoint) if has_files else None

    def known_as(self, checkpoint: Checkpoint) -> str:
        kind = self.config_of(checkpoint).get("model_type")
        return f"huggingface:{kind}" if isinstance(kind, str) else ""

    def stated_preprocess(self, checkpoint: Checkpoint, config: ModelConfig) -> Preprocess | None:
        settings = checkpoint.settings.get("preprocessor_config.json")
        return None if settings is None else read_preprocessor(settings, config.image_size)

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        yield from vit_obstacles(config, "huggingface")
        if not isinstance(config, ViTConfig):
            return
        is_mean = config.pool == "mean"
        checks = {
            "no pre-logits layer before the head (its classifier bypasses the pooler)": config.representation_size,
            "no attention pooling (MAP)": config.pool == "map",
            "no mean pooling with a class token, unless a norm follows the mean (BEiT)": is_mean and config.cls_token,
            "no norm after the mean of the patches without a class token": (
                is_mean and config.norm_after_pool and not config.cls_token
            ),
            "no hybrids with a ResNet stem": config.stem,
        }
        yield from (f"huggingface has {what}" for what, is_present in checks.items() if is_present)

    def from_table_names(self, tensors: Tensors, config: ModelConfig) -> Tensors:
        assert isinstance(config, ViTConfig)
        if not config.num_classes:
            return tensors
        kind = self.model_type(config)
        prefix = PREFIXES.get(kind, kind) + "."
        return {name if "classifier" in name else prefix + name: tensor for name, tensor in tensors.items()}

    def json_files(self, config: ModelConfig, labels: tuple[str, ...] | None, preprocess: Preprocess) -> dict[str, Any]:
        assert isinstance(config, ViTConfig)
        files = {"config.json": self.config_json(config, labels)}
        return files | ({"preprocessor_config.json": write_preprocessor(preprocess)} if preprocess.stated else {})

    def reader_preprocess(self, config: ModelConfig, preprocess: Preprocess) -> Preprocess:
        read = read_preprocessor(write_preprocessor(preprocess), config.image_size)
        is_same = read.scaled_size == (preprocess.scaled_size or preprocess.image_size)
        scaled = preprocess.scaled_size if is_same else read.scaled_size
        return read.replace(floor_crop=preprocess.floor_crop, scaled_size=scaled)  # a difference of at most a pixel

    def reader_config(self, config: ModelConfig) -> ModelConfig:
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
            "intermediate_size": config.mlp_dim,
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
    """The number of labels, if the model has a head."""
    names = settings.get("id2label")
    count = read_int(settings, "num_labels") or (len(names) if isinstance(names, dict) and names else None)
    return {"num_classes": count} if "classifier.weight" in tensors else {}


def add_missing_biases(tensors: Tensors, layers: Iterable[str]) -> None:
    """If one of these dense layers has a bias, add zeros for those that have none."""
    weights = {f"{layer}.bias": tensors.get(f"{layer}.weight") for layer in layers}
    if any(name in tensors for name in weights):
        missing = {name: weight for name, weight in weights.items() if name not in tensors and weight is not None}
        tensors.update({name: weight.new_zeros(len(weight)) for name, weight in missing.items() if weight.dim()})


ACTIVATIONS: dict[str, Gelu] = {
    "gelu": "erf",
    "gelu_python": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
WRITTEN_ACTIVATIONS = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
RESAMPLING: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Pillow's filters by number, as in `resample`."""


def read_int(settings: dict[str, Any], key: str, default: int | None = None, *, minimum: int = 1) -> int | None:
    """A positive integer of a JSON file; `default` if it is not stated, None without a file."""
    if not settings:
        return None
    value = settings.get(key, default)
    if value is None:
        return None
    if isinstance(value, list) and value and value[1:] == value[:-1]:  # both sides of a square
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise CheckpointError(f"config.json: {key}={value!r} is not a positive integer")
    return value


def read_bool(settings: dict[str, Any], key: str) -> bool | None:
    value = settings.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"config.json: {key}={value!r} is neither true nor false")
    return value


def read_size(value: Any, key: str) -> Size:
    """A size given as a side, [rows, columns] or {"height": rows, "width": columns}."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{key}={value!r} is not a size in pixels")
    return sides[0], sides[1]


def read_image_size(settings: dict[str, Any]) -> Size | None:
    size = settings.get("image_size")
    return None if size is None else read_size(size, "config.json: image_size")


def read_labels(settings: dict[str, Any]) -> tuple[str, ...] | None:
    """`id2label` in order; None if it is absent or generic (`LABEL_0`)."""
    table = settings.get("id2label")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise CheckpointError(f"config.json: id2label is a {type(table).__name__}, not an object of numbers and names")
    try:
        names = tuple(str(table[key]) for key in sorted(table, key=int))
        is_complete = sorted(map(int, table)) == list(range(len(table)))
    except ValueError as error:
        raise CheckpointError(f"config.json: id2label has a key that is not a number: {error}") from error
    if not is_complete:
        raise CheckpointError("config.json: id2label does not number the classes from 0 without gaps")
    return None if names == generic_labels(len(names)) else names


def generic_labels(count: int) -> tuple[str, ...]:
    """The names that transformers gives to unnamed classes."""
    return tuple(f"LABEL_{index}" for index in range(count))


def read_preprocessor(settings: dict[str, Any], image_size: Size) -> Preprocess:
    """The preprocessing in `preprocessor_config.json`; by default a bilinear squash with mean and std 0.5."""
    if not settings.get("do_resize", True):
        raise CheckpointError(
            "preprocessor_config.json: do_resize is false, but images must be resized to the model's input",
            hint="set it to true, and state the size",
        )
    try:
        mean, std = read_mean_std(settings)
        interpolation = RESAMPLING[settings.get("resample", 2)]
        preprocess = Preprocess(image_size=image_size, interpolation=interpolation, mean=mean, std=std)
        return set_sizes(preprocess, settings)
    except (ConfigError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"preprocessor_config.json cannot be read: {error}") from error


def read_mean_std(settings: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for pixel values from 0 to 1; the file's are for bytes times `rescale_factor`."""
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    scale = round(factor * 255, 9)
    if not settings.get("do_normalize", True):
        return (0.0,) * 3, (1.0 / scale,) * 3
    mean, std = (settings.get(key, (0.5,) * 3) for key in ("image_mean", "image_std"))
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


SQUARE_PROCESSORS = ("ViT", "DeiT", "Beit")
"""Processors for which a single number is the side of a square; for others, it is the shorter side."""
NAFLEX = {"patch_size": 16, "max_num_patches": 256}
"""Defaults of SigLIP 2's processor."""


def set_sizes(preprocess: Preprocess, settings: dict[str, Any]) -> Preprocess:
    """Add the sizes in the file: a squash, or the shorter side resized; then a center crop."""
    if "max_num_patches" in settings:  # each image keeps its aspect ratio
        limits = {key: settings.get(key, default) for key, default in NAFLEX.items()}
        return preprocess.replace(fit="naflex", **limits)
    size = settings.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else None
    crops = bool(settings.get("do_center_crop", "crop_size" in settings and shortest))
    if not crops and not shortest:
        return preprocess if size is None else preprocess.replace(image_size=read_size(size, "size"))
    scaled = read_size(shortest or size or preprocess.image_size, "size")
    crop = read_size(settings["crop_size"], "crop_size") if crops and "crop_size" in settings else scaled
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    is_square = not shortest and (isinstance(size, dict) or kind.startswith(SQUARE_PROCESSORS))
    return preprocess.replace(
        image_size=crop,
        fit="squash" if is_square else "crop",
        scaled_size=tuple(map(max, scaled, crop)),
        floor_crop=True,
    )


def write_preprocessor(preprocess: Preprocess) -> dict[str, Any]:
    """`preprocessor_config.json` for our preprocessing; settings that transformers lacks are left out."""
    rows, columns = preprocess.image_size
    settings: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "resample": next(code for code, name in RESAMPLING.items() if name == preprocess.interpolation),
    }
    if preprocess.fit == "naflex":
        limits = {key: getattr(preprocess, key) for key in NAFLEX}
        return settings | {"image_processor_type": "Siglip2ImageProcessor"} | limits
    height, width = preprocess.scaled_size or preprocess.image_size
    if preprocess.fit == "squash" and (height, width) == (rows, columns):
        return settings | {"image_processor_type": "ViTImageProcessor", "size": {"height": rows, "width": columns}}
    squash = {"image_processor_type": "DeiTImageProcessor", "size": {"height": height, "width": width}}
    crop = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": max(height, width)}}
    center = {"do_center_crop": True, "crop_size": {"height": rows, "width": columns}}
    return settings | (squash if preprocess.fit == "squash" else crop) | center
