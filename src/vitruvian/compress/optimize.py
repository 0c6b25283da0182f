"""The fastest model within a loss, among engines, int8 and merged tokens, all measured on this machine."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitruvian.compress.compress_report import optimize_page
from vitruvian.compress.loss import BATCH_SIZE, FEWEST, Sample, read_sample
from vitruvian.compress.merging import merging
from vitruvian.compress.quantize import CALIBRATION, EVALUATION, Timer, median_seconds, workplace
from vitruvian.compress.search import Candidate, Limits, Search
from vitruvian.engines.export import check_model
from vitruvian.engines.graph import CASCADE_FILE
from vitruvian.engines.runtimes import check_engine
from vitruvian.errors import ConversionError, require
from vitruvian.files import atomic_path, check_writable, json_bytes
from vitruvian.inference import Classifier
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.report.html import PAGE
from vitruvian.settings import BatchSize, check_range, validate
from vitruvian.text import table
from vitruvian.weights.save import save

MINUTES = 7.0
"""After which the search begins nothing new; measuring what it has found takes a minute more."""


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """What was tried, the fastest first, and what was written."""

    path: str
    max_loss: float
    batch_size: int
    sample: str
    chosen: Candidate
    baseline: Candidate
    """The model itself, in torch."""
    candidates: tuple[Candidate, ...]

    def speedup(self, candidate: Candidate) -> float:
        return self.baseline.seconds / candidate.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "max_loss": self.max_loss,
            "batch_size": self.batch_size,
            "images": self.sample,
            "chosen": self.chosen.name,
            "speedup": self.speedup(self.chosen),
            "candidates": [each.to_json() | {"speedup": self.speedup(each)} for each in self.candidates],
        }

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.name,
                f"{self.batch_size / each.seconds:.1f}",
                f"{self.speedup(each):.2f}",
                f"{each.loss.points:.2f}",
                f"{each.loss.agreement:.1f}",
                "-" if each.loss.top1_after is None else f"{each.loss.top1_after:.2f}",
                "written" if each is self.chosen else "" if each.loss.points <= self.max_loss else "loses too much",
            )
            for each in self.candidates
        ]

    def __str__(self) -> str:
        heads = ("", ">images/s", ">times torch", ">points lost at most", ">same answers %", ">top-1", "")
        return f"{table(heads, self.rows())}\n\n{self.chosen.name}: {self.chosen.loss}"


def optimize(
    model: Model | str | Path,
    path: str | Path,
    *,
    calibrate: object,
    max_loss: float = 0.5,
    batch_size: int = BATCH_SIZE,
    images: int = EVALUATION,
    minutes: float = MINUTES,
    num_heads: int | None = None,
    timer: Timer = median_seconds,
) -> Optimized:
    """Write the fastest form of a model that loses at most `max_loss` points of top-1, as a folder `vit predict` takes.

    Some images of `calibrate` fit ranges and scales; the others, `images` at most, measure the loss: by their labels
    where these are the model's classes, and always by the probabilities of answers that change. The folder also has
    the page report.html with all that was tried. After `minutes` nothing new is tried, and what is there is measured.
    """
    out = Path(path).expanduser()
    if out.exists():
        raise ConversionError(f"{out}: exists already; give another name or remove it")
    check_range("max_loss", max_loss, 0, 100)
    check_range("images", images, FEWEST)
    check_range("minutes", minutes, 0)
    validate("batch_size", BatchSize, batch_size)
    check_engine("onnxruntime")  # what int8 is written with
    check_writable(out)
    classifier = Classifier(model, num_heads=num_heads)
    check_model(classifier.model, "onnx", dynamic_size=False)
    fitted, sample = divided(read_sample(classifier, calibrate, images=CALIBRATION + images, training=True))
    with workplace() as folder:
        limits = Limits(max_loss=max_loss, seconds=60 * minutes)
        search = Search(classifier.model, fitted, sample, folder, limits=limits, timer=timer, batch_size=batch_size)
        candidates = search.candidates()
        forwards = {each.name: search.forward(each) for each in candidates}
        print_status(f"measuring {len(forwards)} ways to run the model, in turn ...")
        seconds = timer(forwards, search.some())
        timed = [dataclasses.replace(each, seconds=seconds[each.name]) for each in candidates]
        timed += search.cascades(timed)
        ordered = sorted(timed, key=lambda each: each.seconds)
        found = Optimized(
            path=str(path),
            max_loss=max_loss,
            batch_size=batch_size,
            sample=f"{len(sample.pixels):,} images of {sample.name} that nothing was fitted on",
            chosen=next(each for each in ordered if each.loss.points <= max_loss),
            baseline=timed[0],
            candidates=tuple(ordered),
        )
        with atomic_path(out) as place:
            write(search, found.chosen, place)
            numbers = found.to_json()
            (place / "optimize.json").write_bytes(json_bytes(numbers))
            made = optimize_page(f"{classifier.name}, faster", numbers, found.rows(), str(found.chosen.loss))
            (place / PAGE).write_text(made, encoding="utf-8")
    return found


def divided(sample: Sample) -> tuple[Sample, Sample]:
    """What is fitted on, and what the loss is measured on: at least as many."""
    first = min(CALIBRATION, len(sample.pixels) // 2)
    if len(sample.pixels) - first < FEWEST:
        raise ConversionError(
            f"{sample.name}: {len(sample.pixels)} images, of which half measure the loss; give {2 * FEWEST} or more"
        )
    return sample.part(slice(first)), sample.part(slice(first, None))


def write(search: Search, candidate: Candidate, folder: Path) -> None:
    """A folder of weights, of ONNX, or of OpenVINO; of a cascade, with both passes."""
    cascade = candidate.cascade
    if not candidate.path:
        chosen = merging(search.model, () if cascade else candidate.counts)
        meta = chosen.meta
        chosen.meta = meta.replace(cascade=cascade)
        save(chosen, folder)
        chosen.meta = meta
        return
    folder.mkdir()
    write_graph(search.exported(()) if cascade else Path(candidate.path), folder, "model", candidate.engine)
    if cascade is not None:
        write_graph(Path(candidate.path), folder, "first", candidate.engine)
        (folder / CASCADE_FILE).write_bytes(json_bytes(cascade.to_json()))


def write_graph(made: Path, folder: Path, name: str, engine: str) -> None:
    """An ONNX file in the form that makes `vit predict` take this engine."""
    if engine == "onnxruntime":
        shutil.copy(made, folder / f"{name}.onnx")
    else:
        openvino = require("openvino", "openvino")
        openvino.save_model(openvino.Core().read_model(made), folder / f"{name}.xml", compress_to_fp16=False)
