"""The weights that others published, by the names their own projects give them: a row of `published.csv` each.

The rows come from the checkpoint lists of google-research/vision_transformer, big_transfer and big_vision, the
configurations inside timm 1.0.30 and torchvision, and the model cards on Hugging Face. A repository or an address that
is not in the table works too (see `vitruvian.weights.hub`); it is what can be listed and suggested.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

FamilyName = Literal["google", "big_vision", "timm", "torchvision", "huggingface", "dino", "bit"]

REPOSITORY_SCHEME = "hf://"


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
    def sha256_prefix(self) -> str:
        """The start of the file's sha256, where its name carries one as PyTorch's do; else empty."""
        match = re.search(r"-([0-9a-f]{8})\.pth$", self.location)
        return match.group(1) if match else ""


def _row(cells: dict[str, Any]) -> Published:
    numbers = {key: int(cells[key]) for key in ("image_size", "classes")}
    return Published(**cells | numbers | {"aliases": tuple(cells["aliases"].split())})


_LINES = (files("vitruvian") / "published.csv").read_text(encoding="utf-8").splitlines()
PUBLISHED: dict[str, Published] = {cells["name"]: _row(cells) for cells in csv.DictReader(_LINES)}
"""Every known set of weights by its name."""

_BY_ANY_NAME = dict(PUBLISHED)
for _published in PUBLISHED.values():
    for _alias in (*_published.aliases, _published.location):
        _BY_ANY_NAME.setdefault(_alias, _published)


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
    return re.sub(r"^gs://", "https://storage.googleapis.com/", name)
