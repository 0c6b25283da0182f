"""What a run is given: data and views, by name or as objects, and the recipe that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from vitruvian.catalog import resolve
from vitruvian.config import ResNetConfig, ViTConfig
from vitruvian.data.augment import require_packages
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset
from vitruvian.data.transform import Transform
from vitruvian.data.workers import unguarded_script
from vitruvian.errors import TrainingError
from vitruvian.training.model import without_shape
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import changed, read_recipe
from vitruvian.training.run import Run, lasting_data, lasting_path
from vitruvian.weights import hub
from vitruvian.weights.load import published_name

SIZE = {"depth", "width", "mlp_dim", "num_heads", "stem"}
"""Settings of a model that its name stands for."""


class DataRef:
    """Data as a run is given it, by name or as an object, which is opened once, when it is first needed."""

    def __init__(self, data: object) -> None:
        self.data = data
        by_name = isinstance(self.data, str | Path)
        self.name = lasting_data(str(self.data)) if by_name else ""
        """What a record calls it, from whatever folder; empty for an object."""
        self.short_name = Path(self.name.rstrip("/*")).stem or ("run" if by_name else "data")

    @classmethod
    def of(cls, data: object) -> DataRef:
        return data if isinstance(data, cls) else cls(data)

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self.data)


@dataclass(frozen=True, slots=True)
class Views:
    """Views of the caller, in place of the recipe's."""

    view: Transform | None = None
    train_view: Transform | None = None

    def given(self) -> list[str]:
        """The arguments that a continued run needs again."""
        return [name for name in ("view", "train_view") if getattr(self, name) is not None]

    def check(self, recipe: Recipe) -> None:
        if self.train_view is None:
            require_packages()
        elif recipe.resolutions or recipe.train_scale != 1:
            raise TrainingError("resolutions and train_scale are for the recipe's training views, not for train_view=")

    def check_start(self, recipe: Recipe) -> None:
        """Refuse, before the data is opened, a run that cannot start."""
        self.check(recipe)
        if recipe.weights and published_name(recipe.weights):
            hub.require_packages(recipe.weights)

    def check_again(self, run: Run) -> None:
        """The same views are given as when the run began."""
        began = run.facts.get("views", [])
        if self.given() != began:
            names = ", ".join(f"{name}=" for name in began) or "no view of your own"
            raise TrainingError(f"{run.folder}: the run began with {names}; give the same to resume")
        self.check(run.recipe)

    def notes(self) -> list[str]:
        if self.view is None:
            return []
        return ["measured with a view of your own (view=): the saved model's preprocess is the recipe's, not that view"]


NO_VIEWS: Views = Views()


def given_again(run: Run, data: object) -> object:
    """The data of a run that goes on: what is given, or what the run knows by name."""
    name = run.facts.get("data")
    if not name and data is None:
        raise TrainingError(f"{run.folder}: the run began with a dataset object; give it again, resume(run, data=...)")
    return name if data is None else data


def fitting_workers(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe without workers where they could not start, and a note of that."""
    line = unguarded_script() if recipe.workers else ""
    if not line:
        return recipe, []
    note = f'workers=0: {line} is outside `if __name__ == "__main__":`, without which no worker process can start'
    return recipe.replace(workers=0), [note]


def chosen_recipe(
    data: object,
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    if model and weights:
        raise TrainingError("give a model to start from scratch, or weights to start from, not both")
    if recipe is None:
        recipe = fitting_name(DataRef.of(data), model, weights)
        if recipe == "photos" and not weights:
            weights = hub.default_weights()
    found = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if model:
        found = found.replace(model=model, weights="", architecture=kept_architecture(found, model))
    if weights:
        found = found.replace(weights=lasting_path(weights), architecture=without_shape(found))
    return changed(found, settings)


def kept_architecture(recipe: Recipe, model: str) -> dict[str, Any]:
    """What of a recipe's architecture holds for another model: all but the size, which the model's name tells."""
    kept = {key: value for key, value in recipe.architecture.items() if key not in SIZE}
    config = resolve(model)
    if kept.get("representation_size") and isinstance(config, ViTConfig):
        kept["representation_size"] = config.width
    if isinstance(config, ResNetConfig):
        known = {field.name for field in fields(ResNetConfig)}
        return {key: value for key, value in kept.items() if key in known}
    return kept


def fitting_name(data: DataRef, model: str | None, weights: str | Path | None) -> str:
    if not weights and data.name == "digits":
        return "digits"
    if not weights and data.dataset.name.lower().startswith("cifar"):
        return "cifar10"
    return "scratch" if model else "photos"
