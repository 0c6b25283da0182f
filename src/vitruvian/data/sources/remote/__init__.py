"""Files behind a URL, through fsspec: found, read, and copied to a cache on the local disk that all processes share."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.decode import RawImage
from vitruvian.data.sources.base import Source
from vitruvian.data.sources.formats.tar import read_member, samples
from vitruvian.data.sources.index import OpenFile, class_numbers
from vitruvian.data.sources.names import expanded
from vitruvian.errors import DataError, FileError, MissingExtraError, VitruvianError, require
from vitruvian.files import MAX_TEXT_BYTES, atomic_open, atomic_path, decode_utf8, file_lock, short_hash
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
