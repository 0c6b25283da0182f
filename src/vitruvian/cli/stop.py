"""Training that a signal stops: one line on stderr, and the exit code that shells expect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def exit_when_stopped() -> Iterator[None]:
    """Leave with 128 and the signal's number where the training inside was asked to stop and has kept its work."""
    from vitruvian.training.signals import Interrupted

    try:
        yield
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
