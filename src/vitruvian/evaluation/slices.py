"""Accuracy in slices of a dataset, such as by camera or by source, so that a good mean hides no bad part."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import DataError, argument
from vitruvian.evaluation.metrics import Interval, accuracy_interval


@dataclass(frozen=True, slots=True)
class Slice:
    """The images of one value of a column; accuracy in percent."""

    name: str
    count: int
    top1: float
    interval: Interval


def slice_accuracies(values: Sequence[str], right: NDArray[np.bool_], by: str) -> tuple[Slice, ...]:
    """The accuracy of the images with each value, the worst first, of equals the largest.

    Raises:
        DataError: There is only one value.
    """
    names, which = np.unique(np.array(values, object), return_inverse=True)
    if len(names) < 2:
        raise DataError(f"{argument('by', by)}: all {len(values):,} images have the value {names[0]!r}")
    slices = []
    for number, name in enumerate(names):
        part = right[which == number]
        slices.append(Slice(str(name), len(part), 100.0 * float(part.mean()), accuracy_interval(part)))
    return tuple(sorted(slices, key=lambda part: (part.top1, -part.count)))
