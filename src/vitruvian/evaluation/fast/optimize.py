"""The fastest model within a loss, among engines, int8 and merged tokens, all measured on this machine."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.config import INNER_POSITIONS, CascadeConfig, ViTConfig
from vitruvian.engines.choose import Way, forward_of
from vitruvian.engines.export import Forward, check_model, export
from vitruvian.engines.graph import CASCADE_FILE
from vitruvian.engines.int8 import WEIGHT_BITS
from vitruvian.engines.sessions import OpenGraph, check_engine, installed
from vitruvian.errors import ConversionError, VitruvianError, require
from vitruvian.evaluation.fast.loss import BATCH, FEWEST, Loss, Sample, loss_of, read_sample
from vitruvian.evaluation.fast.page import frontier_page
from vitruvian.evaluation.fast.quantize import CALIBRATION, EVALUATION, Plan, Timer, median_seconds, plan_of, workplace
from vitruvian.evaluation.measuring.fewer import certainty_and_losses, fitted_threshold
from vitruvian.files import json_bytes, staged
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.predict import Classifier, probabilities_of
from vitruvian.progress import tell
from vitruvian.report.html import PAGE
from vitruvian.settings import BatchSize, check_range, typed
from vitruvian.text import table
from vitruvian.weights.load import with_merging
from vitruvian.weights.save import save

MERGED = (2, 3, 4, 6, 8, 11, 14)
"""Tokens that may merge in each layer: tried in turn until too much is lost."""
FIRST = (8, 14)
"""Tokens that merge in each layer of a cascade's first pass, which may lose more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the model."""

    engine: str
    tome_r: int
    """Tokens that merge in each layer."""
    int8_layers: int
    loss: Loss
    cascade: CascadeConfig | None = None
    """With it, `tome_r` is that of the first pass."""
    again: float = 0.0
    """Share of the images that the whole model answers after the first pass."""
    path: str = ""
    """The graph while the search goes on; empty for torch."""
    seconds: float = 0.0
    """A batch."""

    @property
    def name(self) -> str:
        parts = [self.engine, f"int8 in {self.int8_layers} layers" if self.int8_layers else "float32"]
        if self.cascade is not None:
            merged = [f"a cascade: {self.tome_r} tokens merged a layer, {100 * self.again:.0f}% seen again"]
        else:
            merged = [f"{self.tome_r} tokens merged a layer"] if self.tome_r else []
        return ", ".join([*parts, *merged])

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self) | {"name": self.name, "loss": self.loss.to_json()}
        return {name: value for name, value in found.items() if name != "path"}


@dataclass(frozen=True, kw_only=True)
class Optimized:
    """What was tried, the fastest first, and what was written."""

    path: str
    max_loss: float
    batch: int
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
            "batch": self.batch,
            "images": self.sample,
            "chosen": self.chosen.name,
            "speedup": self.speedup(self.chosen),
            "candidates": [each.to_json() | {"speedup": self.speedup(each)} for each in self.candidates],
        }

    def rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.name,
                f"{self.batch / each.seconds:.1f}",
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
    batch: int = BATCH,
    images: int = EVALUATION,
    heads: int | None = None,
    timer: Timer = median_seconds,
) -> Optimized:
    """Write the fastest form of a model that loses at most `max_loss` points of top-1, as a folder `vit predict` takes.

    Some images of `calibrate` fit ranges and scales; the others, `images` at most, measure the loss: by their labels
    where these are the model's classes, and always by the probabilities of answers that change. The folder also has
    the page report.html with all that was tried.
    """
    out = Path(path).expanduser()
    if out.exists():
        raise ConversionError(f"{out}: exists already; give another name or remove it")
    check_range("max_loss", max_loss, 0, 100)
    check_range("images", images, FEWEST)
    typed("batch", BatchSize, batch)
    check_engine("onnxruntime")  # what int8 is written with
    classifier = Classifier(model, heads=heads)
    check_model(classifier.model, "onnx", dynamic_size=False)
    fitted, sample = divided(read_sample(classifier, calibrate, images=CALIBRATION + images, training=True))
    with workplace() as folder:
        search = Search(classifier.model, fitted, sample, folder, max_loss=max_loss, timer=timer, batch=batch)
        candidates = list(search.candidates())
        forwards = {each.name: search.forward(each) for each in candidates}
        tell(f"measuring {len(forwards)} ways to run the model, in turn ...")
        seconds = timer(forwards, search.some())
        timed = [dataclasses.replace(each, seconds=seconds[each.name]) for each in candidates]
        timed += search.cascades(timed)
        ordered = sorted(timed, key=lambda each: each.seconds)
        found = Optimized(
            path=str(path),
            max_loss=max_loss,
            batch=batch,
            sample=f"{len(sample.pixels):,} images of {sample.name} that nothing was fitted on",
            chosen=next(each for each in ordered if each.loss.points <= max_loss),
            baseline=timed[0],
            candidates=tuple(ordered),
        )
        with staged(out) as place:
            search.write(found.chosen, place)
            numbers = found.to_json()
            (place / "optimize.json").write_bytes(json_bytes(numbers))
            made = frontier_page(f"{classifier.name}, faster", numbers, found.rows(), str(found.chosen.loss))
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


class Search:
    """The ways to run one model, with the loss of each."""

    def __init__(
        self, model: Model, fitted: Sample, sample: Sample, folder: Path, *, max_loss: float, timer: Timer, batch: int
    ) -> None:
        self.model, self.fitted, self.sample = model.eval(), fitted, sample
        self.folder, self.max_loss = folder, max_loss
        self.timer, self.batch = timer, batch
        self.answers: dict[int, Tensor] = {}
        """Logits (n, K) by the tokens that merge in each layer."""
        self.plan: Plan | None = None
        self.int8_pays: bool | None = None
        """Whether int8 of all layers is faster than float; None while it is not measured."""
        self.kept = 0
        """Layers that int8 has to leave float; more merged tokens need no fewer."""

    def candidates(self) -> Iterator[Candidate]:
        """The model itself first; more merged tokens as long as the loss allows them, or a cascade may use them."""
        within = True
        for r in self.merges():
            if not within and r not in FIRST:
                continue
            label = f"{r} tokens merged" if r else "float32"
            self.answers[r] = self.sample.logits(self.quick(r), label)
            loss = self.loss_of(self.answers[r])
            yield Candidate(engine="torch", tome_r=r, int8_layers=0, loss=loss)
            within = within and loss.points <= self.max_loss
            if not within and r not in FIRST:  # also in every engine, and with int8
                continue
            for engine in installed()[1:]:
                try:
                    yield Candidate(engine=engine, tome_r=r, int8_layers=0, loss=loss, path=self.exported(r))
                except VitruvianError as error:
                    tell(f"note: {engine} is left out: {error}")
            if within:
                yield from self.int8(r)

    def cascades(self, timed: list[Candidate]) -> list[Candidate]:
        """First passes with merged tokens and the whole model, in the same engine, as often as the loss allows.

        Thresholds are fitted on one half of the images, the loss is measured on the other. An image takes the time of
        the first pass and, for the share that is seen again, that of the whole model.
        """
        half = len(self.sample.pixels) // 2
        if half < FEWEST:
            return []
        rest, found = self.sample.part(slice(half, None)), []
        floats = [each for each in timed if not each.int8_layers]
        for first in (each for each in floats if each.tome_r in FIRST):
            whole = next(each for each in floats if each.engine == first.engine and not each.tome_r)
            before, after = self.answers[0], self.answers[first.tome_r]
            certainty, losses = certainty_and_losses(self.model, before[:half], after[:half])
            threshold = fitted_threshold(certainty, losses, self.max_loss / 2)  # what is fitted loses more elsewhere
            unsure = probabilities_of(self.model, after[half:]).amax(dim=1) <= threshold
            loss = loss_of(self.model, before[half:], torch.where(unsure[:, None], before[half:], after[half:]), rest)
            again = float(unsure.double().mean())
            cascade = CascadeConfig(tome_r=first.tome_r, threshold=threshold)
            seconds = first.seconds + again * whole.seconds
            found.append(dataclasses.replace(first, loss=loss, cascade=cascade, again=again, seconds=seconds))
        return found

    def merges(self) -> tuple[int, ...]:
        config = self.model.config
        if not isinstance(config, ViTConfig):
            return (0,)
        inside = config.rope or config.positions in INNER_POSITIONS
        return (0,) if inside or config.merges_tokens else (0, *MERGED)

    def int8(self, r: int) -> Iterator[Candidate]:
        """With as few layers left float as the loss allows; all that were tried."""
        if not isinstance(self.model, ViT) or self.int8_pays is False:
            return
        if self.plan is None:
            self.plan = plan_of(self.model, self.fitted, self.folder, bits=WEIGHT_BITS)
        ready = merging(self.plan.model, r)
        assert isinstance(ready, ViT)
        plan = dataclasses.replace(self.plan, model=ready, graph=self.folder / f"smooth{r}.onnx")
        export(ready, plan.graph)
        if self.int8_pays is None and not self.faster_in_int8(plan):
            return
        for self.kept in [step for step in plan.steps() if step >= self.kept]:
            kept = self.kept
            path = plan.write(self.folder / f"int8_{r}_{kept}.onnx", kept)
            loss = self.loss(OpenGraph(path, "onnxruntime"), f"int8, {kept} layers float, {r} tokens merged")
            layers = len(plan.ranges) - kept
            yield Candidate(engine="onnxruntime", tome_r=r, int8_layers=layers, loss=loss, path=str(path))
            if loss.points <= self.max_loss:
                return

    def some(self) -> Tensor:
        """A batch to measure with."""
        return self.sample.tensor(slice(self.batch))

    def faster_in_int8(self, plan: Plan) -> bool:
        """Measured once, with all layers in int8, before any time goes into what that loses."""
        paths = {"float": plan.graph, "int8": plan.write(self.folder / "all_int8.onnx", 0)}
        seconds = self.timer({name: OpenGraph(path, "onnxruntime") for name, path in paths.items()}, self.some())
        ratio = seconds["float"] / seconds["int8"]
        tell(f"int8 in every layer: {ratio:.2f} times the speed of float" + ("" if ratio > 1 else "; it is left out"))
        self.int8_pays = ratio > 1
        return self.int8_pays

    def loss(self, forward: Forward, label: str) -> Loss:
        return self.loss_of(self.sample.logits(forward, label))

    def loss_of(self, after: Tensor) -> Loss:
        return loss_of(self.model, self.answers[0], after, self.sample)

    def exported(self, r: int) -> str:
        """The graph that every runtime reads."""
        path = self.folder / f"float{r}.onnx"
        if not path.is_file():
            export(merging(self.model, r), path)
        return str(path)

    def quick(self, r: int) -> Forward:
        """The merged model in a runtime where there is one, since most of the search's time is spent here."""
        for engine in installed()[:0:-1]:
            with suppress(VitruvianError):
                return OpenGraph(Path(self.exported(r)), engine)
        return self.torch_forward(r)

    def torch_forward(self, r: int) -> Forward:
        return forward_of(merging(self.model, r), Way("torch", split=True), self.model.preprocess.image_size)

    def forward(self, candidate: Candidate) -> Forward:
        """As `vit predict` runs what is written."""
        if not candidate.path:
            return self.torch_forward(candidate.tome_r)
        return OpenGraph(Path(candidate.path), candidate.engine)

    def write(self, candidate: Candidate, folder: Path) -> None:
        """A folder of weights, of ONNX, or of OpenVINO; of a cascade, with both passes."""
        cascade = candidate.cascade
        if not candidate.path:
            chosen = merging(self.model, 0 if cascade else candidate.tome_r)
            kept, chosen.cascade = chosen.cascade, cascade
            save(chosen, folder)
            chosen.cascade = kept
            return
        folder.mkdir()
        write_graph(Path(self.exported(0) if cascade else candidate.path), folder, "model", candidate.engine)
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


def merging(model: Model, r: int) -> Model:
    """The model with `r` tokens merged in each layer; the same weights."""
    return with_merging(model, r) if r else model
