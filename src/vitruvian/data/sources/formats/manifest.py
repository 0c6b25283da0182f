"""A CSV or Parquet manifest: a row for each image, with its path, label and perhaps split and weight."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vitruvian.data.sources.base import Dataset, make_dataset
from vitruvian.data.sources.formats.folder import FolderSource
from vitruvian.data.sources.index import CHUNK, Entry, indexed
from vitruvian.data.sources.names import listed_classes, split_name
from vitruvian.errors import DataError, nearest, require
from vitruvian.tasks import DATA_VARIABLE, data_root
from vitruvian.text import printable

WANTED = ("path", "label")
OPTIONAL = ("split", "weight")

CHECKED_ROWS = 20
"""Images at the beginning of each split that are looked for when a manifest is opened."""

Row = tuple[tuple[str, int], dict[str, Any]]
"""Where the row stands, such as ("line", 7), and its values by column."""


def open_manifest(files: list[Path], name: str) -> Dataset:
    """The dataset that a manifest lists, compiled once into an index on disk, so that length costs no memory."""
    path = files[0]
    classes, beside = listed_classes(path.parent)
    kind = f"manifest {data_root().absolute()}"  # its paths were checked against that folder
    stored = indexed(lambda _: entries(path), files=[path, *beside], kind=kind, classes=classes)
    if not stored.splits:
        raise DataError(f"{path}: a manifest without rows; wanted a row of {', '.join(WANTED)} for each image")
    sources = {
        split: FolderSource(f"{name} ({split})", stored.classes, index, root=path.parent)
        for split, index in stored.splits.items()
    }
    for source in sources.values():
        check_paths(path, source)
    return make_dataset(name, sources)


def entries(path: Path) -> Iterator[Entry]:
    rows = parquet_rows(path) if path.suffix.lower() == ".parquet" else csv_rows(path)
    return (entry(path, *row) for row in rows)


def entry(path: Path, place: tuple[str, int], row: dict[str, Any]) -> Entry:
    """One row as an entry, every value checked."""
    image, label = printed(row.get("path")), printed(row.get("label"))
    split, weight = printed(row.get("split")) or "train", printed(row.get("weight")) or "1"
    if not image or not label:
        wrong = f"no {'label' if image else 'path'}; every row needs both"
    else:
        try:
            number = float(weight)
        except ValueError:
            number = math.nan
        if not allowed(path, image):
            wrong = (
                f"the path {printable(image)} leads out of {path.parent.absolute()}; move the manifest to a folder "
                f"above its images, or set {DATA_VARIABLE} to one"
            )
        elif 0 <= number < math.inf:
            return Entry(split_name(split) or split, image, label, number)
        else:
            wrong = f"the weight {weight!r} is not a number from 0 up"
    raise DataError(f"{path}, {place[0]} {place[1]}: {wrong}")


def allowed(manifest: Path, image: str) -> bool:
    """Whether an image lies below the manifest's folder, or below the folder that the user names for all data."""
    if not os.path.isabs(image) and ".." not in image:
        return True
    place = os.path.normpath(manifest.parent.absolute() / image)
    return any(Path(place).is_relative_to(os.path.abspath(root)) for root in (manifest.parent, data_root()))


def printed(value: object) -> str:
    return "" if value is None else str(value).strip()


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a table with commas, semicolons or tabs between the columns."""
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            columns = [name.strip().lower() for name in next(csv.reader([header], delimiter=delimiter), [])]
            check_columns(path, columns)
            reader = csv.reader(file, delimiter=delimiter)
            for values in reader:
                line = reader.line_num + 1
                if values:
                    yield ("line", line), dict(zip(columns, values))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a table in UTF-8 after line {line} ({error}); save it as CSV UTF-8") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        check_columns(path, columns)
        wanted = [column for column in columns if column in WANTED + OPTIONAL]
        number = 0
        for batch in file.iter_batches(CHUNK, columns=wanted, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                yield ("row", number), row


def check_columns(path: Path, columns: Iterable[str]) -> None:
    found = list(columns)
    missing = [column for column in WANTED if column not in found]
    if missing:
        near = [name for column in missing for name in nearest(column, found, 1)]
        hint = f"; is {near[0]!r} meant?" if near else ""
        raise DataError(
            f"{path}: no column {' and no column '.join(missing)} among {printable(', '.join(found)) or 'none'}{hint} "
            f"Wanted: {', '.join(WANTED)}, and if you like {', '.join(OPTIONAL)}"
        )


def check_paths(manifest: Path, source: FolderSource) -> None:
    """Fail at once where the paths begin somewhere else than at the manifest's folder."""
    keys = [source.key(index) for index in range(min(len(source), CHECKED_ROWS))]
    if not any((source.root / key).exists() for key in keys):
        raise DataError(
            f"{manifest}: none of its first {len(keys)} images exists, such as {printable(keys[0])}; "
            f"paths begin at {source.root}"
        )
