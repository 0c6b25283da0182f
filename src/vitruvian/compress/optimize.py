"""Search for the fastest form of a model within an accuracy loss, among engines, int8, merged tokens and cascades.

Exporting graphs and running images take the time, so few candidates are tried: the numbers of float layers in int8 and
of merged tokens are found by bisection, and nothing new is started after the time limit. Speed is measured at the end,
of all candidates in interleaved rounds.
"""

import dataclasses
import shutil
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.compress import fewer_tokens, quantize
from vitruvian.compress.fewer_tokens import Counts
from vitruvian.compress.int8 import Int8Input, default_bits, prepare, rounded_layers
from vitruvian.compress.int8_graph import write_int8
from vitruvian.compress.loss import (
    BATCH_SIZE,
    LOSS_NOTE,
    MIN_IMAGES,
    AccuracyLoss,
    PixelSample,
    accuracy_loss,
    read_sample,
)
from vitruvian.compress.quantize import Int8Plan, Timer
from vitruvian.config import CascadeConfig
from vitruvian.engines.choose import RunMode, open_forward
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.graph import CASCADE_FILE, check_runs
from vitruvian.engines.runtimes import OpenGraph, check_engine, installed
from vitruvian.errors import ConversionError, VitruvianError, require
from vitruvian.files import atomic_path, check_writable, json_bytes
from vitruvian.inference import Classifier, probabilities_of
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import PAGE, render
from vitruvian.settings import BatchSize, check_range, validate
from vitruvian.text import format_duration, table
from vitruvian.weights.save import save

# n images, K outputs

MINUTES = 7.0  # default time after which nothing new is tried; measuring the candidates takes about a minute more
OPENVINO_INT8 = 2  # maximum number of int8 graphs to try in OpenVINO
INT8_SHARE = 0.5  # fraction of the allowed loss that int8 may use if tokens can be merged, too


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

    def __str__(self) -> str:
        metric = f">{self.chosen.loss.metric}"
        columns = ("", ">images/s", ">speedup", ">one by one", ">max. points lost", ">same predictions %", metric, "")
        speedup = describe_speedup(self.single_speedup, "not faster")
        single = f"single images, {self.single.name}: {speedup}; {self.single.loss}"
        return f"{table(columns, self.rows())}\n\n{self.chosen.name}: {self.headline}; {self.chosen.loss}\n{single}"


def optimize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    max_loss: float = 0.5,
    batch_size: int = BATCH_SIZE,
    images: int = quantize.EVALUATION_IMAGES,
    minutes: float = MINUTES,
    num_heads: int | None = None,
    timer: Timer = quantize.median_seconds,
) -> Optimized:
    """Write the fastest form of a model that loses at most `max_loss` points of top-1.

    The folder works with `vt.Classifier(path)` and `vit predict --model`, and contains report.html with all candidates.

    Args:
        model: A model, or a file, directory or published name to load.
        path: The folder to write; it must not exist.
        calibrate: Images. Some are fitted on, the others measure the loss: by their labels if their classes are the
            model's, and always by the probabilities of changed predictions.
        max_loss: Largest loss of top-1 in percentage points.
        batch_size: Batch size at which the speed is measured.
        images: Most images that the loss is measured on.
        minutes: Time after which nothing new is tried.
        num_heads: Number of attention heads, if the weight file does not store it.
        timer: Measures the speed.
    """
    out = Path(path).expanduser()
    quantize.check_new(out)
    check_range("max_loss", max_loss, 0, 100)
    check_range("images", images, MIN_IMAGES)
    check_range("minutes", minutes, 0)
    validate("batch_size", BatchSize, batch_size)
    check_engine("onnxruntime")  # writes int8
    check_writable(out)
    classifier = Classifier(model, num_heads=num_heads, device="cpu")
    check_model(classifier.torch_model, "onnx", dynamic_size=False)
    everything = read_sample(classifier, calibrate, images=quantize.CALIBRATION_IMAGES + images, training=True)
    count = min(quantize.CALIBRATION_IMAGES, len(everything.pixels) // 2)  # to fit on; the others measure the loss
    if len(everything.pixels) - count < MIN_IMAGES:
        reason = f"{len(everything.pixels)} images, but half of them measure the loss"
        raise ConversionError(reason, where=everything.name, hint=f"give at least {2 * MIN_IMAGES}")
    calibration, sample = everything.part(slice(count)), everything.part(slice(count, None))
    with TemporaryDirectory(dir=scratch_folder()) as name:
        model, seconds = classifier.torch_model, 60 * minutes
        search = CompressionSearch(model, calibration, sample, Path(name), max_loss, seconds, timer)
        candidates = search.run(sample.tensor(slice(batch_size)))
        by_speed = sorted(candidates, key=lambda candidate: candidate.seconds)
        chosen = next(candidate for candidate in by_speed if candidate.loss.points <= max_loss)
        single = fastest_single(candidates, chosen, max_loss)
        result = Optimized(
            path=str(path),
            max_loss=max_loss,
            batch_size=batch_size,
            sample=f"{len(sample.pixels):,} images of {sample.name} that nothing was fitted on",
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
            numbers = result.to_json()
            (folder / "optimize.json").write_bytes(json_bytes(numbers))
            title = f"{classifier.name}: {result.headline}"
            page = optimize_page(title, numbers, result.rows(), str(result.chosen.loss))
            (folder / PAGE).write_text(page, encoding="utf-8")
    return result


def optimize_page(title: str, numbers: Mapping[str, Any], rows: Sequence[Sequence[object]], note: str) -> str:
    """Speed against loss of all candidates."""
    candidates, allowed = numbers["candidates"], numbers["max_loss"]
    points: dict[str, list[tuple[float, float]]] = {}
    for candidate in candidates:
        points.setdefault(candidate["engine"], []).append((candidate["loss"]["points"], candidate["speedup"]))
    lines = [Line(engine, values, scatter=True) for engine, values in sorted(points.items())]
    lines.append(Line("frontier", frontier([point for values in points.values() for point in values])))
    lost = next(c["loss"]["points"] for c in candidates if c["name"] == numbers["chosen"])
    return render(
        "optimize.html",
        title=title,
        subtitle=f"{numbers['images']}; batch size {numbers['batch_size']}, at most {allowed:g} points may be lost",
        chosen=numbers["chosen"],
        tile_values={"speedup over torch": f"{numbers['speedup']:.2f}", "max. points lost": f"{lost:.2f}"},
        loss_note=LOSS_NOTE,
        chart=Chart(title="speedup over torch", lines=lines, x_label="points lost"),
        candidates=rows,
        note=note,
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of (loss, speed), from the smallest loss."""
    best: list[tuple[float, float]] = []
    for loss, speed in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or speed > best[-1][1]:
            best.append((loss, speed))
    return best


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

    def __post_init__(self) -> None:
        self.model.eval()
        self.start, self.bits = time.monotonic(), default_bits()
        self.logits: dict[Counts, Tensor] = {}  # float logits (n, K) by the merged tokens
        self.smoothed, self.inputs = self.model, dict[str, Int8Input]()
        """The model with scales moved for int8, which changes no output, so one graph serves both."""
        self.plan: Int8Plan | None = None
        self.candidates: list[Candidate] = []
        self.timed_out = False

    def run(self, pixels: Tensor) -> list[Candidate]:
        """All candidates, the original model first, with their seconds for the batch `pixels`."""
        if isinstance(self.model, ViT):
            print_status("finding ranges and moving scales into the weights ...")
            self.smoothed, self.inputs = prepare(self.model, self.calibration.batches(), self.bits)
        self.try_float(())
        steps = fewer_tokens.merging_steps(self.model, self.calibration.tensor(slice(None))) if self.has_time() else []
        float_layers = self.try_int8(pixels, within=self.max_loss * (INT8_SHARE if steps else 1))
        self.try_merging(steps, float_layers)
        if steps and steps[-1] not in self.logits and self.has_time():
            self.try_float(steps[-1])  # the first pass of a cascade may lose more
        self.try_openvino_int8()
        if self.timed_out:
            print_status("note: the time limit was reached before everything was tried; --minutes N (minutes=) sets it")
        forwards = {candidate.name: self.open(candidate) for candidate in self.candidates}
        print_status(f"measuring the speed of {len(forwards)} candidates, in turn ...")
        seconds, single = self.timer(forwards, pixels), self.timer(forwards, pixels[:1])
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

    def try_int8(self, pixels: Tensor, within: float) -> int | None:
        """Find the fewest float layers whose loss is `within`; returns their number, or None if int8 does not help."""
        if not isinstance(self.smoothed, ViT) or not self.has_time() or not self.is_faster(self.smoothed, pixels):
            return None
        self.plan = Int8Plan(self.smoothed, self.inputs, self.calibration, bits=self.bits)
        steps, losses = self.plan.steps, dict[int, float]()

        def is_within(count: int) -> bool:
            if not self.has_time():
                return False
            losses[count] = self.add_int8((), count).points
            return losses[count] <= within

        first = bisect_left(steps, True, key=is_within)
        if first < len(steps):
            return steps[first]
        best = min(losses, key=losses.__getitem__, default=0)
        return best if losses and losses[best] <= self.max_loss else None

    def try_merging(self, steps: Sequence[Counts], float_layers: int | None) -> None:
        """Find the most merged tokens within the limit, in int8 if that helps; then try the same counts in float."""
        tried: list[Counts] = []

        def is_too_much(counts: Counts) -> bool:
            if not self.has_time():
                return False
            tried.append(counts)
            if float_layers is None:
                return not self.try_float(counts)
            return self.add_int8(counts, float_layers).points > self.max_loss

        bisect_left(steps, True, key=is_too_much)
        for counts in tried:
            if counts not in self.logits and self.has_time():
                self.try_float(counts)

    def add_int8(self, counts: Counts, float_layers: int) -> AccuracyLoss:
        assert self.plan is not None
        path = self.folder / f"int8_{len(self.candidates)}.onnx"
        self.plan.write(self.export(counts), path, float_layers)
        layers = len(self.inputs) - float_layers
        logits = self.sample.logits(OpenGraph(path, "onnxruntime"), f"int8 in {layers} layers")
        loss = self.loss(logits)
        self.add(Candidate(engine="onnxruntime", counts=counts, int8_layers=layers, loss=loss, path=str(path)))
        return loss

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
        spent = f"{format_duration(time.monotonic() - self.start)} of {format_duration(self.seconds)}"
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

    def is_faster(self, model: ViT, pixels: Tensor) -> bool:
        """Whether int8 in all layers is faster than float, measured before time is spent on its loss."""
        paths = {"float": self.export(()), "int8": self.folder / "all_int8.onnx"}
        try:
            write_int8(paths["float"], paths["int8"], model, rounded_layers(model, self.inputs, self.bits))
        except ConversionError as error:
            print_status(f"note: skipping int8: {error}")
            return False
        seconds = self.timer({name: OpenGraph(path, "onnxruntime") for name, path in paths.items()}, pixels)
        speedup = seconds["float"] / seconds["int8"]
        skipped = "" if speedup > 1 else "; skipping int8"
        print_status(f"int8 in all layers: {speedup:.2f} times the speed of float{skipped}")
        return speedup > 1

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

    Beside a graph that is another graph, without a cascade; a folder of weights has one way to compute.
    """
    possible = [item for item in candidates if item.loss.points <= max_loss and item.path and item.cascade is None]
    return min([chosen, *(possible if chosen.path else [])], key=lambda item: item.single_seconds)


def write_graph(graph: Path, folder: Path, name: str, engine: str) -> None:
    """Write an ONNX graph in the format that `vit predict` runs with this engine."""
    if engine == "onnxruntime":
        shutil.copy(graph, folder / f"{name}.onnx")
    else:
        openvino = require("openvino", "openvino")
        openvino.save_model(openvino.Core().read_model(graph), folder / f"{name}.xml", compress_to_fp16=False)
