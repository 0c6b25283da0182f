"""The progress of a run on stderr."""

from __future__ import annotations

from pathlib import Path

from vitruvian.progress import Progress, on_terminal, tell
from vitruvian.training.journal import Line, Listener


class ShownProgress(Listener):
    """Steps and time left with the newest loss, learning rate and speed; evaluations and notes stay as lines."""

    _progress: Progress | None = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self._progress = Progress("step", steps, done=done)
        if not on_terminal():
            tell(f"{folder}: step {done} of {steps}")

    def stepped(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(step)

    def recorded(self, line: Line) -> None:
        if line["split"] != "train":
            tell(f"step {line['step']}  {described(line)}")
        elif self._progress is not None:
            self._progress.detail = described(line)

    def said(self, text: str) -> None:
        tell(f"note: {text}")

    def finished(self) -> None:
        if self._progress is not None:
            self._progress.close()


def described(line: Line) -> str:
    """A line of metrics in words."""
    text = f"epoch {line['epoch']:.2f}  {line['split']} loss {line['loss']:.4f}  top-1 {line['top1']:.2f}%"
    if "lr" in line:
        text += f"  lr {line['lr']:.2e}  {line['images_per_second']:.0f} img/s"
    return text
