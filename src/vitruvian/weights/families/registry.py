"""All families, and which of them a checkpoint belongs to."""

from __future__ import annotations

from vitruvian.config import ModelConfig, ResNetConfig
from vitruvian.errors import CheckpointError, UnknownNameError
from vitruvian.weights.families.bit import Bit, TimmBit
from vitruvian.weights.families.dino import Dino, DinoV2
from vitruvian.weights.families.dinov3 import DinoV3
from vitruvian.weights.families.family import Family
from vitruvian.weights.families.google import BigVision, Google
from vitruvian.weights.families.huggingface import HuggingFaceViT
from vitruvian.weights.families.huggingface_dinov3 import HuggingFaceDinoV3
from vitruvian.weights.families.huggingface_kinds import HuggingFaceBeit, HuggingFaceDinoV2
from vitruvian.weights.families.huggingface_towers import HuggingFaceTower
from vitruvian.weights.families.openclip import OpenClip, OpenClipTimm
from vitruvian.weights.families.timm import Timm
from vitruvian.weights.families.torchvision import Torchvision
from vitruvian.weights.files import Checkpoint

VIT, DINOV2, DINOV3, TOWER = HuggingFaceViT(), HuggingFaceDinoV2(), HuggingFaceDinoV3(), HuggingFaceTower()

READERS: dict[str, tuple[Family, ...]] = {
    # the first that claims a checkpoint has it: a family stands before one whose names include its own
    "google": (Google(), Bit()),
    "big_vision": (BigVision(),),
    "torchvision": (Torchvision(),),
    "huggingface": (HuggingFaceBeit(), VIT, DINOV2, DINOV3, TOWER),
    "open_clip": (OpenClip(), OpenClipTimm()),
    "dino": (DinoV3(), DinoV2(), Dino()),
    "timm": (Timm(), TimmBit()),
}
"""Foreign families by the name that `family=` takes; some have more than one sort of file."""

WRITERS = ("native", "google", "timm", "torchvision", "huggingface")


def recognize(checkpoint: Checkpoint, family: str | None = None) -> Family:
    """The family whose names a checkpoint has; `family` narrows the choice to one."""
    if family is not None and family not in READERS:
        raise UnknownNameError("family", family, READERS, see=f"(known: native, {', '.join(READERS)})")
    candidates = READERS[family] if family else [member for members in READERS.values() for member in members]
    for candidate in candidates:
        if candidate.claims(checkpoint):
            return candidate
    if family:  # names alone would say another family of the same names, but the caller knows
        for candidate in reversed(candidates):
            if candidate.prefix(checkpoint.tensors) is not None:
                return candidate
        wanted = " or ".join(dict.fromkeys(repr(candidate.anchor) for candidate in candidates))
        raise CheckpointError(f"not {family} weights: {wanted} is missing")
    sample = ", ".join(repr(name) for name in list(checkpoint.tensors)[:3])
    raise CheckpointError(
        f"the {len(checkpoint.tensors)} names inside ({sample}, ...) are those of no known family: {', '.join(READERS)}"
    )


def check_writer(family: str) -> None:
    if family not in WRITERS:
        raise UnknownNameError("family to write", family, WRITERS, see=f"(known: {', '.join(WRITERS)})")


def writer(family: str, config: ModelConfig) -> Family:
    """The member of a foreign family that a model of this shape would be written as."""
    members = READERS[family]
    if isinstance(config, ResNetConfig):
        return members[-1] if family in ("google", "timm") else members[0]
    if family == "huggingface":
        if config.rope is not None:
            return DINOV3
        if config.pre_norm or config.pool == "map":
            return TOWER
        like_dinov2 = config.layer_scale or config.mlp == "swiglu" or config.pool == "token_mean"
        return DINOV2 if like_dinov2 else VIT
    return members[0]
