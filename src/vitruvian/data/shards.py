"""Tar shards in the WebDataset layout: members that share a name up to its first dot are one sample."""

from __future__ import annotations

import functools
import io
import math
import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import EXTENSIONS, RawImage
from vitruvian.data.index import Entry, IndexedSource, indexed
from vitruvian.data.names import listed_classes, natural, split_of_file
from vitruvian.data.sources import Dataset, LeftOut, check_image_bytes, make_dataset
from vitruvian.errors import DataError, FileError, ImageError
from vitruvian.files import parse_json
from vitruvian.text import describe_error

IMAGES = EXTENSIONS | {".npy"}
"""Endings of members that hold the image; `.npy` holds its pixels."""

LABEL_KEYS = ("label", "cls", "class")
"""Where a sample's JSON member may have the label."""

MAX_LABEL_BYTES = 2**20

HEADER_BYTES = 16
"""More than the part of an `.npy` header that says how long it is."""


@dataclass(slots=True)
class Sample:
    """Where the image of one sample lies in its shard, and its label if it has one."""

    key: str
    member: str = ""
    offset: int = 0
    size: int = 0
    label: str | None = None
    weight: float = 1.0


def samples(shard: Path, name: str = "") -> Iterator[Sample]:
    """The samples of a shard, found by going from header to header; those without an image have no member.

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
            f"not a whole tar file ({error}); compressed shards must be unpacked first", where=name or shard
        ) from error


def note_member(sample: Sample, content: OpenFile, member: tarfile.TarInfo, ending: str) -> None:
    """Take from one member what it says about its sample."""
    last = "." + ending.rpartition(".")[2]
    if last in IMAGES and not sample.member:
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
        content = parse_json(text, "")
    except FileError:
        return
    if isinstance(content, dict):
        weight = content.get("weight", 1.0)
        if isinstance(weight, int | float) and 0 <= weight < 1e30:
            sample.weight = float(weight)
        content = next((content[key] for key in LABEL_KEYS if key in content), None)
    if sample.label is None and isinstance(content, str | int) and not isinstance(content, bool):
        sample.label = str(content)


def check_end(content: OpenFile, offset: int, name: str) -> None:
    """Python's reader takes a broken header, or none, for the end; the end of a whole file is a block of zeros."""
    end = content.read(offset, tarfile.BLOCKSIZE)
    if end.strip(b"\0"):
        raise DataError(f"broken after byte {offset}", where=name)
    if len(end) < tarfile.BLOCKSIZE:
        raise DataError(
            f"cut short after byte {offset}, where no zeros mark its end; get it again, or append 1024 zeros "
            "if it is whole",
            where=name,
        )


def read_member(file: OpenFile, offset: int, size: int, key: str) -> RawImage:
    """What a member holds: an encoded image, or the pixels in an `.npy` member."""
    check_image_bytes(size, key)
    data = file.read(offset, size)
    if len(data) < size:
        raise ImageError("the shard ends before the image does", where=key)
    if not key.endswith(".npy"):
        return data
    try:
        return pixels_of(data)
    except Exception as error:  # NumPy's reader of headers raises whatever broken bytes lead it to
        raise ImageError(f"broken array ({describe_error(error)})", where=key) from error


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    """The array in an `.npy` member, as a view of its bytes."""
    stream = io.BytesIO(data[:HEADER_BYTES])
    np.lib.format.read_magic(stream)
    length = int.from_bytes(stream.read(2 if data[6] == 1 else 4), "little")
    start = stream.tell() + length
    shape, fortran = pixel_shape(data[:start])
    values = np.frombuffer(data, np.uint8, count=math.prod(shape), offset=start)
    return values.reshape(shape, order="F" if fortran else "C")


@functools.lru_cache(maxsize=4096)
def pixel_shape(header: bytes) -> tuple[tuple[int, ...], bool]:
    """Shape and order that the header of an `.npy` member says.

    Kept, since parsing takes longer than making a view of the image, and a set of images has few shapes.
    """
    stream = io.BytesIO(header)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    if dtype != np.uint8 or min(shape, default=0) < 1 or (len(shape) != 2 and shape[2:] != (3,)):
        raise ValueError(f"{dtype} {shape}; wanted uint8 (rows, columns, 3)")
    return shape, fortran


NUMBERS = ("shard", "offset", "size")

OPEN_SHARDS = 64
"""Files kept open at a time."""


class TarSource(IndexedSource):
    """The samples of local shards, in the order of the shards and of their members."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, shards: Sequence[Path]) -> None:
        super().__init__(name, classes, folder)
        self.shards = tuple(shards)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    def read(self, index: int) -> RawImage:
        shard, offset, size = (self.numbers[name][index] for name in NUMBERS)
        return read_member(self._file(shard), offset, size, self.key(index))

    def key(self, index: int) -> str:
        return f"{self.shards[self.numbers['shard'][index]].name}:{super().key(index)}"

    def _file(self, shard: int) -> OpenFile:
        if shard not in self._open:
            self._open[shard] = OpenFile(self.shards[shard])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]


def open_tar(shards: Sequence[Path], name: str, *, classes: tuple[str, ...] | None = None) -> Dataset:
    """The dataset in local shards; their headers are gone through once.

    Without given classes, a list of them is looked for beside the shards and in the folder above.
    """
    shards = sorted(shards, key=lambda path: natural(str(path)))
    beside: list[Path] = []
    for folder in (shards[0].parent, shards[0].parent.parent):
        if classes is None:
            classes, beside = listed_classes(folder)
    found = partial(entries, shards)
    stored = indexed(found, files=[*shards, *beside], kind="tar", numbers=NUMBERS, classes=classes)
    if not stored.splits:
        seen = "; ".join(stored.notes) or "no members"
        raise DataError(f"no labeled images ({seen}); wanted pairs such as 0001.jpg and 0001.cls", where=name)
    sources = {
        split: TarSource(f"{name} ({split})", stored.classes, index, shards=shards)
        for split, index in stored.splits.items()
    }
    return make_dataset(name, sources, stored.notes)


def entries(shards: Sequence[Path], left_out: LeftOut) -> Iterator[Entry]:
    for number, shard in enumerate(shards):
        split = split_of_file(str(shard))
        for sample in samples(shard):
            if not sample.member:
                left_out.add("samples without an image", f"{shard.name}:{sample.key}")
            elif sample.label is None:
                left_out.add("images without a label", f"{shard.name}:{sample.member}")
            else:
                where = (number, sample.offset, sample.size)
                yield Entry(split, sample.member, sample.label, sample.weight, where)
