"""The recipe of a run and its cost: measured on a few of its steps here, or counted for a cluster."""

import math
import re
import statistics
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitruvian.catalog import find_published, resolve
from vitruvian.config import ModelConfig, ResNetConfig, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Batch
from vitruvian.data.sources import Source
from vitruvian.data.stored import display
from vitruvian.errors import ConfigError, DataError, ImageError, TrainingError, UnknownNameError, argument
from vitruvian.machine import free_megabytes
from vitruvian.report.html import render
from vitruvian.settings import check_range
from vitruvian.text import format_bytes, format_duration, package_table, plural
from vitruvian.training.distributed import process_group
from vitruvian.training.initial_model import HEAD_IMAGES, config_of, model_for, scale_size, target_of, without_shape
from vitruvian.training.loop import Trainer
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.recipe import Recipe, RecipeChanges, change_recipe, parse_changes, read_recipe
from vitruvian.training.run_folder import absolute_data, absolute_path
from vitruvian.training.splits import (
    DataRef,
    Splits,
    continue_from,
    fit_to_data,
    run_multiply_adds,
    validation_loader,
)
from vitruvian.weights import hub

SIZE_SETTINGS = {"depth", "width", "mlp_dim", "num_heads", "stem"}  # model settings that the name of a model decides
VALUE_BYTES = 4  # weights, gradients and optimizer state are float32 in every precision
MAX_STEPS = 20
SLOW_SECONDS = 5.0  # a step that would take longer is measured on a part of its batch
FIRST_IMAGES = 2  # number of images in the first step in which memory is measured; the second has twice as many


def choose_recipe(
    data: object,
    recipe: str | Path | Recipe | None = None,
    *,
    model: str | None = None,
    weights: str | Path | None = None,
    settings: RecipeChanges = (),
) -> Recipe:
    """The recipe that `train` uses for these arguments; by default it depends on the data."""
    changes = parse_changes(settings)
    if model and not weights and (Path(model).expanduser().exists() or find_published(model)):
        reason = f"{model} is weights, not an architecture"
        raise TrainingError(reason, hint=f"to start from them, give {argument('weights')}")
    if model and weights:
        raise TrainingError(
            f"{argument('model')} trains from scratch, {argument('weights')} starts from weights: give one of the two"
        )
    if recipe is None:
        ref, recipe = DataRef.of(data), "scratch" if model else "photos"
        if not weights and ref.name == "digits":
            recipe = "digits"
        elif not weights and ref.open(
            change_recipe(Recipe(steps=1), {"target": changes.get("target", "auto")}).target
        ).name.lower().startswith("cifar"):
            recipe = "cifar10"
        if recipe == "photos" and not weights:
            change_recipe(read_recipe(recipe).replace(weights="default"), changes)  # raises before a download
            weights = hub.default_source("weights")
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if model:
        chosen = chosen.replace(weights="", architecture=architecture_for(chosen, model))
        changes = {"model": model, **changes}
    if weights:
        chosen = chosen.replace(weights=absolute_path(weights), architecture=without_shape(chosen))
    if chosen.bit_hyperrule:
        if data is None:
            raise ConfigError("the length of this recipe follows the number of images; give DATA")
        changed = change_recipe(chosen, changes)
        chosen = apply_hyperrule(changed, DataRef.of(data).open(changed.target).train)
    return change_recipe(chosen, changes)


def prepare_recipe(
    data: DataRef,
    recipe: str | Path | Recipe | None,
    *,
    settings: Mapping[str, Any],
    minutes: float | None = None,
    **start: Any,
) -> tuple[Recipe, list[str]]:
    """The chosen recipe as a new run has it: continued from the run of `weights`, and within the time; and notes."""
    chosen, notes = choose_recipe(data, recipe, settings=settings, **start), list[str]()
    if start.get("weights"):
        chosen, notes = continue_from(chosen, data.name, settings)
    if chosen.teacher:
        chosen = chosen.replace(teacher=absolute_path(chosen.teacher))
    if chosen.eval_fewshot:
        chosen = chosen.replace(eval_fewshot=absolute_data(chosen.eval_fewshot))
    if minutes is None:
        return chosen, notes
    chosen, more = fit_minutes(data, chosen, minutes, settings)
    return chosen, [*notes, *more]


def architecture_for(recipe: Recipe, model: str) -> dict[str, Any]:
    """The part of a recipe's architecture that applies to another model: all but the size, which its name decides."""
    settings = {key: value for key, value in recipe.architecture.items() if key not in SIZE_SETTINGS}
    config = resolve(model)
    if settings.get("representation_size") and isinstance(config, ViTConfig):
        settings["representation_size"] = config.width
    if isinstance(config, ResNetConfig):
        known = {field.name for field in fields(ResNetConfig)}
        return {key: value for key, value in settings.items() if key in known}
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The cost of a run on this machine, from a few measured steps."""

    recipe: Recipe
    splits: Splits
    config: ModelConfig
    device: str
    steps: int
    epochs: float
    evaluations: int
    parameters: int
    frozen: int  # parameters that are not trained
    run_multiply_adds: int  # all training steps, forward and backward, without evaluations
    weight_bytes: int  # weights, optimizer state and averaged weights
    step_bytes: int  # gradients and activations at the peak of a step
    measured_steps: int
    step_seconds: float  # including the wait for the batch
    evaluation_seconds: float  # all evaluations together

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds + self.evaluation_seconds


def plan(data: object, recipe: Recipe, *, seconds: float = 10.0) -> TrainingPlan:
    """The plan of the run that `train` would start with this data and recipe; writes nothing.

    Takes real steps on real images for about `seconds`, but at least two.
    """
    with process_group(recipe.device) as processes:
        recipe, splits = fit_to_data(recipe, data, processes.world_size)
        trainer = Trainer(recipe, splits, processes, model_for(recipe, splits.classes, target_of(splits.train)))
        batches, starting, config = trainer.batches, trainer.model, trainer.model.config
        with closing(batches.loader):
            steps, step_seconds, step_bytes = measure_steps(trainer, batches.from_step(0), seconds=seconds)
        with validation_loader(splits.validation, recipe, starting.meta.preprocess, processes) as loader:
            image_seconds = measure_evaluation(trainer, loader.batches(0))
        trained = sum(p.numel() for p in starting.parameters() if p.requires_grad)
        evaluations = -(-batches.total // batches.per_evaluation)
        return TrainingPlan(
            recipe=recipe,
            splits=splits,
            config=config,
            device=str(processes.device),
            steps=batches.total,
            epochs=batches.total / batches.per_epoch,
            evaluations=evaluations,
            parameters=parameters(config),
            frozen=sum(p.numel() for p in starting.parameters() if not p.requires_grad),
            run_multiply_adds=run_multiply_adds(recipe, config, trainer.augment.image_size, batches.total),
            weight_bytes=VALUE_BYTES * (parameters(config) + trained * extra_copies(recipe)),
            step_bytes=step_bytes,
            measured_steps=steps,
            step_seconds=step_seconds,
            evaluation_seconds=evaluations * len(splits.validation) * image_seconds,
        )


RESERVE = 0.1  # fraction of the time for starting, the report, and steps that are slower than the measured ones
MIN_EPOCHS = 2  # below this, a run from weights is made cheaper instead of shorter
MEMORY_SHARE = 0.8  # of the memory that is free, for tensors
CHEAPER: tuple[dict[str, float], ...] = (
    {},
    {"freeze_layers": 0.5},
    {"freeze_layers": 0.5, "size": 2 / 3},
    {"freeze_layers": 1.0, "size": 2 / 3},
)
"""Changes that make steps cheaper, in this order; `size` is a factor of the image side."""


def step_cost(option: Mapping[str, float]) -> float:
    """About the cost of a step with one of these changes: a backward pass costs two forward passes."""
    return (1 + 2 * (1 - option.get("freeze_layers", 0.0))) / 3 * option.get("size", 1.0) ** 2


def fit_minutes(data: object, recipe: Recipe, minutes: float, keys: Container[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe shortened to a time limit: fewer steps, and perhaps frozen layers and smaller images.

    The steps are never more than the recipe's own. Batches that need more memory than is free are split.

    Args:
        data: The data of the run.
        recipe: Its recipe.
        minutes: Time for everything, including the measurement here.
        keys: Settings that stay as they are.

    Returns:
        The recipe, and notes that say what was chosen.

    Raises:
        TrainingError: not even the evaluation at the end would be ready.
    """
    began = time.perf_counter()
    check_range("minutes", minutes, 0.01)
    is_given = any(key in keys for key in ("freeze_layers", "freeze", "image_size", "lora", "lora.rank", "enlarge"))
    options = CHEAPER if recipe.weights and not is_given else CHEAPER[:1]
    seconds = min(10.0, 3 * minutes)
    measured, changed = plan(data, recipe, seconds=seconds), recipe

    def seconds_left() -> tuple[float, float]:
        """The time for steps, and that of the earlier evaluations for each of them."""
        evaluation = measured.evaluation_seconds / measured.evaluations
        fixed = evaluation  # after the last step
        if recipe.head_init != "zero" and recipe.weights:  # features of the images that the head is fitted to
            fixed += evaluation * min(HEAD_IMAGES, len(measured.splits.train)) / max(1, len(measured.splits.validation))
        left = 60 * minutes * (1 - RESERVE) - (time.perf_counter() - began) - fixed
        return left, evaluation * (measured.evaluations - 1) / measured.steps

    def steps_in_time(cost: float = 1.0) -> int:
        left, between = seconds_left()
        return min(measured.steps, int(left / (cost * measured.step_seconds + between)))

    enough = min(measured.steps, MIN_EPOCHS * measured.steps / measured.epochs)
    option = next((option for option in options if steps_in_time(step_cost(option)) >= enough), options[-1])
    if option:
        size = scale_size(measured.config, option["size"])[0] if "size" in option else recipe.image_size
        changed = recipe.replace(freeze_layers=option["freeze_layers"], image_size=size)
        measured = plan(data, changed, seconds=seconds)
    steps, per_epoch = steps_in_time(), measured.steps / measured.epochs
    if steps < 1:
        needed = format_duration(60 * minutes - seconds_left()[0])
        reason = f"{argument('minutes', minutes, 'g')} is too short: everything but the steps takes about {needed}"
        raise TrainingError(reason, hint="give more time, or fewer images (max_train_samples)")
    lengths = {"warmup": changed.warmup, "cooldown": changed.cooldown}
    lengths = {name: length / measured.steps for name, length in lengths.items() if length >= 1}  # the same fraction
    split = changed.grad_accum_steps
    free = MEMORY_SHARE * available_bytes(measured.device) - measured.weight_bytes
    while measured.step_bytes * changed.grad_accum_steps / split > free > 0 and split < changed.batch_size:
        split *= 2
    notes = [f"minutes={minutes:g}: {steps:,} steps ({steps / per_epoch:.3g} epochs), as measured here"]
    if option:
        pixels = f" and images of {changed.image_size} pixels" if changed.image_size != recipe.image_size else ""
        notes.append(f"to meet the time limit: freeze_layers={changed.freeze_layers:g}{pixels}")
    if split != changed.grad_accum_steps:
        notes.append(f"grad_accum_steps={split}: a batch needs {format_bytes(measured.step_bytes)} of memory")
    return changed.replace(steps=steps, epochs=0, **lengths, grad_accum_steps=split), notes


def available_bytes(device: str) -> float:
    """Free memory of a device; infinite if the system does not say."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = free_megabytes()
    return math.inf if free is None else free * 2**20


def extra_copies(recipe: Recipe) -> int:
    """Tensors of the optimizer's state and averaged weights per parameter."""
    return len(OPTIMIZERS[recipe.optimizer].moments) + (recipe.average != "none")


def plan_lines(plan: TrainingPlan) -> list[str]:
    """The plan for printing, one line per fact."""
    formats = {"bytes": format_bytes, "duration": format_duration, "plural": plural}
    text = render("plan.txt", plan=plan, recipe=plan.recipe, work=multiply_adds(plan.config), **formats)
    return str(text).splitlines()


def measure_steps(trainer: Trainer, batches: Iterator[Batch], *, seconds: float) -> tuple[int, float, int]:
    """Take training steps for about `seconds`; they change the weights.

    Returns:
        The number of timed steps, the seconds of a step with the wait for its batch, and its peak memory in bytes.
    """
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
    waits, works = list[float](), [work]
    end = time.perf_counter() + seconds
    while len(works) < MAX_STEPS and (time.perf_counter() < end or len(works) < 2):
        before = time.perf_counter()
        following = next(batches, None)
        if following is None:
            break
        waits.append(time.perf_counter() - before)
        works.append(time_step(trainer, head_of(following, images)))
    # An optimizer such as Muon takes the same time for any number of images, so two sizes are needed to tell the cost
    # of an image; with only one, the time is taken to be proportional to the images.
    work = statistics.fmean(works)  # not the median: the time of a run is a sum
    few = len(first)
    per_image = work / images  # at most, whatever a busy machine makes of the difference
    if images > few:
        per_image = min(per_image, max(0.0, work - first_work) / (images - few))
    return len(works), statistics.fmean(waits or [0.0]) + work + per_image * (size - images), step_bytes


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
    parts = {name: getattr(batch, name)[:count] for name in ("pixels", "labels", "indices", "weights")}
    return replace(batch, **parts)


def measure_evaluation(trainer: Trainer, batches: Iterator[Batch], *, most: int = 3) -> float:
    """Seconds per validation image, including loading: the minimum over a few batches, as the first is slow."""
    seconds = []
    before = time.perf_counter()
    for batch in islice(batches, most):
        if len(batch):
            trainer.objective.evaluate([batch], len(batch), all_ranks=False)
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
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, size: int) -> None:
        self.now -= size


UTILIZATION = 0.4  # fraction of the accelerators' peak that training reaches; the paper's own runs: about 0.3 on TPUv3
NODE = 8  # devices per machine, among which hybrid sharding splits the weights
IMAGE_BYTES = 110_000  # average file size of an image, about that of ImageNet's JPEGs
BLOCK_BYTES = 34  # activations of a block per token and unit of width in 16 bits, without the attention matrix
DAY = 86_400.0
TPU = "TPUv3-core"


@cache
def cluster_tables() -> dict[str, Any]:
    """Accelerators, and the data and the cost of the paper's runs."""
    return package_table("clusters.toml")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """The cost of a run on a cluster, counted without running anything."""

    recipe: Recipe
    config: ModelConfig
    devices: int
    accelerator: str
    images: int
    steps: int
    run_multiply_adds: int
    seconds: float
    weight_bytes: dict[str, int]  # by sharding: weights, gradients, optimizer and averaged weights, per device
    activation_bytes: int  # an estimate for a device's part of the batch, in 16 bits, without checkpointing
    paper_days: int | None  # TPUv3-core-days in the paper, if this is one of its runs
    paper_utilization: float  # fraction of their peak that the paper's cores reached; 0 for other runs


def cluster_plan(
    recipe: str | Path | Recipe,
    cluster: str,
    *,
    data: object = None,
    model: str | None = None,
    weights: str | None = None,
    settings: RecipeChanges = (),
) -> ClusterPlan:
    """The cost of a recipe on a cluster such as `64 x A100`.

    By default the data is that which the name of the recipe stands for. `model` replaces that of the recipe; `weights`
    is a published name or, since nothing is loaded, the name of an architecture.
    """
    if weights is not None:
        if model is not None or Path(weights).expanduser().exists():
            raise ConfigError(f"{argument('cluster')} plans one model by name", hint=f"give {argument('model')} alone")
        published = find_published(weights)
        model = published.variant if published else weights
    match = re.fullmatch(r"\s*(\d{1,6})\s*[x*×]\s*([\w-]+)\s*", cluster)
    if match is None or int(match[1]) < 1:
        example = "a number of devices and their name, such as '64 x A100'"
        raise ConfigError(f"{argument('cluster', cluster)} is not {example}")
    tables = cluster_tables()
    devices, peaks = int(match[1]), tables["accelerators"]
    accelerator = {name.lower(): name for name in peaks}.get(match[2].lower())
    if accelerator is None:
        raise UnknownNameError("accelerator", match[2], peaks, see=f"(known: {', '.join(peaks)})")
    chosen = choose_recipe(data, recipe, model=model, settings=settings)
    name = Path(str(recipe)).stem if isinstance(recipe, str | Path) else ""
    if data is not None:
        dataset = open_dataset(data)
        images, classes = len(dataset.train), len(dataset.classes)
    else:
        sizes = [size for prefix, *size in tables["datasets"] if name.startswith(prefix)]
        if not sizes:
            raise ConfigError(f"the size of the dataset for the recipe {name!r} is unknown; give DATA")
        images, classes = sizes[0]
    images = min(images, chosen.max_train_samples or images)
    config = config_of(chosen, classes)
    steps = round(chosen.steps or chosen.epochs * images / chosen.batch_size)
    work = run_multiply_adds(chosen, config, config.image_size, steps)
    state = VALUE_BYTES * parameters(config) * (2 + extra_copies(chosen))
    if isinstance(config, ViTConfig):
        activations = config.depth * (config.prefix_tokens + math.prod(config.grid)) * config.width * BLOCK_BYTES
    else:
        activations = multiply_adds(config) // 50
    run = [name, chosen.model, round(chosen.epochs)]
    paper_days = next((days for *key, days in tables["paper_days"] if key == run), None)
    return ClusterPlan(
        recipe=chosen,
        config=config,
        devices=devices,
        accelerator=accelerator,
        seconds=2 * work / (peaks[accelerator][0] * UTILIZATION * devices),
        weight_bytes={"ddp": state, "fsdp, hybrid": state // min(NODE, devices), "fsdp, full": state // devices},
        images=images,
        steps=steps,
        run_multiply_adds=work,
        activation_bytes=activations * -(-chosen.batch_size // (devices * chosen.grad_accum_steps)),
        paper_days=paper_days,
        paper_utilization=2 * work / (paper_days * DAY * peaks[TPU][0]) if paper_days else 0.0,
    )


def cluster_lines(plan: ClusterPlan) -> list[str]:
    """The plan for printing, one line per fact."""
    peaks, formats = cluster_tables()["accelerators"], {"bytes": format_bytes, "duration": format_duration}
    numbers = dict(zip(("flops", "memory"), peaks[plan.accelerator])) | {"paper_flops": peaks[TPU][0], "day": DAY}
    numbers |= {"utilization": UTILIZATION, "image_bytes": IMAGE_BYTES, "image_work": multiply_adds(plan.config)}
    return str(render("cluster.txt", plan=plan, **numbers, **formats)).splitlines()


LENGTHS: tuple[tuple[float, int, int, tuple[float, ...], float], ...] = (
    # below this number of images: steps, steps of warmup, where the learning rate decays, mixup_alpha
    (20_000, 500, 100, (0.4, 0.6, 0.8), 0.0),
    (500_000, 10_000, 500, (0.3, 0.6, 0.9), 0.1),
    (math.inf, 20_000, 500, (0.3, 0.6, 0.9), 0.1),
)
SMALL_AREA = 96 * 96
SIDES = {True: (160, 128), False: (512, 480)}  # is the image small: side before and after the random crop
EXAMINED = 25  # images whose median size decides the resolution


def apply_hyperrule(recipe: Recipe, images: Source) -> Recipe:
    """The recipe with the length, resolution and Mixup that the BiT-HyperRule derives from the training images."""
    count = min(len(images), recipe.max_train_samples or len(images))
    steps, warmup, decay_at, mixup = next(row[1:] for row in LENGTHS if count < row[0])
    before, after = SIDES[median(areas(images)) < SMALL_AREA]
    return recipe.replace(
        bit_hyperrule=False,
        epochs=0.0,
        steps=steps,
        warmup=warmup / steps,  # the same fraction if the user shortens the run
        decay_at=decay_at,
        image_size=after,
        augment=recipe.augment.replace(crop="random", precrop=before / after, mixup_alpha=mixup),
    )


def areas(images: Source) -> Iterable[int]:
    """The areas, in pixels, of some images, evenly spaced."""
    for index in np.unique(np.linspace(0, len(images) - 1, EXAMINED).astype(int)).tolist():
        try:
            yield math.prod(display(images.read(index)).size)
        except ImageError:
            continue  # training reports it
