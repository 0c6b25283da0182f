"""The ways to run one model faster, with what each loses: engines, int8, merged tokens, cascades.

What costs time is exporting graphs and answering images, so few are tried: how many layers stay float in int8 and how
many tokens merge are halved towards the limit, and nothing new begins when the time is over.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitruvian.compress.cascade import certainty_and_losses, fitted_threshold
from vitruvian.compress.int8 import WEIGHT_BITS, prepared, quick_layers
from vitruvian.compress.int8_graph import write_int8
from vitruvian.compress.loss import FEWEST, Loss, Sample, loss_of
from vitruvian.compress.merging import Counts, ladder, merging, words_of
from vitruvian.compress.quantize import Plan, Timer, least, plan_of
from vitruvian.compress.ranges import Int8Input
from vitruvian.config import CascadeConfig
from vitruvian.engines.choose import RunMode, open_forward
from vitruvian.engines.export import Forward, export
from vitruvian.engines.runtimes import OpenGraph, installed
from vitruvian.errors import ConversionError, VitruvianError
from vitruvian.inference import probabilities_of
from vitruvian.model.build import Model
from vitruvian.model.vit import ViT
from vitruvian.progress import print_status
from vitruvian.text import format_duration

INT8_SHARE = 0.5
"""Of the loss that int8 alone may take where tokens can merge, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the model."""

    engine: str
    counts: Counts = ()
    """Tokens that merge in each layer."""
    int8_layers: int
    loss: Loss
    cascade: CascadeConfig | None = None
    """With it, `counts` are those of the first pass."""
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
            parts.append(f"a cascade: {words_of(self.counts)}, {100 * self.again:.0f}% seen again")
        elif self.counts:
            parts.append(words_of(self.counts))
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self) | {"name": self.name, "loss": self.loss.to_json()}
        return {name: value for name, value in found.items() if name != "path"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of a search."""

    max_loss: float
    """Points of top-1."""
    seconds: float
    """After which nothing new is tried."""


class Search:
    """The ways to run one model, with the loss of each."""

    def __init__(
        self,
        model: Model,
        fitted: Sample,
        sample: Sample,
        folder: Path,
        *,
        limits: Limits,
        timer: Timer,
        batch_size: int,
    ) -> None:
        self.model, self.fitted, self.sample = model.eval(), fitted, sample
        self.folder, self.max_loss = folder, limits.max_loss
        self.timer, self.batch_size = timer, batch_size
        self.begun, self.seconds = time.monotonic(), limits.seconds
        self.answers: dict[Counts, Tensor] = {}
        """Logits (n, K) in float by the tokens that merge."""
        self.ready, self.inputs = self.model, dict[str, Int8Input]()
        """With scales moved for int8, which changes no answer: a graph serves both. And what enters its layers."""
        self.plan: Plan | None = None
        self.found: list[Candidate] = []

    def candidates(self) -> list[Candidate]:
        """The model itself first."""
        if isinstance(self.model, ViT):
            print_status("finding ranges and moving scales into the weights ...")
            self.ready, self.inputs = prepared(self.model, self.fitted.batches())
        self.try_float(())
        steps = ladder(self.model, self.fitted.tensor(slice(None))) if self.has_time() else []
        kept = self.try_int8(within=self.max_loss * (INT8_SHARE if steps else 1))
        self.try_merging(steps, kept)
        if steps and steps[-1] not in self.answers and self.has_time():
            self.try_float(steps[-1])  # a cascade's first pass may lose more
        if not self.has_time():
            print_status("note: the time was over before all was tried; --minutes N (minutes=) allows more")
        return self.found

    def has_time(self) -> bool:
        return time.monotonic() - self.begun < self.seconds

    def try_float(self, counts: Counts) -> bool:
        """In every engine; whether the loss is within the limit."""
        self.answers[counts] = self.sample.logits(self.quick(counts), words_of(counts) if counts else "float32")
        loss = self.loss_of(self.answers[counts])
        self.add(Candidate(engine="torch", counts=counts, int8_layers=0, loss=loss))
        for engine in installed()[1:]:
            try:
                path = str(self.exported(counts))
                self.found.append(Candidate(engine=engine, counts=counts, int8_layers=0, loss=loss, path=path))
            except VitruvianError as error:
                print_status(f"note: {engine} is left out: {error}")
        return loss.points <= self.max_loss

    def try_int8(self, within: float) -> int | None:
        """With as few layers left float as this loss allows: their number, or None where int8 does not help."""
        if not isinstance(self.ready, ViT) or not self.has_time() or not self.faster_in_int8(self.ready):
            return None
        self.plan = plan_of(self.ready, self.inputs, self.fitted, bits=WEIGHT_BITS)
        steps = self.plan.steps()
        losses: dict[int, float] = {}

        def good(place: int) -> bool:
            losses[steps[place]] = self.add_int8((), steps[place]).points
            return losses[steps[place]] <= within

        chosen = self.halved(len(steps), good)
        if chosen < len(steps):
            return steps[chosen]
        best = min(losses, key=losses.__getitem__, default=0)
        return best if losses and losses[best] <= self.max_loss else None

    def try_merging(self, steps: Sequence[Counts], kept: int | None) -> None:
        """As many tokens as the loss allows, in int8 where that helps; then the same in float."""
        tried: list[Counts] = []

        def too_many(place: int) -> bool:
            tried.append(steps[place])
            if kept is None:
                return not self.try_float(steps[place])
            return self.add_int8(steps[place], kept).points > self.max_loss

        self.halved(len(steps), too_many)
        for counts in tried:
            if counts not in self.answers and self.has_time():
                self.try_float(counts)

    def halved(self, count: int, good: Callable[[int], bool]) -> int:
        """`least`, as long as there is time."""

        def asked(place: int) -> bool:
            return self.has_time() and good(place)

        return least(count, asked)

    def add_int8(self, counts: Counts, kept: int) -> Loss:
        assert self.plan is not None
        path = self.folder / f"int8_{len(self.found)}.onnx"
        self.plan.write(self.exported(counts), path, kept)
        layers = len(self.inputs) - kept
        logits = self.sample.logits(OpenGraph(path, "onnxruntime"), f"int8 in {layers} layers")
        loss = self.loss_of(logits)
        self.add(Candidate(engine="onnxruntime", counts=counts, int8_layers=layers, loss=loss, path=str(path)))
        return loss

    def add(self, candidate: Candidate) -> None:
        self.found.append(candidate)
        spent = f"{format_duration(time.monotonic() - self.begun)} of at most {format_duration(self.seconds)}"
        print_status(f"{candidate.name}: {candidate.loss.points:.2f} points lost at most ({spent})")

    def cascades(self, timed: list[Candidate]) -> list[Candidate]:
        """First passes that alone lose too much and the whole model, in the same engine, as often as the loss allows.

        Thresholds are fitted on one half of the images, the loss is measured on the other. An image takes the time of
        the first pass and, for the share that is seen again, that of the whole model.
        """
        half = len(self.sample.pixels) // 2
        if half < FEWEST:
            return []
        rest, found = self.sample.part(slice(half, None)), []
        floats = [each for each in timed if not each.int8_layers]
        for first in (each for each in floats if each.counts and each.loss.points > self.max_loss):
            whole = next(each for each in floats if each.engine == first.engine and not each.counts)
            before, after = self.answers[()], self.answers[first.counts]
            certainty, losses = certainty_and_losses(self.model, before[:half], after[:half])
            threshold = fitted_threshold(certainty, losses, self.max_loss / 2)  # what is fitted loses more elsewhere
            unsure = probabilities_of(self.model, after[half:]).amax(dim=1) <= threshold
            loss = loss_of(self.model, before[half:], torch.where(unsure[:, None], before[half:], after[half:]), rest)
            again = float(unsure.double().mean())
            cascade = CascadeConfig(tome_r=first.counts, threshold=threshold)
            seconds = first.seconds + again * whole.seconds
            found.append(dataclasses.replace(first, loss=loss, cascade=cascade, again=again, seconds=seconds))
        return found

    def some(self) -> Tensor:
        """A batch to measure with."""
        return self.sample.tensor(slice(self.batch_size))

    def faster_in_int8(self, ready: ViT) -> bool:
        """Measured once, with all layers in int8, before any time goes into what that loses."""
        paths = {"float": self.exported(()), "int8": self.folder / "all_int8.onnx"}
        try:
            write_int8(paths["float"], paths["int8"], ready, quick_layers(ready, self.inputs))
        except ConversionError as error:
            print_status(f"note: int8 is left out: {error}")
            return False
        seconds = self.timer({name: OpenGraph(path, "onnxruntime") for name, path in paths.items()}, self.some())
        ratio = seconds["float"] / seconds["int8"]
        print_status(
            f"int8 in every layer: {ratio:.2f} times the speed of float" + ("" if ratio > 1 else "; it is left out")
        )
        return ratio > 1

    def loss_of(self, after: Tensor) -> Loss:
        return loss_of(self.model, self.answers[()], after, self.sample)

    def exported(self, counts: Counts) -> Path:
        """The graph that every runtime reads."""
        path = self.folder / f"float{'_'.join(map(str, counts))}.onnx"
        if not path.is_file():
            print_status(f"exporting the graph{' with ' * bool(counts)}{words_of(counts) if counts else ''} ...")
            export(merging(self.ready, counts), path)
        return path

    def quick(self, counts: Counts) -> Forward:
        """The merged model in a runtime where there is one, since most of the search's time is spent here."""
        for engine in installed()[:0:-1]:
            with suppress(VitruvianError):
                return OpenGraph(self.exported(counts), engine)
        return self.torch_forward(counts)

    def torch_forward(self, counts: Counts) -> Forward:
        return open_forward(
            merging(self.model, counts), RunMode("torch", split=True), self.model.meta.preprocess.image_size
        )

    def forward(self, candidate: Candidate) -> Forward:
        """As `vit predict` runs what is written."""
        if not candidate.path:
            return self.torch_forward(candidate.counts)
        return OpenGraph(Path(candidate.path), candidate.engine)
