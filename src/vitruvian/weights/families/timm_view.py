"""The evaluation view in `pretrained_cfg` of timm's `config.json`: what it means, and how it is written."""

from __future__ import annotations

import math
from typing import Any, get_args

from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, Fit, Interpolation, ModelConfig, Preprocess
from vitruvian.errors import CheckpointError
from vitruvian.settings import Size
from vitruvian.weights.files import Checkpoint

INTERPOLATIONS = {"area": "box"}
"""What timm calls Pillow's filters by another name."""


VIEW = frozenset({"input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std"})


def published(checkpoint: Checkpoint) -> dict[str, Any]:
    """`pretrained_cfg` of a folder from timm's hub, or nothing; files of earlier versions are it themselves."""
    config = checkpoint.settings.get("config.json", {})
    earlier = config if "architecture" in config and config.keys() & VIEW else {}
    cfg = config.get("pretrained_cfg", earlier)
    return cfg if isinstance(cfg, dict) else {}


def published_labels(checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """What the classes are called: beside `pretrained_cfg`, inside it, or under the name of earlier versions."""
    config, cfg = checkpoint.settings.get("config.json", {}), published(checkpoint)
    found = (config.get("label_names"), cfg.get("label_names"), cfg.get("labels"))
    return next((tuple(map(str, labels)) for labels in found if isinstance(labels, list)), None)


def published_size(cfg: dict[str, Any]) -> tuple[int, Size] | None:
    """Channels of an image, and its rows and columns, where `pretrained_cfg` states them."""
    size = cfg.get("input_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 3 or not all(type(side) is int and side > 0 for side in size):
        raise CheckpointError(f"config.json: input_size {size!r} is not [channels, rows, columns]")
    return size[0], (size[1], size[2])


def published_view(cfg: dict[str, Any], size: Size) -> Preprocess:
    """The evaluation view that `pretrained_cfg` states."""
    theirs = cfg.get("interpolation") or "bicubic"
    interpolation = next((ours for ours, name in INTERPOLATIONS.items() if name == theirs), theirs)
    if interpolation not in get_args(Interpolation):
        raise CheckpointError(f"config.json: interpolation {interpolation!r} is not known")
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise CheckpointError(f"config.json: crop_mode {mode!r} is not known; 'center' and 'squash' are")
    try:
        view = crop_view(size, float(cfg.get("crop_pct") or 0.875), squash=mode == "squash")
        usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
        mean, std = (tuple(float(x) for x in cfg.get(key) or usual[key]) for key in usual)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: pretrained_cfg cannot be read: {error}") from error
    if view.fit == "crop" and view.scaled_size and view.scaled_size[0] != view.scaled_size[1]:
        interpolation = "bilinear"  # timm's code, whatever is stated
    return view.replace(interpolation=interpolation, mean=mean, std=std)


def crop_view(size: Size, share: float, *, squash: bool = False) -> Preprocess:
    """Bicubic; the center whose side is `share` of the scaled image."""
    if squash and share == 1.0:
        return Preprocess(image_size=size, interpolation="bicubic")
    scaled = int(size[0] / share), int(size[1] / share)
    fit: Fit = "squash" if squash else "crop"
    return Preprocess(image_size=size, fit=fit, scaled_size=scaled, interpolation="bicubic")


def stated_view(view: Preprocess, config: ModelConfig) -> dict[str, Any]:
    """The evaluation view in the words of `pretrained_cfg`; what they cannot say is left out."""
    settings: dict[str, Any] = {"input_size": [config.in_channels, *config.image_size]}
    if not view.stated:
        return settings
    return settings | {
        "interpolation": INTERPOLATIONS.get(view.interpolation, view.interpolation),
        "crop_pct": kept_share(view.image_size, view.scaled_size or view.image_size),
        "crop_mode": "center" if view.fit == "crop" else "squash",
        "mean": list(view.mean),
        "std": list(view.std),
    }


def kept_share(size: Size, scaled: Size) -> float:
    """The share with the fewest digits of which timm computes the scaled size."""
    for digits in range(1, 7):
        share = math.floor(size[0] / scaled[0] * 10**digits) / 10**digits
        if share and all(int(side / share) == wanted for side, wanted in zip(size, scaled)):
            return share
    return size[0] / (scaled[0] + 0.5)
