"""ObjectNet's classes as classes of ImageNet-1k, from the files that come with its images.

Its folder `mappings` has the names of folders (`folder_to_objectnet_label.json`), the names of ImageNet's classes for
113 of them, separated by "; " (`objectnet_to_imagenet_1k.json`), these names line by line
(`imagenet_to_label_2012_v2`), and for each usual class number its line, from 0 (`pytorch_to_imagenet_2012_id.json`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitruvian.errors import DataError

FOLDERS, CLASSES = "folder_to_objectnet_label.json", "objectnet_to_imagenet_1k.json"
NAMES, LINES = "imagenet_to_label_2012_v2", "pytorch_to_imagenet_2012_id.json"


def read_objectnet(mappings: Path) -> dict[str, tuple[int, ...]]:
    """Numbers in ImageNet-1k by the name of ObjectNet's folder; folders that are no class of it are not there."""
    names = [line.strip() for line in text_of(mappings / NAMES).splitlines()]
    try:
        numbers = {names[line]: int(n) for n, line in json_of(mappings / LINES).items()}
        labels = {label: folder for folder, label in json_of(mappings / FOLDERS).items()}
        return {
            labels[label]: tuple(numbers[name.strip()] for name in meant.split(";"))
            for label, meant in json_of(mappings / CLASSES).items()
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


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def json_of(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text_of(path))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object")
    return content
