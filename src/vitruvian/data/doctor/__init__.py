"""A dataset examined before training: what would hurt, what is worth a look, what is fine."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from vitruvian.data.doctor.classes import check_classes, check_labels
from vitruvian.data.doctor.copies import check_copies, same_groups
from vitruvian.data.doctor.files import check_files, check_kinds, check_notes, check_sizes
from vitruvian.data.doctor.findings import Diagnosis, Example, Finding, ImageRef
from vitruvian.data.doctor.scan import scan
from vitruvian.data.sources import open_dataset
from vitruvian.data.sources.base import Dataset
from vitruvian.progress import Track, untracked

__all__ = ["Diagnosis", "Example", "Finding", "ImageRef", "diagnose"]


def diagnose(data: str | Path | Dataset, *, workers: int = 0, track: Track = untracked) -> Diagnosis:
    """Everything the doctor finds in a dataset; the same for any number of worker processes.

    The first split is the one that would be trained on.
    """
    start = time.perf_counter()
    opened = data if isinstance(data, Dataset) else open_dataset(data)
    seen = scan(opened.splits, workers=workers, track=track)
    records = seen.records
    groups = same_groups(records["pixels"], seen.sketches, np.flatnonzero(seen.readable))
    findings = (
        *check_files(seen),
        *check_notes(opened.notes),
        *check_copies(seen, groups),
        *check_classes(seen, opened.classes),
        *check_labels(seen, len(opened.classes)),
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
