"""Training: recipes, the loop, the run folder, exactly resumable, on one machine or many."""

from vitruvian.errors import Interrupted
from vitruvian.training.journal import Listener
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import read_recipe, recipe_names
from vitruvian.training.run import Run
from vitruvian.training.train import resume, train

__all__ = ["Interrupted", "Listener", "Recipe", "Run", "read_recipe", "recipe_names", "resume", "train"]
