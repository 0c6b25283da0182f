"""Remote tar shards, fetched shard by shard while they are read.

The shuffle buffer is a number of whole shards on the local disk (lanes, see `order.Blocks`). The order of an epoch
follows from the sizes of the shards, so it is the same for any number of workers and processes, can be entered
anywhere, and each process fetches only the shards of its own part of each batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.sources.base import Dataset, PartSource, located, make_dataset
from vitruvian.data.sources.formats.tar import open_tar
from vitruvian.data.sources.index import Column
from vitruvian.data.sources.names import CLASS_FILES, natural, parse_classes, split_of_file
from vitruvian.data.sources.remote import LocalShard, ShardCache, download, remote_files, remote_size, remote_text
from vitruvian.errors import DataError
from vitruvian.files import cache_folder, parse_json, parse_object, scratch_folder, short_hash

BYTES_KEPT = 2**35
"""Of one dataset on the local disk."""

MAX_LANES = 64

LISTS_AT_A_TIME = 16
"""Lists of labels that are fetched together."""

SIZES_FILE = "sizes.json"
"""Beside the shards: how many samples each holds, by file name."""


class StreamSource(PartSource):
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

    def part(self, index: int) -> tuple[LocalShard, int]:
        number, within = located(self._ends, index)
        return self._shard(number), within

    def _shard(self, number: int) -> LocalShard:
        shard = self.cache.shard(number)
        wanted = int(np.diff(self._ends, prepend=0)[number])
        if len(shard) != wanted:
            raise DataError(
                f"{self.cache.urls[number]}: {len(shard)} labeled images, but {SIZES_FILE} says {wanted}; correct it"
            )
        return shard

    @cached_property
    def _labels(self) -> Column:
        path = scratch_folder() / "labels.i32"
        with open(path, "wb") as file:
            for labels in self._shard_labels() if self._small else self._listed_labels():
                labels.tofile(file)
        return Column(path, "i4")

    def labels(self) -> NDArray[np.int32]:
        """All labels: with all shards where these fit on the local disk, otherwise from the lists beside them."""
        return self._labels.array()

    def _shard_labels(self) -> Iterator[NDArray[np.int32]]:
        for number in range(len(self.cache.urls)):
            self.cache.begin(number)
        return (self._shard(number).labels() for number in range(len(self.cache.urls)))

    def _listed_labels(self) -> Iterator[NDArray[np.int32]]:
        lists = [url.removesuffix(".tar") + ".jsonl" for url in self.cache.urls]
        known, sizes = range(len(self.classes)), np.diff(self._ends, prepend=0).tolist()
        with ThreadPoolExecutor(LISTS_AT_A_TIME) as pool:
            for url, text, size in zip(lists, pool.map(remote_text, lists), sizes):
                if text is None:
                    raise DataError(
                        f"{self.name}: all labels are asked for, which are only in shards too large to fetch; write "
                        f'{url} and so on, a line {{"label": number}} for each sample, as vit pack does, or give a '
                        "split of its own for validation, and sample uniformly"
                    )
                found = [parse_object(line, url, raises=DataError).get("label") for line in text.splitlines()]
                if len(found) != size or not all(label in known for label in found):
                    raise DataError(f"{url}: not the numbers of the classes of {size} samples; correct it")
                yield np.array(found, np.int32)

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
