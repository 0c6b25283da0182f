"""Search for the fastest version of a model within an accuracy loss, among engines, int8, merged tokens and cascades.

Exporting graphs and running images take the time, so few candidates are tried: the numbers of float layers in int8 and
of merged tokens are found by bisection, and nothing new is started after the time limit. Speed is measured at the end,
of all candidates in interleaved rounds. `quantize` is the part of the search that finds one graph in int8.
"""

import dataclasses
import math
import shutil
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.compress import fewer_tokens, int8
from vitruvian.compress.fewer_tokens import Counts
from vitruvian.compress.int8 import Int8Input, Int8Layer, dense_layers, write_int8
from vitruvian.compress.loss import BATCH_SIZE, MIN_IMAGES, AccuracyLoss, PixelSample, accuracy_loss, read_sample
from vitruvian.config import CascadeConfig
from vitruvian.engines.choose import RunMode, measure, open_forward
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.graph import CASCADE_FILE, check_runs
from vitruvian.engines.runtimes import FORMATS, OpenGraph, check_engine, installed, openvino_core
from vitruvian.errors import ConfigError, ConversionError, UnknownNameError, VitruvianError, argument, require
from vitruvian.files import atomic_path, check_writable, json_bytes
from vitruvian.inference import Classifier, probabilities_of
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status, track
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, render
from vitruvian.settings import BatchSize, check_range, validate
from vitruvian.text import format_duration, table
from vitruvian.weights.load import without_cascade
from vitruvian.weights.save import save

# n images, K outputs

MINUTES = 7.0  # default time limit of the search; measuring the candidates takes about a minute more
OPENVINO_INT8 = 2  # maximum number of int8 graphs to try in OpenVINO
INT8_SHARE = 0.5  # fraction of the allowed loss that int8 may use if tokens can be merged, too
CALIBRATION_IMAGES = 64  # number of images to fit ranges and scales on
EVALUATION_IMAGES = 1000  # maximum number of images to measure the loss on
SENSITIVITY_IMAGES = 16  # number of images to measure the sensitivity of each layer on
FLOAT_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Fractions of the layers, the most sensitive, that may stay float; often a single layer loses the most."""
ROUNDS, MAX_SECONDS = 15, 60.0  # of a measurement, which has at least three rounds

Timer = Callable[[dict[str, Forward], Tensor], dict[str, float]]  # seconds of each forward pass on the same pixels


def median_seconds(forwards: dict[str, Forward], pixels: Tensor) -> dict[str, float]:
    """Median seconds of each forward pass, in interleaved rounds."""
    return {name: statistics.median(times) for name, times in measure(forwards, pixels, ROUNDS, MAX_SECONDS).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the model."""

    engine: str
    counts: Counts = ()  # tokens merged in each block; by the first pass in a cascade
    int8_layers: int
    loss: AccuracyLoss
    cascade: CascadeConfig | None = None
    again: float = 0.0  # fraction of the images that the full model of a cascade computes
    path: str = ""  # the graph during the search; empty for torch
    seconds: float = 0.0  # per batch
    single_seconds: float = 0.0  # per single image

    @property
    def name(self) -> str:
        parts = [self.engine, f"int8 in {self.int8_layers} layers" if self.int8_layers else "float32"]
        merged = fewer_tokens.describe_counts(self.counts) if self.counts else ""
        if self.cascade is not None:
            parts.append(f"cascade ({merged}; {100 * self.again:.0f}% computed again)")
        elif merged:
            parts.append(merged)
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        content = dataclasses.asdict(self) | {"name": self.name, "loss": self.loss.to_json()}
        del content["path"]
        return content


def describe_speedup(speedup: float, otherwise: str) -> str:
    return f"{speedup:.2f} times as fast" if round(speedup, 2) >= 1.01 else otherwise


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """All candidates, fastest first, and the one that was written."""

    path: str
    max_loss: float
    batch_size: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate  # the fastest for batches
    single: Candidate  # the fastest for single images, in a file of its own if it is another one
    baseline: Candidate  # the original model in torch
    sample: str
    timed_out: bool = False  # whether the time limit ended the search

    @property
    def headline(self) -> str:
        """The speedup as a phrase, with a note if the time limit stopped the search."""
        text = describe_speedup(self.speedup(self.chosen), "nothing faster found")
        return text + (", search stopped by the time limit" if self.timed_out else "")

    def speedup(self, candidate: Candidate) -> float:
        return self.baseline.seconds / candidate.seconds

    @property
    def single_speedup(self) -> float:
        return self.baseline.single_seconds / self.single.single_seconds

    def to_json(self) -> dict[str, Any]:
        request = {"path": self.path, "max_loss": self.max_loss, "batch_size": self.batch_size, "images": self.sample}
        candidates = [candidate.to_json() | {"speedup": self.speedup(candidate)} for candidate in self.candidates]
        chosen = {"chosen": self.chosen.name, "speedup": self.speedup(self.chosen), "timed_out": self.timed_out}
        single = {"single": self.single.name, "single_speedup": self.single_speedup}
        return request | chosen | single | {"candidates": candidates}

    def rows(self) -> list[tuple[str, ...]]:
        """The candidates as rows of a table."""
        rows: list[tuple[str, ...]] = []
        for candidate in self.candidates:
            loss = candidate.loss
            written = {"written": self.chosen, "written for single images": self.single}
            remark = ", ".join(text for text, item in written.items() if candidate is item)
            remark = remark or ("" if loss.points <= self.max_loss else "loses too much")
            single = f"{1 / candidate.single_seconds:.1f}"
            speeds = f"{self.batch_size / candidate.seconds:.1f}", f"{self.speedup(candidate):.2f}", single
            top1 = "-" if loss.after is None else f"{loss.after:.2f}"
            rows.append((candidate.name, *speeds, f"{loss.points:.2f}", f"{loss.agreement:.1f}", top1, remark))
        return rows

    def columns(self) -> tuple[str, ...]:
        metric = f">{self.chosen.loss.metric}"
        return "", ">images/s", ">speedup", ">one by one", ">max. points lost", ">same predictions %", metric, ""

    def page(self, name: str) -> str:
        """Speed against loss of all candidates of the model `name`."""
        points: dict[str, list[tuple[float, float]]] = {}
        for candidate in self.candidates:
            points.setdefault(candidate.engine, []).append((candidate.loss.points, self.speedup(candidate)))
        lines = [Line(engine, values, scatter=True) for engine, values in sorted(points.items())]
        lines.append(Line("frontier", frontier([point for values in points.values() for point in values])))
        tiles = {
            "speedup over torch": f"{self.speedup(self.chosen):.2f}",
            "max. points lost": f"{self.chosen.loss.points:.2f}",
        }
        return render(
            "optimize.html",
            title=f"{name}: {self.headline}",
            subtitle=f"{self.sample}; batch size {self.batch_size}, at most {self.max_loss:g} points may be lost",
            chosen=self.chosen.name,
            tile_values=tiles,
            chart=Chart(title="speedup over torch", lines=lines, x_label="points lost"),
            columns=self.columns(),
            candidates=self.rows(),
            note=str(self.chosen.loss),
        )

    def __str__(self) -> str:
        speedup = describe_speedup(self.single_speedup, "not faster")
        single = f"single images, {self.single.name}: {speedup}; {self.single.loss}"
        chosen = f"{self.chosen.name}: {self.headline}; {self.chosen.loss}"
        return f"{table(self.columns(), self.rows())}\n\n{chosen}\n{single}"


def optimize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    max_loss: float = 0.5,
    batch_size: int = BATCH_SIZE,
    images: int = EVALUATION_IMAGES,
    minutes: float = MINUTES,
    num_heads: int | None = None,
    timer: Timer = median_seconds,
) -> Optimized:
    """Write the fastest version of a model that loses at most `max_loss` points of top-1.

    The folder works with `vt.Classifier(path)` and `vit predict --model`, and contains report.html with all candidates.

    Args:
        model: A model, or a file, directory or published name to load.
        path: The folder to write; it must not exist.
        calibrate: Images, split into some to calibrate on and others to measure the loss on. The loss is estimated from
            the probabilities of changed predictions, and measured on labels too if their classes are the model's.
        max_loss: Largest loss of top-1 in percentage points.
        batch_size: Batch size at which the speed is measured.
        images: Maximum number of images to measure the loss on.
        minutes: Time limit of the search; no new candidate is tried after it.
        num_heads: Number of attention heads, if the weight file does not store it.
        timer: Measures the speed.
    """
    out = Path(path).expanduser()
    check_range("images", images, MIN_IMAGES)
    check_range("minutes", minutes, 0)
    check_request(out, max_loss, batch_size)
    classifier = Classifier(model, num_heads=num_heads, device="cpu")
    check_model(classifier.torch_model, "onnx", dynamic_size=False)
    everything = read_sample(classifier, calibrate, images=CALIBRATION_IMAGES + images, training=True)
    count = min(CALIBRATION_IMAGES, len(everything.pixels) // 2)  # to fit on; the others measure the loss
    if len(everything.pixels) - count < MIN_IMAGES:
        reason = f"{len(everything.pixels)} images, but half of them measure the loss"
        raise ConversionError(reason, where=everything.name, hint=f"give at least {2 * MIN_IMAGES}")
    calibration, sample = everything.part(slice(count)), everything.part(slice(count, None))
    with TemporaryDirectory(dir=scratch_folder()) as name:
        model, seconds = classifier.torch_model, 60 * minutes
        search = CompressionSearch(model, calibration, sample, Path(name), max_loss, seconds, timer, batch_size)
        candidates = search.run()
        by_speed = sorted(candidates, key=lambda candidate: candidate.seconds)
        chosen = next(candidate for candidate in by_speed if candidate.loss.points <= max_loss)
        single = fastest_single(candidates, chosen, max_loss)
        result = Optimized(
            path=str(path),
            max_loss=max_loss,
            batch_size=batch_size,
            sample=f"{len(sample.pixels):,} images of {sample.name} that were not used for fitting",
            chosen=chosen,
            single=single,
            baseline=candidates[0],
            candidates=tuple(by_speed),
            timed_out=search.timed_out,
        )
        with atomic_path(out) as folder:
            search.write(chosen, folder)
            if single is not chosen:
                write_graph(Path(single.path), folder, "single", single.engine)
            (folder / "optimize.json").write_bytes(json_bytes(result.to_json()))
            (folder / PAGE).write_text(result.page(classifier.name), encoding="utf-8")
    return result


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of (loss, speed), from the smallest loss."""
    best: list[tuple[float, float]] = []
    for loss, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((loss, speed))
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """A model in int8: its loss, speed and size."""

    path: str
    engine: str
    loss: AccuracyLoss
    speedup: float  # speed relative to the float graph in the same engine
    batch_size: int
    sensitivity: dict[str, float]  # divergence of the outputs with one layer in int8, in nats; largest first
    bytes_before: int
    bytes_after: int
    weight_bits: int
    vnni: bool
    float_layers: tuple[str, ...]
    tried: tuple[tuple[int, float], ...]  # number of float layers and loss in points of each step

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"loss": self.loss.to_json()}

    def __str__(self) -> str:
        count = len(self.sensitivity)
        vnni = "has" if self.vnni else "does not have"
        return (
            f"int8 in {count - len(self.float_layers)} of {count} layers, {self.weight_bits}-bit weights "
            f"(this processor {vnni} VNNI)\n{self.loss}\n"
            f"{self.engine}: {self.speedup:.2f} times the speed of float at batch size {self.batch_size}; "
            f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        )


def quantize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    evaluate: object,
    max_loss: float = 0.5,
    engine: str = "onnxruntime",
    batch_size: int = BATCH_SIZE,
    weight_bits: int | None = None,
    num_heads: int | None = None,
    timer: Timer = median_seconds,
) -> Quantized:
    """Write a model in int8 as ONNX, losing at most `max_loss` points of top-1.

    As few layers as the limit allows stay float: the most sensitive ones.

    Args:
        model: A model, or a file, directory or published name to load.
        path: The `.onnx` file to write; it must not exist.
        calibrate: Images to fit ranges and scales on; labels are not used.
        evaluate: Other images to measure the loss on. Labels are used if their classes are the model's.
        max_loss: Largest loss of top-1 in percentage points.
        engine: Runtime in which loss and speed are measured: `onnxruntime` or `openvino`.
        batch_size: Batch size at which the speed is measured.
        weight_bits: 7 is correct on all processors, 8 needs VNNI; by default 8 if this processor has VNNI, else 7.
        num_heads: Number of attention heads, if the weight file does not store it.
        timer: Measures the speed.

    Raises:
        ConversionError: More than `max_loss` is lost, or int8 is not faster than float; nothing is written.
    """
    out = Path(path).expanduser()
    if out.suffix != ".onnx":
        raise ConversionError("the file name of an int8 model must end in .onnx", where=out)
    weight_bits = int8.default_bits() if weight_bits is None else weight_bits
    if weight_bits not in (7, 8):
        raise ConfigError(f"{argument('weight_bits', weight_bits)} is not 7 or 8")
    if weight_bits > int8.default_bits():
        raise ConfigError(f"{argument('weight_bits', 8)} saturates on this processor, which has no VNNI", hint="use 7")
    if engine not in FORMATS:
        raise UnknownNameError("engine", engine, FORMATS, see=f"({', '.join(FORMATS)})")
    check_engine(engine)
    check_request(out, max_loss, batch_size)
    classifier = Classifier(model, num_heads=num_heads, device="cpu")
    original = classifier.torch_model
    dense_layers(original)  # raises if it is not a ViT, before images are read
    check_model(original, "onnx", dynamic_size=False)
    calibration = read_sample(classifier, calibrate, images=CALIBRATION_IMAGES, training=True)
    sample = read_sample(classifier, evaluate, images=EVALUATION_IMAGES, training=False)
    with TemporaryDirectory(dir=scratch_folder()) as name:
        search = CompressionSearch(
            original, calibration, sample, Path(name), max_loss, math.inf, timer, batch_size, weight_bits
        )
        search.logits[()] = sample.logits(Classifier(without_cascade(original)).logits, "float")
        search.prepare()
        chosen = search.find_int8(max_loss, engine)
        assert chosen is not None  # there is no time limit
        losses = {len(search.layers) - item.int8_layers: item.loss.points for item in search.candidates}
        if chosen.loss.points > max_loss:
            limit, count = argument("max_loss", max_loss, "g"), f"{max(losses)} of {len(search.layers)} layers"
            what = f"{chosen.loss.points:.2f} points may be lost, more than {limit}, even with {count} in float"
            raise ConversionError(f"not written, {what}", where=path)
        graphs = {"float": search.export(()), "int8": Path(chosen.path)}
        speedup = search.speedup(graphs, engine)
        if speedup <= 1:
            raise ConversionError(
                f"not written, int8 is not faster on this machine: {speedup:.2f} times the speed of float in {engine} "
                f"at batch size {batch_size}",
                where=path,
            )
        with atomic_path(out) as new:
            shutil.copyfile(graphs["int8"], new)
        return Quantized(
            path=str(path),
            engine=engine,
            loss=chosen.loss,
            speedup=speedup,
            batch_size=batch_size,
            bytes_before=graphs["float"].stat().st_size,
            bytes_after=graphs["int8"].stat().st_size,
            weight_bits=weight_bits,
            vnni=int8.default_bits() == 8,
            sensitivity=search.sensitivity,
            float_layers=tuple(search.sensitivity)[: len(search.layers) - chosen.int8_layers],
            tried=tuple(sorted(losses.items())),
        )


def check_request(path: Path, max_loss: float, batch_size: int) -> None:
    """Raise if the request is invalid, before anything is read."""
    if path.exists():
        raise ConversionError("already exists", where=path, hint="choose another name or remove it")
    check_range("max_loss", max_loss, 0, 100)
    validate("batch_size", BatchSize, batch_size)
    check_engine("onnxruntime")  # writes int8
    check_writable(path)


@dataclass
class CompressionSearch:
    """Tries ways to run one model faster and measures the loss of each."""

    model: Model
    calibration: PixelSample
    sample: PixelSample
    folder: Path
    max_loss: float
    seconds: float
    timer: Timer
    batch_size: int = BATCH_SIZE  # at which the speed is measured
    bits: int = dataclasses.field(default_factory=int8.default_bits)

    def __post_init__(self) -> None:
        self.model.eval()
        self.start = time.monotonic()
        self.logits: dict[Counts, Tensor] = {}  # float logits (n, K) by the merged tokens
        self.smoothed, self.inputs = self.model, dict[str, Int8Input]()
        """The model with scales moved for int8, which changes no output, so one graph serves both."""
        self.layers: dict[str, Int8Layer] = {}  # in int8, by GPTQ
        self.sensitivity: dict[str, float] = {}  # of each layer, the largest first
        self.candidates: list[Candidate] = []
        self.timed_out = False

    def run(self) -> list[Candidate]:
        """All candidates, the original model first, with their seconds per batch and per single image."""
        if isinstance(self.model, ViT):
            self.prepare()
        self.try_float(())
        steps = fewer_tokens.merging_steps(self.model, self.calibration.tensor(slice(None))) if self.has_time() else []
        float_layers = self.try_int8(within=self.max_loss * (INT8_SHARE if steps else 1))
        self.try_merging(steps, float_layers)
        if steps and steps[-1] not in self.logits and self.has_time():
            self.try_float(steps[-1])  # the first pass of a cascade may lose more
        self.try_openvino_int8()
        if self.timed_out:
            print_status("note: the time limit was reached before everything was tried; --minutes N (minutes=) sets it")
        forwards = {candidate.name: self.open(candidate) for candidate in self.candidates}
        print_status(f"measuring the speed of {len(forwards)} candidates, in turn ...")
        seconds, single = (self.timer(forwards, self.sample.tensor(slice(size))) for size in (self.batch_size, 1))
        timed = [
            dataclasses.replace(item, seconds=seconds[item.name], single_seconds=single[item.name])
            for item in self.candidates
        ]
        if self.model.meta.target.kind != "single":  # a cascade compares the probability of the best class
            return timed
        return timed + self.cascades(timed)

    def has_time(self) -> bool:
        """Whether to continue; otherwise the search has timed out."""
        self.timed_out = self.timed_out or time.monotonic() - self.start >= self.seconds
        return not self.timed_out

    def try_float(self, counts: Counts) -> bool:
        """Add float candidates of all engines; returns whether their loss is within the limit."""
        forward = self.torch_forward(counts)
        for engine in reversed(installed()[1:]):  # faster: running images takes most of the search's time
            with suppress(VitruvianError):
                forward = OpenGraph(self.export(counts), engine)
                break
        label = fewer_tokens.describe_counts(counts) if counts else "float32"
        self.logits[counts] = self.sample.logits(forward, label)
        loss = self.loss(self.logits[counts])
        self.add(Candidate(engine="torch", counts=counts, int8_layers=0, loss=loss))
        for engine in installed()[1:]:
            try:
                path = str(self.export(counts))
                self.candidates.append(Candidate(engine=engine, counts=counts, int8_layers=0, loss=loss, path=path))
            except VitruvianError as error:
                print_status(f"note: skipping {engine}: {error}")
        return loss.points <= self.max_loss

    def prepare(self) -> None:
        """Fit the ranges of int8 and move scales into the weights."""
        print_status("finding ranges and moving scales into the weights ...")
        self.smoothed, self.inputs = int8.prepare(self.model, self.calibration.batches(), self.bits)

    def try_int8(self, within: float) -> int | None:
        """Find the fewest float layers with a loss of at most `within`; their number, or None if int8 does not help."""
        if not self.inputs or not self.has_time() or not self.is_faster():
            return None
        best = self.find_int8(within, "onnxruntime")
        return None if best is None or best.loss.points > self.max_loss else len(self.layers) - best.int8_layers

    def find_int8(self, within: float, engine: str) -> Candidate | None:
        """The int8 graph with the fewest float layers and a loss of at most `within`, else the one that loses least.

        Numbers of float layers are tried by bisection, as the loss falls with them. None if there is no time for any.
        """
        assert isinstance(self.smoothed, ViT)
        rounding, measuring = (partial(track, label=label) for label in ("blocks quantized", "sensitivity of layers"))
        batches, pixels = self.calibration.batches(), self.calibration.tensor(slice(SENSITIVITY_IMAGES))
        self.layers = int8.gptq_layers(self.smoothed, self.inputs, batches, bits=self.bits, track=rounding)
        self.sensitivity = int8.sensitivity(self.smoothed, self.layers, pixels, track=measuring)
        tried: list[Candidate] = []

        def is_within(count: int) -> bool:
            if not self.has_time():
                return False
            tried.append(self.add_int8((), count, engine))
            return tried[-1].loss.points <= within

        bisect_left(sorted({round(share * len(self.layers)) for share in FLOAT_SHARES}), True, key=is_within)
        return max(tried, key=lambda item: (min(-item.loss.points, -within), item.int8_layers), default=None)

    def try_merging(self, steps: Sequence[Counts], float_layers: int | None) -> None:
        """Find the most merged tokens within the limit, in int8 if that helps; then try the same counts in float."""
        tried: list[Counts] = []

        def is_too_much(counts: Counts) -> bool:
            if not self.has_time():
                return False
            tried.append(counts)
            if float_layers is None:
                return not self.try_float(counts)
            return self.add_int8(counts, float_layers).loss.points > self.max_loss

        bisect_left(steps, True, key=is_too_much)
        for counts in tried:
            if counts not in self.logits and self.has_time():
                self.try_float(counts)

    def add_int8(self, counts: Counts, float_layers: int, engine: str = "onnxruntime") -> Candidate:
        """Add a graph in int8, except for its most sensitive layers."""
        assert isinstance(self.smoothed, ViT)
        path, names = self.folder / f"int8_{len(self.candidates)}.onnx", list(self.sensitivity)[float_layers:]
        write_int8(self.export(counts), path, self.smoothed, {name: self.layers[name] for name in names})
        if not self.candidates:
            check_runs(path, engine)
        logits = self.sample.logits(OpenGraph(path, engine), f"int8 in {len(names)} layers")
        loss = self.loss(logits)
        self.add(Candidate(engine=engine, counts=counts, int8_layers=len(names), loss=loss, path=str(path)))
        return self.candidates[-1]

    def try_openvino_int8(self) -> None:
        """Add the last int8 graphs within the limit in OpenVINO, with the loss that they have there."""
        within = [item for item in self.candidates if item.int8_layers and item.loss.points <= self.max_loss]
        for index, item in enumerate(within[: -OPENVINO_INT8 - 1 : -1] if "openvino" in installed() else []):
            if not self.has_time():
                return
            try:
                if index == 0:
                    check_runs(Path(item.path), "openvino")
            except ConversionError as error:
                print_status(f"note: skipping int8 in openvino: {error}")
                return
            logits = self.sample.logits(OpenGraph(Path(item.path), "openvino"), "int8 in openvino")
            self.add(dataclasses.replace(item, engine="openvino", loss=self.loss(logits)))

    def add(self, candidate: Candidate) -> None:
        self.candidates.append(candidate)
        spent = format_duration(time.monotonic() - self.start)
        spent += f" of {format_duration(self.seconds)}" if math.isfinite(self.seconds) else ""
        print_status(f"{candidate.name}: at most {candidate.loss.points:.2f} points lost ({spent})")

    def cascades(self, timed: list[Candidate]) -> list[Candidate]:
        """Cascades of the float candidates that lose too much by themselves, with the full model in the same engine.

        Thresholds are fitted on one half of the sample, and the loss is measured on the other. An image takes the time
        of the first pass; the fraction that is computed again also takes that of the full model.
        """
        half = len(self.sample.pixels) // 2
        if half < MIN_IMAGES:
            return []
        test_half, cascades = self.sample.part(slice(half, None)), []
        full_models = {item.engine: item for item in timed if not item.int8_layers and not item.counts}
        for first in timed:
            if first.int8_layers or not first.counts or first.loss.points <= self.max_loss:
                continue
            before, after = self.logits[()], self.logits[first.counts]
            certainty, losses = fewer_tokens.certainty_and_losses(self.model, before[:half], after[:half])
            # half of the limit, since the loss on other images is larger
            threshold = fewer_tokens.fit_threshold(certainty, losses, self.max_loss / 2)
            uncertain = probabilities_of(self.model, after[half:]).amax(dim=1) <= threshold
            combined = torch.where(uncertain[:, None], before[half:], after[half:])
            again = float(uncertain.double().mean())
            loss = accuracy_loss(self.model, before[half:], combined, test_half)
            cascade = CascadeConfig(tome_r=first.counts, threshold=threshold)
            full = full_models[first.engine]
            seconds, single = first.seconds + again * full.seconds, first.single_seconds + again * full.single_seconds
            changed = dataclasses.replace(first, seconds=seconds, single_seconds=single, again=again)
            cascades.append(dataclasses.replace(changed, loss=loss, cascade=cascade))
        return cascades

    def is_faster(self) -> bool:
        """Whether int8 in all layers is faster than float, measured before time is spent on its loss."""
        assert isinstance(self.smoothed, ViT)
        paths = {"float": self.export(()), "int8": self.folder / "all_int8.onnx"}
        try:
            layers = int8.rounded_layers(self.smoothed, self.inputs, self.bits)
            write_int8(paths["float"], paths["int8"], self.smoothed, layers)
        except ConversionError as error:
            print_status(f"note: skipping int8: {error}")
            return False
        speedup = self.speedup(paths, "onnxruntime")
        skipped = "" if speedup > 1 else "; skipping int8"
        print_status(f"int8 in all layers: {speedup:.2f} times the speed of float{skipped}")
        return speedup > 1

    def speedup(self, graphs: dict[str, Path], engine: str) -> float:
        """Speed of the graph `int8` relative to `float`."""
        forwards: dict[str, Forward] = {name: OpenGraph(path, engine) for name, path in graphs.items()}
        seconds = self.timer(forwards, self.sample.tensor(slice(self.batch_size)))
        return seconds["float"] / seconds["int8"]

    def loss(self, logits: Tensor) -> AccuracyLoss:
        return accuracy_loss(self.model, self.logits[()], logits, self.sample)

    def export(self, counts: Counts) -> Path:
        """Path of the ONNX graph with these merged tokens, which all runtimes read; exported once."""
        path = self.folder / f"float{'_'.join(map(str, counts))}.onnx"
        if not path.is_file():
            print_status(f"exporting the graph{f' with {fewer_tokens.describe_counts(counts)}' if counts else ''} ...")
            export(fewer_tokens.merge_tokens(self.smoothed, counts), path)
        return path

    def torch_forward(self, counts: Counts) -> Forward:
        size = self.model.meta.preprocess.image_size
        return open_forward(fewer_tokens.merge_tokens(self.model, counts), RunMode("torch", split=True), size)

    def open(self, candidate: Candidate) -> Forward:
        """The forward pass as `vit predict` will run it."""
        if not candidate.path:
            return self.torch_forward(candidate.counts)
        return OpenGraph(Path(candidate.path), candidate.engine)

    def write(self, candidate: Candidate, folder: Path) -> None:
        """Write a candidate as a folder of weights, ONNX or OpenVINO; both passes of a cascade."""
        cascade = candidate.cascade
        if not candidate.path:
            model = fewer_tokens.merge_tokens(self.model, () if cascade else candidate.counts)
            meta = model.meta
            model.meta = meta.replace(cascade=cascade)
            save(model, folder)
            model.meta = meta
            return
        folder.mkdir()
        write_graph(self.export(()) if cascade else Path(candidate.path), folder, "model", candidate.engine)
        if cascade is not None:
            write_graph(Path(candidate.path), folder, "first", candidate.engine)
            (folder / CASCADE_FILE).write_bytes(json_bytes(cascade.to_json()))


def fastest_single(candidates: Sequence[Candidate], chosen: Candidate, max_loss: float) -> Candidate:
    """The fastest candidate for single images that can be written beside `chosen`, or `chosen` itself.

    Those are graphs without a cascade; beside the weights of a cascade there is none.
    """
    possible = [item for item in candidates if item.loss.points <= max_loss and item.path and item.cascade is None]
    has_none = not chosen.path and chosen.cascade is not None
    return min([chosen, *([] if has_none else possible)], key=lambda item: item.single_seconds)


def write_graph(graph: Path, folder: Path, name: str, engine: str) -> None:
    """Write an ONNX graph in the format that `vit predict` runs with this engine."""
    if engine == "onnxruntime":
        shutil.copy(graph, folder / f"{name}.onnx")
    else:
        openvino = require("openvino", "openvino")
        openvino.save_model(openvino_core().read_model(graph), folder / f"{name}.xml", compress_to_fp16=False)
