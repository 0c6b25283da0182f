"""What a faster model loses, with how sure that is: on labels where there are any, else by the model's own word."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_dataset, open_images
from vitruvian.data.sources import Source
from vitruvian.engines.export import Forward
from vitruvian.errors import DataError
from vitruvian.evaluation.measuring.evaluate import chosen_split, space_for
from vitruvian.evaluation.measuring.label_spaces import LabelSpace
from vitruvian.inference import Classifier, probabilities_of
from vitruvian.model.build import Model
from vitruvian.progress import Track, print_status, track

# n images, K outputs

FEWEST = 32
"""Images below which nothing is said about a loss."""
BATCH_SIZE = 16
ONE_SIDED = 1.645
"""Standard errors above a mean that 95% of estimates lie below."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Images as the model sees them, on disk, and their labels where the model knows them."""

    name: str
    pixels: NDArray[np.float32]
    """(n, channels, rows, columns), mapped from a file."""
    labels: NDArray[np.int64]
    """(n,) Classes in the label space; -1 where there is none."""
    space: LabelSpace | None

    def batches(self) -> list[Tensor]:
        return [self.tensor(slice(start, start + BATCH_SIZE)) for start in range(0, len(self.pixels), BATCH_SIZE)]

    def tensor(self, part: slice) -> Tensor:
        return torch.from_numpy(np.array(self.pixels[part]))

    def part(self, rows: slice) -> Sample:
        return dataclasses.replace(self, pixels=self.pixels[rows], labels=self.labels[rows])

    def logits(self, forward: Forward, label: str) -> Tensor:
        """(n, K) with progress."""
        starts = range(0, len(self.pixels), BATCH_SIZE)
        return torch.cat([forward(self.tensor(slice(i, i + BATCH_SIZE))) for i in track(starts, len(starts), label)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """How a faster model's answers compare with the model's, in percent and points."""

    images: int
    agreement: float
    """Images with the same best answer."""
    expected: float
    """Points of top-1 lost if the model's probabilities are true: an answer that changed costs their difference."""
    expected_error: float
    """Standard error."""
    labeled: int
    """Images with a label that the model has; the following are of these."""
    top1_before: float | None = None
    top1_after: float | None = None
    top1_error: float | None = None
    """Standard error of the difference; both models answer the same images."""

    @property
    def points(self) -> float:
        """What the loss may be at most, with 95% in the first part: the expected one and the one on labels."""
        bound = self.expected + ONE_SIDED * self.expected_error
        if self.top1_before is None or self.top1_after is None:
            return bound
        return max(bound, self.top1_before - self.top1_after)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"points": self.points}

    def __str__(self) -> str:
        words = (
            f"{self.images:,} images: {self.agreement:.1f}% same answers, expected loss {self.expected:.2f} "
            f"(standard error {self.expected_error:.2f}) points"
        )
        if self.top1_before is not None:
            words += f"; top-1 {self.top1_before:.2f} -> {self.top1_after:.2f} on {self.labeled:,} labels"
            words += f" (standard error of the difference {self.top1_error:.2f})"
        return words


def loss_of(model: Model, before: Tensor, after: Tensor, sample: Sample) -> Loss:
    """Of answers (n, K) before and after."""
    probabilities = probabilities_of(model, before.double())
    old, new = before.argmax(dim=1), after.argmax(dim=1)
    lost = (probabilities.gather(1, old[:, None]) - probabilities.gather(1, new[:, None]))[:, 0]
    count = len(lost)
    known = np.flatnonzero(sample.labels >= 0)
    measured: dict[str, float] = {}
    if sample.space is not None and len(known) >= FEWEST:
        rights = [sample.space.right_among_all(each[known], sample.labels[known]) for each in (before, after)]
        worse = rights[0].astype(float) - rights[1]
        error = 100 * float(worse.std()) / sqrt(len(known))
        measured = {f"top1_{name}": 100 * float(right.mean()) for name, right in zip(("before", "after"), rights)}
        measured["top1_error"] = error
    return Loss(
        images=count,
        agreement=100 * float((old == new).double().mean()),
        expected=100 * float(lost.mean()),
        expected_error=100 * float(lost.std()) / sqrt(count),
        labeled=len(known),
        **measured,
    )


def read_sample(classifier: Classifier, data: object, *, images: int, training: bool, seed: int = 0) -> Sample:
    """At most so many images of a dataset or a folder, drawn anew by the seed; of its training split if asked for."""
    source, space = opened(data, classifier.model, training=training)
    order = np.random.default_rng(seed).permutation(len(source))[:images]
    size = classifier.model.meta.preprocess.require_one_size("a fast graph")
    shape = (len(order), classifier.model.config.in_channels, *size)
    stored = np.memmap(scratch_folder() / f"pixels{id(order)}.f32", np.float32, "w+", shape=shape)
    unreadable: list[Unreadable] = []
    done: list[int] = []
    reading: Track = partial(track, label="images read")
    for indices, pixels in classifier.run_source(
        Tensor.contiguous, source, order, unreadable=unreadable, track=reading
    ):
        stored[len(done) : len(done) + len(indices)] = pixels.numpy()
        done += indices
    if unreadable:
        print_status(f"note: {len(unreadable):,} images of {source.name} cannot be read and are not used")
    if len(done) < FEWEST:
        raise DataError(f"{source.name}: has {len(done)} images, and at least {FEWEST} are needed to measure a loss")
    known = np.full(len(done), -1) if space is None else space.labels[np.asarray(source.labels())[done]]
    return Sample(name=source.name, pixels=stored[: len(done)], labels=known, space=space)


def opened(data: object, model: Model, *, training: bool) -> tuple[Source, LabelSpace | None]:
    """The images, and what their classes mean where the model has them."""
    try:
        dataset = open_dataset(data)
    except DataError:
        splits = open_images(data)
        return next(iter(splits.values())), None
    name = "train" if training and "train" in dataset.splits else chosen_split(dataset, None)
    try:
        return dataset.splits[name], space_for(dataset.classes, model, ids=None, mappings=None)
    except DataError:
        print_status(
            f"note: the model does not have the classes of {dataset.name}; its own answers are what is compared"
        )
        return dataset.splits[name], None
