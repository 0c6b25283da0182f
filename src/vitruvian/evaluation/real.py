"""ImageNet-ReaL: for each validation image all classes that people found in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import DataError

IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
"""How ImageNet calls validation images, which are numbered from 1."""

RealLabels = list[list[int]]


def read_real(path: Path) -> RealLabels:
    """The labels of the validation images in order (`real.json`)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {(error.strerror or 'cannot be read').lower()}") from error
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    good = isinstance(content, list) and all(
        isinstance(found, list) and all(type(label) is int and 0 <= label < 1000 for label in found)
        for found in content
    )
    if not good:
        raise DataError(f"{path}: not ReaL labels; wanted a list with a list of class numbers (0 to 999) an image")
    labels: RealLabels = content
    return labels


def real_answers(
    keys: Iterable[str], answers: NDArray[np.int64], labels: RealLabels
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Rows of the images that have ReaL labels, and whether the answer to each, a class number, is among them."""
    rows, right = [], []
    named = 0
    for row, key in enumerate(keys):
        match = IMAGE.search(key)
        if match is None:
            continue
        named += 1
        number = int(match[1])
        if not 1 <= number <= len(labels):
            raise DataError(f"{key}: the ReaL labels end at image {len(labels)}")
        if labels[number - 1]:
            rows.append(row)
            right.append(int(answers[row]) in labels[number - 1])
    if not rows:
        what = "has a ReaL label" if named else "is called ILSVRC2012_val_ and 8 digits, by which ReaL labels go"
        raise DataError(f"not one image {what}")
    return np.array(rows), np.array(right)
