"""Datasets behind URLs: tar shards read through fsspec and cached on the local disk."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import cache_folder, file_lock, scratch_folder
from vitruvian.data.columns import Column, OpenFile
from vitruvian.data.decode import RawImage
from vitruvian.data.index import class_numbers
from vitruvian.data.names import CLASS_FILES, expanded, natural, parse_classes, split_of_file
from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.shards import open_tar, read_member, samples
from vitruvian.data.sources import Dataset, PartSource, Source, located, make_dataset
from vitruvian.errors import DataError, FileError, MissingExtraError, VitruvianError, require
from vitruvian.files import MAX_TEXT_BYTES, atomic_open, atomic_path, decode_utf8, parse_json, parse_object, short_hash
from vitruvian.text import describe_error

Result = TypeVar("Result")

ATTEMPTS = 4

FIRST_WAIT_SECONDS = 0.5
"""Doubled after each failed attempt."""

CONNECT_SECONDS = 5
"""To reach an S3 endpoint; the libraries' own is 60 s, tried up to 25 times."""

READ_SECONDS = 30
"""Without a byte from an endpoint that was reached."""

PIECE_BYTES = 2**22

REFUSED = (401, 403)
"""Answers of a server that asks for other credentials."""

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "'fsspec[http]'", "https": "'fsspec[http]'"}
"""What fsspec needs for a kind of URL; for others its own message says it."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system a URL belongs to, and the path in it."""
    fsspec = require("fsspec.core", "remote")
    try:
        system, path = fsspec.url_to_fs(url, **options_for(url))
        if url.startswith("s3://"):
            system.retries = 1  # `attempted` tries again
        return system, str(path)
    except ImportError as error:
        package = PACKAGES.get(url.partition("://")[0])
        hint = f"this needs another package: pip install {package}" if package else str(error).splitlines()[0]
        raise MissingExtraError(hint, where=url) from error
    except ValueError as error:
        raise DataError(str(error).splitlines()[0], where=url) from error


def options_for(url: str) -> dict[str, Any]:
    """Time-outs for S3, unless fsspec's configuration has others."""
    if not url.startswith("s3://"):
        return {}
    times = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 0}}
    own = require("fsspec.config", "remote").conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {**times, **own}}


def attempted(
    what: str, action: Callable[[], Result], *, doing: str = "read", raises: type[VitruvianError] = DataError
) -> Result:
    """The result of an action that may fail in passing, tried a few times; errors say what was not read or written."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except VitruvianError:
            raise
        except Exception as error:  # each file system has its own errors
            if status := refusal(error):
                raise DataError(
                    f"access denied ({status}): {describe_error(error)}; check the credentials, and that they may "
                    "list and read there",
                    where=what,
                ) from error
            final = isinstance(error, FileNotFoundError | IsADirectoryError)
            if final or attempt == ATTEMPTS - 1:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                tried = f" ({ATTEMPTS} attempts)" if not final else ""
                raise raises(f"cannot be {doing}: {type(error).__name__}: {reason}{tried}", where=what) from error
            time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
    raise AssertionError("the loop returns or raises")


def refusal(error: BaseException) -> int:
    """The status with which a server asked for other credentials; 0 where it is another error."""
    if isinstance(error, PermissionError):
        return 403
    statuses = [getattr(each, "status", 0) for each in (error, error.__cause__)]  # HTTP's may pass for a missing file
    return next((status for status in statuses if status in REFUSED), 0)


def remote_files(url: str, ending: str) -> list[str]:
    """URLs of the files that a URL means: a file, a pattern, or a folder with files of this ending at any depth."""
    found: list[str] = []
    for name in expanded(url):
        system, path = file_system(name)
        if any(mark in path for mark in "*?["):
            paths = attempted(name, partial(listed, system.glob, path))
        elif path.lower().endswith(ending):
            paths = [path]
        else:
            paths = attempted(name, partial(listed, system.find, path))
        found += [str(system.unstrip_protocol(path)) for path in paths if path.lower().endswith(ending)]
    return found


def listed(lister: Callable[[str], Any], path: str) -> list[str]:
    return sorted(map(str, lister(path)))


def remote_text(url: str) -> str | None:
    """The text of a small file, or None where there is none."""
    system, path = file_system(url)
    if not attempted(url, lambda: system.exists(path)):
        return None
    size = remote_size(url)
    if size is not None and size > MAX_TEXT_BYTES:
        raise DataError(f"{size >> 20} MiB exceeds the limit of {MAX_TEXT_BYTES >> 20} MiB for a list", where=url)
    return decode_utf8(attempted(url, lambda: bytes(system.cat_file(path))), url, raises=DataError)


def remote_size(url: str) -> int | None:
    """Bytes of a file, where the file system tells."""
    system, path = file_system(url)
    size = attempted(url, lambda: system.info(path).get("size"))
    return int(size) if size is not None else None


def download(url: str, target: Path) -> None:
    """Copy a file here: whole, or not at all."""
    system, path = file_system(url)

    def copy(here: BinaryIO) -> None:
        here.seek(0)
        here.truncate()
        with system.open(path, "rb", cache_type="readahead", block_size=PIECE_BYTES) as file:
            while piece := file.read(PIECE_BYTES):
                try:
                    here.write(piece)
                except OSError as error:  # of this disk: another attempt does not help
                    raise FileError(f"cannot be written: {error.strerror}", where=target) from error

    with atomic_open(target) as here:
        attempted(url, partial(copy, here))
        wanted, found = remote_size(url), here.tell()
        if wanted is not None and wanted != found:
            raise DataError(f"{found} of {wanted} bytes arrived", where=url)


THREADS = 4
"""Shards fetched at a time by one process."""


class LocalShard(Source):
    """A shard on the local disk and where its labeled images lie; it stays readable when it is evicted."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "index.npz", allow_pickle=False) as content:
            self._labels: NDArray[np.int32] = content["labels"]
            self._offsets, self._sizes, self._members = content["offsets"], content["sizes"], content["members"]
            self._weights: NDArray[np.float32] = content["weights"]
            self.name = str(content["name"])
        self._file = OpenFile(folder / "shard.tar")
        self._file.read(0, 0)  # opened now

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def weight(self, index: int) -> float:
        return float(self._weights[index])

    def key(self, index: int) -> str:
        return f"{self.name}:{os.fsdecode(self._members[index])}"

    def read(self, index: int) -> RawImage:
        size = int(self._sizes[index])
        return read_member(self._file, int(self._offsets[index]), size, self.key(index))


class ShardCache:
    """The shards of one dataset by number, fetched when they are needed or announced."""

    def __init__(self, urls: tuple[str, ...], classes: tuple[str, ...], *, folder: Path, bytes_kept: int, kept: int):
        """At most about `bytes_kept` bytes stay on the disk, and `kept` shards stay open in a process."""
        self.urls, self.classes = urls, classes
        self.folder, self.bytes_kept, self.kept = folder, bytes_kept, kept
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._futures: OrderedDict[int, Future[LocalShard]] = OrderedDict()
        self._waiting: queue.SimpleQueue[tuple[int, Future[LocalShard]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_empty()

    def shard(self, number: int) -> LocalShard:
        """The shard, once it is here."""
        future = self.begin(number)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._futures.pop(number, None)  # so that the next call tries again
            raise

    def begin(self, number: int) -> Future[LocalShard]:
        """Fetch a shard in the background, unless it is here or on its way."""
        with self._lock:
            if number not in self._futures:
                self._futures[number] = Future()
                self._waiting.put((number, self._futures[number]))
                if len(self._threads) < THREADS:
                    thread = threading.Thread(target=self._work, daemon=True)  # an exit does not wait for it
                    self._threads.append(thread)
                    thread.start()
            self._futures.move_to_end(number)
            future = self._futures[number]
            while len(self._futures) > self.kept and next(iter(self._futures.values())).done():
                self._futures.popitem(last=False)
            return future

    def _work(self) -> None:
        while True:
            number, future = self._waiting.get()
            try:
                future.set_result(self._fetched(self.urls[number]))
            except BaseException as error:
                future.set_exception(error)

    def _fetched(self, url: str) -> LocalShard:
        target = self.folder / short_hash([url, remote_size(url), self.classes])
        try:
            return self._copied(url, target)
        except (OSError, FileError) as error:  # it must not pass for an image that cannot be read
            raise DataError(f"no copy of it in {self.folder}: {describe_error(error)}", where=url) from error

    def _copied(self, url: str, target: Path) -> LocalShard:
        with file_lock(target.with_suffix(".lock")):  # other processes wait for this copy instead of making their own
            if not target.is_dir():
                with atomic_path(target) as new:
                    new.mkdir()
                    download(url, new / "shard.tar")
                    write_table(new, url.rpartition("/")[2], self.classes)
                self._evict(target)
            os.utime(target)
            return LocalShard(target)

    def _evict(self, newest: Path) -> None:
        """Remove the shards that were opened longest ago until the rest fits."""
        with file_lock(self.folder / "eviction.lock"):
            folders = [path.parent for path in self.folder.glob("[!.]*/shard.tar")]
            sizes = {folder: (folder / "shard.tar").stat().st_size for folder in folders}
            excess = sum(sizes.values()) - self.bytes_kept
            for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
                if excess > 0 and folder != newest:
                    with file_lock(folder.with_suffix(".lock"), wait=False) as free:
                        if free:  # no process is about to open it
                            shutil.rmtree(folder, ignore_errors=True)
                            excess -= sizes[folder]


def write_table(folder: Path, name: str, classes: tuple[str, ...]) -> None:
    """Write down where the labeled images of a shard lie."""
    found = [sample for sample in samples(folder / "shard.tar", name) if sample.member and sample.label is not None]
    np.savez(
        folder / "index.npz",
        labels=class_numbers([sample.label or "" for sample in found], classes),
        offsets=np.array([sample.offset for sample in found], np.int64),
        weights=np.array([sample.weight for sample in found], np.float32),
        sizes=np.array([sample.size for sample in found], np.int64),
        members=np.array([os.fsencode(sample.member) for sample in found], np.bytes_),
        name=np.array(name),
    )


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
