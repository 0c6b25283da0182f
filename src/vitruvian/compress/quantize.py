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

from vitruvian.cache import scratch_folder
from vitruvian.compress.int8 import (
    WEIGHT_BITS,
    Int8Layer,
    check_bits,
    has_vnni,
    int8_layers,
    prepared,
    sensitivity,
)
from vitruvian.compress.int8_graph import write_int8
from vitruvian.compress.loss import BATCH_SIZE, Loss, Sample, loss_of, read_sample
from vitruvian.compress.ranges import Int8Input
from vitruvian.compress.smooth import dense_layers
from vitruvian.engines.choose import measure
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.graph import check_runs
from vitruvian.engines.runtimes import FORMATS, check_engine, open_session
from vitruvian.errors import ConversionError, UnknownNameError, argument
from vitruvian.files import atomic_path, check_writable
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status, track
from vitruvian.settings import BatchSize, check_range, validate
from vitruvian.weights.load import without_cascade

CALIBRATION = 64
"""Images that ranges and scales are found on."""
EVALUATION = 1000
"""Images that the loss is measured on, at most."""
LOOKED_AT = 16
"""Images that the layers' sensitivities are measured on."""
STEPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Shares of the layers, the most sensitive, that stay float; often one layer alone loses the most."""
ROUNDS, MOST_SECONDS = 15, 60.0
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
    batch_size: int
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
                f"{self.engine}: {self.speedup:.2f} times the speed of float at batch {self.batch_size}; "
                f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB",
            ]
        )


def median_seconds(forwards: dict[str, Forward], pixels: Tensor) -> dict[str, float]:
    """Of interleaved rounds."""
    return {name: statistics.median(times) for name, times in measure(forwards, pixels, ROUNDS, MOST_SECONDS).items()}


def quantize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    evaluate: object,
    max_loss: float = 0.5,
    engine: str = "onnxruntime",
    batch_size: int = BATCH_SIZE,
    weight_bits: int = WEIGHT_BITS,
    num_heads: int | None = None,
    timer: Timer = median_seconds,
) -> Quantized:
    """Write a model in int8 as ONNX, with at most `max_loss` points of top-1 lost on the images of `evaluate`.

    Ranges are found on images of `calibrate`, which need no labels; those of `evaluate` are used where their classes
    are the model's. Nothing is written if the loss is larger with every layer that helps left float, or if the result
    is not faster than float in the same engine at this batch, which `timer` measures.
    """
    out = check_request(path, max_loss, engine, batch_size, weight_bits)
    classifier = Classifier(model, num_heads=num_heads)
    dense_layers(classifier.model)  # refuses what is no Vision Transformer before images are read
    check_model(classifier.model, "onnx", dynamic_size=False)
    calibration = read_sample(classifier, calibrate, images=CALIBRATION, training=True)
    sample = read_sample(classifier, evaluate, images=EVALUATION, training=False)
    before = sample.logits(Classifier(without_cascade(classifier.model)).logits, "float")
    with workplace() as folder:
        print_status("finding ranges and moving scales into the weights ...")
        ready, inputs = prepared(classifier.model.eval(), calibration.batches(), weight_bits)
        export(ready, folder / "float.onnx")
        plan = plan_of(ready, inputs, calibration, bits=weight_bits)
        float_run = open_session(folder / "float.onnx", engine)
        steps, tried = plan.steps(), dict[int, Loss]()

        def good(place: int) -> bool:
            kept = steps[place]
            new = plan.write(folder / "float.onnx", folder / f"{kept}.onnx", kept)
            if not tried:
                check_runs(new, engine)
            logits = sample.logits(open_session(new, engine), f"int8, {kept} layers float")
            tried[kept] = loss_of(classifier.model, before, logits, sample)
            return tried[kept].points <= max_loss

        fewest = least(len(steps), good)
        if fewest == len(steps):
            raise ConversionError(
                f"not written, {min(each.points for each in tried.values()):.2f} points may be lost where "
                f"{argument('max_loss', max_loss, 'g')} is allowed, even with {steps[-1]} of {len(inputs)} layers left "
                "float",
                where=path,
            )
        kept = steps[fewest]
        new = folder / f"{kept}.onnx"
        run = open_session(new, engine)
        seconds = timer({"float": float_run, "int8": run}, sample.tensor(slice(batch_size)))
        speedup = seconds["float"] / seconds["int8"]
        if speedup <= 1:
            raise ConversionError(
                f"{path}: not written, int8 is not faster here: {speedup:.2f} times the speed of float in {engine} "
                f"at batch {batch_size}"
            )
        with atomic_path(out) as place:
            place.write_bytes(new.read_bytes())
        return Quantized(
            path=str(path),
            engine=engine,
            loss=tried[kept],
            speedup=speedup,
            batch_size=batch_size,
            bytes_before=(folder / "float.onnx").stat().st_size,
            bytes_after=new.stat().st_size,
            weight_bits=weight_bits,
            vnni=has_vnni(),
            sensitivity=plan.sensitivity,
            float_layers=tuple(plan.sensitivity)[:kept],
            tried=tuple((each, tried[each].points) for each in sorted(tried)),
        )


def check_request(path: str | Path, max_loss: float, engine: str, batch_size: int, weight_bits: int) -> Path:
    """Refuse early what cannot be done."""
    out = Path(path).expanduser()
    if out.suffix != ".onnx":
        raise ConversionError(f"{out}: an int8 model is a file that ends in .onnx")
    if out.exists():
        raise ConversionError(f"{out}: exists already; give another name or remove it")
    check_range("max_loss", max_loss, 0, 100)
    validate("batch_size", BatchSize, batch_size)
    check_bits(weight_bits)
    if engine not in FORMATS:
        raise UnknownNameError("engine", engine, FORMATS, see=f"({', '.join(FORMATS)})")
    for name in ("onnxruntime", engine):
        check_engine(name)
    check_writable(out)
    return out


@contextmanager
def workplace() -> Iterator[Path]:
    with TemporaryDirectory(dir=scratch_folder()) as name:
        yield Path(name)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model ready for int8: smoothed, with each layer in int8, and its sensitivity."""

    model: ViT
    layers: Mapping[str, Int8Layer]
    sensitivity: dict[str, float]

    def steps(self) -> list[int]:
        """Numbers of layers that stay float, from none."""
        return sorted({round(share * len(self.layers)) for share in STEPS})

    def write(self, graph: Path, path: Path, kept: int) -> Path:
        """A graph of the model, with merged tokens or not, in int8 but for the `kept` most sensitive layers."""
        write_int8(graph, path, self.model, {name: self.layers[name] for name in list(self.sensitivity)[kept:]})
        return path


def plan_of(ready: ViT, inputs: Mapping[str, Int8Input], calibration: Sample, *, bits: int) -> Plan:
    rounding, looking = (partial(track, label=label) for label in ("blocks rounded", "sensitivity of layers"))
    layers = int8_layers(ready, inputs, calibration.batches(), bits=bits, track=rounding)
    moved = sensitivity(ready, layers, calibration.tensor(slice(LOOKED_AT)), track=looking)
    return Plan(model=ready, layers=layers, sensitivity=moved)


def least(count: int, good: Callable[[int], bool]) -> int:
    """The least number from 0 that is good, where all above it are, too; `count` if none below is. By halving."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low
