"""The files of a bulk job: Parquet parts and `job.json`, in a local folder or behind a URL."""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitruvian.data.remote import file_system, retry
from vitruvian.errors import DataError, FileError, parsing, require
from vitruvian.files import file_stamp, parse_object, read_bytes, short_hash, write_bytes

WRITING: dict[str, Any] = {
    "compression": "zstd",
    "write_page_checksum": True,
    "use_dictionary": ["split", "label", "error"],  # keys and vectors hardly repeat
}
IDENTITY = b"vitruvian"  # metadata key of the identity of the job
DIGEST = b"vitruvian_digest"  # metadata key of the digest of the rows, by which an edited part is recognized
MAX_PART_BYTES = 2**31
JOB_FILE = "job.json"
NAMES = ("model", "data")  # fields of job.json for people only: the same files may have another path on another machine
SHOWN = 5


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
        """Sorted names of the files that are not hidden; empty if the folder does not exist."""
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

    def read_description(self) -> dict[str, Any]:
        """The content of `job.json`."""
        try:
            return parse_object(self.read(JOB_FILE), f"{self}/{JOB_FILE}", raises=DataError)
        except DataError as error:
            raise error.replace(hint="remove it and run the job again, which keeps the parts") from error

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


Row = tuple[RowDetails, Any, str | None]  # an image, its vector or predictions (None if there is an error), the error


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


class DamagedPart(DataError):
    """The part is corrupt and has to be made again."""


@dataclass(frozen=True)
class BulkResult:
    """The output folder of a bulk job: parts of consecutive rows, and the description of the job."""

    folder: OutputFolder
    job: dict[str, Any]  # the content of `job.json`

    @cached_property
    def identity(self) -> str:
        """A hash of everything that the rows depend on."""
        return short_hash([{name: value for name, value in sorted(self.job.items()) if name not in NAMES}])

    @property
    def images(self) -> int:
        return int(self.job["images"])

    @property
    def parts(self) -> int:
        return -(-self.images // int(self.job["piece"]))

    def name_of(self, part: int) -> str:
        return f"part-{part:06d}-of-{self.parts:06d}.parquet"

    def rows_of(self, part: int) -> range:
        piece = int(self.job["piece"])
        return range(part * piece, min((part + 1) * piece, self.images))

    @cached_property
    def columns(self) -> Any:
        """The schema of the parts."""
        pa = require("pyarrow", "parquet")
        prediction = pa.struct([("label", pa.string()), ("index", pa.int32()), ("probability", pa.float32())])
        result = ("predictions", pa.list_(prediction))
        if self.job["task"] == "embed":
            kind = pa.float16() if self.job["dtype"] == "float16" else pa.float32()
            result = ("vector", pa.list_(kind, self.job["width"]))
        texts = [(name, pa.string()) for name in ("key", "split", "label")]
        return pa.schema([("index", pa.int64()), *texts, result, ("error", pa.string())])

    def write(self, part: int, rows: Sequence[Row]) -> None:
        pa, parquet = require("pyarrow", "parquet"), require("pyarrow.parquet", "parquet")
        details, results, errors = zip(*rows)
        values: list[Any] = [np.array(self.rows_of(part)), *zip(*details), results, errors]
        arrays = [
            vectors_array(column, kind) if pa.types.is_fixed_size_list(kind) else pa.array(column, kind)
            for column, kind in zip(values, self.columns.types)
        ]
        table, file = pa.table(arrays, self.columns), io.BytesIO()
        metadata = {IDENTITY: self.identity.encode(), DIGEST: digest_of(table)}
        parquet.write_table(table.replace_schema_metadata(metadata), file, **WRITING)
        self.folder.write(self.name_of(part), file.getvalue())

    def table(self, part: int, *, only: Sequence[str] | None = None) -> Any:
        """A verified part. With `only`, these columns, `index` among them; others are not decoded and not checked.

        Raises:
            DamagedPart: The file is corrupt.
            DataError: The file is not a part of this job, or was edited.
        """
        parquet, pa = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
        name, rows, columns = self.name_of(part), self.rows_of(part), self.columns
        where, again = f"{self.folder}/{name}", "remove it and run the job again"
        file = io.BytesIO(self.folder.read(name))
        with parsing(where, DamagedPart, reason="a damaged part", hint=again):
            table = parquet.read_table(file, columns=only and list(only), page_checksum_verification=True)
            table.validate(full=True)
        metadata = table.schema.metadata or {}
        if metadata.get(IDENTITY) != self.identity.encode():
            what = "written by another job, with another model, data or settings"
            raise DataError(what, where=where, hint="choose another folder")
        if not table.schema.equals(columns if only is None else pa.schema([columns.field(column) for column in only])):
            raise DataError("its columns do not match the job", where=where, hint=again)
        if not np.array_equal(table["index"].to_numpy(), np.arange(rows.start, rows.stop)):
            raise DamagedPart(f"not the rows {rows.start} to {rows.stop - 1}", where=where, hint=again)
        if only is None and metadata.get(DIGEST) != digest_of(table):
            raise DataError("edited since it was written", where=where, hint=again)
        return table.replace_schema_metadata({IDENTITY: self.identity.encode()})

    def tables(self) -> Iterator[Any]:
        """The verified parts, in order."""
        self.check_names()
        yield from map(self.table, range(self.parts))

    def check_names(self) -> None:
        """Raise DataError if a part is missing or does not belong to the job."""
        existing = {name for name in self.folder.names() if name.startswith("part-")}
        numbers = {name: name.removeprefix("part-").partition("-")[0] for name in existing}
        numbered = {name: int(n) for name, n in numbers.items() if n.isdecimal() and len(n) < 20}
        parts = {name for name, part in numbered.items() if part < self.parts and name == self.name_of(part)}
        foreign = sorted(existing - parts)
        if foreign and not parts:
            reason = f"{JOB_FILE} describes {self.parts:,} parts, which do not include {foreign[0]}"
            hint = "if it was edited, remove it and run the job again, which keeps the parts"
            raise DataError(reason, where=self.folder, hint=hint)
        count = self.parts - len(parts)
        if count:
            missing = (part for part in range(1, self.parts + 1) if self.name_of(part - 1) not in parts)
            some = ", ".join(map(str, islice(missing, SHOWN))) + ", ..." * (count > SHOWN)
            what = f"{count:,} of {self.parts:,} parts are missing (number {some})"
            raise DataError(what, where=self.folder, hint="run the job again; it computes only these")
        if foreign:
            what = f"{foreign[0]} is not a part of this job of {self.parts:,} parts"
            raise DataError(what, where=self.folder, hint="remove it")
