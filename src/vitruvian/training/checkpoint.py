"""What a run must remember to go on exactly, and its checkpoints: folders of safetensors and JSON, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from vitruvian.errors import TrainingError
from vitruvian.model.build import Model
from vitruvian.training.average import Average, local
from vitruvian.training.distributed import Processes, full_tensor
from vitruvian.training.optimizer import moments, set_steps_taken, steps_taken
from vitruvian.training.recipe import Recipe
from vitruvian.weights.store import sync

POSITION = "position.json"
"""Where the run stands: all that is not a tensor."""

UNFINISHED = ".tmp"


class Checkpoints:
    """The checkpoints in a folder, `step-00000100` and so on."""

    def __init__(self, folder: Path, processes: Processes, *, keep: int = 2) -> None:
        self.folder, self.processes, self.keep = folder, processes, keep

    def write(self, step: int, tensors: dict[str, Tensor], position: dict[str, Any]) -> Path:
        """Save the state after so many steps, then remove the oldest; one of this step is as good as a new one."""
        final = self.folder / f"step-{step:08d}"
        if self.processes.broadcast(final.exists()):
            return final
        staged = self.folder / f".{final.name}{UNFINISHED}"
        try:
            self._stage(staged, tensors, position)
            if self.processes.is_main:
                os.replace(staged, final)
                sync(self.folder)
                for old in self.all()[: -self.keep]:
                    shutil.rmtree(old, ignore_errors=True)
        except (OSError, SafetensorError, CheckpointException) as error:
            if self.processes.is_main:
                shutil.rmtree(staged, ignore_errors=True)
            raise TrainingError(f"{final}: cannot be written: {cause(error)}; {self._rest()}") from error
        self.processes.barrier()
        return final

    def _stage(self, staged: Path, tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
        if self.processes.is_main:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        self.processes.barrier()
        if not self.processes.is_distributed:
            own = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            save_file(own, staged / "state.safetensors")
        else:
            save_parts(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(staged), save_distributed=True))
        if self.processes.is_main:
            (staged / POSITION).write_text(json.dumps(position, indent=1), encoding="utf-8")
            for path in [*staged.iterdir(), staged]:
                sync(path)

    def _rest(self) -> str:
        found = self.all()
        if not found:
            return "there is no earlier checkpoint"
        return f"{found[-1].name} is whole: once that is cured, continue with `vit train --resume {self.folder.parent}`"

    def all(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step-*") if (path / POSITION).is_file())

    def clean(self) -> None:
        """Remove what an interrupted write has left."""
        if self.processes.is_main:
            for path in self.folder.glob(f".*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Where the run stood."""
    try:
        position = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{checkpoint}: not a checkpoint of a run: {error}") from error
    if not isinstance(position, dict):
        raise TrainingError(f"{checkpoint}: not a checkpoint of a run: {POSITION} is not a JSON object")
    return position


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
    """The reason in one line."""
    if isinstance(error, CheckpointException):
        failures = list(error.failures.values())
        return cause(failures[0][0]) if failures else "a process failed"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200] or type(error).__name__


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
    updates: int = 0
    """Updates of the optimizer."""
    scaler: dict[str, Any] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Position:
        try:
            return cls(**data)
        except TypeError as error:
            raise TrainingError(
                f"the checkpoint was written by another version: {error}; go on with that one, or start a new run"
            ) from error


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
        found = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}
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
        """Whether all weights are numbers."""
        norms = torch._foreach_norm([local(parameter) for parameter in self.model.parameters()])
        return bool(torch.stack(norms).isfinite().all())
