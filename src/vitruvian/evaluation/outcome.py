"""What an evaluation found, as numbers that are the same each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitruvian.evaluation.bootstrap import LEVEL
from vitruvian.evaluation.calibration import Calibration
from vitruvian.evaluation.label_spaces import LabelSpace
from vitruvian.evaluation.metrics import Counts, Measures


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on one split of a data set; accuracies in percent."""

    data: str
    model: str
    split: str
    part: str
    """Which images, in words."""
    space: LabelSpace
    measures: Measures
    among_all: float
    """Top-1 where all outputs of the model compete, also those that mean no class of the data."""
    real: float | None
    real_count: int
    """Images that have a ReaL label."""
    intervals: dict[str, tuple[float, float]]
    """Bootstrap intervals by the name of the number in `to_json`."""
    calibration: Calibration
    unreadable: dict[str, str]
    """Why an image could not be counted, by key."""
    left_out: int
    """Images of classes that the model does not have."""
    notes: tuple[str, ...]
    """What the data set left out or is strange."""

    @property
    def restricted(self) -> bool:
        """Whether the model has outputs that mean no class of the data."""
        return self.space.competing < self.space.total

    def to_json(self) -> dict[str, Any]:
        """All of it; the confusion matrix as [label, prediction, images] without zeros."""
        measures, space = self.measures, self.space
        return {
            "data": self.data,
            "model": self.model,
            "split": self.split,
            **measures.scalars(),
            "top1_among_all_outputs": self.among_all,
            "real": self.real,
            "real_count": self.real_count,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "interval_percent": LEVEL,
            "calibration": self.calibration.to_json(),
            "label_space": {"matched_by": space.about, "outputs": space.total, "competing": space.competing},
            "unreadable": self.unreadable,
            "left_out": self.left_out,
            "notes": list(self.notes),
            "classes": class_rows(measures, space.classes),
            "confusion": None if measures.confusion is None else without_zeros(measures.confusion),
        }


def class_rows(measures: Measures, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    counts, correct = measures.class_counts.tolist(), measures.class_correct.tolist()
    return [{"class": name, "images": n, "right": right} for name, n, right in zip(classes, counts, correct)]


def without_zeros(confusion: Counts) -> list[list[int]]:
    rows, columns = np.nonzero(confusion)
    triples: list[list[int]] = np.stack([rows, columns, confusion[rows, columns]], axis=1).tolist()
    return triples
