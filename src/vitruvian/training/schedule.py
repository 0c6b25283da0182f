"""The learning rate at each step, as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitruvian.errors import ConfigError

if TYPE_CHECKING:
    from vitruvian.training.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A learning rate that rises linearly from 0 in the warmup, then falls (or stays) until the last step."""

    kind: str
    """A key of SCHEDULES."""
    peak: float
    steps: int
    warmup: int = 0
    end: float = 0.0
    cooldown: int = 0
    timescale: float = 10_000.0

    def __post_init__(self) -> None:
        if self.warmup + self.cooldown > self.steps:
            raise ConfigError(
                f"warmup and cooldown of {self.warmup} and {self.cooldown} steps do not fit into "
                f"the {self.steps} steps of the run; set warmup and cooldown"
            )

    def lr_at(self, step: int) -> float:
        """The lr of step 0, 1, ... `steps` - 1."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        return SCHEDULES[self.kind](self, step)

    def done(self, step: int) -> float:
        """The share of the steps after the warmup that are done."""
        return (step - self.warmup) / max(1, self.steps - self.warmup)

    def cooled(self, lr: float, step: int) -> float:
        """The lr on its way to `end`, once the cooldown has begun."""
        left = min(1.0, (self.steps - step) / self.cooldown) if self.cooldown else 1.0
        return self.end + (lr - self.end) * left if left < 1 else lr


def constant(schedule: Schedule, step: int) -> float:
    return schedule.cooled(schedule.peak, step)


def linear(schedule: Schedule, step: int) -> float:
    """Reaches `end` at step `steps`, as in the paper's release."""
    return schedule.end + (schedule.peak - schedule.end) * (1 - schedule.done(step))


def cosine(schedule: Schedule, step: int) -> float:
    """Reaches `end` at step `steps`, as in the paper's release."""
    return schedule.end + (schedule.peak - schedule.end) * (1 + math.cos(math.pi * schedule.done(step))) / 2


def rsqrt(schedule: Schedule, step: int) -> float:
    """The reciprocal square root of the steps after the warmup."""
    return schedule.cooled(schedule.peak / math.sqrt(1 + (step - schedule.warmup) / schedule.timescale), step)


SCHEDULES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "rsqrt": rsqrt,
}
"""The lr of a step after the warmup, by the name that a recipe has for it."""


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
