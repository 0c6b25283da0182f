"""The time that a run spends, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Time in all sessions of a run, and since the last line of metrics and the last checkpoint."""

    def __init__(self, before: float) -> None:
        """`before`: spent in earlier sessions."""
        now = time.monotonic()
        self._start, self._lap, self._checkpoint = now - before, now, now

    def total(self) -> float:
        return time.monotonic() - self._start

    def lap(self) -> float:
        """Since the last call, without pauses."""
        now = time.monotonic()
        seconds, self._lap = now - self._lap, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose time does not count in the lap."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._lap += time.monotonic() - began

    def since_checkpoint(self) -> float:
        return time.monotonic() - self._checkpoint

    def checkpointed(self) -> None:
        self._checkpoint = time.monotonic()
