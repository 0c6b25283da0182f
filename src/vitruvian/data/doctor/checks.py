"""Checks of single images (unreadable, blank, unusual), of classes (empty, tiny, unbalanced) and of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXAMPLES, REVIEWED, Example, Finding, Level, about, image
from vitruvian.data.doctor.scan import (
    Bytes,
    Floats,
    Oddity,
    Places,
    Problem,
    Scan,
    features,
    is_blank,
    is_gray,
    mapped,
    pieces,
    unit,
)
from vitruvian.text import plural

TINY_SIDE = 32
"""Shorter side, in pixels, below which an image is tiny, where the usual one is at least twice as large."""

LONG_RATIO = 4.0
"""Longer side over shorter side from which an image is oddly long."""

FEW_SHARE = 0.2
"""Share of the images up to which a kind (gray, transparent, ...) is the exception."""

PROBLEMS = {
    # problem: name, verb and rest of the sentence
    Problem.EMPTY: ("empty", "is|are", "empty"),
    Problem.TRUNCATED: ("truncated", "is|are", "cut short"),
    Problem.NOT_AN_IMAGE: ("not-an-image", "is|are", "not in a format of images"),
    Problem.BROKEN: ("broken", "cannot|cannot", "be decoded"),
}

ODDITIES = {
    # oddity: name, verb and rest of the sentence, advice
    Oddity.GRAY_END: (
        "damaged",
        "ends|end",
        "in even gray, as if data were missing",
        "look at them, delete the damaged",
    ),
    Oddity.CMYK: ("cmyk", "is|are", "in CMYK, the colors of print", "read as RGB without their profile: colors shift"),
    Oddity.DEEP: ("deep", "has|have", "more than 8 bits a channel", "read as 8 bits, scaled from the format's range"),
    Oddity.ALPHA: ("alpha", "has|have", "transparent parts", "read on white: see that this does not mark a class"),
    Oddity.TURNED: ("turned", "is|are", "to be turned by an EXIF tag", "read upright here; other programs may not"),
    Oddity.ANIMATED: ("animated", "has|have", "several frames", "only the first is used"),
}


def check_files(scan: Scan) -> Iterator[Finding]:
    """Images that cannot be read: each is skipped in training."""
    for problem, (name, verb, rest) in PROBLEMS.items():
        places = np.flatnonzero(scan.records["problem"] == problem)
        if len(places):
            text = f"{plural(len(places), 'file', verb)} {rest}"
            yield about(scan, places, name, "hurts", text, "fetch them again or delete them; training skips them")
    if scan.readable.all():
        yield Finding("readable", "fine", f"all {len(scan.records):,} images can be read")


def check_notes(notes: Sequence[str]) -> Iterator[Finding]:
    """What opening the dataset left out: files that are no images, folders without any."""
    for note in notes:
        if "class folders without an image" in note:
            advice = "add images or delete the folder: the model will not know this class"
            yield Finding("empty-class", "hurts", note, 1, advice)
        else:
            yield Finding("left-out", "look", note, 1)


def check_kinds(scan: Scan) -> Iterator[Finding]:
    """Images of a kind that is read in its own way, blank ones, and gray ones among colored."""
    usable = scan.readable
    everywhere, found = np.arange(len(usable)), list[Finding]()
    for oddity, (name, verb, rest, advice) in ODDITIES.items():
        places = np.flatnonzero(usable & (scan.records["oddity"] & oddity > 0))
        if len(places):
            found.append(about(scan, places, name, "look", f"{plural(len(places), 'image', verb)} {rest}", advice))
    blank = np.flatnonzero(usable & mapped(is_blank, scan.sketches, everywhere))
    if len(blank):
        text = f"{plural(len(blank), 'image', 'shows|show')} one color and nothing else"
        found.append(about(scan, blank, "blank", "look", text, "delete them, unless that is a class of its own"))
    yield from found
    gray = np.setdiff1d(np.flatnonzero(usable & mapped(is_gray, scan.sketches, everywhere)), blank)
    if 0 < len(gray) <= FEW_SHARE * usable.sum():
        text = f"{plural(len(gray), 'image', 'is|are')} gray among colored ones"
        yield about(scan, gray, "gray", "look", text, "read as RGB: see that this does not mark a class")
    if not found:
        yield Finding("kinds", "fine", "no transparency, CMYK, 16 bits, animation, EXIF turns or blanks")


def check_sizes(scan: Scan) -> Iterator[Finding]:
    """Images much smaller than the others, and oddly long ones."""
    usable = scan.readable
    if not usable.any():
        return
    rows, columns = scan.records["rows"], scan.records["columns"]
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    usual = int(np.median(short[usable]))
    tiny = np.flatnonzero(usable & (short < min(TINY_SIDE, usual / 2)))
    if len(tiny):
        text = f"{plural(len(tiny), 'image', 'is|are')} tiny: under {TINY_SIDE} pixels, where {usual} is usual"
        yield about(scan, tiny, "tiny", "look", text, "likely icons or thumbnails: replace or delete them")
    stretched = np.flatnonzero(usable & (long >= LONG_RATIO * np.maximum(short, 1)))
    if len(stretched):
        text = f"{plural(len(stretched), 'image', 'is|are')} {LONG_RATIO:g} or more times as long as wide"
        yield about(scan, stretched, "long", "look", text, "a square view shows little of them: crop them first")
    if not len(tiny) and not len(stretched):
        low, high = int(short[usable].min()), int(short[usable].max())
        sides = f"{low} to {high} pixels, {usual} in the middle" if low < high else f"{low} pixels"
        yield Finding("sizes", "fine", f"no odd sizes: shorter sides of {sides}")


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
