"""The record of a run: `metrics.jsonl`, one object a line, and whoever listens to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from vitruvian.errors import TrainingError

Line = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
"""In the run's folder."""


class Listener:
    """Hears what happens in a run; a subclass overrides what it wants to hear."""

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        """A run, or its continuation after `done` steps, begins."""

    def stepped(self, step: int) -> None:
        """So many steps are done."""

    def recorded(self, line: Line) -> None:
        """This line has been added to metrics.jsonl."""

    def said(self, text: str) -> None:
        """Something a user should know."""

    def finished(self) -> None:
        """The run has ended, well or not; called once."""


class Journal:
    """Appends to metrics.jsonl and tells the listeners; silent in all processes but the first."""

    def __init__(self, path: Path, listeners: Sequence[Listener], *, keep_bytes: int = 0) -> None:
        """Keeps the first bytes of a file that exists: what came before the checkpoint that a run goes on from."""
        self.path, self.listeners = path, listeners
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115  (open as long as the run)
        if self._file.tell() < keep_bytes:
            raise TrainingError(f"{path}: shorter than when the checkpoint was written; it has been changed")
        self._file.truncate(keep_bytes)

    def record(self, line: Line) -> None:
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written: {error.strerror}") from error
        for listener in self.listeners:
            listener.recorded(line)

    def kept_bytes(self) -> int:
        """Bytes so far, all of them on the disk."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of metrics.jsonl; one that is cut off, as in a run that is being written, is left out."""
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
