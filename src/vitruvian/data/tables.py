"""Datasets in tables: CSV or Parquet manifests of image paths, and Parquet files that hold the images."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.data.columns import CHUNK
from vitruvian.data.decode import RawImage
from vitruvian.data.folder import FolderSource
from vitruvian.data.index import Entry, IndexedSource, indexed
from vitruvian.data.names import listed_classes, natural, split_name, split_of_file
from vitruvian.data.order import Blocks
from vitruvian.data.sources import Dataset, LeftOut, inside, located, make_dataset, read_file
from vitruvian.errors import DataError, ImageError, nearest, require
from vitruvian.files import parse_json
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


IMAGE_COLUMNS = ("image", "img", "jpg", "png")

LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")

GROUP_BYTES = 2**28
"""Memory for the row groups that are mixed at a time."""

MAX_LANES = 256


@dataclass(frozen=True)
class Columns:
    """Where the images and labels of a file are, and the classes' names if the file knows them."""

    image: str
    label: str
    classes: tuple[str, ...] | None


class ParquetSource(IndexedSource):
    """The rows of Parquet files. A row can be had only with its whole row group, so these are the blocks."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, files: Sequence[Path], image: str) -> None:
        super().__init__(name, classes, folder)
        self.files = tuple(files)
        self._image = image
        parquet = require("pyarrow.parquet", "parquet")
        groups, sizes, largest = [], [], 1
        for number, path in enumerate(files):
            metadata = parquet.read_metadata(path)
            for group in range(metadata.num_row_groups):
                groups.append((number, group))
                sizes.append(metadata.row_group(group).num_rows)
                largest = max(largest, metadata.row_group(group).total_byte_size)
        self._groups = groups
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
        labeled = np.diff(np.searchsorted(self.numbers["row"].array(), self._group_ends), prepend=0)
        self.blocks = Blocks(labeled[labeled > 0], max(1, min(MAX_LANES, GROUP_BYTES // largest)))
        self._loaded: OrderedDict[int, Any] = OrderedDict()

    def read(self, index: int) -> RawImage:
        block, within = located(self._group_ends, self.numbers["row"][index])
        cell = self._group(block)[within].as_py()
        content = cell if isinstance(cell, dict) else {"bytes": cell}
        if content.get("bytes"):
            return bytes(content["bytes"])
        if content.get("path"):
            path = self.files[self._groups[block][0]]
            return read_file(path.parent / inside(path, content["path"]))
        raise ImageError("the row has no image", where=self.key(index))

    def _group(self, block: int) -> Any:
        """The images of one row group; those used last stay in memory."""
        if block not in self._loaded:
            parquet = require("pyarrow.parquet", "parquet")
            number, group = self._groups[block]
            with parquet.ParquetFile(self.files[number]) as file:
                table = file.read_row_group(group, columns=[self._image], use_threads=False)
            self._loaded[block] = table.column(0)
            if self.blocks is not None and len(self._loaded) > self.blocks.lanes:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(block)
        return self._loaded[block]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": OrderedDict()}


def holds_images(files: Sequence[Path]) -> bool:
    """Whether files hold images rather than paths to them; several are never a manifest."""
    return len(files) > 1 or image_columns(files[0]) is not None


def image_columns(path: Path) -> Columns | None:
    """The columns of a file of images; None for a file without a column of images, such as a manifest."""
    parquet, types = require("pyarrow.parquet", "parquet"), require("pyarrow.types", "parquet")
    try:
        schema = parquet.read_schema(path)
    except Exception as error:  # pyarrow raises several kinds for broken files
        raise DataError(f"not a Parquet file ({str(error).splitlines()[0]})", where=path) from error
    features = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), path, raises=DataError)
    for key in ("info", "features"):
        features = features.get(key, {}) if isinstance(features, dict) else {}
    features = {name: feature for name, feature in dict(features).items() if isinstance(feature, dict)}
    kinds = {name: feature.get("_type") for name, feature in features.items()}

    def holds_bytes(name: str) -> bool:
        kind = schema.field(name).type
        if types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    image = chosen([name for name in schema.names if holds_bytes(name)], IMAGE_COLUMNS, kinds, "Image")
    if image is None:
        return None
    others = [name for name in schema.names if name != image]
    label = chosen(
        [n for n in others if n in LABEL_COLUMNS or kinds.get(n) == "ClassLabel"], LABEL_COLUMNS, kinds, "ClassLabel"
    )
    if label is None:
        raise DataError(f"images without labels: no column label among {', '.join(others) or 'the rest'}", where=path)
    names = features.get(label, {}).get("names")
    return Columns(image, label, tuple(map(str, names)) if names else None)


def chosen(names: list[str], usual: tuple[str, ...], kinds: dict[str, Any], kind: str) -> str | None:
    """The column with the first usual name, or else the first that the file declares to be of the kind."""
    declared = [name for name in names if kinds.get(name) == kind]
    return next((name for name in (*usual, *declared, *names) if name in names), None)


def open_parquet(files: Sequence[Path], name: str) -> Dataset:
    """The dataset in Parquet files of images; the splits are told from the files' names."""
    files = sorted(files, key=lambda path: natural(str(path)))
    columns = image_columns(files[0])
    if columns is None:
        raise DataError(
            "no column of images; pass a manifest with the columns path and label by its own name", where=name
        )
    rows = partial(labeled_rows, files, columns)
    stored = indexed(rows, files=files, kind="parquet", numbers=("row",), classes=columns.classes)
    if not stored.splits:
        raise DataError(f"no labeled images ({'; '.join(stored.notes) or 'no rows'})", where=name)
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_of_file(str(path)), []).append(path)
    sources = {
        split: ParquetSource(f"{name} ({split})", stored.classes, index, files=by_split[split], image=columns.image)
        for split, index in stored.splits.items()
    }
    return make_dataset(name, sources, stored.notes)


def labeled_rows(files: Sequence[Path], columns: Columns, left_out: LeftOut) -> Iterator[Entry]:
    """The rows with a label; rows are plural through the files of a split."""
    parquet = require("pyarrow.parquet", "parquet")
    counts: Counter[str] = Counter()
    for path in files:
        split = split_of_file(str(path))
        first = counts[split]
        with parquet.ParquetFile(path) as file:
            if columns.label not in file.schema_arrow.names:
                raise DataError(f"no column {columns.label}, unlike {files[0].name}", where=path)
            for batch in file.iter_batches(CHUNK, columns=[columns.label], use_threads=False):
                for label in batch.column(0).to_pylist():
                    row = counts[split]
                    counts[split] += 1
                    key = f"{path.name} #{row - first}"
                    if label is None or label == -1:  # `datasets` writes -1 where labels are withheld
                        left_out.add("rows without a label", key)
                    else:
                        yield Entry(split, key, str(label), numbers=(row,))
