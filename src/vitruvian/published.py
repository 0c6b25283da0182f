"""The weights that others published, by the names their own projects give them: rows of one shape, and finding them.

The tables are in `published_tables`. A repository or an address that is not in them works too (see
`vitruvian.weights.hub`); they are what can be listed and suggested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vitruvian.published_tables import (
    AUGREG,
    BIG_VISION,
    BIT,
    BOTH,
    DINO,
    GOOGLE,
    GOOGLE_ALIASES,
    HUGGING_FACE,
    IN21K,
    TIMM,
    TIMM_TAGS,
    TORCHVISION,
)

FamilyName = Literal["google", "big_vision", "timm", "torchvision", "huggingface", "dino", "bit"]

REPOSITORY_SCHEME = "hf://"
GOOGLE_STORAGE = "https://storage.googleapis.com/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One set of published weights."""

    name: str
    variant: str
    """Our name of its shape, a key of `catalog.VARIANTS`."""
    family: FamilyName
    """Who wrote the file, and so its format and numerics."""
    location: str
    """`hf://org/name` for a repository on Hugging Face, or the https address of one file."""
    image_size: int
    """Side of the square it was trained for last, in pixels."""
    classes: int
    """Outputs of the head; 0 for features only."""
    note: str
    """The data it was trained on, and what to know before using it."""
    aliases: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """The Hugging Face id; empty for a single file."""
        return self.location.removeprefix(REPOSITORY_SCHEME) if self.location.startswith(REPOSITORY_SCHEME) else ""

    @property
    def sha256_prefix(self) -> str:
        """The start of the file's sha256, where its name carries one as PyTorch's do; else empty."""
        match = re.search(r"-([0-9a-f]{8})\.pth$", self.location)
        return match.group(1) if match else ""


def _row(
    family: FamilyName, name: str, shape: tuple[str, int, int, str], location: str, aliases: tuple[str, ...] = ()
) -> Published:
    variant, image_size, classes, note = shape
    return Published(
        name=name,
        variant=variant,
        family=family,
        location=location,
        image_size=image_size,
        classes=classes,
        note=note,
        aliases=tuple(alias for alias in aliases if alias != name),
    )


def _google_rows() -> Iterator[Published]:
    """Google's three buckets; every row also answers to its path in the bucket, which is its name in the release."""
    for path, shape in GOOGLE.items():
        yield _row("google", path, shape, _bucket("vit_models", path), GOOGLE_ALIASES.get(path, ()))
    for size, (variant, pretraining, tuning, side, accuracy) in AUGREG.items():
        name, path = f"augreg/{size}-i21k", f"augreg/{size}-i21k-300ep-lr_0.001-{pretraining}"
        aliases = (path, *GOOGLE_ALIASES.get(name, ()))
        yield _row("google", name, (variant, 224, 21843, IN21K), _bucket("vit_models", path), aliases)
        path = f"{path}--imagenet2012-steps_20k-{tuning}-res_{side}"
        note = f"{BOTH}; {accuracy} top-1" if accuracy else BOTH
        yield _row("google", f"{name}-{side}", (variant, side, 1000, note), _bucket("vit_models", path), (path,))
    for name, (variant, path, side, note) in BIG_VISION.items():
        yield _row("big_vision", name, (variant, side, 1000, note), _bucket("big_vision", path))
    for path, shape in BIT.items():
        yield _row("bit", path, shape, _bucket("bit_models", path))


def _bucket(bucket: str, path: str) -> str:
    return f"{GOOGLE_STORAGE}{bucket}/{path}.npz"


def _timm_rows() -> Iterator[Published]:
    seen: set[str] = set()
    for variant, names in TIMM.items():
        for name in names:
            architecture, tag = name.split(".")
            classes, note = TIMM_TAGS[tag]
            size = re.search(r"_(\d{3})$", architecture)
            side = int(size.group(1)) if size else 518  # only DINOv2's names leave the size out
            note = f"{note}; 4 registers" if "_reg4_" in architecture else note
            aliases = (f"timm/{name}",) if architecture in seen else (architecture, f"timm/{name}")
            seen.add(architecture)
            yield _row("timm", name, (variant, side, classes, note), f"{REPOSITORY_SCHEME}timm/{name}", aliases)


def _other_rows() -> Iterator[Published]:
    seen: set[str] = set()
    for name, (variant, file, side, note) in TORCHVISION.items():
        model = name.split("_Weights")[0].lower()
        aliases = () if model in seen else (model,)
        seen.add(model)
        location = f"https://download.pytorch.org/models/{file}"
        yield _row("torchvision", name, (variant, side, 1000, note), location, aliases)
    for name, shape in HUGGING_FACE.items():
        yield _row("huggingface", name, shape, f"{REPOSITORY_SCHEME}{name}")
    for name, (variant, path, side, data) in DINO.items():
        note = f"{data} without labels{'; 4 registers' if name.endswith('_reg') else ''}"
        yield _row("dino", name, (variant, side, 0, note), f"https://dl.fbaipublicfiles.com/{path}.pth")


PUBLISHED: dict[str, Published] = {row.name: row for row in (*_google_rows(), *_timm_rows(), *_other_rows())}
"""Every known set of weights by its name."""


def _by_any_name() -> dict[str, Published]:
    table = dict(PUBLISHED)
    for row in PUBLISHED.values():
        for alias in (*row.aliases, row.location):
            table.setdefault(alias, row)
    return table


_BY_ANY_NAME = _by_any_name()


def find(name: str) -> Published | None:
    """The row of a name, an alias, a Hugging Face id or a `gs://` or https address; None if it is not in the table."""
    return _BY_ANY_NAME.get(web_address(name))


def names() -> list[str]:
    """Every name and alias, for suggestions."""
    return [name for name in _BY_ANY_NAME if "://" not in name]


def of_variant(variant: str) -> list[Published]:
    """The published weights of a shape, in the table's order."""
    return [row for row in PUBLISHED.values() if row.variant == variant]


def web_address(name: str) -> str:
    """Google's `gs://bucket/path` as the https address that needs no account; any other name as it is."""
    return GOOGLE_STORAGE + name.removeprefix("gs://") if name.startswith("gs://") else name
