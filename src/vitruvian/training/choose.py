"""Which recipe fits: the one asked for, or one for the data at hand, with the caller's changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vitruvian.catalog import resolve
from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.errors import TrainingError
from vitruvian.training.given import DataRef
from vitruvian.training.model import without_shape
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import changed, read_recipe
from vitruvian.training.run import lasting_path

SIZE = {"layers", "width", "mlp_width", "heads", "stem"}
"""Settings of a model that its name stands for."""


def chosen_recipe(
    data: object,
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """The recipe of a run."""
    if model and weights:
        raise TrainingError("give a model to start from scratch, or weights to start from, not both")
    found = (
        recipe if isinstance(recipe, Recipe) else read_recipe(recipe or fitting_name(DataRef.of(data), model, weights))
    )
    if model:
        found = found.replace(model=model, weights="", architecture=kept_architecture(found, model))
    if weights:
        found = found.replace(weights=lasting_path(weights), architecture=without_shape(found))
    return changed(found, settings)


def kept_architecture(recipe: Recipe, model: str) -> dict[str, Any]:
    """What of a recipe's architecture holds for another model: all but the size, which the model's name tells."""
    kept = {key: value for key, value in recipe.architecture.items() if key not in SIZE}
    config = resolve(model)
    if "representation_size" in kept and isinstance(config, ViTConfig):
        kept["representation_size"] = config.width
    if isinstance(config, ResNetConfig):
        known = {field.name for field in fields(ResNetConfig)}
        return {key: value for key, value in kept.items() if key in known}
    return kept


def fitting_name(data: DataRef, model: str | None, weights: str | Path | None) -> str:
    """The name of a recipe that suits the data."""
    if weights:
        return "photos"
    if data.name == "digits":
        return "digits"
    if data.dataset.name.lower().startswith("cifar"):
        return "cifar10"
    if model:
        return "scratch"
    raise TrainingError(
        f"{data.name or 'data='}: give weights= to start from, which is best for images of one's own, or model= to "
        "train from scratch, or recipe= (`vit train --recipes` lists them)"
    )
