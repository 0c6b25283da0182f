"""Checkpoints: folders of safetensors and JSON with the whole state of a run, each complete or absent."""

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from vitruvian.errors import TrainingError
from vitruvian.files import UNFINISHED, digest, read_object, sync, write_json
from vitruvian.model.build import Model
from vitruvian.text import describe_error
from vitruvian.training.distributed import Processes
from vitruvian.training.run_folder import EMPTY, find_changed_file, read_sealed, write_sealed

POSITION = "position.json"  # the state of the run that is not a tensor
DIGESTS = "digests.json"  # digests of the other files


class Checkpoints:
    """The checkpoints in a folder, such as `step-00000100`; one is written at a time."""

    def __init__(self, folder: Path, processes: Processes, *, keep: int = 2) -> None:
        self.folder, self.processes, self.keep = folder, processes, keep
        self._thread: threading.Thread | None = None
        self._begun: Path | None = None  # the checkpoint that is being written, until `settle`
        self._problem = ""
        # Copies from a GPU go to pinned memory, which is expensive to allocate.
        self._stager = BlockingAsyncStager(cache_staged_state_dict=processes.device.type == "cuda")

    def write(self, step: int, tensors: dict[str, Tensor], position: dict[str, Any], *, wait: bool = True) -> None:
        """Save the state after `step` steps, then remove the oldest; does nothing if it is already saved.

        Without `wait` the tensors are copied and written in a thread; `settle` raises if that failed.
        """
        self.settle()
        final = self.folder / f"step-{step:08d}"
        if self.processes.broadcast(final.exists()):
            return
        self._begun, self._problem = final, ""
        copies = tensors if wait else self._stager.stage(dict(tensors))
        # A daemon, so that a process can end without waiting for this checkpoint.
        self._thread = threading.Thread(target=self._write, args=(final, copies, position), daemon=True)
        self._thread.start()
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait for a write that has begun; raises TrainingError in all processes if it failed in one."""
        if self._begun is None:
            return
        self.close()
        final, self._begun = self._begun, None
        for problem in filter(None, self.processes.all_gather(self._problem)):
            hint = "there is no earlier checkpoint"
            if checkpoints := self.all():
                again = f"fix this and continue with `vit train --resume {self.folder.parent}`"
                hint = f"{checkpoints[-1].name} is intact: {again}"
            raise TrainingError(f"cannot be written: {problem}", where=final, hint=hint)

    def close(self, seconds: float | None = None) -> None:
        """Wait for a write that has begun, for at most `seconds`, and ignore its errors."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None

    def _write(self, final: Path, tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
        staged = self.folder / f".{final.name}{UNFINISHED}"
        try:
            if not self.processes.is_distributed:
                staged.mkdir(parents=True)
                contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                save_file(contiguous, staged / "state.safetensors")
            else:
                writer = HuggingFaceStorageWriter(str(staged), save_distributed=True)
                save_parts(dict(tensors), storage_writer=writer, process_group=self.processes.background)
            if self.processes.is_main:
                write_json(staged / POSITION, position)
                write_digests(staged)
                for path in [*staged.iterdir(), staged]:
                    sync(path)
                os.replace(staged, final)
                sync(self.folder)
                for old in self.all()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except BaseException as error:  # `settle` raises it, as this may be a thread
            self._problem = cause(error)
            if self.processes.is_main:
                shutil.rmtree(staged, ignore_errors=True)

    def all(self) -> list[Path]:  # oldest first
        return sorted(self.folder.glob("step-*"))

    def newest_intact(self, report: Callable[[str], None]) -> Path | None:
        """The last checkpoint that is intact; damaged ones are reported and renamed."""
        checkpoints = self.all()
        for path in reversed(checkpoints):
            problem = verify(path)
            if not problem:
                if path != checkpoints[-1]:
                    report(f"continuing from step {int(path.name.removeprefix('step-'))}")
                return path
            report(f"the checkpoint {path.name} is damaged: {problem}")
            os.replace(path, free_name(path.with_name(f"damaged-{path.name}")))
        if checkpoints:
            report("no checkpoint is intact: starting again from step 0")
        return None

    def remove_worse(self, best: Path, step: int) -> None:
        """Remove from `best` all weights but those of `step` and those that a checkpoint refers to."""
        with suppress(TrainingError):  # a checkpoint is damaged
            needed = {step, *(read_position(path).best_step for path in self.all())}
            for path in best.glob("step-*"):
                if int(path.name.removeprefix("step-")) not in needed:
                    shutil.rmtree(path, ignore_errors=True)

    def clean(self) -> None:
        """Remove the remains of interrupted writes."""
        if self.processes.is_main:
            for path in self.folder.glob(f".*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)


def write_digests(folder: Path) -> None:
    """Write the digests of the files in a folder, for `verify`."""
    files = {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name != DIGESTS}
    write_sealed(folder / DIGESTS, files)


def verify(checkpoint: Path) -> str:
    """How a checkpoint has changed since it was written; empty if it has not."""
    try:
        digests = read_sealed(checkpoint / DIGESTS)
    except TrainingError as error:
        return f"{DIGESTS}: {error.reason}"
    return find_changed_file(checkpoint, digests)


def free_name(path: Path) -> Path:
    """The path, or the first of `PATH-2`, `PATH-3`, ... that does not exist."""
    candidates = chain([path], (path.with_name(f"{path.name}-{suffix}") for suffix in count(2)))
    return next(candidate for candidate in candidates if not candidate.exists())


def read_position(checkpoint: Path) -> "Position":
    try:
        return Position(**read_object(checkpoint / POSITION, raises=TrainingError))
    except TypeError as error:
        reason = f"the checkpoint was written by another version: {describe_error(error)}"
        raise TrainingError(reason, hint="resume with that version, or start a new run") from error


def read_tensors(checkpoint: Path, tensors: dict[str, Tensor], processes: Processes) -> None:
    """Load tensors or shards of them in place, whatever number of processes wrote them."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(checkpoint))
            load_parts(dict(tensors), storage_reader=reader, no_dist=not processes.is_distributed)
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        raise TrainingError(f"does not fit this run: {cause(error)}", where=checkpoint) from error


def cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        failures = list(error.failures.values())
        return cause(failures[0][0]) if failures else "a process failed"
    return describe_error(error)


def live_tensors(model: Model) -> dict[str, Tensor]:
    """The parameters and buffers of a model, by name, without copying."""
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@dataclass
class Position:
    """The progress of a run: its state except for tensors."""

    step: int = 0  # steps done
    evaluated: int = 0  # the last step that was evaluated
    best: float | None = None  # best value of the monitored metric
    best_step: int = 0
    first_loss: float | None = None  # of the first line of training metrics
    worse: int = 0  # number of evaluations since the best one
    pending: list[list[float]] = field(default_factory=list)
    """Sums of losses, correct predictions and images of the steps since the last line of metrics."""
    seconds: float = 0.0  # training time so far, over all sessions
    journal_bytes: int = 0
    journal_digest: str = EMPTY
    updates: int = 0  # optimizer updates
    scaler: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
