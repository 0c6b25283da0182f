"""Folders of Hugging Face transformers: the base of all model types, and their JSON files."""

from typing import Any, ClassVar

from vitruvian.config import NUMERICS, Interpolation, ModelMeta, Numerics, Preprocess, ViTConfig
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.model.text_tower import TextConfig
from vitruvian.settings import Size
from vitruvian.text import package_table
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.family import Facts, Family
from vitruvian.weights.families.tables import Tensors

NAMES = package_table("weights/families/huggingface.toml")
DEFAULT_DEPTH = 12  # `num_hidden_layers` of all these model types if `config.json` does not state it
ENCODER_SETTINGS, IMAGE_SETTINGS, ACTIVATIONS = NAMES["encoder"], NAMES["image"], NAMES["activations"]


class HuggingFace(Family[ViTConfig]):
    """Base class of all model types; the epsilon of norms and the GELU come from `config.json`."""

    name = "huggingface"
    numerics = NUMERICS["huggingface"]
    model_types: ClassVar[dict[str, str]]  # model types, and how their classes begin in transformers
    norm_eps: ClassVar[float]  # default of the model type's configuration
    default_heads = 12

    def __init__(self, kind: str = "") -> None:
        """`kind` is the former model type of a model to be written, if several have the same shape."""
        self.kind = kind

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
        activation = settings.get("hidden_act", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise CheckpointError(f"config.json: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS)}")
        eps = settings.get("layer_norm_eps", self.norm_eps)
        if not isinstance(eps, float | int):
            raise CheckpointError(f"config.json: layer_norm_eps={eps!r} is not a number")
        return self.numerics.replace(gelu=ACTIVATIONS[activation], norm_eps=float(eps))

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
        """`config.json` as transformers writes it."""
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
    """The names that transformers gives to unnamed classes."""
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
