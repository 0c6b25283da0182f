"""A page of thumbnails: what was looked for, and what is near it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitruvian.bulk.merge import Result
from vitruvian.bulk.similar import Neighbor
from vitruvian.data.decode import decode
from vitruvian.data.doctor.page import thumbnail_of
from vitruvian.data.formats import open_images
from vitruvian.errors import DataError
from vitruvian.files import write_text
from vitruvian.report.html import Html, heading, page, paragraph, section, text
from vitruvian.report.images import gallery, thumbnail
from vitruvian.text import printable


def write_neighbors(
    out: Path, images: Sequence[str], texts: Sequence[str], found: Sequence[Sequence[Neighbor]], result: Result
) -> Path:
    """Write the page; the images themselves are read from the data that the job was run on."""
    name = result.job["data"]
    sources = open_images(name, split=result.job["split"])
    if sum(map(len, sources.values())) < result.images:
        raise DataError(f"{name}: no longer the {result.images:,} images that the vectors were made of")

    def shown(neighbor: Neighbor) -> tuple[Html, Html]:
        number = neighbor.index
        for source in sources.values():
            if number < len(source):
                break
            number -= len(source)
        if printable(source.key(number)) != neighbor.key:
            raise DataError(f"{name}: no longer the images that the vectors were made of: {neighbor.key} has moved")
        caption = Html(f"<b>{neighbor.similarity:.3f}</b> {text(neighbor.label or '')}<br>{text(neighbor.key)}")
        return thumbnail_of(source, number), caption

    parts = [heading("Similar images", f"{result.images:,} images of {name}, by {result.job['model']}")]
    asked = [(image, [thumbnail(decode(image), image)]) for image in images] + [(f"“{words}”", []) for words in texts]
    for (name_of, shown_first), neighbors in zip(asked, found):
        parts.append(section(name_of, *shown_first, gallery(map(shown, neighbors))))
        parts.append(paragraph(f"{len(neighbors)} nearest, by the cosine of their features"))
    return write_text(out, page("Similar images", parts))
