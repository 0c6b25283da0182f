"""Parts of a bulk result as Parquet files: what a row is, and whether a file is the part that it should be."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitruvian.bulk.place import Place
from vitruvian.errors import DataError, require
from vitruvian.predict import Answer
from vitruvian.text import one_line

IDENTITY = b"vitruvian"
"""Key of the job's identity in the metadata of a part."""


@dataclass
class Rows:
    """The rows of one piece of work."""

    first: int
    """Number of the first image."""
    keys: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    """A vector or answers for each image; None where there is an error."""
    errors: list[str | None] = field(default_factory=list)

    def table(self, columns: Any, identity: str) -> Any:
        """As a table of pyarrow with these columns."""
        numbers = np.arange(self.first, self.first + len(self.keys), dtype=np.int64)
        values = [numbers, self.keys, self.splits, self.labels, self.results, self.errors]
        arrays = [require("pyarrow", "parquet").array(each, kind) for each, kind in zip(values, columns.types)]
        return require("pyarrow", "parquet").table(arrays, columns.with_metadata({IDENTITY: identity.encode()}))


def columns_of(job: Mapping[str, Any]) -> Any:
    """The schema of the parts of a job, from what `job.json` says."""
    pa = require("pyarrow", "parquet")
    answer = pa.struct([("label", pa.string()), ("index", pa.int32()), ("probability", pa.float32())])
    result = ("answers", pa.list_(answer))
    if job["task"] == "embed":
        result = ("vector", pa.list_(pa.float16() if job["dtype"] == "float16" else pa.float32(), job["width"]))
    texts = [(name, pa.string()) for name in ("key", "split", "label")]
    return pa.schema([("index", pa.int64()), *texts, result, ("error", pa.string())])


def as_cells(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{"label": a.label, "index": a.index, "probability": a.probability} for a in answers]


def part_name(number: int, count: int) -> str:
    return f"part-{number:06d}-of-{count:06d}.parquet"


def is_part(name: str, count: int) -> bool:
    """Whether this is the name of one of so many parts."""
    number = name.removeprefix("part-").partition("-")[0]
    return number.isdecimal() and len(number) < 20 and int(number) < count and name == part_name(int(number), count)


def encoded(table: Any) -> bytes:
    parquet = require("pyarrow.parquet", "parquet")
    file = io.BytesIO()
    parquet.write_table(table, file, compression="zstd", write_page_checksum=True)
    return file.getvalue()


class DamagedPart(DataError):
    """A part that has to be made again."""


def read_part(place: Place, name: str, identity: str, rows: range, columns: Any) -> Any:
    """The table of a part; DamagedPart where it is not whole, DataError where it is not of this job."""
    parquet, pa = require("pyarrow.parquet", "parquet"), require("pyarrow", "parquet")
    where, again = f"{place}/{name}", "remove it and run the job again"
    content = place.read(name)
    try:
        table = parquet.read_table(io.BytesIO(content), page_checksum_verification=True)
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedPart(f"{where}: a damaged part ({one_line(error)[:80]}); {again}") from error
    if (table.schema.metadata or {}).get(IDENTITY) != identity.encode():
        raise DataError(f"{where}: written by another job, with another model, data or settings; choose another folder")
    if not table.schema.equals(columns):
        raise DataError(f"{where}: its columns are not those of the job; {again}")
    if not np.array_equal(table["index"].to_numpy(), np.arange(rows.start, rows.stop)):
        raise DamagedPart(f"{where}: not the rows {rows.start} to {rows.stop - 1}; {again}")
    return table
