"""Bulk jobs: `embed` and `predict` over any number of images, by one process, by shards, or on a Ray cluster.

A job is cut into parts of consecutive images, each written as one Parquet file, and a part into batches. Neither
depends on who does the work, so the result has the same bytes for one process or many, and after any interruption.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitruvian.bulk.storage import (
    DamagedPart,
    OutputFolder,
    RowDetails,
    Rows,
    columns_of,
    encode_table,
    part_name,
    read_part,
)
from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.decode import Unreadable, reason
from vitruvian.data.formats import open_images
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, DataError, ImageError, NotFiniteError, argument, require
from vitruvian.evaluation.features import HEADS, model_key
from vitruvian.files import json_bytes, parse_object, short_hash
from vitruvian.inference import (
    CHUNK,
    MAX_UNREADABLE,
    NOT_FINITE,
    Classifier,
    Encoder,
    Loaded,
    check_readable,
    load_batches,
)
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import BatchSize, Workers, check_range, environment_number, validate
from vitruvian.text import printable
from vitruvian.weights.checkpoint_files import tensors_digest

FORMAT = 1
JOB_FILE = "job.json"
PIECE = 4096
"""Number of images per part, the unit of work that is repeated after a crash."""
MAX_PIECE = 2**20
SAMPLED_KEYS = 256
"""Number of keys that identify local data."""
LOOK_AHEAD = 512
"""Number of images that a remote source prefetches."""
NAMES = ("model", "data")
"""Fields of job.json for people only: the same files may have another path on another machine."""

Task = Literal["predict", "embed"]
Dtype = Literal["float16", "float32"]
Tracked = Callable[[Iterator[int], int], Iterator[int]]
Shard = tuple[int, int]
"""The number of the shard, from 1, and how many there are."""


@dataclass(frozen=True)
class JobImages:
    """The images of all splits, with one index through all of them."""

    sources: Mapping[str, Source]
    """By split."""

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(map(len, self.sources.values())))

    def locate(self, index: int) -> tuple[str, Source, int]:
        """The split and source of an image, and its index there."""
        position = bisect_right(self._ends, index)
        split = list(self.sources)[position]
        return split, self.sources[split], index - (self._ends[position - 1] if position else 0)

    def key(self, index: int) -> str:
        _, source, within = self.locate(index)
        return source.key(within)

    @property
    def remote(self) -> bool:
        return any(source.remote for source in self.sources.values())


class ReadImages:
    """Reads and preprocesses images by index: the `load` of a job's pipeline, in threads or worker processes."""

    def __init__(self, images: JobImages, preprocess: Preprocess) -> None:
        self.images, self.preprocess = images, preprocess
        self._lock = Lock()  # a source need not be safe to read from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadImages, (self.images, self.preprocess)

    def __call__(self, position: int, index: int) -> Loaded[RowDetails]:
        split, source, within = self.images.locate(index)
        if source.blocks is not None and position % CHUNK == 0:
            source.announce(np.arange(within, min(within + LOOK_AHEAD, len(source))))
        pixels: Tensor | ImageError
        try:
            with self._lock:
                image = source.read(within)
            pixels = preprocess_image(image, self.preprocess)
        except (ImageError, OSError) as error:
            pixels = error if isinstance(error, ImageError) else ImageError(reason(error))
        label = printable(source.classes[source.label(within)]) or None
        return RowDetails(printable(source.key(within)), split, label), pixels


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, the images to run it on, and where the results go."""

    task: Task
    data: str
    images: JobImages
    encoder: Encoder
    out: OutputFolder
    settings: Mapping[str, Any]
    """Everything else that the result depends on: `dtype` or `top`, `piece`, `batch_size` and others."""
    max_unreadable: float = MAX_UNREADABLE
    workers: int = 0
    """Processes that read and decode; with 0, threads of this process do."""

    @property
    def preprocess(self) -> Preprocess:
        preprocess = self.encoder.preprocess
        if not isinstance(preprocess, Preprocess):
            raise ConfigError("a bulk job needs preprocessing settings, not a callable")
        return preprocess

    @property
    def description(self) -> dict[str, Any]:
        """The content of `job.json`: everything that the result depends on."""
        names = [len(self), *(f"{split}: {len(source)}" for split, source in self.images.sources.items())]
        content = {
            "format": FORMAT,
            "task": self.task,
            "model": self.encoder.name,
            "model_key": self._model_key,
            "data": self.data,
            "data_key": short_hash([*names, *self._some_keys()]),
            "images": len(self),
            "preprocess": self.preprocess.to_json(),
            **self.settings,
        }
        return dict(parse_object(json_bytes(content), JOB_FILE))  # tuples become lists, as when it is read again

    @cached_property
    def _model_key(self) -> str:
        """A hash of everything in the model that the result depends on."""
        if self.task == "embed":
            return model_key(self.encoder)
        assert isinstance(self.encoder, Classifier)
        model = self.encoder.torch_model
        head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEADS)}
        scores = [tensors_digest(head), model.meta.temperature, model.meta.score_function, list(self.encoder.labels)]
        return short_hash([model_key(self.encoder), *scores])

    def _some_keys(self) -> list[str]:
        """Enough keys to distinguish datasets of one size; none for remote data, where each key costs a request."""
        if self.images.remote:
            return []
        return [self.images.key(index) for index in np.linspace(0, len(self) - 1, SAMPLED_KEYS, dtype=int).tolist()]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def parts(self) -> int:
        return -(-len(self) // int(self.settings["piece"]))

    @property
    def columns(self) -> Any:
        return columns_of({"task": self.task, **self.settings})

    def rows_of(self, part: int) -> range:
        piece = int(self.settings["piece"])
        return range(part * piece, min((part + 1) * piece, len(self)))

    def batches_of(self, part: int) -> list[range]:
        """The indices of the images of each batch of a part."""
        rows, size = self.rows_of(part), int(self.settings["batch_size"])
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def begin(self) -> str:
        """Write `job.json`, or check that the one in the output folder is of this job; returns the job's identity.

        Raises:
            DataError: The folder belongs to another job.
        """
        description = self.description
        if JOB_FILE in self.out.names():
            before = read_description(self.out)
            changed = [name for name, value in description.items() if before.get(name) != value and name not in NAMES]
            if changed:
                was = ", ".join(f"{name} was {printable(str(before.get(name)))[:60]}" for name in changed[:3])
                raise DataError(
                    f"this folder belongs to another job ({was})",
                    where=f"{self.out}/{JOB_FILE}",
                    hint="choose another folder",
                )
        else:
            self.out.write(JOB_FILE, json_bytes(description))
        return identity_of(description)

    def work(self, parts: Iterable[int], identity: str) -> Iterator[int]:
        """Make the parts that do not exist yet; yields the number of images of each finished batch."""
        existing = set(self.out.names())
        missing = []
        for part in parts:
            name = part_name(part, self.parts)
            if name not in existing:
                missing.append(part)
                continue
            try:
                read_part(self.out, name, identity, self.rows_of(part), self.columns)
                yield len(self.rows_of(part))
            except DamagedPart:
                print_status(f"{self.out}/{name}: damaged, computing it again")
                missing.append(part)
        batches = (batch for part in missing for batch in self.batches_of(part))
        load = ReadImages(self.images, self.preprocess)
        loaded = load_batches(load, batches, ahead=2 * int(self.settings["batch_size"]), workers=self.workers)
        computed = self.encoder.run(self._forward, loaded)
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:  # the model does not wait for the storage
            written: Future[None] | None = None
            for part in missing:
                rows = Rows(self.rows_of(part).start)
                for batch in islice(computed, len(self.batches_of(part))):
                    rows.add(batch.images, iter(self.results(batch.values) if batch.readable else ()))
                    yield len(batch.images)
                self._check_readable(rows)
                if written is not None:
                    written.result()
                written = writer.submit(self._write, part, rows, identity)
            if written is not None:
                written.result()

    def _forward(self, pixels: Tensor) -> Tensor:
        if self.task == "predict":
            assert isinstance(self.encoder, Classifier)
            return self.encoder.logits(pixels)
        return self.encoder.features(pixels)

    def results(self, values: Tensor) -> list[Any]:
        """The predictions or the vector of each image with these logits or features; None if they are not finite."""
        if self.task == "predict":
            assert isinstance(self.encoder, Classifier)
            ranked = self.encoder.rank(values, int(self.settings["top"]))
            return [[prediction.to_json() for prediction in row] or None for row in ranked]
        with np.errstate(over="ignore"):  # infinity in float16 is reported below
            vectors = values.numpy().astype(self.settings["dtype"])
        finite = np.isfinite(vectors).all(axis=1)
        return [vector if is_finite else None for vector, is_finite in zip(vectors, finite.tolist())]

    def _check_readable(self, rows: Rows) -> None:
        failed = [Unreadable(details.key, why) for details, why in zip(rows.details, rows.errors) if why]
        failed.sort(key=lambda image: image.reason == NOT_FINITE)  # stable: the example is an unreadable image, if any
        total, not_finite = len(rows.details), [image for image in failed if image.reason == NOT_FINITE]
        not_written = f"the part from image {rows.first:,} on is not written"
        if len(not_finite) > self.max_unreadable * total:
            raise NotFiniteError(
                f"{NOT_FINITE} for {len(not_finite):,} of {total:,} images, such as {not_finite[0].key}",
                where=self.data,
                hint=not_written,
            )
        try:
            check_readable(self.data, failed, total, max_unreadable=self.max_unreadable)
        except DataError as error:
            raise error.replace(hint=f"{not_written}; {argument('max_unreadable')} sets the limit") from None

    def _write(self, part: int, rows: Rows, identity: str) -> None:
        self.out.write(part_name(part, self.parts), encode_table(rows.table(self.columns, identity)))


def read_description(out: OutputFolder) -> dict[str, Any]:
    """The content of `job.json`."""
    try:
        return parse_object(out.read(JOB_FILE), f"{out}/{JOB_FILE}", raises=DataError)
    except DataError as error:
        raise error.replace(hint="remove it and run the job again, which keeps the parts") from error


def identity_of(description: Mapping[str, Any]) -> str:
    return short_hash([{name: value for name, value in sorted(description.items()) if name not in NAMES}])


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The arguments of a job, which are sent to the workers of a cluster."""

    task: Task
    data: object
    model: Encoder | Model | str | Path
    out: str | Path
    split: str | None
    result: Mapping[str, Any]
    """`dtype` or `top`."""
    piece: int
    batch_size: int
    max_unreadable: float
    workers: int

    def __post_init__(self) -> None:
        check_range("piece", self.piece, 1, MAX_PIECE)
        check_range("max_unreadable", self.max_unreadable, 0.0, 1.0)
        validate("batch_size", BatchSize, self.batch_size)
        validate("workers", Workers, self.workers)
        require("pyarrow", "parquet")  # reports a missing package before the work begins

    def open(self) -> Job:
        kind = {"embed": Encoder, "predict": Classifier}[self.task]
        encoder = self.model if isinstance(self.model, Encoder) else kind(self.model)
        if not isinstance(encoder, kind):
            raise ConfigError(f"{argument('model')} is an Encoder, which has no predictions; pass a Classifier")
        meta = encoder.model.meta
        if self.task == "predict" and (meta.threshold or meta.threshold_on == "energy"):
            print_status(
                f"note: {encoder.name} rejects images below a threshold of {meta.threshold:g} on the "
                f"{meta.threshold_on}; the written predictions do not apply it"
            )
        width = {"width": encoder.torch_model.config.feature_width} if self.task == "embed" else {}
        return Job(
            task=self.task,
            data=str(self.data),
            images=JobImages(open_images(self.data, split=self.split)),
            encoder=encoder,
            out=OutputFolder(self.out),
            settings={**self.result, **width, "split": self.split, "piece": self.piece, "batch_size": self.batch_size},
            max_unreadable=self.max_unreadable,
            workers=self.workers,
        )


def embed(
    data: object,
    model: Encoder | Model | str | Path,
    out: str | Path,
    *,
    shard: Shard | None = None,
    on: str | None = None,
    split: str | None = None,
    dtype: Dtype = "float16",
    piece: int = PIECE,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_unreadable: float = MAX_UNREADABLE,
    workers: int = 0,
    track: Tracked | None = None,
) -> None:
    """Write the features of every image as Parquet parts. A job that was interrupted continues where it stopped.

    Args:
        data: A dataset or a folder of images.
        model: A file, directory, published name, model or Encoder.
        out: A folder or URL.
        shard: `(3, 64)` makes the third of 64 shards; by default that of this process under torchrun, or everything.
        on: "ray" makes all parts on a Ray cluster.
        split: Only this split of the data.
        dtype: "float16" or "float32".
        piece: Images per part.
        batch_size: Images per batch.
        max_unreadable: Maximum fraction of unreadable images per part.
        workers: Processes that read and decode; with 0, threads do.
        track: Wraps the iterator over finished images to show progress.

    Raises:
        DataError: The data cannot be read, too many images are unreadable, or `out` belongs to another job.
    """
    if dtype not in ("float16", "float32"):
        raise ConfigError(f"{argument('dtype', dtype)} is neither 'float16' nor 'float32'")
    request = JobRequest(
        task="embed",
        data=data,
        model=model,
        out=out,
        split=split,
        result={"dtype": dtype},
        piece=piece,
        batch_size=batch_size,
        max_unreadable=max_unreadable,
        workers=workers,
    )
    run_job(request, shard, on, track)


def predict(
    data: object,
    model: Classifier | Model | str | Path,
    out: str | Path,
    *,
    shard: Shard | None = None,
    on: str | None = None,
    split: str | None = None,
    top: int = 5,
    piece: int = PIECE,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_unreadable: float = MAX_UNREADABLE,
    workers: int = 0,
    track: Tracked | None = None,
) -> None:
    """Write the `top` predictions for every image as Parquet parts; for the other arguments see `embed`."""
    check_range("top", top, 1)
    request = JobRequest(
        task="predict",
        data=data,
        model=model,
        out=out,
        split=split,
        result={"top": top},
        piece=piece,
        batch_size=batch_size,
        max_unreadable=max_unreadable,
        workers=workers,
    )
    run_job(request, shard, on, track)


def run_job(request: JobRequest, shard: Shard | None, on: str | None, track: Tracked | None) -> None:
    number, count = shard_of(shard)
    if on is not None:
        if on != "ray":
            raise ConfigError(f"{argument('on', on)} is not 'ray'")
        if count > 1:
            raise ConfigError(f"{argument('shard')} cannot be used with {argument('on', 'ray')}, which makes all parts")
        amounts, total = run_on_ray(request)
    else:
        job = request.open()
        parts = range(number - 1, job.parts, count)
        amounts, total = job.work(parts, job.begin()), sum(len(job.rows_of(part)) for part in parts)
    for _ in amounts if track is None else track(amounts, total):
        pass


def shard_of(shard: Shard | None) -> Shard:
    """The given shard, else that of this process under torchrun, else everything."""
    number, count = shard or (environment_number("RANK", 0) + 1, environment_number("WORLD_SIZE", 1))
    if not 1 <= number <= count:
        raise ConfigError(f"shard={number}/{count} is not one of 1/{count} to {count}/{count}")
    return number, count


class PartActor:
    """A Ray actor that makes parts of a job. Finished parts are the checkpoint, so no rows are lost with a worker."""

    def __init__(self, request: JobRequest) -> None:
        self.job = request.open()
        self.identity = self.job.begin()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"images": np.array([sum(self.job.work([int(part)], self.identity)) for part in batch["id"]])}


def run_on_ray(request: JobRequest) -> tuple[Iterator[int], int]:
    """Make the missing parts on the cluster that Ray is connected to, or on a local one.

    Returns:
        An iterator over the numbers of images of finished parts, and their total.
    """
    if not isinstance(request.model, str | Path) or not isinstance(request.data, str | Path):
        raise ConfigError(
            f"{argument('on', 'ray')} needs data and a model that every node can open",
            hint="give a path, a URL or a published name",
        )
    count = ray_actors()
    job = request.open()
    job.begin()  # refuses the folder of another job before anything starts
    data = require("ray.data", "ray")
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    made = data.range(job.parts, override_num_blocks=job.parts).map_batches(
        PartActor,
        fn_constructor_kwargs={"request": request},
        batch_size=1,
        compute=data.ActorPoolStrategy(size=count),
        num_cpus=1,
    )
    return (int(row["images"]) for row in made.iter_rows()), len(job)


def ray_actors() -> int:
    """Number of actors: one per processor except one, which reads. Starts Ray if it is not running."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)
