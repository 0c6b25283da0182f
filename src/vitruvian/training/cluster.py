"""What a recipe would cost on a cluster that is not here: counted from its settings, nothing is run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitruvian.config import ModelConfig, ViTConfig
from vitruvian.cost import multiply_adds, parameters
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError, UnknownNameError, argument
from vitruvian.text import format_bytes, format_duration
from vitruvian.training.images import run_multiply_adds, stages_of
from vitruvian.training.model import config_of
from vitruvian.training.optimizer import OPTIMIZERS
from vitruvian.training.plan import fact_lines
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import changed, read_recipe

UTILIZATION = 0.4
"""Share of the accelerators' peak that training reaches. The paper's own runs: about 0.3 of TPUv3."""
NODE = 8
"""Devices of one machine, among which hybrid sharding splits the weights."""
IMAGE_BYTES = 110_000
"""Of a stored image, about that of ImageNet's JPEGs."""
BLOCK_BYTES = 34
"""Activations of a block in 16 bits, for each token and unit of width, without attention's table."""
DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    flops: float
    """A second, dense, in 16 bits; a multiply-add is two."""
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
"""As their makers state them."""

TPU = "TPUv3-core"
PAPER_DAYS = {
    ("paper-jft-h14", "ViT-H/14", 14): 2500,
    ("paper-jft-l16", "ViT-L/16", 14): 680,
    ("paper-imagenet21k", "ViT-L/16", 90): 230,
}
"""TPUv3-core-days of Table 2, by recipe, model and epochs."""

DATASETS = {
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
"""Images and classes by the beginning of a recipe's name; the first that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """What a run would take."""

    recipe: str
    model: str
    devices: int
    accelerator: str
    images: int
    batch_size: int
    steps: int
    multiply_adds: int
    """One image, forward."""
    run_multiply_adds: int
    weight_bytes: dict[str, int]
    """Weights, gradients and optimizer on each device, by sharding mode."""
    activation_bytes: int
    """Of a device's part of the batch, without checkpointing."""
    read_bytes: int
    paper_days: int | None
    """TPUv3-core-days that the paper gives."""
    result: str
    """What the recipe should reach."""

    @property
    def seconds(self) -> float:
        return 2 * self.run_multiply_adds / (ACCELERATORS[self.accelerator].flops * UTILIZATION * self.devices)

    @property
    def paper_utilization(self) -> float | None:
        """Share of their peak that the paper's cores reached, if this run is the paper's."""
        if self.paper_days is None:
            return None
        return 2 * self.run_multiply_adds / (self.paper_days * DAY * ACCELERATORS[TPU].flops)


def parse_cluster(text: str) -> tuple[int, str]:
    """`64 x A100`."""
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
    """The cost of a recipe on `cluster`, such as `64 x A100`, for these data or for those that its name tells."""
    devices, accelerator = parse_cluster(cluster)
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    chosen = changed(chosen.replace(model=model) if model else chosen, settings)
    name = Path(str(recipe)).stem if isinstance(recipe, str | Path) else ""
    images, classes = size_of(name, data)
    images = min(images, chosen.max_train_samples or images)
    config = config_of(chosen, classes)
    steps = round(chosen.steps or chosen.epochs * images / chosen.batch_size)
    stages = stages_of(chosen, config.image_size, steps)
    return ClusterPlan(
        recipe=name,
        model=chosen.model,
        devices=devices,
        accelerator=accelerator,
        images=images,
        batch_size=chosen.batch_size,
        steps=steps,
        multiply_adds=multiply_adds(config),
        run_multiply_adds=run_multiply_adds(chosen, config, stages),
        weight_bytes=weight_bytes(chosen, parameters(config), devices),
        activation_bytes=activation_bytes(config, -(-chosen.batch_size // (devices * chosen.grad_accum_steps))),
        read_bytes=steps * chosen.batch_size * IMAGE_BYTES,
        paper_days=PAPER_DAYS.get((name, chosen.model, round(chosen.epochs))),
        result=chosen.result,
    )


def size_of(recipe: str, data: object) -> tuple[int, int]:
    """Images and classes to train on."""
    if data is not None:
        found = open_dataset(data)
        return len(found.train), len(found.classes)
    for start, known in DATASETS.items():
        if recipe.startswith(start):
            return known
    raise ConfigError(f"the recipe {recipe!r} does not tell how many images it is for; give DATA")


def weight_bytes(recipe: Recipe, count: int, devices: int) -> dict[str, int]:
    """Weights, gradients, what the optimizer remembers and the average, all float32, on each device."""
    copies = 2 + len(OPTIMIZERS[recipe.optimizer].moments) + (recipe.average != "none")
    whole = 4 * count * copies
    return {
        "ddp": whole,
        "fsdp, hybrid": whole // min(NODE, devices),
        "fsdp, full": whole // devices,
    }


def activation_bytes(config: ModelConfig, images: int) -> int:
    """An estimate, in 16 bits."""
    if not isinstance(config, ViTConfig):
        return images * multiply_adds(config) // 50
    return images * config.depth * (config.prefix_tokens + math.prod(config.grid)) * config.width * BLOCK_BYTES


def cluster_lines(plan: ClusterPlan) -> list[str]:
    """The plan as people read it."""
    device = ACCELERATORS[plan.accelerator]
    spent = plan.seconds / DAY * plan.devices
    facts = {
        "model": f"{plan.model}, {plan.multiply_adds:.3g} multiply-adds an image",
        "steps": f"{plan.steps:,} of {plan.batch_size:,} images, of {plan.images:,}",
        "multiply-adds": f"{plan.run_multiply_adds:.3g} for the whole training "
        f"({2 * plan.run_multiply_adds / 1e18:,.5g} exaFLOPs)",
        "time": f"{format_duration(plan.seconds)} on {plan.devices} x {plan.accelerator}, "
        f"{spent:,.3g} accelerator-days, at {UTILIZATION:.0%} "
        f"of the peak of {device.flops / 1e12:,.0f} TFLOPS each (assumed)",
    }
    for mode, held in plan.weight_bytes.items():
        fits = "" if held + plan.activation_bytes <= 0.9 * device.memory else ": too much without grad_checkpointing"
        fits = fits if held <= 0.9 * device.memory else ": too much"
        facts[f"memory, {mode}"] = (
            f"{format_bytes(held)} and about {format_bytes(plan.activation_bytes)} of activations of "
            f"{format_bytes(int(device.memory))}{fits}"
        )
    facts["read"] = f"{format_bytes(plan.read_bytes)} at {IMAGE_BYTES // 1000} kB an image, " + (
        f"{format_bytes(round(plan.read_bytes / plan.seconds))} a second"
    )
    if plan.paper_days is not None:
        facts["the paper"] = (
            f"{plan.paper_days:,} TPUv3-core-days (Table 2), {plan.paper_utilization:.0%} of their peak of "
            f"{ACCELERATORS[TPU].flops / 1e12:,.4g} TFLOPS each; {plan.result} (Table 5)"
        )
    return fact_lines(facts)
