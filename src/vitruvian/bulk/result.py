"""Results of bulk jobs: verify and merge the parts, and use their vectors."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.job import MAX_PIECE
from vitruvian.bulk.storage import JOB_FILE, WRITING, BulkResult, OutputFolder
from vitruvian.cache import scratch_folder
from vitruvian.data.decode import RawImage, Unreadable
from vitruvian.data.formats import open_images
from vitruvian.data.sources import Concat, Dataset, Source, make_dataset
from vitruvian.errors import ConfigError, DataError, FileError, ImageError, require
from vitruvian.evaluation.features import FeatureSet
from vitruvian.evaluation.probe import ProbeReport, ProbeSettings, probe_features, probe_sources
from vitruvian.files import atomic_open, open_table
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import check_choice, check_range, validate
from vitruvian.text import natural_key, printable

# n images, D features

MAX_IMAGES = 2**40
MAX_WIDTH = 2**20


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The totals of a complete bulk result."""

    task: str
    model: str
    images: int
    parts: int
    errors: dict[str, int]  # number of images per error
    examples: dict[str, str]  # the first image of each error

    def to_json(self) -> dict[str, Any]:
        totals = {"task": self.task, "model": self.model, "images": self.images, "parts": self.parts}
        return totals | {"unreadable": sum(self.errors.values()), "errors": self.errors}


def open_result(where: str | Path, *, vectors: bool = False) -> BulkResult:
    """Open the result in a folder or behind a URL; with `vectors`, it must be one of `vit embed`."""
    folder = OutputFolder(where)
    if JOB_FILE not in folder.names():
        reason = f"no {JOB_FILE} in it; expected a folder that `vit embed` or `vit predict --out` wrote"
        raise DataError(reason, where=folder)
    job = folder.read_description()
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
    if vectors and job["task"] != "embed":
        raise DataError("predictions, not vectors; use the result of `vit embed`", where=where)
    return BulkResult(folder, job)


def merge(where: str | Path, out: str | Path | None = None, *, track: Track = no_tracking) -> Merged:
    """Verify that every image of a job is present once, and count errors.

    Args:
        where: The output folder or URL of the job.
        out: Write all rows to this file: .csv, .jsonl or .parquet.
        track: Wraps the iterator over parts to show progress.

    Raises:
        DataError: The result is incomplete or damaged.
    """
    require("pyarrow", "parquet")
    result = open_result(where)
    result.check_names()
    tables = track(result.tables(), result.parts)
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for table in tables if out is None else write_tables(tables, out, result):
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


def write_tables(tables: Iterable[Any], out: str | Path, result: BulkResult) -> Iterator[Any]:
    """Yield the tables of a job and write them to one file; in Parquet, one row group each."""
    parquet, path = require("pyarrow.parquet", "parquet"), Path(out)
    if re.match(r"\w{2,}:/", str(out)):  # Path has removed one of two slashes
        raise FileError("the merged file cannot be written to a URL", where=out)
    beside = path.expanduser().resolve().parent == Path(str(result.folder)).expanduser().resolve()
    if beside and (path.name == JOB_FILE or path.name.startswith("part-")):
        reason = "this file belongs to the job itself"
        raise FileError(reason, where=out, hint="choose another name, such as all.parquet")
    if path.is_dir():
        raise FileError(f"a folder; expected a file such as {path / 'all.parquet'}", where=path)
    if path.suffix.lower() != ".parquet":
        job = result.job
        lengths = {"vector": job["width"]} if job["task"] == "embed" else {"predictions": job["top"]}
        with open_table(path, lengths) as write:
            for table in tables:
                write(table.to_pylist())
                yield table
        return
    with atomic_open(path) as file, ExitStack() as stack:  # a writer must be closed before its file
        writer = None
        for table in tables:
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(file, table.schema, **WRITING))
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            yield table


SAMPLED_KEYS = 64  # number of images whose names are compared to verify that vectors belong to a dataset


class VectorSource(Source):
    """The labels of one split, without images."""

    def __init__(self, name: str, classes: tuple[str, ...], labels: NDArray[np.int32], first: int) -> None:
        self.name, self.classes, self._labels, self.first = name, classes, labels, first

    def read(self, index: int) -> RawImage:
        raise ImageError("a vector without its image", where=self.key(index))


@dataclass(frozen=True)
class VectorStore:
    """All vectors of a result, in a memory-mapped file, with the other columns."""

    result: BulkResult
    values: NDArray[Any]  # (n, D) NaN for images without a vector
    keys: list[str]
    splits: list[str]
    labels: list[str | None]
    errors: dict[str, str]  # why images have no vector, by key

    def check_data(self, data: str | Path) -> None:
        """Raise DataError if the number of images or some of their names differ from those of the vectors."""
        images = Concat(list(open_images(data).values()), name=str(data))
        vectors = f"vectors of {self.result.job['data']}"
        fields: dict[str, Any] = {"where": self.result.folder, "hint": "compute the vectors again"}
        if len(images) != len(self.keys):
            raise DataError(f"{vectors}, {len(self.keys):,} images; {data} has {len(images):,}", **fields)
        for index in np.linspace(0, len(images) - 1, SAMPLED_KEYS, dtype=int).tolist():
            key = printable(images.key(index))
            if key != self.keys[index]:
                reason = f"{vectors}, whose image {index} is {self.keys[index]}; in {data} it is {key}"
                raise DataError(reason, **fields)

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
            chosen = self.labels[first : first + self.splits.count(split)]
            labels = np.array([indices[label or ""] for label in chosen], np.int32)
            sources[split] = VectorSource(f"{name} ({split})", classes, labels, first)
        return make_dataset(name, sources)

    def features(self, source: Source) -> FeatureSet:
        """The vectors of a split, or of a part of one."""
        origins = map(source.origin, range(len(source)))
        rows = np.array([split.first + index for split, index in origins if isinstance(split, VectorSource)], np.int64)
        values = np.asarray(self.values[rows], np.float32)
        known = np.isfinite(values[:, 0])
        return FeatureSet(
            values=values[known],
            labels=np.asarray(source.labels())[known].astype(np.int64),
            classes=source.classes,
            unreadable=[Unreadable(key, self.errors[key]) for key in map(self.keys.__getitem__, rows[~known].tolist())],
            computed=0,
        )


def open_vectors(where: str | Path, *, track: Track = no_tracking) -> VectorStore:
    """Open the result of `vit embed` in a folder or behind a URL."""
    result = open_result(where, vectors=True)
    shape = (result.images, int(result.job["width"]))
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
        part[known] = flat.reshape(-1, shape[1])
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
    sources, test_is = probe_sources(store.dataset)
    features, job = [store.features(source) for source in sources], store.result.job
    facts = {"data": job["data"], "model": job["model"], "test_is": test_is}
    return probe_features(features, settings, started=started, **facts)[1]
