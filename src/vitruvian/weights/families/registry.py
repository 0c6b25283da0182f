"""The table of all families: recognize the family of a checkpoint, and choose the one to write."""

from __future__ import annotations

from pathlib import Path

from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import CheckpointError, UnknownNameError
from vitruvian.model.build import Model
from vitruvian.weights.checkpoint_files import Checkpoint
from vitruvian.weights.families.dino import Dino, DinoV2, DinoV3
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.google import BigVision, Bit, Google
from vitruvian.weights.families.huggingface import HuggingFace
from vitruvian.weights.families.huggingface_clip import HuggingFaceTower
from vitruvian.weights.families.huggingface_dino import HuggingFaceDinoV2, HuggingFaceDinoV3
from vitruvian.weights.families.huggingface_vit import HuggingFaceBeit, HuggingFaceViT
from vitruvian.weights.families.openclip import OpenClip, OpenClipTimm
from vitruvian.weights.families.timm import Timm, TimmBit
from vitruvian.weights.families.timm_writer import TimmArchitecture, TimmBitFolder
from vitruvian.weights.families.torchvision import Torchvision

READERS: dict[str, tuple[Family, ...]] = {
    # the first that claims a checkpoint reads it, so a family comes before one whose names include its names
    "google": (Google(), Bit()),
    "big_vision": (BigVision(),),
    "torchvision": (Torchvision(),),
    "huggingface": (
        HuggingFaceBeit(),
        HuggingFaceViT(),
        HuggingFaceDinoV2(),
        HuggingFaceDinoV3(),
        HuggingFaceTower(),
    ),
    "open_clip": (OpenClip(), OpenClipTimm()),
    "dino": (DinoV3(), DinoV2(), Dino()),
    "timm": (Timm(), TimmBit()),
}
"""Families by the name for `family=`; some have several kinds of files."""

WRITERS = ("native", "google", "timm", "torchvision", "huggingface")


def recognize(checkpoint: Checkpoint, family: str | None = None) -> Family:
    """The family whose names a checkpoint has, among those of `family` if given."""
    if family is not None and family not in READERS:
        raise UnknownNameError("family", family, READERS, see=f"(known: native, {', '.join(READERS)})")
    candidates = READERS[family] if family else [member for members in READERS.values() for member in members]
    for candidate in candidates:
        if candidate.claims(checkpoint):
            return candidate
    if family:  # two families may share names; the caller knows which one it is
        for candidate in reversed(candidates):
            if candidate.prefix(checkpoint.tensors) is not None:
                return candidate
        anchors = " or ".join(dict.fromkeys(repr(candidate.anchor) for candidate in candidates))
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


def writes_folders(family: str) -> bool:
    return not suffixes_of(family) or family == "timm"


def writer(family: str, model: Model, path: Path) -> Family:
    """The class that writes a model to this path."""
    config, members = model.config, READERS[family]
    if family == "timm":
        return timm_writer(model, folder=path.suffix not in suffixes_of(family))
    if family == "huggingface":
        kind = huggingface_kind(config) if isinstance(config, ViTConfig) else HuggingFaceViT
        return kind(model.meta.known_as.removeprefix("huggingface:"))
    return members[-1] if family == "google" and isinstance(config, ResNetConfig) else members[0]


def huggingface_kind(config: ViTConfig) -> type[HuggingFace]:
    """The class for the model types whose shape is this one, or closest."""
    if config.rope is not None:
        return HuggingFaceDinoV3
    if config.pre_norm or config.pool == "map":
        return HuggingFaceTower
    after_mean = config.pool == "mean" and config.cls_token and (config.norm_after_pool or not config.final_norm)
    if config.pos_embed == "relative_bias" or after_mean:
        return HuggingFaceBeit
    like_dinov2 = config.layer_scale or config.mlp == "swiglu" or config.pool == "token_mean"
    return HuggingFaceDinoV2 if like_dinov2 else HuggingFaceViT


def timm_writer(model: Model, *, folder: bool) -> Family:
    """Plain ViTs in files need no `config.json`; other models, and folders, are one of timm's architectures."""
    config, plain = model.config, Timm()
    if isinstance(config, ResNetConfig):
        return TimmBitFolder() if folder else TimmBit()
    if not folder and not any(plain.obstacles(config)):
        return plain
    known_as = model.meta.known_as.removeprefix("timm:")
    architecture = TimmArchitecture(config, model.state_dict(), known_as)
    return plain if not folder and architecture.choice is None else architecture
