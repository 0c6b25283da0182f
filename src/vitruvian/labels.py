"""The 1000 classes of ImageNet-1k in the order that every published head uses."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path


@cache
def imagenet_classes() -> dict[str, str]:
    """WordNet id -> readable name, in the order of the classes."""
    classes: dict[str, str] = json.loads(Path(__file__).with_name("imagenet.json").read_text(encoding="utf-8"))
    return classes


def imagenet_labels() -> tuple[str, ...]:
    """The names, such as "tench"; all different."""
    return tuple(imagenet_classes().values())


def imagenet_ids() -> tuple[str, ...]:
    """The WordNet ids, such as "n01440764", by which ImageNet names its folders."""
    return tuple(imagenet_classes())
