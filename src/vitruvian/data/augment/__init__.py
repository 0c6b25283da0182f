"""Training transforms: random crops and color changes of images, and mixing of batches."""

from vitruvian.data.augment.mix import mix
from vitruvian.data.augment.settings import Augment
from vitruvian.data.augment.transform import TrainTransform, normalize, require_packages, train_transform

__all__ = ["Augment", "TrainTransform", "mix", "normalize", "require_packages", "train_transform"]
