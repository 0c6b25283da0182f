"""The list of class names that may lie beside a manifest or beside shards."""

from __future__ import annotations

import json
from pathlib import Path

from vitruvian.data.sources.base import class_name
from vitruvian.errors import DataError

CLASS_FILES = ("classes.json", "classes.txt")


def listed_classes(folder: Path) -> tuple[tuple[str, ...] | None, list[Path]]:
    """The classes listed in a file of this folder, and the file; None and no file where there is none."""
    for name in CLASS_FILES:
        path = folder / name
        if path.is_file():
            return parse_classes(path.read_text(encoding="utf-8-sig"), str(path)), [path]
    return None, []


def parse_classes(text: str, where: str) -> tuple[str, ...]:
    """The names of the classes, in the order of their numbers.

    JSON: a list of names, an object from number to name, or one from name to number. Otherwise a name a line.
    """
    if where.endswith(".json"):
        names = from_json(text, where)
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    result = tuple(map(class_name, names))
    if len(set(result)) < len(result):
        twice = next(name for name in result if result.count(name) > 1)
        raise DataError(f"{where}: the class {twice!r} is listed twice")
    if not result:
        raise DataError(f"{where}: lists no class")
    return result


def from_json(text: str, where: str) -> list[str]:
    try:
        content = json.loads(text)
        if isinstance(content, list):
            return [str(name) for name in content]
        pairs = [(int(k), v) if k.isdecimal() else (int(v), k) for k, v in content.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: neither a list of class names nor an object of numbers and names") from error
    if sorted(number for number, _ in pairs) != list(range(len(pairs))):
        raise DataError(f"{where}: the {len(pairs)} classes are not numbered from 0 to {len(pairs) - 1}")
    return [str(name) for _, name in sorted(pairs)]
