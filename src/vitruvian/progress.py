"""Progress of long work on stderr: a bar on a terminal, otherwise a line every few seconds; nothing for quick work."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vitruvian.text import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Item = TypeVar("Item")

QUIET_SECONDS = 2.0  # time before a bar is shown
LINE_SECONDS = 10.0  # time before the first line, and between lines, if stderr is not a terminal
RECENT_SECONDS = 120.0  # window over which the speed is measured
SAMPLE_SECONDS = 0.25  # minimum time between two samples of the speed


class Track(Protocol):
    """Yields the items unchanged, and may show how many of the total have been processed."""

    def __call__(self, items: Iterable[Item], total: int) -> Iterable[Item]: ...


def no_tracking(items: Iterable[Item], total: int) -> Iterable[Item]:
    """The default `Track`, which shows nothing."""
    return items


def track(items: Iterable[Item], total: int, label: str, amount: Callable[[Any], int] = lambda _: 1) -> Iterator[Item]:
    """Yield the items, whose amounts of work add up to `total`, and show the progress."""
    done = 0
    with Progress(label, total) as progress:
        for item in items:
            yield item
            done += amount(item)
            progress.update(done)


def print_status(text: str) -> None:
    """Print a line to stderr, above a progress bar if there is one; do nothing if stderr is closed."""
    if _status_log is not None:
        _status_log(text)
    elif _bars is not None:
        escape = getattr(sys.stderr, "escape", str)  # the console writes to the stream below
        _bars.console.print(escape(text), highlight=False, markup=False, soft_wrap=True)
    elif sys.stderr is not None:  # print() would take None for stdout
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def log_status(log: Callable[[str], None]) -> None:
    """From now on, pass the lines of `print_status` to a log instead of printing them, as a service needs."""
    global _status_log
    _status_log = log


def print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print_status(f"note: {note}")


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Print `text` if the block takes long, unless status lines go to a log."""
    timer = threading.Timer(QUIET_SECONDS, print_status, [text])
    timer.daemon = True
    if _status_log is None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class WorkSpeed:
    """Speed of recent work."""

    def __init__(self, done: float = 0) -> None:
        self._samples = deque([(time.monotonic(), done)])  # when, and the amount done by then

    def update(self, done: float) -> None:
        """Record that `done` units are complete."""
        now = time.monotonic()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, done))
        while len(self._samples) > 8 and now - self._samples[0][0] > RECENT_SECONDS:
            self._samples.popleft()

    def left(self, total: float | None) -> float | None:
        """Estimated seconds until `total`; None if unknown."""
        (begun, first), (ended, last) = self._samples[0], self._samples[-1]
        if total is None or last <= first:
            return None
        return (ended - begun) / (last - first) * max(0.0, total - last)


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
        self.detail = ""  # text after the amounts; may be set at any time
        self._speed = WorkSpeed(done)
        self._begun = self._printed = time.monotonic()
        self._task: Any = None
        self._shows = not _hidden and prints_results()

    def __enter__(self) -> "Progress":
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
            if self._task is None and now - self._begun <= QUIET_SECONDS:
                return
            shown: Any = {"completed": done, "numbers": f"{self.amount()}{self.left()}", "detail": self.detail}
            if self._task is None:
                self._task = _open_bars().add_task(self.label, total=self.total, **shown)
            else:
                _open_bars().update(self._task, **shown)
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

    def close(self) -> None:
        global _bars
        if self._task is not None and _bars is not None:
            _bars.remove_task(self._task)
            if not _bars.tasks:
                _bars.stop()
                _bars = None
        self._task = None


def prints_results() -> bool:
    """Whether this process prints for all: it runs alone, or is rank 0 of torchrun."""
    return os.environ.get("RANK", "0") == "0"


_hidden = False


@contextmanager
def hide_progress() -> Iterator[None]:
    """A context in which no new progress is shown."""
    global _hidden
    before, _hidden = _hidden, True
    try:
        yield
    finally:
        _hidden = before


def on_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


_status_log: Callable[[str], None] | None = None  # where status lines go instead of stderr
_bars: "Bars | None" = None  # the bars on the terminal now, one per piece of work, such as a download within a command


def _open_bars() -> "Bars":
    global _bars
    if _bars is None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        names = ("description", "fields[numbers]", "fields[detail]")
        label, *amounts = (TextColumn(f"{{task.{name}}}", markup=False) for name in names)
        same_terminal = sys.stdout is not None and sys.stdout.isatty()  # then rich keeps stdout above the bar
        behavior: Any = {"transient": True, "redirect_stdout": same_terminal, "refresh_per_second": 4}
        terminal = Console(file=getattr(sys.stderr, "stream", sys.stderr))  # of a PrintableStream, which escapes colors
        _bars = Bars(label, BarColumn(), *amounts, console=terminal, **behavior)
        _bars.start()
    return _bars
