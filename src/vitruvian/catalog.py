"""Models by name: the table of variants, the weights that others published, and the classes of ImageNet.

The rows of `published.csv` come from the checkpoint lists of google-research/vision_transformer, big_transfer and
big_vision, the configurations inside timm 1.0.30 and torchvision, and the model cards on Hugging Face. A repository or
URL that is not in the table works too (see `vitruvian.weights.hub`); the table is what can be listed and suggested.
Accuracies are those of the releases, of timm's results-imagenet.csv and of torchvision's documentation; licenses are
those of each family of releases, not looked up for every file, and empty where sources differ. Before you depend on a
license, read the model card of the weights.
"""

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

SIZE_ROWS = """
    Ti      tiny        12   192   768   3
    S       small       12   384  1536   6
    M       medium      12   512  2048   8
    B       base        12   768  3072  12
    b       base_halved 12   384  1536  12
    L       large       24  1024  4096  16
    H       huge        32  1280  5120  16
    g       giant       40  1408  6144  16
    G       gigantic    48  1664  8192  16
    So400m  so400m      27  1152  4304  16
    g-opt   giant_opt   40  1536  6144  16
    S+      small_plus  12   384  1536   6
    H+      huge_plus   32  1280  5120  20
    7B      7b          40  4096  8192  32
"""
"""Our letter, the word that other projects use, depth, width, mlp_dim, num_heads; at the end, sizes of single kinds.
`b` is that of Figure 4: all hidden dimensions of B halved, those of the heads too."""
SIZE_WORDS: dict[str, str] = {}
SIZES: dict[str, Any] = {}
for _letter, _word, *_values in map(str.split, SIZE_ROWS.strip().splitlines()):
    SIZE_WORDS[_letter] = _word
    SIZES[_letter] = dict(zip(("depth", "width", "mlp_dim", "num_heads"), map(int, _values)))

HYBRIDS: dict[str, tuple[str, tuple[int, ...], int]] = {
    # name: size of the Transformer, units in the stem's stages, patch on the stem's features
    "R+ViT-Ti/16": ("Ti", (), 8),  # as in the release, although root and patch together have a stride of 32 pixels
    "R26+ViT-S/32": ("S", (2, 2, 2, 2), 1),
    "R26+ViT-B/32": ("B", (2, 2, 2, 2), 1),
    "R50+ViT-B/16": ("B", (3, 4, 9), 1),
    "R50+ViT-B/32": ("B", (3, 4, 6, 3), 1),
    "R50+ViT-L/16": ("L", (3, 4, 9), 1),
    "R50+ViT-L/32": ("L", (3, 4, 6, 3), 1),
}

BIT_UNITS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
"""Depth of a BiT ResNet -> the units in its stages."""
BIT_SIZES = ((50, 1), (50, 2), (50, 3), (101, 1), (101, 3), (152, 1), (152, 2), (152, 4), (200, 3))
"""Depth and width factor of the published ones."""


def _variants() -> dict[str, ModelConfig]:
    table: dict[str, ModelConfig] = {}

    def plain(size: str, patch_size: int) -> ViTConfig:
        """The ViT of this size, as the paper's release configures it."""
        return ViTConfig(**SIZES[size], patch_size=patch_size)

    def add(kind: str, names: str, **settings: Any) -> None:
        """Add models named by size and patch, such as `S/16`, with the settings that differ from the plain ViT."""
        for name in names.split():
            size, patch = name.removesuffix("-distilled").split("/")
            table[f"{kind}-{name}"] = plain(size, int(patch)).replace(**settings)

    for size in ("Ti", "S", "B", "L", "H"):
        add("ViT", f"{size}/8 {size}/14 {size}/16 {size}/32")
    add("ViT", "M/16 M/32 b/16 b/32 g/14 G/14")
    for name, (size, stages, patch) in HYBRIDS.items():
        table[name] = plain(size, patch).replace(stem=StemConfig(stages=stages))
    for depth, factor in BIT_SIZES:
        table[f"BiT-R{depth}x{factor}"] = ResNetConfig(stages=BIT_UNITS[depth], width=64 * factor)
    table["AxialResNet-50"] = ResNetConfig(axial=True)
    # Figure 13: each block becomes one over rows and one over columns
    add("Axial-ViT", "B/16 B/32", attention="axial", depth=24, cls_token=False, pool="mean")
    mixer = {"attention": "mixer", "pos_embed": "none", "cls_token": False, "pool": "mean", "num_heads": 1}
    add("Mixer", "S/32 S/16", **mixer, mixer_dim=256, width=512, mlp_dim=2048, depth=8)
    add("Mixer", "B/32 B/16", **mixer, mixer_dim=384)
    add("Mixer", "L/32 L/16", **mixer, mixer_dim=512)
    add("Mixer", "H/14", **mixer, mixer_dim=640)
    for size in ("Ti", "S", "B"):
        add("DeiT", f"{size}/16", numerics=TIMM_NUMERICS)
        add("DeiT", f"{size}/16-distilled", distillation=True, numerics=TIMM_NUMERICS)
    add("DeiT-III", "S/16 M/16 B/16 L/16 H/14", layer_scale=True, cls_pos_embed=False, numerics=TIMM_NUMERICS)
    add("DINO", "S/8 S/16 B/8 B/16", num_classes=0, numerics=DINO_NUMERICS)
    dinov2 = {"num_classes": 0, "layer_scale": True, "image_size": (518, 518), "numerics": DINO_NUMERICS}
    add("DINOv2", "S/14 B/14 L/14", **dinov2)
    add("CLIP", "B/32 B/16 L/14 H/14", num_classes=0, pre_norm=True, patch_bias=False, numerics=CLIP_NUMERICS)
    siglip = {"num_classes": 0, "pool": "map", "cls_token": False, "numerics": SIGLIP_NUMERICS}
    add("SigLIP", "B/16 B/32 L/16", **siglip)
    add("SigLIP", "So400m/14", trim=True, **siglip)
    add("SigLIP", "So400m/16 g-opt/16", **siglip)
    add("I-JEPA", "H/14 H/16 g/16", num_classes=0, pool="mean", cls_token=False, numerics=HUGGINGFACE_NUMERICS)
    beit = {"pos_embed": "relative_bias", "pool": "mean", "norm_after_pool": True, "layer_scale": True}
    add("BEiT", "B/16 L/16", **beit, numerics=HUGGINGFACE_NUMERICS)
    rope = RopeConfig(kind="normalized", temperature=100.0, half=True)
    dinov3 = {"num_classes": 0, "layer_scale": True, "reg_tokens": 4, "pos_embed": "none", "rope": rope}
    for size in ("S", "S+", "B", "L", "H+", "7B"):
        mlp = "gelu" if size in ("S", "B", "L") else "swiglu"
        add("DINOv3", f"{size}/16", **dinov3, mlp=mlp, qkv_bias=size != "7B", numerics=DINOV3_NUMERICS)
    # EVA-02 at the size of its pre-training; the larger ones normalize inside the MLP
    rope = RopeConfig(temperature=10_000.0, reference_grid=(16, 16))
    eva02 = {"rope": rope, "mlp": "swiglu", "pool": "mean", "norm_after_pool": True, "numerics": TIMM_NUMERICS}
    for size, mlp_dim in (("Ti", 512), ("S", 1024), ("B", 2048), ("L", 2730)):
        add("EVA-02", f"{size}/14", **eva02, mlp_dim=mlp_dim, mlp_norm=size in ("B", "L"))
    add("DINOv2", "g/14", **dinov2, depth=40, width=1536, mlp_dim=4096, num_heads=24, mlp="swiglu")
    return table


VARIANTS: dict[str, ModelConfig] = _variants()
"""Our name of a model -> its config, with 1000 classes and the image size it was published for."""


def _fold(name: str) -> str:
    """A name without case and punctuation: `ViT-B/16` and `vit_b_16` are both `vitb16`."""
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _other_names(variant: str) -> list[str]:
    """Names of a variant in timm, torchvision, Hugging Face, Google and Facebook, without image size and tag."""
    if variant.startswith("Axial"):
        return []
    if variant.startswith("BiT-"):
        short = variant.removeprefix("BiT-")
        return [short, f"BiT-S-{short}", f"BiT-M-{short}", f"resnetv2_{short[1:]}_bit", f"resnetv2_{short[1:]}_bitm"]
    match = re.fullmatch(r"(.*?)(Ti|S\+?|M|B|b|L|H\+?|g-opt|g|G|So400m|7B)/(\d+)(-distilled)?", variant)
    assert match, variant
    kind, size, patch, distilled = match.groups()
    word = SIZE_WORDS[size]
    if "+" in kind:
        stem = kind.split("+")[0]
        tail = "_p8" if stem == "R" else ""
        return [f"{stem}_{size}_{patch}", f"{stem}+{size}/{patch}", f"vit_{word}_{stem}_s{patch}{tail}"]
    return {
        "ViT-": [f"{size}/{patch}", f"vit_{word}_patch{patch}"],
        "Mixer-": [f"mixer_{size}{patch}"],
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


EXACT: dict[str, str] = {name: variant for variant in VARIANTS for name in (variant, *_other_names(variant))}
"""Name in any library -> our name."""
ALIASES: dict[str, str] = {}
"""Folded name -> our name. `B` precedes `b` and `g` precedes `G`: the case of the second must match."""
for _name, _variant in EXACT.items():
    ALIASES.setdefault(_fold(_name), _variant)


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
    exact = (text, re.sub(r"[-_](?=\d+$)", "/", text))  # ViT-b_32 is ViT-b/32
    variant = next((EXACT[name] for name in exact if name in EXACT), None)
    if variant is None and not re.search("ViT-b(?![a-z])", text):  # of half the width, which is not B
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
        return f"{'AxialResNet' if config.axial else 'ResNet'} of {sum(config.stages)} units, width {config.width}"
    plain = "ViT" if config.stem is None else "hybrid ViT"
    kind = {"axial": "Axial-ViT", "mixer": "MLP-Mixer"}.get(config.attention, plain)
    return f"{kind} of depth {config.depth}, width {config.width}, patch {config.stride}"


def _shape_of(config: ModelConfig) -> tuple[object, ...]:
    """The settings that a variant's name stands for; image size, head and numerics may differ."""
    if isinstance(config, ResNetConfig):
        return config.stages, config.width, config.axial
    stem = config.stem and (config.stem.stages, config.stem.width, config.stem.widths, config.stem.is_plain)
    sizes = config.depth, config.width, config.mlp_dim, config.num_heads, config.patch_size
    return *sizes, stem, config.mlp, config.distillation, config.attention


FamilyName = Literal["google", "big_vision", "timm", "torchvision", "huggingface", "dino", "bit"]

REPOSITORY_SCHEME = "hf://"
AUGREG = "gs://vit_models/augreg"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One set of published weights: a row of `published.csv`."""

    name: str
    variant: str  # our name of its shape, a key of `VARIANTS`
    family: FamilyName  # who wrote the file; decides its format and numerics
    location: str  # `hf://org/name` for a repository on Hugging Face, or the https URL of one file
    image_size: int  # side of the square images it was last trained on, in pixels
    classes: int  # outputs of the head; 0 for features only
    top1: float | None  # published top-1 accuracy on ImageNet in percent, if known
    license: str  # SPDX identifier or name of the license of the weights; empty if unknown
    note: str  # the training data, and remarks for users
    aliases: tuple[str, ...] = ()

    @property
    def sha256_prefix(self) -> str:
        """First digits of the file's SHA-256 if its name contains them, as PyTorch's names do; otherwise empty."""
        match = re.search(r"-([0-9a-f]{8})\.pth$", self.location)
        return match.group(1) if match else ""


PUBLISHED: dict[str, Published] = {}  # known sets of weights by name
for _cells in csv.DictReader((files("vitruvian") / "published.csv").read_text(encoding="utf-8").splitlines()):
    _numbers: Any = {key: int(_cells[key]) for key in ("image_size", "classes")}
    _numbers["top1"] = float(_cells["top1"]) if _cells["top1"] else None
    PUBLISHED[_cells["name"]] = Published(**{**_cells, **_numbers, "aliases": tuple(_cells["aliases"].split())})

_PUBLISHED_BY_ANY_NAME = dict(PUBLISHED)
for _row in PUBLISHED.values():
    for _alias in (*_row.aliases, _row.location):
        _PUBLISHED_BY_ANY_NAME.setdefault(_alias, _row)


RECOMMENDED = "deit3_small_patch16_224.fb_in22k_ft_in1k"
"""The model to start with, and the default of commands: the accuracy of a large model at the cost of ViT-S/16."""


def find_published(name: str) -> Published | None:
    """The row of a name, an alias, a Hugging Face id, or a `gs://` or https URL; None if it is not in the table."""
    return _PUBLISHED_BY_ANY_NAME.get(web_address(name))


def published_names() -> list[str]:
    """All names and aliases, for suggestions."""
    return [name for name in _PUBLISHED_BY_ANY_NAME if "://" not in name]


def published_for(variant: str) -> list[Published]:
    """The published weights of a variant, in the order of the table."""
    return [row for row in PUBLISHED.values() if row.variant == variant]


def augreg_address(name: str) -> str | None:
    """The https URL of `augreg/FILENAME`, any of the AugReg checkpoints; None for another name."""
    match = re.fullmatch(r"augreg/([\w+.-]+-do_[\w+.-]+)", name, re.ASCII)
    return web_address(f"{AUGREG}/{match[1]}.npz") if match else None


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
