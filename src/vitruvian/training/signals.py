"""Asking a run to stop: the step is finished and kept before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """The signal that asked, or 0."""

    def __init__(self) -> None:
        self.number = 0

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.number:  # asked twice: now
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT become a request while the context lasts; only a main thread can have it so."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
