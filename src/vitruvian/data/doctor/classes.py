"""Checks of the classes: empty, tiny, unbalanced, or in some splits only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXAMPLES, Example, Finding, counted
from vitruvian.data.doctor.scan import Scan

FEWEST = 5
"""Images of a class below which training would suffer."""
FEW = 20
"""Images of a class below which it is worth a look."""
UNEVEN = 10
"""Images of the largest class over those of the smallest, from which it is worth a look."""
VERY_UNEVEN = 100
"""The same, from which training would suffer."""

Counts = NDArray[np.int64]
"""Readable images of each class in one split."""


def check_classes(scan: Scan, classes: Sequence[str]) -> Iterator[Finding]:
    """The classes of the first split, which is trained on, and then those of the others."""
    records, readable = scan.records, scan.readable
    if not readable.any():
        yield Finding(check="nothing", level="hurts", text="there is no readable image")
        return
    trained, *others = (
        np.bincount(records["label"][readable & (records["split"] == split)], minlength=len(classes))
        for split in range(len(scan.splits))
    )
    name, *other_names = scan.splits
    found = [*small_classes(trained, classes, name), *uneven_classes(trained, classes, name)]
    for other, counts in zip(other_names, others):
        found += one_sided_classes(trained, counts, classes, (name, other))
    yield from found
    if not found:
        everywhere = ", all in every split" if others else ""
        text = f"{len(classes):,} classes of {trained.min():,} to {trained.max():,} images in {name}{everywhere}"
        yield Finding(check="classes", level="fine", text=text)


def small_classes(counts: Counts, classes: Sequence[str], split: str) -> Iterator[Finding]:
    """Classes with no image, and with few."""
    for check, low, high, what, advice in (
        ("empty-class", 0, 1, "no image", "add images or remove the class"),
        ("tiny-class", 1, FEWEST, f"fewer than {FEWEST} images", "add images, or merge classes"),
        ("small-class", FEWEST, FEW, f"fewer than {FEW} images", "add images, or start from published weights"),
    ):
        found = np.flatnonzero((counts >= low) & (counts < high))
        if len(found):
            yield Finding(
                check=check,
                level="look" if check == "small-class" else "hurts",
                count=len(found),
                text=f"{counted(len(found), 'class', 'has|have')} {what} in {split}",
                advice=advice,
                examples=listed(found, counts, classes),
            )


def uneven_classes(counts: Counts, classes: Sequence[str], split: str) -> Iterator[Finding]:
    """The largest class much larger than the smallest that has any image."""
    filled = np.flatnonzero(counts)
    if not len(filled):
        return
    least, most = int(filled[counts[filled].argmin()]), int(counts.argmax())
    ratio = counts[most] / counts[least]
    if ratio >= UNEVEN:
        smallest_first = filled[np.argsort(counts[filled], kind="stable")]
        small = smallest_first[counts[smallest_first] * UNEVEN <= counts[most]]
        yield Finding(
            check="unbalanced",
            level="hurts" if ratio >= VERY_UNEVEN else "look",
            count=len(small),
            text=(
                f"{split} is unbalanced: {classes[most]} has {ratio:.0f} times the images of {classes[least]} "
                f"({counts[most]:,} and {counts[least]:,}; {UNEVEN} times are worth a look, {VERY_UNEVEN} hurt)"
            ),
            advice="train with class weights or balanced sampling, or add images of the small classes",
            examples=listed(small, counts, classes),
        )


def one_sided_classes(
    trained: Counts, held: Counts, classes: Sequence[str], names: tuple[str, str]
) -> Iterator[Finding]:
    """Classes that only one of two splits has."""
    train, other = names
    unlearnt, unmeasured = (np.flatnonzero((a == 0) & (b > 0)) for a, b in ((trained, held), (held, trained)))
    if len(unlearnt):
        text = f"{counted(len(unlearnt), 'class', 'is|are')} in {other} but not in {train}"
        advice = f"add them to {train}: what is not learnt is always answered wrongly"
        shown = listed(unlearnt, held, classes)
        yield Finding(
            check="unlearnt-class", level="hurts", count=len(unlearnt), text=text, advice=advice, examples=shown
        )
    if len(unmeasured):
        text = f"{counted(len(unmeasured), 'class', 'is|are')} in {train} but not in {other}"
        advice = f"move some images to {other}: the accuracy of these classes is not measured"
        shown = listed(unmeasured, trained, classes)
        yield Finding(
            check="unmeasured-class", level="look", count=len(unmeasured), text=text, advice=advice, examples=shown
        )


def listed(found: Iterable[int], counts: Counts, classes: Sequence[str]) -> tuple[Example, ...]:
    return tuple(Example(f"{classes[c]}: {counted(int(counts[c]), 'image')}") for c, _ in zip(found, range(EXAMPLES)))
