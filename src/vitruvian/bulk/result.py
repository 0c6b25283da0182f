"""Results of bulk jobs: verify and merge the parts, and use their vectors."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.job import JOB_FILE, MAX_PIECE, JobImages, identity_of, read_description
from vitruvian.bulk.storage import WRITING, OutputFolder, columns_of, is_part, part_name, read_part
from vitruvian.cache import scratch_folder
from vitruvian.data.decode import RawImage, Unreadable
from vitruvian.data.formats import open_images
from vitruvian.data.names import natural_key
from vitruvian.data.sources import Dataset, PartSource, Source, make_dataset
from vitruvian.errors import ConfigError, DataError, FileError, ImageError, require
from vitruvian.evaluation.features import FeatureSet, probe_sources
from vitruvian.evaluation.probe import ProbeReport, ProbeSettings, probe_features
from vitruvian.files import atomic_open
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import check_choice, check_range, validate
from vitruvian.text import printable

# n images, D features

NOT_VECTORS = "predictions, not vectors; use the result of `vit embed`"
SHOWN = 5
MAX_IMAGES = 2**40
MAX_WIDTH = 2**20


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The totals of a complete bulk result."""

    task: str
    model: str
    images: int
    parts: int
    errors: dict[str, int]
    """Number of images per error."""
    examples: dict[str, str]
    """The first image of each error."""

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "model": self.model,
            "images": self.images,
            "parts": self.parts,
            "unreadable": sum(self.errors.values()),
            "errors": self.errors,
        }


@dataclass(frozen=True, kw_only=True)
class BulkResult:
    """The output folder of a bulk job, with its `job.json`."""

    folder: OutputFolder
    job: dict[str, Any]
    images: int
    piece: int

    @property
    def identity(self) -> str:
        return identity_of(self.job)

    @property
    def parts(self) -> int:
        return -(-self.images // self.piece)

    def check_names(self) -> None:
        """Raise DataError if a part is missing or does not belong to the job."""
        existing = {name for name in self.folder.names() if name.startswith("part-")}
        parts = {name for name in existing if is_part(name, self.parts)}
        foreign = sorted(existing - parts)
        if foreign and not parts:
            raise DataError(
                f"{JOB_FILE} describes {self.parts:,} parts, which do not include {foreign[0]}",
                where=self.folder,
                hint="if it was edited, remove it and run the job again, which keeps the parts",
            )
        count = self.parts - len(parts)
        if count:
            missing = (part for part in range(1, self.parts + 1) if part_name(part - 1, self.parts) not in parts)
            some = ", ".join(map(str, islice(missing, SHOWN))) + ", ..." * (count > SHOWN)
            raise DataError(
                f"{count:,} of {self.parts:,} parts are missing (number {some})",
                where=self.folder,
                hint="run the job again; it computes only these",
            )
        if foreign:
            raise DataError(
                f"{foreign[0]} is not a part of this job of {self.parts:,} parts", where=self.folder, hint="remove it"
            )

    def tables(self) -> Iterator[Any]:
        """The verified parts, in order."""
        self.check_names()
        yield from map(self.table, range(self.parts))

    def table(self, part: int, *, only: Sequence[str] | None = None) -> Any:
        """A verified part, with all columns or with `only` some."""
        rows = range(part * self.piece, min((part + 1) * self.piece, self.images))
        name = part_name(part, self.parts)
        return read_part(self.folder, name, self.identity, rows, columns_of(self.job), only=only)


def open_result(where: str | Path) -> BulkResult:
    """Open the result in a folder or behind a URL."""
    folder = OutputFolder(where)
    if JOB_FILE not in folder.names():
        raise DataError(
            f"no {JOB_FILE} in it; expected a folder that `vit embed` or `vit predict --out` wrote", where=folder
        )
    job = read_description(folder)
    try:
        check_choice("task", job["task"], ("embed", "predict"))
        limits = {"images": MAX_IMAGES, "piece": MAX_PIECE}
        if job["task"] == "embed":
            limits["width"] = MAX_WIDTH
            check_choice("dtype", job["dtype"], ("float16", "float32"))
        for key, most in limits.items():
            job[key] = validate(key, int, job[key])
            check_range(key, job[key], 1, most)
        for key, kind in {"model": str, "data": str, "split": str | None}.items():
            validate(key, kind, job[key])
    except (KeyError, ConfigError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"not the description of a job: {problem}", where=f"{folder}/{JOB_FILE}") from error
    return BulkResult(folder=folder, job=job, images=job["images"], piece=job["piece"])


def merge(
    where: str | Path,
    out: str | Path | None = None,
    *,
    track: Callable[[Iterable[Any], int], Iterable[Any]] | None = None,
) -> Merged:
    """Verify that every image of a job is present once, and count errors.

    Args:
        where: The output folder or URL of the job.
        out: Write all rows to this Parquet file.
        track: Wraps the iterator over parts to show progress.

    Raises:
        DataError: The result is incomplete or damaged.
    """
    require("pyarrow", "parquet")
    result = open_result(where)
    result.check_names()
    if out is not None:
        check_merged_path(out, result.folder)
    tables = result.tables() if track is None else track(result.tables(), result.parts)
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for table in tables if out is None else write_tables(tables, Path(out)):
        for key, error in zip(table["key"].to_pylist(), table["error"].to_pylist()):
            if error:
                errors[error] += 1
                examples.setdefault(error, key)
    return Merged(
        task=result.job["task"],
        model=result.job["model"],
        images=result.images,
        parts=result.parts,
        errors=dict(errors.most_common()),
        examples=examples,
    )


def check_merged_path(out: str | Path, folder: OutputFolder) -> None:
    """Raise FileError if the merged file would replace a file of the job."""
    path = Path(out)
    if re.match(r"\w{2,}:/", str(out)):  # Path has removed one of two slashes
        raise FileError("the merged file cannot be written to a URL", where=out)
    beside = path.expanduser().resolve().parent == Path(str(folder)).expanduser().resolve()
    if beside and (path.name == JOB_FILE or path.name.startswith("part-")):
        raise FileError(
            "this file belongs to the job itself", where=out, hint="choose another name, such as all.parquet"
        )


def write_tables(tables: Iterable[Any], out: Path) -> Iterator[Any]:
    """Yield the tables and write them to one file, one row group each."""
    parquet = require("pyarrow.parquet", "parquet")
    if out.is_dir():
        raise FileError(f"a folder; expected a file such as {out / 'all.parquet'}", where=out)
    with (
        atomic_open(out) as file,
        ExitStack() as stack,
    ):  # a writer must be closed before its file
        writer = None
        for table in tables:
            if writer is None:
                new = parquet.ParquetWriter(file, table.schema, **WRITING)
                writer = stack.enter_context(new)
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            yield table


SAMPLED_KEYS = 64
"""Number of images whose names are compared to verify that vectors belong to a dataset."""


class VectorSource(Source):
    """The labels of one split, without images."""

    def __init__(self, name: str, classes: tuple[str, ...], labels: NDArray[np.int32], first: int) -> None:
        self.name, self.classes, self._labels, self.first = name, classes, labels, first

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def read(self, index: int) -> RawImage:
        raise ImageError("a vector without its image", where=self.key(index))


@dataclass(frozen=True)
class VectorStore:
    """All vectors of a result, in a memory-mapped file, with the other columns."""

    result: BulkResult
    values: NDArray[Any]
    """(n, D) NaN for images without a vector."""
    keys: list[str]
    splits: list[str]
    labels: list[str | None]
    errors: dict[str, str]
    """Why images have no vector, by key."""

    def check_data(self, data: str | Path, split: str | None = None) -> None:
        """Raise DataError if the number of images or some of their names differ from those of the vectors."""
        images = JobImages(open_images(data, split=split))
        vectors = f"vectors of {self.result.job['data']}"
        fields: dict[str, Any] = {"where": self.result.folder, "hint": "compute the vectors again"}
        if len(images) != len(self.keys):
            raise DataError(f"{vectors}, {len(self.keys):,} images; {data} has {len(images):,}", **fields)
        for index in np.linspace(0, len(images) - 1, SAMPLED_KEYS, dtype=int).tolist():
            key = printable(images.key(index))
            if key != self.keys[index]:
                raise DataError(
                    f"{vectors}, whose image {index} is {self.keys[index]}; in {data} it is {key}", **fields
                )

    @cached_property
    def dataset(self) -> Dataset:
        """The splits as sources of labels."""
        name = str(self.result.folder)
        if None in self.labels:
            raise DataError("the images have no classes; a probe needs labels", where=name)
        classes = tuple(sorted({label for label in self.labels if label is not None}, key=natural_key))
        indices = {label: index for index, label in enumerate(classes)}
        sources: dict[str, Source] = {}
        for split in dict.fromkeys(self.splits):
            first = self.splits.index(split)
            count = self.splits.count(split)
            labels = np.array([indices[label or ""] for label in self.labels[first : first + count]], np.int32)
            sources[split] = VectorSource(f"{name} ({split})", classes, labels, first)
        return make_dataset(name, sources)

    def features(self, source: Source) -> FeatureSet:
        """The vectors of a split, or of a part of one."""
        rows = np.array([row_of(source, index) for index in range(len(source))], np.int64)
        values = np.asarray(self.values[rows], np.float32)
        known = np.isfinite(values[:, 0])
        return FeatureSet(
            values=values[known],
            labels=np.asarray(source.labels())[known].astype(np.int64),
            classes=source.classes,
            unreadable=[Unreadable(key, self.errors[key]) for key in map(self.keys.__getitem__, rows[~known].tolist())],
            computed=0,
        )


def row_of(source: Source, index: int) -> int:
    """The row of a sample in the store."""
    while isinstance(source, PartSource):
        source, index = source.part(index)
    assert isinstance(source, VectorSource)
    return source.first + index


def open_vectors(where: str | Path, *, track: Track = no_tracking) -> VectorStore:
    """Open the result of `vit embed` in a folder or behind a URL."""
    result = open_result(where)
    if result.job["task"] != "embed":
        raise DataError(NOT_VECTORS, where=where)
    width = int(result.job["width"])
    shape = (result.images, width)
    values = np.memmap(scratch_folder() / "vectors", result.job["dtype"], "w+", shape=shape)
    store = VectorStore(result, values, [], [], [], {})
    for table in track(result.tables(), result.parts):
        start = len(store.keys)
        store.keys.extend(table["key"].to_pylist())
        store.splits.extend(table["split"].to_pylist())
        store.labels.extend(table["label"].to_pylist())
        known = np.asarray(table["vector"].combine_chunks().is_valid())
        flat = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        part = values[start : start + table.num_rows]
        part[~known] = np.nan
        part[known] = flat.reshape(-1, width)
        errors = table["error"].to_pylist()
        store.errors.update((key, error) for key, error in zip(store.keys[start:], errors) if error)
    return store


def probe_vectors(
    where: str | Path,
    *,
    only: Sequence[str] = ("fewshot", "linear", "neighbors"),
    shots: Sequence[int] | None = None,
    neighbors: int | None = None,
    track: Track = no_tracking,
) -> ProbeReport:
    """Like `vitruvian.probe`, on vectors that `vit embed` wrote; neither the images nor the model are needed."""
    settings = ProbeSettings(only=tuple(only), shots=None if shots is None else tuple(shots), neighbors=neighbors)
    started = time.monotonic()
    store = open_vectors(where, track=track)
    parts = probe_sources(store.dataset)
    return probe_features(
        [store.features(source) for source in parts.all],
        settings,
        data=str(store.result.job["data"]),
        model=str(store.result.job["model"]),
        test_is=parts.test_is,
        notes=[],
        feature_seconds=time.monotonic() - started,
    )
