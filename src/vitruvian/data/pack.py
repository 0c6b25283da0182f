"""Pack a dataset into small shards that are fast to read; an interrupted run can be resumed."""

from __future__ import annotations

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
from vitruvian.errors import DataError, FileError
from vitruvian.files import atomic_open, read_object, remove_unfinished, write_json
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Range, Settings

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


PackFormat = Literal["auto", "jpeg", "pixels"]

EXACT_PIXELS = 128 * 128
"""Images up to this size lose more than they gain as JPEG, and are kept exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings(Settings):
    """How images are packed."""

    side: Annotated[int, Range(8, 8192)] = 256
    """Pixels of the shorter side; smaller images keep their size."""
    format: PackFormat = "auto"
    """`pixels`: raw, the quickest; `jpeg`: a tenth of the size, half as quick; `auto`: pixels if they fit in memory."""
    quality: Annotated[int, Range(1, 100)] = 90
    """Of JPEG, from 1 to 100."""
    shard_mb: Annotated[int, Range(1, 1_000_000)] = 256
    """Most megabytes of a shard; one image may exceed it alone."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded sample, or the reason why there is none."""

    split: str
    index: int
    key: str
    label: int
    ending: str = ""
    """`.jpg`, `.png` or `.npy`."""
    data: bytes = b""
    reason: str = ""


def encode_one(splits: Mapping[str, Source], settings: PackSettings, place: tuple[str, int]) -> Packed:
    """A sample by split and number; its bytes depend on its image and the settings alone."""
    split, index = place
    source, ending, data, problem = splits[split], "", b"", ""
    try:
        ending, data = encoded(source.read(index), settings)
    except Exception as error:  # sources and Pillow raise whatever broken bytes lead them to
        problem = reason(error)
    return Packed(split, index, source.key(index), source.label(index), ending, data, problem)


def encoded(image: RawImage, settings: PackSettings) -> tuple[str, bytes]:
    """The image, upright and small, as the ending and the content of a file."""
    small, whole = reduced(image, settings.side)
    buffer = io.BytesIO()
    if settings.format == "pixels":
        np.save(buffer, np.asarray(small), allow_pickle=False)
        return ".npy", buffer.getvalue()
    if whole and (not isinstance(image, bytes) or small.width * small.height <= EXACT_PIXELS):
        small.save(buffer, "PNG", compress_level=6)
        return ".png", buffer.getvalue()
    quality, blocks = settings.quality, 1  # a restart marker after every block: `data.jpeg` decodes any part alone
    small.save(buffer, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=blocks)
    return ".jpg", buffer.getvalue()


def reduced(image: RawImage, side: int) -> tuple[Image.Image, bool]:
    """The image with its shorter side at most `side`, gray if it was stored so, and whether it kept its size."""
    opened = open_reduced(image, 2 * side)  # twice: the filter below then makes no use of the decoder's own
    small = opened.upright.convert("L") if opened.stored.mode in ("1", "L") else opened.upright
    shorter = min(opened.size)
    if shorter <= side:
        return small, True
    columns, rows = (max(1, round(length * side / shorter)) for length in opened.size)
    return small.resize((columns, rows), Image.Resampling.BICUBIC), False


MOST_PIXEL_BYTES = 8_000_000_000
"""Size up to which raw pixels are chosen: they stay in the memory of most machines, and then nothing is as quick.

From a disk, JPEG is quicker: at 2,000 images a second, pixels of side 256 need 500 MB a second.
"""

SAMPLE = 64
"""Images of each split that are opened to know how large all are."""


def chosen(data: Dataset, settings: PackSettings) -> PackSettings:
    """The settings with `auto` replaced by the form that suits the data."""
    if settings.format != "auto":
        return settings
    return settings.replace(format="pixels" if pixel_bytes(data, settings.side) <= MOST_PIXEL_BYTES else "jpeg")


def pixel_bytes(data: Dataset, side: int) -> float:
    """About how many bytes the raw pixels of all images would take."""
    total = 0.0
    for source in data.splits.values():
        step = 1 if source.blocks else max(1, len(source) // SAMPLE)  # a remote source: what comes together
        sizes = []
        for index in range(0, len(source), step)[:SAMPLE]:
            try:
                image, _ = reduced(source.read(index), side)
            except Exception:  # plural and listed when its turn comes
                continue
            sizes.append(image.width * image.height * len(image.getbands()))
        total += len(source) * sum(sizes) / max(1, len(sizes))
    return total


FILE = "pack.json"

VERSION = 1


@dataclass(slots=True)
class SplitState:
    """How far one split is packed."""

    samples: int
    """In the source, readable or not."""
    digest: str
    """Of their keys and labels."""
    shards: list[Shard] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The number of the first sample that is in no finished shard."""
        return self.shards[-1].stop if self.shards else 0

    @property
    def images(self) -> int:
        return sum(shard.images for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(slots=True)
class PackState:
    """All of `pack.json`."""

    settings: PackSettings
    source: str
    splits: dict[str, SplitState]
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    version: int = VERSION

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, dataclasses.asdict(self))


def fresh_state(data: Dataset, settings: PackSettings) -> PackState:
    """The state before the first shard."""
    splits = {name: SplitState(len(source), digest_of(source)) for name, source in data.splits.items()}
    weighted = any(source.weight(index) != 1.0 for source in data.splits.values() for index in known(source))
    notes = ["the weights of the samples are not kept: shards have no place for them"] if weighted else []
    return PackState(settings, data.name, splits, [*data.notes, *notes])


def known(source: Source) -> range:
    """The samples about which something can be said without fetching them: none of a remote source."""
    return range(0 if source.remote else len(source))


def digest_of(source: Source) -> str:
    """A hash of all keys, labels and class names, to know the same data again."""
    digest = hashlib.sha256(json.dumps(source.classes).encode())
    for index in known(source):
        digest.update(f"{source.label(index)} {source.key(index)}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def resumed_state(folder: Path, fresh: PackState) -> PackState:
    """The state found in a folder that was packed before, or `fresh` for a new one; refuses any other folder."""
    if not (folder / FILE).exists():
        strangers = [path.name for path in folder.iterdir() if not path.name.startswith(f".{FILE}.")]
        if strangers:
            raise DataError(
                f"{folder}: not empty (it has {sorted(strangers)[0]}) and not made by vit pack; name a new folder"
            )
        return fresh
    found = read_state(folder)
    differences = difference(found, fresh)
    if differences:
        raise DataError(
            f"{folder}: was packed with {differences}; name another folder, or delete this one to pack anew"
        )
    remove_unfinished(folder)
    damaged = [forget_damaged(folder / name, split) for name, split in found.splits.items()]
    found.complete = found.complete and not any(damaged)
    return found


def read_state(folder: Path) -> PackState:
    """What `pack.json` says."""
    path = folder / FILE
    try:
        content = read_object(path, raises=DataError)
        splits = {
            name: SplitState(
                samples=split["samples"],
                digest=split["digest"],
                shards=[Shard(**shard) for shard in split["shards"]],
                skipped=[Skipped(**skipped) for skipped in split["skipped"]],
            )
            for name, split in content["splits"].items()
        }
        settings = PackSettings.from_json(content["settings"])
        return PackState(settings, content["source"], splits, content["notes"], content["complete"], content["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not what vit pack writes ({error}); delete the folder to pack anew") from error


def difference(found: PackState, wanted: PackState) -> str:
    """What differs between a packed folder and what is asked for, as `side=256, not 224`."""
    old, new = found.settings.to_json(), wanted.settings.to_json()
    parts = [f"{name}={old[name]}, not {new[name]}" for name in new if old[name] != new[name]]
    if found.version != wanted.version:
        parts.append(f"version {found.version} of the layout, not {wanted.version}")
    if list(found.splits) != list(wanted.splits):
        parts.append(f"the splits {', '.join(found.splits)}, not {', '.join(wanted.splits)}")
    for name in found.splits.keys() & wanted.splits.keys():
        was, now = found.splits[name], wanted.splits[name]
        if (was.samples, was.digest) != (now.samples, now.digest):
            parts.append(f"other images or labels in {name} ({was.samples:,} then, {now.samples:,} now)")
    return "; ".join(parts)


def forget_damaged(folder: Path, split: SplitState) -> bool:
    """Whether a shard is missing or has another size; it and those after it are then packed again."""
    for number, shard in enumerate(split.shards):
        path = folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.bytes:
            del split.shards[number:]
            split.skipped = [skipped for skipped in split.skipped if skipped.index < split.start]
            return True
    return False


END = bytes(2 * tarfile.BLOCKSIZE)

NAME_CHARACTERS = 40
"""Characters of a sample's own name in the names of its members, which are at most 100 bytes in a tar file."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard."""

    file: str
    """Its name in the folder of its split."""
    images: int
    bytes: int
    stop: int
    """The number, in the source, of the first sample after it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that could not be read."""

    index: int
    key: str
    reason: str


def write_shard(
    folder: Path, file_name: str, samples: Iterable[Packed], labels: Sequence[str]
) -> tuple[Shard, list[Skipped]]:
    """Write a shard and, beside it, an index with a line for each sample; also what could not be read.

    Nothing but names, images and labels goes in, so the same samples give the same bytes.
    """
    rows, skipped, stop = [], [], 0
    folder.mkdir(exist_ok=True)
    with atomic_open(folder / file_name) as file:
        for packed in samples:
            stop = packed.index + 1
            if packed.reason:
                skipped.append(Skipped(packed.index, packed.key, packed.reason))
                continue
            name = sample_name(packed.index, packed.key)
            file.write(member(name + packed.ending, packed.data) + member(name + ".cls", labels[packed.label].encode()))
            row = {"file": name + packed.ending, "label": packed.label, "index": packed.index, "key": packed.key}
            rows.append(json.dumps(row) + "\n")
        if not rows:
            raise DataError(f"{folder.name}: none of its {stop} images can be read; `vit doctor` tells why")
        file.write(END)
        with atomic_open((folder / file_name).with_suffix(".jsonl")) as index:
            index.write("".join(rows).encode())
        size = file.tell()
    return Shard(file_name, len(rows), size, stop), skipped


def member(name: str, data: bytes) -> bytes:
    """A file as it stands in a tar file."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def size_in_tar(packed: Packed) -> int:
    """Bytes that a sample takes in its shard: its image and its label, each with a header."""
    blocks = -(-len(packed.data) // tarfile.BLOCKSIZE)
    return (blocks + 3) * tarfile.BLOCKSIZE if packed.data else 0


def sample_name(index: int, key: str) -> str:
    """The name of a sample inside its shard: its number in the source, then its own name as far as it is plain.

    What follows a dot would be taken for the ending, so none is left.
    """
    own = re.sub(r"[^\w-]+", "_", PurePosixPath(key).stem, flags=re.ASCII)
    return f"{index:08d}-{own[-NAME_CHARACTERS:].strip('_')}".rstrip("-")


def label_texts(classes: Sequence[str]) -> tuple[str, ...]:
    """What the member `.cls` says for each class: its number, as is usual.

    Its name where names are numbers of another order, such as the classes 1, 2 and 3, since a reader that knows the
    names takes 1 for the first of them.
    """
    numbers, number_of = tuple(map(str, range(len(classes)))), {name: number for number, name in enumerate(classes)}
    mistaken = any(number_of.get(text, number) != number for number, text in enumerate(numbers))
    return tuple(classes) if mistaken else numbers


def numbered(
    samples: Iterable[Packed], limit_bytes: int, first: dict[str, int]
) -> Iterator[tuple[tuple[str, int], Packed]]:
    """Each sample with the split and the number of its shard: as many as fit, in order, from the `first` on."""
    number, split, filled = dict(first), "", 0
    for packed in samples:
        size = size_in_tar(packed)
        if packed.split != split:
            split, filled = packed.split, len(END)
        elif filled > len(END) and filled + size > limit_bytes:
            number[split] += 1
            filled = len(END)
        filled += size
        yield (split, number[split]), packed
