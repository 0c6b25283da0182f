"""What a run must remember to go on exactly, and its checkpoints: folders of safetensors and JSON, whole or absent."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from vitruvian.errors import TrainingError
from vitruvian.files import digest, read_object, sync, write_json
from vitruvian.model.build import Model
from vitruvian.text import describe_error
from vitruvian.training.distributed import Processes, full_tensor
from vitruvian.training.journal import EMPTY
from vitruvian.training.optimizer import Average, local, moments, set_steps_taken, steps_taken
from vitruvian.training.recipe import Recipe
from vitruvian.training.run import changed_file, read_sealed, write_sealed

POSITION = "position.json"
"""Where the run stands: all that is not a tensor."""
DIGESTS = "digests.json"
"""Of the other files."""

UNFINISHED = ".tmp"


class Checkpoints:
    """The checkpoints in a folder, `step-00000100` and so on; one is written at a time."""

    def __init__(self, folder: Path, processes: Processes, *, keep: int = 2) -> None:
        self.folder, self.processes, self.keep = folder, processes, keep
        self._thread: threading.Thread | None = None
        self._begun: Path | None = None
        """What is being written, until `settle` has told how it ended."""
        self._problem = ""
        # A copy from a GPU goes to pinned memory, which is worth keeping.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=processes.device.type == "cuda")

    def write(self, step: int, tensors: dict[str, Tensor], position: dict[str, Any], *, wait: bool = True) -> None:
        """Save the state after so many steps, then remove the oldest; one of this step is as good as a new one.

        Without `wait` the tensors are copied and written in a thread, and `settle` tells whether that went well.
        """
        self.settle()
        final = self.folder / f"step-{step:08d}"
        if self.processes.broadcast(final.exists()):
            return
        self._begun, self._problem = final, ""
        if wait:
            self._write(final, tensors, position)
            self.settle()
            return
        copies = self._stager.stage(dict(tensors))
        # A daemon, so that a process that ends without this checkpoint need not wait for it.
        self._thread = threading.Thread(target=self._write, args=(final, copies, position), daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Wait for a write that has begun; TrainingError, in all processes, where it failed in one."""
        if self._begun is None:
            return
        self.close()
        final, self._begun = self._begun, None
        for problem in self.processes.all_gather(self._problem):
            if problem:
                raise TrainingError(f"{final}: cannot be written: {problem}; {self._rest()}")

    def close(self, seconds: float | None = None) -> None:
        """Wait for a write that has begun, at most so long, and without a word on how it ended."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _write(self, final: Path, tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
        staged = self.folder / f".{final.name}{UNFINISHED}"
        try:
            self._stage(staged, tensors, position)
            if self.processes.is_main:
                os.replace(staged, final)
                sync(self.folder)
                for old in self.all()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:  # for `settle`, as a thread has nobody to tell
            self._problem = cause(error)
            if self.processes.is_main:
                shutil.rmtree(staged, ignore_errors=True)

    def _stage(self, staged: Path, tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
        if not self.processes.is_distributed:
            staged.mkdir(parents=True)
            own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(own, staged / "state.safetensors")
        else:
            writer = HuggingFaceStorageWriter(str(staged), save_distributed=True)
            save_parts(dict(tensors), storage_writer=writer, process_group=self.processes.background)
        if self.processes.is_main:
            write_json(staged / POSITION, position)
            write_digests(staged)
            for path in [*staged.iterdir(), staged]:
                sync(path)

    def _rest(self) -> str:
        found = self.all()
        if not found:
            return "there is no earlier checkpoint"
        return f"{found[-1].name} is whole: once that is cured, continue with `vit train --resume {self.folder.parent}`"

    def all(self) -> list[Path]:  # oldest first
        return sorted(self.folder.glob("step-*"))

    def newest_whole(self, said: Callable[[str], None]) -> Path | None:
        """The last checkpoint whose files are as they were written; damaged ones are said, and set aside."""
        found = self.all()
        for path in reversed(found):
            problem = damage(path)
            if not problem:
                if path != found[-1]:
                    said(f"going on from step {int(path.name.removeprefix('step-'))}")
                return path
            said(f"the checkpoint {path.name} is damaged: {problem}")
            os.replace(path, free_name(path.with_name(f"damaged-{path.name}")))
        if found:
            said("no checkpoint is whole: starting again from step 0")
        return None

    def forget_worse(self, best: Path, step: int) -> None:
        """Remove the weights that are neither the best now, after `step`, nor were for one of the checkpoints."""
        with suppress(TrainingError):  # of a checkpoint that is damaged
            kept = {step, *(read_position(path).best_step for path in self.all())}
            for path in best.glob("step-*"):
                if int(path.name.removeprefix("step-")) not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    def clean(self) -> None:
        """Remove what an interrupted write has left."""
        if self.processes.is_main:
            for path in self.folder.glob(f".*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)


def write_digests(folder: Path) -> None:
    """Write down what the files of a folder are, so that `damage` can tell."""
    write_sealed(
        folder / DIGESTS, {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name != DIGESTS}
    )


def damage(checkpoint: Path) -> str:
    """In what a checkpoint is not as it was written; empty if in nothing."""
    try:
        digests = read_sealed(checkpoint / DIGESTS)
    except TrainingError as error:
        return f"{DIGESTS}: {error.reason}"
    return changed_file(checkpoint, digests)


def free_name(path: Path) -> Path:
    """The path, or the first with a number after it that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return path if not path.exists() else next(other for other in numbered if not other.exists())


def read_position(checkpoint: Path) -> Position:
    try:
        return Position(**read_object(checkpoint / POSITION, raises=TrainingError))
    except TypeError as error:
        raise TrainingError(
            f"the checkpoint was written by another version: {describe_error(error)}",
            hint="go on with that one, or start a new run",
        ) from error


def read_tensors(checkpoint: Path, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Fill the tensors, or this process's parts of them, whatever number of processes wrote them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_parts(
                dict(tensors),
                storage_reader=HuggingFaceStorageReader(str(checkpoint)),
                no_dist=not processes.is_distributed,
            )
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        raise TrainingError(f"{checkpoint}: does not fit this run: {cause(error)}") from error


def cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        failures = list(error.failures.values())
        return cause(failures[0][0]) if failures else "a process failed"
    return describe_error(error)


def live_tensors(model: Model) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name, without copying."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies of tensors that may be spread over processes, on the CPU."""
    return {name: full_tensor(tensor.detach()).cpu() for name, tensor in tensors.items()}


@dataclass
class Position:
    """Where a run stands, beside its tensors."""

    step: int = 0
    """Steps done."""
    evaluated: int = 0
    """The last step that was evaluated."""
    best: float | None = None
    """Of the monitored measure."""
    best_step: int = 0
    worse: int = 0
    """Evaluations since the best one."""
    pending: list[list[float]] = field(default_factory=list)
    """Sums of losses, right answers and images of the steps that no line of metrics covers yet."""
    seconds: float = 0.0
    """Spent so far, in all sessions."""
    journal_bytes: int = 0
    journal_digest: str = EMPTY
    updates: int = 0
    """Updates of the optimizer."""
    scaler: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class State:
    """The parts of a run that change, and how they become tensors by name."""

    model: Model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None
    recipe: Recipe

    def tensors(self) -> dict[str, Tensor]:
        """Everything that learning changes; views of the live tensors."""
        found = {f"model.{name}": tensor for name, tensor in live_tensors(self.model).items()}
        found |= moments(self.optimizer, self.model, self.recipe.optimizer)
        if self.average is not None:
            found |= {f"average.{name}": mean for name, mean in self.average.means.items()}
        return found

    def describe(self, position: Position) -> None:
        """Put what is no tensor into the position."""
        position.updates = steps_taken(self.optimizer)
        position.scaler = self.scaler.state_dict()

    def restore(self, position: Position) -> None:
        """The reverse of `describe`; the tensors have been filled."""
        set_steps_taken(self.optimizer, position.updates)
        if position.scaler:
            self.scaler.load_state_dict(position.scaler)

    def finite(self) -> bool:
        norms = torch._foreach_norm([local(parameter) for parameter in self.model.parameters()])
        return bool(torch.stack(norms).isfinite().all())
