"""Patterns of file names: `{000..012}`, `{a,b}` and the wildcards of a shell."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from vitruvian.errors import DataError

MAX_NAMES = 1_000_000


def is_pattern(text: str) -> bool:
    return bool(braces(text)) or glob.has_magic(text)


def braces(text: str) -> re.Match[str] | None:
    """The first pair of braces that means a choice."""
    return re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", text)


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
        missing = [path for path in paths if not Path(path).exists()]
        if missing:
            raise DataError(f"{missing[0]}: no such file (from the pattern {pattern})")
        found += map(Path, paths)
    if not found:
        raise DataError(f"{pattern}: no file matches this pattern")
    return found
