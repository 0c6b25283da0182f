"""All that a run must remember to go on exactly: tensors for a checkpoint's files, the rest for its JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitruvian.errors import TrainingError
from vitruvian.model.build import Model
from vitruvian.training.average import Average, local
from vitruvian.training.optimizer import moments, set_steps_taken, steps_taken
from vitruvian.training.recipe import Recipe


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
