"""Locks between processes: held by an open file, so that the lock of a process that dies is free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where every lock is free: work may be done twice there
    fcntl = None  # type: ignore[assignment]


def lock(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock until it is closed; None if another one has it and `wait` is False."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether this is the only one at it."""
    descriptor = lock(path, wait=wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)
