"""Images of one dataset that are also in others, and what is on both sides of a split: accuracies become too high."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitruvian.data.decode import RawImage, decode
from vitruvian.data.doctor.checks import is_exact, same_groups
from vitruvian.data.doctor.corrections import write_manifest
from vitruvian.data.doctor.findings import EXACT, NEAR, SHOWN, ImageRef, image_ref
from vitruvian.data.doctor.scan import scan
from vitruvian.data.formats import open_dataset, open_images
from vitruvian.data.groups import GROUP_COLUMN, values_by
from vitruvian.data.sources import DerivedSource, Source
from vitruvian.errors import DataError
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Record
from vitruvian.targets import KINDS
from vitruvian.text import plural, printable

MIRRORED = "mirror image"


@dataclass(frozen=True, slots=True)
class Match:
    """An image of the examined dataset, its copy in another dataset, and whether that is exact, near or mirrored."""

    image: ImageRef
    copy: ImageRef
    against: str
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap(Record):
    """The images of a dataset that are also in others."""

    data: str
    images: int
    against: dict[str, int]  # number of images compared with, by dataset
    unreadable: int  # images of all datasets that could not be compared
    matches: tuple[Match, ...]  # one for each image of `data` that occurs in another dataset

    def report(self) -> Iterator[str]:
        """The lines of the report."""
        yield printable(f"{self.data}: {plural(self.images, 'image')}, {len(self.matches):,} also in other datasets")
        for name, size in self.against.items():
            matches = [match for match in self.matches if match.against == name]
            notes = Counter(match.note for match in matches)
            counts = ", ".join(f"{note} {notes[note]:,}" for note in (EXACT, NEAR, MIRRORED))
            yield printable(f"  {name}: {len(matches):,}, compared with {plural(size, 'image')} ({counts})")
            for match in matches[:SHOWN]:
                yield printable(f"    {match.image.key}  ≈  {match.copy.key}  ({match.note})")
            if len(matches) > SHOWN:
                yield f"    and {len(matches) - SHOWN:,} more"
        if self.unreadable:
            yield f"  {plural(self.unreadable, 'image')} could not be read"


class Mirrored(DerivedSource):
    """The images of a source, flipped left to right."""

    def read(self, index: int) -> RawImage:
        return np.ascontiguousarray(np.asarray(decode(self.source.read(index)))[:, ::-1])


def find_overlap(
    data: str | Path, against: Sequence[str | Path], *, workers: int = 0, track: Track = no_tracking
) -> Overlap:
    """Find images of a dataset that are copies, near duplicates or mirror images of images in other datasets.

    Args:
        data: The dataset to clean, such as one for pre-training.
        against: Test sets. Of a dataset with several splits, all but `train` are used.
        workers: Number of worker processes; it does not change the result.
    """
    dataset = open_dataset(data, accepts=KINDS)
    if not against:
        raise DataError("no dataset to compare with", where=dataset.name)
    examined, others = dict(dataset.splits), list[tuple[str, Source]]()  # the others by the names of their datasets
    for test in against:
        parts = open_images(test)
        chosen = {split: source for split, source in parts.items() if split != "train"} or parts
        others += [(str(test), source) for source in chosen.values()]
    # Splits of one scan: those of the data, then each test split and its mirror image.
    splits = {f"data {name}": source for name, source in examined.items()}
    for position, (_, source) in enumerate(others):
        splits |= {f"test {position}": source, f"mirror {position}": Mirrored(source)}
    scanned = scan(splits, workers=workers, track=track)
    split, readable = scanned.records["split"].astype(int), scanned.readable
    is_test = split >= len(examined)
    is_mirror = is_test & ((split - len(examined)) % 2 == 1)
    matches = []
    for group in same_groups(scanned.records["pixels"], scanned.sketches, np.flatnonzero(readable)):
        tests = group[is_test[group]]
        for row in group[~is_test[group]].tolist() if len(tests) else ():
            # an exact copy rather than a near one, and either rather than a mirror image
            best = min(tests.tolist(), key=lambda test: (not is_exact(scanned, (row, test)), bool(is_mirror[test])))
            note = MIRRORED if is_mirror[best] else EXACT if is_exact(scanned, (row, best)) else NEAR
            image, copy = image_ref(scanned, row), image_ref(scanned, best)
            name = others[(int(split[best]) - len(examined)) // 2][0]
            plain = dataclasses.replace(image, split=image.split.removeprefix("data "))
            matches.append(Match(plain, dataclasses.replace(copy, split=name), name, note))
    sizes = {name: sum(len(source) for test, source in others if test == name) for name, _ in others}
    return Overlap(
        data=dataset.name,
        images=sum(map(len, examined.values())),
        against=sizes,
        unreadable=int((~readable & ~is_mirror).sum()),
        matches=tuple(matches),
    )


def write_clean(data: str | Path, overlap: Overlap, out: Path) -> int:
    """Write a manifest of the dataset without the matched images; returns the number of images in it.

    Args:
        data: A folder of images, or a manifest: that of `overlap`.
        overlap: From `find_overlap`.
        out: The new manifest, in a folder above the images.
    """
    removed = {(match.image.split, match.image.index) for match in overlap.matches}
    return write_manifest(data, out, lambda position, label: None if position in removed else label)


MOST_COMPARED = 5000  # number of images up to which near duplicates are looked for; they have to be read for that


def split_notes(
    train: Source, held: Source, held_is: str, group_by: str = "", track: Track = no_tracking
) -> Iterator[str]:
    """Notes on groups and near duplicates that are on both sides of a split.

    Args:
        train: The training images.
        held: The images that are measured.
        held_is: Description of them, such as "the split 'val'".
        group_by: As for `hold_out_groups`, which never divides a group; given splits may.
        track: Wraps the iterator over images to show progress.
    """
    by = group_by or GROUP_COLUMN
    if "held out" not in held_is and (group_by or all(by in source.column_names() for source in (train, held))):
        known, groups = set(values_by(train, by)), set(values_by(held, by))
        if both := sorted((known & groups) - {""}):
            yield (
                f"{len(both):,} of {plural(len(groups), 'group')} in {held_is} {'is' if len(both) == 1 else 'are'} "
                f"also trained on, such as {printable(both[0])!r}: the accuracy will be too high"
            )
    if train.remote or train.draws or held.draws:
        return
    if len(train) + len(held) > MOST_COMPARED:
        yield (
            f"near duplicates across the split were not looked for, as there are more than {MOST_COMPARED:,} images; "
            "`vit doctor` finds all"
        )
        return
    scanned = scan({"train": train, "held out": held}, workers=0, track=track)
    side, copies = scanned.records["split"], []
    for group in same_groups(scanned.records["pixels"], scanned.sketches, np.flatnonzero(scanned.readable)):
        if len(np.unique(side[group])) == 2:
            copies += group[side[group] == 1].tolist()
    if copies:
        example = printable(held.key(int(scanned.records["index"][copies[0]])))
        yield (
            f"{plural(len(copies), 'image', 'is a near duplicate|are near duplicates')} of a training image, such as "
            f"{example}, of {held_is}: the accuracy will be too high"
        )
