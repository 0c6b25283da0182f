"""Results as one table: the extension of the file decides between CSV, JSON Lines and Parquet."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from vitruvian.errors import FileError, require
from vitruvian.files import atomic_open

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
