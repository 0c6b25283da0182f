"""The JSON files of a Hugging Face folder: what they mean, and how they are written."""

from __future__ import annotations

from typing import Any

from vitruvian.config import Gelu, Interpolation, Preprocess
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.settings import Size

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
"""Pillow's numbers, which `resample` holds."""


def number(settings: dict[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int | None:
    """A positive whole number of a JSON file; `default` where the file leaves it out, None where there is no file."""
    if not settings:
        return None
    value = settings.get(key, default)
    if value is None:
        return None
    if isinstance(value, list) and value and value[1:] == value[:-1]:  # both sides of a square
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {key}={value!r} is not a positive whole number")
    return value


def flag(settings: dict[str, Any], key: str) -> bool | None:
    """True or false of a JSON file; None where the file leaves it out."""
    value = settings.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(f"config.json: {key}={value!r} is neither true nor false")
    return value


def size(value: Any, key: str) -> Size:
    """A side, [rows, columns] or {"height": rows, "width": columns}."""
    if isinstance(value, dict):
        value = [value.get("height"), value.get("width")]
    pair = value if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise CheckpointError(f"{key}={value!r} is not a size in pixels")
    return pair[0], pair[1]


def image_size_of(settings: dict[str, Any]) -> Size | None:
    return None if settings.get("image_size") is None else size(settings["image_size"], "config.json: image_size")


def labels_of(settings: dict[str, Any]) -> tuple[str, ...] | None:
    """`id2label` in order; None where it is absent or only numbers the classes (`LABEL_0`)."""
    table = settings.get("id2label")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise CheckpointError(f"config.json: id2label is a {type(table).__name__}, not an object of numbers and names")
    try:
        names = tuple(str(table[key]) for key in sorted(table, key=int))
        numbered = sorted(map(int, table)) == list(range(len(table)))
    except ValueError as error:
        raise CheckpointError(f"config.json: id2label has a key that is not a number: {error}") from error
    if not numbered:
        raise CheckpointError("config.json: id2label does not number the classes from 0 without gaps")
    return None if names == generic_labels(len(names)) else names


def generic_labels(count: int) -> tuple[str, ...]:
    """The names transformers gives to classes that nobody named."""
    return tuple(f"LABEL_{index}" for index in range(count))


def preprocess_of(settings: dict[str, Any], image_size: Size) -> Preprocess:
    """The view of `preprocessor_config.json`; where the file is missing or silent, a bilinear squash with 0.5."""
    if not settings.get("do_resize", True):
        raise CheckpointError(
            "preprocessor_config.json: do_resize is false, and images of other sizes than the model's are not known to "
            "fit; set it to true, with the size that the images are to have"
        )
    try:
        mean, std = statistics(settings)
        way = RESAMPLING[settings.get("resample", 2)]
        return fitted(Preprocess(image_size=image_size, interpolation=way, mean=mean, std=std), settings)
    except (ConfigError, KeyError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"preprocessor_config.json cannot be read: {error}") from error


def statistics(settings: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std for values between 0 and 1; `rescale_factor` takes a byte to what the file's own refer to."""
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    scale = round(factor * 255, 9)
    if not settings.get("do_normalize", True):
        return (0.0,) * 3, (1.0 / scale,) * 3
    mean, std = (settings.get(key, (0.5,) * 3) for key in ("image_mean", "image_std"))
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


SQUARE = ("ViT", "DeiT", "Beit")
"""Processors for which a single number is the side of a square; for others, it is the shorter side."""


NAFLEX = {"patch_size": 16, "max_num_patches": 256}
"""What SigLIP 2's processor means where its file does not say."""


def fitted(view: Preprocess, settings: dict[str, Any]) -> Preprocess:
    """`view` with the sizes of the file: a squash, or the shorter side scaled; then the center is cut."""
    if "max_num_patches" in settings:  # each image keeps its shape
        limits = {key: settings.get(key, usual) for key, usual in NAFLEX.items()}
        return view.replace(fit="naflex", **limits)
    wanted = settings.get("size")
    shortest = wanted.get("shortest_edge") if isinstance(wanted, dict) else None
    cuts = bool(settings.get("do_center_crop", "crop_size" in settings and shortest))
    if not cuts and not shortest:
        return view if wanted is None else view.replace(image_size=size(wanted, "size"))
    scaled = size(shortest or wanted or view.image_size, "size")
    cut = size(settings["crop_size"], "crop_size") if cuts and "crop_size" in settings else scaled
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type"))
    square = not shortest and (isinstance(wanted, dict) or kind.startswith(SQUARE))
    return view.replace(
        image_size=cut,
        fit="squash" if square else "crop",
        scaled_size=tuple(map(max, scaled, cut)),
        floor_crop=True,
    )


def preprocessor_json(view: Preprocess) -> dict[str, Any]:
    """`preprocessor_config.json` for a view; what transformers cannot say (no antialiasing) is left out."""
    rows, columns = view.image_size
    settings: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(view.mean),
        "image_std": list(view.std),
        "resample": next(code for code, name in RESAMPLING.items() if name == view.interpolation),
    }
    if view.fit == "naflex":
        limits = {key: getattr(view, key) for key in NAFLEX}
        return settings | {"image_processor_type": "Siglip2ImageProcessor"} | limits
    height, width = view.scaled_size or view.image_size
    if view.fit == "squash" and (height, width) == (rows, columns):
        return settings | {"image_processor_type": "ViTImageProcessor", "size": {"height": rows, "width": columns}}
    squash = {"image_processor_type": "DeiTImageProcessor", "size": {"height": height, "width": width}}
    crop = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": max(height, width)}}
    cut = {"do_center_crop": True, "crop_size": {"height": rows, "width": columns}}
    return settings | (squash if view.fit == "squash" else crop) | cut
