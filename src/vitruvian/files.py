"""Files: atomic writes; reading of text, JSON and TOML with limits; hashes; results as a table."""

import csv
import glob
import hashlib
import io
import json
import os
import pickletools
import re
import shutil
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from vitruvian.errors import FileError, VitruvianError, require
from vitruvian.text import describe_error, printable

T = TypeVar("T")
UNFINISHED = ".tmp"  # suffix of the temporary directory beside a file that is being written; its name starts with a dot
ABANDONED_SECONDS = 24 * 3600  # age at which such a directory is considered abandoned by a killed process
MAX_TEXT_BYTES = 64 * 2**20  # default limit of `read_bytes`; larger than any settings file or list of classes
MAX_DEPTH, MAX_INT_BITS = 100, 1023  # limits of JSON and TOML: nesting, and integers that a float can hold


@contextmanager
def atomic_path(destination: Path) -> Iterator[Path]:
    """Yield a path in a temporary directory; what the block writes there replaces `destination` when the block ends.

    Write a file or create a directory. The old content of `destination` stays until the new content is synced to
    disk, and remains if the block raises. In an existing directory, files with other names are kept.
    """
    folder: Path | None = None
    if destination.exists() and not (destination.is_file() or destination.is_dir()):
        raise FileError("not a regular file", where=destination)
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
            raise  # an error of a file that the block reads
        raise FileError(f"cannot be written: {error.strerror or error}", where=destination) from error
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def check_writable(destination: Path) -> None:
    """Raise FileError if nothing can be written at `destination`, before hours of work are spent on it."""
    folder = next(path for path in destination.absolute().parents if path.exists())
    try:
        Path(tempfile.mkdtemp(suffix=UNFINISHED, dir=folder)).rmdir()
    except OSError as error:
        raise FileError(f"cannot be written: {error.strerror or error}", where=destination) from error


def _install(new: Path, destination: Path) -> None:
    """Move a complete file or directory to its destination."""
    for path in [*new.rglob("*"), new] if new.is_dir() else [new]:
        sync(path)
    if new.is_dir() and destination.is_dir():
        names = sorted(os.listdir(new), key=lambda name: name.endswith(".json"))  # descriptions of other files last
        for name in names:
            os.replace(new / name, destination / name)
        sync(destination)
    else:
        os.replace(new, destination)
    sync(destination.parent)


def is_unfinished(path: Path) -> bool:
    """Whether this is the temporary directory of a write that is running or was killed."""
    return path.name.startswith(".") and path.name.endswith(UNFINISHED)


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary directories of killed writes at any depth of a folder that no other process writes to."""
    for path in folder.rglob(f".*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the entries of a directory, are on disk."""
    if not path.is_dir():
        _fsync(path, os.O_RDWR)
    elif os.name != "nt":  # Windows cannot sync directories
        with suppress(OSError):  # some network file systems cannot, either
            _fsync(path, os.O_RDONLY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it replaces `path` when the block ends."""
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
        reason, hint = f"cannot be written: {what!r} is not Unicode", "rename the file it comes from"
        raise FileError(reason, where=path, hint=hint) from error


def write_json(path: Path, content: Any) -> Path:
    return write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """Indented JSON in UTF-8, or in ASCII if it contains a file name that is not UTF-8."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode("ascii")


def read_bytes(path: Path, *, raises: type[VitruvianError] = FileError, most: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise raises("not a regular file", where=path)
        if status.st_size > most:
            raise raises(f"{status.st_size >> 20} MiB exceeds the limit of {most >> 20} MiB", where=path)
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a path may contain a NUL
        raise raises(f"cannot be read: {describe_error(error)}", where=path) from error


def read_text(path: Path, *, raises: type[VitruvianError] = FileError) -> str:
    """The text of a UTF-8 file, with or without a byte order mark."""
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
    """Parse JSON of limited depth; errors name `where`."""
    return _parse("JSON", json.loads, text, where, raises)


def parse_object(text: str | bytes, where: object, *, raises: type[VitruvianError] = FileError) -> dict[str, Any]:
    content = parse_json(text, where, raises=raises)
    if not isinstance(content, dict):
        raise raises(f"contains a JSON {type(content).__name__}, not an object", where=where)
    return content


def parse_toml(text: str | bytes, where: object, *, raises: type[VitruvianError] = FileError) -> dict[str, Any]:
    def loads(text: str) -> dict[str, Any]:
        if re.search(rf"(?m)^[ \t\[]*[\w'\"-]+([ \t]*\.[ \t]*[\w'\"-]+){{{MAX_DEPTH}}}", text):
            raise RecursionError  # before tomllib spends minutes on a key of that many parts
        return tomllib.loads(text)

    return _parse("TOML", loads, text, where, raises)


def _parse(
    language: str, loads: Callable[[str], T], text: str | bytes, where: object, raises: type[VitruvianError]
) -> T:
    """Parse text of limited depth, with one-line errors."""
    text = decode_utf8(text, where, raises=raises) if isinstance(text, bytes) else text
    try:
        content = loads(text)
        level: list[Any] = [content]
        for _ in range(MAX_DEPTH):
            if any(type(x) is int and x.bit_length() > MAX_INT_BITS for x in level):
                raise ValueError("a number has hundreds of digits")
            nested = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
            level = [item for items in nested for item in items]
            if not level:
                return content
        raise RecursionError
    except RecursionError:
        raise raises(f"not valid {language}: nested more than {MAX_DEPTH} deep", where=where) from None
    except ValueError as error:
        raise raises(f"not valid {language}: {describe_error(error)}", where=where) from error


def check_pickle(file: IO[bytes], where: object, *, raises: type[VitruvianError] = FileError) -> None:
    """Read the opcodes of a pickle, and raise if loading it would exhaust the memory or the stack.

    Even an unpickler that calls no code obeys `bytearray(10**10)` and huge memo indices, and the hash of a tuple that
    is nested 100,000 deep overflows the stack.
    """
    stack: list[int] = []  # for each value, how deep its tuples are nested; -1 is a mark
    memo: dict[Any, int] = {}
    for opcode, value, _ in pickletools.genops(file):
        name, depth, before = opcode.name, 0, [item.name for item in opcode.stack_before]
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(memo) if value is None else int(value)
            memo[index] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name == "MARK":
            stack.append(-1)
        else:
            while "mark" in before and (inner := stack.pop()) >= 0:
                depth = max(depth, inner)
            depth = max([depth, *(stack.pop() for item in before if item not in ("mark", "stackslice"))])
            depth += name.startswith("TUPLE")
            stack += [depth] * len(opcode.stack_after)
        if depth > MAX_DEPTH:
            raise raises(f"tuples are nested more than {MAX_DEPTH} deep", where=where)
        if (name.endswith("PUT") and index > 2**20) or (name == "GLOBAL" and str(value).endswith(" bytearray")):
            raise raises("the pickle would fill the memory", where=where)


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's content; empty if there is no regular file."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def file_stamp(path: Path) -> list[Any]:
    """Name, size and modification time of a file, which change when the file does."""
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns]


def fingerprint(data: Any) -> str:
    """SHA-256 of a JSON value, independent of spacing and the order of keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def short_hash(parts: Sequence[object]) -> str:
    """The first 24 digits of the fingerprint of JSON values, for the names of files."""
    return fingerprint(parts)[:24]


TABLE_EXTENSIONS = (".csv", ".jsonl", ".parquet")

Row = Mapping[str, Any]


def is_table(name: str | Path) -> bool:
    """Whether a name is that of a table file rather than of a folder."""
    return str(name).lower().endswith(TABLE_EXTENSIONS) and "://" not in str(name) and not Path(name).is_dir()


@contextmanager
def open_table(path: Path, lengths: Mapping[str, int]) -> Iterator[Callable[[Sequence[Row]], None]]:
    """A context with a function that appends rows; the file replaces `path` when the block ends.

    CSV has no lists: those of `lengths` become that many columns, such as `label_1`, `probability_1`, `label_2`.
    """
    if not is_table(path):
        raise FileError(f"not a table file; expected {', '.join(TABLE_EXTENSIONS)}", where=path)
    with atomic_open(path) as file:
        if path.suffix.lower() == ".jsonl":
            yield lambda rows: file.writelines(json.dumps(row).encode() + b"\n" for row in rows)
        elif path.suffix.lower() == ".csv":
            # a path need not be UTF-8
            text = io.TextIOWrapper(cast(IO[bytes], file), "utf-8", errors="surrogateescape", newline="")
            writer, columns = csv.writer(text), list[str]()

            def write_csv(rows: Sequence[Row]) -> None:
                for row in (flatten(row, lengths) for row in rows):
                    if not columns:
                        columns.extend(row)
                        writer.writerow(columns)
                    writer.writerow(row.values())

            yield write_csv
            text.detach()
        else:
            table, parquet = require("pyarrow", "parquet").Table, require("pyarrow.parquet", "parquet")
            rows: list[Row] = []
            yield rows.extend
            parquet.write_table(table.from_pylist(rows), file)


def flatten(row: Row, lengths: Mapping[str, int]) -> dict[str, Any]:
    """A row without lists: a column for each number of a vector, or for label and probability of each prediction."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name not in lengths:
            flat[name] = value
            continue
        for position in range(lengths[name]):
            item = value[position] if value is not None and position < len(value) else None
            if name == "vector":
                flat[f"{name}_{position + 1}"] = item
            else:
                flat[f"label_{position + 1}"] = item and item["label"]
                flat[f"probability_{position + 1}"] = item and item["probability"]
    return flat
