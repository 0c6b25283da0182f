"""The record of a run: `metrics.jsonl`, one object a line, and whoever listens to it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from vitruvian.errors import MissingExtraError, TrainingError, require
from vitruvian.files import parse_object
from vitruvian.progress import Progress, on_terminal, print_status

Line = dict[str, Any]

METRICS_FILE, FOLDER = "metrics.jsonl", "events"
"""In the run's folder: its lines, and the same for TensorBoard."""
EMPTY = sha256().hexdigest()
"""The digest of no bytes."""


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


def tell_all(listeners: Sequence[Listener], text: str) -> None:
    for listener in listeners:
        listener.said(text)


class Journal:
    """Appends to metrics.jsonl and tells the listeners; silent in all processes but the first."""

    def __init__(
        self, path: Path, listeners: Sequence[Listener], *, keep_bytes: int = 0, keep_digest: str = EMPTY
    ) -> None:
        """Keeps the first bytes of a file that exists: what came before the checkpoint that a run goes on from."""
        self.path, self.listeners = path, listeners
        kept = path.read_bytes()[:keep_bytes] if path.is_file() else b""
        self._hash = sha256(kept)
        if self.digest() != keep_digest:
            raise TrainingError(
                f"{path}: has changed since the checkpoint was written; put it back, or start a new run"
            )
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115  (open as long as the run)
        self._file.truncate(keep_bytes)

    def record(self, line: Line) -> None:
        try:
            written = json.dumps(line).encode() + b"\n"
            self._file.write(written)
            self._file.flush()
            self._hash.update(written)
        except OSError as error:
            raise TrainingError(f"{self.path}: cannot be written: {error.strerror}") from error
        for listener in self.listeners:
            listener.recorded(line)

    def kept_bytes(self) -> int:
        """Bytes so far, all of them on the disk."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of metrics.jsonl; one that is cut off, as in a run that is being written, is left out."""
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                yield parse_object(line, f"{path}, line {number}", raises=TrainingError)


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


class TensorBoard(Listener):
    """Writes each line of metrics.jsonl as events: `loss/train`, `loss/val`, `top1/val` and so on.

    A run that goes on after an interruption appends, and TensorBoard forgets what the interrupted run wrote after
    its last checkpoint. Without the package `tensorboard`, one line through `say`, also for many runs, which go on.
    """

    def __init__(self, say: Callable[[str], None] = print_status) -> None:
        self.say = say
        self._said = False
        self._writer: Any = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        try:
            require("tensorboard", "train")
        except MissingExtraError as error:
            if not self._said:
                self.say(f"no TensorBoard events are written; {error}")
            self._said = True
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder / FOLDER), purge_step=done or None)
        except OSError as error:
            raise TrainingError(f"{folder / FOLDER}: cannot be written: {error.strerror}") from error
        if done:  # forgetting begins with the checkpoint's own step, whose lines may be older than the checkpoint
            for line in read_journal(folder / METRICS_FILE):
                if line.get("step") == done:
                    self.recorded(line)

    def recorded(self, line: Line) -> None:
        if self._writer is None:
            return
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()  # what a checkpoint relies on should not be lost with the process

    def finished(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line by their tags; those of all splits stand together."""
    return {
        f"{name}/{line.get('split', 'run')}": float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class ShownProgress(Listener):
    """Steps and time left with the newest loss, learning rate and speed; evaluations and notes stay as lines."""

    _progress: Progress | None = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self._progress = Progress("step", steps, done=done)
        if not on_terminal():
            print_status(f"{folder}: step {done} of {steps}")

    def stepped(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(step)

    def recorded(self, line: Line) -> None:
        if line["split"] != "train":
            print_status(f"step {line['step']}  {described(line)}")
        elif self._progress is not None:
            self._progress.detail = described(line)

    def said(self, text: str) -> None:
        print_status(f"note: {text}")

    def finished(self) -> None:
        if self._progress is not None:
            self._progress.close()


def described(line: Line) -> str:
    what = "train" if line["split"] == "train" else "held-out"
    text = f"epoch {line['epoch']:.2f}  {what} loss {line['loss']:.4f}  top-1 {line['top1']:.2f}%"
    if "lr" in line:
        text += f"  lr {line['lr']:.2e}  {line['images_per_second']:.0f} img/s"
    return text
