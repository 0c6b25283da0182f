"""Corrections of the review page applied: a new manifest with all images of a dataset, whose files stay as they are."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitruvian.data.folder import FolderSource
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset
from vitruvian.errors import DataError, FileError
from vitruvian.files import atomic_path, read_object
from vitruvian.text import printable

FORMAT = 1

Place = tuple[str, int]
"""Split and number of an image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of the corrections."""

    images: int
    """Rows of the new manifest."""
    changed: int
    left_out: int
    kept: int
    """Labels that were looked at and found right."""


def apply_corrections(data: str | Path, corrections: Path, out: Path) -> Applied:
    """Write the manifest `out` of a folder's or a manifest's images, with labels as `corrections` say.

    The paths in a manifest begin at its folder, so that must be one above the images.
    """
    opened = open_dataset(data)
    decided = read_corrections(corrections, opened)
    check_out(out, Path(data).expanduser())
    with atomic_path(out) as new, open(new, "w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("path", "label", "split", "weight"))
        count = 0
        for row in rows(opened, decided, out):
            writer.writerow(row)
            count += 1
    labels = [(entry["was"], entry["label"]) for entry in decided.values()]
    return Applied(
        images=count,
        changed=sum(label is not None and label != was for was, label in labels),
        left_out=sum(label is None for _, label in labels),
        kept=sum(label == was for was, label in labels),
    )


def rows(data: Dataset, decided: dict[Place, dict[str, Any]], out: Path) -> Iterator[tuple[object, ...]]:
    """A row for each image that stays."""
    folder = os.path.abspath(out.parent)
    for split, source in data.splits.items():
        if not isinstance(source, FolderSource):
            raise DataError(
                f"{data.name}: its images are not files with paths, which a manifest lists; corrections are for "
                "folders of images and for manifests"
            )
        for index in range(len(source)):
            entry = decided.get((split, index))
            label = source.classes[source.label(index)] if entry is None else entry["label"]
            if label is not None:
                yield path_from(folder, source.root / source.key(index)), label, split, f"{source.weight(index):g}"


def path_from(folder: str, image: Path) -> str:
    """The image's path as a manifest in this folder has it."""
    whole = os.path.abspath(image)
    path = os.path.relpath(whole, folder)
    if path.startswith(os.pardir):
        above = os.path.commonpath([whole, folder])
        raise FileError(
            f"{folder}: {printable(whole)} is not below it; write the manifest to a folder above, such as {above}"
        )
    if path != path.strip() or not printable(path) == path:
        raise FileError(f"{printable(whole)}: a name that no manifest can hold; rename the file")
    return path


def read_corrections(path: Path, data: Dataset) -> dict[Place, dict[str, Any]]:
    """The corrections by image, once it is sure that they are of these images."""
    content = read_object(path, raises=DataError)
    found = content.get("corrections")
    if content.get("format") != FORMAT or not isinstance(found, list):
        raise DataError(f"{path}: not the corrections of a page of `vit doctor --review`")
    decided: dict[Place, dict[str, Any]] = {}
    for number, entry in enumerate(found, 1):
        try:
            split, index, key, was, label = (entry[name] for name in ("split", "index", "key", "was", "label"))
            source = data.splits[split]
            if not isinstance(index, int) or not 0 <= index < len(source):
                raise IndexError
            there = source.key(index), source.classes[source.label(index)]
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{path}: correction {number} is of no image of {data.name}; are the data others?"
            ) from None
        if (key, was) != there:
            raise DataError(
                f"{path}: correction {number} is of {printable(str(key))} labeled {printable(str(was))}, but image "
                f"{index} of {split} is {printable(there[0])} labeled {printable(there[1])}; the data have changed: "
                "run `vit doctor --review` again"
            )
        if label is not None and label not in source.classes:
            raise DataError(f"{path}: correction {number}: there is no class {printable(str(label))!r} in {data.name}")
        decided[split, index] = entry
    return decided


def check_out(out: Path, data: Path) -> None:
    """FileError where the new manifest would change the data."""
    if out.suffix.lower() != ".csv":
        raise FileError(f"{out}: wanted the name of a manifest, such as corrected.csv")
    if data.exists() and out.exists() and os.path.samefile(out, data):
        raise FileError(f"{out}: the data themselves, which stay as they are; choose another name")
    if data.is_dir() and Path(os.path.abspath(out)).is_relative_to(os.path.abspath(data)):
        raise FileError(f"{out}: inside the data, which stay as they are; write it beside {data}")
