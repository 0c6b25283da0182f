"""Models by name: the table of variants, the weights that others published, and the classes of ImageNet.

The rows of `published.csv` come from the checkpoint lists of google-research/vision_transformer, big_transfer and
big_vision, the configurations inside timm 1.0.31 and torchvision, and the model cards on Hugging Face. A repository or
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

from vitruvian.config import NUMERICS, ModelConfig, ResNetConfig, ViTConfig
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.settings import Size
from vitruvian.text import fold, package_table

VARIANTS: dict[str, ModelConfig] = {}
"""Our name of a model -> its config, with 1000 classes and the image size it was published for."""
EXACT: dict[str, str] = {}
"""Name in any library -> our name."""


def _read_models() -> None:
    """Fill `VARIANTS` and `EXACT` from `models.toml`."""
    content = package_table("models.toml")
    for row in content["models"]:
        names, settings = row.pop("names"), content["shared"].get(row.pop("include", ""), {}) | row
        settings |= {"numerics": NUMERICS[settings["numerics"]]} if "numerics" in settings else {}
        for name in names.split():
            if match := re.fullmatch(r"(.*?)-(g-opt|[^-]+)/(\d+)(-distilled)?", name):
                kind, size, patch, distilled = match.groups()
                word, depth, width, mlp_dim, num_heads = content["sizes"][size]
                plain = ViTConfig(depth=depth, width=width, mlp_dim=mlp_dim, num_heads=num_heads, patch_size=int(patch))
                VARIANTS[name] = plain.replace(**{"distillation": bool(distilled)} | settings)
                parts = {"size": size, "patch": patch, "word": word, "distilled": "distilled_" if distilled else ""}
            else:
                kind, size = name.split("-R") if "-R" in name else (name, "x1")
                VARIANTS[name] = ResNetConfig(width=64 * int(size.split("x")[1]), **settings)
                parts = {"size": size}
            others = content["other_names"].get(kind, ())
            EXACT.update(dict.fromkeys((name, *(other.format(**parts) for other in others)), name))


_read_models()


ALIASES: dict[str, str] = {}
"""Folded name -> our name. `B` precedes `b` and `g` precedes `G`: the case of the second must match."""
for _name, _variant in EXACT.items():
    ALIASES.setdefault(fold(_name), _variant)


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
        variant = ALIASES.get(fold(text))
    if variant is None:
        raise UnknownNameError("model", name, {**VARIANTS, **EXACT}, see="(see `vit models`)")
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
