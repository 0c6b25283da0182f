"""The cache directory, scratch directories that are removed with the process, and locks between processes."""

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from vitruvian.errors import FileError


def cache_folder() -> Path:
    """The cache directory: $VITRUVIAN_CACHE, else $XDG_CACHE_HOME/vitruvian, else ~/.cache/vitruvian."""
    ours, shared = os.environ.get("VITRUVIAN_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(ours or Path(shared or "~/.cache") / "vitruvian").expanduser()


class Lock:
    """A lock between processes on an open file, which the system frees when its process dies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(path, thread_local=False)

    def acquire(self, *, wait: bool) -> bool:
        """Try to take the lock, or wait for it; returns whether this process holds it now."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(blocking=wait)
        except Timeout:
            return False
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"cannot be locked: {reason}", where=self.path) from error
        with suppress(OSError), open(self.path, "r+b") as file:
            file.seek(1)  # Windows locks the first byte for readers, too
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            file.truncate()
        return True

    def release(self) -> None:
        self._lock.release()

    def holder(self) -> str:
        """The process that holds the lock, such as `process 1234 on host`, if its note can be read."""
        with suppress(OSError), open(self.path, "rb") as file:
            file.seek(1)
            return file.read(300).decode("utf-8", "replace").strip() or "another process"
        return "another process"


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock in this block; yields whether it was free, which is always so after waiting."""
    lock = Lock(path)
    free = lock.acquire(wait=wait)
    try:
        yield free
    finally:
        if free:
            lock.release()


def scratch_folder() -> Path:
    """A new directory that is removed when this process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch_root(os.getpid())))


@lru_cache(maxsize=1)
def _scratch_root(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vitruvian-scratch-"))

    @atexit.register
    def remove() -> None:
        if os.getpid() == process:  # not in a forked child, which shares the directory
            shutil.rmtree(folder, ignore_errors=True)

    return folder
