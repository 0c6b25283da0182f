"""Bulk jobs: `embed` and `predict` over any number of images, by one process, by shards, or on a Ray cluster.

A job is cut into parts of consecutive images, each written as one Parquet file, and a part into batches. Neither
depends on who does the work, so the result has the same bytes for one process or many, and after any interruption.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitruvian import inference
from vitruvian.bulk.storage import JOB_FILE, NAMES, BulkResult, DamagedPart, OutputFolder, Row, RowDetails
from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.decode import Unreadable, reason
from vitruvian.data.formats import open_images
from vitruvian.data.preprocess import preprocess_image
from vitruvian.data.sources import Concat, Source
from vitruvian.engines.runtimes import EngineName, check_engine
from vitruvian.errors import ConfigError, DataError, ImageError, NotFiniteError, argument, require
from vitruvian.evaluation.features import HEADS, model_key
from vitruvian.files import json_bytes, parse_object, short_hash
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import BatchSize, Workers, check_range, environment_number, validate
from vitruvian.text import brief, printable
from vitruvian.weights.checkpoint_files import tensors_digest

FORMAT = 1
PIECE = 4096  # number of images per part, the unit of work that is repeated after a crash
MAX_PIECE = 2**20
SAMPLED_KEYS = 256  # number of keys that identify local data
CHOOSE = "choose another folder"
LOOK_AHEAD = 512  # number of images that a remote source prefetches

Task = Literal["predict", "embed"]
Dtype = Literal["float16", "float32"]
Tracked = Callable[[Iterator[int], int], Iterator[int]]
Shard = tuple[int, int]  # the number of the shard, from 1, and how many there are


class ReadImages:
    """Reads and preprocesses images by index: the `load` of a job's pipeline, in threads or worker processes."""

    def __init__(self, images: Concat, splits: Sequence[str], preprocess: Preprocess) -> None:
        self.images, self.splits, self.preprocess = images, splits, preprocess
        self._lock = Lock()  # a source need not be safe to read from several threads

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadImages, (self.images, self.splits, self.preprocess)

    def __call__(self, position: int, index: int) -> inference.Loaded[RowDetails]:
        images = self.images
        if images.blocks is not None and position % inference.CHUNK == 0:
            images.announce(np.arange(index, min(index + LOOK_AHEAD, len(images))))
        pixels: Tensor | ImageError
        try:
            with self._lock:
                image = images.read(index)
            pixels = preprocess_image(image, self.preprocess)
        except (ImageError, OSError) as error:
            pixels = error if isinstance(error, ImageError) else ImageError(reason(error))
        source, within = images.part(index)
        label = printable(source.label_text(within)) or None
        return RowDetails(printable(images.key(index)), self.splits[images.parts.index(source)], label), pixels


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, the images to run it on, and where the results go; everything is opened when first used."""

    task: Task
    data: object
    model: inference.Encoder | Model | str | Path
    out: str | Path
    result: Mapping[str, Any]  # `dtype` or `top`
    split: str | None = None
    piece: int = PIECE
    batch_size: int = DEFAULT_BATCH_SIZE
    max_unreadable: float = inference.MAX_UNREADABLE
    workers: int = 0  # processes that read and decode; with 0, threads of this process do
    is_shared: bool = False  # whether several processes make the parts

    def __post_init__(self) -> None:
        check_range("piece", self.piece, 1, MAX_PIECE)
        check_range("max_unreadable", self.max_unreadable, 0.0, 1.0)
        validate("batch_size", BatchSize, self.batch_size)
        validate("workers", Workers, self.workers)
        require("pyarrow", "parquet")  # reports a missing package before the work begins

    @cached_property
    def encoder(self) -> inference.Encoder:
        kind = {"embed": inference.Encoder, "predict": inference.Classifier}[self.task]
        encoder = self.model if isinstance(self.model, inference.Encoder) else kind(self.model)
        if not isinstance(encoder, kind):
            raise ConfigError(f"{argument('model')} is an Encoder, which has no predictions; pass a Classifier")
        meta = encoder.model.meta
        if self.task == "predict" and (meta.threshold or meta.threshold_on == "energy"):
            print_status(
                f"note: {encoder.name} rejects images below a threshold of {meta.threshold:g} on the "
                f"{meta.threshold_on}; the written predictions do not apply it"
            )
        if encoder.engine == "torch":
            return encoder
        return encoder.with_engine(self.engine_of(encoder), self.batch_size)

    def engine_of(self, encoder: inference.Encoder) -> EngineName:
        """The one engine of all parts; engines differ in the last bits, so `auto` is decided when a job begins."""
        if encoder.engine != "auto":
            return encoder.engine
        out = OutputFolder(self.out)
        if JOB_FILE in out.names():
            return check_engine(str(out.read_description().get("engine", "torch")))
        engine: EngineName = "torch"
        if not self.is_shared:  # the other processes may have other engines
            engine = encoder.fastest_engine(len(self.images), self.batch_size)
        print_status(f"engine: {engine}, for all parts")
        return engine

    @property
    def classifier(self) -> inference.Classifier:
        assert isinstance(self.encoder, inference.Classifier)
        return self.encoder

    @cached_property
    def splits(self) -> Mapping[str, Source]:
        return open_images(self.data, split=self.split)

    @cached_property
    def images(self) -> Concat:
        return Concat(list(self.splits.values()), name=str(self.data))

    @property
    def preprocess(self) -> Preprocess:
        preprocess = self.encoder.preprocess
        if not isinstance(preprocess, Preprocess):
            raise ConfigError("a bulk job needs preprocessing settings, not a callable")
        return preprocess

    @property
    def description(self) -> dict[str, Any]:
        """The content of `job.json`: everything that the result depends on."""
        model, preprocess, sources = self.encoder.torch_model, self.preprocess, self.splits
        key = model_key(self.encoder)
        if self.task == "predict":
            head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEADS)}
            scores = [model.meta.temperature, model.meta.score_function, list(self.classifier.labels)]
            key = short_hash([key, tensors_digest(head), *scores])
        identifying: list[Any] = [len(self.images), *(f"{split}: {len(source)}" for split, source in sources.items())]
        if not any(source.remote for source in sources.values()):  # there, each key costs a request
            some = np.linspace(0, len(self.images) - 1, SAMPLED_KEYS, dtype=int).tolist()
            identifying += [self.images.key(index) for index in some]
        content = {
            "format": FORMAT,
            "task": self.task,
            "model": self.encoder.name,
            "model_key": key,
            "data": str(self.data),
            "data_key": short_hash(identifying),
            "images": len(self.images),
            "preprocess": preprocess.to_json(),
            **self.result,
            **({"width": model.config.feature_width} if self.task == "embed" else {}),
            "split": self.split,
            "piece": self.piece,
            "batch_size": self.batch_size,
            "engine": self.encoder.engine,
        }
        return dict(parse_object(json_bytes(content), JOB_FILE))  # tuples become lists, as when it is read again

    def begin(self) -> BulkResult:
        """Write `job.json`, or check that the one in the output folder is of this job.

        Raises:
            DataError: The folder belongs to another job.
        """
        out = OutputFolder(self.out)
        names = out.names()
        if names and not any(name == JOB_FILE or name.startswith("part-") for name in names):
            raise DataError(f"not empty, and not the result of a job: it has {brief(names, 2)}", where=out, hint=CHOOSE)
        description = self.description
        if JOB_FILE in names:
            before = {"engine": "torch"} | out.read_description()
            changed = [name for name, value in description.items() if before.get(name) != value and name not in NAMES]
            if changed:
                was = ", ".join(f"{name} was {printable(str(before.get(name)))[:60]}" for name in changed[:3])
                what = f"this folder belongs to another job ({was})"
                raise DataError(what, where=f"{out}/{JOB_FILE}", hint=CHOOSE)
        else:
            out.write(JOB_FILE, json_bytes(description))
        return BulkResult(out, description)

    def work(self, parts: Iterable[int], out: BulkResult) -> Iterator[int]:
        """Make the parts that do not exist yet; yields the number of images of each finished batch."""
        existing = set(out.folder.names())
        missing = []
        for part in parts:
            name = out.name_of(part)
            if name in existing:
                try:
                    out.table(part)
                    yield len(out.rows_of(part))
                    continue
                except DamagedPart:
                    print_status(f"{out.folder}/{name}: damaged, computing it again")
            missing.append(part)

        def batches_of(part: int) -> list[range]:
            rows = out.rows_of(part)
            return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]

        load = ReadImages(self.images, list(self.splits), self.preprocess)
        batches = (batch for part in missing for batch in batches_of(part))
        loaded = inference.load_batches(load, batches, ahead=2 * self.batch_size, workers=self.workers)
        computed = self.encoder.run(self.classifier.logits if self.task == "predict" else self.encoder.features, loaded)
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:  # the model does not wait for the storage
            written: Future[None] | None = None
            for part in missing:
                rows: list[Row] = []
                for batch in islice(computed, len(batches_of(part))):
                    results = iter(self.results(batch.values) if batch.readable else ())
                    for details, error in batch.images:
                        result = next(results) if error is None else None
                        not_finite = inference.NOT_FINITE if result is None else None
                        rows.append((details, result, not_finite if error is None else error.reason))
                    yield len(batch.images)
                self._check_readable(rows, out.rows_of(part).start)
                if written is not None:
                    written.result()
                written = writer.submit(out.write, part, rows)
            if written is not None:
                written.result()

    def results(self, values: Tensor) -> list[Any]:
        """One result per row of logits or features: its predictions or its vector; None if values are not finite."""
        if self.task == "predict":
            if self.classifier.model.meta.target.kind != "single":
                raise ConfigError("a folder of parts is for one class per image", hint="write a table: --out all.csv")
            ranked = self.classifier.rank(values, self.result["top"])
            return [[prediction.to_json() for prediction in row] or None for row in ranked]
        with np.errstate(over="ignore"):  # infinity in float16 is reported below
            vectors = values.numpy().astype(self.result["dtype"])
        finite = np.isfinite(vectors).all(axis=1)
        return [vector if is_finite else None for vector, is_finite in zip(vectors, finite.tolist())]

    def _check_readable(self, rows: list[Row], first: int) -> None:
        failed = [Unreadable(details.key, why) for details, _, why in rows if why]
        failed.sort(key=lambda image: image.reason == inference.NOT_FINITE)  # the example is an unreadable one, if any
        total, not_finite = len(rows), [image for image in failed if image.reason == inference.NOT_FINITE]
        not_written = f"the part from image {first:,} on is not written"
        if len(not_finite) > self.max_unreadable * total:
            what = f"{inference.NOT_FINITE} for {len(not_finite):,} of {total:,} images, such as {not_finite[0].key}"
            raise NotFiniteError(what, where=str(self.data), hint=not_written)
        try:
            inference.check_readable(str(self.data), failed, total, max_unreadable=self.max_unreadable)
        except DataError as error:
            raise error.replace(hint=f"{not_written}; {argument('max_unreadable')} sets the limit") from None

    def run(self, shard: Shard | None, on: str | None, track: Tracked | None) -> None:
        """Make all parts, or those of a shard."""
        index, count = shard or (environment_number("RANK", 0) + 1, environment_number("WORLD_SIZE", 1))
        if not 1 <= index <= count:
            raise ConfigError(f"shard={index}/{count} is not one of 1/{count} to {count}/{count}")
        if on is not None:
            if on != "ray":
                raise ConfigError(f"{argument('on', on)} is not 'ray'")
            if count > 1:
                what = f"{argument('shard')} cannot be used with {argument('on', 'ray')}, which makes all parts"
                raise ConfigError(what)
            amounts, total = run_on_ray(self)
        else:
            job = replace(self, is_shared=count > 1)
            out = job.begin()
            parts = range(index - 1, out.parts, count)
            amounts, total = job.work(parts, out), sum(len(out.rows_of(part)) for part in parts)
        for _ in amounts if track is None else track(amounts, total):
            pass


def embed(
    data: object,
    model: inference.Encoder | Model | str | Path,
    out: str | Path,
    *,
    shard: Shard | None = None,
    on: str | None = None,
    split: str | None = None,
    dtype: Dtype = "float16",
    piece: int = PIECE,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_unreadable: float = inference.MAX_UNREADABLE,
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
    settings: dict[str, Any] = {"max_unreadable": max_unreadable, "workers": workers}
    settings |= {"result": {"dtype": dtype}, "split": split, "piece": piece, "batch_size": batch_size}
    Job(task="embed", data=data, model=model, out=out, **settings).run(shard, on, track)


def predict(
    data: object,
    model: inference.Classifier | Model | str | Path,
    out: str | Path,
    *,
    top: int = 5,
    shard: Shard | None = None,
    on: str | None = None,
    track: Tracked | None = None,
    **settings: Any,
) -> None:
    """Write the `top` predictions for every image as Parquet parts.

    The other arguments are those of `embed`; `settings` are its `split`, `piece`, `batch_size`, `max_unreadable` and
    `workers`.
    """
    check_range("top", top, 1)
    Job(task="predict", data=data, model=model, out=out, result={"top": top}, **settings).run(shard, on, track)


class PartActor:
    """A Ray actor that makes parts of a job. Finished parts are the checkpoint, so no rows are lost with a worker."""

    def __init__(self, job: Job) -> None:
        self.job, self.out = job, job.begin()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"images": np.array([sum(self.job.work([int(part)], self.out)) for part in batch["id"]])}


def run_on_ray(job: Job) -> tuple[Iterator[int], int]:
    """Make the missing parts on the cluster that Ray is connected to, or on a local one.

    Returns:
        An iterator over the numbers of images of finished parts, and their total.
    """
    if not isinstance(job.model, str | Path) or not isinstance(job.data, str | Path):
        what = f"{argument('on', 'ray')} needs data and a model that every node can open"
        raise ConfigError(what, hint="give a path, a URL or a published name")
    count = ray_actors()
    parts = job.begin().parts  # refuses the folder of another job before anything starts
    data = require("ray.data", "ray")
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    made = data.range(parts, override_num_blocks=parts).map_batches(
        PartActor,
        fn_constructor_kwargs={"job": replace(job)},  # not opened; each actor does that
        batch_size=1,
        compute=data.ActorPoolStrategy(size=count),
        num_cpus=1,
    )
    return (int(row["images"]) for row in made.iter_rows()), len(job.images)


def ray_actors() -> int:
    """Number of actors: one per processor except one, which reads. Starts Ray if it is not running."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)
