"""Checks for images that occur more than once: in two splits, under two labels, or in one class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.findings import EXACT, EXAMPLES, NEAR, REVIEWED, Finding, FindingExample, Level, image_ref
from vitruvian.data.doctor.scan import (
    BANDS,
    Bytes,
    Floats,
    Rows,
    Scan,
    chunks,
    is_same_image,
    map_sketches,
    perceptual_hashes,
    unit,
)
from vitruvian.text import plural

Pair = tuple[int, int]


def check_copies(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Findings about groups of rows that show the same image."""
    findings = [*leaks(scan, groups), *conflicts(scan, groups), *repeats(scan, groups)]
    yield from findings
    if len(scan.splits) > 1 and not any(finding.check == "leak" for finding in findings):
        yield Finding("no-leak", "ok", f"no image is in two of {', '.join(scan.splits)}")
    if not groups:
        yield Finding("no-copies", "ok", "no duplicates or near duplicates")


def leaks(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Images that are in two splits."""
    for (first, name), (second, held) in combinations(enumerate(scan.splits), 2):
        pairs = [pair for group in groups for pair in pairs_between(scan, group, first, second)]
        if pairs:
            exact = sum(is_exact(scan, pair) for pair in pairs)
            text = (
                f"{len(pairs):,} of {len(scan.splits[held]):,} {held} images {'is' if len(pairs) == 1 else 'are'} also "
                f"in {name} ({exact:,} exact, {len(pairs) - exact:,} near)"
            )
            advice = f"delete them from {name} or {held}: otherwise the accuracy on {held} is too high"
            yield pair_finding("leak", "problem", text, advice, scan, pairs)


def pairs_between(scan: Scan, group: Rows, first: int, second: int) -> Iterator[Pair]:
    """Each image of the split `second` in a group, with a partner in `first`: an exact copy if there is one."""
    splits, pixels = scan.records["split"][group], scan.records["pixels"][group]
    partners = np.flatnonzero(splits == first)
    if len(partners):
        for member in np.flatnonzero(splits == second):
            best = partners[np.argmax(pixels[partners] == pixels[member])]
            yield int(group[best]), int(group[member])


def conflicts(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Same images under different labels; for near duplicates, both labels may be right."""
    exact: list[Pair] = []
    near: list[Pair] = []
    for group in groups:
        labels = scan.records["label"][group]
        for member in np.flatnonzero(labels != labels[0]):
            others = np.flatnonzero(labels != labels[member])
            equals = others[scan.records["pixels"][group[others]] == scan.records["pixels"][group[member]]]
            if len(equals):
                exact.append((int(group[equals[0]]), int(group[member])))
            else:
                near.append((int(group[others[0]]), int(group[member])))
    advice = "keep the right label, or delete both"
    if exact:
        text = f"{plural(len(exact), 'image', 'occurs|occur')} twice with different labels"
        yield pair_finding("conflict", "problem", text, advice, scan, exact)
    if near:
        text = f"{plural(len(near), 'image', 'is a near duplicate|are near duplicates')} of one with another label"
        yield pair_finding("near-conflict", "warning", text, advice, scan, near)


def repeats(scan: Scan, groups: Sequence[Rows]) -> Iterator[Finding]:
    """Images that occur again in the same split with the same label."""
    pairs: list[Pair] = []
    for group in groups:
        first: dict[tuple[int, int], int] = {}
        for row in group.tolist():
            key = int(scan.records["split"][row]), int(scan.records["label"][row])
            if key in first:
                pairs.append((first[key], row))
            first.setdefault(key, row)
    if pairs:
        exact = sum(is_exact(scan, pair) for pair in pairs)
        text = (
            f"{plural(len(pairs), 'image', 'repeats|repeat')} another of the same split and class: "
            f"{exact:,} exactly, {len(pairs) - exact:,} nearly"
        )
        yield pair_finding("duplicate", "warning", text, "they count twice; delete all but one", scan, pairs)


def pair_finding(check: str, level: Level, text: str, advice: str, scan: Scan, pairs: Sequence[Pair]) -> Finding:
    examples = (
        FindingExample(EXACT if is_exact(scan, pair) else NEAR, tuple(image_ref(scan, row) for row in pair))
        for pair in pairs[: REVIEWED if check.endswith("conflict") else EXAMPLES]
    )
    return Finding(check, level, text, len(pairs), advice, tuple(examples))


def is_exact(scan: Scan, pair: Pair) -> bool:
    return bool(scan.records["pixels"][pair[0]] == scan.records["pixels"][pair[1]])


SIMILAR = 0.95
"""Cosine similarity of two vectors from which the images are reported."""
MAX_COMPARED = 100_000
"""Number of images up to which all vectors are compared with all."""
COMPARED_ROWS = 1024


def check_similar(scan: Scan, groups: Sequence[Rows], vectors: Floats) -> Iterator[Finding]:
    """Images with nearly equal vectors (images, D), beyond those with nearly equal pixels: crops, other frames."""
    known = np.flatnonzero(scan.readable & np.isfinite(vectors[:, 0]))
    if len(known) > MAX_COMPARED:
        text = f"vectors were not compared with each other: {len(known):,} images exceed {MAX_COMPARED:,}"
        yield Finding("alike", "ok", text)
        return
    leader = np.arange(len(vectors))
    for group in groups:
        leader[group] = group[0]
    pairs = sorted(similar_pairs(vectors, known, leader), reverse=True)
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


def similar_pairs(vectors: Floats, known: Rows, leader: Rows) -> Iterator[tuple[float, int, int]]:
    """Cosine and rows of the pairs that are not in one group, each once."""
    units = unit(np.asarray(vectors[known], np.float32))
    for start in range(0, len(known), COMPARED_ROWS):
        cosines = units[start : start + COMPARED_ROWS] @ units[start:].T
        for i, j in zip(*np.nonzero(np.triu(cosines >= SIMILAR, 1))):
            one, two = int(known[start + i]), int(known[start + j])
            if leader[one] != leader[two]:
                yield float(cosines[i, j]), one, two


# Groups of the same image. Exact copies have equal hashes of their pixels. Near duplicates are found by locality
# sensitive hashing: sorting by each 16-bit band of the perceptual hashes makes images with an equal band adjacent, and
# only those are compared, first by the other bits, then by their sketches. Pairs are joined with a union-find forest,
# in which `leader` points to the first image of a group.

CROWD = 32
"""Neighbors that an image is compared with among those that share a band with it.

Photographs share one with about 1 in 100,000; only sets of many look-alikes reach the limit, and there a chain of
neighbors joins those that are the same.
"""
MAX_BITS = 28
"""Maximum number of different bits, of 128, between compared images; changed copies differ in up to 12."""


def same_groups(pixels: NDArray[np.uint64], sketches: Bytes, rows: Rows) -> list[Rows]:
    """Groups of two or more of the given rows that show the same image, in the order of their first.

    `pixels` are hashes of all pixels of an image. Sketches are compared for one image of each set of exact copies.
    """
    _, first, which = np.unique(pixels[rows], return_index=True, return_inverse=True)
    leader = np.arange(len(pixels))
    leader[rows] = rows[first[which]]
    singles = rows[np.sort(first)]
    for pairs in candidate_pairs(map_sketches(perceptual_hashes, sketches, singles)):
        roots = find_roots(leader)[singles[pairs]]
        for part in chunks(singles[pairs[roots[:, 0] != roots[:, 1]]]):
            same = is_same_image(sketches[part[:, 0]], sketches[part[:, 1]])
            for one, two in part[same].tolist():
                low, high = sorted((find_root(leader, one), find_root(leader, two)))
                leader[high] = low
    roots = find_roots(leader)[rows]
    order = np.argsort(roots, kind="stable")
    parts = np.split(rows[order], np.flatnonzero(np.diff(roots[order])) + 1)
    return [part for part in parts if len(part) > 1]


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


def find_root(leader: Rows, row: int) -> int:
    while leader[row] != row:
        leader[row] = leader[leader[row]]
        row = int(leader[row])
    return row


def find_roots(leader: Rows) -> Rows:
    """The first image of every image's group."""
    while True:
        above = leader[leader]
        if np.array_equal(above, leader):
            return leader
        leader = above
