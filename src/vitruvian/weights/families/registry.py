"""The table of all families: recognize the family of a checkpoint, and choose the one to write."""

from pathlib import Path
from typing import Any

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, UnknownNameError
from vitruvian.model.build import Model
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families import google, huggingface, openclip, timm
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.tables import REFUSED

READERS: dict[str, tuple[Family[Any], ...]] = {
    # the first that claims a checkpoint reads it, so a family comes before one whose names include its names
    "google": (google.Lit(), google.Google(), google.GoogleMixer(), google.Bit()),
    "big_vision": (google.BigVision(),),
    "torchvision": (timm.Torchvision(),),
    "huggingface": (
        huggingface.HuggingFaceTips(),
        huggingface.HuggingFaceSapiens(),
        huggingface.HuggingFaceAimv2(),
        huggingface.HuggingFacePixio(),
        huggingface.HuggingFaceRadio(),
        huggingface.HuggingFaceBeit(),
        huggingface.HuggingFaceViT(),
        huggingface.HuggingFaceDinoV2(),
        huggingface.HuggingFaceDinoV3(),
        huggingface.HuggingFaceTower(),
    ),
    "open_clip": (openclip.OpenClip(), openclip.OpenClipTimm()),
    "dino": (timm.DinoV3(), timm.DinoV2(), timm.Dino()),
    "timm": (timm.Timm(), timm.TimmMixer(), timm.TimmBit()),
}
"""Families by the name for `family=`; some have several kinds of files."""

WRITERS = ("native", "google", "timm", "torchvision", "huggingface")


def recognize(checkpoint: Checkpoint, family: str | None = None) -> Family[Any]:
    """The family whose names a checkpoint has, among those of `family` if given."""
    if family is not None and family not in READERS:
        raise UnknownNameError("family", family, READERS, see=f"(known: native, {', '.join(READERS)})")
    kind = checkpoint.settings.get("config.json", {}).get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        raise CheckpointError(f"config.json: model_type {kind!r} is not supported: {REFUSED[kind]}")
    candidates = READERS[family] if family else [member for members in READERS.values() for member in members]
    for candidate in candidates:
        if candidate.claims(checkpoint):
            return candidate
    if family:  # two families may share names; the caller knows which one it is
        for candidate in reversed(candidates):
            if candidate.prefix(checkpoint.tensors) is not None:
                return candidate
        anchors = " or ".join(dict.fromkeys(repr(candidate.table.anchor) for candidate in candidates))
        raise CheckpointError(f"not {family} weights: {anchors} is missing")
    sample = ", ".join(repr(name) for name in list(checkpoint.tensors)[:3])
    raise CheckpointError(
        f"the {len(checkpoint.tensors)} names inside ({sample}, ...) belong to no known family: {', '.join(READERS)}"
    )


def check_writer(family: str) -> None:
    if family not in WRITERS:
        raise UnknownNameError("family to write", family, WRITERS, see=f"(known: {', '.join(WRITERS)})")


def suffixes_of(family: str) -> tuple[str, ...]:
    """File name endings for writing a family; empty if it is always a folder."""
    return () if family == "native" else READERS[family][0].suffixes


def writer(family: str, model: Model, path: Path) -> Family[Any]:
    """The class that writes a model to this path."""
    config, kind = model.config, model.meta.known_as.partition(":")[2]
    is_folder = path.suffix not in suffixes_of(family)
    if isinstance(config, ResNetConfig):
        return timm.TimmBit(folder=is_folder) if family == "timm" else READERS[family][-1 if family == "google" else 0]
    if config.attention == "mixer" and family in ("google", "timm"):
        return timm.TimmMixer(folder=is_folder) if family == "timm" else google.GoogleMixer()
    if family == "google":
        return google.Google()
    if family == "huggingface":
        is_tips = kind in huggingface.HuggingFaceTips.model_types and not config.num_classes
        return huggingface.HuggingFaceTips(kind) if is_tips else huggingface_kind(config)(kind)
    # plain ViTs in files need no `config.json`
    if family != "timm" or not (is_folder or timm.Timm().obstacles(config)):
        return READERS[family][0]
    architecture = timm.TimmArchitecture(config, model.state_dict(), kind)
    return timm.Timm() if architecture.reasons and not is_folder else architecture


def huggingface_kind(config: ViTConfig) -> type[huggingface.HuggingFace]:
    """The transformers class whose model types match this architecture best."""
    if config.pool in ("prefix_mean", "prefix_concat"):
        return huggingface.HuggingFacePixio if config.pool == "prefix_mean" else huggingface.HuggingFaceRadio
    if config.norm == "rms":
        return huggingface.HuggingFaceSapiens if config.rope is not None else huggingface.HuggingFaceAimv2
    if config.rope is not None:
        return huggingface.HuggingFaceDinoV3
    if config.pre_norm or config.pool == "map":
        return huggingface.HuggingFaceTower
    after_mean = config.pool == "mean" and config.cls_token and (config.norm_after_pool or not config.final_norm)
    if config.pos_embed == "relative_bias" or after_mean:
        return huggingface.HuggingFaceBeit
    like_dinov2 = config.layer_scale or config.mlp == "swiglu" or config.pool == "token_mean"
    return huggingface.HuggingFaceDinoV2 if like_dinov2 else huggingface.HuggingFaceViT
