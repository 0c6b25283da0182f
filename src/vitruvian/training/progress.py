"""Progress of a run on stderr: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vitruvian.training.journal import Line, Listener

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
"""Between plain lines."""


def progress() -> Listener:
    """What fits where stderr goes."""
    return Bar() if sys.stderr is not None and sys.stderr.isatty() else PlainLines()


class PlainLines(Listener):
    """The newest loss, learning rate and speed every ten seconds, and each evaluation."""

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self.steps, self.first = steps, done
        self.began = self.last = time.monotonic()
        self.say(f"{folder}: step {done} of {steps}")

    def recorded(self, line: Line) -> None:
        now = time.monotonic()
        if line["split"] != "train" or now - self.last >= LINE_SECONDS:
            self.last = now
            left = ""
            if line["step"] > self.first:
                left = f", {clock((now - self.began) / (line['step'] - self.first) * (self.steps - line['step']))} left"
            self.say(f"step {line['step']}/{self.steps}  {described(line)}{left}")

    def said(self, text: str) -> None:
        self.say(f"note: {text}")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar(Listener):
    """A progress bar with the newest loss, learning rate and speed; evaluations stay above it."""

    bar: Progress | None = None
    task: TaskID

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
        self.bar.start()
        self.task = self.bar.add_task("starting", total=steps, completed=done)

    def stepped(self, step: int) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def recorded(self, line: Line) -> None:
        if self.bar is not None and line["split"] == "train":
            self.bar.update(self.task, description=described(line))
        elif self.bar is not None:
            self.bar.console.print(f"step {line['step']}  {described(line)}", highlight=False)

    def said(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(f"note: {text}", highlight=False, markup=False)
        else:
            print(f"note: {text}", file=sys.stderr, flush=True)

    def finished(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def described(line: Line) -> str:
    """A line of metrics in words."""
    text = f"epoch {line['epoch']:.2f}  {line['split']} loss {line['loss']:.4f}  top-1 {line['top1']:.2f}%"
    if "lr" in line:
        text += f"  lr {line['lr']:.2e}  {line['images_per_second']:.0f} img/s"
    return text


def clock(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
