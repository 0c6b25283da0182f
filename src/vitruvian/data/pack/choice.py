"""Which form a data set is packed in, where that is left open."""

from __future__ import annotations

from vitruvian.data.pack.encode import PackSettings, reduced
from vitruvian.data.sources.base import DataSet

MOST_PIXEL_BYTES = 8_000_000_000
"""Size up to which raw pixels are chosen: they stay in the memory of most machines, and then nothing is as quick.

From a disk, JPEG is quicker: at 2,000 images a second, pixels of side 256 need 500 MB a second.
"""

SAMPLE = 64
"""Images of each split that are opened to know how large all are."""


def chosen(data: DataSet, settings: PackSettings) -> PackSettings:
    """The settings with `auto` replaced by the form that suits the data."""
    if settings.format != "auto":
        return settings
    return settings.replace(format="pixels" if pixel_bytes(data, settings.side) <= MOST_PIXEL_BYTES else "jpeg")


def pixel_bytes(data: DataSet, side: int) -> float:
    """About how many bytes the raw pixels of all images would take."""
    total = 0.0
    for source in data.splits.values():
        step = 1 if source.blocks else max(1, len(source) // SAMPLE)  # a remote source: what comes together
        sizes = []
        for index in range(0, len(source), step)[:SAMPLE]:
            try:
                image, _ = reduced(source.read(index), side)
            except Exception:  # counted and listed when its turn comes
                continue
            sizes.append(image.width * image.height * len(image.getbands()))
        total += len(source) * sum(sizes) / max(1, len(sizes))
    return total
