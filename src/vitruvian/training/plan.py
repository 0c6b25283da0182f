"""What a run would do, and what it would cost: counted from its settings, measured on a few of its own steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitruvian.cost import multiply_adds, parameters
from vitruvian.settings import Size
from vitruvian.text import duration, size
from vitruvian.training.distributed import process_group
from vitruvian.training.given import DataRef, chosen_recipe
from vitruvian.training.images import (
    fitting_batch_size,
    images_for,
    run_multiply_adds,
    step_multiply_adds,
    validation_loader,
)
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.recipe import Recipe
from vitruvian.training.timing import Timing, measured_evaluation, measured_steps
from vitruvian.training.trainer import Trainer

NUMBER_BYTES = 4
"""Of a weight and of what the optimizer remembers of it: float32 in every precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run before it begins."""

    model: str
    data: str
    device: str
    classes: int
    training_images: int
    validation_images: int
    image_size: Size
    parameters: int
    learning: int
    """Parameters that are not frozen."""
    multiply_adds: int
    """One image, forward."""
    run_multiply_adds: int
    """The whole training, forward and backward, without evaluations."""
    batch_size: int
    steps: int
    epochs: float
    evaluations: int
    weight_bytes: int
    """Weights, what the optimizer remembers of them, and their mean."""
    step_bytes: int
    """What a step adds at its peak: gradients and activations."""
    measured_steps: int
    step_seconds: float
    training_seconds: float
    evaluation_seconds: float
    """All evaluations together."""

    @property
    def memory_bytes(self) -> int:
        """At the peak, beside the few hundred MB of Python, PyTorch and the processes that read images."""
        return self.weight_bytes + self.step_bytes

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.evaluation_seconds

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "memory_bytes": self.memory_bytes, "seconds": self.seconds}


def plan(
    data: object,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: Sequence[str] = (),
    seconds: float = 10.0,
) -> Plan:
    """The plan of the run that `train` would make of the same arguments; writes nothing.

    Takes real steps on real images for about so many seconds, but at least two of them.
    """
    ref = DataRef.of(data)
    chosen = chosen_recipe(ref, recipe, model=model, weights=weights, settings=settings)
    with process_group(chosen.device) as processes:
        images = images_for(ref, chosen)
        chosen = chosen.replace(batch_size=fitting_batch_size(chosen, len(images.train), processes.world_size))
        trainer = Trainer.build(chosen, images, processes)
        with closing(trainer.batches):
            timing = measured_steps(trainer.stepper, trainer.batches.from_step(0), seconds=seconds)
        with validation_loader(images.validation, chosen, trainer.model.preprocess, processes) as loader:
            image_seconds = measured_evaluation(
                trainer.model, loader.batches(0), objective=trainer.stepper.objective, device=processes.device
            )
        return put_together(trainer, timing, image_seconds)


def put_together(trainer: Trainer, timing: Timing, image_seconds: float) -> Plan:
    """The plan from what was counted and measured; steps at other resolutions take more or less as their work does."""
    recipe, batches, config = trainer.recipe, trainer.batches, trainer.model.config
    learning = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    count = parameters(config)
    works = [step_multiply_adds(recipe, config, stage.size) for stage in batches.stages]
    run_work = run_multiply_adds(recipe, config, batches.stages)
    copies = len(OPTIMIZERS[recipe.optimizer].moments) + (recipe.average != "none")
    evaluations = -(-batches.total // batches.per_evaluation)
    return Plan(
        model=recipe.weights or recipe.model,
        data=trainer.images.name,
        device=str(batches.processes.device),
        classes=len(trainer.images.classes),
        training_images=len(trainer.images.train),
        validation_images=len(trainer.images.validation),
        image_size=config.image_size,
        parameters=count,
        learning=learning,
        multiply_adds=multiply_adds(config),
        run_multiply_adds=run_work,
        batch_size=recipe.batch_size,
        steps=batches.total,
        epochs=batches.total / batches.per_epoch,
        evaluations=evaluations,
        weight_bytes=NUMBER_BYTES * (count + learning * copies),
        step_bytes=round(timing.step_bytes * max(works) / works[0]),
        measured_steps=timing.steps,
        step_seconds=timing.step_seconds,
        training_seconds=timing.step_seconds * run_work / works[0],
        evaluation_seconds=evaluations * len(trainer.images.validation) * image_seconds,
    )


def plan_lines(plan: Plan) -> list[str]:
    """The plan as people read it, a line for each fact."""
    frozen = plan.parameters - plan.learning
    rows, columns = plan.image_size
    facts = {
        "model": f"{plan.model}, {rows}x{columns} pixels, {plan.classes:,} classes",
        "parameters": f"{plan.parameters / 1e6:,.2f} million"
        + (f", {frozen / 1e6:,.2f} of them frozen" if frozen else ""),
        "data": f"{plan.data}: {plan.training_images:,} to train on, {plan.validation_images:,} held out",
        "steps": f"{plan.steps:,} of {plan.batch_size:,} images: {plan.epochs:,.4g} epochs",
        "evaluations": f"{plan.evaluations:,}",
        "multiply-adds": f"{plan.multiply_adds:.3g} an image, {plan.run_multiply_adds:.3g} for the whole training",
        "memory": f"about {size(plan.memory_bytes)}: weights and optimizer {size(plan.weight_bytes)}, "
        f"a step {size(plan.step_bytes)}",
        "time": f"about {duration(plan.seconds)} on {plan.device}: {plan.step_seconds:.3g} s a step "
        f"(measured on {plan.measured_steps}), evaluations {duration(plan.evaluation_seconds)}",
    }
    width = max(map(len, facts)) + 2
    return [f"{name:{width}}{fact}" for name, fact in facts.items()]
