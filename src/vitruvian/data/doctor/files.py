"""Checks of the images one by one: unreadable, blank, damaged, odd in size or kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vitruvian.data.doctor.findings import Finding, about
from vitruvian.data.doctor.scan import Oddity, Problem, Scan
from vitruvian.data.doctor.sketch import is_blank, is_gray, mapped
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
