"""A dataset made small and put into shards that are quick to read; stopped anywhere, it goes on from there."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from vitruvian.data.pack.encode import PackFormat, PackSettings, chosen, encode_one
from vitruvian.data.pack.shards import (
    PackState,
    Shard,
    Skipped,
    SplitState,
    fresh_state,
    label_texts,
    numbered,
    resumed_state,
    write_shard,
)
from vitruvian.data.sources import open_dataset
from vitruvian.data.sources.base import Dataset
from vitruvian.data.sources.names import split_name
from vitruvian.data.sources.remote.stream import SIZES_FILE
from vitruvian.data.workers import in_order
from vitruvian.errors import DataError, FileError
from vitruvian.files import write_json
from vitruvian.progress import Track, no_tracking

__all__ = ["PackFormat", "PackSettings", "PackState", "Shard", "Skipped", "SplitState", "pack"]

CHUNK = 16
"""Images that a worker encodes before it hands them over."""


def pack(
    data: str | Path | Dataset,
    folder: str | Path,
    settings: PackSettings | None = None,
    *,
    workers: int = 0,
    track: Track = no_tracking,
) -> PackState:
    """Pack all splits of a dataset into `folder`, or go on where an earlier call was stopped.

    The files are the same, byte for byte, with any number of workers and however often the work was stopped.
    Samples that cannot be read are left out and listed in `pack.json`.
    """
    source = data if isinstance(data, Dataset) else open_dataset(data)
    target = Path(folder)
    check_target(target, data, source)
    try:
        target.mkdir(parents=True, exist_ok=True)
        state = resumed_state(target, fresh_state(source, chosen(source, settings or PackSettings())))
        if not state.complete:
            fill(target, source, state, workers=workers, track=track)
    except (OSError, FileError) as error:
        what = f"{error.filename or target}: {error.strerror}" if isinstance(error, OSError) else error
        raise DataError(f"{what}; the shards finished so far stay, and the same command goes on from there") from error
    return state


def check_target(target: Path, data: str | Path | Dataset, source: Dataset) -> None:
    """Refuse a folder inside the data, and splits whose names no reader would know again."""
    if not isinstance(data, Dataset) and target.resolve().is_relative_to(Path(data).resolve()):
        raise DataError(f"{target}: lies inside the data to be packed; name a folder outside of {data}")
    for name in source.splits:
        if split_name(name) != name:
            raise DataError(f"{source.name}: the split {name!r} cannot be packed; call it train, val or test")


def fill(folder: Path, data: Dataset, state: PackState, *, workers: int, track: Track) -> None:
    """Write what is missing, shard by shard, with the state after each."""
    state.save(folder)
    write_json(folder / "classes.json", data.classes)
    missing = sum(split.samples - split.start for split in state.splits.values())
    encode = partial(encode_one, data.splits, state.settings)
    places = ((name, index) for name, split in state.splits.items() for index in range(split.start, split.samples))
    packed = in_order(encode, places, workers=workers, chunk=CHUNK)
    first = {name: len(split.shards) for name, split in state.splits.items()}
    labels = label_texts(data.classes)
    placed = numbered(track(packed, missing), state.settings.shard_mb * 1_000_000, first)
    for (name, number), group in groupby(placed, itemgetter(0)):
        samples = (sample for _, sample in group)
        shard, skipped = write_shard(folder / name, f"{name}-{number:06d}.tar", samples, labels)
        state.splits[name].shards.append(shard)
        state.splits[name].skipped += skipped
        state.save(folder)
    for name, split in state.splits.items():
        write_json(folder / name / SIZES_FILE, {shard.file: shard.images for shard in split.shards})
    state.complete = True
    state.save(folder)
