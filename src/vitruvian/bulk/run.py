"""What a user asks for: vectors or answers of all images of some data, by one process, by shares, or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitruvian.bulk.images import Images
from vitruvian.bulk.job import MAX_PIECE, Job, Task
from vitruvian.bulk.place import Place
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.data.formats import open_images
from vitruvian.errors import ConfigError, argument, require
from vitruvian.inference import MAX_UNREADABLE, Classifier, Encoder
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import BatchSize, Workers, check_range, environment_number, validate

PIECE = 4096
"""Images in a part; at most so many are computed again after a kill."""

Dtype = Literal["float16", "float32"]
Tracked = Callable[[Iterator[int], int], Iterator[int]]
Shard = tuple[int, int]
"""The first is one of 1 ... the second."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a user asked for, before data and model are opened."""

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
        require("pyarrow", "parquet")  # a missing one is said before the work

    def job(self) -> Job:
        kind = {"embed": Encoder, "predict": Classifier}[self.task]
        encoder = self.model if isinstance(self.model, Encoder) else kind(self.model)
        if not isinstance(encoder, kind):
            raise ConfigError(
                f"{argument('model')} is an Encoder, which gives vectors and no answers; wanted a Classifier"
            )
        if self.task == "predict" and (encoder.model.meta.threshold or encoder.model.meta.threshold_on == "energy"):
            print_status(
                f"note: {encoder.name} calls an image none of its classes below a threshold of "
                f"{encoder.model.meta.threshold:g} on the {encoder.model.meta.threshold_on}; written answers ignore it"
            )
        width = {"width": encoder.model.config.feature_width} if self.task == "embed" else {}
        return Job(
            task=self.task,
            data=str(self.data),
            images=Images(open_images(self.data, split=self.split)),
            encoder=encoder,
            place=Place(self.out),
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
    """Write the features of every image of a dataset as Parquet parts. Parts that exist are not computed again.

    Args:
        data: Anything that `vit train` takes, or a folder of images without classes.
        model: A model, or a file, directory or published name to load.
        out: A directory, or a URL that fsspec can write.
        shard: Process only shard (i, n) of the parts; by default that of this process under torchrun, else all.
        on: "ray" to run on a Ray cluster.
        split: Only this split of the data.
        dtype: Type of the stored vectors.
        piece: Images per part.
        batch_size: Number of images per batch.
        max_unreadable: Largest fraction of unreadable images per part.
        workers: Processes that read and decode; 0 for threads.
        track: Wraps the iteration over parts to show progress.

    Raises:
        DataError: Too many images of a part cannot be read, or `out` belongs to another job.
        ConfigError: The shard or another argument is invalid.
    """
    if dtype not in ("float16", "float32"):
        raise ConfigError(f"{argument('dtype', dtype)} is neither 'float16' nor 'float32'")
    work = Work(
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
    run(work, shard, on, track)


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
    """Write the `top` answers for every image of `data` to the folder or URL `out`, as `embed` does."""
    check_range("top", top, 1)
    work = Work(
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
    run(work, shard, on, track)


def run(work: Work, shard: Shard | None, on: str | None, track: Tracked | None) -> None:
    share = shard_of(shard)
    if on is not None:
        if on != "ray":
            raise ConfigError(f"{argument('on', on)} is not 'ray'")
        if share != (1, 1):
            raise ConfigError(f"{argument('shard')} is for work by hand; {argument('on', 'ray')} does all parts")
        from vitruvian.bulk.ray import run_on_ray

        amounts, total = run_on_ray(work)
    else:
        job = work.job()
        mine = range(share[0] - 1, job.parts, share[1])
        amounts, total = job.work(mine, job.begin()), sum(len(job.rows_of(part)) for part in mine)
    for _ in amounts if track is None else track(amounts, total):
        pass


def shard_of(shard: Shard | None) -> Shard:
    """The share asked for, or that of this process under torchrun, or everything."""
    number, count = shard or (environment_number("RANK", 0) + 1, environment_number("WORLD_SIZE", 1))
    if not 1 <= number <= count:
        raise ConfigError(f"shard={number}/{count} is not one of 1/{count} to {count}/{count}")
    return number, count
