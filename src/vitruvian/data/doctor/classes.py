"""Checks of the classes (empty, tiny, unbalanced), and of labels that the look of an image speaks against.

For the labels, an image is compared with all others by simple features, or by those of a model. Where images of a
class mostly lie among their own, one that lies among those of another class is worth a look. Where they do not (most
photographs, by simple features), nothing can be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXAMPLES, REVIEWED, Example, Finding, Level, image
from vitruvian.data.doctor.scan import Scan
from vitruvian.data.doctor.sketch import Bytes, Floats, Places, features, mapped, pieces, unit
from vitruvian.text import plural

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
        yield Finding("nothing", "hurts", "there is no readable image")
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
        yield Finding("classes", "fine", text)


def small_classes(counts: Counts, classes: Sequence[str], split: str) -> Iterator[Finding]:
    """Classes with no image, and with few."""
    for check, low, high, what, advice in (
        ("empty-class", 0, 1, "no image", "add images or remove the class"),
        ("tiny-class", 1, FEWEST, f"fewer than {FEWEST} images", "add images, or merge classes"),
        ("small-class", FEWEST, FEW, f"fewer than {FEW} images", "add images, or start from published weights"),
    ):
        found = np.flatnonzero((counts >= low) & (counts < high))
        if len(found):
            level: Level = "look" if check == "small-class" else "hurts"
            text = f"{plural(len(found), 'class', 'has|have')} {what} in {split}"
            yield Finding(check, level, text, len(found), advice, listed(found, counts, classes))


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
        text = (
            f"{split} is unbalanced: {classes[most]} has {ratio:.0f} times the images of {classes[least]} "
            f"({counts[most]:,} and {counts[least]:,}; {UNEVEN} times are worth a look, {VERY_UNEVEN} hurt)"
        )
        level: Level = "hurts" if ratio >= VERY_UNEVEN else "look"
        advice = "train with class weights or balanced sampling, or add images of the small classes"
        yield Finding("unbalanced", level, text, len(small), advice, listed(small, counts, classes))


def one_sided_classes(
    trained: Counts, held: Counts, classes: Sequence[str], names: tuple[str, str]
) -> Iterator[Finding]:
    """Classes that only one of two splits has."""
    train, other = names
    unlearned, unmeasured = (np.flatnonzero((a == 0) & (b > 0)) for a, b in ((trained, held), (held, trained)))
    if len(unlearned):
        text = f"{plural(len(unlearned), 'class', 'is|are')} in {other} but not in {train}"
        advice = f"add them to {train}: what is not learned is always answered wrongly"
        shown = listed(unlearned, held, classes)
        yield Finding("unlearned-class", "hurts", text, len(unlearned), advice, shown)
    if len(unmeasured):
        text = f"{plural(len(unmeasured), 'class', 'is|are')} in {train} but not in {other}"
        advice = f"move some images to {other}: the accuracy of these classes is not measured"
        shown = listed(unmeasured, trained, classes)
        yield Finding("unmeasured-class", "look", text, len(unmeasured), advice, shown)


def listed(found: Iterable[int], counts: Counts, classes: Sequence[str]) -> tuple[Example, ...]:
    return tuple(Example(f"{classes[c]}: {plural(int(counts[c]), 'image')}") for c, _ in zip(found, range(EXAMPLES)))


Labels = NDArray[np.int32]
Looks = Callable[[Places], Floats]
"""Features (N, D) of unit length of the images at some places."""

NEIGHBORS = 10
AGREEING = 8
"""Neighbors of one class that count as an opinion."""
SURE_SHARE = 0.5
"""Share of a class whose neighbors must be of that class before its labels are checked."""
REFERENCES = 10_000
"""Images that all others are compared with, spread evenly over a larger dataset."""
ROWS = 512
"""Images compared with the references at once; bounds the memory."""


class Doubt(NamedTuple):
    """An image among the images of another class."""

    place: int
    agreeing: int
    """How many of its ten neighbors are of that class."""
    neighbors: Places
    """The places of those, likest first."""


def check_labels(scan: Scan, classes: int, vectors: Floats | None = None) -> Iterator[Finding]:
    """Images that lie among those of another class, if the features can tell the two classes.

    `vectors` (images, D) of a model are better features; NaN where an image has none.
    """
    known = scan.readable if vectors is None else scan.readable & np.isfinite(vectors[:, 0])
    looks, what = (
        (partial(sketch_looks, scan.sketches), "edges and colors")
        if vectors is None
        else (partial(vector_looks, vectors), "the vectors")
    )
    checked, doubts = contradicted(looks, scan.records["label"], np.flatnonzero(known))
    apart = f"{what} tell {'all' if checked == classes else f'{checked} of'} {classes} classes apart"
    if doubts:
        text = f"{plural(len(doubts), 'image', 'looks|look')} like another class ({apart})"
        advice = "no proof, but look: the label or the image may be wrong"
        examples = tuple(example(scan, doubt) for doubt in doubts[:REVIEWED])
        yield Finding("label", "look", text, len(doubts), advice, examples)
    elif checked:
        yield Finding("labels", "fine", f"no label looks wrong ({apart})")
    else:
        text = f"single labels were not judged: {what} alone do not tell these classes apart"
        yield Finding("labels", "fine", text)


def example(scan: Scan, doubt: Doubt) -> Example:
    """The doubtful image and its three likest neighbors."""
    images = tuple(image(scan, int(place)) for place in (doubt.place, *doubt.neighbors[:3]))
    return Example(f"{doubt.agreeing} of the {NEIGHBORS} likest images are {images[1].label}", images)


def sketch_looks(sketches: Bytes, places: Places) -> Floats:
    return np.asarray(mapped(features, sketches, places))


def vector_looks(vectors: Floats, places: Places) -> Floats:
    return unit(np.asarray(vectors[places], np.float32))


def contradicted(looks: Looks, labels: Labels, among: Places) -> tuple[int, list[Doubt]]:
    """How many classes were checked, and labels that eight or more of ten neighbors contradict, the worst first.

    `looks` and `labels` are of all images; `among` are the places of those that can be read.
    """
    if len(among) <= NEIGHBORS:
        return 0, []
    mine, near = labels[among], neighbors(looks, among)
    opinion, agreeing = commonest(labels[near])
    total, sure = np.bincount(mine), np.bincount(mine, (opinion == mine) & (agreeing >= AGREEING))
    checked = sure >= SURE_SHARE * np.maximum(total, 1)
    doubtful = (agreeing >= AGREEING) & (opinion != mine) & checked[mine] & checked[opinion]
    rows = sorted(np.flatnonzero(doubtful).tolist(), key=lambda row: (-agreeing[row], row))
    doubts = [Doubt(int(among[row]), int(agreeing[row]), near[row][labels[near[row]] == opinion[row]]) for row in rows]
    return int(checked.sum()), doubts


def neighbors(looks: Looks, among: Places) -> Places:  # (N,) -> (N, 10)
    """The places of each image's ten likest others, likest first."""
    known = among[np.linspace(0, len(among) - 1, min(len(among), REFERENCES)).astype(np.int64)]
    references = looks(known)
    found = np.empty((len(among), NEIGHBORS), np.int64)
    for start, part in zip(range(0, len(among), ROWS), pieces(among, ROWS)):
        likeness = looks(part) @ references.T
        likeness[part[:, None] == known] = -2  # not itself
        found[start : start + ROWS] = known[greatest(likeness)]
    return found


def greatest(values: Floats) -> NDArray[np.int64]:  # (R, M) -> (R, 10)
    """The columns of the ten greatest values of each row, greatest first."""
    best = np.argpartition(-values, NEIGHBORS - 1, axis=1)[:, :NEIGHBORS]
    order = np.argsort(-np.take_along_axis(values, best, 1), axis=1, kind="stable")
    return np.take_along_axis(best, order, 1)


def commonest(labels: Labels) -> tuple[Labels, NDArray[np.int64]]:  # (N, 10) -> (N,), (N,)
    """The commonest label of each row, and how often it occurs."""
    counts = (labels[:, :, None] == labels[:, None, :]).sum(2)
    best = counts.argmax(1)[:, None]
    return np.take_along_axis(labels, best, 1)[:, 0], np.take_along_axis(counts, best, 1)[:, 0]
