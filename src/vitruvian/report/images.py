"""Images inside a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from vitruvian.files import atomic_open
from vitruvian.report.html import Html, joined, text

THUMBNAIL_SIDE = 240
"""Longest side in pixels: shown at about half of that, for screens of double density."""
TINY_SIDE = 64
"""Images up to here are shown with square pixels instead of being blurred."""
QUALITY = 82


def embedded(image: Image.Image, alt: str, *, kind: str = "", exact: bool = False) -> Html:
    """The whole image as a part of the page: JPEG, or PNG if tiny, transparent or to be shown `exact`ly."""
    exact = exact or image.mode == "RGBA" or max(image.size) <= TINY_SIDE
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


def thumbnail(image: Image.Image, alt: str) -> Html:
    """A small version of an image; the image itself is not changed."""
    small = image.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    return embedded(small, alt, kind="tiny" if max(small.size) <= TINY_SIDE else "")


def figure(image: Html, caption: Html) -> Html:
    """An image in a square frame with the lines below it."""
    return Html(f'<figure><div class="frame">{image}</div><figcaption>{caption}</figcaption></figure>')


def gallery(figures: Iterable[tuple[Html, Html]]) -> Html:
    """Images with the lines below them, as many in a row as the screen has room for."""
    return Html(f'<div class="gallery">\n{joined(figure(image, caption) for image, caption in figures)}\n</div>')


def write_image(path: Path, image: Image.Image) -> Path:
    """Write a PNG that is whole or not there."""
    with atomic_open(path) as file:
        image.save(file, "PNG", optimize=True)
    return path
