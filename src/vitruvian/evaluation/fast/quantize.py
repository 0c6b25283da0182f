"""A model in int8: as many layers as the loss allows, written only where it keeps the answers and is faster."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from vitruvian.engines.choose import Way, measure
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.int8 import (
    WEIGHT_BITS,
    Range,
    check_bits,
    check_runs,
    has_vnni,
    prepared,
    sensitivity,
    write_int8,
)
from vitruvian.engines.sessions import FORMATS, check_engine, open_session
from vitruvian.errors import ConfigError, ConversionError, UnknownNameError
from vitruvian.evaluation.fast.loss import BATCH, Loss, Sample, loss_of, read_sample
from vitruvian.files import scratch_folder, staged
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.predict import Classifier
from vitruvian.progress import tell, track
from vitruvian.settings import BatchSize, check_range, typed

CALIBRATION = 64
"""Images that ranges and scales are found on."""
EVALUATION = 1000
"""Images that the loss is measured on, at most."""
LOOKED_AT = 16
"""Images that the layers' sensitivities are measured on."""
STEPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Shares of the layers, the most sensitive, that stay float, tried in turn; often one layer alone loses the most."""
ROUNDS, MOST_SECONDS = 15, 90.0
"""Of a measurement, which ends after three rounds at the earliest."""

Timer = Callable[[dict[str, Forward], Tensor], dict[str, float]]
"""Seconds of each for these pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """What was measured, whether or not it was written."""

    path: str
    engine: str
    loss: Loss
    speedup: float
    """Of the float graph in the same engine."""
    batch: int
    bytes_before: int
    bytes_after: int
    weight_bits: int
    vnni: bool
    sensitivity: dict[str, float]
    """Mean divergence of the answers, in nats, with one layer in int8; most sensitive first."""
    float_layers: tuple[str, ...]
    """Left as they are."""
    tried: tuple[tuple[int, float], ...]
    """Layers left float, and the loss in points, of each step."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"loss": self.loss.to_json()}

    def __str__(self) -> str:
        count = len(self.sensitivity)
        kind = "has" if self.vnni else "does not have"
        return "\n".join(
            [
                f"int8 in {count - len(self.float_layers)} of {count} layers, weights of {self.weight_bits} bits "
                f"(this processor {kind} VNNI)",
                str(self.loss),
                f"{self.engine}: {self.speedup:.2f} times the speed of float at batch {self.batch}; "
                f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB",
            ]
        )


def median_seconds(forwards: dict[str, Forward], pixels: Tensor) -> dict[str, float]:
    """Of interleaved rounds."""
    ways = {Way(name): forward for name, forward in forwards.items()}
    measured = measure(ways, pixels, ROUNDS, MOST_SECONDS)
    return {way.engine: statistics.median(times) for way, times in measured.items()}


def quantize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    evaluate: object,
    max_loss: float = 0.5,
    engine: str = "onnxruntime",
    batch: int = BATCH,
    weight_bits: int = WEIGHT_BITS,
    heads: int | None = None,
    timer: Timer = median_seconds,
) -> Quantized:
    """Write a model in int8 as ONNX, with at most `max_loss` points of top-1 lost on the images of `evaluate`.

    Ranges are found on images of `calibrate`, which need no labels; those of `evaluate` are used where their classes
    are the model's. Nothing is written if the loss is larger with every layer that helps left float, or if the result
    is not faster than float in the same engine at this batch, which `timer` measures.
    """
    out = check_request(path, max_loss, engine, batch, weight_bits)
    classifier = Classifier(model, heads=heads)
    check_model(classifier.model, "onnx", dynamic_size=False)
    calibration = read_sample(classifier, calibrate, images=CALIBRATION, training=True)
    sample = read_sample(classifier, evaluate, images=EVALUATION, training=False)
    before = sample.logits(classifier.logits, "float")
    with workplace() as folder:
        plan = plan_of(classifier.model, calibration, folder, bits=weight_bits)
        float_run = open_session(plan.graph, engine)
        tried: list[tuple[int, float]] = []
        for kept in plan.steps():
            new = plan.write(folder / f"{kept}.onnx", kept)
            if not tried:
                check_runs(new, engine, sample.pixels.shape[1:])
            run = open_session(new, engine)
            loss = loss_of(classifier.model, before, sample.logits(run, f"int8, {kept} layers float"), sample)
            tried.append((kept, loss.points))
            if loss.points <= max_loss:
                break
        else:
            raise ConversionError(
                f"{path}: not written, {min(points for _, points in tried):.2f} points may be lost where "
                f"max_loss={max_loss:g} is allowed, even with {tried[-1][0]} of {len(plan.ranges)} layers left float"
            )
        seconds = timer({"float": float_run, "int8": run}, sample.tensor(slice(batch)))
        speedup = seconds["float"] / seconds["int8"]
        if speedup <= 1:
            raise ConversionError(
                f"{path}: not written, int8 is not faster here: {speedup:.2f} times the speed of float in {engine} "
                f"at batch {batch}"
            )
        with staged(out) as place:
            place.write_bytes(new.read_bytes())
        return Quantized(
            path=str(path),
            engine=engine,
            loss=loss,
            speedup=speedup,
            batch=batch,
            bytes_before=plan.graph.stat().st_size,
            bytes_after=new.stat().st_size,
            weight_bits=weight_bits,
            vnni=has_vnni(),
            sensitivity=plan.sensitivity,
            float_layers=tuple(plan.sensitivity)[:kept],
            tried=tuple(tried),
        )


def check_request(path: str | Path, max_loss: float, engine: str, batch: int, weight_bits: int) -> Path:
    """Refuse early what cannot be done."""
    out = Path(path).expanduser()
    if out.suffix != ".onnx":
        raise ConversionError(f"{out}: an int8 model is a file that ends in .onnx")
    if out.exists():
        raise ConversionError(f"{out}: exists already; give another name or remove it")
    check_range("max_loss", max_loss, 0, 100)
    typed("batch", BatchSize, batch)
    check_bits(weight_bits)
    if engine not in FORMATS:
        raise UnknownNameError("engine", engine, FORMATS, see=f"({', '.join(FORMATS)})")
    for name in ("onnxruntime", engine):
        check_engine(name)
    return out


@contextmanager
def workplace() -> Iterator[Path]:
    with TemporaryDirectory(dir=scratch_folder()) as name:
        yield Path(name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model ready for int8: smoothed, exported, with the range and the sensitivity of each layer."""

    model: ViT
    graph: Path
    ranges: Mapping[str, Range]
    sensitivity: dict[str, float]
    bits: int

    def steps(self) -> list[int]:
        """Numbers of layers that stay float, from none."""
        return sorted({round(share * len(self.ranges)) for share in STEPS})

    def write(self, path: Path, kept: int) -> Path:
        """The graph with all layers in int8 but the `kept` most sensitive ones."""
        chosen = {name: self.ranges[name] for name in list(self.sensitivity)[kept:]}
        write_int8(self.graph, path, self.model, chosen, bits=self.bits)
        return path


def plan_of(model: Model, calibration: Sample, folder: Path, *, bits: int) -> Plan:
    if not isinstance(model, ViT):
        raise ConfigError("int8 is for Vision Transformers, and this model is none")
    tell("finding ranges and moving scales into the weights ...")
    ready, found = prepared(model.eval(), calibration.batches())
    pixels = calibration.tensor(slice(LOOKED_AT))
    moved = sensitivity(ready, found, pixels, bits=bits, track=partial(track, label="sensitivity of layers"))
    graph = folder / "float.onnx"
    export(ready, graph)
    return Plan(model=ready, graph=graph, ranges=found, sensitivity=moved, bits=bits)
