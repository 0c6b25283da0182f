"""What a run is given: data by name or as an object, views of the caller, and a script that can have workers or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vitruvian.data.augment import require_packages
from vitruvian.data.sources import Dataset, open_dataset
from vitruvian.data.view import Transform
from vitruvian.data.workers import unguarded_script
from vitruvian.errors import TrainingError
from vitruvian.training.recipe import Recipe
from vitruvian.training.run import Run, lasting_data


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


NO_VIEWS = Views()


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
