"""Checks of several labels per image and of numbers: rare, missing, redundant and doubtful ones."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor import checks
from vitruvian.data.doctor.checks import AGREEING, NEIGHBORS, SEPARATED_SHARE
from vitruvian.data.doctor.findings import REVIEWED, Finding, FindingExample, image_ref
from vitruvian.data.doctor.scan import Floats, Rows, Scan
from vitruvian.targets import TargetTable
from vitruvian.text import brief, plural

# N readable images, K labels or numbers: `values` are (N, K), those of the ten nearest images, `near`, (N, 10, K)

IMPLIED = 0.99  # share of a label's images with another label from which the first implies the second
FEW = 20  # images that a label needs before that is said
MANY_LABELS = 500  # above this number of labels, pairs are not compared
FAR = 6.0  # quartile ranges from the median, or deviations from the neighbors, at which a number is doubtful

Values = NDArray[np.float64]


def check_targets(scan: Scan, groups: Sequence[Rows], table: TargetTable, vectors: Floats | None) -> Iterator[Finding]:
    """Findings about the targets of all readable images."""
    rows = np.flatnonzero(scan.readable)
    if not len(rows):
        yield Finding("nothing", "problem", "no image can be read")
        return
    values = table.rows(scan.records["label"][rows])
    names, unknown = table.names, np.isnan(values)
    missing = [f"{name} ({share:.0%})" for name, share in zip(names, unknown.mean(axis=0)) if share > 0]
    if missing:
        text = f"unknown for some images: {brief(missing)}"
        yield Finding("unknown", "warning", text, len(missing), "they are masked")
    if table.kind == "multi":
        split = scan.records["split"][rows]
        counts = {name: (values[split == index] == 1).sum(axis=0) for index, name in enumerate(scan.splits)}
        yield from checks.check_counts(counts, names)
        none = int((values == 0).all(axis=1).sum())
        if none:
            text = f"{plural(none, 'image', 'has|have')} no label"
            yield Finding("no-label", "warning", text, none, "all labels count as absent; check that this is meant")
        yield from implied_labels(values, names)
    else:
        yield from far_values(scan, rows, values, names)
    features = partial(checks.rows_of_sketches, scan.sketches)
    if vectors is not None:  # NaN for an image without features
        has_features = np.isfinite(vectors[rows, 0])
        rows, values, features = rows[has_features], values[has_features], partial(checks.rows_of_vectors, vectors)
    if len(rows) > NEIGHBORS:
        near = checks.neighbors(features, rows, checks.group_leaders(len(scan.records), groups))
        position = np.full(len(scan.records), -1)
        position[rows] = np.arange(len(rows))
        check_cells = doubtful_labels if table.kind == "multi" else doubtful_numbers
        yield from check_cells(scan, rows, values, values[position[near]], names)


def implied_labels(values: Values, names: Sequence[str]) -> Iterator[Finding]:
    """Labels that hardly occur without another."""
    if len(names) > MANY_LABELS:
        return
    present = (values == 1).astype(np.float64)
    both, counts = present.T @ present, present.sum(axis=0)
    implied = (both >= IMPLIED * counts[:, None]) & (counts[:, None] >= FEW) & ~np.eye(len(names), dtype=bool)
    pairs = [f"{names[a]} never without {names[b]}" for a, b in np.argwhere(implied)]
    if pairs:
        text = f"{plural(len(pairs), 'label', 'is|are')} implied by another: {brief(pairs, 3)}"
        advice = "a model cannot tell them apart: add images with one of them, or merge them"
        yield Finding("implied", "warning", text, len(pairs), advice, tuple(map(FindingExample, pairs)))


def far_values(scan: Scan, rows: Rows, values: Values, names: Sequence[str]) -> Iterator[Finding]:
    """Numbers far from the others of their column."""
    low, middle, high = np.nanpercentile(values, [25, 50, 75], axis=0)
    far = np.abs(values - middle) > FAR * np.maximum(high - low, 1e-12)
    cells = np.argwhere(far & (high > low))
    if len(cells):
        text = f"{plural(len(cells), 'value', 'is|are')} far from the others"
        examples = (
            FindingExample(f"{names[k]} {values[i, k]:g}, median {middle[k]:g}", (image_ref(scan, int(rows[i])),))
            for i, k in cells[:REVIEWED]
        )
        yield Finding("far", "warning", text, len(cells), "check their units and typing errors", tuple(examples))


def doubtful_labels(scan: Scan, rows: Rows, values: Values, near: Values, names: Sequence[str]) -> Iterator[Finding]:
    """Labels that most of the nearest images contradict, if the features separate the label from its absence."""
    with_label = (near == 1).sum(axis=1)
    agreed = np.where(values == 1, with_label, (near == 0).sum(axis=1))
    is_sure = [(agreed >= AGREEING) & (values == value) for value in (0, 1)]
    shares = [sure.sum(axis=0) / np.maximum((values == value).sum(axis=0), 1) for value, sure in enumerate(is_sure)]
    checked = (shares[0] >= SEPARATED_SHARE) & (shares[1] >= SEPARATED_SHARE)
    cells = np.argwhere((agreed <= NEIGHBORS - AGREEING) & ~np.isnan(values) & checked)
    if not checked.any():
        yield Finding("labels", "unchecked", "labels: the features do not separate them; --model has better ones")
    elif not len(cells):
        yield Finding("labels", "ok", f"no doubtful labels ({checked.sum()} of {len(names)} can be checked)")
    else:
        examples = tuple(
            FindingExample(
                f"{names[k]} is {'present' if values[i, k] else 'absent'}, unlike in "
                f"{NEIGHBORS - agreed[i, k]} of {NEIGHBORS} nearest images",
                (image_ref(scan, int(rows[i])),),
            )
            for i, k in cells[:REVIEWED]
        )
        doubted = brief([names[k] for k in np.unique(cells[:, 1])])
        text = f"{plural(len(cells), 'label', 'is|are')} doubtful: {doubted}"
        yield Finding("label", "warning", text, len(cells), "not proven: check the label and the image", examples)


def doubtful_numbers(scan: Scan, rows: Rows, values: Values, near: Values, names: Sequence[str]) -> Iterator[Finding]:
    """Numbers far from the median of the nearest images, compared with the usual distance from it."""
    known: NDArray[np.bool_] = np.any(~np.isnan(near), axis=1)
    median = np.nanmedian(np.where(known[:, None, :], near, 0.0), axis=1)
    errors = np.where(known, np.abs(values - median), np.nan)
    cells = np.argwhere(errors > FAR * np.maximum(np.nanmedian(errors, axis=0), 1e-12))
    if len(cells):
        text = f"{plural(len(cells), 'value', 'is|are')} unlike those of the nearest images"
        examples = tuple(
            FindingExample(f"{names[k]} {values[i, k]:g}, nearest {median[i, k]:g}", (image_ref(scan, int(rows[i])),))
            for i, k in cells[:REVIEWED]
        )
        yield Finding("number", "warning", text, len(cells), "not proven: check the value and the image", examples)
    else:
        yield Finding("numbers", "ok", "no value is unlike those of the nearest images")
