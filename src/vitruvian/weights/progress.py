"""How far a transfer is, on stderr, if it lasts: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_SECONDS = 2.0
"""Nothing is shown before."""
LINE_SECONDS = 15.0
"""Between two lines where stderr is not a terminal."""
MIB = 1 << 20


@contextmanager
def transfer_progress(label: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """A function to call with the number of bytes so far; `size` is their number in the end, if known."""
    with (_bar if sys.stderr.isatty() else _lines)(label, size) as show:
        yield show


@contextmanager
def _bar(label: str, size: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = progress.add_task(label, total=size)
    begun = time.monotonic()

    def show(done: int) -> None:
        if not progress.live.is_started and time.monotonic() - begun > QUIET_SECONDS:
            progress.start()
        progress.update(task, completed=done)

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def _lines(label: str, size: int | None) -> Iterator[Callable[[int], None]]:
    due = time.monotonic() + QUIET_SECONDS

    def show(done: int) -> None:
        nonlocal due
        if time.monotonic() > due:
            due = time.monotonic() + LINE_SECONDS
            of = f" of {size / MIB:,.0f}" if size else ""
            print(f"{label}: {done / MIB:,.0f}{of} MiB", file=sys.stderr, flush=True)

    yield show
