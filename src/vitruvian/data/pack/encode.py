"""One sample of a dataset in the form in which it is packed, and the choice of that form."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from PIL import Image

from vitruvian.data.decode import RawImage, open_reduced, reason
from vitruvian.data.sources.base import Dataset, Source
from vitruvian.settings import Range, Settings

PackFormat = Literal["auto", "jpeg", "pixels"]

EXACT_PIXELS = 128 * 128
"""Images up to this size lose more than they gain as JPEG, and are kept exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings(Settings):
    """How images are packed."""

    side: Annotated[int, Range(8, 8192)] = 256
    """Pixels of the shorter side; smaller images keep their size."""
    format: PackFormat = "auto"
    """`pixels`: raw, the quickest; `jpeg`: a tenth of the size, half as quick; `auto`: pixels if they fit in memory."""
    quality: Annotated[int, Range(1, 100)] = 90
    """Of JPEG, from 1 to 100."""
    shard_mb: Annotated[int, Range(1, 1_000_000)] = 256
    """Most megabytes of a shard; one image may exceed it alone."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded sample, or the reason why there is none."""

    split: str
    index: int
    key: str
    label: int
    ending: str = ""
    """`.jpg`, `.png` or `.npy`."""
    data: bytes = b""
    reason: str = ""


def encode_one(splits: Mapping[str, Source], settings: PackSettings, place: tuple[str, int]) -> Packed:
    """A sample by split and number; its bytes depend on its image and the settings alone."""
    split, index = place
    source, ending, data, problem = splits[split], "", b"", ""
    try:
        ending, data = encoded(source.read(index), settings)
    except Exception as error:  # sources and Pillow raise whatever broken bytes lead them to
        problem = reason(error)
    return Packed(split, index, source.key(index), source.label(index), ending, data, problem)


def encoded(image: RawImage, settings: PackSettings) -> tuple[str, bytes]:
    """The image, upright and small, as the ending and the content of a file."""
    small, whole = reduced(image, settings.side)
    buffer = io.BytesIO()
    if settings.format == "pixels":
        np.save(buffer, np.asarray(small), allow_pickle=False)
        return ".npy", buffer.getvalue()
    if whole and (not isinstance(image, bytes) or small.width * small.height <= EXACT_PIXELS):
        small.save(buffer, "PNG", compress_level=6)
        return ".png", buffer.getvalue()
    quality, blocks = settings.quality, 1  # a restart marker after every block: `data.jpeg` decodes any part alone
    small.save(buffer, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=blocks)
    return ".jpg", buffer.getvalue()


def reduced(image: RawImage, side: int) -> tuple[Image.Image, bool]:
    """The image with its shorter side at most `side`, gray if it was stored so, and whether it kept its size."""
    opened = open_reduced(image, 2 * side)  # twice: the filter below then makes no use of the decoder's own
    small = opened.upright.convert("L") if opened.stored.mode in ("1", "L") else opened.upright
    shorter = min(opened.size)
    if shorter <= side:
        return small, True
    columns, rows = (max(1, round(length * side / shorter)) for length in opened.size)
    return small.resize((columns, rows), Image.Resampling.BICUBIC), False


MOST_PIXEL_BYTES = 8_000_000_000
"""Size up to which raw pixels are chosen: they stay in the memory of most machines, and then nothing is as quick.

From a disk, JPEG is quicker: at 2,000 images a second, pixels of side 256 need 500 MB a second.
"""

SAMPLE = 64
"""Images of each split that are opened to know how large all are."""


def chosen(data: Dataset, settings: PackSettings) -> PackSettings:
    """The settings with `auto` replaced by the form that suits the data."""
    if settings.format != "auto":
        return settings
    return settings.replace(format="pixels" if pixel_bytes(data, settings.side) <= MOST_PIXEL_BYTES else "jpeg")


def pixel_bytes(data: Dataset, side: int) -> float:
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
