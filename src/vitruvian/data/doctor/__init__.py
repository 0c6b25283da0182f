"""Examine a dataset before training: unreadable files, duplicates, leaks, unbalanced classes, suspicious labels."""

import time
from pathlib import Path

import numpy as np

from vitruvian.data.doctor import checks
from vitruvian.data.doctor.findings import Diagnosis
from vitruvian.data.doctor.scan import Floats, scan
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset
from vitruvian.errors import DataError
from vitruvian.progress import Track, no_tracking
from vitruvian.targets import KINDS

DROPPABLE = ("broken", "duplicates")  # kinds of images that `--drop` leaves out
COMPARE = "compare them by the features of a model: --model W"


def diagnose(
    data: str | Path | Dataset,
    *,
    target: str = "auto",
    vectors: Floats | None = None,
    predictions: str | Path | None = None,
    workers: int = 0,
    track: Track = no_tracking,
) -> Diagnosis:
    """Examine a dataset.

    Args:
        data: A dataset, or what `open_dataset` accepts. Its first split is taken as the training split.
        target: What the images are labeled with, as for `open_dataset`.
        vectors: (images, D) features of all images in the order of the splits, NaN for images without features. They
            improve the checks of labels and of similar images.
        predictions: Out-of-fold predictions for these images (`predictions.csv` of a cross-validation), to find
            suspicious labels with.
        workers: Number of worker processes; it does not change the result.
    """
    start = time.perf_counter()
    dataset = data if isinstance(data, Dataset) else open_dataset(data, target=target, accepts=KINDS)
    total = sum(map(len, dataset.splits.values()))
    if vectors is not None and len(vectors) != total:
        reason = f"{total:,} images, but {len(vectors):,} vectors"
        raise DataError(reason, where=dataset.name, hint="compute the vectors again")
    scanned = scan(dataset.splits, workers=workers, track=track)
    groups = checks.same_groups(scanned.records["pixels"], scanned.sketches, np.flatnonzero(scanned.readable))
    table = next(iter(dataset.splits.values())).targets
    votes = None if table else checks.label_votes(scanned, groups, len(dataset.classes), vectors)
    if table is None:
        labels = [*checks.check_classes(scanned, dataset.classes)]
        if predictions is None:
            labels += checks.check_labels(scanned, votes, "" if vectors is not None else COMPARE)
        else:
            labels += checks.check_predictions(scanned, Path(predictions))
    elif predictions is not None:
        raise DataError("out-of-fold predictions need one label per image", where=dataset.name)
    else:
        labels = [*checks.check_targets(scanned, groups, table, vectors)]
    decided = checks.decide_twins(scanned, groups, votes)
    findings = (
        *checks.check_files(scanned),
        *checks.check_notes(dataset.notes),
        *checks.check_copies(scanned, groups, decided),
        *(() if vectors is None else checks.check_similar(scanned, groups, vectors)),
        *labels,
        *checks.check_kinds(scanned),
        *checks.check_sizes(scanned),
    )
    dropped = np.flatnonzero(~scanned.readable).tolist(), checks.copies_to_drop(scanned, groups, decided)
    records = scanned.records[["split", "index"]]
    return Diagnosis(
        data=dataset.name,
        splits={name: len(source) for name, source in dataset.splits.items()},
        classes=len(dataset.classes),
        bytes=int(scanned.records["bytes"].sum()),
        seconds=round(time.perf_counter() - start, 2),
        findings=findings,
        droppable={
            kind: frozenset((list(scanned.splits)[split], int(index)) for split, index in records[rows].tolist())
            for kind, rows in zip(DROPPABLE, dropped)
        },
    )
