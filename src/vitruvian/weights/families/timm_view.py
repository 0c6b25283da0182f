"""The evaluation view in `pretrained_cfg` of timm's `config.json`: what it means, and how it is written."""

from __future__ import annotations

import math
from typing import Any, get_args

from vitruvian.config import Fit, Interpolation, ModelConfig, Preprocess
from vitruvian.errors import CheckpointError
from vitruvian.settings import Size
from vitruvian.weights.files import Checkpoint

INTERPOLATIONS = {"area": "box"}
"""What timm calls Pillow's filters by another name."""


def published(checkpoint: Checkpoint) -> dict[str, Any]:
    """`pretrained_cfg` of a folder from timm's hub, or nothing."""
    cfg = checkpoint.settings.get("config.json", {}).get("pretrained_cfg")
    return cfg if isinstance(cfg, dict) else {}


def published_view(cfg: dict[str, Any], size: Size) -> Preprocess:
    """The evaluation view that `pretrained_cfg` states."""
    theirs = cfg.get("interpolation", "bicubic")
    interpolation = next((ours for ours, name in INTERPOLATIONS.items() if name == theirs), theirs)
    if interpolation not in get_args(Interpolation):
        raise CheckpointError(f"config.json: interpolation {interpolation!r} is not known")
    mode = cfg.get("crop_mode") or "center"
    if mode not in ("center", "squash"):
        raise CheckpointError(f"config.json: crop_mode {mode!r} is not known; 'center' and 'squash' are")
    try:
        view = crop_view(size, float(cfg.get("crop_pct") or 0.9), squash=mode == "squash")
        mean, std = (tuple(float(x) for x in cfg.get(key) or (0.5, 0.5, 0.5)) for key in ("mean", "std"))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: pretrained_cfg cannot be read: {error}") from error
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
    settings: dict[str, Any] = {"input_size": [config.channels, *config.image_size]}
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
