"""Images inside a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

from PIL import Image

from vitruvian.data.decode import decode
from vitruvian.data.sources.base import RawImage, Source
from vitruvian.errors import VitruvianError
from vitruvian.evaluation.page import Html, joined, text

THUMBNAIL_SIDE = 240
"""Longest side in pixels: shown at about half of that, for screens of double density."""
TINY_SIDE = 64
"""Images up to here are shown with square pixels instead of being blurred."""
QUALITY = 82


def embedded(image: Image.Image, alt: str, *, kind: str = "") -> Html:
    """The whole image as a part of the page: JPEG, or PNG where it is tiny or has transparent parts."""
    exact = image.mode == "RGBA" or max(image.size) <= TINY_SIDE
    buffer = io.BytesIO()
    if exact:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=QUALITY)
    data = base64.b64encode(buffer.getvalue()).decode()
    return Html(
        f'<img{f" class={kind!r}" if kind else ""} alt="{text(alt)}" '
        f'width="{image.width}" height="{image.height}" src="data:image/{"png" if exact else "jpeg"};base64,{data}">'
    )


def thumbnail(image: RawImage, alt: str) -> Html:
    """A small version of an image as a source reads it; ImageError where it cannot be decoded."""
    small = decode(image if isinstance(image, bytes) else Image.fromarray(image))
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return embedded(small, alt, kind="tiny" if max(small.size) <= TINY_SIDE else "")


def thumbnail_of(source: Source, index: int) -> Html:
    """A small version of an example, or words in its place where it cannot be read any more."""
    try:
        return thumbnail(source.read(index), source.key(index))
    except (VitruvianError, OSError):
        return Html("no image")


def gallery(figures: Iterable[tuple[Html, Html]]) -> Html:
    """Images with the lines below them, as many in a row as the screen has room for."""
    each = (
        Html(f'<figure><div class="frame">{image}</div><figcaption>{caption}</figcaption></figure>')
        for image, caption in figures
    )
    return Html(f'<div class="gallery">\n{joined(each)}\n</div>')
