"""Parquet files as the `datasets` library writes them: a column of images, a column of labels."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.data.decode import RawImage
from vitruvian.data.order import Blocks
from vitruvian.data.sources.base import Dataset, LeftOut, inside, located, make_dataset, read_file
from vitruvian.data.sources.index import CHUNK, Entry, IndexedSource, indexed
from vitruvian.data.sources.names import natural, split_of_file
from vitruvian.errors import DataError, ImageError, require
from vitruvian.files import parse_json

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
    """The rows with a label; rows are counted through the files of a split."""
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
