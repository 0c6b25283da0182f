"""An image decoded no larger than needed, where only a small copy of it is wanted."""

from __future__ import annotations

import io
from typing import NamedTuple

from PIL import Image

from vitruvian.data.decode import MAX_PIXELS, identify, orientation, to_rgb
from vitruvian.data.sources.base import RawImage
from vitruvian.errors import ImageError


class Reduced(NamedTuple):
    """An image and what its file says about it."""

    upright: Image.Image
    """RGB, as `decode` gives it; a large JPEG at a half, a quarter or an eighth of its size."""
    stored: Image.Image
    """As Pillow reads it from the file: its mode, format, frames and EXIF tags."""
    size: tuple[int, int]
    """Columns and rows of the whole image, upright."""


def open_reduced(image: RawImage, side: int) -> Reduced:
    """An encoded image, or an array of pixels, with both sides at least `side` pixels if the whole has that.

    All of the file is read, so that a broken one raises here what it raises in `decode`.
    """
    stored = identify(io.BytesIO(image)) if isinstance(image, bytes) else Image.fromarray(image)
    columns, rows = stored.size
    if columns * rows > MAX_PIXELS:
        limit = f"{MAX_PIXELS / 1e6:.0f} million"
        raise ImageError(f"{columns}x{rows} pixels are more than the limit of {limit}; scale it down first")
    stored.draft(None, (side, side))
    stored.load()
    size = (rows, columns) if orientation(stored) > 4 else (columns, rows)
    return Reduced(to_rgb(stored), stored, size)
