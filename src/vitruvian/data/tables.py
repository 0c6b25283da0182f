"""Datasets in tables: CSV or Parquet manifests of image paths, and Parquet files that contain the images."""

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
from vitruvian.data.index import Entry, IndexedSource, build_index
from vitruvian.data.names import find_classes, natural_key, split_name, split_of_file
from vitruvian.data.order import Blocks
from vitruvian.data.sources import Dataset, SkippedFiles, check_inside, locate, make_dataset, read_file
from vitruvian.errors import DataError, ImageError, nearest, require
from vitruvian.files import parse_json
from vitruvian.tasks import DATA_VARIABLE, data_root
from vitruvian.text import printable

REQUIRED = ("path", "label")
OPTIONAL = ("split", "weight")

CHECKED_ROWS = 20
"""Number of images of each split whose existence is checked when a manifest is opened."""

Row = tuple[str, dict[str, Any]]
"""The position of a row, such as "line 7", and its values by column."""


def open_manifest(files: list[Path], name: str) -> Dataset:
    """The dataset listed in a manifest of one row per image, compiled once into an index on disk."""
    path = files[0]
    classes, class_files = find_classes(path.parent)
    kind = f"manifest {data_root().absolute()}"  # its paths were checked against that folder
    rows = parquet_rows if path.suffix.lower() == ".parquet" else csv_rows
    stored = build_index(
        lambda _: (parse_row(path, *row) for row in rows(path)),
        files=[path, *class_files],
        kind=kind,
        classes=classes,
    )
    if not stored.splits:
        raise DataError(f"a manifest without rows; expected {', '.join(REQUIRED)} for each image", where=path)
    sources = stored.sources(name, FolderSource, root=path.parent)
    for source in sources.values():
        keys = [source.key(index) for index in range(min(len(source), CHECKED_ROWS))]
        if not any((source.root / key).exists() for key in keys):
            reason = f"none of its first {len(keys)} images exists, such as {printable(keys[0])}"
            raise DataError(reason, where=path, hint=f"paths are relative to {source.root}")
    return make_dataset(name, sources)


def parse_row(path: Path, position: str, row: dict[str, Any]) -> Entry:
    """One row as an entry, with every value checked."""
    image, label, split, weight = (
        "" if row.get(column) is None else str(row[column]).strip() for column in (*REQUIRED, *OPTIONAL)
    )
    try:
        value = float(weight or 1)
    except ValueError:
        value = math.nan
    hint = ""
    if not image or not label:
        reason, hint = f"no {'label' if image else 'path'}", "every row needs both"
    elif not is_allowed(path, image):
        reason = f"the path {printable(image)} points outside {path.parent.absolute()}"
        hint = f"move the manifest to a folder above its images, or set {DATA_VARIABLE} to one"
    elif not 0 <= value < math.inf:
        reason = f"the weight {weight!r} is not a non-negative number"
    else:
        split = split or "train"
        return Entry(split_name(split) or split, image, label, value)
    raise DataError(reason, where=f"{path}, {position}", hint=hint)


def is_allowed(manifest: Path, image: str) -> bool:
    """Whether an image is below the manifest's folder, or below the folder that the user sets for all data."""
    if not os.path.isabs(image) and ".." not in image:
        return True
    path = Path(os.path.normpath(manifest.parent.absolute() / image))
    return any(path.is_relative_to(os.path.abspath(root)) for root in (manifest.parent, data_root()))


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
                    yield f"line {line}", dict(zip(columns, values))
    except (csv.Error, UnicodeDecodeError) as error:
        reason = f"not a UTF-8 table after line {line} ({error})"
        raise DataError(reason, where=path, hint="save it as CSV UTF-8") from error


def parquet_rows(path: Path) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file:
        columns = file.schema_arrow.names
        check_columns(path, columns)
        used = [column for column in columns if column in REQUIRED + OPTIONAL]
        batches = file.iter_batches(CHUNK, columns=used, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from ((f"row {index}", row) for index, row in enumerate(rows, 1))


def check_columns(path: Path, columns: Iterable[str]) -> None:
    names = list(columns)
    missing = [column for column in REQUIRED if column not in names]
    if missing:
        near = [name for column in missing for name in nearest(column, names, 1)]
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"no column {' and no column '.join(missing)} among {printable(', '.join(names)) or 'none'}",
            where=path,
            hint=f"{guess}required: {', '.join(REQUIRED)}, optional: {', '.join(OPTIONAL)}",
        )


IMAGE_COLUMNS = ("image", "img", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")

GROUP_BYTES = 2**28
"""Memory for the row groups that are mixed at a time."""

MAX_LANES = 256


@dataclass(frozen=True)
class ImageColumns:
    """The columns of images and labels in a Parquet file, and the class names if the file states them."""

    image: str
    label: str
    classes: tuple[str, ...] | None


class ParquetSource(IndexedSource):
    """The rows of Parquet files. A row can only be read with its whole row group, so the groups are the blocks."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, files: Sequence[Path], image: str) -> None:
        super().__init__(name, classes, folder)
        self.files = tuple(files)
        self._image = image
        parquet = require("pyarrow.parquet", "parquet")
        groups, sizes, largest = [], [], 1
        for position, path in enumerate(files):
            metadata = parquet.read_metadata(path)
            for group in range(metadata.num_row_groups):
                groups.append((position, group))
                sizes.append(metadata.row_group(group).num_rows)
                largest = max(largest, metadata.row_group(group).total_byte_size)
        self._groups = groups
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
        labeled = np.diff(np.searchsorted(self.numbers["row"].array(), self._group_ends), prepend=0)
        self.blocks = Blocks(labeled[labeled > 0], max(1, min(MAX_LANES, GROUP_BYTES // largest)))
        self._loaded: OrderedDict[int, Any] = OrderedDict()

    def read(self, index: int) -> RawImage:
        block, within = locate(self._group_ends, self.numbers["row"][index])
        cell = self._group(block)[within].as_py()
        content = cell if isinstance(cell, dict) else {"bytes": cell}
        if content.get("bytes"):
            return bytes(content["bytes"])
        if content.get("path"):
            path = self.files[self._groups[block][0]]
            return read_file(path.parent / check_inside(path, content["path"]))
        raise ImageError("the row has no image", where=self.key(index))

    def _group(self, block: int) -> Any:
        """The images of one row group; the most recently used groups stay in memory."""
        if block not in self._loaded:
            parquet = require("pyarrow.parquet", "parquet")
            position, group = self._groups[block]
            with parquet.ParquetFile(self.files[position]) as file:
                table = file.read_row_group(group, columns=[self._image], use_threads=False)
            self._loaded[block] = table.column(0)
            if self.blocks is not None and len(self._loaded) > self.blocks.lanes:
                self._loaded.popitem(last=False)
        self._loaded.move_to_end(block)
        return self._loaded[block]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": OrderedDict()}


def contains_images(files: Sequence[Path]) -> bool:
    """Whether Parquet files contain images rather than paths; several files are never a manifest."""
    return len(files) > 1 or image_columns(files[0]) is not None


def image_columns(path: Path) -> ImageColumns | None:
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

    def has_bytes(name: str) -> bool:
        kind = schema.field(name).type
        if types.is_struct(kind):
            return bool(kind.get_field_index("bytes") >= 0)
        return bool(types.is_binary(kind) or types.is_large_binary(kind))

    def choose(names: list[str], usual: tuple[str, ...], kind: str) -> str | None:
        """The column with the first usual name, or else the first that the file declares to be of the kind."""
        declared = [name for name in names if kinds.get(name) == kind]
        return next((name for name in (*usual, *declared, *names) if name in names), None)

    image = choose([name for name in schema.names if has_bytes(name)], IMAGE_COLUMNS, "Image")
    if image is None:
        return None
    rest = [name for name in schema.names if name != image]
    candidates = [name for name in rest if name in LABEL_COLUMNS or kinds.get(name) == "ClassLabel"]
    label = choose(candidates, LABEL_COLUMNS, "ClassLabel")
    if label is None:
        raise DataError(f"images without labels: no column label among {', '.join(rest) or 'the rest'}", where=path)
    names = features.get(label, {}).get("names")
    return ImageColumns(image, label, tuple(map(str, names)) if names else None)


def open_parquet(files: Sequence[Path], name: str) -> Dataset:
    """The dataset in Parquet files of images as the `datasets` library writes them; file names state the splits."""
    files = sorted(files, key=lambda path: natural_key(str(path)))
    columns = image_columns(files[0])
    if columns is None:
        raise DataError("no column of images", where=name, hint="to open a manifest, pass the file itself")
    rows = partial(labeled_rows, files, columns)
    stored = build_index(rows, files=files, kind="parquet", numbers=("row",), classes=columns.classes)
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


def labeled_rows(files: Sequence[Path], columns: ImageColumns, skipped: SkippedFiles) -> Iterator[Entry]:
    """The rows with a label; rows are counted over all files of a split."""
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
                    if label is None or label == -1:  # `datasets` writes -1 for withheld labels
                        skipped.add("row", "without a label", key)
                    else:
                        yield Entry(split, key, str(label), numbers=(row,))
