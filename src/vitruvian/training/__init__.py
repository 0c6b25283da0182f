"""Training: recipes, the loop, the run folder, exactly resumable, on one machine or many.

`train` from arguments to a finished run · `trainer` a run put together · `loop` `step` its steps · `distributed` its
processes · `given` its data and views, and the `recipe` (files of them: `recipes`) · `images` its splits and batches ·
`model` `head` what learns · `objective` losses · `optimizer` also EMA · `schedule` · `run` its folder · `journal` its
metrics and listeners · `checkpoint` · `report` · `plan` what it would take · `finetune` `sweep` the paper's protocol ·
`masked` pre-training without labels
"""

from vitruvian.errors import Interrupted
from vitruvian.training.journal import Listener
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import read_recipe, recipe_names
from vitruvian.training.run import Run
from vitruvian.training.train import resume, train

__all__ = ["Interrupted", "Listener", "Recipe", "Run", "read_recipe", "recipe_names", "resume", "train"]
