"""The logits of a dataset, stored in a memory-mapped file, so that datasets of any size can be evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.data.decode import Unreadable
from vitruvian.data.sources import Source
from vitruvian.errors import DataError, NotFiniteError
from vitruvian.evaluation.label_spaces import LabelSpace
from vitruvian.inference import NOT_FINITE, Classifier
from vitruvian.progress import Track, no_tracking
from vitruvian.text import printable

# n images that could be read, C classes of the label space

PIECE = 1024
"""Rows that are in memory at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetLogits:
    """The logits of each readable image."""

    indices: NDArray[np.int64]
    """(n,) Indices of the images in the source."""
    labels: NDArray[np.int64]
    """(n,) Their classes in the label space."""
    logits: NDArray[np.float32]
    """(n, C) Not yet divided by a temperature."""
    right_among_all: NDArray[np.bool_]
    """(n,) Whether the best of all outputs of the model means the class."""
    imagenet: NDArray[np.int64]
    """(n,) The best class of ImageNet-1k; empty for models that do not have all of them."""
    unreadable: list[Unreadable]
    left_out: int
    """Number of images of classes that the label space does not have."""

    def __len__(self) -> int:
        return len(self.indices)

    def pieces(self, rows: NDArray[np.int64] | None = None) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Rows, all by default, with their logits in float64, PIECE at a time."""
        rows = np.arange(len(self)) if rows is None else rows
        for start in range(0, len(rows), PIECE):
            part = rows[start : start + PIECE]
            yield part, torch.from_numpy(self.logits[part]).double()


def compute_logits(
    classifier: Classifier,
    source: Source,
    space: LabelSpace,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> DatasetLogits:
    """Run the model on every image of a source whose class is in the label space.

    Raises:
        DataError: No image has a known class, or too many images cannot be read.
        NotFiniteError: The model produced NaN or infinite outputs.
    """
    labels = space.labels[np.asarray(source.labels())]
    known = np.flatnonzero(labels >= 0)
    if not len(known):
        raise DataError("no image has a class that the model knows", where=source.name)
    stored = np.memmap(scratch_folder() / "logits.f32", np.float32, "w+", shape=(len(known), len(space.classes)))
    unreadable: list[Unreadable] = []
    done: list[int] = []
    among_all: list[NDArray[np.bool_]] = []
    imagenet: list[NDArray[np.int64]] = []
    for indices, logits in classifier.run_source(
        classifier.logits, source, known, unreadable=unreadable, batch_size=batch_size, track=track
    ):
        broken = (~logits.isfinite()).any(dim=1).nonzero()
        if len(broken):
            raise NotFiniteError(NOT_FINITE, where=printable(source.key(indices[int(broken[0])])))
        stored[len(done) : len(done) + len(indices)] = space.project(logits).numpy()
        among_all.append(space.right_among_all(logits, labels[indices]))
        if space.has_imagenet:
            imagenet.append(space.imagenet_predictions(logits))
        done += indices
    return DatasetLogits(
        indices=np.array(done),
        labels=labels[done],
        logits=stored[: len(done)],
        right_among_all=np.concatenate(among_all),
        imagenet=np.concatenate(imagenet) if imagenet else np.empty(0, np.int64),
        unreadable=unreadable,
        left_out=len(labels) - len(known),
    )
