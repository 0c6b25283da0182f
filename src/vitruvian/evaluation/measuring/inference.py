"""A model over all images of a source: vectors batch by batch, and its answers kept on disk.

Any number of images can be measured; what cannot be read is listed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.decode import RawImage, reason
from vitruvian.data.sources import Source
from vitruvian.data.transform import Transform
from vitruvian.errors import DataError, ImageError, VitruvianError
from vitruvian.evaluation.measuring.label_spaces import LabelSpace
from vitruvian.model.cores import map_over_shapes
from vitruvian.predict import Classifier, Encoder
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import BatchSize, validate
from vitruvian.tasks import preprocess_for
from vitruvian.text import printable

# B images, F numbers each; n images that could be read, C classes of the label space, K outputs of the model

PIECE = 1024
"""Images whose logits are in memory at a time."""
MAX_UNREADABLE = 0.25
"""Share of images that may be unreadable before there is no result."""
LOOK_AHEAD = 256
"""Images by which a slow source learns beforehand what is read."""

Unreadable = dict[int, str]
"""Why an image cannot be used, by its number in the source."""


Any_Encoder = TypeVar("Any_Encoder", bound=Encoder)


def with_view(encoder: Any_Encoder, data: object, view: Preprocess | Transform | None) -> Any_Encoder:
    """The encoder with the view that was asked for, or else with what belongs to the task that `data` names."""
    own = encoder.seen_as
    if view is None and isinstance(data, str) and isinstance(own, Preprocess):
        view = own.changed(preprocess_for(data))
    return encoder if view is None else encoder.with_view(view)


def reasons(source: Source, unreadable: Unreadable) -> dict[str, str]:
    """Why images cannot be used, by key, in their order."""
    return {source.key(number): why for number, why in sorted(unreadable.items())}


def check_readable(source: Source, unreadable: Unreadable, wanted: int) -> None:
    """Refuse a result over what is left where too many of the `wanted` images cannot be read."""
    count = len(unreadable)
    if count > MAX_UNREADABLE * wanted:
        first = min(unreadable)
        some = f"{count:,} of {wanted:,} images cannot be read, more than {MAX_UNREADABLE:.0%}"
        found = "not one image can be read" if count == wanted else some
        raise DataError(f"{source.name}: {found}, such as {source.key(first)}: {unreadable[first]}")


def images_of(
    source: Source, numbers: NDArray[np.int64], unreadable: Unreadable
) -> Iterator[tuple[int, RawImage | None]]:
    """Images with these numbers, in order; None, and a line in `unreadable`, where one cannot be read."""
    for place, number in enumerate(numbers.tolist()):
        if source.blocks is not None and place % LOOK_AHEAD == 0:
            source.announce(numbers[place : place + 2 * LOOK_AHEAD])
        try:
            yield number, source.read(number)
        except (ImageError, OSError) as error:
            unreadable[number] = reason(error)
            yield number, None


def vectors(
    encoder: Encoder,
    function: Callable[[Tensor], Tensor],
    images: Iterable[tuple[int, RawImage | None]],
    *,
    unreadable: Unreadable,
    batch_size: int,
) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of `batch` images and their vectors (B, F), which `function` makes of their views.

    Only images that can be decoded fill a batch, so an interruption after a whole batch does not change the
    later ones.
    """
    waiting: deque[int] = deque()

    def encoded() -> Iterator[RawImage]:
        for number, image in images:
            if image is not None:
                waiting.append(number)
                yield image

    numbers: list[int] = []
    views: list[Tensor] = []
    validate("batch_size", BatchSize, batch_size)
    for _, seen in encoder.views(encoded(), ahead=2 * batch_size):
        number = waiting.popleft()
        if isinstance(seen, ImageError):
            unreadable[number] = seen.reason
            continue
        numbers.append(number)
        views.append(seen)
        if len(views) == batch_size:
            yield numbers, map_over_shapes(function, views)
            numbers, views = [], []
    if views:
        yield numbers, map_over_shapes(function, views)


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
    unreadable: Unreadable = {}
    images = track(images_of(source, wanted, unreadable), len(wanted))
    done: list[int] = []
    among_all: list[NDArray[np.bool_]] = []
    imagenet: list[NDArray[np.int64]] = []
    for numbers, logits in vectors(classifier, classifier.logits, images, unreadable=unreadable, batch_size=batch_size):
        check_finite(source, numbers, logits)
        stored[len(done) : len(done) + len(numbers)] = space.project(logits).numpy()
        among_all.append(space.right_among_all(logits, truth[numbers]))
        if space.has_imagenet:
            imagenet.append(space.imagenet_answers(logits))
        done += numbers
    check_readable(source, unreadable, len(wanted))
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
