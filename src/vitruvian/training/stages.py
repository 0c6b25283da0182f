"""The sizes of training views over a run, and the work that they are."""

from __future__ import annotations

from dataclasses import dataclass

from vitruvian.config import ModelConfig, Size, ViTConfig
from vitruvian.cost import TRAINING_PASSES, multiply_adds
from vitruvian.training.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps from `start` to before `end`, with views of one size."""

    start: int
    end: int
    size: Size


def stages_of(recipe: Recipe, size: Size, steps: int) -> tuple[Stage, ...]:
    """The stages of a run of so many steps that begins with this size."""
    sizes = {0: size} | {round(share * steps): (side, side) for share, side in recipe.resolutions}
    starts = [start for start in sorted(sizes) if start < steps]
    return tuple(Stage(start, end, sizes[start]) for start, end in zip(starts, [*starts[1:], steps]))


def step_multiply_adds(recipe: Recipe, config: ModelConfig, size: Size) -> int:
    """Of a step with views of this size, forward and backward; tokens that are left out save their share."""
    kept = 1 - recipe.patch_drop if isinstance(config, ViTConfig) else 1
    return round(multiply_adds(config, size) * TRAINING_PASSES * recipe.batch_size * kept)


def run_multiply_adds(recipe: Recipe, config: ModelConfig, stages: tuple[Stage, ...]) -> int:
    """Of all steps."""
    return sum(step_multiply_adds(recipe, config, stage.size) * (stage.end - stage.start) for stage in stages)
