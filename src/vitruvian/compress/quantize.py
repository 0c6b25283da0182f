"""Quantize a model to int8: as many layers as the allowed loss permits, written only if it is faster than float."""

import dataclasses
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.compress import int8
from vitruvian.compress.int8 import DENSE_LAYERS, Int8Input, dense_layers
from vitruvian.compress.int8_graph import write_int8
from vitruvian.compress.loss import BATCH_SIZE, LOSS_NOTE, AccuracyLoss, PixelSample, accuracy_loss, read_sample
from vitruvian.engines.choose import measure
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.graph import check_runs
from vitruvian.engines.runtimes import FORMATS, Session, check_engine
from vitruvian.errors import ConfigError, ConversionError, UnknownNameError, argument
from vitruvian.files import atomic_path, check_writable
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status, track
from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import render, write_report
from vitruvian.settings import BatchSize, check_range, validate
from vitruvian.weights.load import without_cascade

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

    The most sensitive layers stay float, as few as the loss requires.

    Args:
        model: A model, or a file, directory or published name to load.
        path: The `.onnx` file to write; it must not exist.
        calibrate: Images that ranges and scales are found on; labels are not used.
        evaluate: Other images that the loss is measured on. Labels are used if their classes are the model's.
        max_loss: Largest loss of top-1 in percentage points.
        engine: Runtime in which loss and speed are measured: `onnxruntime` or `openvino`.
        batch_size: Batch size at which the speed is measured.
        weight_bits: 7, which is right on all processors, or 8 for those with VNNI; by default what this one can.
        num_heads: Number of attention heads, if the weight file does not store it.
        timer: Measures the speed.

    Raises:
        ConversionError: More than `max_loss` is lost, or int8 is not faster than float; nothing is written.
    """
    out = Path(path).expanduser()
    if out.suffix != ".onnx":
        raise ConversionError("the file name of an int8 model must end in .onnx", where=out)
    check_new(out)
    check_range("max_loss", max_loss, 0, 100)
    validate("batch_size", BatchSize, batch_size)
    weight_bits = int8.default_bits() if weight_bits is None else weight_bits
    if weight_bits not in (7, 8):
        raise ConfigError(f"{argument('weight_bits', weight_bits)} is not 7 or 8")
    if weight_bits > int8.default_bits():
        raise ConfigError(f"{argument('weight_bits', 8)} saturates on this processor, which has no VNNI", hint="use 7")
    if engine not in FORMATS:
        raise UnknownNameError("engine", engine, FORMATS, see=f"({', '.join(FORMATS)})")
    for name in ("onnxruntime", engine):
        check_engine(name)
    check_writable(out)
    classifier = Classifier(model, num_heads=num_heads, device="cpu")
    dense_layers(classifier.torch_model)  # raises if it is not a ViT, before images are read
    check_model(classifier.torch_model, "onnx", dynamic_size=False)
    calibration = read_sample(classifier, calibrate, images=CALIBRATION_IMAGES, training=True)
    sample = read_sample(classifier, evaluate, images=EVALUATION_IMAGES, training=False)
    before = sample.logits(Classifier(without_cascade(classifier.torch_model)).logits, "float")
    with TemporaryDirectory(dir=scratch_folder()) as name:
        folder = Path(name)
        print_status("finding ranges and moving scales into the weights ...")
        smoothed, inputs = int8.prepare(classifier.torch_model.eval(), calibration.batches(), weight_bits)
        float_graph = folder / "float.onnx"
        export(smoothed, float_graph)
        plan = Int8Plan(smoothed, inputs, calibration, bits=weight_bits)
        float_run = Session(float_graph, engine)
        losses: dict[int, AccuracyLoss] = {}

        def is_within(count: int) -> bool:
            graph = folder / f"{count}.onnx"
            plan.write(float_graph, graph, count)
            if not losses:
                check_runs(graph, engine)
            logits = sample.logits(Session(graph, engine), f"int8, {count} layers float")
            losses[count] = accuracy_loss(classifier.torch_model, before, logits, sample)
            return losses[count].points <= max_loss

        first = bisect_left(plan.steps, True, key=is_within)  # the loss falls with the number of float layers
        if first == len(plan.steps):
            raise ConversionError(
                f"not written, {min(loss.points for loss in losses.values()):.2f} points may be lost, more than "
                f"{argument('max_loss', max_loss, 'g')}, even with {plan.steps[-1]} of {len(inputs)} layers in float",
                where=path,
            )
        count = plan.steps[first]
        graph = folder / f"{count}.onnx"
        pixels = sample.tensor(slice(batch_size))
        seconds = timer({"float": float_run, "int8": Session(graph, engine)}, pixels)
        speedup = seconds["float"] / seconds["int8"]
        if speedup <= 1:
            raise ConversionError(
                f"not written, int8 is not faster on this machine: {speedup:.2f} times the speed of float in {engine} "
                f"at batch size {batch_size}",
                where=path,
            )
        with atomic_path(out) as new:
            new.write_bytes(graph.read_bytes())
        return Quantized(
            path=str(path),
            engine=engine,
            loss=losses[count],
            speedup=speedup,
            batch_size=batch_size,
            bytes_before=float_graph.stat().st_size,
            bytes_after=graph.stat().st_size,
            weight_bits=weight_bits,
            vnni=int8.default_bits() == 8,
            sensitivity=plan.sensitivity,
            float_layers=tuple(plan.sensitivity)[:count],
            tried=tuple((count, losses[count].points) for count in sorted(losses)),
        )


def check_new(path: Path) -> None:
    if path.exists():
        raise ConversionError("already exists", where=path, hint="choose another name or remove it")


class Int8Plan:
    """A smoothed model, the int8 weights of its layers (GPTQ), and the sensitivity of each layer."""

    def __init__(self, model: ViT, inputs: Mapping[str, Int8Input], calibration: PixelSample, *, bits: int) -> None:
        rounding, measuring = (partial(track, label=label) for label in ("blocks quantized", "sensitivity of layers"))
        self.model = model
        self.layers = int8.gptq_layers(model, inputs, calibration.batches(), bits=bits, track=rounding)
        pixels = calibration.tensor(slice(SENSITIVITY_IMAGES))
        self.sensitivity = int8.sensitivity(model, self.layers, pixels, track=measuring)
        self.steps = sorted({round(share * len(self.layers)) for share in FLOAT_SHARES})
        """Numbers of layers that stay float, in increasing order."""

    def write(self, graph: Path, path: Path, float_layers: int) -> None:
        """Write an exported graph of the model in int8, except for its most sensitive layers."""
        names = list(self.sensitivity)[float_layers:]
        write_int8(graph, path, self.model, {name: self.layers[name] for name in names})


def write_quantized(folder: Path, numbers: dict[str, Any], summary: str) -> Path:
    """Write quantize.json and report.html into a new folder; returns the path of the page."""
    loss, sensitivity = numbers["loss"], numbers["sensitivity"]
    tiles = {
        "same predictions": f"{loss['agreement']:.1f} %",
        "max. points lost": f"{loss['points']:.2f}",
        f"speedup over float, batch size {numbers['batch_size']}": f"{numbers['speedup']:.2f}",
        "size": f"{numbers['bytes_after'] / 1e6:.1f} of {numbers['bytes_before'] / 1e6:.1f} MB",
    }
    if loss["before"] is not None:
        tiles[loss["metric"]] = f"{loss['before']:.2f} -> {loss['after']:.2f}"
    lines = []
    for layer in DENSE_LAYERS:
        blocks = {name.split(".")[1]: value for name, value in sensitivity.items() if name.endswith(layer)}
        lines.append(Line(layer, sorted((float(block), 1000 * value) for block, value in blocks.items())))
    page = render(
        "quantize.html",
        title=Path(numbers["path"]).name,
        subtitle=summary.replace("\n", "; "),
        tile_values=tiles,
        chart=Chart(title="divergence in millinats", lines=lines, x_label="block", log_y=True),
        layers=[(n, 1000 * v, "float" if n in numbers["float_layers"] else "int8") for n, v in sensitivity.items()],
        loss_note=LOSS_NOTE,
        tried=numbers["tried"],
    )
    return write_report(folder, name="quantize.json", numbers=numbers, page=page)
