"""An example of a source as a small image inside a page."""

from __future__ import annotations

from vitruvian.data.decode import decode
from vitruvian.data.sources.base import Source
from vitruvian.errors import VitruvianError
from vitruvian.report.html import Html
from vitruvian.report.images import thumbnail


def thumbnail_of(source: Source, index: int) -> Html:
    """A small version of an example, or words in its place where it cannot be read any more."""
    try:
        return thumbnail(decode(source.read(index)), source.key(index))
    except (VitruvianError, OSError):
        return Html("no image")
