"""Work over a whole dataset, piece by piece: results in order from any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(function: Callable[[Item], Result], items: Iterable[Item], *, workers: int) -> Iterator[Result]:
    """`function(item)` of each item, in the order of the items; 0 workers: in this process."""
    if workers == 0:
        yield from map(function, items)
        return
    from vitruvian.data.workers import Workers  # brings PyTorch, which takes seconds

    with closing(Workers(function, workers)) as processes:
        yield from processes.results(items)
