"""Files on the disk: written whole or not at all, read as text or JSON, locked, cached, hashed."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vitruvian.errors import FileError, VitruvianError
from vitruvian.text import printable

UNFINISHED = ".tmp"
"""How the name of a temporary folder beside a file that is being written ends; it begins with a dot."""
ABANDONED_SECONDS = 24 * 3600
"""Age at which such a folder is taken for that of a killed process."""
MAX_TEXT_BYTES = 64 * 2**20
"""Larger than any settings file or list of classes."""
MAX_DEPTH = 100
"""Levels of JSON or TOML inside each other."""


@contextmanager
def atomic_path(destination: Path) -> Iterator[Path]:
    """A path of the same name in a temporary folder beside `destination`, which takes its place when the block ends.

    Write a file or make a folder there. What was at `destination` stays until the new is complete on the disk, and
    for good if the block raises; in an existing folder, files of other names stay too.
    """
    folder: Path | None = None
    if destination.exists() and not (destination.is_file() or destination.is_dir()):
        raise FileError("cannot be written: a pipe, a device or a socket, which would be replaced", where=destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{destination.name[:60]}."
        for path in destination.parent.glob(f"{glob.escape(prefix)}*{UNFINISHED}"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=UNFINISHED, dir=destination.parent))
        yield folder / destination.name
        _install(folder / destination.name, destination)
    except OSError as error:
        if folder and error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(folder):
            raise  # of something that the block reads
        raise FileError(f"cannot be written: {error.strerror or error}", where=destination) from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def check_writable(destination: Path) -> None:
    """Refuse a place where nothing can be written before hours go into what is written there."""
    folder = next(path for path in destination.absolute().parents if path.exists())
    try:
        Path(tempfile.mkdtemp(suffix=UNFINISHED, dir=folder)).rmdir()
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror or error}", where=destination) from error


def _install(new: Path, destination: Path) -> None:
    """Put a staged file or folder in its place."""
    for path in [*new.rglob("*"), new] if new.is_dir() else [new]:
        sync(path)
    if new.is_dir() and destination.is_dir():
        for name in sorted(os.listdir(new), key=lambda name: name.endswith(".json")):  # what describes others last
            os.replace(new / name, destination / name)
        sync(destination)
    else:
        os.replace(new, destination)
    sync(destination.parent)


def is_unfinished(path: Path) -> bool:
    """Whether this is the temporary folder of a write that goes on, or did not end."""
    return path.name.startswith(".") and path.name.endswith(UNFINISHED)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left in a folder, and below it, that no other process writes to now."""
    for path in folder.rglob(f".*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if path.is_dir():
        if os.name != "nt":  # Windows has no such call for folders
            with suppress(OSError):  # nor have some network file systems
                _fsync(path, os.O_RDONLY)
    else:
        _fsync(path, os.O_RDWR)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """An open file to write; it takes its name when the block ends."""
    with atomic_path(path) as new, open(new, "wb") as file:
        yield file
        file.flush()


def write_bytes(path: Path, content: bytes) -> Path:
    with atomic_path(path) as new:
        new.write_bytes(content)
    return path


def write_text(path: Path, content: str) -> Path:
    try:
        return write_bytes(path, content.encode("utf-8"))
    except UnicodeEncodeError as error:
        what = printable(content[max(0, error.start - 30) : error.end + 30])
        raise FileError(
            f"cannot be written: {what!r} is not Unicode; rename the file it comes from", where=path
        ) from error


def write_json(path: Path, content: Any) -> Path:
    return write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """Indented JSON in UTF-8; all in ASCII where a file name that is not UTF-8 asks for it."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode("ascii")


def read_bytes(path: Path, *, raises: type[VitruvianError] = FileError, most: int = MAX_TEXT_BYTES) -> bytes:
    """All of a regular file that has at most so many bytes."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise raises("not a regular file", where=path)
        if found.st_size > most:
            raise raises(f"{found.st_size >> 20} MiB exceeds the limit of {most >> 20} MiB", where=path)
        return path.read_bytes()
    except OSError as error:
        raise raises(f"cannot be read: {error.strerror or error}", where=path) from error


def read_text(path: Path, *, raises: type[VitruvianError] = FileError) -> str:
    """A text file in UTF-8, with or without a byte order mark."""
    return decode_utf8(read_bytes(path, raises=raises), path, raises=raises)


def decode_utf8(content: bytes, where: object, *, raises: type[VitruvianError] = FileError) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise raises(f"not UTF-8 text: byte 0x{content[error.start]:02x} at {error.start}", where=where) from error


def read_json(path: Path, *, raises: type[VitruvianError] = FileError) -> Any:
    return parse_json(read_bytes(path, raises=raises), path, raises=raises)


def read_object(path: Path, *, raises: type[VitruvianError] = FileError) -> dict[str, Any]:
    return parse_object(read_bytes(path, raises=raises), path, raises=raises)


def parse_json(text: str | bytes, where: object, *, raises: type[VitruvianError] = FileError) -> Any:
    """What a JSON text says; `where` begins the text of an error."""
    text = decode_utf8(text, where, raises=raises) if isinstance(text, bytes) else text
    with _parsing("JSON", where, raises):
        return _shallow(json.loads(text))


def parse_object(text: str | bytes, where: object, *, raises: type[VitruvianError] = FileError) -> dict[str, Any]:
    content = parse_json(text, where, raises=raises)
    if not isinstance(content, dict):
        raise raises(f"holds a JSON {type(content).__name__}, not an object", where=where)
    return content


def parse_toml(text: str | bytes, where: object, *, raises: type[VitruvianError] = FileError) -> dict[str, Any]:
    text = decode_utf8(text, where, raises=raises) if isinstance(text, bytes) else text
    with _parsing("TOML", where, raises):
        if re.search(rf"(?m)^[ \t\[]*[\w'\"-]+([ \t]*\.[ \t]*[\w'\"-]+){{{MAX_DEPTH}}}", text):
            raise RecursionError  # before tomllib takes minutes over a key of so many parts
        return _shallow(tomllib.loads(text))


@contextmanager
def _parsing(language: str, where: object, raises: type[VitruvianError]) -> Iterator[None]:
    """Make one line of whatever a parser raises."""
    try:
        yield
    except RecursionError:
        raise raises(f"not valid {language}: nested more than {MAX_DEPTH} deep", where=where) from None
    except ValueError as error:
        digits = "set_int_max_str_digits" in str(error)
        reason = "a number has thousands of digits" if digits else " ".join(str(error).split())
        raise raises(f"not valid {language}: {reason}", where=where) from error


def _shallow(content: Any) -> Any:
    """The content itself, which whoever walks through it may do recursively."""
    level = [content]
    for _ in range(MAX_DEPTH):
        nested = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [item for items in nested for item in items]
        if not level:
            return content
    raise RecursionError


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Of a file's bytes, hexadecimal; empty where there is no regular file to read."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def file_stamp(path: Path) -> list[Any]:
    """What changes when a file does: its size and the time of its last change."""
    found = path.stat()
    return [path.name, found.st_size, found.st_mtime_ns]


def short_hash(parts: Sequence[object]) -> str:
    """Of JSON values, in 24 characters."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
