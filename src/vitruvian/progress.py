"""Progress of long work on stderr: a bar on a terminal, otherwise a line every few seconds; nothing for quick work."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vitruvian.text import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Item = TypeVar("Item")

QUIET_SECONDS = 2.0
"""Time before a bar is shown."""
LINE_SECONDS = 10.0
"""Time before the first line, and between lines, if stderr is not a terminal."""
RECENT_SECONDS = 120.0
"""Window over which the speed is measured."""
SAMPLE_SECONDS = 0.25
"""Minimum time between two samples of the speed."""


class Track(Protocol):
    """Yields the items unchanged, and may show how many of the total have been processed."""

    def __call__(self, items: Iterable[Item], total: int) -> Iterable[Item]: ...


def no_tracking(items: Iterable[Item], total: int) -> Iterable[Item]:
    """The default `Track`, which shows nothing."""
    return items


def track(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """Yield the items and show the progress."""
    with Progress(label, total) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def track_amounts(amounts: Iterable[int], total: int, label: str) -> Iterator[int]:
    """Yield amounts of work that add up to `total`, and show the progress."""
    done = 0
    with Progress(label, total) as progress:
        for amount in amounts:
            yield amount
            done += amount
            progress.update(done)


def print_status(text: str) -> None:
    """Print a line to stderr, above a progress bar if there is one; do nothing if stderr is closed."""
    if _bars is not None:
        _bars.console.print(text, highlight=False, markup=False, soft_wrap=True)
    elif sys.stderr is not None:  # print() would take None for stdout
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Print `text` if the block takes long."""
    timer = threading.Timer(QUIET_SECONDS, print_status, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class WorkSpeed:
    """Speed of recent work. Time in which the process was stopped (Ctrl-Z, a laptop asleep) does not count."""

    def __init__(self, done: float = 0) -> None:
        self._now = time.monotonic(), time.process_time()
        self._samples = deque([(0.0, 0.0, done)])
        """Seconds of work, CPU seconds in them, and the amount done by then."""

    def update(self, done: float) -> None:
        """Record that `done` units are complete."""
        now = time.monotonic(), time.process_time()
        wall, cpu = now[0] - self._now[0], now[1] - self._now[1]
        if wall < SAMPLE_SECONDS:
            return
        self._now = now
        worked, used, before = self._samples[-1]
        if self._was_stopped(wall, cpu):
            wall = self._seconds_per_unit() * (done - before)
        self._samples.append((worked + wall, used + cpu, done))
        while len(self._samples) > 8 and worked + wall - self._samples[0][0] > RECENT_SECONDS:
            self._samples.popleft()

    def _was_stopped(self, wall: float, cpu: float) -> bool:
        """Whether a sample was a pause: far longer than usual, and with hardly any CPU time."""
        worked = [sample[0] for sample in self._samples]
        usual = median([after - before for before, after in pairwise(worked)] or [0.0])
        share = (self._samples[-1][1] - self._samples[0][1]) / ((worked[-1] - worked[0]) or 1.0)
        return wall > max(2.0, 5 * usual) and cpu / wall < 0.2 * (share or 0.05)

    def _seconds_per_unit(self) -> float:
        (begun, _, first), (ended, _, last) = self._samples[0], self._samples[-1]
        return (ended - begun) / (last - first) if last > first else 0.0

    def left(self, total: float | None) -> float | None:
        """Estimated seconds until `total`; None if unknown."""
        last = self._samples[-1][2]
        return (
            None if total is None or last <= self._samples[0][2] else self._seconds_per_unit() * max(0.0, total - last)
        )


class Progress:
    """Progress of one piece of work, from the first update until `close`.

    Args:
        label: Shown before the amounts.
        total: Amount at which the work is complete, if known.
        done: Amount that is complete already.
        unit: "bytes" shows amounts as MB and GB.
    """

    def __init__(self, label: str, total: int | None = None, *, done: int = 0, unit: str = "") -> None:
        self.label, self.total, self.done, self.unit = label, total, done, unit
        self.detail = ""
        """Text after the amounts; may be set at any time."""
        self._speed = WorkSpeed(done)
        self._begun = self._printed = time.monotonic()
        self._task: Any = None
        self._shows = os.environ.get("RANK", "0") == "0"  # rank 0 of torchrun

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, done: int) -> None:
        self.done = done
        self._speed.update(done)
        now = time.monotonic()
        if not self._shows:
            return
        if on_terminal():
            if self._task is not None or now - self._begun > QUIET_SECONDS:
                self._draw()
        elif now - self._printed >= LINE_SECONDS:
            self._printed = now
            print_status(f"{self.label}: {self.amount()}{self.left()}{'; ' * bool(self.detail)}{self.detail}")

    def amount(self) -> str:
        """`20 of 100`."""
        shown = format_bytes if self.unit == "bytes" else "{:,}".format
        return f"{shown(self.done)} of {shown(self.total)}" if self.total else shown(self.done)

    def left(self) -> str:
        """`, 20 s left`; empty while unknown."""
        seconds = self._speed.left(self.total)
        return "" if seconds is None else f", {format_duration(seconds)} left"

    def _draw(self) -> None:
        bars = _open_bars()
        fields: dict[str, Any] = {"numbers": f"{self.amount()}{self.left()}", "detail": self.detail}
        if self._task is None:
            self._task = bars.add_task(self.label, total=self.total, completed=self.done, **fields)
        else:
            bars.update(self._task, completed=self.done, **fields)

    def close(self) -> None:
        if self._task is not None:
            _close_bar(self._task)
            self._task = None


def on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


_bars: Bars | None = None
"""The bars on the terminal now, one per piece of work, such as a download within a command."""


def _open_bars() -> Bars:
    global _bars
    if _bars is None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        names = ("description", "fields[numbers]", "fields[detail]")
        label, *amounts = (TextColumn(f"{{task.{name}}}", markup=False) for name in names)
        same_terminal = sys.stdout is not None and sys.stdout.isatty()  # then rich keeps stdout above the bar
        console = Console(stderr=True)
        _bars = Bars(
            label,
            BarColumn(),
            *amounts,
            console=console,
            transient=True,
            redirect_stdout=same_terminal,
            refresh_per_second=4,
        )
        _bars.start()
    return _bars


def _close_bar(task: Any) -> None:
    global _bars
    if _bars is not None:
        _bars.remove_task(task)
        if not _bars.tasks:
            _bars.stop()
            _bars = None
