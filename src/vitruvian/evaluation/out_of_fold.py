"""Out-of-fold predictions: each image classified by a model that was trained on the other folds."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.groups import group_numbers
from vitruvian.data.order import IndexArray
from vitruvian.data.sources import Concat, Source
from vitruvian.evaluation.metrics import LEVEL, Interval, accuracy_interval, bootstrap
from vitruvian.files import open_table
from vitruvian.settings import Record

PREDICTIONS_FILE = "predictions.csv"

# n images, K classes, G groups


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldResult(Record):
    """The accuracy of cross-validation, in percent."""

    top1: float  # over all images
    interval: Interval
    runs: tuple[float, ...]  # of each fold
    mean: float  # over the folds
    deviation: float  # sample standard deviation of the folds
    count: int  # images

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"top-1 {self.top1:.2f}% ({LEVEL:g}% interval {low:.2f} to {high:.2f}) on {self.count:,} images out of "
            f"fold; mean of {len(self.runs)} folds {self.mean:.2f} ± {self.deviation:.2f}"
        )


def fold_result(right: NDArray[np.bool_], folds: IndexArray, groups: IndexArray | None) -> FoldResult:
    """Summarize predictions (n,) of images in these folds; images of one group are drawn together for the interval."""
    runs = tuple(100.0 * float(right[folds == fold].mean()) for fold in np.unique(folds))
    interval = accuracy_interval(right)
    if groups is not None:
        groups = np.unique(groups, return_inverse=True)[1]
        hits, sizes = np.bincount(groups, right), np.bincount(groups)

        def accuracy(drawn: NDArray[np.float64]) -> float:
            return 100.0 * float(drawn @ hits) / max(float(drawn @ sizes), 1.0)

        interval = bootstrap(accuracy, len(sizes), seed=0)
    return FoldResult(
        top1=100.0 * float(right.mean()),
        interval=interval,
        runs=runs,
        mean=float(np.mean(runs)),
        deviation=float(np.std(runs, ddof=1)),
        count=len(right),
    )


class OutOfFold:
    """Collects the predictions for all images of cross-validation."""

    def __init__(self, images: Source, folds: IndexArray, group_by: str = "") -> None:
        self.images, self.folds, self.groups = images, folds, group_numbers(images, group_by)
        self.labels = np.asarray(images.labels(), np.int64)
        self.prediction = np.full(len(images), -1)  # (n,) -1 for an unreadable image
        self.probability, self.label_probability = np.zeros((2, len(images)))

    def add(self, indices: IndexArray, probabilities: NDArray[np.float64]) -> None:
        """Add the probabilities (m, K) of the images with these indices."""
        rows, best = np.arange(len(indices)), probabilities.argmax(axis=1)
        self.prediction[indices], self.probability[indices] = best, probabilities[rows, best]
        self.label_probability[indices] = probabilities[rows, self.labels[indices]]

    def result(self) -> FoldResult:
        known = self.prediction >= 0
        groups = None if self.groups is None else self.groups[known]
        return fold_result((self.prediction == self.labels)[known], self.folds[known], groups)

    def write(self, path: Path) -> Path:
        """Write a row per readable image; `vit doctor --predictions` finds wrong labels with it."""
        classes, images = self.images.classes, self.images
        with open_table(path, {}) as write:
            for index in np.flatnonzero(self.prediction >= 0).tolist():
                part, inner = 0, index
                if isinstance(images, Concat):  # of train and val
                    source, inner = images.part(index)
                    part = images.parts.index(source)
                row = {
                    "path": images.key(index),
                    "split": ("train", "val")[part],
                    "index": inner,
                    "label": classes[self.labels[index]],
                    "prediction": classes[self.prediction[index]],
                    "probability": round(float(self.probability[index]), 6),
                    "label_probability": round(float(self.label_probability[index]), 6),
                    "fold": int(self.folds[index]) + 1,
                }
                write([row])
        return path
