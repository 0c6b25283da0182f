"""Every image of a data set looked at once, and the table of what was seen."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.look import Look, Problem, look_at
from vitruvian.data.doctor.sketch import SKETCH_BYTES, Bytes
from vitruvian.data.parallel import Track, in_order
from vitruvian.data.sources.base import Source

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
    """All images of a data set, split after split, in the order of their sources."""

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
    looks = chain.from_iterable(in_order(partial(look_at_some, sources), chunks(sources), workers=workers))
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


def chunks(sources: Sequence[Source]) -> Iterator[tuple[int, range]]:
    for split, source in enumerate(sources):
        for start in range(0, len(source), CHUNK):
            yield split, range(start, min(start + CHUNK, len(source)))


def look_at_some(sources: Sequence[Source], chunk: tuple[int, range]) -> list[Look]:
    split, indices = chunk
    return [look_at(sources[split], index) for index in indices]
