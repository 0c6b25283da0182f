"""The images of all splits as one numbered list, read and decoded ahead of the model."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from threading import Lock
from typing import Any

import numpy as np
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import RawImage, decode, reason
from vitruvian.data.preprocess import normalize_levels, resize_and_crop
from vitruvian.data.sources import Source
from vitruvian.data.workers import in_order, in_threads
from vitruvian.errors import ImageError
from vitruvian.predict import DECODERS
from vitruvian.text import printable

AHEAD = 512
"""Images by which a slow source learns beforehand what is read."""
CHUNK = 16
"""Images that a thread or a process reads and decodes at a time."""


@dataclass(slots=True)
class Seen:
    """What is known of some images before the model is asked; a value each."""

    keys: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    errors: list[str | None] = field(default_factory=list)
    """Why an image cannot be read."""
    pixels: list[Tensor] = field(default_factory=list)
    """Of those that can, in order: (B, channels, rows, columns) of images of one size that follow each other."""

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, more: Seen) -> None:
        """Add what is known of more images, without their pixels."""
        self.keys += more.keys
        self.splits += more.splits
        self.labels += more.labels
        self.errors += more.errors


def joined(parts: list[Seen]) -> Seen:
    """One after the other."""
    whole = Seen()
    for part in parts:
        whole.extend(part)
        whole.pixels += part.pixels
    return whole


@dataclass(frozen=True)
class Images:
    """Numbered through all sources, in their order."""

    sources: Mapping[str, Source]
    """By split."""

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.sources.values())))

    def locate(self, number: int) -> tuple[str, Source, int]:
        """Split, source and number there of an image."""
        place = bisect_right(self._ends, number)
        split = list(self.sources)[place]
        return split, self.sources[split], number - (self._ends[place - 1] if place else 0)

    def key(self, number: int) -> str:
        _, source, within = self.locate(number)
        return source.key(within)

    @property
    def remote(self) -> bool:
        return any(source.remote for source in self.sources.values())

    def seen(self, batches: Iterable[range], view: Preprocess, *, workers: int, ahead: int) -> Iterator[Seen]:
        """The images of each batch, read and decoded by processes, or with 0 workers by threads.

        Threads read one image at a time, as a source need not allow more. They are `ahead` images before the model.
        """
        look, sizes = Look(self, view), deque[int]()

        def chunks() -> Iterator[range]:
            for batch in batches:
                sizes.append(len(batch))
                for start in range(0, len(batch), CHUNK):
                    yield batch[start : start + CHUNK]

        found = (
            in_order(look, chunks(), workers=workers)
            if workers
            else in_threads(look, chunks(), threads=DECODERS, ahead=max(ahead // CHUNK, DECODERS + 1))
        )
        batch: list[Seen] = []
        for part in found:
            batch.append(part)
            if sum(map(len, batch)) == sizes[0]:
                sizes.popleft()
                yield joined(batch)
                batch = []


class Look:
    """Calling it with the numbers of images reads and decodes them."""

    def __init__(self, images: Images, view: Preprocess) -> None:
        self.images, self.view = images, view
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Look, (self.images, self.view)

    def __call__(self, numbers: range) -> Seen:
        found, levels = Seen(), []
        self._announce(numbers[0])
        for number in numbers:
            error: str | None = None
            image: RawImage = b""
            split, source, within = self.images.locate(number)
            try:
                with self._lock:
                    image = source.read(within)
                levels.append(resize_and_crop(decode(image), self.view))
            except (ImageError, OSError) as failure:
                error = failure.reason if isinstance(failure, ImageError) else reason(failure)
            found.keys.append(printable(source.key(within)))
            found.splits.append(split)
            found.labels.append(printable(source.classes[source.label(within)]) or None)
            found.errors.append(error)
        for _, same in groupby(levels, key=np.shape):
            found.pixels.append(normalize_levels(np.stack(list(same)), self.view))
        return found

    def _announce(self, number: int) -> None:
        _, source, within = self.images.locate(number)
        if source.blocks is not None:
            source.announce(np.arange(within, min(within + AHEAD, len(source))))
