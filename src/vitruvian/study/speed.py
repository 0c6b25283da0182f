"""Figure 12: images per second and the largest batch that fits in memory, by input size, of models without weights."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.catalog import resolve
from vitruvian.engines.choose import measure
from vitruvian.errors import ConfigError
from vitruvian.files import read_object, write_json
from vitruvian.machine import announce_device, choose_device, synchronize
from vitruvian.model.build import Model, build
from vitruvian.progress import print_status
from vitruvian.report.chart import Chart, Line
from vitruvian.study import STUDY_FILE
from vitruvian.study.ablation import write_page
from vitruvian.training.planning import VALUE_BYTES, peak_bytes

MODELS = ("ViT-S/32", "ViT-S/16", "ViT-B/32", "ViT-B/16", "BiT-R50x1")
SIZES = (64, 128, 224, 320)
BATCHES = (1, 4, 16)
MEMORY = 16.0  # GB, as of a TPUv3 core
NUM_CLASSES = 1000
MAX_SECONDS = 10.0  # for one batch size
FINDING = "ViTs are as fast as ResNets of similar accuracy, and fit in memory with much larger batches"
DIFFERS = "the paper measured on a TPUv3 core with 16 GB; here float32 on this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCell:
    """A model at an input size: the best speed over the batch sizes, and what fits in memory."""

    model: str
    image_size: int
    images_per_second: float | None = None
    batch_size: int | None = None  # the fastest
    largest_batch: int | None = None
    missing: str = ""  # why it could not be measured

    def texts(self) -> list[str]:
        speed = "-" if self.images_per_second is None else f"{self.images_per_second:.1f}"
        return [self.model, str(self.image_size), speed, str(self.batch_size or "-"), f"{self.largest_batch or '-'}"]


HEADINGS = ("model", ">pixels", ">images/s", ">batch", ">largest batch")


def speed_study(
    out: Path,
    *,
    models: Sequence[str] = MODELS,
    sizes: Sequence[int] = SIZES,
    batches: Sequence[int] = BATCHES,
    memory: float = MEMORY,
    rounds: int = 5,
    device: str = "auto",
    report: Callable[[str], None] = print_status,
) -> list[SpeedCell]:
    """Measure inference of every model at every size; what an earlier call has measured is not repeated.

    The largest batch is computed: the memory of inference grows linearly with the batch, as two batches show.
    """
    device = choose_device(device)
    announce_device(device)
    setup = {"batches": list(batches), "memory": memory, "rounds": rounds, "device": device}
    path = out / STUDY_FILE
    before = read_object(path, raises=ConfigError) if path.is_file() else {}
    cells = [SpeedCell(**cell) for cell in before["cells"]] if before.get("setup") == setup else []
    done = {(cell.model, cell.image_size): cell for cell in cells}
    for name in models:
        resolve(name)  # before anything is measured
    cells = []
    for name, size in ((name, size) for name in models for size in sizes):
        report(f"{name} at {size} pixels{' (already done)' if (name, size) in done else ''}")
        cell = done.get((name, size)) or measure_cell(name, size, batches, memory * 1e9, rounds, torch.device(device))
        cells.append(cell)
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, {"setup": setup, "cells": [asdict(cell) for cell in cells]})
        write_speed(out, cells, memory)
    return cells


def measure_cell(
    name: str, size: int, batches: Sequence[int], memory: float, rounds: int, device: torch.device
) -> SpeedCell:
    try:
        model = build(resolve(name).replace(image_size=(size, size), num_classes=NUM_CLASSES)).eval().to(device)
    except ConfigError as error:
        return SpeedCell(model=name, image_size=size, missing=str(error))
    images = torch.randn(max(*batches, 2), 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    forward = partial(infer, model)
    one, two = (peak_bytes(lambda count=count: forward(images[:count]), device) for count in (1, 2))  # type: ignore[misc]
    image_bytes = two - one + VALUE_BYTES * images[0].numel()
    free = memory - sum(VALUE_BYTES * p.numel() for p in model.parameters())
    speeds = {}
    for count in batches:
        seconds = measure({"torch": forward}, images[:count], rounds, MAX_SECONDS)["torch"]
        speeds[count] = count / statistics.median(seconds)
    best = max(speeds, key=speeds.__getitem__)
    largest = max(0, int(free // image_bytes))
    speed: Any = {"images_per_second": speeds[best], "batch_size": best, "largest_batch": largest}
    return SpeedCell(model=name, image_size=size, **speed)


def infer(model: Model, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(pixels)
        synchronize(logits.device)
        return logits


def write_speed(out: Path, cells: Sequence[SpeedCell], memory: float) -> None:
    charts = []
    titles = {"images_per_second": "Images per second", "largest_batch": f"Largest batch in {memory:g} GB"}
    for key, title in titles.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            value: Any = getattr(cell, key)
            points.setdefault(cell.model, []).extend([(cell.image_size, value)] if value else [])
        lines = [Line(name, values) for name, values in points.items()]
        chart = Chart(title=title, lines=lines[:6], x_label="input size in pixels", log_y=True, size=(760, 400))
        charts += [chart] if any(line.points for line in lines) else []
    facts: Any = {"title": "speed study", "subtitle": f"{len(cells)} cells", "headings": HEADINGS}
    facts |= {"remarks": [f"the paper (Figure 12): {FINDING}", DIFFERS], "rows": [cell.texts() for cell in cells]}
    write_page(out, charts=charts, **facts)
