"""Folders of Hugging Face transformers: their JSON files, and one class for model types with the same names.

ViT, DeiT, BEiT, data2vec, DINOv2 and DINOv3; the image towers of CLIP and SigLIP, alone or next to the text tower.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitruvian.config import (
    CLIP_MEAN,
    CLIP_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    NUMERICS,
    Interpolation,
    ModelMeta,
    Numerics,
    Preprocess,
    RopeConfig,
    ViTConfig,
)
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.text_tower import TextConfig
from vitruvian.settings import Size
from vitruvian.text import package_table
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family, check_settings, find_obstacles, imagenet_preprocess
from vitruvian.weights.families.tables import TABLES, Tensors, rename
from vitruvian.weights.families.timm_layout import as_kernel, as_matrix, repeat_for_heads

NAMES = package_table("weights/families/huggingface.toml")
DEFAULT_DEPTH = 12  # `num_hidden_layers` of all these model types if `config.json` does not state it
ENCODER_SETTINGS, IMAGE_SETTINGS, ACTIVATIONS = NAMES["encoder"], NAMES["image"], NAMES["activations"]

GATED_ACTIVATIONS = {"silu": "erf", "swish": "erf"}  # and the GELU, which no part of such a model has
GATED_TYPES = ("aimv2_vision_model",)  # model types whose MLPs are always gated


class HuggingFace(Family[ViTConfig]):
    """Base class of all model types; the epsilon of norms and the GELU come from `config.json`."""

    name = "huggingface"
    numerics = NUMERICS["huggingface"]
    model_types: ClassVar[dict[str, str]]  # model types, and how their classes begin in transformers
    norm_eps: ClassVar[float]  # default of the model type's configuration
    default_heads = 12
    needs_type: ClassVar[bool] = False  # whether config.json must state the model type, since others have these names

    def __init__(self, kind: str = "") -> None:
        """`kind` is the former model type of a model to be written, if several have the same shape."""
        self.kind = kind

    def claims(self, checkpoint: Checkpoint) -> bool:
        stated = not self.needs_type or self.config_of(checkpoint).get("model_type") in tuple(self.model_types)
        return stated and super().claims(checkpoint)

    def model_type(self, config: ViTConfig) -> str:
        """The model type with which a model is written."""
        return next(iter(self.model_types))

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The settings of the image model: all, or those of one tower."""
        settings = checkpoint.settings.get("config.json", {})
        tower = settings.get("vision_config")
        if tower is None:
            return settings
        if not isinstance(tower, dict):
            raise CheckpointError("config.json: vision_config is not an object")
        kind = settings.get("model_type")
        return {"model_type": f"{kind}_vision_model"} | tower if isinstance(kind, str) else tower

    def kind_of(self, checkpoint: Checkpoint) -> Any:
        """The model type that `config.json` states; if it does not, the usual one for these arrays."""
        return self.config_of(checkpoint).get("model_type", next(iter(self.model_types)))

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings, kind = self.config_of(checkpoint), self.kind_of(checkpoint)
        if kind not in tuple(self.model_types):
            names = ", ".join(self.model_types)
            raise CheckpointError(f"config.json says model_type {kind!r}, the names inside are those of {names}")
        size, numerics = settings.get("image_size"), self.numerics_of({"model_type": kind} | settings)
        return Facts(
            numerics=numerics.replace(position_resize=NAMES["position_resize"].get(kind, numerics.position_resize)),
            num_heads=read_int(settings, "num_attention_heads", self.default_heads),
            depth=read_int(settings, "num_hidden_layers", DEFAULT_DEPTH),
            stated=self.shape_settings(settings) | stated_classes(settings, tensors),
            image_size=None if size is None else read_size(size, "config.json: image_size"),
            labels=read_labels(settings),
            known_as=f"huggingface:{kind}" if "model_type" in settings else "",
        )

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings in `config.json` that the arrays determine too."""
        names = ("hidden_size", "intermediate_size", *IMAGE_SETTINGS)
        numbers = {(ENCODER_SETTINGS | IMAGE_SETTINGS)[name]: read_int(settings, name) for name in names}
        return numbers | {"qkv_bias": read_bool(settings, "qkv_bias")}

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        is_gated = settings.get("use_gated_mlp") or settings.get("model_type") in GATED_TYPES
        known = GATED_ACTIVATIONS if is_gated else ACTIVATIONS
        activation = settings.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in known:
            what = "hidden_act of a gated MLP" if is_gated else "hidden_act"
            raise CheckpointError(f"config.json: {what} {activation!r} is not one of {', '.join(known)}")
        eps = settings.get("layer_norm_eps", settings.get("rms_norm_eps", self.norm_eps))
        if not isinstance(eps, float | int):
            raise CheckpointError(f"config.json: layer_norm_eps={eps!r} is not a number")
        return self.numerics.replace(gelu=known[activation], norm_eps=float(eps))

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        settings = checkpoint.settings.get("preprocessor_config.json")
        return None if settings is None else read_preprocessor(settings, config.image_size)

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        if not config.num_classes:
            return tensors
        kind = self.model_type(config)
        prefix = NAMES["prefixes"].get(kind, kind) + "."
        return {name if "classifier" in name else prefix + name: tensor for name, tensor in tensors.items()}

    def json_files(self, config: ViTConfig, meta: ModelMeta) -> dict[str, Any]:
        files = {"config.json": self.config_json(config, meta.labels)}
        if meta.preprocess.stated:
            files["preprocessor_config.json"] = write_preprocessor(meta.preprocess)
        return files

    def reader_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        read = read_preprocessor(write_preprocessor(preprocess), config.image_size)
        is_same = read.scaled_size == (preprocess.scaled_size or preprocess.image_size)
        scaled = preprocess.scaled_size if is_same else read.scaled_size
        return read.replace(floor_crop=preprocess.floor_crop, scaled_size=scaled)  # a difference of at most a pixel

    def reader_config(self, config: ViTConfig) -> ViTConfig:
        """`config.json` states GELU and eps, so only the resampling of positions is the family's."""
        resize = NAMES["position_resize"].get(self.model_type(config), self.numerics.position_resize)
        return config.replace(numerics=config.numerics.replace(position_resize=resize))

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        rows, columns = config.image_size
        kind = self.model_type(config)
        class_name = self.model_types[kind] + ("ForImageClassification" if config.num_classes else "Model")
        class_name += "WithTeacher" if config.distillation and config.num_classes else ""
        class_name += "WithProjection" if config.representation_size else ""
        settings = {"architectures": [class_name], "model_type": kind} | encoder_json(config)
        settings |= {theirs: getattr(config, ours) for theirs, ours in (NAMES["dropouts"] | IMAGE_SETTINGS).items()}
        size = rows if rows == columns else [rows, columns]
        settings |= {"image_size": size, "qkv_bias": config.qkv_bias, "dtype": "float32"}
        if config.num_classes:
            names = labels or generic_labels(config.num_classes)
            settings["id2label"] = {str(index): name for index, name in enumerate(names)}
            settings["label2id"] = {name: index for index, name in enumerate(names)}
        return settings


def encoder_json(config: ViTConfig | TextConfig) -> dict[str, Any]:
    """The settings of the Transformer in `config.json`, which image and text towers share."""
    sizes = {theirs: getattr(config, ours) for theirs, ours in ENCODER_SETTINGS.items()}
    activation = NAMES["written_activations"][config.numerics.gelu]
    return sizes | {"hidden_act": activation, "layer_norm_eps": config.numerics.norm_eps}


def stated_classes(settings: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The number of labels, if the model has a head."""
    names = settings.get("id2label")
    count = read_int(settings, "num_labels") or (len(names) if isinstance(names, dict) and names else None)
    return {"num_classes": count} if "classifier.weight" in tensors else {}


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
    """Parse a size: a side, [rows, columns] or {"height": rows, "width": columns}."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise CheckpointError(f"{key}={value!r} is not a size in pixels")
    return sides[0], sides[1]


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
    return tuple(f"LABEL_{index}" for index in range(count))


RESAMPLING: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "area"}
"""Pillow's filters by number, as in `resample`."""
SQUARE_PROCESSORS = ("ViT", "DeiT", "Beit")  # a single number is the side of a square; for others, the shorter side
NAFLEX = {"patch_size": 16, "max_num_patches": 256}  # defaults of SigLIP 2's processor


def read_preprocessor(settings: dict[str, Any], image_size: Size) -> Preprocess:
    """The preprocessing in `preprocessor_config.json`; by default a bilinear squash with mean and std 0.5."""
    if not settings.get("do_resize", True):
        reason = "preprocessor_config.json: do_resize is false, but images must be resized to the model's input"
        raise CheckpointError(reason, hint="set it to true, and state the size")
    try:
        # the file's mean and std are for bytes times `rescale_factor`, ours for values from 0 to 1
        factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
        scale = round(factor * 255, 9)
        mean: tuple[float, ...] = (0.0,) * 3
        std: tuple[float, ...] = (1.0,) * 3
        if settings.get("do_normalize", True):
            mean, std = (settings.get(key, (0.5,) * 3) for key in ("image_mean", "image_std"))
        mean, std = tuple(x / scale for x in mean), tuple(x / scale for x in std)
        interpolation = RESAMPLING[settings.get("resample", 2)]
        preprocess = Preprocess(image_size=image_size, interpolation=interpolation, mean=mean, std=std)
        return set_sizes(preprocess, settings)
    except (ConfigError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"preprocessor_config.json cannot be read: {error}") from error


def set_sizes(preprocess: Preprocess, settings: dict[str, Any]) -> Preprocess:
    """Add the sizes in the file: a squash, or the shorter side resized; then a center crop."""
    if "max_num_patches" in settings:  # each image keeps its aspect ratio
        return preprocess.replace(fit="naflex", **{key: settings.get(key, NAFLEX[key]) for key in NAFLEX})
    size = settings.get("size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else None
    crops = bool(settings.get("do_center_crop", "crop_size" in settings and shortest))
    if not crops and not shortest:
        return preprocess if size is None else preprocess.replace(image_size=read_size(size, "size"))
    scaled = read_size(shortest or size or preprocess.image_size, "size")
    crop = read_size(settings["crop_size"], "crop_size") if crops and "crop_size" in settings else scaled
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    is_square = not shortest and (isinstance(size, dict) or kind.startswith(SQUARE_PROCESSORS))
    fit, scaled_size = "squash" if is_square else "crop", tuple(map(max, scaled, crop))
    return preprocess.replace(image_size=crop, fit=fit, scaled_size=scaled_size, floor_crop=True)


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


QKV = ("query", "key", "value")


def add_missing_biases(tensors: Tensors, layers: Iterable[str]) -> None:
    """If one of these dense layers has a bias, add zeros for those that have none."""
    weights = {f"{layer}.bias": tensors.get(f"{layer}.weight") for layer in layers}
    if any(name in tensors for name in weights):
        missing = {name: weight for name, weight in weights.items() if name not in tensors and weight is not None}
        tensors.update({name: weight.new_zeros(len(weight)) for name, weight in missing.items() if weight.dim()})


class HuggingFaceViT(HuggingFace):
    """model_type `vit` and `deit`, and the encoders of `vit_mae`, `vit_msn` and `ijepa`."""

    model_types: ClassVar = {"vit": "ViT", "deit": "DeiT", "vit_mae": "ViTMAE", "vit_msn": "ViTMSN", "ijepa": "IJepa"}
    norm_eps = 1e-12
    table = TABLES["huggingface_vit"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        return super().claims(checkpoint) and not any(".layer_scale" in name for name in checkpoint.tensors)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        """None for `vit`: some need mean and std 0.5 (Google's), some those of ImageNet (DINO's)."""
        return None if self.kind_of(checkpoint) == "vit" else imagenet_preprocess(config.image_size)

    def model_type(self, config: ViTConfig) -> str:
        if not config.cls_token:
            return "ijepa"
        if config.distillation or config.reg_tokens:
            return "deit"
        same_shape = ("vit_msn",) if config.num_classes else ("vit_msn", "vit_mae")
        return self.kind if self.kind in same_shape else "vit"

    def prefix_rows(self, config: ViTConfig) -> int:
        return super().prefix_rows(config) + config.reg_tokens

    def rename_parameters(self, native: Tensors, config: ViTConfig) -> Tensors:
        return rename(native, [(r"^embed\.reg_tokens$", "embed.dist_token")])

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        renamed = super().from_table_names(tensors, config)
        return rename(renamed, [(r"^classifier\.", "cls_classifier.")]) if config.distillation else renamed

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        return settings | ({"mask_ratio": 0.0} if self.model_type(config) == "vit_mae" else {})


BIAS = "relative_position_bias.relative_position_bias_table"
SHARED_BIAS = f"encoder.{BIAS}"
SHARED_BIAS_IN_MEMORY = "shared_position_bias.relative_position_bias_table"


class HuggingFaceBeit(HuggingFace):
    """model_type `beit` and `data2vec-vision`: relative biases, and a norm after the mean of the patches."""

    model_types: ClassVar = {"beit": "Beit", "data2vec-vision": "Data2VecVision"}
    norm_eps = 1e-12
    preprocess: ClassVar = {"interpolation": "bicubic"}
    table = TABLES["huggingface_beit"]

    def claims(self, checkpoint: Checkpoint) -> bool:
        stated = self.config_of(checkpoint).get("model_type") in tuple(self.model_types)
        return super().claims(checkpoint) and (stated or any(BIAS in name for name in checkpoint.tensors))

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add zero biases for keys, and a bias table shared by all layers to each; drop the indices of older files."""
        for prefix, what in NAMES["other_heads"].items():
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
        facts, settings, names = super().facts(checkpoint, tensors), self.config_of(checkpoint), checkpoint.tensors
        is_mean = read_bool(settings, "use_mean_pooling") is not False
        has_norm = "layernorm.weight" in tensors
        has_pool_norm = any(name.endswith("pooler.layernorm.weight") for name in names)
        has_biases = any(BIAS in name for name in tensors)
        has_positions = "embeddings.position_embeddings" in tensors
        own_biases, shared_bias = f".attention.{BIAS}", (SHARED_BIAS, SHARED_BIAS_IN_MEMORY)
        present = {
            "use_relative_position_bias": any(own_biases in name for name in names),
            "use_shared_relative_position_bias": any(name.endswith(shared_bias) for name in names),
            "use_absolute_position_embeddings": has_positions,
        }
        check_settings({key: read_bool(settings, key) for key in present}, present)
        if has_biases and facts.image_size and facts.image_size[0] != facts.image_size[1]:
            reason = "relative biases of an image that is not square, whose table transformers reads as columns by rows"
            raise CheckpointError(reason)
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

    def model_type(self, config: ViTConfig) -> str:
        """data2vec's model without a head does not normalize the mean."""
        is_data2vec = self.kind == "data2vec-vision" and config.num_classes
        return "data2vec-vision" if is_data2vec or not config.final_norm else "beit"

    def has_position_array(self, config: ViTConfig) -> bool:
        return config.pos_embed not in ("relative_bias", "none")

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        """Drop the bias of keys: it is the same for every key, so it does not change the softmax."""
        state = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attention.key.bias")}
        if config.pool == "mean":
            state = rename(state, [(r"^layernorm\.", "pooler.layernorm.")])
        return super().from_table_names(state, config)

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        return super().config_json(config, labels) | {
            "use_mask_token": False,
            "use_absolute_position_embeddings": self.has_position_array(config),
            "use_relative_position_bias": config.pos_embed == "relative_bias",
            "use_shared_relative_position_bias": False,
            "layer_scale_init_value": 0.1 if config.layer_scale else 0.0,
            "drop_path_rate": config.drop_path,
            "use_mean_pooling": config.pool == "mean",
        }


REGISTERS = "embeddings.register_tokens"


def mlp_kind(settings: dict[str, Any], key: str) -> str | None:
    is_gated = read_bool(settings, key)
    return None if is_gated is None else "swiglu" if is_gated else "gelu"


class HuggingFaceDinoV2(HuggingFace):
    """model_type `dinov2` and `dinov2_with_registers`; the classifier reads class token and mean concatenated."""

    model_types: ClassVar = {"dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    norm_eps = 1e-6
    empty_tokens: ClassVar = REGISTERS  # an array that models without registers store
    table = TABLES["huggingface_dinov2"]

    def kind_of(self, checkpoint: Checkpoint) -> Any:
        registers = (tensor for name, tensor in checkpoint.tensors.items() if name.endswith(REGISTERS))
        usual = "dinov2_with_registers" if any(tensor.numel() for tensor in registers) else "dinov2"
        return self.config_of(checkpoint).get("model_type", usual)

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Drop the empty array that models without registers store."""
        return {name: tensor for name, tensor in tensors.items() if name != self.empty_tokens or tensor.numel()}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        rows, columns = facts.image_size or (1, 1)
        if rows != columns:
            raise CheckpointError(
                f"config.json: image_size={rows}x{columns} is not square, but DINOv2 in transformers reads positions "
                "as those of a square"
            )
        return facts

    def shape_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The MLP's width is stated as a ratio of the model's."""
        stated, ratio = super().shape_settings(settings), settings.get("mlp_ratio")
        mlp = mlp_kind(settings, "use_swiglu_ffn")
        is_stated = isinstance(ratio, int | float) and stated["width"] is not None and mlp is not None
        has_registers = settings.get("model_type") in ("dinov2_with_registers", *HuggingFaceTips.model_types)
        return stated | {
            "mlp": mlp,
            "mlp_dim": hidden_width(int(stated["width"] * ratio), gated=mlp == "swiglu") if is_stated else None,
            "reg_tokens": read_int(settings, "num_register_tokens", minimum=0) if has_registers else None,
        }

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        return imagenet_preprocess((224, 224))

    def model_type(self, config: ViTConfig) -> str:
        return "dinov2_with_registers" if config.reg_tokens else "dinov2"

    def obstacles(self, config: ViTConfig) -> list[str]:
        no_ratio = f"huggingface's DINOv2 has no MLP of {config.mlp_dim} at a width of {config.width}"
        return super().obstacles(config) + ([no_ratio] if mlp_ratio(config) is None else [])

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        mask = tensors["embeddings.cls_token"].new_zeros(1, config.width)
        renamed = super().from_table_names(tensors | {"embeddings.mask_token": mask}, config)
        gated = [(r"\.fc1\.", ".weights_in."), (r"\.fc2\.", ".weights_out.")]
        return rename(renamed, gated) if config.mlp == "swiglu" else renamed

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        del settings["intermediate_size"]
        settings |= {"use_swiglu_ffn": config.mlp == "swiglu", "mlp_ratio": mlp_ratio(config)}
        has_registers = config.reg_tokens or self.model_type(config) not in HuggingFaceDinoV2.model_types
        return settings | ({"num_register_tokens": config.reg_tokens} if has_registers else {})


class HuggingFaceTips(HuggingFaceDinoV2):
    """The image tower of `tipsv2`: DINOv2 with a register, in files with the names of its release."""

    model_types: ClassVar = {"tipsv2_vision_model": "Tipsv2Vision"}
    preprocess: ClassVar = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    empty_tokens = "reg_token"
    needs_type = True
    table = TABLES["tipsv2"]
    default_preprocess, model_type = HuggingFace.default_preprocess, HuggingFace.model_type

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        layers = ("w12", "w3") if config.mlp == "swiglu" else ("c_fc", "c_proj")
        rules = [(rf"\.mlp\.fc{i}\.", f".mlp.{layer}.") for i, layer in enumerate(layers, start=1)]
        token = tensors["cls_token"]
        state = {"reg_token": token.new_zeros(1, 0, config.width), "mask_token": token.new_zeros(1, config.width)}
        return rename(state | tensors, [*rules, ("^reg_token$", "register_tokens")])


def mlp_ratio(config: ViTConfig) -> int | None:
    """The integer from which transformers computes the width of DINOv2's MLP, or None."""
    widths = {ratio: hidden_width(config.width * ratio, gated=config.mlp == "swiglu") for ratio in range(1, 65)}
    return next((ratio for ratio, width in widths.items() if width == config.mlp_dim), None)


def hidden_width(hidden: int, *, gated: bool) -> int:
    return (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden


class HuggingFaceDinoV3(HuggingFace):
    """model_type `dinov3_vit`: rotary positions normalized to the image, registers, LayerScale."""

    model_types: ClassVar = {"dinov3_vit": "DINOv3ViT"}
    norm_eps = 1e-5
    default_heads = 6
    preprocess: ClassVar = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    table = TABLES["huggingface_dinov3"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Add missing biases, join gate and value, and drop the empty array of models without registers."""
        state = {name: tensor for name, tensor in tensors.items() if name != REGISTERS or tensor.numel()}
        layers = {f"{part}_bias": f"attention.attention.{part}" for part in QKV}
        layers |= {"proj_bias": "attention.output.dense", "mlp_bias": "mlp.down_proj"}
        biases = {key: f"layer.0.{layer}.bias" in state for key, layer in layers.items()}
        check_settings({key: read_bool(self.config_of(checkpoint), key) for key in biases}, biases)
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

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        settings = self.config_of(checkpoint)
        if not settings:
            raise CheckpointError("weights without config.json, which states heads and rotary positions")
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

    def obstacles(self, config: ViTConfig) -> list[str]:
        temperature = config.rope.temperature if config.rope else 100.0
        rope = RopeConfig(kind="normalized", temperature=temperature, half=True)
        return find_obstacles(config, self.table.name, rope=rope)

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        """Split gate and value; add the mask token and registers, which are always stored."""
        state = dict(tensors)
        if config.mlp == "swiglu":
            for name in [name for name in state if ".mlp.up_proj." in name]:
                state[name.replace("up_proj", "gate_proj")], state[name] = state[name].chunk(2)
        token = state["embeddings.cls_token"]
        state.setdefault(REGISTERS, token.new_zeros(1, 0, config.width))
        rules = [(rf"\.attention\.attention\.{part}\.", f".attention.{part[0]}_proj.") for part in QKV]
        rules.append((r"\.attention\.output\.dense\.", ".attention.o_proj."))
        return rename(state, rules) | {"embeddings.mask_token": torch.zeros_like(token)}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        assert config.rope is not None
        settings = super().config_json(config, labels) | {f"{part}_bias": config.qkv_bias for part in QKV}
        settings |= {"num_register_tokens": config.reg_tokens, "rope_theta": config.rope.temperature}
        return settings | ({"use_gated_mlp": True, "hidden_act": "silu"} if config.mlp == "swiglu" else {})


class HuggingFaceSapiens(HuggingFaceDinoV3):
    """model_type `sapiens2`: DINOv3 with RMSNorm, normalized queries and keys, and keys that heads share."""

    model_types: ClassVar = {"sapiens2": "Sapiens2"}
    norm_eps = 1e-6
    default_heads = 16
    needs_type = True
    table = TABLES["sapiens2"]
    from_table_names = HuggingFace.from_table_names

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        state, heads = dict(tensors), read_int(self.config_of(checkpoint), "num_attention_heads", self.default_heads)
        for block in sorted({name.rpartition(".attn.")[0] for name in state if name.endswith(".attn.wq.weight")}):
            parts = [f"{block}.attn.{part}" for part in ("wq", "wk", "wv")]
            add_missing_biases(state, parts)
            rows = len(state[f"{parts[0]}.weight"])
            names = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
            state |= {name: repeat_for_heads(state[name], rows, heads) for name in names if name in state}
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        return replace(facts, settings=facts.settings | {"norm": "rms", "mlp_scale": False})

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        heads = {"num_key_value_heads_per_layer": [config.num_heads] * config.depth}
        return super().config_json(config, labels) | heads | {"rms_norm_eps": config.numerics.norm_eps}


class HuggingFaceAimv2(HuggingFace):
    """model_type `aimv2_vision_model` without a head; its features are the mean of the patches, as in timm."""

    model_types: ClassVar = {"aimv2_vision_model": "Aimv2Vision"}
    norm_eps = 1e-5
    default_heads = 8
    needs_type = True
    preprocess: ClassVar = {"fit": "crop", "interpolation": "bicubic", "mean": CLIP_MEAN, "std": CLIP_STD}
    table = TABLES["aimv2"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Attention and MLP may differ in whether they have biases; ours have them together."""
        state = dict(tensors)
        for layer in sorted({name.rpartition(".attention.")[0] for name in state if ".attention." in name}):
            dense = ("attention.out_proj", *(f"ffn.{part}_proj" for part in ("gate", "up", "down")))
            add_missing_biases(state, (f"{layer}.{name}" for name in dense))
        return state

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        if "head.cls_token" in tensors:
            reason = "its attention pooling has no queries, which is not supported"
            raise CheckpointError(reason, hint="save it with use_head=False, or use timm's aimv2_* architectures")
        if POSITION_ARRAY not in tensors:
            raise CheckpointError("fixed positions in the order of AIMv2 (is_native) are not supported")
        return replace(super().facts(checkpoint, tensors), settings={"norm": "rms", "pool": "mean"})

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        mlp = {"hidden_act": "silu", "mlp_bias": config.dense_bias, "use_head": False}
        return super().config_json(config, labels) | mlp | {"rms_norm_eps": config.numerics.norm_eps}


class HuggingFacePixio(HuggingFaceViT):
    """model_type `pixio`: a ViT with several class tokens, whose mean the features are."""

    model_types: ClassVar = {"pixio": "Pixio"}
    norm_eps = 1e-6
    default_heads = 16
    needs_type = True
    table = TABLES["pixio"]
    model_type, rename_parameters = HuggingFace.model_type, HuggingFace.rename_parameters

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Store the class tokens after the first as registers."""
        token = tensors["embeddings.cls_token"]
        return tensors | {"embeddings.cls_token": token[:, :1], "embeddings.register_tokens": token[:, 1:]}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        return replace(super().facts(checkpoint, tensors), settings={"pool": "prefix_mean"})

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        parts = [tensors[name] for name in ("embeddings.cls_token", "embeddings.register_tokens") if name in tensors]
        state = {name: tensor for name, tensor in tensors.items() if name != "embeddings.register_tokens"}
        state["embeddings.cls_token"] = torch.cat(parts, dim=1)
        return rename(state, [(r"\.layernorm_before\.", ".norm1."), (r"\.layernorm_after\.", ".norm2.")])

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        tokens = {"n_cls_tokens": config.prefix_tokens, "mlp_ratio": config.mlp_dim // config.width}
        return super().config_json(config, labels) | tokens


class HuggingFaceRadio(HuggingFace):
    """model_type `radio`: the features are some of its class tokens, concatenated; it normalizes pixels itself."""

    model_types: ClassVar = {"radio": "Radio"}
    norm_eps = 1e-6
    default_heads = 16
    needs_type = True
    table = TABLES["radio"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Move the class tokens that are read to the front, where `prefix_concat` reads them; others are registers."""
        state, channels = dict(tensors), read_int(self.config_of(checkpoint), "num_channels", 3) or 3
        tokens, kernel = state.pop("patch_generator.cls_token.token"), state["patch_embed.proj.weight"]
        read = state.pop("summary_idxs").tolist()
        if len({*read} & {*range(len(tokens))}) < len(read):
            raise CheckpointError(f"'summary_idxs' {read} are not indices of {len(tokens)} class tokens")
        tokens = tokens[read + [index for index in range(len(tokens)) if index not in read]][None]
        side = math.isqrt(kernel.shape[1] // channels)
        kernel = kernel.reshape(-1, channels, side, side)
        return state | {"cls_token": tokens[:, :1], "reg_token": tokens[:, 1:], "patch_embed.proj.weight": kernel}

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        side = read_int(self.config_of(checkpoint), "max_img_size", 2048) or 2048
        facts = super().facts(checkpoint, tensors)
        read = next(tensor for name, tensor in checkpoint.tensors.items() if name.endswith("summary_idxs"))
        settings = {"pool": "prefix_concat", "pool_tokens": len(read), "final_norm": False, "patch_bias": False}
        numerics = facts.numerics.replace(square_positions=True)
        return replace(facts, numerics=numerics, image_size=(side, side), settings=settings)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        stated = super().stated_preprocess(checkpoint, config)
        return None if stated is None else self.normalized(stated, checkpoint)

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        size = read_size(self.config_of(checkpoint).get("image_size", 224), "config.json: image_size")
        preprocess = Preprocess(image_size=size, interpolation="bicubic", mean=(0.0,) * 3, std=(1.0,) * 3)
        return self.normalized(preprocess, checkpoint)

    def normalized(self, outer: Preprocess, checkpoint: Checkpoint) -> Preprocess:
        """The preprocessing of a processor, followed by the normalization inside the model."""
        named = {name.rpartition(".")[2]: tensor for name, tensor in checkpoint.tensors.items()}
        mean, std = (named[key].flatten().tolist() for key in ("norm_mean", "norm_std"))
        means = tuple(m + s * inner for m, s, inner in zip(outer.mean, outer.std, mean))
        return outer.replace(mean=means, std=tuple(s * inner for s, inner in zip(outer.std, std)))

    def prefix_rows(self, config: ViTConfig) -> int:
        return 0

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        """Join the tokens; the processor normalizes, so the model's own mean is 0 and its std 1."""
        state, side = dict(tensors), (config.in_channels, 1, 1)
        tokens = [state.pop(name)[0] for name in ("cls_token", "reg_token") if name in state]
        state["patch_generator.cls_token.token"] = torch.cat(tokens)
        state["patch_generator.embedder.weight"] = state.pop("patch_embed.proj.weight").flatten(1)
        state["patch_generator.pos_embed"] = state.pop("pos_embed")
        inner = rename(state, [(r"\.ls([12])\.gamma$", r".layer_scale\1.lambda1"), ("^", "radio_model.model.")])
        identity = {"norm_mean": torch.zeros(side), "norm_std": torch.ones(side)}
        outer = {f"radio_model.input_conditioner.{name}": tensor for name, tensor in identity.items()}
        return inner | outer | {"radio_model.summary_idxs": torch.arange(config.pool_tokens)}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        tokens = {"num_cls_tokens": config.pool_tokens, "num_registers": config.prefix_tokens - config.pool_tokens}
        fixed = {"norm_mean": [0.0] * 3, "norm_std": [1.0] * 3, "mlp_ratio": config.mlp_dim / config.width}
        read = {"summary_idxs": [*range(config.pool_tokens)], "max_img_size": config.image_size[0]}
        return super().config_json(config, labels) | tokens | fixed | read


POSITION_ARRAY = "embeddings.position_embedding.weight"
CLIP, METACLIP = "clip_vision_model", "metaclip_2_vision_model"
SIGLIP = ("siglip_vision_model", "siglip2_vision_model")
UNREAD = "unread."  # prefix for arrays that models for image classification store but do not use


class HuggingFaceTower(HuggingFace):
    """The image towers of `clip`, `metaclip_2`, `siglip` and `siglip2`; CLIP's projection is the pre-logits layer."""

    model_types: ClassVar = {
        CLIP: "CLIPVision",
        METACLIP: "MetaClip2Vision",
        SIGLIP[0]: "SiglipVision",
        SIGLIP[1]: "Siglip2Vision",
    }
    norm_eps = 1e-5
    table = TABLES["huggingface_clip"]

    def join_arrays(self, tensors: Tensors, checkpoint: Checkpoint) -> Tensors:
        """Split the query from key and value in SigLIP's pooling; reshape SigLIP 2's patch embedding, a matrix.

        A classifier reads the mean of the patches: in SigLIP after the last norm, in CLIP before it.
        """
        state = dict(tensors)
        if "classifier.weight" in state:
            unread = ("head.",) if self.kind_of(checkpoint) in SIGLIP else ("head.", "post_layernorm.")
            state = {f"{UNREAD}{name}" if name.startswith(unread) else name: state[name] for name in state}
        for kind in ("weight", "bias"):
            joined = state.pop(f"head.attention.in_proj_{kind}", None)
            if joined is not None:
                width = len(joined) // 3
                state[f"head.attention.query.{kind}"] = joined[:width]
                state[f"head.attention.key_value.{kind}"] = joined[width:]
        channels = read_int(self.config_of(checkpoint), "num_channels", 3) or 3
        state[self.table.anchor] = as_kernel(state[self.table.anchor], channels)
        return state

    def kind_of(self, checkpoint: Checkpoint) -> Any:
        """The model type; if not stated, CLIP has a class token, and SigLIP 2 a matrix as patch embedding."""
        settings = self.config_of(checkpoint)
        if "model_type" in settings:
            return settings["model_type"]
        if any(name.endswith("embeddings.class_embedding") for name in checkpoint.tensors):
            return CLIP
        patch = (tensor for name, tensor in checkpoint.tensors.items() if name.endswith(self.table.anchor))
        return SIGLIP[any(tensor.dim() == 2 for tensor in patch)]

    def facts(self, checkpoint: Checkpoint, tensors: Tensors) -> Facts:
        facts = super().facts(checkpoint, tensors)
        kind, has_classifier = self.kind_of(checkpoint), "classifier.weight" in tensors
        pool = "map" if "head.probe" in tensors else "mean" if has_classifier or kind in SIGLIP else "token"
        settings = {"pool": pool, "projection": "visual_projection.weight" in tensors}
        settings["final_norm"] = not has_classifier or kind in SIGLIP
        shared = checkpoint.settings.get("config.json", {})  # of both towers
        stated = facts.stated | stated_classes(shared, tensors)
        if settings["projection"]:
            stated = stated | {"representation_size": read_int(shared, "projection_dim")}
        count, positions = read_int(self.config_of(checkpoint), "num_patches"), tensors.get(POSITION_ARRAY)
        if positions is not None and positions.dim() == 2:
            check_settings({"num_patches": count}, {"num_patches": len(positions)})
        return replace(facts, settings=settings, stated=stated, labels=read_labels(shared))

    def numerics_of(self, settings: dict[str, Any]) -> Numerics:
        is_siglip = settings.get("model_type") in SIGLIP
        activation, eps = ("gelu_pytorch_tanh", 1e-6) if is_siglip else ("quick_gelu", 1e-5)
        return super().numerics_of({"hidden_act": activation, "layer_norm_eps": eps} | settings)

    def stated_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess | None:
        preprocess = super().stated_preprocess(checkpoint, config)
        side = preprocess.patch_size if preprocess else None
        if side not in (None, config.patch_size):
            reason = f"preprocessor_config.json says patch_size={side}, the arrays have {config.patch_size}"
            raise CheckpointError(reason)
        return preprocess

    def default_preprocess(self, checkpoint: Checkpoint, config: ViTConfig) -> Preprocess:
        preprocess, kind = Preprocess(image_size=config.image_size), self.kind_of(checkpoint)
        if kind == SIGLIP[1]:
            return naflex_preprocess(preprocess, config)
        if kind == SIGLIP[0]:
            return preprocess.replace(interpolation="bicubic")
        return preprocess.replace(fit="crop", interpolation="bicubic", mean=CLIP_MEAN, std=CLIP_STD, floor_crop=True)

    def model_type(self, config: ViTConfig) -> str:
        """SigLIP 2 with NaFlex resamples positions differently; SigLIP 2 of one size is written as a SigLIP."""
        if config.pool != "map":
            return METACLIP if self.kind == METACLIP else CLIP
        is_naflex = config.numerics.position_resize == "bilinear_antialias" and config.grid[0] == config.grid[1]
        return SIGLIP[is_naflex]

    def obstacles(self, config: ViTConfig) -> list[str]:
        if config.pool == "map":
            return find_obstacles(config, "siglip")
        return find_obstacles(config, "clip", projection=bool(config.representation_size))

    def from_table_names(self, tensors: Tensors, config: ViTConfig) -> Tensors:
        state = dict(tensors)
        if self.model_type(config) == SIGLIP[1]:
            state[self.table.anchor] = as_matrix(state[self.table.anchor])
        for kind in ("weight", "bias"):
            if f"head.attention.query.{kind}" in state:
                parts = [state.pop(f"head.attention.{part}.{kind}") for part in ("query", "key_value")]
                state[f"head.attention.in_proj_{kind}"] = torch.cat(parts)
        return {name if name.startswith("visual_p") else f"vision_model.{name}": t for name, t in state.items()}

    def config_json(self, config: ViTConfig, labels: tuple[str, ...] | None) -> dict[str, Any]:
        settings = super().config_json(config, labels)
        if self.model_type(config) == SIGLIP[1]:
            del settings["image_size"]
            settings["num_patches"] = config.grid[0] * config.grid[1]
        return settings | ({"projection_dim": config.representation_size} if config.representation_size else {})

    def json_files(self, config: ViTConfig, meta: ModelMeta) -> dict[str, Any]:
        """Name the model type's own image processor, if it preprocesses like the general one."""
        processor = self.processor_preprocess(config, meta.preprocess)
        files = super().json_files(config, meta.replace(preprocess=processor))
        written = files.get("preprocessor_config.json")
        general, specific = NAMES["processors"].get(self.model_type(config), ("", ""))
        if written is not None and written["image_processor_type"] == general:
            written["image_processor_type"] = specific
        return files

    def reader_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        return super().reader_preprocess(config, self.processor_preprocess(config, preprocess))

    def processor_preprocess(self, config: ViTConfig, preprocess: Preprocess) -> Preprocess:
        """The preprocessing of the model type's processor: SigLIP 2's keeps the aspect ratio of each image."""
        if self.model_type(config) != SIGLIP[1] or preprocess.fit == "naflex":
            return preprocess
        return naflex_preprocess(preprocess.replace(scaled_size=None), config)


def naflex_preprocess(preprocess: Preprocess, config: ViTConfig) -> Preprocess:
    """Keep the aspect ratio of each image, with as many patches as the model has positions."""
    patches = config.grid[0] * config.grid[1]
    return preprocess.replace(fit="naflex", patch_size=config.patch_size, max_num_patches=patches)
