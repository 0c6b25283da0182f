"""Training views: random parts of images with changed colors, and batches mixed from them."""

from vitruvian.data.augment.mix import mix
from vitruvian.data.augment.settings import Augment
from vitruvian.data.augment.view import TrainingView, normalize, require_packages, training_view

__all__ = ["Augment", "TrainingView", "mix", "normalize", "require_packages", "training_view"]
