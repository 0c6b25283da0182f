"""How far long work is, on stderr: a bar on a terminal, a plain line now and then elsewhere, nothing if it is quick."""

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
"""No bar is shown before."""
LINE_SECONDS = 10.0
"""Before the first plain line, and between two of them."""
RECENT_SECONDS = 120.0
"""Work over which the speed is measured."""
SAMPLE_SECONDS = 0.25
"""Between two measurements of the speed."""


class Track(Protocol):
    """Passes items on unchanged, and may show how many of the total have passed."""

    def __call__(self, items: Iterable[Item], total: int) -> Iterable[Item]: ...


def no_tracking(items: Iterable[Item], total: int) -> Iterable[Item]:
    return items


def track(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """The items, with their progress shown while they pass."""
    with Progress(label, total) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def track_amounts(amounts: Iterable[int], total: int, label: str) -> Iterator[int]:
    """Amounts of work that add up to the total, with their progress shown while they pass."""
    done = 0
    with Progress(label, total) as progress:
        for amount in amounts:
            yield amount
            done += amount
            progress.update(done)


def print_status(text: str) -> None:
    """A line on stderr, above a bar if there is one; nothing where stderr is closed."""
    if _bars is not None:
        _bars.console.print(text, highlight=False, markup=False, soft_wrap=True)
    elif sys.stderr is not None:  # print() would take None for stdout
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Tell what is waited for, if that takes long."""
    timer = threading.Timer(QUIET_SECONDS, print_status, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class WorkSpeed:
    """How quick recent work was; time in which the process was stopped does not count."""

    def __init__(self, done: float = 0) -> None:
        self._now = time.monotonic(), time.process_time()
        self._samples = deque([(0.0, 0.0, done)])
        """Seconds of work, seconds of the processor in them, and what was done by then."""

    def update(self, done: float) -> None:
        """So much is done by now."""
        now = time.monotonic(), time.process_time()
        wall, cpu = now[0] - self._now[0], now[1] - self._now[1]
        if wall < SAMPLE_SECONDS:
            return
        self._now = now
        worked, used, before = self._samples[-1]
        if self._was_stopped(wall, cpu):
            wall = self._usual() * (done - before)
        self._samples.append((worked + wall, used + cpu, done))
        while len(self._samples) > 8 and worked + wall - self._samples[0][0] > RECENT_SECONDS:
            self._samples.popleft()

    def _was_stopped(self, wall: float, cpu: float) -> bool:
        """A pause is far longer than what is usual, and the processor has hardly been used in it."""
        worked = [sample[0] for sample in self._samples]
        usual = median([after - before for before, after in pairwise(worked)] or [0.0])
        share = (self._samples[-1][1] - self._samples[0][1]) / ((worked[-1] - worked[0]) or 1.0)
        return wall > max(2.0, 5 * usual) and cpu / wall < 0.2 * (share or 0.05)

    def _usual(self) -> float:
        """Seconds a unit."""
        (begun, _, first), (ended, _, last) = self._samples[0], self._samples[-1]
        return (ended - begun) / (last - first) if last > first else 0.0

    def left(self, total: float | None) -> float | None:
        """Seconds until `total`, if that can be told."""
        last = self._samples[-1][2]
        return None if total is None or last <= self._samples[0][2] else self._usual() * max(0.0, total - last)


class Progress:
    """The progress of one piece of work, from the first update until it is closed."""

    def __init__(self, label: str, total: int | None = None, *, done: int = 0, unit: str = "") -> None:
        """`unit="bytes"` shows amounts as MB and GB; `detail` may be set to what stands after the numbers."""
        self.label, self.total, self.done, self.unit = label, total, done, unit
        self.detail = ""
        self._speed = WorkSpeed(done)
        self._begun = self._said = time.monotonic()
        self._task: Any = None
        self._shows = os.environ.get("RANK", "0") == "0"  # of the processes of torchrun, the first

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
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            print_status(f"{self.label}: {self.amount()}{self.left()}{'; ' * bool(self.detail)}{self.detail}")

    def amount(self) -> str:
        """`20 of 100`."""
        shown = format_bytes if self.unit == "bytes" else "{:,}".format
        return f"{shown(self.done)} of {shown(self.total)}" if self.total else shown(self.done)

    def left(self) -> str:
        """`, 20 s left`; empty while that cannot be told."""
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
"""What is on the terminal now: a bar for each piece of work, such as a download within a command."""


def _open_bars() -> Bars:
    global _bars
    if _bars is None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        names = ("description", "fields[numbers]", "fields[detail]")
        label, *told = (TextColumn(f"{{task.{name}}}", markup=False) for name in names)
        together = sys.stdout is not None and sys.stdout.isatty()  # then rich keeps printed lines above the bar
        console = Console(stderr=True)
        _bars = Bars(
            label, BarColumn(), *told, console=console, transient=True, redirect_stdout=together, refresh_per_second=4
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
