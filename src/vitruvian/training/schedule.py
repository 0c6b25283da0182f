"""The learning rate at each step, as pure functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitruvian.errors import ConfigError
from vitruvian.training.recipe import Recipe, ScheduleName


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning rate that rises linearly from 0, then falls (or stays) until the last step."""

    kind: ScheduleName
    peak: float
    steps: int
    warmup: int = 0
    end: float = 0.0
    cooldown: int = 0
    timescale: float = 10_000.0

    def __post_init__(self) -> None:
        if self.warmup + self.cooldown > self.steps:
            raise ConfigError(
                f"warm-up and cool-down of {self.warmup} and {self.cooldown} steps do not fit into "
                f"the {self.steps} steps of the run; set warmup and cooldown"
            )

    def lr_at(self, step: int) -> float:
        """The lr of step 0, 1, ... `steps` - 1; linear and cosine reach `end` at `steps`, as the paper's release."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        if self.kind == "linear":
            return self.end + (self.peak - self.end) * (1 - done)
        if self.kind == "cosine":
            return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * done)) / 2
        lr = self.peak
        if self.kind == "rsqrt":
            lr /= math.sqrt(1 + (step - self.warmup) / self.timescale)
        left = min(1.0, (self.steps - step) / self.cooldown) if self.cooldown else 1.0
        return self.end + (lr - self.end) * left if left < 1 else lr


def schedule_of(recipe: Recipe, steps: int) -> Schedule:
    """The schedule of a run of so many steps."""
    return Schedule(
        kind=recipe.schedule,
        peak=recipe.lr,
        steps=steps,
        warmup=in_steps(recipe.warmup, steps),
        end=recipe.min_lr,
        cooldown=in_steps(recipe.cooldown, steps),
        timescale=recipe.timescale,
    )


def in_steps(length: float, steps: int) -> int:
    """Steps, from their number or, below 1, from their share."""
    return round(length) if length >= 1 else round(length * steps)
