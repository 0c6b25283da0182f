"""Remote tar shards, fetched shard by shard while they are read.

The shuffle buffer is a number of whole shards on the local disk (lanes, see `order.Blocks`). The order of an epoch
follows from the sizes of the shards, so it is the same for any number of workers and processes, can be entered
anywhere, and each process fetches only the shards of its own part of each batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import RawImage
from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.sources.base import Dataset, Source, make_dataset
from vitruvian.data.sources.formats.tar import open_tar
from vitruvian.data.sources.names import CLASS_FILES, natural, parse_classes, split_of_file
from vitruvian.data.sources.remote import LocalShard, ShardCache, download, remote_files, remote_size, remote_text
from vitruvian.errors import DataError
from vitruvian.files import cache_folder, parse_json, short_hash

BYTES_KEPT = 2**35
"""Of one dataset on the local disk."""

MAX_LANES = 64

SIZES_FILE = "sizes.json"
"""Beside the shards: how many samples each holds, by file name."""


class StreamSource(Source):
    """The samples of remote shards. Any can be read, but each brings its whole shard here."""

    remote = True

    def __init__(self, name: str, cache: ShardCache, sizes: IndexArray, *, lanes: int, small: bool) -> None:
        """`small`: all shards together fit on the local disk."""
        self.name = name
        self.classes = cache.classes
        self.cache = cache
        self.blocks = Blocks(sizes, lanes)
        self._ends = np.cumsum(sizes)
        self._small = small

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _found(self, index: int) -> tuple[LocalShard, int]:
        """The shard of an example, and its number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._shard(number), index - (int(self._ends[number - 1]) if number else 0)

    def _shard(self, number: int) -> LocalShard:
        shard = self.cache.shard(number)
        wanted = int(np.diff(self._ends, prepend=0)[number])
        if len(shard) != wanted:
            raise DataError(
                f"{self.cache.urls[number]}: {len(shard)} labeled images, but {SIZES_FILE} says {wanted}; correct it"
            )
        return shard

    def label(self, index: int) -> int:
        shard, within = self._found(index)
        return int(shard.labels[within])

    def labels(self) -> NDArray[np.int32]:
        if not self._small:
            raise DataError(
                f"{self.name}: the labels of remote shards of this size are not known beforehand; "
                "give a split of its own for validation, and sample uniformly"
            )
        for number in range(len(self.cache.urls)):
            self.cache.begin(number)
        return np.concatenate([self._shard(number).labels for number in range(len(self.cache.urls))])

    def weight(self, index: int) -> float:
        shard, within = self._found(index)
        return float(shard.weights[within])

    def read(self, index: int) -> RawImage:
        shard, within = self._found(index)
        return shard.read(within)

    def key(self, index: int) -> str:
        shard, within = self._found(index)
        return shard.key(within)

    def announce(self, indices: IndexArray) -> None:
        for number in np.unique(np.searchsorted(self._ends, indices, side="right")):
            self.cache.begin(int(number))


def open_stream(url: str) -> Dataset:
    """The dataset in remote shards: a pattern, a folder, or one shard."""
    urls = sorted(remote_files(url, ".tar"), key=natural)
    if not urls:
        raise DataError(f"{url}: no .tar files there; remote data must be tar shards, copy other kinds here first")
    classes, sizes = beside(urls, CLASS_FILES), shard_sizes(urls)
    shard_bytes = remote_size(urls[0]) or 1
    small = shard_bytes * len(urls) <= BYTES_KEPT
    if classes and sizes:
        return streamed(url, urls, parse_classes(*classes), sizes, shard_bytes=shard_bytes, small=small)
    if not small:
        missing = SIZES_FILE if classes else CLASS_FILES[0]
        raise DataError(
            f"{url}: {len(urls)} shards, about {shard_bytes * len(urls) >> 30} GB, without {missing} beside them; "
            f"write the list of classes, and {SIZES_FILE}: an object from each shard's name to its number of samples"
        )
    return open_tar(copied(url, urls), url, classes=parse_classes(*classes) if classes else None)


def streamed(
    url: str, urls: list[str], classes: tuple[str, ...], sizes: dict[str, int], *, shard_bytes: int, small: bool
) -> Dataset:
    by_split: dict[str, list[str]] = {}
    for shard in urls:
        by_split.setdefault(split_of_file(shard), []).append(shard)
    sources = {}
    for split, shards in by_split.items():
        most = max(1, min(MAX_LANES, len(shards), BYTES_KEPT // (4 * shard_bytes)))
        lanes = 1 << (most.bit_length() - 1)  # a power of two, which processes can share evenly
        cache = ShardCache(tuple(shards), classes, folder=folder_of(url), bytes_kept=BYTES_KEPT, kept=2 * lanes)
        counts = np.array([sizes[shard] for shard in shards], np.int64)
        sources[split] = StreamSource(f"{url} ({split})", cache, counts, lanes=lanes, small=small)
    return make_dataset(url, sources)


def folder_of(url: str) -> Path:
    return cache_folder() / "shards" / short_hash([url])


def beside(urls: list[str], names: tuple[str, ...]) -> tuple[str, str] | None:
    """Text and URL of the first of these files that lies in the first shard's folder, or in the one above."""
    folder = urls[0].rpartition("/")[0]
    for place in (folder, folder.rpartition("/")[0]):
        for name in names if "://" in place else ():
            text = remote_text(f"{place}/{name}")
            if text is not None:
                return text, f"{place}/{name}"
    return None


def shard_sizes(urls: list[str]) -> dict[str, int] | None:
    """Samples of each shard as the files beside them say; None where one is not listed."""
    sizes: dict[str, int] = {}
    for folder in {url.rpartition("/")[0] for url in urls}:
        where = f"{folder}/{SIZES_FILE}"
        listed = parse_json(remote_text(where) or "{}", where, raises=DataError)
        try:
            sizes.update({f"{folder}/{name}": int(count) for name, count in listed.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: not an object from file names to numbers") from error
    return sizes if all(sizes.get(url, 0) > 0 for url in urls) else None


def copied(url: str, urls: list[str]) -> list[Path]:
    """Local copies of all shards, in folders called like theirs."""
    paths = []
    for shard in urls:
        parent, _, name = shard.rpartition("/")
        path = folder_of(url) / short_hash([parent]) / parent.rpartition("/")[2] / name
        if not path.is_file() or path.stat().st_size != remote_size(shard):
            path.parent.mkdir(parents=True, exist_ok=True)
            download(shard, path)
        paths.append(path)
    return paths
