"""Suspicious labels by out-of-fold predictions: confident learning (C. Northcutt et al., 2021)."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitruvian.data.doctor.findings import REVIEWED, Finding, FindingExample, image_ref
from vitruvian.data.doctor.scan import Scan
from vitruvian.errors import DataError
from vitruvian.text import plural

HINT = "repeat the cross-validation that wrote it"


def check_predictions(scan: Scan, path: Path) -> Iterator[Finding]:
    """Images that a model which has not seen them puts into another class, at least as surely as images of that class.

    A prediction contradicts a label if its probability is at least the mean that images of the predicted class have
    for their own label.
    """
    names = list(scan.splits)
    rows = {(names[r["split"]], int(r["index"])): row for row, r in enumerate(scan.records)}
    classes = next(iter(scan.splits.values())).classes
    found: list[tuple[int, int, int, float, float]] = []  # row, label, prediction and the probabilities of both
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            for line in csv.DictReader(file):
                row = rows[line["split"], int(line["index"])]
                image = image_ref(scan, row)
                if image.key != line["path"] or image.label != line["label"]:
                    raise DataError(f"{line['path']} is not this image or has another label now", where=path, hint=HINT)
                numbers = float(line["label_probability"]), float(line["probability"])
                found.append((row, classes.index(line["label"]), classes.index(line["prediction"]), *numbers))
    except (KeyError, ValueError, TypeError, csv.Error, OSError) as error:
        raise DataError(f"not out-of-fold predictions of this data ({error})", where=path, hint=HINT) from error
    if not found:
        raise DataError("no predictions", where=path, hint=HINT)
    where, label, prediction, own, best = map(np.array, zip(*found))
    sure = np.bincount(label, own, len(classes)) / np.maximum(np.bincount(label, minlength=len(classes)), 1)
    wrong = np.flatnonzero((prediction != label) & (best >= sure[prediction]))
    if not len(wrong):
        yield Finding("label", "ok", f"no suspicious labels by the predictions for {len(where):,} images")
        return
    examples = []
    for i in wrong[np.argsort(own[wrong] - best[wrong], kind="stable")][:REVIEWED].tolist():
        alike = np.flatnonzero((label == prediction[i]) & (prediction == label))
        nearest = alike[np.argsort(-own[alike], kind="stable")][:3]
        images = tuple(image_ref(scan, int(where[j])) for j in (i, *nearest))
        note = f"predicted as {classes[prediction[i]]} with {best[i]:.0%}, as {classes[label[i]]} with {own[i]:.0%}"
        if len(images) > 1:
            examples.append(FindingExample(note, images))
    text = (
        f"{plural(len(wrong), 'image', 'is|are')} predicted as another class, out of {len(where):,} images out of fold"
    )
    yield Finding("label", "warning", text, len(wrong), "suspicious, not proven: check the label", tuple(examples))
