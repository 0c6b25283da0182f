"""Checks of images (unreadable, blank, unusual), classes (empty, tiny, unbalanced), labels, duplicates and targets."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import Problem
from vitruvian.data.doctor.findings import EXACT, EXAMPLES, NEAR, REVIEWED, Finding, FindingExample, Level, image_ref
from vitruvian.data.doctor.scan import (
    BANDS,
    Bytes,
    Floats,
    Rows,
    Scan,
    Trait,
    chunks,
    is_blank,
    is_gray,
    is_same_image,
    map_sketches,
    perceptual_hashes,
    sketch_features,
    unit,
)
from vitruvian.data.sources import EMPTY_CLASS
from vitruvian.errors import DataError, parsing
from vitruvian.targets import TargetTable
from vitruvian.text import brief, plural

TINY_SIDE = 32  # shorter side, in pixels, below which an image is tiny if it is also below half of the median
LONG_RATIO = 4.0  # aspect ratio from which an image is unusually long
FEW_SHARE = 0.2  # maximum fraction of gray images for which they are reported as unusual
CLASS_HINT = "make sure this does not correlate with a class"

PROBLEMS = {
    # problem: name, verb and rest of the sentence
    Problem.EMPTY: ("empty", "is|are", "empty"),
    Problem.TRUNCATED: ("truncated", "is|are", "truncated"),
    Problem.NOT_AN_IMAGE: ("not-an-image", "is not an image|are not images", ""),
    Problem.BROKEN: ("broken", "cannot|cannot", "be decoded"),
}

TRAITS = {
    # trait: name, verb, rest of the sentence, advice
    Trait.GRAY_END: ("damaged", "ends|end", "in uniform gray, as if data were missing", "check and delete if damaged"),
    Trait.CMYK: ("cmyk", "is|are", "CMYK (print colors)", "converted to RGB without a color profile: colors shift"),
    Trait.DEEP: ("deep", "has|have", "more than 8 bits per channel", "scaled to 8 bits from the range of the format"),
    Trait.ALPHA: ("alpha", "has|have", "transparent parts", f"shown on white: {CLASS_HINT}"),
    Trait.ROTATED: ("turned", "is|are", "rotated by EXIF", "read upright; other programs may ignore the tag"),
    Trait.ANIMATED: ("animated", "has|have", "several frames", "only the first frame is used"),
}

Mask = NDArray[np.bool_]  # which images of a scan


def image_finding(scan: Scan, mask: Mask, check: str, level: Level, text: str, advice: str) -> Iterator[Finding]:
    """A finding about these images, if any; `text` is noun, verb and the rest, such as `image|is|are|gray`."""
    rows = np.flatnonzero(mask)
    if not len(rows):
        return
    noun, one, many, rest = text.split("|")
    examples = []
    for row in rows[:EXAMPLES].tolist():
        size = f"{scan.records['columns'][row]}x{scan.records['rows'][row]} pixels"
        examples.append(FindingExample(scan.reasons.get(row, size), (image_ref(scan, row),)))
    sentence = f"{plural(len(rows), noun, f'{one}|{many}')} {rest}".rstrip()
    yield Finding(check, level, sentence, len(rows), advice, tuple(examples))


def check_files(scan: Scan) -> Iterator[Finding]:
    """Unreadable images, which training skips."""
    for problem, (name, verb, rest) in PROBLEMS.items():
        mask = scan.records["problem"] == problem
        them = "it" if mask.sum() == 1 else "them"
        advice = f"download {them} again or delete {them}; training skips {them}"
        yield from image_finding(scan, mask, name, "problem", f"file|{verb}|{rest}", advice)
    if scan.readable.all():
        yield Finding("readable", "ok", f"all {len(scan.records):,} images can be read")


def check_notes(notes: Sequence[str]) -> Iterator[Finding]:
    """Notes from opening the dataset: skipped files and empty class folders."""
    for note in notes:
        if all(part in note for part in EMPTY_CLASS):
            advice = "add images or delete the folder: the model will not learn this class"
            yield Finding("empty-class", "problem", note, 1, advice)
        else:
            yield Finding("skipped", "warning", note, 1)


def check_kinds(scan: Scan) -> Iterator[Finding]:
    """Images with unusual properties, blank images, and gray images among colored ones."""
    usable, every_row = scan.readable, np.arange(len(scan.records))
    blank = usable & map_sketches(is_blank, scan.sketches, every_row)
    gray = usable & map_sketches(is_gray, scan.sketches, every_row) & ~blank
    unusual = False
    for trait, (name, verb, rest, advice) in TRAITS.items():
        mask = usable & (scan.records["traits"] & trait > 0)
        unusual |= bool(mask.any())
        yield from image_finding(scan, mask, name, "warning", f"image|{verb}|{rest}", advice)
    text = "image|has|have|a single color"
    yield from image_finding(scan, blank, "blank", "warning", text, "delete, unless this is a class")
    if gray.sum() <= FEW_SHARE * usable.sum():
        text = "image|is|are|gray among colored ones"
        yield from image_finding(scan, gray, "gray", "warning", text, f"converted to RGB: {CLASS_HINT}")
    if not unusual and not blank.any():
        yield Finding("kinds", "ok", "no transparency, CMYK, 16-bit, animated, EXIF-rotated or blank images")


def check_sizes(scan: Scan) -> Iterator[Finding]:
    """Images much smaller than the others, and unusually long ones."""
    usable = scan.readable
    if not usable.any():
        return
    rows, columns = scan.records["rows"], scan.records["columns"]
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    median = int(np.median(short[usable]))
    tiny = usable & (short < min(TINY_SIDE, median / 2))
    text = f"image|is|are|tiny: under {TINY_SIDE} pixels (median {median})"
    yield from image_finding(scan, tiny, "tiny", "warning", text, "likely icons or thumbnails: replace or delete")
    stretched = usable & (long >= LONG_RATIO * np.maximum(short, 1))
    text = f"image|has an|have an|aspect ratio of {LONG_RATIO:g} or more"
    yield from image_finding(scan, stretched, "long", "warning", text, "a square crop shows little of them: crop first")
    if not (tiny | stretched).any():
        low, high = int(short[usable].min()), int(short[usable].max())
        sides = f"{low} to {high} pixels (median {median})" if low < high else f"{low} pixels"
        yield Finding("sizes", "ok", f"no unusual sizes: shorter sides of {sides}")


TINY_CLASS = 5  # fewer images in a class than this are a problem
SMALL_CLASS = 20  # fewer images in a class than this are a warning
UNBALANCED = 10  # size ratio of the largest and the smallest class from which there is a warning
VERY_UNBALANCED = 100  # size ratio of the largest and the smallest class from which there is a problem
ClassCounts = NDArray[np.int64]  # readable images of each class in one split


def check_classes(scan: Scan, classes: Sequence[str]) -> Iterator[Finding]:
    """The classes of the first split, which is trained on, and then those of the others."""
    records, readable = scan.records, scan.readable
    if not readable.any():
        yield Finding("nothing", "problem", "no image can be read")
        return
    counts = {
        name: np.bincount(records["label"][readable & (records["split"] == split)], minlength=len(classes))
        for split, name in enumerate(scan.splits)
    }
    findings = [*check_counts(counts, classes)]
    yield from findings
    if not findings:
        train, *others = counts
        low, high = counts[train].min(), counts[train].max()
        everywhere = ", all in every split" if others else ""
        text = f"{len(classes):,} classes of {low:,} to {high:,} images in {train}{everywhere}"
        yield Finding("classes", "ok", text)


def check_counts(counts: dict[str, ClassCounts], classes: Sequence[str]) -> Iterator[Finding]:
    """Small, unbalanced and missing classes, given the counts of each split; the first is trained on."""
    train, *others = counts
    yield from small_classes(counts[train], classes, train)
    yield from unbalanced_classes(counts[train], classes, train)
    for test in others:
        yield from missing_classes(counts, classes, train, test)


def small_classes(counts: ClassCounts, classes: Sequence[str], split: str) -> Iterator[Finding]:
    """Classes without images, and with few."""
    for check, low, high, what, advice in (
        ("empty-class", 0, 1, "no image", "add images or remove the class"),
        ("tiny-class", 1, TINY_CLASS, f"fewer than {TINY_CLASS} images", "add images, or merge classes"),
        ("small-class", TINY_CLASS, SMALL_CLASS, f"fewer than {SMALL_CLASS} images", "add images, or fine-tune"),
    ):
        small = np.flatnonzero((counts >= low) & (counts < high))
        level: Level = "warning" if check == "small-class" else "problem"
        text = f"{plural(len(small), 'class', 'has|have')} {what} in {split}"
        yield from class_finding(check, level, text, advice, small, counts, classes)


def unbalanced_classes(counts: ClassCounts, classes: Sequence[str], split: str) -> Iterator[Finding]:
    """The largest class much larger than the smallest that has any image."""
    filled = np.flatnonzero(counts)
    smallest_first = filled[np.argsort(counts[filled], kind="stable")]
    small = smallest_first[counts[smallest_first] * UNBALANCED <= counts.max(initial=0)]
    if len(small):
        least, most = int(small[0]), int(counts.argmax())
        ratio = counts[most] / counts[least]
        text = (
            f"{split} is unbalanced: {classes[most]} has {ratio:.0f} times the images of {classes[least]} "
            f"({counts[most]:,} and {counts[least]:,}; warning from {UNBALANCED}, problem from {VERY_UNBALANCED})"
        )
        level: Level = "problem" if ratio >= VERY_UNBALANCED else "warning"
        advice = "train with class weights or balanced sampling, or add images of the small classes"
        yield from class_finding("unbalanced", level, text, advice, small, counts, classes)


def missing_classes(counts: dict[str, ClassCounts], classes: Sequence[str], train: str, test: str) -> Iterator[Finding]:
    """Classes that only one of two splits has."""
    add = f"add them to {train}: a class without training images is never predicted"
    move = f"move some images to {test}: the accuracy of these classes is not measured"
    rows: tuple[tuple[str, Level, str, str, str], ...] = (
        ("unlearned-class", "problem", test, train, add),
        ("unmeasured-class", "warning", train, test, move),
    )
    for check, level, present, absent, advice in rows:
        indices = np.flatnonzero((counts[absent] == 0) & (counts[present] > 0))
        text = f"{plural(len(indices), 'class', 'is|are')} in {present} but not in {absent}"
        yield from class_finding(check, level, text, advice, indices, counts[present], classes)


def class_finding(
    check: str, level: Level, text: str, advice: str, indices: Rows, counts: ClassCounts, classes: Sequence[str]
) -> Iterator[Finding]:
    """A finding about these classes, if any."""
    if len(indices):
        notes = (f"{classes[c]}: {plural(int(counts[c]), 'image')}" for c in indices[:EXAMPLES].tolist())
        yield Finding(check, level, text, len(indices), advice, tuple(map(FindingExample, notes)))


# Labels. Each image is compared with all others by simple features, or by those of a model. If images of a class
# mostly have neighbors of their own class, one whose neighbors belong to another class is suspicious. If they do not
# (most photographs, by simple features), nothing can be said about single labels.

Labels = NDArray[np.int32]
Features = Callable[[Rows], Floats]  # features (N, D) of unit length of the images in these rows
NEIGHBORS = 10
AGREEING = 8  # number of neighbors of one other class that makes a label suspicious
SEPARATED_SHARE = 0.5  # fraction of a class whose neighbors must be of that class before its labels are checked
REFERENCES = 10_000  # number of images that all others are compared with, spread evenly over a larger dataset
COMPARED_ROWS = 1024  # number of images compared with the references at once; bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """The labels of the neighbors of N images."""

    name: str  # of the features
    rows: Rows  # (N,) the images
    near: Rows  # (N, 10) their neighbors
    majority: Labels  # (N,) the most common label of the neighbors
    agreeing: NDArray[np.int64]  # (N,) number of neighbors that have it
    checked: Mask  # (classes,) whether the features separate a class from the others


def label_votes(scan: Scan, groups: Sequence[Rows], classes: int, vectors: Floats | None = None) -> Votes | None:
    """Let the neighbors of each image vote on its label; None if there are too few images.

    `vectors` (images, D) of a model are better features; NaN for an image without features. Images of one of the
    `groups` are the same, so they do not vote on each other.
    """
    name, rows, features = known_features(scan, vectors)
    labels = scan.records["label"]
    if len(rows) <= NEIGHBORS:
        return None
    row_labels, near = labels[rows], neighbors(features, rows, group_leaders(len(labels), groups))
    majority, agreeing = most_common(labels[near])
    total = np.bincount(row_labels, minlength=classes)
    sure = np.bincount(row_labels, (majority == row_labels) & (agreeing >= AGREEING), minlength=classes)
    checked = (total > 0) & (sure >= SEPARATED_SHARE * total)
    return Votes(name, rows, near, majority, agreeing, checked)


def check_labels(scan: Scan, votes: Votes | None, advice: str = "") -> Iterator[Finding]:
    """Images whose neighbors belong to another class, if the features separate the two classes.

    A label is suspicious if eight or more of ten neighbors contradict it; the worst come first. `advice` is for data
    whose labels cannot be checked.
    """
    if votes is None or not votes.checked.any():
        why = f"{votes.name} do not separate these classes" if votes else "there are too few images to compare"
        yield Finding("labels", "unchecked", f"labels: {why}", advice=advice if votes else "")
        return
    labels, near, agreeing, checked = scan.records["label"], votes.near, votes.agreeing, votes.checked
    row_labels, majority = labels[votes.rows], votes.majority
    mask = (agreeing >= AGREEING) & (majority != row_labels) & checked[row_labels] & checked[majority]
    suspicious = sorted(np.flatnonzero(mask).tolist(), key=lambda i: (-agreeing[i], i))
    separated = f"{votes.name} separate {'all' if checked.all() else f'{checked.sum()} of'} {len(checked)} classes"
    if not suspicious:
        yield Finding("labels", "ok", f"no suspicious labels ({separated})")
        return
    examples = []
    for i in suspicious[:REVIEWED]:  # the image and its three nearest neighbors
        nearest = near[i][labels[near[i]] == majority[i]][:3]
        images = tuple(image_ref(scan, int(row)) for row in (votes.rows[i], *nearest))
        count = f"all {NEIGHBORS}" if agreeing[i] == NEIGHBORS else f"{agreeing[i]} of {NEIGHBORS}"
        examples.append(FindingExample(f"{count} nearest neighbors are labeled {images[1].label}", images))
    text = f"{plural(len(suspicious), 'image', 'looks|look')} like another class ({separated})"
    advice = "suspicious, not proven: check the label and the image"
    yield Finding("label", "warning", text, len(suspicious), advice, tuple(examples))


def known_features(scan: Scan, vectors: Floats | None) -> tuple[str, Rows, Features]:
    """The name of the features, the readable images that have them, and a function from rows to features."""
    rows = np.flatnonzero(scan.readable)
    if vectors is None:
        return "edges and colors", rows, partial(map_sketches, sketch_features, scan.sketches)
    finite = [part[np.isfinite(vectors[part]).all(axis=1)] for part in chunks(rows)]
    return "the features", np.concatenate([rows[:0], *finite]), lambda part: unit(vectors[part].astype(np.float32))


def group_leaders(count: int, groups: Sequence[Rows]) -> Rows:
    """The first image of the group of each of `count` images; an image in no group is its own."""
    leader = np.arange(count)
    for group in groups:
        leader[group] = group[0]
    return leader


def neighbors(features: Features, rows: Rows, leader: Rows) -> Rows:  # (N,) -> (N, 10)
    """The rows of each image's ten nearest neighbors with another leader, nearest first."""
    known = rows[np.linspace(0, len(rows) - 1, min(len(rows), REFERENCES)).astype(np.int64)]
    references = features(known)
    nearest = np.empty((len(rows), NEIGHBORS), np.int64)
    for start, part in zip(range(0, len(rows), COMPARED_ROWS), chunks(rows, COMPARED_ROWS)):
        similarity = features(part) @ references.T
        similarity[leader[part][:, None] == leader[known]] = -2  # not itself, and no copy of it
        best = np.argpartition(-similarity, NEIGHBORS - 1, axis=1)[:, :NEIGHBORS]
        order = np.argsort(-np.take_along_axis(similarity, best, 1), axis=1, kind="stable")
        nearest[start : start + COMPARED_ROWS] = known[np.take_along_axis(best, order, 1)]
    return nearest


def most_common(labels: Labels) -> tuple[Labels, NDArray[np.int64]]:  # (N, 10) -> (N,), (N,)
    """The most common label of each row, and how often it occurs."""
    counts = (labels[:, :, None] == labels[:, None, :]).sum(2)
    best = counts.argmax(1)[:, None]
    return np.take_along_axis(labels, best, 1)[:, 0], np.take_along_axis(counts, best, 1)[:, 0]


# Suspicious labels by out-of-fold predictions: confident learning (C. Northcutt et al., 2021)

AGAIN = "repeat the cross-validation that wrote it"


def check_predictions(scan: Scan, path: Path) -> Iterator[Finding]:
    """Images that a model which was not trained on them confidently assigns to another class.

    A prediction contradicts a label if its probability is at least the mean that images of the predicted class have
    for their own label.
    """
    names = list(scan.splits)
    rows = {(names[r["split"]], int(r["index"])): row for row, r in enumerate(scan.records)}
    classes = next(iter(scan.splits.values())).classes
    doubtful: list[tuple[int, int, int, float, float]] = []  # row, label, prediction and the probabilities of both
    boundary = parsing(path, DataError, reason="not out-of-fold predictions of this data", hint=AGAIN)
    with boundary, open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        for line in csv.DictReader(file):
            row = rows[line["split"], int(line["index"])]
            image = image_ref(scan, row)
            if image.key != line["path"] or image.label != line["label"]:
                reason = f"{line['path']} is not this image or has another label now"
                raise DataError(reason, where=path, hint=AGAIN)
            probabilities = float(line["label_probability"]), float(line["probability"])
            doubtful.append((row, classes.index(line["label"]), classes.index(line["prediction"]), *probabilities))
    if not doubtful:
        raise DataError("no predictions", where=path, hint=AGAIN)
    where, label, prediction, stated, best = map(np.array, zip(*doubtful))
    sure = np.bincount(label, stated, len(classes)) / np.maximum(np.bincount(label, minlength=len(classes)), 1)
    wrong = np.flatnonzero((prediction != label) & (best >= sure[prediction]))
    if not len(wrong):
        yield Finding("label", "ok", f"no suspicious labels by the predictions for {len(where):,} images")
        return
    examples = []
    for i in wrong[np.argsort(stated[wrong] - best[wrong], kind="stable")][:REVIEWED].tolist():
        alike = np.flatnonzero((label == prediction[i]) & (prediction == label))
        nearest = alike[np.argsort(-stated[alike], kind="stable")][:3]
        images = tuple(image_ref(scan, int(where[j])) for j in (i, *nearest))
        note = f"predicted as {classes[prediction[i]]} with {best[i]:.0%}, as {classes[label[i]]} with {stated[i]:.0%}"
        if len(images) > 1:
            examples.append(FindingExample(note, images))
    text = (
        f"{plural(len(wrong), 'image', 'is|are')} predicted as another class, out of {len(stated):,} images out of fold"
    )
    yield Finding("label", "warning", text, len(wrong), "suspicious, not proven: check the label", tuple(examples))


Pair = tuple[int, int]


def check_copies(scan: Scan, groups: Sequence[Rows], decided: Mapping[int, int]) -> Iterator[Finding]:
    """Findings about groups of rows that show the same image; `decided` from `decide_twins`."""
    findings = [*leaks(scan, groups), *conflicts(scan, groups, decided), *repeats(scan, groups)]
    yield from findings
    if len(scan.splits) > 1 and not any(finding.check == "leak" for finding in findings):
        yield Finding("no-leak", "ok", f"no image is in two of {', '.join(scan.splits)}")
    if not groups:
        yield Finding("no-copies", "ok", "no duplicates or near duplicates")


def leaks(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Images that occur in two splits: pairs of one in the second and one in the first, an exact copy if possible."""
    for (first, name), (second, held) in combinations(enumerate(scan.splits), 2):
        pairs: list[Pair] = []
        for group in groups:
            splits, pixels = scan.records["split"][group], scan.records["pixels"][group]
            partners = np.flatnonzero(splits == first)
            for member in np.flatnonzero(splits == second) if len(partners) else ():
                best = partners[np.argmax(pixels[partners] == pixels[member])]
                pairs.append((int(group[best]), int(group[member])))
        exact = sum(is_exact(scan, pair) for pair in pairs)
        text = (
            f"{len(pairs):,} of {len(scan.splits[held]):,} {held} images {'is' if len(pairs) == 1 else 'are'} also "
            f"in {name} ({exact:,} exact, {len(pairs) - exact:,} near)"
        )
        advice = f"delete them from {name} or {held}: otherwise the accuracy on {held} is too high"
        yield from pair_finding("leak", "problem", text, advice, scan, pairs)


def decide_twins(scan: Scan, groups: Sequence[Rows], votes: Votes | None) -> dict[int, int]:
    """The label that the neighbors of an image with several labels agree on, for each row of its group.

    A group is missing if the neighbors do not agree on one of its labels, or the features do not separate its classes.
    """
    labels, decided = scan.records["label"], dict[int, int]()
    if votes is None:
        return decided
    for group in groups:
        (at,) = np.nonzero(votes.rows == group[0])
        if len(at) and votes.agreeing[at[0]] >= AGREEING and votes.checked[labels[group]].all():
            label = int(votes.majority[at[0]])
            decided |= {int(row): label for row in group if label in labels[group]}
    return decided


def copies_to_drop(scan: Scan, groups: Sequence[Rows], decided: Mapping[int, int]) -> list[int]:
    """The rows to leave out so that every image occurs once with each label; an evaluation split keeps its image.

    Of exact copies with different labels, those with the decided label stay; if there is none, all are left out.
    """
    split, label, pixels = (scan.records[name] for name in ("split", "label", "pixels"))
    dropped = []
    for group in groups:
        labels: set[int] = set()
        for row in sorted(group.tolist(), key=lambda row: (-int(split[row]), row)):
            this_label, same = int(label[row]), group[pixels[group] == pixels[row]]
            is_wrong = bool((label[same] != this_label).any()) and this_label != decided.get(row, -1)
            if is_wrong or this_label in labels:
                dropped.append(row)
            else:
                labels.add(this_label)
    return dropped


def conflicts(scan: Scan, groups: Sequence[Rows], decided: Mapping[int, int]) -> Iterator[Finding]:
    """Same images under different labels; for near duplicates, both labels may be right."""
    exact: list[Pair] = []
    near: list[Pair] = []
    for group in groups:
        labels, pixels = scan.records["label"][group], scan.records["pixels"][group]
        for member in np.flatnonzero(labels != labels[0]):
            others = np.flatnonzero(labels != labels[member])
            equals = others[pixels[others] == pixels[member]]
            partner = (equals if len(equals) else others)[0]
            (exact if len(equals) else near).append((int(group[partner]), int(group[member])))
    advice = "keep the right label, or delete both"
    text = f"{plural(len(exact), 'image', 'occurs|occur')} twice with different labels"
    yield from pair_finding("conflict", "problem", text, advice, scan, exact, decided)
    text = f"{plural(len(near), 'image', 'is a near duplicate|are near duplicates')} of one with another label"
    yield from pair_finding("near-conflict", "warning", text, advice, scan, near, decided)


def repeats(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Images that occur again in the same split with the same label."""
    pairs: list[Pair] = []
    for group in groups:
        first: dict[tuple[int, int], int] = {}
        for row in group.tolist():
            key = int(scan.records["split"][row]), int(scan.records["label"][row])
            if first.setdefault(key, row) != row:
                pairs.append((first[key], row))
    exact = sum(is_exact(scan, pair) for pair in pairs)
    text = (
        f"{plural(len(pairs), 'image', 'repeats|repeat')} another of the same split and class: "
        f"{exact:,} exactly, {len(pairs) - exact:,} nearly"
    )
    yield from pair_finding("duplicate", "warning", text, "they count twice; delete all but one", scan, pairs)


def pair_finding(
    check: str,
    level: Level,
    text: str,
    advice: str,
    scan: Scan,
    pairs: list[Pair],
    decided: Mapping[int, int] = MappingProxyType({}),
) -> Iterator[Finding]:
    """A finding about these pairs of images, if any; `decided` are the labels that the neighbors agree on."""
    if pairs:
        classes = next(iter(scan.splits.values())).classes
        examples = (
            FindingExample(
                EXACT if is_exact(scan, pair) else NEAR,
                tuple(image_ref(scan, row) for row in pair),
                classes[decided[pair[0]]] if pair[0] in decided else "",
            )
            for pair in pairs[: REVIEWED if check.endswith("conflict") else EXAMPLES]
        )
        yield Finding(check, level, text, len(pairs), advice, tuple(examples))


def is_exact(scan: Scan, pair: Pair) -> bool:
    return bool(scan.records["pixels"][pair[0]] == scan.records["pixels"][pair[1]])


SIMILAR = 0.95  # cosine similarity of two vectors from which the images are reported
MAX_COMPARED = 100_000  # number of images up to which all vectors are compared with all


def check_similar(scan: Scan, groups: Sequence[Rows], vectors: Floats) -> Iterator[Finding]:
    """Images with nearly equal vectors (images, D), beyond those with nearly equal pixels: crops, other frames."""
    _, known, features = known_features(scan, vectors)
    if len(known) > MAX_COMPARED:
        text = f"similar pairs: {len(known):,} images exceed the limit of {MAX_COMPARED:,}"
        yield Finding("alike", "unchecked", text)
        return
    leader = group_leaders(len(vectors), groups)
    units, pairs = features(known), list[tuple[float, int, int]]()
    for start in range(0, len(known), COMPARED_ROWS):
        cosines = units[start : start + COMPARED_ROWS] @ units[start:].T
        for i, j in zip(*np.nonzero(np.triu(cosines >= SIMILAR, 1))):
            one, two = int(known[start + i]), int(known[start + j])
            if leader[one] != leader[two]:
                pairs.append((float(cosines[i, j]), one, two))
    pairs.sort(reverse=True)
    if not pairs:
        yield Finding("alike", "ok", f"no other pair of images has a cosine similarity of {SIMILAR} or more")
        return
    split, label = scan.records["split"], scan.records["label"]
    across = sum(bool(split[one] != split[two]) for _, one, two in pairs)
    differ = sum(bool(label[one] != label[two]) for _, one, two in pairs)
    text = (
        f"{plural(len(pairs), 'more pair', 'has|have')} a cosine similarity of {SIMILAR} or more: {across:,} across "
        f"splits, {differ:,} with different labels"
    )
    examples = (
        FindingExample(f"cosine {cosine:.3f}", (image_ref(scan, one), image_ref(scan, two)))
        for cosine, one, two in pairs[:EXAMPLES]
    )
    advice = "crops, flips or other frames of one scene; across splits they make the accuracy too high"
    yield Finding("alike", "warning", text, len(pairs), advice, tuple(examples))


# Groups of the same image. Exact copies have equal hashes of their pixels. Near duplicates are found by locality
# sensitive hashing: sorting by each 16-bit band of the perceptual hashes makes images with an equal band adjacent, and
# only those are compared, first by the other bits, then by their sketches. `leader` has the first image of each one's
# group.

CROWD = 32
"""Neighbors that an image is compared with among those that share a band with it.

Photographs share one with about 1 in 100,000; only sets of many look-alikes reach the limit, and there a chain of
neighbors joins those that are the same.
"""
MAX_BITS = 28  # maximum number of different bits, of 128, between compared images; changed copies differ in up to 12


def same_groups(pixels: NDArray[np.uint64], sketches: Bytes, rows: Rows) -> list[Rows]:
    """Groups of two or more of the given rows that show the same image, in the order of their first.

    `pixels` are hashes of all pixels of an image. Sketches are compared for one image of each set of exact copies.
    """
    _, first, which = np.unique(pixels[rows], return_index=True, return_inverse=True)
    leader = np.arange(len(pixels))
    leader[rows] = rows[first[which]]
    singles = rows[np.sort(first)]
    for pairs in candidate_pairs(map_sketches(perceptual_hashes, sketches, singles)):
        for part in chunks(apart(leader, singles[pairs])):
            same = part[is_same_image(sketches[part[:, 0]], sketches[part[:, 1]])]
            while len(same := apart(leader, same)):
                np.minimum.at(leader, leader[same].max(1), leader[same].min(1))
                while (leader != leader[leader]).any():
                    leader = leader[leader]
    order = np.argsort(leader[rows], kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(leader[rows][order])) + 1)
    return [part for part in parts if len(part) > 1]


def apart(leader: Rows, pairs: Rows) -> Rows:
    """The pairs of images that are not in one group yet."""
    return pairs[leader[pairs[:, 0]] != leader[pairs[:, 1]]]


def candidate_pairs(hashes: NDArray[np.uint16]) -> Iterator[Rows]:  # (N, 8) -> (M, 2), per band and step
    """Pairs of indices that may be the same image: one band of their hashes is equal, and few other bits differ."""
    for band in range(BANDS):
        order = np.lexsort((*hashes.T, hashes[:, band]))
        sorted_band = hashes[order, band]
        for step in range(1, min(CROWD, len(order))):
            where = np.flatnonzero(sorted_band[step:] == sorted_band[:-step])
            if not len(where):
                break
            one, two = order[where], order[where + step]
            different = np.unpackbits(np.ascontiguousarray(hashes[one] ^ hashes[two]).view(np.uint8), axis=1)
            near = different.sum(1, dtype=np.int64) <= MAX_BITS
            yield np.stack([one[near], two[near]], 1)


# Several labels per image, and numbers.
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
        yield from check_counts(counts, names)
        none = int((values == 0).all(axis=1).sum())
        if none:
            text = f"{plural(none, 'image', 'has|have')} no label"
            yield Finding("no-label", "warning", text, none, "all labels count as absent; check that this is intended")
        yield from implied_labels(values, names)
    else:
        yield from far_values(scan, rows, values, names)
    _, known, features = known_features(scan, vectors)
    if len(known) > NEIGHBORS:
        near = neighbors(features, known, group_leaders(len(scan.records), groups))
        values, rows = values[np.isin(rows, known)], known
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
        yield Finding("numbers", "ok", "no value is far from those of the nearest images")
