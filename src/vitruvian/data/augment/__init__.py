"""Training views: random parts of pictures with changed colours, and batches mixed from them."""

from vitruvian.data.augment.mix import mix
from vitruvian.data.augment.settings import Augment
from vitruvian.data.augment.view import TrainingView, normalise, training_view

__all__ = ["Augment", "TrainingView", "mix", "normalise", "training_view"]
