"""Files that say what classes and outputs mean: ReaL labels, WordNet ids, ObjectNet's mappings.

ObjectNet's folder `mappings` has the names of folders (`folder_to_objectnet_label.json`), the names of ImageNet's
classes for 113 of them, separated by "; " (`objectnet_to_imagenet_1k.json`), these names line by line
(`imagenet_to_label_2012_v2`), and for each usual class number its line, from 0 (`pytorch_to_imagenet_2012_id.json`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.errors import DataError
from vitruvian.files import read_json, read_object, read_text

VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})")
"""How ImageNet calls validation images, which are numbered from 1."""
FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NAMES, LINES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"

RealLabels = list[list[int]]


def read_real(path: Path) -> RealLabels:
    """All classes that people found in each of ImageNet's validation images, in order (`real.json`)."""
    content = read_json(path, raises=DataError)
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
        match = VALIDATION_IMAGE.search(key)
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


def read_ids(path: Path, total: int) -> tuple[str, ...]:
    """A WordNet id a line, in the order of the outputs; what follows it on a line is ignored."""
    lines = read_text(path, raises=DataError).split("\n")
    ids = [line.split()[0] for line in lines if line.strip()]
    strange = next((name for name in ids if not re.fullmatch(r"n\d{8}", name)), None)
    if strange is not None:
        raise DataError(f"{path}: {strange!r} is not a WordNet id such as n01440764; wanted one at the start of a line")
    if len(ids) != total:
        raise DataError(
            f"{path}: {len(ids)} WordNet ids, and the model has {total} outputs; wanted one for each, in order"
        )
    return tuple(ids)


def read_objectnet(mappings: Path) -> dict[str, tuple[int, ...]]:
    """Numbers in ImageNet-1k by the name of ObjectNet's folder; folders that are no class of it are not there."""

    def table(name: str) -> dict[str, Any]:
        return read_object(mappings / name, raises=DataError)

    names = [line.strip() for line in read_text(mappings / NAMES, raises=DataError).splitlines()]
    try:
        numbers = {names[line]: int(n) for n, line in table(LINES).items()}
        labels = {label: folder for folder, label in table(FOLDERS).items()}
        return {
            labels[label]: tuple(numbers[name.strip()] for name in meant.split(";"))
            for label, meant in table(CLASSES).items()
        }
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{mappings}: {CLASSES}, {FOLDERS}, {NAMES} and {LINES} do not fit together at {error}; "
            "wanted the folder 'mappings' as ObjectNet ships it"
        ) from error


def mappings_beside(data: str) -> Path | None:
    """ObjectNet's mappings beside its folder of images, if `data` is that folder."""
    folder = Path(data).expanduser()
    beside = folder.resolve().parent / "mappings"
    found = folder.is_dir() and (beside / CLASSES).is_file() and (beside / FOLDERS).is_file()
    return beside if found else None
