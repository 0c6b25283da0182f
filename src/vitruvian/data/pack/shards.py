"""Shards as they are written, and how far a dataset is packed: `pack.json`, brought up to date after each shard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from vitruvian.data.pack.encode import Packed, PackSettings
from vitruvian.data.sources.base import Dataset, Source
from vitruvian.errors import DataError
from vitruvian.files import atomic_open, read_object, remove_unfinished, write_json

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
