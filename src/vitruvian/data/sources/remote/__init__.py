"""Files behind a URL, through fsspec: found, read and copied here."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitruvian.data.sources.names import expanded
from vitruvian.errors import DataError, FileError, MissingExtraError, VitruvianError, require
from vitruvian.files import writing

Result = TypeVar("Result")

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 0.5
"""Doubled after each failed attempt."""

PIECE_BYTES = 2**22

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "'fsspec[http]'", "https": "'fsspec[http]'"}
"""What fsspec needs for a kind of URL; for others its own message says it."""


def file_system(url: str) -> tuple[Any, str]:
    """The file system a URL belongs to, and the path in it."""
    fsspec = require("fsspec.core", "remote")
    try:
        system, path = fsspec.url_to_fs(url)
        return system, str(path)
    except ImportError as error:
        package = PACKAGES.get(url.partition("://")[0])
        hint = f"this needs another package: pip install {package}" if package else str(error).splitlines()[0]
        raise MissingExtraError(f"{url}: {hint}") from error
    except ValueError as error:
        raise DataError(f"{url}: {str(error).splitlines()[0]}") from error


def attempted(what: str, action: Callable[[], Result]) -> Result:
    """The result of an action that may fail in passing, tried a few times; `what` is named in the error."""
    for attempt in range(ATTEMPTS):
        try:
            return action()
        except VitruvianError:
            raise
        except Exception as error:  # each file system has its own errors
            final = isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
            if final or attempt == ATTEMPTS - 1:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise DataError(f"{what}: cannot be read: {type(error).__name__}: {reason}") from error
            time.sleep(FIRST_WAIT_SECONDS * 2**attempt)
    raise AssertionError("the loop returns or raises")


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
    return attempted(url, lambda: bytes(system.cat_file(path))).decode("utf-8-sig")


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
                    raise FileError(f"{target}: cannot be written: {error.strerror}") from error

    with writing(target) as here:
        attempted(url, partial(copy, here))
        wanted, found = remote_size(url), here.tell()
        if wanted is not None and wanted != found:
            raise DataError(f"{url}: {found} of {wanted} bytes arrived")
