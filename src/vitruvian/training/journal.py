"""The metrics of a run: `metrics.jsonl`, listeners, TensorBoard events and progress on the terminal."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from vitruvian.errors import MissingExtraError, TrainingError, require
from vitruvian.evaluation.metrics import headline
from vitruvian.files import parse_object
from vitruvian.progress import Progress, on_terminal, print_status

Line = dict[str, Any]

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "events"
EMPTY = sha256().hexdigest()  # digest of an empty file


class Listener:
    """Receives the events of a run; override the methods you need."""

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        """The run starts, or resumes after `done` steps."""

    def stepped(self, step: int) -> None:
        """`step` steps are done."""

    def recorded(self, line: Line) -> None:
        """`line` was added to metrics.jsonl."""

    def said(self, text: str) -> None:
        """A note for the user."""

    def finished(self) -> None:
        """The run ended, successfully or not; called once."""


def notify(listeners: Sequence[Listener], text: str) -> None:
    for listener in listeners:
        listener.said(text)


class Journal:
    """Appends to metrics.jsonl and notifies the listeners."""

    def __init__(self, path: Path, listeners: Sequence[Listener], keep_bytes: int, keep_digest: str) -> None:
        """Truncates an existing file to `keep_bytes`, its size at the checkpoint that the run resumes from."""
        self.path, self.listeners = path, listeners
        content = path.read_bytes()[:keep_bytes] if path.is_file() else b""
        self._hash = sha256(content)
        if self.digest() != keep_digest:
            reason = "has changed since the checkpoint was written"
            raise TrainingError(reason, where=path, hint="restore it, or start a new run")
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115  (open as long as the run)
        self._file.truncate(keep_bytes)

    def record(self, line: Line) -> None:
        try:
            written = json.dumps(line).encode() + b"\n"
            self._file.write(written)
            self._file.flush()
            self._hash.update(written)
        except OSError as error:
            raise TrainingError(f"cannot be written: {error.strerror}", where=self.path) from error
        for listener in self.listeners:
            listener.recorded(line)

    def sync(self) -> int:
        """Flush the file to disk; returns its size in bytes."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of metrics.jsonl; an incomplete last line, still being written, is skipped."""
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                yield parse_object(line, f"{path}, line {number}", raises=TrainingError)


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line of metrics by the names of trackers: `loss/train`, `top1/val`."""
    numbers = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    split = line.get("split", "run")
    return {f"{name}/{split}": float(value) for name, value in numbers.items() if not isinstance(value, bool)}


@cache
def print_once(text: str) -> None:
    """Print a status line, but the same text only once per process: a sweep has many runs."""
    print_status(text)


class TensorBoard(Listener):
    """Writes each line of metrics.jsonl as events: `loss/train`, `loss/val`, `top1/val` and so on.

    A resumed run appends, and TensorBoard drops the events written after the last checkpoint. Without the package
    `tensorboard` nothing is written, which is reported once.
    """

    _writer: Any = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        try:
            require("tensorboard", "train")
        except MissingExtraError as error:
            print_once(f"no TensorBoard events are written; {error}")
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=done or None)
        except OSError as error:
            raise TrainingError(f"cannot be written: {error.strerror}", where=folder / EVENTS_FOLDER) from error
        if done:  # purging includes the checkpoint's own step, whose lines were written before the checkpoint
            for line in read_journal(folder / METRICS_FILE):
                if line.get("step") == done:
                    self.recorded(line)

    def recorded(self, line: Line) -> None:
        if self._writer is None:
            return
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()  # no event before a checkpoint may be lost with the process

    def finished(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ProgressListener(Listener):
    """Shows a progress bar with loss, learning rate and speed; prints evaluations and notes as lines."""

    _progress: Progress | None = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self._progress = Progress("step", steps, done=done)
        if not on_terminal():
            print_status(f"{folder}: step {done} of {steps}")

    def stepped(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(step)

    def recorded(self, line: Line) -> None:
        is_training = line["split"] == "train"
        name = "train" if is_training else "validation"
        text = f"epoch {line['epoch']:.2f}  {name} loss {line['loss']:.4f}  {headline(line)[1]}"
        if not is_training:
            print_status(f"step {line['step']}  {text}")
        elif self._progress is not None:
            self._progress.detail = f"{text}  lr {line['lr']:.2e}  {line['images_per_second']:.0f} img/s"

    def said(self, text: str) -> None:
        print_status(f"note: {text}")

    def finished(self) -> None:
        if self._progress is not None:
            self._progress.close()
