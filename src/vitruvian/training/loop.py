"""The loop of a run: steps, lines of metrics, evaluations and checkpoints, until the end or a request to stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from vitruvian.data.loader import Batch, Loader
from vitruvian.errors import Interrupted, NotFiniteError, TrainingError
from vitruvian.model.build import empty
from vitruvian.progress import print_status
from vitruvian.text import brief
from vitruvian.training.checkpoint import (
    Checkpoints,
    Position,
    State,
    gathered,
    live_tensors,
    read_tensors,
    write_digests,
)
from vitruvian.training.distributed import reshard
from vitruvian.training.journal import Clock, Journal, Line
from vitruvian.training.masked import MaskedViT
from vitruvian.training.objective import Measured, Place
from vitruvian.training.recipe import Recipe
from vitruvian.training.run import Run
from vitruvian.training.step import Stepper
from vitruvian.weights.load import assemble
from vitruvian.weights.save import save

MEETING_STEPS = 10
"""With several processes, how often they agree on whether to stop or to write a checkpoint."""


class Loop:
    """Takes a run from its position to its end."""

    def __init__(
        self,
        folder: Path,
        stepper: Stepper,
        state: State,
        position: Position,
        *,
        validation: Loader,
        checkpoints: Checkpoints,
        journal: Journal | None,
    ) -> None:
        self.folder, self.stepper, self.state, self.position = folder, stepper, state, position
        self.batches, self.validation = stepper.batches, validation
        self.checkpoints, self.journal = checkpoints, journal
        self.recipe, self.processes = state.recipe, checkpoints.processes
        self.steps = self.batches.total
        self.listeners = () if journal is None else journal.listeners
        self.sums: list[Tensor] = []
        """Of the steps since the last read from the device."""
        self.measures: Measured | None = None
        """Of the last evaluation in this session."""
        self.clock = Clock(position.seconds)

    def run(self, stop: StopRequest) -> None:
        """To the end; Interrupted where a signal asks to stop, once a checkpoint is written."""
        position = self.position
        if position.step and self.evaluation_due() and position.evaluated != position.step:
            self.evaluate(stop)
        for batch in self.batches.from_step(position.step):
            if self.finished():
                break
            self.sums.append(self.stepper.take(batch, position.step))
            position.step += 1
            position.unreadable.update(batch.unreadable)
            self.after_step(stop)
        self.checkpoint(wait=True)

    def finished(self) -> bool:
        """Whether the run has ended early."""
        return bool(self.recipe.patience) and self.position.worse >= self.recipe.patience

    def after_step(self, stop: StopRequest) -> None:
        """What is due after a step, in an order that a continued run repeats."""
        step = self.position.step
        for listener in self.listeners:
            listener.stepped(step)
        if step % self.recipe.log_every == 0 or step == self.steps:
            self.record_training()
        if self.evaluation_due():
            self.evaluate(stop)
        asked, due = self.agreement(stop)
        if due or asked:
            self.checkpoint(wait=bool(asked))
        if asked and step < self.steps:
            self.interrupt(asked)

    def interrupt(self, number: int) -> None:
        raise Interrupted(
            f"stopped after step {self.position.step} of {self.steps}; "
            f"continue with `vit train --resume {self.folder}`",
            number,
        )

    def agreement(self, stop: StopRequest) -> tuple[int, bool]:
        """The signal that asks to stop, and whether a checkpoint is due: the same in all processes."""
        every = self.recipe.checkpoint_steps
        due = bool(every) and self.position.step % every == 0
        if not self.processes.is_distributed:
            return stop.number, due or self.clock.since_checkpoint() > self.recipe.checkpoint_seconds
        if self.position.step % MEETING_STEPS and self.position.step < self.steps:
            return 0, due
        late = self.processes.is_main and self.clock.since_checkpoint() > self.recipe.checkpoint_seconds
        word = self.processes.all_reduce_max(2 * stop.number + late)
        return word // 2, due or bool(word % 2)

    def evaluation_due(self) -> bool:
        return self.position.step % self.batches.per_evaluation == 0 or self.position.step == self.steps

    def settle(self) -> None:
        """Read what the steps gave since the last time, from all processes; a loss that is no number ends the run."""
        if not self.sums:
            return
        rows = self.processes.all_reduce_sum(torch.stack(self.sums)).tolist()
        first = self.position.step - len(rows)
        self.sums.clear()
        for number, row in enumerate(rows):
            if row[0] != row[0] or abs(row[0]) == float("inf"):
                self.stop_at(first + number, f"the loss of step {first + number + 1} is not a finite number")
        self.position.pending += rows

    def stop_at(self, step: int, what: str) -> None:
        found = self.checkpoints.all()
        kept = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
        raise Diverged(
            f"{what}; the batch was {brief(self.batches.keys(step), 8)}; {kept}; try a lower lr, grad_clip=1, or "
            "precision=float32 or bfloat16"
        )

    def record_training(self) -> None:
        self.settle()
        loss, right, images = (sum(column) for column in zip(*self.position.pending))
        self.position.pending.clear()
        seconds = self.clock.lap()
        self.record(
            "train",
            loss=loss / images,
            top1=100 * right / images,
            lr=self.stepper.schedule.lr_at(self.position.step - 1),
            images_per_second=round(images / max(seconds, 1e-9), 1),
        )

    def record(self, split: str, **values: float) -> None:
        if self.journal is not None:
            self.journal.record(self.line(split, self.position.step) | values)

    def line(self, split: str, step: int) -> Line:
        seconds = round(self.clock.total(), 2)
        return {"step": step, "epoch": step / self.batches.per_epoch, "split": split, "seconds": seconds}

    def evaluate(self, stop: StopRequest) -> None:
        """Measure the weights that are used, and keep them if they are the best so far."""
        self.settle()
        try:
            with self.clock.paused(), self.averaged():
                self.measures = self.measured(stop)
                self.record("val", **self.measures.scalars())
                self.judge(self.measures)
        except EvaluationCut:
            self.checkpoint(wait=True)
            self.interrupt(stop.number)
        except NotFiniteError:  # no later step has a loss that could tell
            if self.processes.is_distributed and self.state.finite():
                raise  # perhaps in this process alone: it ends, and the others with it
            step = self.position.step
            self.stop_at(step - 1, f"the weights after step {step} give answers that are not finite numbers")
        self.position.evaluated = self.position.step

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.state.average is None else self.state.average.in_place()

    def measured(self, stop: StopRequest) -> Measured:
        place = Place(device=self.processes.device, dtype=self.stepper.dtype, all_ranks=self.processes.is_distributed)
        batches, images = self.unless_stopped(stop), len(self.validation.source)
        try:
            return self.stepper.objective.measured(self.state.model, batches, images, place)
        finally:
            reshard(self.state.model)

    def unless_stopped(self, stop: StopRequest) -> Iterator[Batch]:
        """The validation batches; a lone process that is asked to stop does not evaluate to the end."""
        for batch in self.validation.batches(0):
            if stop.number and not self.processes.is_distributed:
                raise EvaluationCut
            self.position.unreadable.update(batch.unreadable)
            yield batch

    def judge(self, measures: Measured) -> None:
        position = self.position
        value = measures.top1 if self.recipe.monitor == "top1" else -measures.loss
        if position.best is not None and value <= position.best:
            position.worse += 1
            return
        position.best, position.best_step, position.worse = value, position.step, 0
        if keeps_best(self.recipe):
            folder = Run(self.folder).best(position.step)
            self.save_model(folder)
            if self.processes.is_main:
                write_digests(folder)

    def save_model(self, folder: Path) -> None:
        """The model as it now is, gathered from all processes, as a native folder."""
        tensors = gathered(dict(self.state.model.state_dict()))
        if isinstance(self.state.model, MaskedViT):
            tensors = {name: tensor for name, tensor in tensors.items() if name not in MaskedViT.own_names}
        if self.processes.is_main:
            save(assemble(empty(self.state.model.config), tensors, self.state.model.meta), folder)
        self.processes.barrier()

    def take_best(self) -> None:
        """Put the weights of the best evaluation into the model."""
        best = Run(self.folder).best(self.position.best_step)
        read_tensors(best, live_tensors(self.state.model), self.processes)

    def checkpoint(self, *, wait: bool) -> None:
        """Keep all that is needed to go on from here, if it is worth keeping; `wait` until it is on the disk."""
        self.settle()
        if not self.state.finite():
            step = self.position.step
            self.stop_at(step - 1, f"the weights after step {step} are not finite numbers")
        self.state.describe(self.position)
        self.position.unreadable = self.all_unreadable()
        self.position.seconds = self.clock.total()
        if self.journal is not None:
            self.position.journal_bytes, self.position.journal_digest = self.journal.kept_bytes(), self.journal.digest()
        self.checkpoints.settle()  # the one before: of what it needs, nothing is removed
        if self.processes.is_main:
            self.checkpoints.forget_worse(Run(self.folder).best(0).parent, self.position.best_step)
        wait = wait or not self.recipe.async_checkpoint
        self.checkpoints.write(self.position.step, self.state.tensors(), self.position.to_json(), wait=wait)
        self.clock.checkpointed()

    def all_unreadable(self) -> dict[str, str]:
        """The images that any process could not read."""
        parts = self.processes.all_gather(self.position.unreadable)
        return {key: why for part in parts for key, why in part.items()}


def keeps_best(recipe: Recipe) -> bool:
    return recipe.final == "best" or recipe.patience > 0


class Diverged(TrainingError):
    """A run whose loss or weights are no numbers any more."""


class EvaluationCut(Exception):
    """An evaluation that a signal has cut short."""


class StopRequest:
    """A signal asks to stop; under torchrun, so does the end of its agent, without which nobody ends the process."""

    def __init__(self) -> None:
        self.received = 0
        self.agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def number(self) -> int:
        """The signal that asked, or 0."""
        if self.agent is not None and not self.received and os.getppid() != self.agent:
            print_status("torchrun's agent has ended: stopping")
            self.received = signal.SIGTERM
        return self.received

    def receive(self, number: int, _: FrameType | None) -> None:
        if self.received:  # asked twice: now
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """SIGTERM and SIGINT become a request while the context lasts; only a main thread can have it so."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
