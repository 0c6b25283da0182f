"""Every image of a dataset looked at once: what it is and shows roughly, or why it cannot be read."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag, auto
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.data.decode import Reduced, open_reduced, orientation, reason
from vitruvian.data.doctor.sketch import SKETCH_BYTES, Bytes, sketch
from vitruvian.data.sources.base import Source
from vitruvian.data.workers import in_order
from vitruvian.progress import Track

CHUNK = 32
"""Images that a worker looks at before it reports."""
KEPT_REASONS = 1000

RECORD = np.dtype(
    [
        ("split", np.uint8),
        ("problem", np.uint8),
        ("oddity", np.uint16),
        ("label", np.int32),
        ("index", np.int64),
        ("rows", np.int32),
        ("columns", np.int32),
        ("bytes", np.int64),
        ("pixels", np.uint64),
    ]
)
"""What is kept of one image in memory; the names are those of Look."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All images of a dataset, split after split, in the order of their sources."""

    splits: Mapping[str, Source]
    records: NDArray[np.void]
    """One RECORD an image."""
    sketches: Bytes
    """One sketch an image, in a temporary file rather than in memory; zeros where the image cannot be read."""
    reasons: dict[int, str]
    """Why an image cannot be read, by its place in `records`; the first thousand only."""

    @property
    def readable(self) -> NDArray[np.bool_]:
        return np.asarray(self.records["problem"] == Problem.NONE)

    def source(self, place: int) -> tuple[str, Source, int]:
        """The split, the source and the number within it of the image at `place`."""
        name = list(self.splits)[self.records["split"][place]]
        return name, self.splits[name], int(self.records["index"][place])


def scan(splits: Mapping[str, Source], *, workers: int, track: Track) -> Scan:
    """Look at every image once; the result does not depend on the number of workers."""
    sources = list(splits.values())
    total = sum(map(len, sources))
    records, reasons = np.zeros(total, RECORD), dict[int, str]()
    with tempfile.TemporaryFile() as file:  # the mapping keeps the file's blocks after it is closed
        sketches = np.memmap(file, np.uint8, "w+", shape=(total, SKETCH_BYTES))
    places = ((split, index) for split, source in enumerate(sources) for index in range(len(source)))
    looks = in_order(partial(look_at, sources), places, workers=workers, chunk=CHUNK)
    for place, look in enumerate(track(looks, total)):
        for name in ("problem", "oddity", "rows", "columns", "bytes", "pixels"):
            records[name][place] = getattr(look, name)
        sketches[place] = look.sketch
        if look.reason and len(reasons) < KEPT_REASONS:
            reasons[place] = look.reason
    start = 0
    for split, source in enumerate(sources):
        part = records[start : start + len(source)]
        part["split"], part["index"], part["label"] = split, np.arange(len(source)), source.labels()
        start += len(source)
    return Scan(splits, records, sketches, reasons)


DRAFT_SIDE = 256
"""JPEG images are decoded at the smallest of their scales whose sides are at least this, in pixels."""


class Problem(IntEnum):
    """Why an image cannot be read."""

    NONE = 0
    EMPTY = auto()
    TRUNCATED = auto()
    NOT_AN_IMAGE = auto()
    BROKEN = auto()


class Oddity(IntFlag):
    """What an image has that others usually have not."""

    NONE = 0
    CMYK = auto()
    DEEP = auto()
    ALPHA = auto()
    TURNED = auto()
    ANIMATED = auto()
    GRAY_END = auto()


@dataclass(kw_only=True, slots=True)
class Look:
    """What is kept of one image."""

    sketch: Bytes
    bytes: int = 0
    columns: int = 0
    rows: int = 0
    oddity: Oddity = Oddity.NONE
    pixels: int = 0
    """A hash of its size and pixels."""
    problem: Problem = Problem.NONE
    reason: str = ""


def look_at(sources: Sequence[Source], place: tuple[int, int]) -> Look:
    """The sample of a source, by their numbers, which may be broken in any way."""
    split, index = place
    look = Look(sketch=np.zeros(SKETCH_BYTES, np.uint8))
    try:
        data = sources[split].read(index)
        look.bytes = len(data) if isinstance(data, bytes) else data.nbytes
        image = open_reduced(data, DRAFT_SIDE)
        look.columns, look.rows = image.size
        look.oddity = oddity_of(image.stored)
        look.pixels = hash_of(image)
        look.sketch = sketch(image.upright)
    except Exception as error:  # sources and Pillow raise whatever broken bytes lead them to
        look.reason = reason(error)
        look.problem = problem_of(look.reason)
    return look


def hash_of(image: Reduced) -> int:
    """64 bits that are equal for images of equal size and pixels."""
    size = f"{image.size} as {image.upright.size}".encode()
    return int.from_bytes(hashlib.blake2b(image.upright.tobytes(), digest_size=8, key=size).digest(), "little")


def oddity_of(image: Image.Image) -> Oddity:
    """What is unusual about a decoded image."""
    signs = {
        Oddity.CMYK: image.mode == "CMYK",
        Oddity.DEEP: image.mode == "F" or image.mode.startswith("I"),
        Oddity.ALPHA: image.has_transparency_data,
        Oddity.TURNED: orientation(image) in range(2, 9),
        Oddity.ANIMATED: has_frames(image),
        Oddity.GRAY_END: image.format == "JPEG" and ends_gray(image),
    }
    return Oddity(sum(oddity for oddity, present in signs.items() if present))


def has_frames(image: Image.Image) -> bool:
    """Whether there is a second frame; the second image that some telephones hide in a JPEG does not count."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except Exception:  # what follows the first frame is broken, and not used
        return True


def ends_gray(image: Image.Image) -> bool:
    """Whether the last eighth of a JPEG is the even gray that decoders put in place of missing data."""
    height = image.height // 8
    if height < 2:
        return False
    end = np.asarray(image.crop((0, image.height - height, image.width, image.height)))
    return bool(end.min() >= 127 and end.max() <= 129 and np.asarray(image).std() > 4)


def problem_of(text: str) -> Problem:
    """The kind of problem that `decode` tells in this line."""
    for words, problem in (
        ("is empty", Problem.EMPTY),
        ("truncated", Problem.TRUNCATED),
        ("cut short", Problem.TRUNCATED),
        ("not an image", Problem.NOT_AN_IMAGE),
        ("this is a", Problem.NOT_AN_IMAGE),
    ):
        if words in text.lower():
            return problem
    return Problem.BROKEN
