"""Speed of a model by engine and batch size, and where the time goes."""

import dataclasses
import io
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitruvian import __version__
from vitruvian.catalog import title_of
from vitruvian.config import GraphConfig, Precision
from vitruvian.data.decode import decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.engines.choose import RunMode, cached_graph, default_mode, measure, open_forward
from vitruvian.engines.export import Forward
from vitruvian.engines.graph import Graph, open_graph
from vitruvian.engines.runtimes import check_engine, installed, versions
from vitruvian.engines.torch_variant import torch_engine
from vitruvian.errors import ConfigError, VitruvianError, argument
from vitruvian.machine import (
    device_name,
    device_of,
    peak_megabytes,
    processor_flags,
    processor_name,
    reset_peak_memory,
    resident_megabytes,
    synchronize,
)
from vitruvian.model.build import Model
from vitruvian.model.encoder import Block
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.settings import BatchSize, Record, Size, validate
from vitruvian.text import table

CPU = torch.device("cpu")
EXTENSIONS = {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "sve"}
"""Instruction sets that decide the speed of matrix products."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """One engine at one batch size."""

    engine: str
    batch_size: int
    images_per_second: float  # from the median time per batch
    p50_ms: float
    p90_ms: float
    p99_ms: float
    memory_mb: float | None  # peak memory added by opening and running it; None if the system does not report it
    difference: float | None  # largest one of an output from torch in float32; None for a graph or on an accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench(Record):
    """Results of `bench`."""

    model: str
    image_size: Size
    speeds: tuple[EngineSpeed, ...]
    shares: dict[str, float]  # milliseconds per image of each part, in torch, or in the first engine of a graph
    threads: int
    device: str = "cpu"

    def __str__(self) -> str:
        rows = [
            (
                speed.engine,
                str(speed.batch_size),
                f"{speed.images_per_second:.1f}",
                *(f"{milliseconds:.1f}" for milliseconds in (speed.p50_ms, speed.p90_ms, speed.p99_ms)),
                "-" if speed.memory_mb is None else f"{speed.memory_mb:.0f}",
                "-" if speed.difference is None else f"{speed.difference:.1g}",
            )
            for speed in self.speeds
        ]
        columns = ("engine", ">batch", ">images/s", ">p50 ms", ">p90", ">p99", ">memory MB", ">difference")
        total = sum(self.shares.values())
        parts = [(name, f"{ms:.2f}", f"{ms / total:.0%}") for name, ms in self.shares.items()]
        where = f"{self.threads} threads" if self.device == "cpu" else device_name(self.device)
        return "\n".join([table(columns, rows), "", table(("time per image", ">ms", ">share"), parts), "", where])

    def rows(self) -> list[dict[str, Any]]:
        """A row for each engine and batch size, with this machine and the versions, for a table of many machines."""
        machine = {
            "processor": processor_name(),
            "extensions": " ".join(sorted(EXTENSIONS & processor_flags())),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "threads": self.threads,
            "device": device_name(self.device),
            "versions": "; ".join([f"vitruvian {__version__}", *versions(installed())]),
            "model": self.model,
            "image_size": "x".join(map(str, self.image_size)),
        }
        return [machine | dataclasses.asdict(speed) for speed in self.speeds]


def bench(
    model: Model | Graph,
    *,
    engines: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 16),
    rounds: int = 20,
    image: str | Path | None = None,
    precision: Precision = "float32",
    compile: bool = False,
) -> Bench:
    """Measure the speed of a model in several engines and batch sizes, in interleaved rounds.

    By default all engines are compared that are installed and can run the model, or a graph's own, and the time to
    decode is that of a generated JPEG. torch with `precision` or `compile` is measured in addition.
    """
    device = device_of(model)
    default = [model.graph.engine] if isinstance(model, Graph) else installed() if device.type == "cpu" else ["torch"]
    names: list[str] = [check_engine(name, str(device)) for name in (engines or default)]
    names += {torch_engine("torch", precision, compile, str(device))} - {"torch", *names}
    if "auto" in names:
        raise ConfigError(f"{argument('engine', 'auto')} cannot be measured", hint="omit it to compare all engines")
    if isinstance(model, Graph) and any(name.startswith("torch") for name in names):
        raise ConfigError("exported graphs run in onnxruntime or openvino, not in torch", where=model.graph.path)
    if model.meta.cascade is not None:
        print_status("note: measuring the full model, without the first pass of its cascade")
    model.eval()
    if image is not None:
        decode(Path(image))  # raises ImageError before anything is measured
    data = synthetic_jpeg() if image is None else Path(image).read_bytes()
    size, speeds = model.meta.preprocess.image_size, []
    for batch_size in batches:
        validate("batch_size", BatchSize, batch_size)
        generator = torch.Generator().manual_seed(0)
        pixels = torch.randn(batch_size, model.config.in_channels, *size, generator=generator)
        forwards, memory = dict[str, Forward](), dict[str, float | None]()
        for name in names:
            try:
                memory[name], forwards[name] = peak_memory(model, default_mode(name, batch_size), pixels)
            except VitruvianError as error:
                if engines:
                    raise
                print_status(f"note: skipping {name}: {error}")
        difference = dict.fromkeys(forwards, None) | output_differences(model, forwards, pixels)
        for name, seconds in measure(forwards, pixels, rounds).items():
            rate = batch_size / statistics.median(seconds)
            p50, p90, p99 = (1000 * float(np.percentile(seconds, p)) for p in (50, 90, 99))
            speeds.append(EngineSpeed(name, batch_size, rate, p50, p90, p99, memory[name], difference[name]))
    shares, threads = time_shares(model, data, rounds), torch.get_num_threads()
    name = model.meta.origin if isinstance(model.config, GraphConfig) else title_of(model.config)
    facts: Any = {"model": name, "image_size": size, "threads": threads, "device": str(device)}
    return Bench(speeds=tuple(speeds), shares=shares, **facts)


def output_differences(model: Model | Graph, forwards: dict[str, Forward], pixels: Tensor) -> dict[str, float]:
    """The largest difference of each forward pass from the model in float32; empty for a graph or on an accelerator."""
    if isinstance(model, Graph) or device_of(model).type != "cpu":
        return {}
    with torch.inference_mode():
        expected = model(pixels)
    return {name: float((forward(pixels) - expected).abs().max()) for name, forward in forwards.items()}


def peak_memory(model: Model | Graph, mode: RunMode, pixels: Tensor) -> tuple[float | None, Forward]:
    """Megabytes that opening and running an engine adds to this process, and its forward pass."""
    size = (pixels.shape[2], pixels.shape[3])
    if not mode.engine.startswith("torch") and not isinstance(model, Graph):
        cached_graph(model, mode.engine, size)  # the export is not counted
    reset_peak_memory()
    before = resident_megabytes()
    if isinstance(model, Graph):
        forward: Forward = open_graph(model.graph.path, engine=mode.engine)
    else:
        forward = open_forward(model, mode, size)
    if device_of(model).type != "cpu":
        return None, lambda pixels: forward(pixels.to(device_of(model))).cpu()  # what a prediction takes
    forward(pixels)
    after = peak_megabytes()
    return None if before is None or after is None else after - before, forward


def timed(function: Callable[[], object], device: torch.device = CPU) -> float:
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synthetic_jpeg() -> bytes:
    """A JPEG of 500x375 pixels with about as much detail as a photo."""
    noise, file = np.random.default_rng(0).integers(0, 256, (46, 62, 3), np.uint8), io.BytesIO()
    Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def time_shares(model: Model | Graph, data: bytes, rounds: int) -> dict[str, float]:
    """Median milliseconds of one image in decoding, resizing, and each part of the model."""
    image, preprocess = decode(data), model.meta.preprocess
    pixels = apply_preprocess(image, preprocess)[None]
    parts = [time_parts(model, pixels) for _ in range(rounds + 1)][1:]  # the first one warms up
    seconds = {
        "decode": statistics.median(timed(lambda: decode(data)) for _ in range(rounds)),
        "resize": statistics.median(timed(lambda: apply_preprocess(image, preprocess)) for _ in range(rounds)),
    }
    seconds |= {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return {name: 1000 * value for name, value in seconds.items()}


def time_parts(model: Model | Graph, pixels: Tensor) -> dict[str, float]:
    """Seconds of one forward pass in the embedding, attention, MLPs and the rest."""
    parts: dict[str, list[nn.Module]] = {}
    device = device_of(model)
    pixels = pixels.to(device)
    rest = "model"
    if isinstance(model, ViT):
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        parts = {"embed": [model.embed], "attention": [b.attn for b in blocks], "MLP": [b.mlp for b in blocks]}
        rest = "norms, sums, head"
        if model.config.merges_tokens:  # calls the steps of attention, not the module, so hooks do not see it
            parts.pop("attention")
            rest = "attention, merging, norms, head"
    seconds, starts = dict.fromkeys(parts, 0.0), dict[nn.Module, float]()

    def begin(module: nn.Module, *_: Any) -> None:
        synchronize(device)
        starts[module] = time.perf_counter()

    def end(part: str, module: nn.Module, *_: Any) -> None:
        synchronize(device)
        seconds[part] += time.perf_counter() - starts[module]

    with ExitStack() as hooks, torch.inference_mode():
        for part, modules in parts.items():
            for module in modules:
                hooks.callback(module.register_forward_pre_hook(begin).remove)
                hooks.callback(module.register_forward_hook(partial(end, part)).remove)
        total = timed(lambda: model(pixels), device)
    return seconds | {rest: max(0.0, total - sum(seconds.values()))}
