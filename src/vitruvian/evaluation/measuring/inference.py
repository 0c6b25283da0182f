"""A model over all images of a source: vectors batch by batch, and its answers kept on disk.

Any number of images can be measured; what cannot be read is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.decode import Unreadable
from vitruvian.data.sources import Source
from vitruvian.data.transform import Transform
from vitruvian.errors import DataError, VitruvianError
from vitruvian.evaluation.measuring.label_spaces import LabelSpace
from vitruvian.inference import NOT_FINITE, Classifier, Encoder
from vitruvian.progress import Track, no_tracking
from vitruvian.tasks import preprocess_for
from vitruvian.text import printable

# B images, F numbers each; n images that could be read, C classes of the label space, K outputs of the model

PIECE = 1024
"""Images whose logits are in memory at a time."""

Any_Encoder = TypeVar("Any_Encoder", bound=Encoder)


def with_task_preprocess(encoder: Any_Encoder, data: object, preprocess: Preprocess | Transform | None) -> Any_Encoder:
    """The encoder with `preprocess` if given, else with the preprocessing of the task that `data` names, if any."""
    default = encoder.preprocess
    if preprocess is None and isinstance(data, str) and isinstance(default, Preprocess):
        preprocess = default.with_changes(preprocess_for(data))
    return encoder if preprocess is None else encoder.with_preprocess(preprocess)


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
    classifier: Classifier,
    source: Source,
    space: LabelSpace,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> Answers:
    truth = space.labels[np.asarray(source.labels())]
    wanted = np.flatnonzero(truth >= 0)
    if not len(wanted):
        raise DataError(f"{source.name}: not one image is of a class that the model knows")
    stored = np.memmap(scratch_folder() / "logits.f32", np.float32, "w+", shape=(len(wanted), len(space.classes)))
    unreadable: list[Unreadable] = []
    run = classifier.run_source(
        classifier.logits, source, wanted, unreadable=unreadable, batch_size=batch_size, track=track
    )
    done: list[int] = []
    among_all: list[NDArray[np.bool_]] = []
    imagenet: list[NDArray[np.int64]] = []
    for indices, logits in run:
        check_finite(source, indices, logits)
        stored[len(done) : len(done) + len(indices)] = space.project(logits).numpy()
        among_all.append(space.right_among_all(logits, truth[indices]))
        if space.has_imagenet:
            imagenet.append(space.imagenet_answers(logits))
        done += indices
    return Answers(
        numbers=np.array(done),
        labels=truth[done],
        logits=stored[: len(done)],
        right_among_all=np.concatenate(among_all),
        imagenet=np.concatenate(imagenet) if imagenet else np.empty(0, np.int64),
        unreadable=dict(unreadable),
        left_out=len(truth) - len(wanted),
    )


def check_finite(source: Source, numbers: list[int], logits: Tensor) -> None:
    broken = (~logits.isfinite()).any(dim=1).nonzero()
    if len(broken):
        key = printable(source.key(numbers[int(broken[0])]))
        raise VitruvianError(NOT_FINITE, where=key)
