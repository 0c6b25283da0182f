"""What names mean: splits, classes, and patterns of file names such as `train-{000..012}.tar`."""

from __future__ import annotations

import glob
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

from vitruvian.errors import DataError
from vitruvian.files import parse_json, read_text

SPLITS = {
    # the name used here: how folders, files and manifests call it
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}

CLASS_FILES = ("classes.json", "classes.txt")


@lru_cache(maxsize=1000)
def split_name(text: str) -> str | None:
    """The usual name of a split that is called `text`, or None where it means no split."""
    return next((name for name, others in SPLITS.items() if text.strip().lower() in others), None)


def split_of_file(path: str) -> str:
    """The split that a file's name or else its folder's names: `imagenet-train-0001.tar` is in `train`."""
    folder, _, name = path.replace("\\", "/").rpartition("/")
    for word in [*re.findall("[a-z]+", name.lower()), folder.rpartition("/")[2]]:
        split = split_name(word)
        if split:
            return split
    return "train"


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sorting key by which `class2` comes before `class10`."""
    parts = re.split(r"(\d+)", name.casefold())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part], name


def class_name(text: str) -> str:
    """A class's name in one spelling, however the file system composes its accents."""
    return unicodedata.normalize("NFC", text)


def listed_classes(folder: Path) -> tuple[tuple[str, ...] | None, list[Path]]:
    """The classes listed in a file of this folder, and the file; None and no file where there is none."""
    for name in CLASS_FILES:
        path = folder / name
        if path.is_file():
            return parse_classes(read_text(path, raises=DataError), str(path)), [path]
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
    content = parse_json(text, where, raises=DataError)
    try:
        if isinstance(content, list):
            return [str(name) for name in content]
        pairs = [(int(k), v) if k.isdecimal() else (int(v), k) for k, v in content.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: neither a list of class names nor an object of numbers and names") from error
    if sorted(number for number, _ in pairs) != list(range(len(pairs))):
        raise DataError(f"{where}: the {len(pairs)} classes are not numbered from 0 to {len(pairs) - 1}")
    return [str(name) for _, name in sorted(pairs)]


MAX_NAMES = 1_000_000


def is_pattern(text: str) -> bool:
    return bool(braces(text)) or glob.has_magic(text)


def braces(text: str) -> re.Match[str] | None:
    """The first pair of braces that means a choice."""
    return re.search(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*,[^{}]*))\}", text)


def expanded(text: str) -> list[str]:
    """All names that the braces stand for, with numbers as wide as the first one is written."""
    found = braces(text)
    if not found:
        return [text]
    first, last, choices = found.groups()
    if choices is not None:
        middles = choices.split(",")
    elif abs(int(last) - int(first)) >= MAX_NAMES:
        raise DataError(f"{text}: more than {MAX_NAMES} names")
    else:
        step = 1 if int(first) <= int(last) else -1
        middles = [str(number).zfill(len(first)) for number in range(int(first), int(last) + step, step)]
    before, after = text[: found.start()], text[found.end() :]
    return [name for middle in middles for name in expanded(before + middle + after)]


def matching(pattern: str) -> list[Path]:
    """The files that a pattern means; a name written out in braces must be there."""
    found: list[Path] = []
    for name in expanded(pattern):
        paths = sorted(glob.glob(name)) if glob.has_magic(name) and not Path(name).exists() else [name]
        missing = [path for path in paths if not Path(path).is_file()]
        if missing:
            what = "not a regular file" if Path(missing[0]).exists() else "no such file"
            raise DataError(f"{missing[0]}: {what} (from the pattern {pattern})")
        found += map(Path, paths)
    if not found:
        raise DataError(f"{pattern}: no file matches this pattern")
    return found
