"""Pack a dataset into shards of small images that are fast to read; an interrupted call can be resumed.

The state is in `pack.json`, which is updated after each shard.
"""

import dataclasses
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
from PIL import Image

from vitruvian.data.decode import RawImage, open_reduced, reason
from vitruvian.data.formats import open_dataset
from vitruvian.data.names import split_name
from vitruvian.data.remote import SIZES_FILE
from vitruvian.data.sources import Dataset, Source
from vitruvian.data.workers import in_order
from vitruvian.errors import DataError, FileError, parsing
from vitruvian.files import atomic_open, read_object, remove_unfinished, write_json
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Range, Settings

STATE_FILE = "pack.json"
VERSION = 1
WORKER_CHUNK = 16  # number of images that a worker encodes per task
EXACT_PIXELS = 128 * 128  # maximum size of images that are stored exactly: JPEG would lose more than it saves
MAX_PIXEL_BYTES = 8_000_000_000
"""Maximum total size for which `auto` chooses raw pixels: they stay in the file cache of most machines.

From a disk, JPEG is faster: at 2,000 images per second, pixels of side 256 need 500 MB per second.
"""

SAMPLE = 64  # number of images per split to open for an estimate of the total size
END = bytes(2 * tarfile.BLOCKSIZE)
NAME_CHARACTERS = 40  # maximum length of a key in the names of members, which have at most 100 bytes in a tar file


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings(Settings):
    """Settings of `pack`."""

    side: Annotated[int, Range(8, 8192)] = 256  # pixels of the shorter side; smaller images keep their size
    format: Literal["auto", "jpeg", "pixels"] = "auto"
    """`pixels`: raw, the fastest; `jpeg`: a tenth of the size; `auto`: pixels if they fit in memory."""
    quality: Annotated[int, Range(1, 100)] = 90  # JPEG quality, from 1 to 100
    shard_mb: Annotated[int, Range(1, 1_000_000)] = 256  # maximum megabytes per shard; one larger image may exceed it


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A finished shard."""

    file: str  # its name in the folder of its split
    images: int
    bytes: int
    stop: int  # the index, in the source, of the first sample after it


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that could not be read."""

    index: int
    key: str
    reason: str


@dataclass(slots=True)
class SplitState:
    """The progress of one split."""

    samples: int  # samples in the source, readable or not
    digest: str  # hash of their keys and labels
    shards: list[PackedShard] = field(default_factory=list)
    skipped: list[SkippedSample] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The index of the first sample that is not in a finished shard."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def images(self) -> int:
        return sum(shard.images for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(slots=True)
class PackState:
    """The content of `pack.json`."""

    settings: PackSettings
    source: str
    splits: dict[str, SplitState]
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    version: int = VERSION

    def save(self, folder: Path) -> None:
        write_json(folder / STATE_FILE, dataclasses.asdict(self))


def pack(
    data: str | Path | Dataset,
    folder: str | Path,
    settings: PackSettings | None = None,
    *,
    workers: int = 0,
    track: Track = no_tracking,
) -> PackState:
    """Pack all splits of a dataset into `folder`, or resume an interrupted call.

    The files are bit-identical for any number of workers and interruptions. Unreadable samples are skipped
    and listed in `pack.json`.

    Args:
        data: A dataset, or what `open_dataset` accepts.
        folder: A new folder, or one that an interrupted call has begun to fill.
        settings: Size and format of the images.

    Raises:
        DataError: The dataset cannot be packed, or the folder contains something else.
    """
    source = data if isinstance(data, Dataset) else open_dataset(data)
    target = Path(folder)
    if not isinstance(data, Dataset) and target.resolve().is_relative_to(Path(data).resolve()):
        raise DataError("is inside the data to be packed", where=target, hint=f"name a folder outside of {data}")
    if target.exists() and not target.is_dir():
        raise DataError("exists and is not a folder", where=target, hint="name another folder")
    for name in source.splits:
        if split_name(name) != name:
            raise DataError(f"cannot pack the split {name!r}", where=source.name, hint="call it train, val or test")
    try:
        target.mkdir(parents=True, exist_ok=True)
        state = resume_state(target, new_state(source, choose_format(source, settings or PackSettings())))
        if not state.complete:
            write_shards(target, source, state, workers=workers, track=track)
    except (OSError, FileError) as error:
        hint = "the finished shards are kept; run the same command again to resume"
        if isinstance(error, FileError):
            raise error.replace(DataError, hint=hint) from error
        raise DataError(error.strerror or str(error), where=error.filename or target, hint=hint) from error
    return state


def write_shards(folder: Path, data: Dataset, state: PackState, *, workers: int, track: Track) -> None:
    """Write the missing shards, and the state after each."""
    state.save(folder)
    write_json(folder / "classes.json", data.classes)
    missing = sum(split.samples - split.start for split in state.splits.values())
    encode = partial(encode_sample, data.splits, state.settings)
    positions = ((name, index) for name, split in state.splits.items() for index in range(split.start, split.samples))
    encoded = track(in_order(encode, positions, workers=workers, chunk=WORKER_CHUNK), missing)
    first = {name: len(split.shards) for name, split in state.splits.items()}
    labels = label_texts(data.classes)
    assigned = assign_shards(encoded, state.settings.shard_mb * 1_000_000, first)
    for (name, shard_index), group in groupby(assigned, itemgetter(0)):
        samples = (sample for _, sample in group)
        shard, skipped = write_shard(folder / name, f"{name}-{shard_index:06d}.tar", samples, labels)
        state.splits[name].shards.append(shard)
        state.splits[name].skipped += skipped
        state.save(folder)
    for name, split in state.splits.items():
        write_json(folder / name / SIZES_FILE, {shard.file: shard.images for shard in split.shards})
    state.complete = True
    state.save(folder)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """An encoded sample, or the reason why it cannot be read."""

    split: str
    index: int
    key: str
    label: int
    extension: str  # `.jpg`, `.png` or `.npy`
    data: bytes
    reason: str


def encode_sample(splits: Mapping[str, Source], settings: PackSettings, position: tuple[str, int]) -> EncodedSample:
    """Encode a sample by split and index, upright and resized; the bytes depend only on its image and the settings."""
    split, index = position
    source, extension, buffer, problem = splits[split], "", io.BytesIO(), ""
    try:
        image = source.read(index)
        small, is_full_size = shrink(image, settings.side)
        if settings.format == "pixels":
            extension = ".npy"
            np.save(buffer, np.asarray(small), allow_pickle=False)
        elif is_full_size and (not isinstance(image, bytes) or small.width * small.height <= EXACT_PIXELS):
            extension = ".png"
            small.save(buffer, "PNG", compress_level=6)
        else:
            extension = ".jpg"
            small.save(buffer, "JPEG", quality=settings.quality, subsampling="4:2:0", optimize=True)
    except Exception as error:  # sources and Pillow raise any kind of error for broken files
        extension, buffer, problem = "", io.BytesIO(), reason(error)
    return EncodedSample(split, index, source.key(index), source.label(index), extension, buffer.getvalue(), problem)


def shrink(image: RawImage, side: int) -> tuple[Image.Image, bool]:
    """The image with its shorter side at most `side`, gray if it is stored so, and whether it kept its size."""
    opened = open_reduced(image, 2 * side)  # twice the size, so that the filter below determines the result
    small = opened.upright.convert("L") if opened.stored.mode in ("1", "L") else opened.upright
    shorter = min(opened.size)
    if shorter <= side:
        return small, True
    columns, rows = (max(1, round(length * side / shorter)) for length in opened.size)
    return small.resize((columns, rows), Image.Resampling.BICUBIC), False


def choose_format(data: Dataset, settings: PackSettings) -> PackSettings:
    """The settings with `auto` replaced by the format that suits the data."""
    if settings.format != "auto":
        return settings
    fits = estimate_pixel_bytes(data, settings.side) <= MAX_PIXEL_BYTES
    return settings.replace(format="pixels" if fits else "jpeg")


def estimate_pixel_bytes(data: Dataset, side: int) -> float:
    """An estimate of the size of the raw pixels of all images."""
    total = 0.0
    for source in data.splits.values():
        step = 1 if source.blocks else max(1, len(source) // SAMPLE)  # with blocks, adjacent samples are cheap
        sizes = []
        for index in range(0, len(source), step)[:SAMPLE]:
            try:
                image, _ = shrink(source.read(index), side)
            except Exception:  # reported when it is packed
                continue
            sizes.append(image.width * image.height * len(image.getbands()))
        total += len(source) * sum(sizes) / max(1, len(sizes))
    return total


def new_state(data: Dataset, settings: PackSettings) -> PackState:
    """The state before the first shard."""
    splits, weighted = dict[str, SplitState](), False
    for name, source in data.splits.items():
        digest = hashlib.sha256(json.dumps(source.classes).encode())
        for index in range(0 if source.remote else len(source)):  # a remote source would download all images
            digest.update(f"{source.label(index)} {source.key(index)}\n".encode("utf-8", "surrogateescape"))
            weighted |= source.weight(index) != 1.0
        splits[name] = SplitState(len(source), digest.hexdigest())
    notes = ["sample weights are dropped: shards cannot store them"] if weighted else []
    return PackState(settings, data.name, splits, [*data.notes, *notes])


def resume_state(folder: Path, new: PackState) -> PackState:
    """The state in a folder that was packed before, or `new` for an empty folder; refuses any other folder."""
    if not (folder / STATE_FILE).exists():
        others = [path.name for path in folder.iterdir() if not path.name.startswith(f".{STATE_FILE}.")]
        if others:
            reason = f"not empty (it contains {sorted(others)[0]}) and not made by vit pack"
            raise DataError(reason, where=folder, hint="name a new folder")
        return new
    stored = read_state(folder)
    before, after = stored.settings.to_json(), new.settings.to_json()
    differences = [f"{name}={before[name]}, not {after[name]}" for name in after if before[name] != after[name]]
    if stored.version != new.version:
        differences.append(f"version {stored.version} of the layout, not {new.version}")
    if list(stored.splits) != list(new.splits):
        differences.append(f"the splits {', '.join(stored.splits)}, not {', '.join(new.splits)}")
    for name in stored.splits.keys() & new.splits.keys():
        old, now = stored.splits[name], new.splits[name]
        if (old.samples, old.digest) != (now.samples, now.digest):
            differences.append(f"other images or labels in {name} ({old.samples:,} then, {now.samples:,} now)")
    if differences:
        hint = "name another folder, or delete this one to pack again"
        raise DataError(f"was packed with {'; '.join(differences)}", where=folder, hint=hint)
    remove_unfinished(folder)
    for name, split in stored.splits.items():
        for position, shard in enumerate(split.shards):
            path = folder / name / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:  # pack it and those after it again
                del split.shards[position:]
                split.skipped = [sample for sample in split.skipped if sample.index < split.start]
                stored.complete = False
                break
    return stored


def read_state(folder: Path) -> PackState:
    path = folder / STATE_FILE
    with parsing(path, DataError, reason="not written by vit pack", hint="delete the folder to pack again"):
        content = read_object(path, raises=DataError)
        splits = {}
        for name, split in content["splits"].items():
            shards = [PackedShard(**shard) for shard in split["shards"]]
            skipped = [SkippedSample(**sample) for sample in split["skipped"]]
            splits[name] = SplitState(split["samples"], split["digest"], shards, skipped)
        settings = PackSettings.from_json(content["settings"])
        return PackState(settings, content["source"], splits, content["notes"], content["complete"], content["version"])


def assign_shards(
    samples: Iterable[EncodedSample], limit_bytes: int, first: dict[str, int]
) -> Iterator[tuple[tuple[str, int], EncodedSample]]:
    """Each sample with the split and the index of its shard; shards are filled in order, starting at `first`."""
    shard_index, split, filled = dict(first), "", 0
    for sample in samples:
        blocks = -(-len(sample.data) // tarfile.BLOCKSIZE) + 3  # with the headers of image and label, and the label
        size = blocks * tarfile.BLOCKSIZE if sample.data else 0
        if sample.split != split:
            split, filled = sample.split, len(END)
        elif filled > len(END) and filled + size > limit_bytes:
            shard_index[split] += 1
            filled = len(END)
        filled += size
        yield (split, shard_index[split]), sample


def write_shard(
    folder: Path, file_name: str, samples: Iterable[EncodedSample], labels: Sequence[str]
) -> tuple[PackedShard, list[SkippedSample]]:
    """Write a shard and, beside it, an index with one line per sample; returns also the samples that were skipped.

    The shard contains only names, images and labels, so the same samples give the same bytes.
    """
    rows, skipped, stop = [], [], 0
    folder.mkdir(exist_ok=True)
    with atomic_open(folder / file_name) as file:
        for sample in samples:
            stop = sample.index + 1
            if sample.reason:
                skipped.append(SkippedSample(sample.index, sample.key, sample.reason))
                continue
            name = sample_name(sample.index, sample.key)
            member = name + sample.extension
            file.write(tar_member(member, sample.data) + tar_member(f"{name}.cls", labels[sample.label].encode()))
            row = {"file": member, "label": sample.label, "index": sample.index, "key": sample.key}
            rows.append(json.dumps(row) + "\n")
        if not rows:
            hint = "run `vit doctor` for the reasons"
            raise DataError(f"none of its {stop} images can be read", where=folder.name, hint=hint)
        file.write(END)
        with atomic_open((folder / file_name).with_suffix(".jsonl")) as index:
            index.write("".join(rows).encode())
        size = file.tell()
    return PackedShard(file_name, len(rows), size, stop), skipped


def tar_member(name: str, data: bytes) -> bytes:
    """A file with its header and padding in a tar archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def sample_name(index: int, key: str) -> str:
    """The name of a sample in its shard: index and plain characters of its key. A dot would start the extension."""
    stem = re.sub(r"[^\w-]+", "_", PurePosixPath(key).stem, flags=re.ASCII)
    return f"{index:08d}-{stem[-NAME_CHARACTERS:].strip('_')}".rstrip("-")


def label_texts(classes: Sequence[str]) -> tuple[str, ...]:
    """The content of the member `.cls` for each class: its index, as is usual.

    If class names are numbers in another order, such as 1, 2 and 3, the names are written instead, since a reader
    that knows the names takes 1 for the first of them.
    """
    indices, index_of = tuple(map(str, range(len(classes)))), {name: index for index, name in enumerate(classes)}
    ambiguous = any(index_of.get(text, index) != index for index, text in enumerate(indices))
    return tuple(classes) if ambiguous else indices
