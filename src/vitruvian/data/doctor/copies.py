"""Checks of images that occur more than once: in two splits, under two labels, or simply twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXACT, EXAMPLES, NEAR, Example, Finding, Level, counted, image
from vitruvian.data.doctor.scan import Scan
from vitruvian.data.doctor.sketch import Places

Pair = tuple[int, int]


def check_copies(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """What the groups of same images mean for training."""
    found = [*leaks(scan, groups), *conflicts(scan, groups), *repeats(scan, groups)]
    yield from found
    if len(scan.splits) > 1 and not any(finding.check == "leak" for finding in found):
        yield Finding(check="no-leak", level="fine", text=f"no image is in two of {', '.join(scan.splits)}")
    if not groups:
        yield Finding(check="no-copies", level="fine", text="no two images are the same or nearly the same")


def leaks(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """Images of one split that another split has too."""
    for (here, name), (there, other) in combinations(enumerate(scan.splits), 2):
        pairs = [pair for group in groups for pair in partners(scan, group, here, there)]
        if pairs:
            exact = sum(equal(scan, pair) for pair in pairs)
            size = len(scan.splits[other])
            yield Finding(
                check="leak",
                level="hurts",
                count=len(pairs),
                text=(
                    f"{len(pairs):,} of {size:,} {other} images {'is' if len(pairs) == 1 else 'are'} also in {name}: "
                    f"{exact:,} as an exact copy, {len(pairs) - exact:,} nearly the same"
                ),
                advice=f"delete them from {name} or {other}: the accuracy on {other} would be too good to be true",
                examples=shown(scan, pairs),
            )


def partners(scan: Scan, group: Places, here: int, there: int) -> Iterator[Pair]:
    """Each image of the split `there` in the group, with its likest partner in `here`: an equal one if there is."""
    splits, pixels = scan.records["split"][group], scan.records["pixels"][group]
    mine = np.flatnonzero(splits == here)
    if len(mine):
        for place in np.flatnonzero(splits == there):
            best = mine[np.argmax(pixels[mine] == pixels[place])]
            yield int(group[best]), int(group[place])


def conflicts(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """Same images under different labels; for those only nearly the same, the labels may both be right."""
    exact: list[Pair] = []
    near: list[Pair] = []
    for group in groups:
        labels = scan.records["label"][group]
        for place in np.flatnonzero(labels != labels[0]):
            others = np.flatnonzero(labels != labels[place])
            equals = others[scan.records["pixels"][group[others]] == scan.records["pixels"][group[place]]]
            if len(equals):
                exact.append((int(group[equals[0]]), int(group[place])))
            else:
                near.append((int(group[others[0]]), int(group[place])))
    advice = "keep the right label, or delete both"
    if exact:
        text = f"{counted(len(exact), 'image', 'occurs|occur')} twice with different labels"
        yield finding("conflict", "hurts", text, advice, scan, exact)
    if near:
        text = f"{counted(len(near), 'image', 'is|are')} nearly the same as one with another label"
        yield finding("near-conflict", "look", text, advice, scan, near)


def repeats(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """Images that occur again in the same split under the same label."""
    pairs: list[Pair] = []
    for group in groups:
        first: dict[tuple[int, int], int] = {}
        for place in group.tolist():
            where = int(scan.records["split"][place]), int(scan.records["label"][place])
            if where in first:
                pairs.append((first[where], place))
            first.setdefault(where, place)
    if pairs:
        exact = sum(equal(scan, pair) for pair in pairs)
        text = (
            f"{counted(len(pairs), 'image', 'repeats|repeat')} another of the same split and class: "
            f"{exact:,} exactly, {len(pairs) - exact:,} nearly"
        )
        yield finding("duplicate", "look", text, "they count double; delete all but one", scan, pairs)


def finding(check: str, level: Level, text: str, advice: str, scan: Scan, pairs: Sequence[Pair]) -> Finding:
    kept = shown(scan, pairs)
    return Finding(check=check, level=level, count=len(pairs), text=text, advice=advice, examples=kept)


def shown(scan: Scan, pairs: Sequence[Pair]) -> tuple[Example, ...]:
    return tuple(
        Example(EXACT if equal(scan, pair) else NEAR, tuple(image(scan, place) for place in pair))
        for pair in pairs[:EXAMPLES]
    )


def equal(scan: Scan, pair: Pair) -> bool:
    pixels: NDArray[np.uint64] = scan.records["pixels"]
    return bool(pixels[pair[0]] == pixels[pair[1]])
