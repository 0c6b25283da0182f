"""The metrics of a run as TensorBoard events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitruvian.errors import MissingExtraError, TrainingError, require
from vitruvian.training.journal import METRICS_FILE, Line, Listener, read_journal

FOLDER = "events"
"""Inside the run's folder."""


class TensorBoard(Listener):
    """Writes each line of metrics.jsonl as events: `loss/train`, `loss/val`, `top1/val` and so on.

    A run that goes on after an interruption appends, and TensorBoard forgets what the interrupted run wrote after
    its last checkpoint. Without the package `tensorboard`, one line through `say`, and the run goes on.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._writer: Any = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        try:
            require("tensorboard", "train")
        except MissingExtraError as error:
            self.say(f"no TensorBoard events are written; {error}")
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
