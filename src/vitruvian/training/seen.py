"""Whether the weights or the teacher of a run have learned from the images that it holds out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitruvian.training.recipe import Recipe
from vitruvian.weights.load import run_facts

CHOICE = ("seed", "val_fraction")
"""Settings that choose which images of each class are held out."""


def seen_notes(data: str, recipe: Recipe, validation_is: str) -> list[str]:
    """A note for each run behind this one that has held out other images of the same data."""
    if "held out" not in validation_is:  # a split of its own, of which no run learns
        return []
    notes = []
    for source in filter(None, (recipe.weights, recipe.teacher)):
        folder, facts = run_facts(source, data) or (None, {})
        before, now = facts.get("recipe") or {}, recipe.to_json()
        if folder is None or (facts.get("validation") == validation_is and chosen(before) == chosen(now)):
            continue
        notes.append(
            f"{folder} held out other images ({chosen(before)}; here {chosen(now)}) and has learned from images that "
            f"are held out here: their accuracy will be too high; the same settings there and here avoid it"
        )
    return notes


def chosen(recipe: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={recipe.get(key)}" for key in CHOICE)
