"""Many runs as one piece of work: each is trained, resumed or left as it is, and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitruvian.errors import Interrupted
from vitruvian.files import write_json
from vitruvian.training.distributed import Processes
from vitruvian.training.given import DataRef
from vitruvian.training.journal import Listener
from vitruvian.training.loop import Diverged
from vitruvian.training.recipe import Recipe
from vitruvian.training.run import FAILED_FILE, Run, RunState
from vitruvian.training.train import begin, resume

BEFORE: dict[RunState, str] = {
    "done": " (done before)",
    "failed": " (diverged before)",
    "begun": " (goes on)",
    "waiting": "",
}
"""What is said of a run when its turn comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Runs on one dataset, which is opened once. All processes follow what the main one finds in the folders."""

    data: DataRef
    processes: Processes
    listeners: Sequence[Listener] = ()
    said: Callable[[str], None]
    """Hears what comes next, in the main process."""
    record: Callable[[], object]
    """Writes what is known so far; called in the main process."""

    def train(self, folder: Path, recipe: Recipe, title: str) -> None:
        """Train the run in a folder, or go on with it, unless it is over.

        A run that diverges is over, too: its folder says why, and the series goes on.
        """
        state: RunState = self.processes.broadcast(Run(folder).state)
        if self.processes.is_main:
            self.said(title + BEFORE[state])
        try:
            if state == "begun":
                resume(folder, data=self.data, listeners=self.listeners, progress=False)
            elif state == "waiting":
                begin(self.data, recipe, out=folder, listeners=self.listeners)
        except Interrupted as stopped:
            text = f"stopped in {folder.name}; the same command goes on from there"
            raise Interrupted(text, stopped.number) from None
        except Diverged as error:
            if self.processes.is_main:
                write_json(folder / FAILED_FILE, str(error))
        if self.processes.is_main:
            Run(folder).forget_checkpoints()
            self.record()
