"""Which images of a data set are the same: copies with equal pixels, and near copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.doctor.sketch import BANDS, Bytes, Places, hashes, mapped, pieces, same_image

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
                join(leader, one, two)
    return groups_of(roots_of(leader)[among], among)


def groups_of(roots: Places, among: Places) -> list[Places]:
    """The places that share a root with others, group by group."""
    shared = np.bincount(roots)[roots] > 1 if len(roots) else np.zeros(0, bool)
    roots, among = roots[shared], among[shared]
    order = np.argsort(roots, kind="stable")
    parts = np.split(among[order], np.flatnonzero(np.diff(roots[order])) + 1)
    return [part for part in parts if len(part)]


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
            near = bit_distance(codes[one], codes[two]) <= FAR_BITS
            yield np.stack([one[near], two[near]], 1)


def bit_distance(one: NDArray[np.uint16], two: NDArray[np.uint16]) -> NDArray[np.int64]:
    """How many bits differ, row by row."""
    different = np.unpackbits(np.ascontiguousarray(one ^ two).view(np.uint8), axis=1)
    return np.asarray(different.sum(1, dtype=np.int64))


def join(leader: Places, one: int, two: int) -> None:
    """Put two images and all that is joined to them into one group, led by the first image."""
    one, two = root_of(leader, one), root_of(leader, two)
    leader[max(one, two)] = min(one, two)


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
