"""Vectors of a source's images, batch by batch, through the one inference path; what cannot be read is listed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.decode import ImageInput, RawImage
from vitruvian.data.loader import reason
from vitruvian.data.sources.base import Source
from vitruvian.errors import DataError, ImageError
from vitruvian.predict import Encoder

# B images, F numbers each

LOOK_AHEAD = 256
"""Images by which a slow source learns beforehand what is read."""

Unreadable = dict[int, str]
"""Why an image cannot be used, by its number in the source."""


def reasons(source: Source, unreadable: Unreadable) -> dict[str, str]:
    """Why images cannot be used, by key, in their order."""
    return {source.key(number): why for number, why in sorted(unreadable.items())}


def nothing_readable(source: Source, unreadable: Unreadable) -> DataError:
    """The error of a source without an image that can be used."""
    first = min(unreadable)
    return DataError(f"{source.name}: not one image can be read, such as {source.key(first)}: {unreadable[first]}")


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
    batch: int,
) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of `batch` images and their vectors (B, F), which `function` makes of their views.

    Only images that can be decoded fill a batch, so an interruption after a whole batch does not change the
    later ones.
    """
    waiting: deque[int] = deque()

    def encoded() -> Iterator[ImageInput]:
        for number, image in images:
            if image is not None:
                waiting.append(number)
                yield Image.fromarray(image) if isinstance(image, np.ndarray) else image

    numbers: list[int] = []
    views: list[Tensor] = []
    for name, seen in encoder.views(encoded(), ahead=2 * batch):
        number = waiting.popleft()
        if isinstance(seen, ImageError):
            unreadable[number] = str(seen).removeprefix(f"{name}: ")
            continue
        numbers.append(number)
        views.append(seen)
        if len(views) == batch:
            yield numbers, function(torch.stack(views))
            numbers, views = [], []
    if views:
        yield numbers, function(torch.stack(views))
