"""A model's answers to all images of a source, kept on disk, so that any number of images can be measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.config import BATCH
from vitruvian.data.decode import printable
from vitruvian.data.parallel import Track, untracked
from vitruvian.data.sources.base import Source
from vitruvian.data.sources.cache import scratch_folder
from vitruvian.errors import DataError, VitruvianError
from vitruvian.evaluation.label_spaces import LabelSpace
from vitruvian.evaluation.vectors import Unreadable, images_of, nothing_readable, reasons, vectors
from vitruvian.predict import Classifier

# n images that could be read, C classes of the label space, K outputs of the model

PIECE = 1024
"""Images whose logits are in memory at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answers:
    """What the model said of each image that could be read."""

    numbers: NDArray[np.int64]
    """(n,) The images' numbers in the source."""
    labels: NDArray[np.int64]
    """(n,) Their classes in the label space."""
    logits: NDArray[np.float32]
    """(n, C), mapped from a file; not yet divided by a temperature."""
    right_among_all: NDArray[np.bool_]
    """(n,) Whether the best of all K outputs means the class."""
    imagenet: NDArray[np.int64]
    """(n,) The best class of ImageNet-1k, by number; empty for models that do not have all of them."""
    unreadable: dict[str, str]
    """Why an image is missing, by key."""
    left_out: int
    """Images of classes that the label space does not have."""

    def __len__(self) -> int:
        return len(self.numbers)

    def pieces(self, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Rows, all unless given, with their logits in float64, some at a time."""
        rows = np.arange(len(self)) if rows is None else rows
        for start in range(0, len(rows), PIECE):
            part = rows[start : start + PIECE]
            yield part, torch.from_numpy(self.logits[part]).double()


def answers_of(
    classifier: Classifier, source: Source, space: LabelSpace, *, batch: int = BATCH, track: Track = untracked
) -> Answers:
    """Ask about every image of the label space's classes."""
    truth = space.labels[np.asarray(source.labels())]
    wanted = np.flatnonzero(truth >= 0)
    if not len(wanted):
        raise DataError(f"{source.name}: not one image is of a class that the model knows")
    stored = np.memmap(scratch_folder() / "logits.f32", np.float32, "w+", shape=(len(wanted), len(space.classes)))
    unreadable: Unreadable = {}
    images = track(images_of(source, wanted, unreadable), len(wanted))
    done: list[int] = []
    among_all: list[NDArray[np.bool_]] = []
    imagenet: list[NDArray[np.int64]] = []
    for numbers, logits in vectors(classifier, classifier.logits, images, unreadable=unreadable, batch=batch):
        check_finite(source, numbers, logits)
        stored[len(done) : len(done) + len(numbers)] = space.project(logits).numpy()
        among_all.append(space.right_among_all(logits, truth[numbers]))
        if space.has_imagenet:
            imagenet.append(space.imagenet_answers(logits))
        done += numbers
    if not done:
        raise nothing_readable(source, unreadable)
    return Answers(
        numbers=np.array(done),
        labels=truth[done],
        logits=stored[: len(done)],
        right_among_all=np.concatenate(among_all),
        imagenet=np.concatenate(imagenet) if imagenet else np.empty(0, np.int64),
        unreadable=reasons(source, unreadable),
        left_out=len(truth) - len(wanted),
    )


def check_finite(source: Source, numbers: list[int], logits: Tensor) -> None:
    broken = (~logits.isfinite()).any(dim=1).nonzero()
    if len(broken):
        key = printable(source.key(numbers[int(broken[0])]))
        raise VitruvianError(f"{key}: the model's answer is not a finite number")
