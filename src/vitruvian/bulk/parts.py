"""Parts of a bulk result as Parquet files: what a row is, and whether a file is the part that it should be."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitruvian.bulk.images import RowDetails
from vitruvian.bulk.place import Place
from vitruvian.errors import DataError, ImageError, require
from vitruvian.inference import NOT_FINITE
from vitruvian.text import describe_error

WRITING: dict[str, Any] = {
    "compression": "zstd",
    "write_page_checksum": True,
    "use_dictionary": ["split", "label", "error"],  # keys and vectors hardly repeat
}
IDENTITY = b"vitruvian"
"""Key of the job's identity in the metadata of a part."""
DIGEST = b"vitruvian_digest"
"""Key of the digest of its rows, which tells an edited part from one that is as it was written."""


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
        """As a table of pyarrow with these columns."""
        pa = require("pyarrow", "parquet")
        indices = np.arange(self.first, self.first + len(self.details), dtype=np.int64)
        keys, splits, labels = zip(*self.details)
        values: list[Any] = [indices, keys, splits, labels, self.results, self.errors]
        arrays = [
            vectors_array(each, kind) if pa.types.is_fixed_size_list(kind) else pa.array(each, kind)
            for each, kind in zip(values, columns.types)
        ]
        table = pa.table(arrays, columns)
        return table.replace_schema_metadata({IDENTITY: identity.encode(), DIGEST: digest_of(table)})


def digest_of(table: Any) -> bytes:
    """Of the values of all rows, however a file has stored them."""
    pa, found = require("pyarrow", "parquet"), hashlib.sha256()
    for name, column in zip(table.column_names, table.columns):
        found.update(name.encode())
        if pa.types.is_fixed_size_list(column.type):
            whole = column.combine_chunks()
            found.update(np.asarray(whole.is_valid()).tobytes())
            found.update(whole.flatten().to_numpy(zero_copy_only=False).tobytes())
        else:
            found.update(json.dumps(column.to_pylist()).encode())
    return found.hexdigest()[:24].encode()


def vectors_array(vectors: Sequence[Any], kind: Any) -> Any:
    """A column of vectors, or None, without a Python object for each number."""
    pa = require("pyarrow", "parquet")
    missing = np.array([vector is None for vector in vectors], bool)
    values = np.zeros((len(vectors), kind.list_size), kind.value_type.to_pandas_dtype())
    if not missing.all():
        values[~missing] = [vector for vector in vectors if vector is not None]
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), kind.list_size, mask=pa.array(missing))


def columns_of(job: Mapping[str, Any]) -> Any:
    """The schema of the parts of a job, from what `job.json` says."""
    pa = require("pyarrow", "parquet")
    answer = pa.struct([("label", pa.string()), ("index", pa.int32()), ("probability", pa.float32())])
    result = ("predictions", pa.list_(answer))
    if job["task"] == "embed":
        result = ("vector", pa.list_(pa.float16() if job["dtype"] == "float16" else pa.float32(), job["width"]))
    texts = [(name, pa.string()) for name in ("key", "split", "label")]
    return pa.schema([("index", pa.int64()), *texts, result, ("error", pa.string())])


def part_name(number: int, count: int) -> str:
    return f"part-{number:06d}-of-{count:06d}.parquet"


def is_part(name: str, count: int) -> bool:
    """Whether this is the name of one of so many parts."""
    number = name.removeprefix("part-").partition("-")[0]
    return number.isdecimal() and len(number) < 20 and int(number) < count and name == part_name(int(number), count)


def encoded(table: Any) -> bytes:
    parquet = require("pyarrow.parquet", "parquet")
    file = io.BytesIO()
    parquet.write_table(table, file, **WRITING)
    return file.getvalue()


class DamagedPart(DataError):
    """A part that has to be made again."""


def read_part(
    place: Place, name: str, identity: str, rows: range, columns: Any, *, only: Sequence[str] | None = None
) -> Any:
    """The table of a part; DamagedPart where it is not whole, DataError where it is not of this job.

    With `only`, of these columns, `index` among them; the others are not decoded, and so not checked.
    """
    parquet, pa = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
    where, again = f"{place}/{name}", "remove it and run the job again"
    content = place.read(name)
    try:
        table = parquet.read_table(io.BytesIO(content), columns=only and list(only), page_checksum_verification=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedPart(f"{where}: a damaged part ({describe_error(error)[:80]}); {again}") from error
    metadata = table.schema.metadata or {}
    if metadata.get(IDENTITY) != identity.encode():
        raise DataError(f"{where}: written by another job, with another model, data or settings; choose another folder")
    if not table.schema.equals(columns if only is None else pa.schema([columns.field(each) for each in only])):
        raise DataError(f"{where}: its columns are not those of the job; {again}")
    if not np.array_equal(table["index"].to_numpy(), np.arange(rows.start, rows.stop)):
        raise DamagedPart(f"{where}: not the rows {rows.start} to {rows.stop - 1}; {again}")
    if only is None and DIGEST in metadata and metadata[DIGEST] != digest_of(table):  # earlier versions wrote none
        raise DataError(f"{where}: edited since it was written; {again}")
    return table.replace_schema_metadata({IDENTITY: identity.encode()})
