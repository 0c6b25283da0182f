"""Vectors of a source's pictures, batch by batch, through the one inference path; what cannot be read is listed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.decode import Source as DecodeSource
from vitruvian.data.loader import reason
from vitruvian.data.sources.base import Picture, Source
from vitruvian.errors import DataError, ImageError
from vitruvian.predict import Encoder

# B pictures, F numbers each

LOOK_AHEAD = 256
"""Pictures by which a slow source learns beforehand what is read."""

Unreadable = dict[int, str]
"""Why a picture cannot be used, by its number in the source."""


def reasons(source: Source, unreadable: Unreadable) -> dict[str, str]:
    """Why pictures cannot be used, by key, in their order."""
    return {source.key(number): why for number, why in sorted(unreadable.items())}


def nothing_readable(source: Source, unreadable: Unreadable) -> DataError:
    """The error of a source without a picture that can be used."""
    first = min(unreadable)
    return DataError(f"{source.name}: not one picture can be read, such as {source.key(first)}: {unreadable[first]}")


def pictures_of(
    source: Source, numbers: NDArray[np.int64], unreadable: Unreadable
) -> Iterator[tuple[int, Picture | None]]:
    """Pictures with these numbers, in order; None, and a line in `unreadable`, where one cannot be read."""
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
    pictures: Iterable[tuple[int, Picture | None]],
    *,
    unreadable: Unreadable,
    batch: int,
) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of `batch` pictures and their vectors (B, F), which `function` makes of their views.

    Only pictures that can be decoded fill a batch, so an interruption after a whole batch does not change the
    later ones.
    """
    waiting: deque[int] = deque()

    def encoded() -> Iterator[DecodeSource]:
        for number, picture in pictures:
            if picture is not None:
                waiting.append(number)
                yield Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture

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
