"""A dataset examined before training: what would hurt, what is worth a look, what is fine."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from vitruvian.data.doctor.checks import check_classes, check_files, check_kinds, check_labels, check_notes, check_sizes
from vitruvian.data.doctor.copies import check_alike, check_copies, same_groups
from vitruvian.data.doctor.findings import Diagnosis, Example, Finding, ImageRef
from vitruvian.data.doctor.scan import Floats, scan
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset
from vitruvian.errors import DataError
from vitruvian.progress import Track, no_tracking

__all__ = ["Diagnosis", "Example", "Finding", "ImageRef", "diagnose"]


def diagnose(
    data: str | Path | Dataset, *, vectors: Floats | None = None, workers: int = 0, track: Track = no_tracking
) -> Diagnosis:
    """Everything the doctor finds in a dataset; the same for any number of worker processes.

    The first split is the one that would be trained on. `vectors` (images, D) are features of all images in the order
    of the splits, NaN for those that have none: they tell more of labels and of images that are alike.
    """
    start = time.perf_counter()
    opened = data if isinstance(data, Dataset) else open_dataset(data)
    total = sum(map(len, opened.splits.values()))
    if vectors is not None and len(vectors) != total:
        raise DataError(f"{opened.name}: {total:,} images, but {len(vectors):,} vectors; make them anew")
    seen = scan(opened.splits, workers=workers, track=track)
    records = seen.records
    groups = same_groups(records["pixels"], seen.sketches, np.flatnonzero(seen.readable))
    findings = (
        *check_files(seen),
        *check_notes(opened.notes),
        *check_copies(seen, groups),
        *(() if vectors is None else check_alike(seen, groups, vectors)),
        *check_classes(seen, opened.classes),
        *check_labels(seen, len(opened.classes), vectors),
        *check_kinds(seen),
        *check_sizes(seen),
    )
    return Diagnosis(
        data=opened.name,
        splits={name: len(source) for name, source in opened.splits.items()},
        classes=len(opened.classes),
        bytes=int(records["bytes"].sum()),
        seconds=round(time.perf_counter() - start, 2),
        findings=findings,
    )
