"""The cost of a run: measured on a few of its steps here, or counted for a cluster."""

from __future__ import annotations

import math
import re
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitruvian.config import ModelConfig, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Batch
from vitruvian.errors import ConfigError, DataError, UnknownNameError, argument
from vitruvian.text import format_bytes, format_duration
from vitruvian.training.distributed import Processes, process_group
from vitruvian.training.initial_model import config_of, model_for
from vitruvian.training.loop import Trainer
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.recipe import Recipe, change_recipe, read_recipe
from vitruvian.training.splits import (
    DataRef,
    Splits,
    Stage,
    fit_batch_size,
    resolution_stages,
    run_multiply_adds,
    split_data,
    step_multiply_adds,
    validation_loader,
)
from vitruvian.training.train import choose_recipe

VALUE_BYTES = 4
"""Weights, gradients and optimizer state are float32 in every precision."""
MAX_STEPS = 20
SLOW_SECONDS = 5.0
"""A step that would take longer is measured on a part of its batch."""
FIRST_IMAGES = 2
"""Number of images in the first step in which memory is measured; the second has twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The cost of a run on this machine, from a few measured steps; other resolutions are scaled by their compute."""

    recipe: Recipe
    splits: Splits
    config: ModelConfig
    device: str
    stages: tuple[Stage, ...]
    epochs: float
    evaluations: int
    learning: int
    """Parameters that are not frozen."""
    timing: StepTiming
    """A step at the resolution of the first stage."""
    image_seconds: float
    """Evaluation time per validation image."""

    @property
    def steps(self) -> int:
        return self.stages[-1].end

    @property
    def parameters(self) -> int:
        return parameters(self.config)

    @property
    def run_multiply_adds(self) -> int:
        """All training steps, forward and backward, without evaluations."""
        return run_multiply_adds(self.recipe, self.config, self.stages)

    @property
    def weight_bytes(self) -> int:
        """Weights, optimizer state and averaged weights."""
        copies = len(OPTIMIZERS[self.recipe.optimizer].moments) + (self.recipe.average != "none")
        return VALUE_BYTES * (self.parameters + self.learning * copies)

    @property
    def step_bytes(self) -> int:
        """Gradients and activations at the peak of a step."""
        works = [step_multiply_adds(self.recipe, self.config, stage.size) for stage in self.stages]
        return round(self.timing.step_bytes * max(works) / works[0])

    @property
    def memory_bytes(self) -> int:
        """At the peak, without the few hundred MB of Python, PyTorch and the workers."""
        return self.weight_bytes + self.step_bytes

    @property
    def training_seconds(self) -> float:
        first_work = step_multiply_adds(self.recipe, self.config, self.stages[0].size)
        return self.timing.step_seconds * self.run_multiply_adds / first_work

    @property
    def evaluation_seconds(self) -> float:
        """All evaluations together."""
        return self.evaluations * len(self.splits.validation) * self.image_seconds

    @property
    def seconds(self) -> float:
        return self.training_seconds + self.evaluation_seconds


def plan(
    data: object,
    *,
    recipe: str | Path | Recipe | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: Sequence[str] = (),
    seconds: float = 10.0,
) -> TrainingPlan:
    """The plan of the run that `train` would start with the same arguments; writes nothing.

    Takes real steps on real images for about `seconds`, but at least two.
    """
    ref = DataRef.of(data)
    chosen = choose_recipe(ref, recipe, model=model, weights=weights, settings=settings)
    with process_group(chosen.device) as processes:
        splits = split_data(ref, chosen)
        chosen = chosen.replace(batch_size=fit_batch_size(chosen, len(splits.train), processes.world_size))
        # With teacher_input='fixed' the teacher would first process all images.
        measured = chosen.replace(teacher="") if chosen.teacher_input == "fixed" else chosen
        trainer = Trainer(measured, splits, processes, model_for(measured, splits.classes))
        batches, starting = trainer.batches, trainer.model
        with closing(batches):
            timing = measure_steps(trainer, batches.from_step(0), seconds=seconds)
        with validation_loader(splits.validation, chosen, starting.meta.preprocess, processes) as loader:
            image_seconds = measure_evaluation(trainer, loader.batches(0))
        return TrainingPlan(
            recipe=chosen,
            splits=splits,
            config=starting.config,
            device=str(processes.device),
            stages=batches.stages,
            epochs=batches.total / batches.per_epoch,
            evaluations=-(-batches.total // batches.per_evaluation),
            learning=sum(p.numel() for p in starting.parameters() if p.requires_grad),
            timing=timing,
            image_seconds=image_seconds,
        )


def plan_lines(plan: TrainingPlan) -> list[str]:
    """The plan for printing, one line per fact."""
    recipe, splits = plan.recipe, plan.splits
    frozen = plan.parameters - plan.learning
    rows, columns = plan.config.image_size
    model = recipe.weights or f"{recipe.model} from scratch (random weights)"
    facts = {
        "model": f"{model}, {rows}x{columns} pixels, {len(splits.classes):,} classes",
        "parameters": f"{plan.parameters / 1e6:,.2f} million" + (f", {frozen / 1e6:,.2f} frozen" if frozen else ""),
    }
    if recipe.teacher:
        fixed = "runs once on each image before the first step, which the time does not include"
        when = fixed if recipe.teacher_input == "fixed" else "runs in each step, included in the time"
        facts["teacher"] = f"{recipe.teacher}, {when}"
    facts |= {
        "data": f"{splits.name}: {len(splits.train):,} training images, {len(splits.validation):,} validation images",
        "steps": f"{plan.steps:,} of {recipe.batch_size:,} images: {plan.epochs:,.4g} epochs",
        "evaluations": f"{plan.evaluations:,}",
        "multiply-adds": f"{multiply_adds(plan.config):.3g} per image, {plan.run_multiply_adds:.3g} for all steps",
        "memory": f"about {format_bytes(plan.memory_bytes)}: weights and optimizer {format_bytes(plan.weight_bytes)}, "
        f"a step {format_bytes(plan.step_bytes)}",
        "time": f"about {format_duration(plan.seconds)} on {plan.device}: {plan.timing.step_seconds:.3g} s per step "
        f"(measured on {plan.timing.steps}), evaluations {format_duration(plan.evaluation_seconds)}",
    }
    return align_facts(facts)


def align_facts(facts: Mapping[str, str]) -> list[str]:
    """Names and facts in two columns."""
    width = max(map(len, facts)) + 2
    return [f"{name:{width}}{fact}" for name, fact in facts.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """The cost of a training step."""

    steps: int
    """Number of steps measured."""
    step_seconds: float
    """Median, including the wait for the batch."""
    step_bytes: int
    """Peak memory of gradients and activations."""


def measure_steps(trainer: Trainer, batches: Iterator[Batch], *, seconds: float) -> StepTiming:
    """Time training steps for about `seconds`; they change the weights."""
    batch = next(batches, None)
    if batch is None:
        raise DataError("there is no batch to measure a step with")
    size = len(batch)
    first = head_of(batch, FIRST_IMAGES * trainer.recipe.aug_repeats)
    time_step(trainer, first)  # the optimizer allocates its state
    step_bytes = measure_bytes(trainer, batch, len(first))
    images, work = len(first), time_step(trainer, first)
    first_work = work
    while images < size and work < SLOW_SECONDS / 2:
        images = min(size, 2 * images)
        work = time_step(trainer, head_of(batch, images))
    waits, works = [0.0], [work]
    end = time.perf_counter() + seconds
    while len(works) < MAX_STEPS and (time.perf_counter() < end or len(works) < 2):
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        waits.append(time.perf_counter() - before)
        works.append(time_step(trainer, head_of(following, images)))
    step_seconds = extrapolate_seconds({len(first): first_work, images: statistics.median(works)}, size)
    return StepTiming(steps=len(works), step_seconds=statistics.median(waits) + step_seconds, step_bytes=step_bytes)


def extrapolate_seconds(measured: Mapping[int, float], size: int) -> float:
    """Seconds of a step with `size` images, from the seconds of steps with fewer.

    An optimizer such as Muon takes the same time for any number of images, so two sizes are needed to tell the cost of
    an image; with only one, the time is taken to be proportional to the images.
    """
    few, many = min(measured), max(measured)
    if few == many:
        return measured[many] * size / many
    per_image = max(0.0, measured[many] - measured[few]) / (many - few)
    return measured[many] + per_image * (size - many)


def measure_bytes(trainer: Trainer, batch: Batch, count: int) -> int:
    """Peak memory of a full batch, extrapolated from steps with `count` and with twice as many images at a time."""
    chunks, device = trainer.recipe.grad_accum_steps, trainer.processes.device
    few, more = head_of(batch, count * chunks), head_of(batch, 2 * count * chunks)
    low, high = (peak_bytes(partial(trainer.step, part, 0), device) for part in (few, more))
    at_few, at_more, at_all = (len(part) / min(chunks, len(part)) for part in (few, more, batch))
    if at_more == at_few:
        return high
    return max(high, round(low + (high - low) * (at_all - at_few) / (at_more - at_few)))


def time_step(trainer: Trainer, batch: Batch) -> float:
    """Seconds of a step, until its loss is known."""
    before = time.perf_counter()
    trainer.step(batch, 0).tolist()
    return time.perf_counter() - before


def head_of(batch: Batch, count: int) -> Batch:
    """The first images of a batch."""
    return replace(
        batch,
        pixels=batch.pixels[:count],
        labels=batch.labels[:count],
        indices=batch.indices[:count],
        weights=batch.weights[:count],
    )


def measure_evaluation(trainer: Trainer, batches: Iterator[Batch], *, most: int = 3) -> float:
    """Seconds per validation image, including loading: the minimum over a few batches, as the first is slow."""
    alone = Processes(device=trainer.processes.device)  # without communication
    seconds = []
    before = time.perf_counter()
    for batch in islice(batches, most):
        if len(batch):
            trainer.objective.evaluate(trainer.model, [batch], len(batch), alone, None)
            now = time.perf_counter()
            seconds.append((now - before) / len(batch))
            before = now
    return min(seconds, default=0.0)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Peak memory of the tensors that `work` creates."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with MemoryCounter() as counter:
        work()
    return counter.peak


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations create, for as long as each of them lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inputs are registered first, so that an in-place operation on them counts nothing.
        self.known.update(leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, size)

    def free(self, size: int) -> None:
        self.now -= size


UTILIZATION = 0.4
"""Fraction of the accelerators' peak that training reaches. The paper's own runs: about 0.3 on TPUv3."""
NODE = 8
"""Devices per machine, among which hybrid sharding splits the weights."""
IMAGE_BYTES = 110_000
"""Average file size of an image, about that of ImageNet's JPEGs."""
BLOCK_BYTES = 34
"""Activations of a block per token and unit of width in 16 bits, without the attention matrix."""
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    flops: float
    """Peak per second, dense, in 16 bits; a multiply-add is two."""
    memory: float
    """Bytes."""


ACCELERATORS = {
    "V100": Accelerator(125e12, 32e9),
    "A100": Accelerator(312e12, 80e9),
    "A100-40GB": Accelerator(312e12, 40e9),
    "H100": Accelerator(989e12, 80e9),
    "H200": Accelerator(989e12, 141e9),
    "L4": Accelerator(121e12, 24e9),
    "TPUv3-core": Accelerator(61.5e12, 16e9),
    "TPUv4": Accelerator(275e12, 32e9),
}
"""From the manufacturers' data sheets."""

TPU = "TPUv3-core"
PAPER_DAYS = {
    ("paper-jft-h14", "ViT-H/14", 14): 2500,
    ("paper-jft-l16", "ViT-L/16", 14): 680,
    ("paper-imagenet21k", "ViT-L/16", 90): 230,
}
"""TPUv3-core-days of Table 2, by recipe, model and epochs."""

DATASET_SIZES = {
    "paper-jft": (303_000_000, 18_291),
    "paper-masked": (303_000_000, 18_291),
    "paper-imagenet21k": (14_197_122, 21_841),
    "paper-imagenet": (1_281_167, 1000),
    "imagenet": (1_281_167, 1000),
    "finetune-paper-imagenet": (1_281_167, 1000),
    "finetune-paper-table2": (1_281_167, 1000),
    "finetune-paper-cifar": (50_000, 100),
    "finetune-paper-vtab": (1000, 100),
    "finetune-paper": (3680, 37),
}
"""Images and classes by the prefix of a recipe's name; the first match counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """The cost of a run on a cluster, counted without running anything."""

    name: str
    """Name of the recipe; empty for a Recipe object."""
    recipe: Recipe
    config: ModelConfig
    devices: int
    accelerator: str
    images: int

    @property
    def steps(self) -> int:
        return round(self.recipe.steps or self.recipe.epochs * self.images / self.recipe.batch_size)

    @property
    def run_multiply_adds(self) -> int:
        stages = resolution_stages(self.recipe, self.config.image_size, self.steps)
        return run_multiply_adds(self.recipe, self.config, stages)

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Weights, gradients, optimizer state and averaged weights per device, by sharding mode."""
        copies = 2 + len(OPTIMIZERS[self.recipe.optimizer].moments) + (self.recipe.average != "none")
        size = VALUE_BYTES * parameters(self.config) * copies
        return {"ddp": size, "fsdp, hybrid": size // min(NODE, self.devices), "fsdp, full": size // self.devices}

    @property
    def activation_bytes(self) -> int:
        """An estimate for a device's part of the batch, in 16 bits, without checkpointing."""
        images = -(-self.recipe.batch_size // (self.devices * self.recipe.grad_accum_steps))
        config = self.config
        if not isinstance(config, ViTConfig):
            return images * multiply_adds(config) // 50
        return images * config.depth * (config.prefix_tokens + math.prod(config.grid)) * config.width * BLOCK_BYTES

    @property
    def seconds(self) -> float:
        return 2 * self.run_multiply_adds / (ACCELERATORS[self.accelerator].flops * UTILIZATION * self.devices)

    @property
    def paper_days(self) -> int | None:
        """TPUv3-core-days in the paper, if this is one of its runs."""
        return PAPER_DAYS.get((self.name, self.recipe.model, round(self.recipe.epochs)))

    @property
    def paper_utilization(self) -> float | None:
        """Fraction of their peak that the paper's cores reached."""
        if self.paper_days is None:
            return None
        return 2 * self.run_multiply_adds / (self.paper_days * DAY * ACCELERATORS[TPU].flops)


def parse_cluster(text: str) -> tuple[int, str]:
    """The number and the name of the devices in a text such as `64 x A100`."""
    match = re.fullmatch(r"\s*(\d{1,6})\s*[x*×]\s*([\w-]+)\s*", text)
    if match is None or int(match[1]) < 1:
        raise ConfigError(f"{argument('cluster', text)} is not a number of devices and their name, such as '64 x A100'")
    known = {name.lower(): name for name in ACCELERATORS}
    if match[2].lower() not in known:
        raise UnknownNameError("accelerator", match[2], ACCELERATORS, see=f"(known: {', '.join(ACCELERATORS)})")
    return int(match[1]), known[match[2].lower()]


def cluster_plan(
    recipe: str | Path | Recipe,
    cluster: str,
    *,
    data: object = None,
    model: str | None = None,
    settings: Sequence[str] = (),
) -> ClusterPlan:
    """The cost of a recipe on a cluster.

    Args:
        recipe: A name, a TOML file or a Recipe.
        cluster: The number and the name of the devices, such as `64 x A100`.
        data: By default the data that the name of the recipe stands for.
        model: Replaces the model of the recipe.
        settings: Changes to the recipe.
    """
    devices, accelerator = parse_cluster(cluster)
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    chosen = change_recipe(chosen.replace(model=model) if model else chosen, settings)
    name = Path(str(recipe)).stem if isinstance(recipe, str | Path) else ""
    images, classes = dataset_size(name, data)
    return ClusterPlan(
        name=name,
        recipe=chosen,
        config=config_of(chosen, classes),
        devices=devices,
        accelerator=accelerator,
        images=min(images, chosen.max_train_samples or images),
    )


def dataset_size(recipe: str, data: object) -> tuple[int, int]:
    """Number of training images and of classes."""
    if data is not None:
        dataset = open_dataset(data)
        return len(dataset.train), len(dataset.classes)
    for prefix, size in DATASET_SIZES.items():
        if recipe.startswith(prefix):
            return size
    raise ConfigError(f"the size of the dataset for the recipe {recipe!r} is unknown; give DATA")


def cluster_lines(plan: ClusterPlan) -> list[str]:
    """The plan for printing, one line per fact."""
    device, recipe = ACCELERATORS[plan.accelerator], plan.recipe
    read_bytes = plan.steps * recipe.batch_size * IMAGE_BYTES
    device_days = plan.seconds / DAY * plan.devices
    facts = {
        "model": f"{recipe.model}, {multiply_adds(plan.config):.3g} multiply-adds per image",
        "steps": f"{plan.steps:,} of {recipe.batch_size:,} images, of {plan.images:,}",
        "multiply-adds": f"{plan.run_multiply_adds:.3g} for all steps "
        f"({2 * plan.run_multiply_adds / 1e18:,.5g} exaFLOPs)",
        "time": f"{format_duration(plan.seconds)} on {plan.devices} x {plan.accelerator}, "
        f"{device_days:,.3g} accelerator-days, at {UTILIZATION:.0%} "
        f"of the peak of {device.flops / 1e12:,.0f} TFLOPS each (assumed)",
    }
    for mode, held in plan.weight_bytes.items():
        fits = "" if held + plan.activation_bytes <= 0.9 * device.memory else ": too much without grad_checkpointing"
        fits = fits if held <= 0.9 * device.memory else ": too much"
        facts[f"memory, {mode}"] = (
            f"{format_bytes(held)} and about {format_bytes(plan.activation_bytes)} of activations of "
            f"{format_bytes(int(device.memory))}{fits}"
        )
    facts["read"] = (
        f"{format_bytes(read_bytes)} at {IMAGE_BYTES // 1000} kB per image, "
        f"{format_bytes(round(read_bytes / plan.seconds))} per second"
    )
    if plan.paper_days is not None:
        facts["the paper"] = (
            f"{plan.paper_days:,} TPUv3-core-days (Table 2), {plan.paper_utilization:.0%} of their peak of "
            f"{ACCELERATORS[TPU].flops / 1e12:,.4g} TFLOPS each; {recipe.result} (Table 5)"
        )
    return align_facts(facts)
