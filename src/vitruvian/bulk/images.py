"""The images of all splits as one numbered list, read and decoded ahead of the model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import reason
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.sources import Source
from vitruvian.errors import ImageError
from vitruvian.inference import CHUNK, Loaded
from vitruvian.text import printable

AHEAD = 512
"""Images by which a slow source learns beforehand what is read."""


class RowDetails(NamedTuple):
    """The columns of a result that do not depend on the model."""

    key: str
    split: str
    label: str | None


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


class ReadImages:
    """Reads and preprocesses images by index: the `load` of a job's pipeline, in threads or worker processes."""

    def __init__(self, images: Images, preprocess: Preprocess) -> None:
        self.images, self.preprocess = images, preprocess
        self._lock = Lock()  # a source need not be safe to read from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadImages, (self.images, self.preprocess)

    def __call__(self, position: int, index: int) -> Loaded[RowDetails]:
        split, source, within = self.images.locate(index)
        if source.blocks is not None and position % CHUNK == 0:
            source.announce(np.arange(within, min(within + AHEAD, len(source))))
        pixels: Tensor | ImageError
        try:
            with self._lock:
                image = source.read(within)
            pixels = preprocess_image(image, self.preprocess)
        except (ImageError, OSError) as error:
            pixels = error if isinstance(error, ImageError) else ImageError(reason(error))
        label = printable(source.classes[source.label(within)]) or None
        return RowDetails(printable(source.key(within)), split, label), pixels
