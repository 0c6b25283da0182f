"""Files derived from a dataset: made once, whole or not at all, and found again while the data stays as it is."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from vitruvian.errors import DataError, FileError
from vitruvian.files import cache_folder, scratch_folder, short_hash, staged

FORMAT = 1
"""Raised when the layout of what is stored changes, so that older files are not read."""

STALE_SECONDS = 24 * 3600
"""Age at which what was derived from an earlier state of the data is removed."""


def derived(kind: str, files: Sequence[Path], build: Callable[[Path], None]) -> Path:
    """A folder that `build` filled from these files: an earlier one if they are still the same.

    Where the cache folder cannot be written, the folder is temporary and ends with this process.
    """
    try:
        state = [(found.st_size, found.st_mtime_ns) for found in map(os.stat, files)]
    except OSError as error:
        raise DataError(f"{error.filename}: {(error.strerror or 'cannot be read').lower()}") from error
    group = cache_folder() / "index" / short_hash([kind, *map(os.path.abspath, files)])
    target = group / short_hash([FORMAT, *state])
    if target.is_dir():
        return target
    try:
        with staged(target) as new:
            new.mkdir()
            fill(new, build)
    except FileError:
        target = scratch_folder()
        fill(target, build)
        return target
    remove_stale(group, keep=target)
    return target


def fill(folder: Path, build: Callable[[Path], None]) -> None:
    """Run `build`; what it cannot read is a DataError, what it cannot write stays an OSError of this folder."""
    try:
        build(folder)
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(folder):
            raise
        raise DataError(f"{error.filename}: {error.strerror or error} (while reading the data)") from error


def remove_stale(group: Path, keep: Path) -> None:
    """Remove what was derived from earlier states, unless a running process may still use it."""
    for folder in group.iterdir():
        with suppress(OSError):  # another process removes it at the same time
            if folder != keep and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
