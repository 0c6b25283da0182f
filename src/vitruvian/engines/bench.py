"""How fast a model is here, by engine and batch, where the time goes, and how near that is to the machine's limit."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitruvian.config import GraphConfig, ViTConfig
from vitruvian.cost import multiply_adds, tokens_by_layer
from vitruvian.engines.choose import Way, cached_graph, forward_of, measure, usual_way
from vitruvian.engines.export import Forward
from vitruvian.engines.graph import Graph, open_graph
from vitruvian.engines.parts import photo, readable, shares_of, timed
from vitruvian.engines.sessions import check_engine, installed
from vitruvian.errors import ConfigError, VitruvianError, argument
from vitruvian.machine import peak_megabytes, reset_peak_memory, resident_megabytes
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.report.chart import Chart, Line
from vitruvian.settings import BatchSize, validate
from vitruvian.text import table

MATRIX = 1024
"""Side of the matrices whose product is the machine's limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One engine at one batch."""

    engine: str
    batch_size: int
    images_per_second: float
    """By the median time of a batch."""
    p50_ms: float
    p90_ms: float
    p99_ms: float
    of_limit: float | None
    """Share of the multiply-adds that this machine's matrix product does in the same time; None where their number is
    not known."""
    memory_mb: float | None
    """What opening and running it added to the process at its peak; None where the system does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What was measured."""

    speeds: tuple[Speed, ...]
    shares: dict[str, float]
    """Milliseconds an image in each part, with torch on all cores; of a graph, with its first engine."""
    limit_gflops: float
    """Of one large float32 matrix product on all cores."""
    threads: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (
                s.engine,
                str(s.batch_size),
                f"{s.images_per_second:.1f}",
                *(f"{value:.1f}" for value in (s.p50_ms, s.p90_ms, s.p99_ms)),
                "-" if s.of_limit is None else f"{s.of_limit:.0%}",
                "-" if s.memory_mb is None else f"{s.memory_mb:.0f}",
            )
            for s in self.speeds
        ]
        heads = ("engine", ">batch", ">images/s", ">p50 ms", ">p90", ">p99", ">of matmul", ">memory MB")
        total = sum(self.shares.values())
        parts = [(name, f"{ms:.2f}", f"{ms / total:.0%}") for name, ms in self.shares.items()]
        limit = f"float32 matrix product on {self.threads} threads: {self.limit_gflops:.0f} GFLOP/s"
        return "\n".join(
            [table(heads, rows), "", table(("part of an image's time", ">ms", ">share"), parts), "", limit]
        )

    def chart(self) -> Chart:
        """Images per second against the batch, a line for each engine."""
        engines = dict.fromkeys(speed.engine for speed in self.speeds)
        lines = [
            Line(name, [(s.batch_size, s.images_per_second) for s in self.speeds if s.engine == name])
            for name in engines
        ]
        return Chart(title="images per second", lines=lines, x_label="batch", log_x=True, y_from=0.0)


def bench(
    model: Model | Graph,
    *,
    engines: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 16),
    rounds: int = 20,
    image: str | Path | None = None,
) -> Bench:
    """Measure a model with each engine, interleaved: those named, or all that are installed and can run it.

    A graph is measured with its own engine unless others are named. `image` is the file that is decoded.
    """
    usual = [model.graph.engine] if isinstance(model, Graph) else installed()
    names: list[str] = [check_engine(name) for name in (engines or usual)]
    if "auto" in names:
        raise ConfigError(
            f"{argument('engine', 'auto')} is not measured by itself: leave it out to compare all engines"
        )
    if isinstance(model, Graph) and "torch" in names:
        raise ConfigError(f"{model.graph.path}: an exported graph runs in onnxruntime or openvino, not in torch")
    if model.meta.cascade is not None:
        print_status("note: measured is the whole model, without the first pass of its cascade")
    model.eval()
    data = photo() if image is None else readable(image)
    limit, size, speeds = matmul_gflops(), model.meta.preprocess.image_size, []
    count = computed(model, size)
    for batch in batches:
        validate("batch_size", BatchSize, batch)
        pixels = torch.randn(batch, model.config.in_channels, *size, generator=torch.Generator().manual_seed(0))
        memory, forwards = opened(model, [usual_way(name, batch) for name in names], pixels, strict=bool(engines))
        for way, seconds in measure(forwards, pixels, rounds).items():
            milliseconds = sorted(1000 * each for each in seconds)
            rate = batch / statistics.median(seconds)
            percentiles = [float(np.percentile(milliseconds, p)) for p in (50, 90, 99)]
            speeds.append(
                Speed(
                    engine=way.engine,
                    batch_size=batch,
                    images_per_second=rate,
                    p50_ms=percentiles[0],
                    p90_ms=percentiles[1],
                    p99_ms=percentiles[2],
                    of_limit=None if count is None else 2e-9 * count * rate / limit,
                    memory_mb=memory[way],
                )
            )
    shares = shares_of(model, data, rounds)
    return Bench(speeds=tuple(speeds), shares=shares, limit_gflops=limit, threads=torch.get_num_threads())


def opened(
    model: Model | Graph, ways: Sequence[Way], pixels: Tensor, *, strict: bool
) -> tuple[dict[Way, float | None], dict[Way, Forward]]:
    """The memory and the forward pass of each way; unless `strict`, one that fails is said and left out."""
    memory: dict[Way, float | None] = {}
    forwards: dict[Way, Forward] = {}
    for way in ways:
        try:
            memory[way], forwards[way] = peak_memory(model, way, pixels)
        except VitruvianError as error:
            if strict:
                raise
            print_status(f"note: {way.engine} is left out: {error}")
    return memory, forwards


def computed(model: Model | Graph, size: tuple[int, int]) -> int | None:
    """Multiply-adds of an image, without the tokens that the last block leaves out; None for a graph of others."""
    config = model.config
    if isinstance(config, GraphConfig):
        return None
    count = multiply_adds(config, size)
    if not isinstance(config, ViTConfig):
        return count
    read = model.tokens_read if isinstance(model, ViT) else config.tokens_read
    if read is None:
        return count
    rows, columns = config.grid_of(size)
    *_, tokens, left = tokens_by_layer(config, rows * columns + config.prefix_tokens)  # in and out of the last block
    mlp = config.width * config.mlp_dim * (3 if config.mlp == "swiglu" else 2)
    each = config.width**2 + 2 * tokens * config.width  # of the output layer and both products
    return count - (tokens - read) * each - (left - read) * mlp


def matmul_gflops() -> float:
    """The best of several products of large float32 matrices."""
    a, b = torch.randn(2, MATRIX, MATRIX, generator=torch.Generator().manual_seed(0))
    return 2e-9 * MATRIX**3 / min(timed(lambda: a @ b) for _ in range(10))


def peak_memory(model: Model | Graph, way: Way, pixels: Tensor) -> tuple[float | None, Forward]:
    """Megabytes that an engine adds to the process while it opens and answers; and the engine."""
    size = (pixels.shape[2], pixels.shape[3])
    if way.engine != "torch" and not isinstance(model, Graph):
        cached_graph(model, way.engine, size)  # an export is not counted
    reset_peak_memory()
    before = resident_megabytes()
    if isinstance(model, Graph):
        forward: Forward = open_graph(model.graph.path, engine=way.engine)
    else:
        forward = forward_of(model, way, size)
    forward(pixels)
    after = peak_megabytes()
    return None if before is None or after is None else after - before, forward
