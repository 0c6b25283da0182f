"""How fast a model is here, by engine and batch, where the time goes, and how near that is to the machine's limit."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitruvian.config import ViTConfig
from vitruvian.cost import multiply_adds, tokens_by_layer
from vitruvian.data.decode import decode
from vitruvian.data.preprocess import view
from vitruvian.engines.choose import Way, cached_graph, forward_of, measure, usual_way
from vitruvian.engines.export import Forward
from vitruvian.engines.sessions import check_engine, installed
from vitruvian.errors import ConfigError
from vitruvian.model.build import Model
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT
from vitruvian.report.chart import Chart, Line
from vitruvian.settings import BatchSize, typed
from vitruvian.text import table

MATRIX = 1024
"""Side of the matrices whose product is the machine's limit."""
PHOTO = (500, 375)
"""Width and height of the image that is decoded where none is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One engine at one batch."""

    engine: str
    batch: int
    images_per_second: float
    """By the median time of a batch."""
    p50_ms: float
    p90_ms: float
    p99_ms: float
    of_limit: float
    """Share of the multiply-adds that this machine's matrix product does in the same time."""
    memory_mb: float | None
    """What opening and running it added to the process at its peak; None where the system does not tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What was measured."""

    speeds: tuple[Speed, ...]
    shares: dict[str, float]
    """Milliseconds an image in each part, with torch on all cores."""
    limit_gflops: float
    """Of one large float32 matrix product on all cores."""
    threads: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rows = [
            (
                s.engine,
                str(s.batch),
                f"{s.images_per_second:.1f}",
                *(f"{value:.1f}" for value in (s.p50_ms, s.p90_ms, s.p99_ms)),
                f"{s.of_limit:.0%}",
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
            Line(name, [(s.batch, s.images_per_second) for s in self.speeds if s.engine == name]) for name in engines
        ]
        return Chart(title="images per second", lines=lines, x_label="batch", log_x=True, y_from=0.0)


def bench(
    model: Model,
    *,
    engines: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 16),
    rounds: int = 20,
    image: str | Path | None = None,
) -> Bench:
    """Measure a model with each engine, all that are installed unless named, interleaved; `image` is decoded."""
    names: list[str] = [check_engine(name) for name in (engines or installed())]
    if "auto" in names:
        raise ConfigError("engine='auto' is not measured by itself: leave it out to compare all engines")
    model.eval()
    limit, size, speeds = matmul_gflops(), model.preprocess.image_size, []
    for batch in batches:
        typed("batch", BatchSize, batch)
        pixels = torch.randn(batch, model.config.channels, *size, generator=torch.Generator().manual_seed(0))
        memory: dict[Way, float | None] = {}
        forwards: dict[Way, Forward] = {}
        for way in (usual_way(name, batch) for name in names):
            memory[way], forwards[way] = peak_memory(model, way, pixels)
        for way, seconds in measure(forwards, pixels, rounds).items():
            milliseconds = sorted(1000 * each for each in seconds)
            rate = batch / statistics.median(seconds)
            percentiles = [float(np.percentile(milliseconds, p)) for p in (50, 90, 99)]
            speeds.append(
                Speed(
                    engine=way.engine,
                    batch=batch,
                    images_per_second=rate,
                    p50_ms=percentiles[0],
                    p90_ms=percentiles[1],
                    p99_ms=percentiles[2],
                    of_limit=2e-9 * computed(model, size) * rate / limit,
                    memory_mb=memory[way],
                )
            )
    shares = shares_of(model, image, rounds)
    return Bench(speeds=tuple(speeds), shares=shares, limit_gflops=limit, threads=torch.get_num_threads())


def computed(model: Model, size: tuple[int, int]) -> int:
    """Multiply-adds of an image, without the tokens that the last block leaves out."""
    count, config = multiply_adds(model.config, size), model.config
    if not isinstance(model, ViT) or not isinstance(config, ViTConfig) or model.tokens_read is None:
        return count
    rows, columns = config.grid_of(size)
    *_, tokens, left = tokens_by_layer(config, rows * columns + config.prefix_tokens)  # in and out of the last block
    mlp = config.width * config.mlp_width * (3 if config.mlp == "swiglu" else 2)
    each = config.width**2 + 2 * tokens * config.width  # of the output layer and both products
    return count - (tokens - model.tokens_read) * each - (left - model.tokens_read) * mlp


def matmul_gflops() -> float:
    """The best of several products of large float32 matrices."""
    a, b = torch.randn(2, MATRIX, MATRIX, generator=torch.Generator().manual_seed(0))
    return 2e-9 * MATRIX**3 / min(timed(lambda: a @ b) for _ in range(10))


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(model: Model, way: Way, pixels: Tensor) -> tuple[float | None, Forward]:
    """Megabytes that an engine adds to the process while it opens and answers; and the engine."""
    size = (pixels.shape[2], pixels.shape[3])
    if way.engine != "torch":
        cached_graph(model, way.engine, size)  # an export is not counted
    trim_memory()  # what was freed would hide what is added
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    forward = forward_of(model, way, size)
    forward(pixels)
    after = resident("VmHWM")
    return None if before is None or after is None else after - before, forward


def trim_memory() -> None:
    """Return freed memory to the system, where the C library keeps it for later and can be told so (glibc)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(entry: str) -> float | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{entry}:"):
                return int(line.split()[1]) / 1024
    return None


def shares_of(model: Model, image: str | Path | None, rounds: int) -> dict[str, float]:
    """Milliseconds an image takes in each part of its way, medians."""
    data = photo() if image is None else Path(image).read_bytes()
    decoded = decode(data)
    model_parts: list[dict[str, float]] = []
    pixels = view(decoded, model.preprocess)[None]
    for _ in range(rounds + 1):
        model_parts.append(parts_of(model, pixels))
    found = {
        "decode": statistics.median(timed(lambda: decode(data)) for _ in range(rounds)),
        "resize": statistics.median(timed(lambda: view(decoded, model.preprocess)) for _ in range(rounds)),
    }
    for name in model_parts[0]:
        found[name] = statistics.median(parts[name] for parts in model_parts[1:])
    return {name: 1000 * seconds for name, seconds in found.items()}


def parts_of(model: Model, pixels: Tensor) -> dict[str, float]:
    """Seconds of one forward pass in the embedding, attention, MLPs and the rest."""
    parts: dict[str, list[nn.Module]] = {}
    if isinstance(model, ViT):
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        parts = {
            "embed": [model.embed],
            "attention": [block.attention for block in blocks],
            "MLP": [block.mlp for block in blocks],
        }
    seconds, hooks, starts = dict.fromkeys(parts, 0.0), [], {}

    def begin(module: nn.Module, *_: Any) -> None:
        starts[module] = time.perf_counter()

    def end(part: str) -> Callable[..., None]:
        def ended(module: nn.Module, *_: Any) -> None:
            seconds[part] += time.perf_counter() - starts[module]

        return ended

    for part, modules in parts.items():
        for module in modules:
            hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end(part))]
    try:
        with torch.inference_mode():
            whole = timed(lambda: model(pixels))
    finally:
        for hook in hooks:
            hook.remove()
    return seconds | {"norms, sums, head" if parts else "model": max(0.0, whole - sum(seconds.values()))}


def photo() -> bytes:
    """A JPEG with the detail of a photo."""
    noise = np.random.default_rng(0).integers(0, 256, (PHOTO[1] // 8, PHOTO[0] // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize(PHOTO, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
