"""Training: recipes, the loop and the run folder; exactly resumable, on one machine or many.

`train` start or resume a run, add classes to its model · `loop` its steps, evaluations and checkpoints · `recipe` its
settings · `splits` its images · `initial_model` where it starts · `objective` `masked` what it optimizes · `optimizer`
also schedules and averaged weights · `distributed` its processes · `run_folder` `checkpoint` `run_report`
what it writes · `planning` its recipe and cost · `finetune` series of runs · `integrations` listeners and the Hub
"""

from vitruvian.errors import Interrupted
from vitruvian.training.integrations import Listener
from vitruvian.training.recipe import Recipe, read_recipe, recipe_names
from vitruvian.training.run_folder import Run
from vitruvian.training.train import resume, train

__all__ = ["Interrupted", "Listener", "Recipe", "Run", "read_recipe", "recipe_names", "resume", "train"]
