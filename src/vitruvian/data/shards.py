"""Tar shards in the WebDataset layout: members that share a name up to its first dot form one sample."""

import tarfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitruvian.data.columns import OpenFile
from vitruvian.data.decode import EXTENSIONS, RawImage
from vitruvian.data.index import Entry, IndexedSource, build_index
from vitruvian.data.names import find_classes, split_of_file
from vitruvian.data.sources import Dataset, SkippedFiles, check_image_bytes, make_dataset
from vitruvian.data.stored import read_npy
from vitruvian.errors import DataError, FileError, ImageError, parsing
from vitruvian.files import parse_json
from vitruvian.text import natural_key

IMAGES = EXTENSIONS | {".npy"}  # extensions of members that contain the image; `.npy` contains its pixels
LABEL_KEYS = ("label", "cls", "class")  # keys of the label in the JSON member of a sample
MAX_LABEL_BYTES = 2**20


@dataclass(slots=True)
class TarSample:
    """The position of a sample's image in its shard, and its label if it has one."""

    key: str
    member: str = ""
    offset: int = 0
    size: int = 0
    label: str | None = None
    weight: float = 1.0


def read_samples(shard: Path, where: str) -> Iterator[TarSample]:
    """The samples of a shard, from its headers; without an image, they have no member. Messages name `where`."""
    content, hint = OpenFile(shard), "decompress compressed shards first"
    boundary = parsing(where, DataError, reason="not a complete tar file", hint=hint)
    with boundary, tarfile.open(shard, "r:") as archive:
        current: TarSample | None = None
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # otherwise it keeps all of them
            folder, slash, file = member.name.rpartition("/")
            if member.isdir() or file.startswith("."):
                continue
            if member.issparse() or not member.isreg():
                kind = "sparse" if member.issparse() else f"a link to {member.linkname!r}" * bool(member.linkname)
                reason = f"the member {member.name!r} is {kind or 'no regular file'}, which is not supported"
                raise DataError(reason, where=where, hint="write the shard again with `tar --hard-dereference -h`")
            if member.size < 0:  # Python's reader would go back, forever
                raise DataError(f"the member {member.name!r} states a negative size", where=where)
            stem, _, extension = file.partition(".")
            key = folder + slash + stem  # `a/b` of `a/b.c.jpg`
            if current is None or current.key != key:
                if current is not None:
                    yield current
                current = TarSample(key)
            parse_member(current, content, member, "." + extension.lower().rpartition(".")[2])
        # The file must end with a block of zeros: Python's reader also stops at a broken or missing header.
        end = content.read(archive.offset, tarfile.BLOCKSIZE)
        if end.strip(b"\0"):
            raise DataError(f"damaged after byte {archive.offset}", where=where)
        if len(end) < tarfile.BLOCKSIZE:
            hint = "download it again, or append 1024 zeros if it is complete"
            reason = f"truncated after byte {archive.offset}: no zeros mark its end"
            raise DataError(reason, where=where, hint=hint)
        if current is not None:
            yield current


def parse_member(sample: TarSample, content: OpenFile, member: tarfile.TarInfo, extension: str) -> None:
    """Update a sample with one member: image, label, or JSON with a label or an object of `label` and `weight`."""
    if extension in IMAGES and not sample.member:
        sample.member, sample.offset, sample.size = member.name, member.offset_data, member.size
    if extension not in (".cls", ".json") or member.size > MAX_LABEL_BYTES:
        return
    text = content.read(member.offset_data, member.size).decode("utf-8", "replace")
    if extension == ".cls":
        sample.label = text.strip() or sample.label
        return
    try:
        parsed = parse_json(text, "")
    except FileError:
        return
    if isinstance(parsed, dict):
        weight = parsed.get("weight", 1.0)
        if isinstance(weight, int | float) and 0 <= weight < 1e30:
            sample.weight = float(weight)
        parsed = next((parsed[key] for key in LABEL_KEYS if key in parsed), None)
    if sample.label is None and isinstance(parsed, str | int) and not isinstance(parsed, bool):
        sample.label = str(parsed)


def read_member(file: OpenFile, offset: int, size: int, key: str) -> RawImage:
    """The content of a member: an encoded image, or the pixels in an `.npy` member."""
    check_image_bytes(size, key)
    data = file.read(offset, size)
    if len(data) < size:
        raise ImageError("the shard ends before the image", where=key)
    if not key.endswith(".npy"):
        return data
    with parsing(key, ImageError, reason="broken array"):
        values = read_npy(data)
    is_ordinary = values.dtype == np.uint8 and (values.ndim == 2 or values.shape[2:] == (3,))
    return values if is_ordinary else data  # for models that read stored channels


NUMBERS = ("shard", "offset", "size")
OPEN_SHARDS = 64  # maximum number of open files


class TarSource(IndexedSource):
    """The samples of local shards, in the order of the shards and of their members."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, shards: Sequence[Path]) -> None:
        super().__init__(name, classes, folder)
        self.shards = tuple(shards)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    def read(self, index: int) -> RawImage:
        shard, offset, size = (self.numbers[name][index] for name in NUMBERS)
        return read_member(self.file(shard), offset, size, self.key(index))

    def file(self, shard: int) -> OpenFile:
        """A shard; those that were used last stay open."""
        if shard not in self._open:
            self._open[shard] = OpenFile(self.shards[shard])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]

    def key(self, index: int) -> str:
        return f"{self.shards[self.numbers['shard'][index]].name}:{super().key(index)}"


def shard_entries(shards: Sequence[Path], skipped: SkippedFiles, where: str = "") -> Iterator[Entry]:
    """The labeled images of local shards. Messages name the shard, or `where`."""
    for position, shard in enumerate(shards):
        split = split_of_file(str(shard))
        for sample in read_samples(shard, where or str(shard)):
            if not sample.member:
                skipped.add("sample", "without an image", f"{shard.name}:{sample.key}")
            elif sample.label is None:
                skipped.add("image", "without a label", f"{shard.name}:{sample.member}")
            else:
                numbers = (position, sample.offset, sample.size)
                yield Entry(split, sample.member, sample.label, sample.weight, numbers)


def open_shards(shards: Sequence[Path], name: str, *, classes: tuple[str, ...] | None = None) -> Dataset:
    """The dataset in local shards; their headers are read once.

    Without `classes`, a list of class names is looked for beside the shards and in the folder above.
    """
    shards = sorted(shards, key=lambda path: natural_key(str(path)))
    class_files: list[Path] = []
    for folder in (shards[0].parent, shards[0].parent.parent):
        if classes is None:
            classes, class_files = find_classes(folder)

    entries, files = partial(shard_entries, shards), [*shards, *class_files]
    stored = build_index(entries, files=files, kind="tar", numbers=NUMBERS, classes=classes)
    if not stored.splits:
        reason = f"no labeled images ({'; '.join(stored.notes) or 'no members'})"
        raise DataError(reason, where=name, hint="expected pairs such as 0001.jpg and 0001.cls")
    return make_dataset(name, stored.sources(name, TarSource, shards=shards), stored.notes)
