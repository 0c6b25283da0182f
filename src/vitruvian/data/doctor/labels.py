"""Labels that the look of a picture speaks against.

A picture is compared by simple features with all others. Where pictures of a class mostly lie among their own,
one that lies among those of another class is worth a look. Where they do not (most photographs), nothing can be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXAMPLES, Example, Finding, counted, picture
from vitruvian.data.doctor.scan import Scan
from vitruvian.data.doctor.sketch import Bytes, Floats, Places, features, mapped, pieces

Labels = NDArray[np.int32]

NEIGHBOURS = 10
AGREEING = 8
"""Neighbours of one class that count as an opinion."""
SURE_SHARE = 0.5
"""Share of a class whose neighbours must be of that class before its labels are checked."""
REFERENCES = 10_000
"""Pictures that all others are compared with, spread evenly over a larger data set."""
ROWS = 512
"""Pictures compared with the references at once; bounds the memory."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A picture among the pictures of another class."""

    place: int
    suggested: int
    agreeing: int
    """How many of its ten neighbours are of the suggested class."""
    neighbours: Places
    """The places of those, likest first."""


@dataclass(frozen=True, slots=True)
class LabelCheck:
    """What the look of the pictures says about their labels."""

    checked_classes: tuple[int, ...]
    doubts: tuple[Doubt, ...]


def check_labels(scan: Scan, classes: int) -> Iterator[Finding]:
    """Pictures that lie among those of another class, if the features can tell the two classes."""
    check = contradicted(scan.sketches, scan.records["label"], np.flatnonzero(scan.readable))
    checked, doubts = len(check.checked_classes), check.doubts
    if doubts:
        yield Finding(
            check="label",
            level="look",
            count=len(doubts),
            text=f"{counted(len(doubts), 'picture', 'looks|look')} like another class ({how_far(checked, classes)})",
            advice="no proof, but look: the label or the picture may be wrong",
            examples=tuple(example(scan, doubt) for doubt in doubts[:EXAMPLES]),
        )
    elif checked:
        yield Finding(check="labels", level="fine", text=f"no label looks wrong ({how_far(checked, classes)})")
    else:
        text = "single labels were not judged: edges and colours alone do not tell these classes apart"
        yield Finding(check="labels", level="fine", text=text)


def how_far(checked: int, classes: int) -> str:
    return f"edges and colours tell {'all' if checked == classes else f'{checked} of'} {classes} classes apart"


def example(scan: Scan, doubt: Doubt) -> Example:
    """The doubtful picture and its three likest neighbours."""
    pictures = tuple(picture(scan, int(place)) for place in (doubt.place, *doubt.neighbours[:3]))
    return Example(f"{doubt.agreeing} of the {NEIGHBOURS} likest pictures are {pictures[1].label}", pictures)


def contradicted(sketches: Bytes, labels: Labels, among: Places) -> LabelCheck:
    """Labels that eight or more of a picture's ten neighbours contradict, the most contradicted first.

    `sketches` and `labels` are of all pictures; `among` are the places of those that can be read.
    """
    if len(among) <= NEIGHBOURS:
        return LabelCheck((), ())
    mine, near = labels[among], neighbours(sketches, among)
    opinion, agreeing = commonest(labels[near])
    total, sure = np.bincount(mine), np.bincount(mine, (opinion == mine) & (agreeing >= AGREEING))
    checked = sure >= SURE_SHARE * np.maximum(total, 1)
    doubtful = (agreeing >= AGREEING) & (opinion != mine) & checked[mine] & checked[opinion]
    rows = sorted(np.flatnonzero(doubtful).tolist(), key=lambda row: (-agreeing[row], row))
    doubts = (
        Doubt(int(among[row]), int(opinion[row]), int(agreeing[row]), near[row][labels[near[row]] == opinion[row]])
        for row in rows
    )
    return LabelCheck(tuple(np.flatnonzero(checked).tolist()), tuple(doubts))


def neighbours(sketches: Bytes, among: Places) -> Places:  # (N,) -> (N, 10)
    """The places of each picture's ten likest others, likest first."""
    known = among[np.linspace(0, len(among) - 1, min(len(among), REFERENCES)).astype(np.int64)]
    looks = mapped(features, sketches, known)
    found = np.empty((len(among), NEIGHBOURS), np.int64)
    for start, part in zip(range(0, len(among), ROWS), pieces(among, ROWS)):
        likeness = features(sketches[part]) @ looks.T
        likeness[part[:, None] == known] = -2  # not itself
        found[start : start + ROWS] = known[greatest(likeness)]
    return found


def greatest(values: Floats) -> NDArray[np.int64]:  # (R, M) -> (R, 10)
    """The columns of the ten greatest values of each row, greatest first."""
    best = np.argpartition(-values, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]
    order = np.argsort(-np.take_along_axis(values, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1)


def commonest(labels: Labels) -> tuple[Labels, NDArray[np.int64]]:  # (N, 10) -> (N,), (N,)
    """The commonest label of each row, and how often it occurs."""
    counts = (labels[:, :, None] == labels[:, None, :]).sum(2)
    best = counts.argmax(1)[:, None]
    return np.take_along_axis(labels, best, 1)[:, 0], np.take_along_axis(counts, best, 1)[:, 0]
