"""Tar shards on a local disk, read in any order through an index of where each image lies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from vitruvian.data.sources.base import DataSet, LeftOut, RawImage, data_set, natural, split_of_file
from vitruvian.data.sources.cache import derived
from vitruvian.data.sources.classes import listed_classes
from vitruvian.data.sources.index import Entry, Index, IndexedSource, OpenFile, read_index, write_index
from vitruvian.data.sources.shards import image_of, samples
from vitruvian.errors import DataError

NUMBERS = ("shard", "offset", "size")

OPEN_SHARDS = 64
"""Files kept open at a time."""


class TarSource(IndexedSource):
    """The samples of local shards, in the order of the shards and of their members."""

    def __init__(self, name: str, classes: tuple[str, ...], index: Index, *, shards: Sequence[Path]) -> None:
        super().__init__(name, classes, index)
        self.shards = tuple(shards)
        self._open: OrderedDict[int, OpenFile] = OrderedDict()

    def read(self, index: int) -> RawImage:
        shard, offset, size = (self.index.numbers[name][index] for name in NUMBERS)
        return image_of(self._file(shard).read(offset, size), size, self.key(index))

    def key(self, index: int) -> str:
        return f"{self.shards[self.index.numbers['shard'][index]].name}:{super().key(index)}"

    def _file(self, shard: int) -> OpenFile:
        if shard not in self._open:
            self._open[shard] = OpenFile(self.shards[shard])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(shard)
        return self._open[shard]


def open_tar(shards: Sequence[Path], name: str, *, classes: tuple[str, ...] | None = None) -> DataSet:
    """The data set in local shards; their headers are gone through once.

    Without given classes, a list of them is looked for beside the shards and in the folder above.
    """
    shards = sorted(shards, key=lambda path: natural(str(path)))
    beside: list[Path] = []
    for folder in (shards[0].parent, shards[0].parent.parent):
        if classes is None:
            classes, beside = listed_classes(folder)
    stored = read_index(derived("tar", [*shards, *beside], partial(compile_shards, shards, classes)))
    if not stored.splits:
        found = "; ".join(stored.notes) or "no members"
        raise DataError(f"{name}: no labeled images ({found}); wanted pairs such as 0001.jpg and 0001.cls")
    sources = {
        split: TarSource(f"{name} ({split})", stored.classes, index, shards=shards)
        for split, index in stored.splits.items()
    }
    return data_set(name, sources, stored.notes)


def compile_shards(shards: Sequence[Path], classes: tuple[str, ...] | None, into: Path) -> None:
    left_out = LeftOut()
    write_index(into, entries(shards, left_out), left_out=left_out, numbers=NUMBERS, classes=classes)


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
