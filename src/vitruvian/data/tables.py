"""Datasets in tables: CSV, JSON Lines, Parquet or COCO lists of image paths, and Parquet or Arrow files of images."""

import csv
import hashlib
import io
import math
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitruvian.cache import cache_folder
from vitruvian.data.columns import CHUNK
from vitruvian.data.decode import RawImage
from vitruvian.data.folder import FolderSource
from vitruvian.data.index import Entry, IndexedSource, build_index
from vitruvian.data.names import find_classes, split_name, split_of_file
from vitruvian.data.order import Blocks
from vitruvian.data.sources import Dataset, SkippedFiles, check_inside, locate, make_dataset, read_file
from vitruvian.errors import DataError, ImageError, argument, nearest, parsing, require, short_repr
from vitruvian.files import parse_json, parse_object, read_bytes, read_object, write_bytes
from vitruvian.targets import AUTO, SEPARATOR, TargetSpec
from vitruvian.tasks import DATA_VARIABLE, data_root
from vitruvian.text import brief, natural_key, plural, printable

OPTIONAL = ("split", "weight")
SEVERAL = "labels"  # a column with several labels per image
NO_TARGETS = {"path", "label", SEVERAL, "split", "weight", "group", "id", "width", "height"}
"""Columns that are never labels or numbers themselves."""
ALIASES = {"path": ("file_name", "image_path", "image")}  # names of a required column in other programs' tables
MAX_LINE_BYTES = 2**20  # of JSON Lines
MAX_COCO_BYTES = 2**27
CHECKED_ROWS = 20  # number of images of each split whose existence is checked when a manifest is opened
Row = tuple[str, dict[str, Any]]  # the position of a row, such as "line 7", and its values by column


class Layout(NamedTuple):
    """Where a manifest has the targets of an image."""

    target: str  # a key of KINDS
    label: str = "label"  # the column of labels
    columns: tuple[str, ...] | None = None  # instead of it, columns of 0 and 1 or of numbers
    root: Path = Path()  # the folder that paths are relative to

    @property
    def required(self) -> tuple[str, ...]:
        return ("path", *(self.columns or (self.label,)))


class ManifestSource(FolderSource):
    """The images that a manifest lists for one split; its other columns describe them."""

    manifest: Path
    layout: Layout
    split: str

    def column_names(self) -> tuple[str, ...]:
        if self.manifest.suffix.lower() == ".parquet":
            return tuple(rename_columns(self.manifest, ParquetSource.schema(self.manifest).names, ()))
        return tuple(next((row for _, row in manifest_rows(self.manifest, ())), ()))

    def column(self, name: str) -> list[str]:
        if name not in self.column_names():
            return super().column(name)
        listed = [
            (entry.key, cell_text(row.get(name)))
            for position, row in manifest_rows(self.manifest, (*self.layout.required, name))
            if (entry := parse_row(self.manifest, position, row, self.layout)) and entry.split == self.split
        ]
        if [key for key, _ in listed] != [self.key(index) for index in range(len(self))]:
            raise DataError("the manifest has changed since it was opened", where=self.manifest)
        return [value for _, value in listed]


def manifest_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a manifest, which must have these columns; of a Parquet file these and the optional ones, or all."""
    return {".parquet": parquet_rows, ".jsonl": jsonl_rows}.get(path.suffix.lower(), csv_rows)(path, columns)


def open_manifest(files: list[Path], name: str, target: TargetSpec = AUTO, root: Path | None = None) -> Dataset:
    """The dataset listed in a manifest of one row per image, compiled once into an index on disk.

    Paths are relative to the folder of the manifest, unless there is another `root`.
    """
    path = files[0]
    layout = find_layout(next(manifest_rows(path, ()), ("", {}))[1], target)
    classes, class_files = find_classes(path.parent) if layout.target in ("single", "ordinal") else (None, [])
    kind = f"manifest {data_root().absolute()}"  # its paths were checked against that folder
    if layout != Layout("single"):
        kind += f" {layout.target != 'single' and layout.target} {layout.required}"
    layout = layout._replace(root=root or path.parent)

    def entries(skipped: SkippedFiles) -> Iterator[Entry]:
        for position, row in manifest_rows(path, layout.required):
            entry = parse_row(path, position, row, layout)
            if entry is None:
                skipped.add("row", "without a target", position)
            else:
                yield entry

    stored = build_index(entries, files=[path, *class_files], kind=kind, classes=classes)
    if not stored.splits:
        reason = f"a manifest without rows; expected {', '.join(layout.required)} for each image"
        raise DataError(reason, where=path)
    sources = stored.sources(name, ManifestSource, root=layout.root)
    for split, source in sources.items():
        source.manifest, source.layout, source.split = path, layout, split
        find_root(source, [layout.root], path)
    notes = [*stored.notes, *(tag_notes(stored.classes) if layout.target == "single" else ())]
    if layout.target == "number" and target.kind == "auto":
        notes.append(f"no column 'label': the targets are the numbers in {brief(layout.columns or ())}")
    return make_dataset(name, sources, notes, target=layout.target, columns=layout.columns)


def open_frame(frame: Any, target: TargetSpec = AUTO) -> Dataset:
    """The manifest in a data frame of pandas or polars or in an Arrow table, with any paths.

    The index of a pandas frame is no column, unless it holds the paths. The manifest is stored in the cache under a
    digest of its content, where worker processes and later calls find it.
    """
    name = "the data frame"
    with parsing(name, DataError):
        table = require("pyarrow", "parquet").table(frame)
        index = (table.schema.pandas_metadata or {}).get("index_columns", ())
        column = table.column_names[rename_columns(name, table.column_names, ("path",)).index("path")]
        table = table.drop_columns([label for label in index if isinstance(label, str) and label != column])
        stated = table.column(column).to_pylist()
        paths = [path and os.path.abspath(os.path.expanduser(path)) for path in stated]  # a row may have none
        folders = [os.path.dirname(path) for path in paths if path]
        root = Path(os.path.commonpath(folders)) if folders else Path.cwd()
        relative = [path and os.path.relpath(path, root) for path in paths]
        table = table.set_column(table.column_names.index(column), "path", [relative])
        content = io.BytesIO()
        require("pyarrow.parquet", "parquet").write_table(table, content)
    stem = hashlib.sha256(content.getvalue() + os.fsencode(root)).hexdigest()[:16]
    manifest = write_bytes(cache_folder() / "frames" / f"{stem}.parquet", content.getvalue())
    return open_manifest([manifest], name, target, root)


def find_layout(first: Mapping[str, Any], target: TargetSpec) -> Layout:
    """The layout of a manifest with this first row. Without a column of labels, the others are 0 and 1, or numbers."""
    kind, label = target.kind, SEVERAL if SEVERAL in first and "label" not in first else "label"
    if target.columns:
        return Layout(kind, columns=target.columns)
    if "path" not in first:  # reading the rows raises
        return Layout("single")
    if label in first:
        is_list = label == SEVERAL or isinstance(first[label], list)
        return Layout(("multi" if is_list else "single") if kind == "auto" else kind, label)
    others = tuple(column for column in first if column not in NO_TARGETS)
    cells = [cell_text(first[column]) for column in others]
    are_flags = all(cell in ("", "0", "1", "0.0", "1.0") for cell in cells)
    if kind == "auto" and not are_flags and re.fullmatch(r"[-+.\deE]*", "".join(cells)):
        kind = "number"
    if kind == "number" or (kind in ("auto", "multi") and others and are_flags):
        return Layout("multi" if kind == "auto" else kind, columns=others or None)
    return Layout("single" if kind == "auto" else kind)


def cell_text(value: Any) -> str:
    """A cell of a table as text; empty if it is unknown."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value).strip()


def find_root(source: FolderSource, roots: Sequence[Path], path: Path) -> Path:
    """The first of these folders that contains one of the first images of a source listed in the file `path`."""
    keys = [source.key(index) for index in range(min(len(source), CHECKED_ROWS))]
    for root in roots:
        if any((root / key).exists() for key in keys):
            return root
    reason = f"none of its first {len(keys)} images exists, such as {printable(keys[0])}"
    raise DataError(reason, where=path, hint=f"paths are relative to {' or '.join(map(str, roots))}")


def tag_notes(classes: Sequence[str]) -> list[str]:
    """A note if labels look like lists of tags; commas count if they separate names of other classes."""
    tags = [c for c in classes if re.search("[;|]", c) or ("," in c and set(re.split(r"\s*,\s*", c)) & set(classes))]
    if not tags:
        return []
    what = "label is a list" if len(tags) == 1 else "labels are lists"
    return [
        f"{len(tags):,} {what} of tags, such as {printable(tags[0])!r}: each combination is a separate class; "
        "to train on several labels per image, separate them by semicolons and use --target multi"
    ]


def parse_row(path: Path, position: str, row: dict[str, Any], layout: Layout) -> Entry | None:
    """One row as an entry, with every value checked; None if its target is unknown."""
    is_single, names = layout.target in ("single", "ordinal"), row.get(layout.label)
    if layout.target == "multi" and isinstance(names, list) and all(isinstance(name, str | int) for name in names):
        row = {**row, layout.label: join_labels(map(str, names), f"{path}, {position}")}
    for column in layout.required:
        value = row.get(column)
        if value is not None and not isinstance(value, str | int | float):
            reason = f"the {column} {short_repr(value)} is a {type(value).__name__}; expected one {column} per image"
            raise DataError(reason, where=f"{path}, {position}")
        if layout.columns and column != "path" and "," in cell_text(value):
            reason = f"{short_repr(value)} in the column {short_repr(column)} is not a number with a decimal point"
            raise DataError(reason, where=f"{path}, {position}")
    image, split, weight = (cell_text(row.get(column)) for column in ("path", *OPTIONAL))
    label = ",".join(cell_text(row.get(column)) for column in layout.columns or (layout.label,))
    if image and not is_single and not label.strip(",") and (layout.columns or layout.target == "number"):
        return None
    try:
        value = float(weight or 1)
    except ValueError:
        value = math.nan
    is_inside, hint = not os.path.isabs(image) and ".." not in image, ""
    if not is_inside:  # below the manifest's folder, or below the folder that the user sets for all data
        target = Path(os.path.normpath(layout.root.absolute() / image))
        is_inside = any(target.is_relative_to(os.path.abspath(root)) for root in (layout.root, data_root()))
    if not image or (not label and is_single):
        reason, hint = f"no {'label' if image else 'path'}", "every row needs both"
        hint += ", unless the target is several labels (multi)" if image else ""
    elif not is_inside:
        reason = f"the path {printable(image)} points outside {layout.root.absolute()}"
        hint = f"move the manifest to a folder above its images, or set {DATA_VARIABLE} to one"
    elif not 0 <= value < math.inf:
        reason = f"the weight {weight!r} is not a non-negative number"
    else:
        split = split or "train"
        return Entry(split_name(split) or split, image, label, value)
    raise DataError(reason, where=f"{path}, {position}", hint=hint)


def join_labels(names: Iterable[str], where: str) -> str:
    """Labels as one text, from which `targets.parse_labels` reads them."""
    names = [*names]
    wrong = next((name for name in names if SEPARATOR in name), None)
    if wrong is not None:
        raise DataError(f"the label {short_repr(wrong)} contains {SEPARATOR!r}", where=where, hint="rename it")
    return SEPARATOR.join(names)


def absent_labels(names: Sequence[str] | None, combinations: Iterable[str]) -> list[str]:
    """A note about labels without an image, which are skipped; `combinations` are from `join_labels`."""
    present = {label for text in combinations for label in text.split(SEPARATOR)}
    absent = [name for name in names or () if name not in present]
    return [f"skipped {plural(len(absent), 'label')} without an image: {brief(absent)}"] if absent else []


def csv_rows(path: Path, required: tuple[str, ...]) -> Iterator[Row]:
    """The rows of a table with commas, semicolons or tabs between the columns."""
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
            columns = rename_columns(path, names, required)
            reader = csv.reader(file, delimiter=delimiter)
            for values in reader:
                line = reader.line_num + 1
                if values:
                    yield f"line {line}", dict(zip(columns, values))
    except (csv.Error, UnicodeDecodeError) as error:
        reason = f"not a UTF-8 table after line {line} ({error})"
        raise DataError(reason, where=path, hint="save it as CSV UTF-8") from error


def parquet_rows(path: Path, required: tuple[str, ...]) -> Iterator[Row]:
    parquet = require("pyarrow.parquet", "parquet")
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = dict(zip(names, rename_columns(path, names, required)))
        used = [name for name, column in columns.items() if not required or column in required + OPTIONAL]
        batches = file.iter_batches(CHUNK, columns=used, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        for index, row in enumerate(rows, 1):
            yield f"row {index}", {columns[name]: value for name, value in row.items()}


def jsonl_rows(path: Path, required: tuple[str, ...]) -> Iterator[Row]:
    """One JSON object per line."""
    with open(path, "rb") as file:
        for line_number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            where = f"{path}, line {line_number}"
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"the line has more than {MAX_LINE_BYTES >> 20} MB", where=where)
            if line.strip():
                row = parse_object(line, where, raises=DataError)
                yield f"line {line_number}", dict(zip(rename_columns(where, row, required), row.values()))


def rename_columns(path: str | Path, columns: Iterable[str], required: tuple[str, ...]) -> list[str]:
    """The columns of a manifest, with aliases replaced by our names. Raises DataError if a required one is missing."""
    usual = {*NO_TARGETS, *(name for names in ALIASES.values() for name in names)}
    names = [name.lower() if name.lower() in usual else name for name in columns]
    for column, aliases in ALIASES.items():
        alias = next((name for name in aliases if name in names), None)
        if alias is not None and column not in names:
            names[names.index(alias)] = column
    twice = next((name for name in (*required, *OPTIONAL) if names.count(name) > 1), None)
    if twice:
        raise DataError(f"two columns are called {twice}", where=path)
    missing = [column for column in required if column not in names]
    if missing:
        near = [name for column in missing for name in nearest(column, names, 1)]
        guess = f"did you mean {near[0]!r}? " if near else ""
        reason = f"no column {' and no column '.join(missing)} among {printable(', '.join(names)) or 'none'}"
        hint = f"{guess}required: {', '.join(required)}, optional: {', '.join(OPTIONAL)}"
        raise DataError(reason, where=path, hint=hint)
    return names


class SeveralCategories(DataError):
    """An image of a COCO file has several categories."""


def open_coco(files: list[Path], name: str, target: TargetSpec = AUTO) -> Dataset:
    """The dataset in a COCO file; its name states the split. If an image has several categories, they are its labels.

    Images are looked for beside the file, in `images`, and in the same places one folder above.
    """
    path, folder = files[0], files[0].parent
    several = target.kind == "multi"
    try:
        stored = build_index(partial(coco_entries, path, several), files=[path], kind=f"coco{' multi' * several}")
    except SeveralCategories:
        if target.kind != "auto":
            raise
        return open_coco(files, name, TargetSpec("multi"))
    if not stored.splits:
        raise DataError(f"no image with a category ({'; '.join(stored.notes) or 'no images'})", where=path)
    roots = [folder, folder / "images", folder.absolute().parent, folder.absolute().parent / "images"]
    listed = next(iter(stored.sources(name, FolderSource, root=folder).values()))
    sources = stored.sources(name, FolderSource, root=find_root(listed, roots, path))
    return make_dataset(name, sources, stored.notes, target="multi" if several else "single")


def coco_entries(path: Path, several: bool, skipped: SkippedFiles) -> Iterator[Entry]:
    """The images of a COCO file; an image without categories is one without labels if there may be `several`."""
    content = parse_object(read_bytes(path, raises=DataError, most=MAX_COCO_BYTES), path, raises=DataError)
    lists = {key: content.get(key) for key in ("images", "annotations", "categories")}
    for key, items in lists.items():
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise DataError(f"no list of objects called {key}; expected COCO JSON", where=path)

    def by_id(key: str, value: str) -> dict[str | int, str]:
        names: dict[str | int, str] = {}
        for item in lists[key] or ():
            if not isinstance(item.get("id"), str | int) or not isinstance(item.get(value), str):
                reason = f"{short_repr(item)} in {key} has no id or no {value}"
                raise DataError(reason, where=path)
            if item["id"] in names:
                raise DataError(f"the id {short_repr(item['id'])} is in {key} twice", where=path)
            names[item["id"]] = item[value]
        return names

    images, categories = by_id("images", "file_name"), by_id("categories", "name")
    if len(set(categories.values())) < len(categories):
        twice = Counter(categories.values()).most_common(1)[0][0]
        raise DataError(f"two categories are called {short_repr(twice)}", where=path)
    labels: dict[str | int, dict[str, None]] = {image: {} for image in images} if several else {}
    for item in lists["annotations"] or ():
        image, category = item.get("image_id"), item.get("category_id")
        if not isinstance(image, str | int) or not isinstance(category, str | int):
            raise DataError(f"the annotation {short_repr(item)} has no image_id or no category_id", where=path)
        if image not in images or category not in categories:
            wrong = f"the image {short_repr(image)}" if image not in images else f"the category {short_repr(category)}"
            raise DataError(f"an annotation is about {wrong}, which is not listed", where=path)
        known = labels.setdefault(image, {})
        known[categories[category]] = None
        if len(known) > 1 and not several:
            reason = f"{printable(images[image])} has several categories, {' and '.join(known)}"
            raise SeveralCategories(reason, where=path, hint="use " + argument("target", "multi"))
    for category in sorted(set(categories.values()).difference(*labels.values())):
        skipped.add("category", "without an image", category)
    for image, file_name in images.items():
        if image in labels:
            label = join_labels(labels[image], str(path)) if several else next(iter(labels[image]))
            yield Entry(split_of_file(path.name), check_inside(path, file_name), label)
        else:
            skipped.add("image", "without a category", file_name)


IMAGE_COLUMNS = ("image", "img", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
GROUP_BYTES = 2**28  # memory for the row groups that are mixed at a time
MAX_LANES = 256


class ImageColumns(NamedTuple):
    """The columns of a table of images."""

    image: str
    label: str | None
    classes: tuple[str, ...] | None  # if stated
    several: bool = False  # whether a label is a list of classes
    rest: tuple[str, ...] = ()  # the columns of a table without labels


class ParquetSource(IndexedSource):
    """The rows of Parquet files. A row can only be read with its whole row group, so the groups are the blocks."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, files: Sequence[Path], image: str) -> None:
        super().__init__(name, classes, folder)
        self.files = tuple(files)
        self._image = image
        groups, sizes, largest = [], [], 1
        for position, path in enumerate(files):
            for group, (rows, size) in enumerate(self.group_sizes(path)):
                groups.append((position, group))
                sizes.append(rows)
                largest = max(largest, size)
        self._groups = groups
        self._group_ends = np.cumsum(sizes, dtype=np.int64)
        labeled = np.diff(np.searchsorted(self.numbers["row"].array(), self._group_ends), prepend=0)
        self.blocks = Blocks(labeled[labeled > 0], max(1, min(MAX_LANES, GROUP_BYTES // largest)))
        self._loaded: OrderedDict[int, Any] = OrderedDict()

    @staticmethod
    def schema(path: Path) -> Any:
        """The names and types of the columns."""
        return require("pyarrow.parquet", "parquet").read_schema(path)

    @staticmethod
    def group_sizes(path: Path) -> Iterator[tuple[int, int]]:
        """Rows and bytes of each row group."""
        metadata = require("pyarrow.parquet", "parquet").read_metadata(path)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            yield group.num_rows, group.total_byte_size

    @staticmethod
    def load_group(path: Path, group: int, column: str) -> Any:
        """One column of a row group."""
        with require("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            return file.read_row_group(group, columns=[column], use_threads=False).column(0)

    @staticmethod
    def values(path: Path, column: str) -> Iterator[Any]:
        """The values of a column."""
        with require("pyarrow.parquet", "parquet").ParquetFile(path) as file:
            for batch in file.iter_batches(CHUNK, columns=[column], use_threads=False):
                yield from batch.column(0).to_pylist()

    def column_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.schema(self.files[0]).names if name != self._image)

    def column(self, name: str) -> list[str]:
        if name not in self.column_names():
            return super().column(name)
        values = [value for path in self.files for value in self.values(path, name)]
        return ["" if values[row] is None else str(values[row]).strip() for row in self.numbers["row"].array().tolist()]

    def read(self, index: int) -> RawImage:
        """The image in a row; the most recently used row groups stay in memory."""
        with parsing(self.key(index), ImageError):
            block, within = locate(self._group_ends, self.numbers["row"][index])
            position, group = self._groups[block]
            path = self.files[position]
            if block not in self._loaded:
                self._loaded[block] = self.load_group(path, group, self._image)
                if self.blocks is not None and len(self._loaded) > self.blocks.lanes:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(block)
            cell = self._loaded[block][within].as_py()
            content = cell if isinstance(cell, dict) else {"bytes": cell}
            if isinstance(content.get("bytes"), bytes) and content["bytes"]:
                return bytes(content["bytes"])
            if content.get("path"):
                return read_file(path.parent / check_inside(path, content["path"]))
            raise ImageError("no image in this row", where=self.key(index))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": OrderedDict()}


class ArrowSource(ParquetSource):
    """The rows of Arrow files as `save_to_disk` of the `datasets` library writes them; their memory is mapped."""

    def __init__(self, name: str, classes: tuple[str, ...], folder: Path, *, files: Sequence[Path], image: str) -> None:
        super().__init__(name, classes, folder, files=files, image=image)
        self.blocks = None  # all rows cost the same

    @staticmethod
    def table(path: Path) -> Any:
        """The rows of a file, which are checked: pyarrow would read outside the file if its offsets are wrong."""
        pyarrow, size = require("pyarrow", "parquet"), path.stat().st_size
        batches = []
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as stream:
            for batch in stream:
                if batch.nbytes > size:
                    raise DataError("compressed Arrow data is not supported", where=path)
                batch.validate(full=True)
                batches.append(batch)
            return pyarrow.Table.from_batches(batches, stream.schema)

    @staticmethod
    def schema(path: Path) -> Any:
        pyarrow = require("pyarrow", "parquet")
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as stream:
            return stream.schema

    @staticmethod
    def group_sizes(path: Path) -> Iterator[tuple[int, int]]:
        yield ArrowSource.table(path).num_rows, path.stat().st_size

    @staticmethod
    def load_group(path: Path, group: int, column: str) -> Any:
        return ArrowSource.table(path).column(column)

    @staticmethod
    def values(path: Path, column: str) -> Iterator[Any]:
        for chunk in ArrowSource.table(path).column(column).chunks:
            yield from chunk.to_pylist()


SEQUENCES = ("Sequence", "List", "LargeList")  # of Hugging Face `datasets`


def contains_images(files: Sequence[Path]) -> bool:
    """Whether Parquet files contain images rather than paths; several files are never a manifest."""
    return len(files) > 1 or image_columns(files[0], ParquetSource) is not None


def image_columns(path: Path, source: type[ParquetSource]) -> ImageColumns | None:
    """The columns of a file of images; None for a file without a column of images, such as a manifest."""
    types = require("pyarrow.types", "parquet")
    with parsing(path, DataError, reason=f"not {'a Parquet' if source is ParquetSource else 'an Arrow'} file"):
        schema = source.schema(path)
    features = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"), path, raises=DataError)
    for key in ("info", "features"):
        features = features.get(key, {}) if isinstance(features, dict) else {}
    inner = {name: list_item(feature) for name, feature in dict(features).items()}
    features = {name: feature for name, (feature, _) in inner.items() if isinstance(feature, dict)}
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
        return ImageColumns(image, None, None, rest=tuple(rest))
    names, several = features.get(label, {}).get("names"), inner.get(label, (None, False))[1]
    return ImageColumns(image, label, tuple(map(str, names)) if names else None, several)


def list_item(feature: Any) -> tuple[Any, bool]:
    """The feature inside a list of `datasets`, or the feature itself, and whether it is a list."""
    if isinstance(feature, list) and len(feature) == 1:
        return feature[0], True
    is_list = isinstance(feature, dict) and feature.get("_type") in SEQUENCES
    return (feature.get("feature") if is_list else feature), is_list


def open_parquet(files: Sequence[Path], name: str, target: TargetSpec = AUTO) -> Dataset:
    """The dataset in Parquet files of images as the `datasets` library writes them; file names state the splits."""
    by_split: dict[str, list[Path]] = {}
    for path in sorted(files, key=lambda path: natural_key(str(path))):
        by_split.setdefault(split_of_file(str(path)), []).append(path)
    return open_image_tables(by_split, name, ParquetSource, target)


STATE, SPLITS_FILE = "state.json", "dataset_dict.json"  # files of `save_to_disk`


def find_saved(folder: Path) -> list[Path]:
    """The folder, if `save_to_disk` of the `datasets` library wrote it."""
    is_saved = (folder / SPLITS_FILE).is_file() or all((folder / f).is_file() for f in (STATE, "dataset_info.json"))
    return [folder] if is_saved else []


def open_saved(folders: Sequence[Path], name: str, target: TargetSpec = AUTO) -> Dataset:
    """The dataset in a folder that `save_to_disk` of the `datasets` library wrote."""
    root, parts = folders[0], {"train": folders[0]}
    if (root / SPLITS_FILE).is_file():
        splits = read_object(root / SPLITS_FILE, raises=DataError).get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(split, str) for split in splits):
            raise DataError("no list of splits", where=root / SPLITS_FILE)
        parts = {split_name(split) or split: root / check_inside(root / SPLITS_FILE, split) for split in splits}
    by_split: dict[str, list[Path]] = {}
    for split, folder in parts.items():
        files = read_object(folder / STATE, raises=DataError).get("_data_files")
        names = [str(file["filename"]) for file in files] if isinstance(files, list) else []
        if not names:
            raise DataError("no list of data files", where=folder / STATE)
        by_split[split] = [folder / check_inside(folder / STATE, file) for file in names]
    return open_image_tables(by_split, name, ArrowSource, target)


def open_image_tables(
    by_split: Mapping[str, Sequence[Path]], name: str, source: type[ParquetSource], target: TargetSpec
) -> Dataset:
    """The dataset in tables with a column of images and one of labels, or columns of numbers or of 0 and 1."""
    files = [path for part in by_split.values() for path in part]
    columns = image_columns(files[0], source)
    if columns is None:
        raise DataError("no column of images", where=name, hint="to open a manifest, pass the file itself")
    if columns.label is None and not target.columns:
        rest = ", ".join(columns.rest) or "the rest"
        raise DataError(f"images without labels: no column label among {rest}", where=files[0])
    wanted = target.columns or (columns.label or "",)
    several = columns.several and not target.columns
    stated = "multi" if several else "single" if target.kind == "auto" else target.kind

    def label_text(values: tuple[Any, ...], key: str) -> str:
        """The label of a row; empty if it is unknown."""
        if several and isinstance(values[0], list):
            names = (columns.classes[i] if columns.classes and isinstance(i, int) else str(i) for i in values[0])
            return join_labels(names, key)
        if not target.columns and values[0] == -1 and stated == "single":  # `datasets` writes -1 for withheld labels
            return ""
        return ",".join(map(cell_text, values)).rstrip("," if not any(map(cell_text, values)) else "")

    def labeled_rows(skipped: SkippedFiles) -> Iterator[Entry]:
        """The rows with a label; rows are counted over all files of a split."""
        for split, part in by_split.items():
            row = 0
            for path in part:
                missing = [column for column in wanted if column not in source.schema(path).names]
                if missing:
                    raise DataError(f"no column {missing[0]}, unlike {files[0].name}", where=path)
                for position, values in enumerate(zip(*(source.values(path, column) for column in wanted))):
                    key = f"{path.name} #{position}"
                    label = label_text(values, key)
                    if label or (several and values[0] is not None):
                        yield Entry(split, key, label, numbers=(row,))
                    else:
                        skipped.add("row", "without a label", key)
                    row += 1

    kind = "parquet" if source is ParquetSource else "arrow"
    if stated != "single":
        kind += f" {stated} {wanted}"
    known = columns.classes if stated in ("single", "ordinal") else None
    stored = build_index(labeled_rows, files=files, kind=kind, numbers=("row",), classes=known)
    if not stored.splits:
        raise DataError(f"no labeled images ({'; '.join(stored.notes) or 'no rows'})", where=name)
    sources = {
        split: source(f"{name} ({split})", stored.classes, index, files=by_split[split], image=columns.image)
        for split, index in stored.splits.items()
    }
    notes = [*stored.notes, *(absent_labels(columns.classes, stored.classes) if several else ())]
    return make_dataset(name, sources, notes, target=stated, columns=target.columns or None)
