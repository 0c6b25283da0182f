"""The whole shape of every Vision Transformer that timm names; `benchmarks/architectures.py table` generates it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vitruvian.config import ViTConfig

BRANCHES = 2
"""Attentions, and MLPs, side by side in the blocks of the architectures that have such."""
WITH_TEACHER = "VisionTransformerDistilled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One of timm's architectures, as it is published."""

    name: str
    maker: str
    """timm's class."""
    config: ViTConfig
    pieces: frozenset[str]
    """What it keeps in other pieces than the table of names."""


@cache
def shapes() -> tuple[Shape, ...]:
    return tuple(
        Shape(
            name=row["name"],
            maker=row["class"],
            config=ViTConfig.from_json(row["settings"]),
            pieces=frozenset(row["pieces"]),
        )
        for row in rows()
    )


@cache
def config_named(name: str) -> ViTConfig | None:
    """The settings of one architecture, without those of all others."""
    return next((ViTConfig.from_json(row["settings"]) for row in rows() if row["name"] == name), None)


@cache
def rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(Path(__file__).with_name("timm_shapes.json").read_text(encoding="utf-8")))
