"""The samples inside one tar shard of the WebDataset layout: members that share a name up to its first dot."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import EXTENSIONS
from vitruvian.data.sources.base import Picture
from vitruvian.data.sources.index import OpenFile
from vitruvian.errors import DataError, ImageError

PICTURES = EXTENSIONS | {".npy"}
"""Endings of members that hold the picture; `.npy` holds its pixels."""

LABEL_KEYS = ("label", "cls", "class")
"""Where a sample's JSON member may have the label."""

MAX_LABEL_BYTES = 2**20


@dataclass(slots=True)
class Sample:
    """Where the picture of one sample lies in its shard, and its label if it has one."""

    key: str
    member: str = ""
    offset: int = 0
    size: int = 0
    label: str | None = None
    weight: float = 1.0


def samples(shard: Path, name: str = "") -> Iterator[Sample]:
    """The samples of a shard, found by going from header to header; those without a picture have no member.

    `name` stands in messages for the path.
    """
    content = OpenFile(shard)
    try:
        with tarfile.open(shard, "r:") as archive:
            current: Sample | None = None
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
                if not member.isreg() or hidden(member.name):
                    continue
                key, ending = sample_key(member.name)
                if current is None or current.key != key:
                    if current is not None:
                        yield current
                    current = Sample(key)
                note_member(current, content, member, ending)
            check_end(content, archive.offset, name or str(shard))
            if current is not None:
                yield current
    except (tarfile.TarError, EOFError) as error:
        raise DataError(
            f"{name or shard}: not a whole tar file ({error}); compressed shards must be unpacked first"
        ) from error


def note_member(sample: Sample, content: OpenFile, member: tarfile.TarInfo, ending: str) -> None:
    """Take from one member what it says about its sample."""
    last = "." + ending.rpartition(".")[2]
    if last in PICTURES and not sample.member:
        sample.member, sample.offset, sample.size = member.name, member.offset_data, member.size
    elif last in (".cls", ".json") and member.size <= MAX_LABEL_BYTES:
        text = content.read(member.offset_data, member.size).decode("utf-8", "replace")
        if last == ".cls":
            sample.label = text.strip() or sample.label
        else:
            note_json(sample, text)


def sample_key(name: str) -> tuple[str, str]:
    """`a/b.c.jpg` as the sample's key `a/b` and the ending `c.jpg`."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return folder + slash + stem, ending.lower()


def hidden(name: str) -> bool:
    return name.rpartition("/")[2].startswith(".")


def note_json(sample: Sample, text: str) -> None:
    """Take label and weight from a JSON member: a label alone, or an object with `label` and perhaps `weight`."""
    try:
        content = json.loads(text)
    except ValueError:
        return
    if isinstance(content, dict):
        weight = content.get("weight", 1.0)
        if isinstance(weight, int | float) and 0 <= weight < float("inf"):
            sample.weight = float(weight)
        content = next((content[key] for key in LABEL_KEYS if key in content), None)
    if sample.label is None and isinstance(content, str | int) and not isinstance(content, bool):
        sample.label = str(content)


def check_end(content: OpenFile, offset: int, name: str) -> None:
    """Python's reader takes a broken header for the end; the end of a whole file is zeros, or nothing."""
    if content.read(offset, tarfile.BLOCKSIZE).strip(b"\0"):
        raise DataError(f"{name}: broken after byte {offset}")


def picture_of(data: bytes, size: int, key: str) -> Picture:
    """What a member of `size` bytes holds: an encoded picture, or the pixels in an `.npy` member."""
    if len(data) < size:
        raise ImageError(f"{key}: the shard ends before the picture does")
    if not key.endswith(".npy"):
        return data
    try:
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ImageError(f"{key}: broken array ({error})") from error
    if array.dtype != np.uint8 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
        raise ImageError(f"{key}: an array of {array.dtype} {array.shape}; wanted uint8 (rows, columns, 3)")
    return array
