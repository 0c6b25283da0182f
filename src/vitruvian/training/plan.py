"""What a run would do, and what it would cost: counted from its settings, measured on a few of its own steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.loader import Batch
from vitruvian.errors import DataError
from vitruvian.settings import Size
from vitruvian.text import format_bytes, format_duration
from vitruvian.training.distributed import process_group
from vitruvian.training.given import DataRef, chosen_recipe
from vitruvian.training.images import (
    fitting_batch_size,
    images_for,
    run_multiply_adds,
    step_multiply_adds,
    validation_loader,
)
from vitruvian.training.objective import Objective, Place
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.recipe import Recipe
from vitruvian.training.step import Stepper
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
    teacher: str = ""
    """Who else teaches, and whether that is part of the time."""

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
        # A teacher of fixed views would first be asked about every image.
        measured = chosen.replace(teacher="") if chosen.teacher_view == "fixed" else chosen
        trainer = Trainer.build(measured, images, processes)
        with closing(trainer.batches):
            timing = measured_steps(trainer.stepper, trainer.batches.from_step(0), seconds=seconds)
        with validation_loader(images.validation, chosen, trainer.model.meta.preprocess, processes) as loader:
            image_seconds = measured_evaluation(
                trainer.model, loader.batches(0), objective=trainer.stepper.objective, device=processes.device
            )
        return replace(put_together(trainer, timing, image_seconds), teacher=teacher_of(chosen))


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


def teacher_of(recipe: Recipe) -> str:
    if not recipe.teacher:
        return ""
    fixed = "asked once about each image before the first step, which is not part of the time"
    return f"{recipe.teacher}, {fixed if recipe.teacher_view == 'fixed' else 'asked in each step, part of the time'}"


def plan_lines(plan: Plan) -> list[str]:
    """The plan as people read it, a line for each fact."""
    frozen = plan.parameters - plan.learning
    rows, columns = plan.image_size
    facts = {
        "model": f"{plan.model}, {rows}x{columns} pixels, {plan.classes:,} classes",
        "parameters": f"{plan.parameters / 1e6:,.2f} million"
        + (f", {frozen / 1e6:,.2f} of them frozen" if frozen else ""),
        **({"teacher": plan.teacher} if plan.teacher else {}),
        "data": f"{plan.data}: {plan.training_images:,} to train on, {plan.validation_images:,} held out",
        "steps": f"{plan.steps:,} of {plan.batch_size:,} images: {plan.epochs:,.4g} epochs",
        "evaluations": f"{plan.evaluations:,}",
        "multiply-adds": f"{plan.multiply_adds:.3g} an image, {plan.run_multiply_adds:.3g} for the whole training",
        "memory": f"about {format_bytes(plan.memory_bytes)}: weights and optimizer {format_bytes(plan.weight_bytes)}, "
        f"a step {format_bytes(plan.step_bytes)}",
        "time": f"about {format_duration(plan.seconds)} on {plan.device}: {plan.step_seconds:.3g} s a step "
        f"(measured on {plan.measured_steps}), evaluations {format_duration(plan.evaluation_seconds)}",
    }
    return fact_lines(facts)


def fact_lines(facts: Mapping[str, str]) -> list[str]:
    """Names and facts in two columns."""
    width = max(map(len, facts)) + 2
    return [f"{name:{width}}{fact}" for name, fact in facts.items()]


MOST_STEPS = 20
SLOW_SECONDS = 5.0
"""A step that would take longer is measured on a part of its batch."""
FIRST_IMAGES = 2
"""Images of the first step in which memory is measured; the second has twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What a step takes."""

    steps: int
    """Measured."""
    step_seconds: float
    """Median: waiting for the batch, and learning from it."""
    step_bytes: int
    """The most that gradients and activations take at one time."""


def measured_steps(stepper: Stepper, batches: Iterator[Batch], *, seconds: float) -> Timing:
    """Take steps for about so long; they change the weights."""
    batch = next(batches, None)
    if batch is None:
        raise DataError("there is no batch to take a step with")
    size = len(batch)
    first = part(batch, FIRST_IMAGES * stepper.recipe.aug_repeats)
    timed(stepper, first)  # the optimizer makes its memory
    step_bytes = measured_bytes(stepper, batch, len(first))
    share, work = len(first), timed(stepper, first)
    alone = work
    while share < size and work < SLOW_SECONDS / 2:
        share = min(size, 2 * share)
        work = timed(stepper, part(batch, share))
    waits, works = [0.0], [work]
    end = time.perf_counter() + seconds
    while len(works) < MOST_STEPS and (time.perf_counter() < end or len(works) < 2):
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        waits.append(time.perf_counter() - before)
        works.append(timed(stepper, part(following, share)))
    whole = whole_seconds({len(first): alone, share: statistics.median(works)}, size)
    return Timing(steps=len(works), step_seconds=statistics.median(waits) + whole, step_bytes=step_bytes)


def whole_seconds(measured: Mapping[int, float], size: int) -> float:
    """Of a step with `size` images, from steps with fewer: an optimizer such as Muon takes as long for few as for many.

    One number of images tells nothing of that, so all of its time counts for each image.
    """
    few, many = min(measured), max(measured)
    if few == many:
        return measured[many] * size / many
    each = max(0.0, measured[many] - measured[few]) / (many - few)
    return measured[many] + each * (size - many)


def measured_bytes(stepper: Stepper, batch: Batch, count: int) -> int:
    """What a whole batch would take, from a step with `count` images at once and one with twice as many."""
    parts, device = stepper.recipe.grad_accum_steps, stepper.processes.device
    few, more = part(batch, count * parts), part(batch, 2 * count * parts)
    low, high = (peak_bytes(partial(stepper.take, some, 0), device) for some in (few, more))
    at_few, at_more, at_all = (len(some) / min(parts, len(some)) for some in (few, more, batch))
    if at_more == at_few:
        return high
    return max(high, round(low + (high - low) * (at_all - at_few) / (at_more - at_few)))


def timed(stepper: Stepper, batch: Batch) -> float:
    """Seconds of a step, until its loss is known."""
    before = time.perf_counter()
    stepper.take(batch, 0).tolist()
    return time.perf_counter() - before


def part(batch: Batch, count: int) -> Batch:
    return replace(
        batch,
        pixels=batch.pixels[:count],
        labels=batch.labels[:count],
        indices=batch.indices[:count],
        weights=batch.weights[:count],
    )


def measured_evaluation(
    model: nn.Module, batches: Iterator[Batch], *, objective: Objective, device: torch.device, most: int = 3
) -> float:
    """Seconds that a held-out image takes, reading included: the least of a few batches, as the first is slow."""
    place = Place(device=device, dtype=None, all_ranks=False)
    found = []
    before = time.perf_counter()
    for batch in islice(batches, most):
        if len(batch):
            objective.measured(model, [batch], len(batch), place)
            now = time.perf_counter()
            found.append((now - before) / len(batch))
            before = now
    return min(found, default=0.0)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The most that the tensors made during the work take at one time, beside those that were there before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with Watch() as watch:
        work()
    return watch.most


class Watch(TorchDispatchMode):
    """Counts the bytes of tensors that come out of operations, for as long as each of them lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs are known before their operation makes anything, so that changing one in place counts nothing.
        self.known.update(leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return made

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.now -= size
