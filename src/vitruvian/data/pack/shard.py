"""Tar shards in the WebDataset layout."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from vitruvian.data.pack.encode import Packed
from vitruvian.errors import DataError
from vitruvian.files import writing

END = bytes(2 * tarfile.BLOCKSIZE)
NAME_CHARACTERS = 40
"""Characters of an example's own name in the names of its members, which are at most 100 bytes in a tar file."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A finished shard."""

    file: str
    """Its name in the folder of its split."""
    images: int
    bytes: int
    stop: int
    """The number, in the source, of the first example after it."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An example that could not be read."""

    index: int
    key: str
    reason: str


def write_shard(
    folder: Path, file_name: str, examples: Iterable[Packed], labels: Sequence[str]
) -> tuple[Shard, list[Skipped]]:
    """Write a shard and, beside it, an index with a line for each example; also what could not be read.

    Nothing but names, images and labels goes in, so the same examples give the same bytes.
    """
    rows, skipped, stop = [], [], 0
    folder.mkdir(exist_ok=True)
    with writing(folder / file_name) as file:
        for packed in examples:
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
        with writing((folder / file_name).with_suffix(".jsonl")) as index:
            index.write("".join(rows).encode())
        size = file.tell()
    return Shard(file_name, len(rows), size, stop), skipped


def member(name: str, data: bytes) -> bytes:
    """A file as it stands in a tar file."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def size_in_tar(packed: Packed) -> int:
    """Bytes that an example takes in its shard: its image and its label, each with a header."""
    blocks = -(-len(packed.data) // tarfile.BLOCKSIZE)
    return (blocks + 3) * tarfile.BLOCKSIZE if packed.data else 0


def sample_name(index: int, key: str) -> str:
    """The name of an example inside its shard: its number in the source, then its own name as far as it is plain.

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


class Filling:
    """Says which shard an example goes to, when called with one after the other: as many as fit, in order."""

    def __init__(self, limit_bytes: int, first: dict[str, int]) -> None:
        self.limit_bytes = limit_bytes
        self.next = dict(first)
        """The number of the shard that is being filled, by split."""
        self.split, self.bytes = "", 0

    def __call__(self, packed: Packed) -> tuple[str, int]:
        size = size_in_tar(packed)
        if packed.split != self.split:
            self.split, self.bytes = packed.split, len(END)
        elif self.bytes > len(END) and self.bytes + size > self.limit_bytes:
            self.next[packed.split] += 1
            self.bytes = len(END)
        self.bytes += size
        return packed.split, self.next[packed.split]
