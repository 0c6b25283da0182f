"""Progress on stderr for work that lasts: a bar, or a line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

QUIET_SECONDS = 2.0
"""Nothing is shown before."""


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def track(items: Iterable[Item], total: int, label: str) -> Iterator[Item]:
    """The items, with a bar on stderr after a while if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    started = time.monotonic()
    source = iter(items)
    for done, item in enumerate(source, 1):
        yield item
        if time.monotonic() - started > QUIET_SECONDS and done < total:
            yield from shown(source, done, total, label)


def shown(items: Iterator[Item], done: int, total: int, label: str) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    together = sys.stdout is not None and sys.stdout.isatty()  # then rich keeps printed lines above the bar
    bar = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=together)
    with bar:
        task = bar.add_task(label, total=total, completed=done)
        for item in items:
            yield item
            bar.advance(task)
