"""Models by name: the table of variants, the weights that others published, and the classes of ImageNet.

The rows of `published.csv` come from the checkpoint lists of google-research/vision_transformer, big_transfer and
big_vision, the configurations inside timm 1.0.30 and torchvision, and the model cards on Hugging Face. A repository or
URL that is not in the table works too (see `vitruvian.weights.hub`); the table is what can be listed and suggested.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from vitruvian.config import (
    CLIP_NUMERICS,
    DINO_NUMERICS,
    DINOV3_NUMERICS,
    HUGGINGFACE_NUMERICS,
    SIGLIP_NUMERICS,
    TIMM_NUMERICS,
    ModelConfig,
    ResNetConfig,
    RopeConfig,
    StemConfig,
    ViTConfig,
)
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.settings import Size

SIZES: dict[str, tuple[str, int, int, int, int]] = {
    # our letter: the word that other projects use, depth, width, mlp_dim, num_heads
    "Ti": ("tiny", 12, 192, 768, 3),
    "S": ("small", 12, 384, 1536, 6),
    "M": ("medium", 12, 512, 2048, 8),
    "B": ("base", 12, 768, 3072, 12),
    "L": ("large", 24, 1024, 4096, 16),
    "H": ("huge", 32, 1280, 5120, 16),
    "g": ("giant", 40, 1408, 6144, 16),
    "G": ("gigantic", 48, 1664, 8192, 16),
}

OTHER_SIZES: dict[str, tuple[str, int, int, int, int]] = {
    # sizes of a single kind of model
    "So400m": ("so400m", 27, 1152, 4304, 16),
    "g-opt": ("giant_opt", 40, 1536, 6144, 16),
    "S+": ("small_plus", 12, 384, 1536, 6),
    "H+": ("huge_plus", 32, 1280, 5120, 20),
    "7B": ("7b", 40, 4096, 8192, 32),
}

PATCHES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Ti", "S", "B", "L", "H"), (8, 14, 16, 32)),
    "M": (16, 32),
    "g": (14,),
    "G": (14,),
}

HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    # name: size of the Transformer, units in the stem's stages, patch on the stem's features
    "R+ViT-Ti/16": (
        "Ti",
        (),
        8,
    ),  # the name in the release, although root and patch together have a stride of 32 pixels
    "R26+ViT-S/32": ("S", (2, 2, 2, 2), 1),
    "R26+ViT-B/32": ("B", (2, 2, 2, 2), 1),
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
}

RESNETS: dict[str, tuple[tuple[int, ...], int]] = {
    # name: units in the stages, width factor
    "BiT-R50x1": ((3, 4, 6, 3), 1),
    "BiT-R50x3": ((3, 4, 6, 3), 3),
    "BiT-R101x1": ((3, 4, 23, 3), 1),
    "BiT-R101x3": ((3, 4, 23, 3), 3),
    "BiT-R152x2": ((3, 8, 36, 3), 2),
    "BiT-R152x4": ((3, 8, 36, 3), 4),
}


def shape(size: str, patch_size: int) -> ViTConfig:
    """The plain ViT of this size, as the paper's release configures it."""
    _, layers, width, mlp_width, heads = (SIZES | OTHER_SIZES)[size]
    return ViTConfig(depth=layers, width=width, mlp_dim=mlp_width, num_heads=heads, patch_size=patch_size)


def _variants() -> dict[str, ModelConfig]:
    table: dict[str, ModelConfig] = {}
    for size, patches in PATCHES.items():
        for patch in patches:
            table[f"ViT-{size}/{patch}"] = shape(size, patch)
    for name, (size, stages, patch) in HYBRIDS.items():
        table[name] = shape(size, patch).replace(stem=StemConfig(stages=stages))
    for name, (stages, factor) in RESNETS.items():
        table[name] = ResNetConfig(stages=stages, width=64 * factor)
    for size in ("Ti", "S", "B"):
        plain = shape(size, 16).replace(numerics=TIMM_NUMERICS)
        table[f"DeiT-{size}/16"] = plain
        table[f"DeiT-{size}/16-distilled"] = plain.replace(distillation=True)
    for size, patch in (("S", 16), ("M", 16), ("B", 16), ("L", 16), ("H", 14)):
        changes = {"layer_scale": True, "cls_pos_embed": False, "numerics": TIMM_NUMERICS}
        table[f"DeiT-III-{size}/{patch}"] = shape(size, patch).replace(**changes)
    for size, patch in (("S", 8), ("S", 16), ("B", 8), ("B", 16)):
        table[f"DINO-{size}/{patch}"] = shape(size, patch).replace(num_classes=0, numerics=DINO_NUMERICS)
    for size in ("S", "B", "L"):
        changes = {"num_classes": 0, "layer_scale": True, "image_size": (518, 518), "numerics": DINO_NUMERICS}
        table[f"DINOv2-{size}/14"] = shape(size, 14).replace(**changes)
    for size, patch in (("B", 32), ("B", 16), ("L", 14), ("H", 14)):
        changes = {"num_classes": 0, "pre_norm": True, "patch_bias": False, "numerics": CLIP_NUMERICS}
        table[f"CLIP-{size}/{patch}"] = shape(size, patch).replace(**changes)
    siglip = (("B", 16), ("B", 32), ("L", 16), ("So400m", 14), ("So400m", 16), ("g-opt", 16))
    for size, patch in siglip:
        changes = {"num_classes": 0, "pool": "map", "cls_token": False, "numerics": SIGLIP_NUMERICS}
        table[f"SigLIP-{size}/{patch}"] = shape(size, patch).replace(**changes, trim=patch == 14)
    for size, patch in (("H", 14), ("H", 16), ("g", 16)):
        changes = {"num_classes": 0, "pool": "mean", "cls_token": False, "numerics": HUGGINGFACE_NUMERICS}
        table[f"I-JEPA-{size}/{patch}"] = shape(size, patch).replace(**changes)
    for size in ("B", "L"):
        relative = {"pos_embed": "relative_bias", "pool": "mean", "norm_after_pool": True, "layer_scale": True}
        table[f"BEiT-{size}/16"] = shape(size, 16).replace(**relative, numerics=HUGGINGFACE_NUMERICS)
    for size in ("S", "S+", "B", "L", "H+", "7B"):
        rope = RopeConfig(kind="normalized", temperature=100.0, half=True)
        changes = {"num_classes": 0, "layer_scale": True, "reg_tokens": 4, "pos_embed": "none", "rope": rope}
        changes |= {"mlp": "gelu" if size in ("S", "B", "L") else "swiglu", "qkv_bias": size != "7B"}
        table[f"DINOv3-{size}/16"] = shape(size, 16).replace(**changes, numerics=DINOV3_NUMERICS)
    table |= _eva02()
    giant = shape("B", 14).replace(depth=40, width=1536, mlp_dim=4096, num_heads=24, mlp="swiglu")
    table["DINOv2-g/14"] = giant.replace(num_classes=0, layer_scale=True, image_size=(518, 518), numerics=DINO_NUMERICS)
    return table


def _eva02() -> dict[str, ModelConfig]:
    """EVA-02 at the size of its pre-training; the larger ones normalize inside the MLP."""
    rope = RopeConfig(temperature=10_000.0, reference_grid=(16, 16))
    table: dict[str, ModelConfig] = {}
    for size, mlp_width in (("Ti", 512), ("S", 1024), ("B", 2048), ("L", 2730)):
        parts = {"rope": rope, "mlp": "swiglu", "mlp_norm": size in ("B", "L"), "pool": "mean", "norm_after_pool": True}
        table[f"EVA-02-{size}/14"] = shape(size, 14).replace(**parts, mlp_dim=mlp_width, numerics=TIMM_NUMERICS)
    return table


VARIANTS: dict[str, ModelConfig] = _variants()
"""Our name of a model -> its config, with 1000 classes and the image size it was published for."""


def _fold(name: str) -> str:
    """A name without case and punctuation: `ViT-B/16` and `vit_b_16` are both `vitb16`."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _other_names(variant: str) -> list[str]:
    """Names of a variant in timm, torchvision, Hugging Face, Google and Facebook, without image size and tag."""
    if variant.startswith("BiT-"):
        short = variant.removeprefix("BiT-")
        return [short, f"BiT-S-{short}", f"BiT-M-{short}", f"resnetv2_{short[1:]}_bit", f"resnetv2_{short[1:]}_bitm"]
    match = re.fullmatch(r"(.*?)(Ti|S\+?|M|B|L|H\+?|g-opt|g|G|So400m|7B)/(\d+)(-distilled)?", variant)
    assert match, variant
    kind, size, patch, distilled = match.groups()
    word = (SIZES | OTHER_SIZES)[size][0]
    if "+" in kind:
        stem = kind.split("+")[0]
        tail = "_p8" if stem == "R" else ""
        return [f"{stem}_{size}_{patch}", f"{stem}+{size}/{patch}", f"vit_{word}_{stem}_s{patch}{tail}"]
    return {
        "ViT-": [f"{size}/{patch}", f"vit_{word}_patch{patch}"],
        "DeiT-": [f"deit_{word}_{'distilled_' if distilled else ''}patch{patch}"],
        "DeiT-III-": [f"deit3_{word}_patch{patch}"],
        "CLIP-": [f"clip_vit_{word}_patch{patch}", f"vit_{word}_patch{patch}_clip"],
        "SigLIP-": [f"{kind}_{word}_patch{patch}" for kind in ("siglip", "siglip2")]
        + [f"vit_{word}_patch{patch}_siglip"],
        "I-JEPA-": [f"ijepa_vit{size}{patch}"],
        "EVA-02-": [f"eva02_{word}_patch{patch}"],
        "BEiT-": [f"beit_{word}_patch{patch}"],
        "DINOv3-": [f"dinov3_vit{size}{patch}", f"vit_{word}_patch{patch}_dinov3"],
        "DINO-": [f"dino_vit{size}{patch}", f"vit_{word}_patch{patch}_dino"],
        "DINOv2-": [f"dinov2_{word}", f"dinov2_vit{size}{patch}", f"vit_{word}_patch{patch}_dinov2"],
    }[kind]


def _aliases() -> dict[str, str]:
    table: dict[str, str] = {}
    for variant in VARIANTS:
        for name in (variant, *_other_names(variant)):
            table.setdefault(_fold(name), variant)
    return table


ALIASES: dict[str, str] = _aliases()
"""Folded name in any library -> our name. `g` (giant) precedes `G` (gigantic), whose case must match."""


def canonical(name: str) -> tuple[str, Size | None]:
    """Our name of a model by any of its names, and the image size that the name contains, if any.

    Accepts `ViT-B/16`, `vit_b_16`, `vit_base_patch16_384`, `google/vit-base-patch16-224-in21k` and the like.
    """
    if name in VARIANTS:
        return name, None
    text = name.strip().split("/")[-1] if re.match(r"^[\w.-]+/[A-Za-z]", name.strip()) else name.strip()
    text = re.sub(r"\.(?!\d)[\w.]*$", "", text)  # timm's tag, a file's ending
    text = re.sub(r"[-_](in21k|in22k|ft|in1k|imagenet1k|imagenet21k).*$", "", text, flags=re.IGNORECASE)
    size: Size | None = None
    trailing = re.search(r"[-_](\d{3})$", text)
    if trailing:
        text, side = text[: trailing.start()], int(trailing.group(1))
        size = (side, side)
    for exact in (text, text.replace("_", "/")):
        if exact in VARIANTS:
            return exact, size
    variant = ALIASES.get(_fold(text))
    if variant is None:
        others = [other for known in VARIANTS for other in _other_names(known)]
        raise UnknownNameError("model", name, [*VARIANTS, *others], see="(see `vit models`)")
    return variant, size


def resolve(name: str) -> ModelConfig:
    """The config of a model by any of its names, at the image size that the name contains.

    Raises:
        UnknownNameError: If no model has this name.
    """
    variant, size = canonical(name)
    config = VARIANTS[variant]
    if size is None:
        return config
    try:
        return config.replace(image_size=size)
    except ConfigError as error:
        raise error.replace(where=name) from None


def title_of(config: ModelConfig) -> str:
    """Title of a model in a report: the name of its variant, or a description of its size."""
    for name, known in VARIANTS.items():
        if _shape_of(known) == _shape_of(config):
            return name
    if isinstance(config, ResNetConfig):
        return f"ResNet of {sum(config.stages)} units, width {config.width}"
    kind = "ViT" if config.stem is None else "hybrid ViT"
    return f"{kind} of depth {config.depth}, width {config.width}, patch {config.stride}"


def _shape_of(config: ModelConfig) -> tuple[object, ...]:
    """The settings that a variant's name stands for; image size, head and numerics may differ."""
    if isinstance(config, ResNetConfig):
        return config.stages, config.width
    stem = config.stem and (config.stem.stages, config.stem.width, config.stem.widths, config.stem.is_plain)
    sizes = config.depth, config.width, config.mlp_dim, config.num_heads, config.patch_size
    return *sizes, stem, config.mlp, config.distillation


FamilyName = Literal["google", "big_vision", "timm", "torchvision", "huggingface", "dino", "bit"]

REPOSITORY_SCHEME = "hf://"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One set of published weights: a row of `published.csv`."""

    name: str
    variant: str
    """Our name of its shape, a key of `VARIANTS`."""
    family: FamilyName
    """Who wrote the file; decides its format and numerics."""
    location: str
    """`hf://org/name` for a repository on Hugging Face, or the https URL of one file."""
    image_size: int
    """Side of the square images it was last trained on, in pixels."""
    classes: int
    """Outputs of the head; 0 for features only."""
    note: str
    """The training data, and remarks for users."""
    aliases: tuple[str, ...] = ()

    @property
    def sha256_prefix(self) -> str:
        """First digits of the file's SHA-256 if its name contains them, as PyTorch's names do; otherwise empty."""
        match = re.search(r"-([0-9a-f]{8})\.pth$", self.location)
        return match.group(1) if match else ""


def _read_published() -> dict[str, Published]:
    lines = (files("vitruvian") / "published.csv").read_text(encoding="utf-8").splitlines()
    table: dict[str, Published] = {}
    for cells in csv.DictReader(lines):
        row: dict[str, Any] = {**cells, "aliases": tuple(cells["aliases"].split())}
        row |= {key: int(cells[key]) for key in ("image_size", "classes")}
        table[row["name"]] = Published(**row)
    return table


PUBLISHED: dict[str, Published] = _read_published()
"""Known sets of weights by name."""

_PUBLISHED_BY_ANY_NAME = dict(PUBLISHED)
for _row in PUBLISHED.values():
    for _alias in (*_row.aliases, _row.location):
        _PUBLISHED_BY_ANY_NAME.setdefault(_alias, _row)


def find_published(name: str) -> Published | None:
    """The row of a name, an alias, a Hugging Face id, or a `gs://` or https URL; None if it is not in the table."""
    return _PUBLISHED_BY_ANY_NAME.get(web_address(name))


def published_names() -> list[str]:
    """All names and aliases, for suggestions."""
    return [name for name in _PUBLISHED_BY_ANY_NAME if "://" not in name]


def published_for(variant: str) -> list[Published]:
    """The published weights of a variant, in the order of the table."""
    return [row for row in PUBLISHED.values() if row.variant == variant]


def web_address(name: str) -> str:
    """The https URL of Google's `gs://bucket/path`, which needs no account; any other name unchanged."""
    return re.sub(r"^gs://", "https://storage.googleapis.com/", name)


@cache
def imagenet_classes() -> dict[str, str]:
    """WordNet id -> label of the 1000 classes of ImageNet-1k, in the order of every published head."""
    classes: dict[str, str] = json.loads((files("vitruvian") / "imagenet.json").read_text(encoding="utf-8"))
    return classes


def imagenet_labels() -> tuple[str, ...]:
    """Labels such as "tench"; no two are equal."""
    return tuple(imagenet_classes().values())


def imagenet_ids() -> tuple[str, ...]:
    """WordNet ids such as "n01440764", the names of ImageNet's folders."""
    return tuple(imagenet_classes())
