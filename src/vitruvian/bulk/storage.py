"""The files of a bulk job: Parquet parts and `job.json`, in a local folder or behind a URL."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitruvian.data.remote import file_system, retry
from vitruvian.errors import DataError, FileError, ImageError, require
from vitruvian.files import file_stamp, read_bytes, write_bytes
from vitruvian.inference import NOT_FINITE
from vitruvian.text import describe_error

WRITING: dict[str, Any] = {
    "compression": "zstd",
    "write_page_checksum": True,
    "use_dictionary": ["split", "label", "error"],  # keys and vectors hardly repeat
}
IDENTITY = b"vitruvian"
"""Metadata key of the identity of the job."""
DIGEST = b"vitruvian_digest"
"""Metadata key of the digest of the rows, by which an edited part is recognized."""
MAX_PART_BYTES = 2**31


class OutputFolder:
    """The files of a job, in a local folder or behind a URL of fsspec. Files are small and are written as a whole."""

    def __init__(self, where: str | Path) -> None:
        self.where = str(where).removeprefix("file://").rstrip("/") or "/"
        _, is_url, name = str(where).rpartition("://")
        if not (name.strip("/") if is_url else name).strip():
            raise FileError("the name of the output folder is empty")
        self._system: Any = None
        if "://" in self.where:
            self._system, self._root = file_system(self.where)
        else:
            self._folder = Path(self.where).expanduser()
            if self._folder.exists() and not self._folder.is_dir():
                raise FileError("not a folder", where=self.where)

    def __str__(self) -> str:
        return self.where

    def names(self) -> list[str]:
        """The names of files that are not hidden, sorted; none if the folder does not exist."""
        if self._system is None:
            names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        else:
            names = retry(self.where, self._list)
        return sorted(name for name in names if not name.startswith("."))

    def _list(self) -> list[str]:
        try:
            self._system.invalidate_cache()
            return [str(path).rpartition("/")[2] for path in self._system.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []

    def stamps(self, prefix: str) -> list[list[Any]]:
        """For each file whose name begins with `prefix` a stamp that changes with the file."""
        names = [name for name in self.names() if name.startswith(prefix)]
        if self._system is None:
            return [file_stamp(self._folder / name) for name in names]
        listed = retry(self.where, lambda: self._system.ls(self._root, detail=True))
        marks = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
        stamps = {str(row["name"]).rpartition("/")[2]: [str(row.get(mark)) for mark in marks] for row in listed}
        return [[name, *stamps.get(name, [])] for name in names]

    def read(self, name: str) -> bytes:
        if self._system is None:
            return read_bytes(self._folder / name, raises=DataError, most=MAX_PART_BYTES)
        return retry(f"{self.where}/{name}", lambda: bytes(self._system.cat_file(f"{self._root}/{name}")))

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically; object stores show an object only once it is complete."""
        if self._system is None:
            write_bytes(self._folder / name, content)
            return
        where, path = f"{self.where}/{name}", f"{self._root}/{name}"
        retry(where, lambda: self._system.pipe_file(path, content), doing="written", raises=FileError)


class RowDetails(NamedTuple):
    """The columns of a result that do not depend on the model."""

    key: str
    split: str
    label: str | None


@dataclass
class Rows:
    """The rows of one part."""

    first: int
    """Index of the first image."""
    details: list[RowDetails] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """A vector or the predictions of each image; None if there is an error."""
    errors: list[str | None] = field(default_factory=list)

    def add(self, images: Sequence[tuple[RowDetails, ImageError | None]], results: Iterator[Any]) -> None:
        """Add the images of a batch and the results of those that could be read, None if not finite."""
        for details, error in images:
            result = next(results) if error is None else None
            self.details.append(details)
            self.results.append(result)
            self.errors.append(error.reason if error is not None else NOT_FINITE if result is None else None)

    def table(self, columns: Any, identity: str) -> Any:
        """A pyarrow table with these columns."""
        pa = require("pyarrow", "parquet")
        indices = np.arange(self.first, self.first + len(self.details), dtype=np.int64)
        keys, splits, labels = zip(*self.details)
        values: list[Any] = [indices, keys, splits, labels, self.results, self.errors]
        arrays = [
            vectors_array(column, kind) if pa.types.is_fixed_size_list(kind) else pa.array(column, kind)
            for column, kind in zip(values, columns.types)
        ]
        table = pa.table(arrays, columns)
        return table.replace_schema_metadata({IDENTITY: identity.encode(), DIGEST: digest_of(table)})


def digest_of(table: Any) -> bytes:
    """A digest of the values of all rows, independent of how a file stores them."""
    pa, digest = require("pyarrow", "parquet"), hashlib.sha256()
    for name, column in zip(table.column_names, table.columns):
        digest.update(name.encode())
        if pa.types.is_fixed_size_list(column.type):
            vectors = column.combine_chunks()
            digest.update(np.asarray(vectors.is_valid()).tobytes())
            digest.update(vectors.flatten().to_numpy(zero_copy_only=False).tobytes())
        else:
            digest.update(json.dumps(column.to_pylist()).encode())
    return digest.hexdigest()[:24].encode()


def vectors_array(vectors: Sequence[Any], kind: Any) -> Any:
    """A column of vectors or None, made without a Python object per number."""
    pa = require("pyarrow", "parquet")
    missing = np.array([vector is None for vector in vectors], bool)
    values = np.zeros((len(vectors), kind.list_size), kind.value_type.to_pandas_dtype())
    if not missing.all():
        values[~missing] = [vector for vector in vectors if vector is not None]
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), kind.list_size, mask=pa.array(missing))


def columns_of(job: Mapping[str, Any]) -> Any:
    """The schema of the parts of a job, from its `job.json`."""
    pa = require("pyarrow", "parquet")
    prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("probability", pa.float32())])
    result = ("predictions", pa.list_(prediction))
    if job["task"] == "embed":
        result = ("vector", pa.list_(pa.float16() if job["dtype"] == "float16" else pa.float32(), job["width"]))
    texts = [(name, pa.string()) for name in ("key", "split", "label")]
    return pa.schema([("index", pa.int64()), *texts, result, ("error", pa.string())])


def part_name(part: int, count: int) -> str:
    return f"part-{part:06d}-of-{count:06d}.parquet"


def is_part(name: str, count: int) -> bool:
    """Whether this is the name of one of `count` parts."""
    digits = name.removeprefix("part-").partition("-")[0]
    return digits.isdecimal() and len(digits) < 20 and int(digits) < count and name == part_name(int(digits), count)


def encode_table(table: Any) -> bytes:
    parquet = require("pyarrow.parquet", "parquet")
    file = io.BytesIO()
    parquet.write_table(table, file, **WRITING)
    return file.getvalue()


class DamagedPart(DataError):
    """The part is corrupt and has to be made again."""


def read_part(
    out: OutputFolder, name: str, identity: str, rows: range, columns: Any, *, only: Sequence[str] | None = None
) -> Any:
    """The table of a part. With `only`, these columns, `index` among them; others are not decoded and not checked.

    Raises:
        DamagedPart: The file is corrupt.
        DataError: The file is not a part of this job, or was edited.
    """
    parquet, pa = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
    fields = {"where": f"{out}/{name}", "hint": "remove it and run the job again"}
    content = out.read(name)
    try:
        table = parquet.read_table(io.BytesIO(content), columns=only and list(only), page_checksum_verification=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedPart(f"a damaged part ({describe_error(error)[:80]})", **fields) from error
    metadata = table.schema.metadata or {}
    if metadata.get(IDENTITY) != identity.encode():
        raise DataError(
            "written by another job, with another model, data or settings",
            where=fields["where"],
            hint="choose another folder",
        )
    if not table.schema.equals(columns if only is None else pa.schema([columns.field(column) for column in only])):
        raise DataError("its columns do not match the job", **fields)
    if not np.array_equal(table["index"].to_numpy(), np.arange(rows.start, rows.stop)):
        raise DamagedPart(f"not the rows {rows.start} to {rows.stop - 1}", **fields)
    if only is None and metadata.get(DIGEST) != digest_of(table):
        raise DataError("edited since it was written", **fields)
    return table.replace_schema_metadata({IDENTITY: identity.encode()})
