"""What crosses a split and makes its accuracy too high: groups on both sides, and near duplicates."""

from collections.abc import Iterator

import numpy as np

from vitruvian.data.doctor.checks import same_groups
from vitruvian.data.doctor.scan import scan
from vitruvian.data.groups import GROUP_COLUMN, values_by
from vitruvian.data.sources import Source
from vitruvian.progress import Track, no_tracking
from vitruvian.text import plural, printable

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
    if train.remote or train.draws or held.draws or len(train) + len(held) > MOST_COMPARED:
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
