"""Checks of images that occur more than once: in two splits, under two labels, or simply twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXACT, EXAMPLES, NEAR, REVIEWED, Example, Finding, Level, image
from vitruvian.data.doctor.scan import BANDS, Bytes, Floats, Places, Scan, hashes, mapped, pieces, same_image, unit
from vitruvian.text import plural

Pair = tuple[int, int]


def check_copies(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """What the groups of same images mean for training."""
    found = [*leaks(scan, groups), *conflicts(scan, groups), *repeats(scan, groups)]
    yield from found
    if len(scan.splits) > 1 and not any(finding.check == "leak" for finding in found):
        yield Finding("no-leak", "fine", f"no image is in two of {', '.join(scan.splits)}")
    if not groups:
        yield Finding("no-copies", "fine", "no two images are the same or nearly the same")


def leaks(scan: Scan, groups: Sequence[Places]) -> Iterator[Finding]:
    """Images of one split that another split has too."""
    for (here, name), (there, other) in combinations(enumerate(scan.splits), 2):
        pairs = [pair for group in groups for pair in partners(scan, group, here, there)]
        if pairs:
            exact = sum(equal(scan, pair) for pair in pairs)
            text = (
                f"{len(pairs):,} of {len(scan.splits[other]):,} {other} images {'is' if len(pairs) == 1 else 'are'} "
                f"also in {name}: {exact:,} as an exact copy, {len(pairs) - exact:,} nearly the same"
            )
            advice = f"delete them from {name} or {other}: the accuracy on {other} would be too good to be true"
            yield finding("leak", "hurts", text, advice, scan, pairs)


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
        text = f"{plural(len(exact), 'image', 'occurs|occur')} twice with different labels"
        yield finding("conflict", "hurts", text, advice, scan, exact)
    if near:
        text = f"{plural(len(near), 'image', 'is|are')} nearly the same as one with another label"
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
            f"{plural(len(pairs), 'image', 'repeats|repeat')} another of the same split and class: "
            f"{exact:,} exactly, {len(pairs) - exact:,} nearly"
        )
        yield finding("duplicate", "look", text, "they count double; delete all but one", scan, pairs)


def finding(check: str, level: Level, text: str, advice: str, scan: Scan, pairs: Sequence[Pair]) -> Finding:
    examples = (
        Example(EXACT if equal(scan, pair) else NEAR, tuple(image(scan, place) for place in pair))
        for pair in pairs[: REVIEWED if check.endswith("conflict") else EXAMPLES]
    )
    return Finding(check, level, text, len(pairs), advice, tuple(examples))


ALIKE = 0.95
"""Cosine of two vectors from which the images are worth a look side by side."""
MOST_COMPARED = 100_000
"""Images up to which all vectors are compared with all."""
ROWS = 1024


def check_alike(scan: Scan, groups: Sequence[Places], vectors: Floats) -> Iterator[Finding]:
    """Images whose vectors (images, D) are nearly the same, beyond those whose pixels are: crops, other frames."""
    known = np.flatnonzero(scan.readable & np.isfinite(vectors[:, 0]))
    if len(known) > MOST_COMPARED:
        text = f"vectors were not compared with each other: {len(known):,} images exceed {MOST_COMPARED:,}"
        yield Finding("alike", "fine", text)
        return
    same = np.arange(len(vectors))
    for group in groups:
        same[group] = group[0]
    pairs = sorted(alike(vectors, known, same), reverse=True)
    if not pairs:
        yield Finding("alike", "fine", f"no other two images have vectors with a cosine of {ALIKE} or more")
        return
    split, label = scan.records["split"], scan.records["label"]
    apart = sum(bool(split[one] != split[two]) for _, one, two in pairs)
    named = sum(bool(label[one] != label[two]) for _, one, two in pairs)
    text = (
        f"{plural(len(pairs), 'more pair', 'has|have')} vectors with a cosine of {ALIKE} or more: {apart:,} in two "
        f"splits, {named:,} with two labels"
    )
    examples = (
        Example(f"cosine {cosine:.3f}", (image(scan, one), image(scan, two))) for cosine, one, two in pairs[:EXAMPLES]
    )
    advice = "crops, flips or other frames of one scene; what is in two splits makes the accuracy too good"
    yield Finding("alike", "look", text, len(pairs), advice, tuple(examples))


def alike(vectors: Floats, known: Places, same: Places) -> Iterator[tuple[float, int, int]]:
    """Cosine and places of pairs that are not of one group, each once."""
    units = unit(np.asarray(vectors[known], np.float32))
    for start in range(0, len(known), ROWS):
        cosines = units[start : start + ROWS] @ units[start:].T
        for row, column in zip(*np.nonzero(np.triu(cosines >= ALIKE, 1))):
            one, two = int(known[start + row]), int(known[start + column])
            if same[one] != same[two]:
                yield float(cosines[row, column]), one, two


def equal(scan: Scan, pair: Pair) -> bool:
    return bool(scan.records["pixels"][pair[0]] == scan.records["pixels"][pair[1]])


CROWD = 32
"""Neighbors that an image is compared with among those that share 16 bits of their hashes with it.

Photographs share them with about 1 in 100,000; only sets of many look-alikes reach the limit, and there a chain
of neighbors joins those that are the same.
"""
FAR_BITS = 28
"""Of 128 bits; further apart, sketches are not compared. Changed copies differ in up to 12."""


def same_groups(pixels: NDArray[np.uint64], sketches: Bytes, among: Places) -> list[Places]:
    """Groups of two or more places, out of `among`, that show the same image, in the order of their first.

    `pixels` are hashes of all pixels of an image. Sketches are compared for one image of each set of copies.
    """
    _, first, which = np.unique(pixels[among], return_index=True, return_inverse=True)
    leader = np.arange(len(pixels))
    leader[among] = among[first[which]]
    singles = among[np.sort(first)]
    for pairs in candidates(mapped(hashes, sketches, singles)):
        roots = roots_of(leader)[singles[pairs]]
        for part in pieces(singles[pairs[roots[:, 0] != roots[:, 1]]]):
            same = same_image(sketches[part[:, 0]], sketches[part[:, 1]])
            for one, two in part[same].tolist():
                low, high = sorted((root_of(leader, one), root_of(leader, two)))
                leader[high] = low
    roots = roots_of(leader)[among]
    order = np.argsort(roots, kind="stable")
    parts = np.split(among[order], np.flatnonzero(np.diff(roots[order])) + 1)
    return [part for part in parts if len(part) > 1]


def candidates(codes: NDArray[np.uint16]) -> Iterator[Places]:  # (N, 8) -> (M, 2), per band and step
    """Pairs that may be the same: 16 bits of their hashes are equal, and few of the others differ.

    Sorting by each band brings equal ones together, so the cost grows with N log N and with the pairs found.
    """
    for band in range(BANDS):
        order = np.lexsort((*codes.T, codes[:, band]))
        sorted_band = codes[order, band]
        for step in range(1, min(CROWD, len(order))):
            where = np.flatnonzero(sorted_band[step:] == sorted_band[:-step])
            if not len(where):
                break
            one, two = order[where], order[where + step]
            different = np.unpackbits(np.ascontiguousarray(codes[one] ^ codes[two]).view(np.uint8), axis=1)
            near = different.sum(1, dtype=np.int64) <= FAR_BITS
            yield np.stack([one[near], two[near]], 1)


def root_of(leader: Places, place: int) -> int:
    while leader[place] != place:
        leader[place] = leader[leader[place]]
        place = int(leader[place])
    return place


def roots_of(leader: Places) -> Places:
    """The first image of every image's group."""
    while True:
        above = leader[leader]
        if np.array_equal(above, leader):
            return leader
        leader = above
