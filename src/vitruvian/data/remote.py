"""Datasets behind URLs: tar shards read through fsspec and cached on the local disk."""

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

from vitruvian.cache import cache_folder, file_lock
from vitruvian.data.columns import Column, scratch_column
from vitruvian.data.index import FORMAT, write_index
from vitruvian.data.names import CLASS_FILES, expand_braces, parse_classes, split_of_file
from vitruvian.data.order import Blocks, IndexArray
from vitruvian.data.shards import NUMBERS, TarSource, open_shards, shard_entries
from vitruvian.data.sources import Dataset, PartSource, locate, make_dataset
from vitruvian.errors import DataError, FileError, MissingExtraError, VitruvianError, parsing, require
from vitruvian.files import MAX_TEXT_BYTES, atomic_open, atomic_path, decode_utf8, parse_json, parse_object, short_hash
from vitruvian.text import describe_error, natural_key

Result = TypeVar("Result")

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.5  # wait before the second attempt; doubled for each further one
CONNECT_SECONDS = 5  # time to connect to an S3 endpoint; the default of the libraries is 60 s, tried up to 25 times
READ_SECONDS = 30  # time to wait for data from a connected S3 endpoint
CHUNK_BYTES = 2**22
DENIED = (401, 403)  # HTTP status codes of missing or wrong credentials
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "'fsspec[http]'", "https": "'fsspec[http]'"}
"""Packages that fsspec needs for a kind of URL; for other kinds its own message names them."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    fsspec = require("fsspec.core", "remote")
    try:
        system, path = fsspec.url_to_fs(url, **options_for(url))
        if url.startswith("s3://"):
            system.retries = 1  # `retry` tries again
        return system, str(path)
    except ImportError as error:
        package = PACKAGES.get(url.partition("://")[0])
        reason = f"this needs another package: pip install {package}" if package else str(error).splitlines()[0]
        raise MissingExtraError(reason, where=url) from error
    except ValueError as error:
        raise DataError(str(error).splitlines()[0], where=url) from error


def options_for(url: str) -> dict[str, Any]:
    """Timeouts for S3, unless fsspec's configuration sets others."""
    if not url.startswith("s3://"):
        return {}
    defaults = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS, "retries": {"max_attempts": 0}}
    configured = require("fsspec.config", "remote").conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {**defaults, **configured}}


def retry(
    what: str, action: Callable[[], Result], *, doing: str = "read", raises: type[VitruvianError] = DataError
) -> Result:
    """Run an action, up to ATTEMPTS times if it fails; errors name `what` could not be read or written."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except VitruvianError:
            raise
        except Exception as error:  # each file system has its own errors
            # fsspec may raise FileNotFoundError from an HTTP error
            statuses = [getattr(source, "status", 0) for source in (error, error.__cause__)]
            status = 403 if isinstance(error, PermissionError) else next((s for s in statuses if s in DENIED), 0)
            if status:
                hint = "check the credentials and their permission to list and read"
                reason = f"access denied ({status}): {describe_error(error)}"
                raise DataError(reason, where=what, hint=hint) from error
            final = isinstance(error, FileNotFoundError | IsADirectoryError)
            if final or attempt == ATTEMPTS - 1:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                attempts = f" ({ATTEMPTS} attempts)" if not final else ""
                raise raises(f"cannot be {doing}: {type(error).__name__}: {reason}{attempts}", where=what) from error
            time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
    raise AssertionError("the loop returns or raises")


def remote_files(url: str, extension: str) -> list[str]:
    """URLs of the files that a URL means: a file, a pattern, or all files with this extension below a folder."""
    urls: list[str] = []
    for name in expand_braces(url):
        system, path = file_system(name)
        if any(mark in path for mark in "*?["):
            paths = retry(name, partial(system.glob, path))
        elif path.lower().endswith(extension):
            paths = [path]
        else:
            paths = retry(name, partial(system.find, path))
        paths = sorted(path for path in paths if path.lower().endswith(extension))
        urls += [str(system.unstrip_protocol(path)) for path in paths]
    return urls


def remote_text(url: str) -> str | None:
    """The text of a small file, or None if it does not exist."""
    system, path = file_system(url)
    if not retry(url, lambda: system.exists(path)):
        return None
    size = remote_size(url)
    if size is not None and size > MAX_TEXT_BYTES:
        raise DataError(f"{size >> 20} MiB exceeds the limit of {MAX_TEXT_BYTES >> 20} MiB for a list", where=url)
    return decode_utf8(retry(url, lambda: bytes(system.cat_file(path))), url, raises=DataError)


def remote_size(url: str) -> int | None:
    """The size of a file in bytes, or None if the file system does not know it."""
    system, path = file_system(url)
    size = retry(url, lambda: system.info(path).get("size"))
    return int(size) if size is not None else None


def download(url: str, target: Path) -> None:
    """Copy a file to the local disk, completely or not at all."""
    system, path = file_system(url)

    def copy(local: BinaryIO) -> None:
        local.seek(0)
        local.truncate()
        with system.open(path, "rb", cache_type="readahead", block_size=CHUNK_BYTES) as file:
            while chunk := file.read(CHUNK_BYTES):
                try:
                    local.write(chunk)
                except OSError as error:  # of the local disk: another attempt does not help
                    raise FileError(f"cannot be written: {error.strerror}", where=target) from error

    with atomic_open(target) as local:
        retry(url, partial(copy, local))
        expected, size = remote_size(url), local.tell()
        if expected is not None and expected != size:
            raise DataError(f"received {size} of {expected} bytes", where=url)


THREADS = 4  # number of shards that one process downloads concurrently


class ShardCache:
    """The shards of one dataset, downloaded when they are needed or announced."""

    def __init__(self, urls: tuple[str, ...], classes: tuple[str, ...], folder: Path, max_bytes: int, max_open: int):
        """At most about `max_bytes` stay on the disk, and `max_open` shards stay open in a process."""
        self.urls, self.classes = urls, classes
        self.folder, self.max_bytes, self.max_open = folder, max_bytes, max_open
        self._futures: OrderedDict[int, Future[TarSource]] = OrderedDict()
        self._waiting: queue.SimpleQueue[tuple[int, Future[TarSource]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, (self.urls, self.classes, self.folder, self.max_bytes, self.max_open)

    def shard(self, index: int) -> TarSource:
        """The shard, after its download."""
        future = self.begin(index)
        try:
            return future.result()
        except BaseException:
            with self._lock:
                self._futures.pop(index, None)  # so that the next call tries again
            raise

    def begin(self, index: int) -> Future[TarSource]:
        """Start to download a shard in the background, unless it is already there or in progress."""
        with self._lock:
            if index not in self._futures:
                self._futures[index] = Future()
                self._waiting.put((index, self._futures[index]))
                if len(self._threads) < THREADS:
                    thread = threading.Thread(target=self._work, daemon=True)  # so that the process can exit
                    self._threads.append(thread)
                    thread.start()
            self._futures.move_to_end(index)
            future = self._futures[index]
            while len(self._futures) > self.max_open and next(iter(self._futures.values())).done():
                self._futures.popitem(last=False)
            return future

    def _work(self) -> None:
        while True:
            index, future = self._waiting.get()
            try:
                future.set_result(self._fetch(self.urls[index]))
            except BaseException as error:
                future.set_exception(error)

    def _fetch(self, url: str) -> TarSource:
        name = url.rpartition("/")[2]
        target = self.folder / short_hash([FORMAT, url, remote_size(url), self.classes])
        try:
            with file_lock(target.with_suffix(".lock")):  # other processes wait for this copy
                if not target.is_dir():
                    with atomic_path(target) as new:
                        new.mkdir()
                        download(url, new / name)
                        write_index(new, partial(shard_entries, [new / name], where=name), NUMBERS, self.classes)
                        if not (new / "0").is_dir():
                            raise DataError("no labeled images", where=url)
                    self._evict(target)
                os.utime(target)
                return open_shard(target, name, self.classes)
        except (OSError, FileError) as error:  # not an unreadable image, which would be skipped
            raise DataError(f"cannot be copied to {self.folder}: {describe_error(error)}", where=url) from error

    def _evict(self, newest: Path) -> None:
        """Remove the least recently opened shards until the rest fits."""
        with file_lock(self.folder / "eviction.lock"):
            sizes = {path.parent: path.stat().st_size for path in self.folder.glob("[!.]*/*.tar")}
            excess = sum(sizes.values()) - self.max_bytes
            for folder in sorted(sizes, key=lambda folder: folder.stat().st_mtime):
                if excess > 0 and folder != newest:
                    with file_lock(folder.with_suffix(".lock"), wait=False) as free:
                        if free:  # no process is opening it
                            shutil.rmtree(folder, ignore_errors=True)
                            excess -= sizes[folder]


def open_shard(folder: Path, shard: str, classes: tuple[str, ...]) -> TarSource:
    """A shard in the cache and its index, with all files open, so that it stays readable when it is evicted."""
    source = TarSource(shard, classes, folder / "0", shards=[folder / shard])
    source.label(0), source.weight(0), source.key(0), source.file(0).read(0, 0)
    for column in source.numbers.values():
        column[0]
    return source


MAX_CACHE_BYTES = 2**35  # maximum size of one dataset in the cache
MAX_LANES = 64
LIST_THREADS = 16  # number of lists of labels to download concurrently
SIZES_FILE = "sizes.json"  # a file beside the shards: an object from file name to number of samples


class RemoteSource(PartSource):
    """The samples of remote shards. Any sample can be read, which downloads its shard."""

    remote = True

    def __init__(self, name: str, cache: ShardCache, sizes: IndexArray, *, lanes: int, small: bool) -> None:
        """`small`: all shards together fit into the cache."""
        self.name, self.classes, self.cache = name, cache.classes, cache
        self.blocks = Blocks(sizes, lanes)
        self._ends, self._small = np.cumsum(sizes), small

    def part(self, index: int) -> tuple[TarSource, int]:
        shard, within = locate(self._ends, index)
        return self._shard(shard), within

    def _shard(self, index: int) -> TarSource:
        shard = self.cache.shard(index)
        expected = int(np.diff(self._ends, prepend=0)[index])
        if len(shard) != expected:
            reason = f"{len(shard)} labeled images, but {SIZES_FILE} states {expected}"
            raise DataError(reason, where=self.cache.urls[index], hint=f"correct {SIZES_FILE}")
        return shard

    @cached_property
    def _labels(self) -> Column:  # type: ignore[override]
        """All labels: from the shards if they fit into the cache, otherwise from the lists beside them."""
        if not self._small:
            return scratch_column(self._listed_labels(), "i4")
        indices = range(len(self.cache.urls))
        for index in indices:
            self.cache.begin(index)
        return scratch_column((self._shard(index).labels() for index in indices), "i4")

    def _listed_labels(self) -> Iterator[NDArray[np.int32]]:
        """The labels in the list beside each shard."""
        lists = [url.removesuffix(".tar") + ".jsonl" for url in self.cache.urls]
        known, sizes = range(len(self.classes)), np.diff(self._ends, prepend=0).tolist()
        with ThreadPoolExecutor(LIST_THREADS) as pool:
            for url, text, size in zip(lists, pool.map(remote_text, lists), sizes):
                if text is None:
                    raise DataError(
                        "all labels are needed, but they are only in the shards, which are too large to download",
                        where=self.name,
                        hint=f'write {url} and so on with one line {{"label": index}} per sample, as vit pack does; or '
                        "add a validation split, and sample uniformly",
                    )
                labels = [parse_object(line, url, raises=DataError).get("label") for line in text.splitlines()]
                if len(labels) != size or not all(label in known for label in labels):
                    raise DataError(f"expected the class indices of {size} samples", where=url)
                yield np.array(labels, np.int32)

    def announce(self, indices: IndexArray) -> None:
        for shard in np.unique(np.searchsorted(self._ends, indices, side="right")):
            self.cache.begin(int(shard))


def open_url(url: str) -> Dataset:
    """The dataset in remote shards: a pattern, a folder, or one shard."""
    urls = sorted(remote_files(url, ".tar"), key=natural_key)
    if not urls:
        raise DataError("no .tar files", where=url, hint="remote data must be tar shards; download other formats first")
    beside = urls[0].rpartition("/")[0]
    parents = [parent for parent in (beside, beside.rpartition("/")[0]) if "://" in parent]
    lists = ((remote_text(f"{parent}/{name}"), f"{parent}/{name}") for parent in parents for name in CLASS_FILES)
    classes = next((parse_classes(text, where) for text, where in lists if text is not None), None)
    sizes = shard_sizes(urls)
    shard_bytes = remote_size(urls[0]) or 1
    small = shard_bytes * len(urls) <= MAX_CACHE_BYTES
    folder = cache_folder() / "shards" / short_hash([url])
    if classes is None or sizes is None:
        if not small:
            missing = SIZES_FILE if classes else CLASS_FILES[0]
            reason = f"{len(urls)} shards, about {shard_bytes * len(urls) >> 30} GB, without {missing} beside them"
            hint = f"write the list of classes, and {SIZES_FILE}: an object from shard name to number of samples"
            raise DataError(reason, where=url, hint=hint)
        paths = []  # of copies of all shards, in folders of the same names
        for shard in urls:
            parent, _, name = shard.rpartition("/")
            paths.append(folder / short_hash([parent]) / parent.rpartition("/")[2] / name)
            if not paths[-1].is_file() or paths[-1].stat().st_size != remote_size(shard):
                paths[-1].parent.mkdir(parents=True, exist_ok=True)
                download(shard, paths[-1])
        return open_shards(paths, url, classes=classes)
    by_split: dict[str, list[str]] = {}
    for shard in urls:
        by_split.setdefault(split_of_file(shard), []).append(shard)
    sources = {}
    for split, shards in by_split.items():
        most = max(1, min(MAX_LANES, len(shards), MAX_CACHE_BYTES // (4 * shard_bytes)))
        lanes = 1 << (most.bit_length() - 1)  # a power of two can be divided evenly among processes
        cache = ShardCache(tuple(shards), classes, folder, MAX_CACHE_BYTES, max_open=2 * lanes)
        counts = np.array([sizes[shard] for shard in shards], np.int64)
        sources[split] = RemoteSource(f"{url} ({split})", cache, counts, lanes=lanes, small=small)
    return make_dataset(url, sources)


def shard_sizes(urls: list[str]) -> dict[str, int] | None:
    """The number of samples of each shard, from the files beside them; None if one is not listed."""
    sizes: dict[str, int] = {}
    for folder in {url.rpartition("/")[0] for url in urls}:
        where = f"{folder}/{SIZES_FILE}"
        listed = parse_json(remote_text(where) or "{}", where, raises=DataError)
        with parsing(where, DataError, reason="not an object from file names to numbers"):
            sizes.update({f"{folder}/{name}": int(count) for name, count in listed.items()})
    return sizes if all(sizes.get(url, 0) > 0 for url in urls) else None
