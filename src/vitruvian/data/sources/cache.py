"""Files derived from a dataset: made once, whole or not at all, and found again while the data stays as it is."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from vitruvian.data.sources.locks import lock, locked
from vitruvian.errors import DataError

FORMAT = 1
"""Raised when the layout of what is stored changes, so that older files are not read."""

STALE_SECONDS = 24 * 3600
"""Age at which what was derived from an earlier state of the data is removed."""


SCRATCH = "vitruvian-scratch-"
"""How the names of scratch folders begin."""

NEW_SECONDS = 60
"""Age below which the lock of a scratch folder may not yet be held."""


def cache_folder() -> Path:
    """Where derived files live: $VITRUVIAN_CACHE, or `vitruvian` in the user's cache folder."""
    chosen = os.environ.get("VITRUVIAN_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitruvian"


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
        group.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=group))
    except OSError:
        group = scratch_folder()
        target, unfinished = group / "index", group / "unfinished"
        unfinished.mkdir()
    fill(unfinished, build)
    try:
        unfinished.rename(target)
    except OSError:  # another process was faster; its result is as good
        shutil.rmtree(unfinished, ignore_errors=True)
    remove_stale(group, keep=target)
    return target


def fill(folder: Path, build: Callable[[Path], None]) -> None:
    """Run `build`; leave nothing behind if it fails."""
    try:
        build(folder)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(
                f"{error.filename or folder}: {error.strerror or error} (while reading the data)"
            ) from error
        raise


def remove_stale(group: Path, keep: Path) -> None:
    """Remove what was derived from earlier states, unless a running process may still use it."""
    for folder in group.iterdir():
        try:
            if folder != keep and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # another process removes it at the same time
            continue


def short_hash(parts: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def scratch_folder() -> Path:
    """A new folder that ends with this process."""
    return Path(tempfile.mkdtemp(dir=_scratch(os.getpid())))


@lru_cache(maxsize=1)
def _scratch(process: int) -> Path:
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
    lock(folder / "lock", wait=False)  # held until this process ends
    atexit.register(_remove, folder, process)
    return folder


def remove_abandoned(temporary: Path) -> None:
    """Remove the scratch folders of processes that were killed: their locks are there, and free."""
    for path in temporary.glob(f"{SCRATCH}*/lock"):
        try:
            if time.time() - path.stat().st_mtime < NEW_SECONDS:
                continue
            with locked(path, wait=False) as free:
                if free:
                    shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # of another user, or removed at the same time
            continue


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child, which shares the folder
        shutil.rmtree(folder, ignore_errors=True)
