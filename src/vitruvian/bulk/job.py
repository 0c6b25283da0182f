"""One model over any number of images: pieces of work, each written as one Parquet part.

Which images form a piece, and which of them a batch, does not depend on who does the work. So a result is the same
bytes for one process or for many, and after any number of interruptions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitruvian.bulk.parts import DamagedPart, Rows, as_cells, columns_of, encoded, part_name, read_part
from vitruvian.bulk.place import Place
from vitruvian.config import BATCH, Preprocess
from vitruvian.data.decode import RawImage, reason
from vitruvian.data.sources.base import Source
from vitruvian.data.sources.open import open_images
from vitruvian.errors import ConfigError, DataError, ImageError, require
from vitruvian.evaluation.measuring.inference import LOOK_AHEAD, MAX_UNREADABLE
from vitruvian.evaluation.probes.store import HEADS, model_key
from vitruvian.files import json_bytes, parse_object, short_hash
from vitruvian.model.build import Model
from vitruvian.predict import Classifier, Encoder
from vitruvian.progress import tell
from vitruvian.settings import BatchSize, check_range, environment_number, typed
from vitruvian.text import printable
from vitruvian.weights.save import tensors_digest

FORMAT = 1
JOB_FILE = "job.json"
PIECE = 4096
"""Images in a part; at most so many are computed again after a kill."""
MAX_PIECE = 2**20
SAMPLED_KEYS = 256
"""Keys that go into the identity of local data."""

NAMES = ("model", "data")
"""What job.json says for people only: the same files may have another path on another machine."""

Task = Literal["predict", "embed"]
Dtype = Literal["float16", "float32"]
Tracked = Callable[[Iterator[int], int], Iterator[int]]
Shard = tuple[int, int]
"""The first is one of 1 ... the second."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be computed over which images, and where it goes."""

    task: Task
    data: str
    """As it was given."""
    sources: Mapping[str, Source]
    """By split, in their order."""
    encoder: Encoder
    place: Place
    settings: Mapping[str, Any]
    """What else the result depends on: `dtype` or `top`, `piece` and `batch`."""
    max_unreadable: float = MAX_UNREADABLE

    @property
    def description(self) -> dict[str, Any]:
        """All that the result depends on, as `job.json` has it."""
        view = self.encoder.seen_as
        if not isinstance(view, Preprocess):
            raise ConfigError("a bulk job needs preprocessing that can be written down, not a callable")
        names = [len(self), *(f"{split}: {len(source)}" for split, source in self.sources.items())]
        content = {
            "format": FORMAT,
            "task": self.task,
            "model": self.encoder.name,
            "model_key": self._model_key(),
            "data": self.data,
            "data_key": short_hash([*names, *self._some_keys()]),
            "images": len(self),
            "preprocess": view.to_json(),
            **self.settings,
        }
        return dict(parse_object(json_bytes(content), JOB_FILE))  # with lists for tuples, as it is read again

    def _model_key(self) -> str:
        key = model_key(self.encoder)
        if self.task == "embed":
            return key
        assert isinstance(self.encoder, Classifier)
        model = self.encoder.model
        head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEADS)}
        answers = [model.temperature, model.score_function, list(self.encoder.labels)]
        return short_hash([key, tensors_digest(head), *answers])

    def _some_keys(self) -> list[str]:
        """Enough keys to tell one dataset of this size from another, unless each would be fetched."""
        if any(source.remote for source in self.sources.values()):
            return []
        return [self.key(number) for number in np.linspace(0, len(self) - 1, SAMPLED_KEYS, dtype=int).tolist()]

    def __len__(self) -> int:
        return sum(map(len, self.sources.values()))

    @property
    def parts(self) -> int:
        return -(-len(self) // int(self.settings["piece"]))

    def rows_of(self, part: int) -> range:
        piece = int(self.settings["piece"])
        return range(part * piece, min((part + 1) * piece, len(self)))

    def locate(self, number: int) -> tuple[str, Source, int]:
        """Split, source and number there of an image."""
        place = bisect_right(self._starts, number) - 1
        split = list(self.sources)[place]
        return split, self.sources[split], number - self._starts[place]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.sources.values()))]

    def key(self, number: int) -> str:
        _, source, within = self.locate(number)
        return source.key(within)

    def begin(self) -> str:
        """The job's identity, once it is sure that the folder holds no other job."""
        description = self.description
        if JOB_FILE in self.place.names():
            where = f"{self.place}/{JOB_FILE}"
            before = parse_object(self.place.read(JOB_FILE), where, raises=DataError)
            changed = [name for name, value in description.items() if before.get(name) != value and name not in NAMES]
            if changed:
                was = ", ".join(f"{name} was {printable(str(before.get(name)))[:60]}" for name in changed[:3])
                raise DataError(f"{where}: this folder belongs to another job ({was}); choose another folder")
        else:
            self.place.write(JOB_FILE, json_bytes(description))
        return identity_of(description)

    def work(self, numbers: Iterable[int], identity: str) -> Iterator[int]:
        """Make the parts with these numbers that are not there; gives numbers of images as they are done."""
        there = set(self.place.names())
        wanted = []
        for part in numbers:
            name = part_name(part, self.parts)
            if name not in there:
                wanted.append(part)
                continue
            try:
                read_part(self.place, name, identity, self.rows_of(part), self.columns)
                yield len(self.rows_of(part))
            except DamagedPart:
                tell(f"{self.place}/{name}: damaged, made again")
                wanted.append(part)
        failures: dict[int, str] = {}
        images = (number for part in wanted for number in self.rows_of(part))
        views = self.encoder.views(self._read(images, failures), ahead=2 * int(self.settings["batch"]))
        for part in wanted:
            rows = Rows(self.rows_of(part).start)
            yield from self._fill(rows, self.rows_of(part), views, failures)
            self._check_readable(rows)
            self.place.write(part_name(part, self.parts), encoded(rows.table(self.columns, identity)))

    def _read(self, numbers: Iterator[int], failures: dict[int, str]) -> Iterator[RawImage]:
        """The images; b"" for one that cannot be read, with the reason in `failures`."""
        for place, number in enumerate(numbers):
            _, source, within = self.locate(number)
            if source.blocks is not None and place % LOOK_AHEAD == 0:
                source.announce(np.arange(within, min(within + 2 * LOOK_AHEAD, len(source))))
            try:
                yield source.read(within)
            except (ImageError, OSError) as error:
                failures[number] = reason(error)
                yield b""

    def _fill(
        self,
        rows: Rows,
        numbers: range,
        views: Iterator[tuple[str, Tensor | ImageError]],
        failures: dict[int, str],
    ) -> Iterator[int]:
        """Add the results of these images to the rows, a batch at a time."""
        batch = int(self.settings["batch"])
        for start in range(numbers.start, numbers.stop, batch):
            group = list(islice(views, min(batch, numbers.stop - start)))
            pixels = [seen for _, seen in group if isinstance(seen, Tensor)]
            results = iter(self.results(torch.stack(pixels)) if pixels else ())
            for number, (name, seen) in enumerate(group, start):
                split, source, within = self.locate(number)
                error, result = failures.pop(number, ""), None
                if isinstance(seen, ImageError):
                    error = error or str(seen).removeprefix(f"{name}: ")
                else:
                    result = next(results)
                    error = "" if result is not None else "the model's answer is not a finite number"
                rows.keys.append(printable(source.key(within)))
                rows.splits.append(split)
                rows.labels.append(printable(source.classes[source.label(within)]) or None)
                rows.results.append(result)
                rows.errors.append(error or None)
            yield len(group)

    def _check_readable(self, rows: Rows) -> None:
        bad = [place for place, error in enumerate(rows.errors) if error]
        if len(bad) > self.max_unreadable * len(rows.keys):
            first = bad[0]
            raise DataError(
                f"{len(bad):,} of the {len(rows.keys):,} images from number {rows.first:,} on cannot be read, such as "
                f"{rows.keys[first]}: {rows.errors[first]}; this exceeds max_unreadable={self.max_unreadable:g}, "
                "and the part is not written"
            )

    def results(self, pixels: Tensor) -> list[Any]:
        """A result for each image, None where it is not finite."""
        if self.task == "predict":
            assert isinstance(self.encoder, Classifier)
            ranked = self.encoder.ranked(self.encoder.logits(pixels), int(self.settings["top"]))
            return [as_cells(answers) or None for answers in ranked]
        vectors = self.encoder.features(pixels).numpy().astype(self.settings["dtype"])
        finite = np.isfinite(vectors).all(axis=1)
        return [vector if good else None for vector, good in zip(vectors, finite.tolist())]

    @property
    def columns(self) -> Any:
        return columns_of({"task": self.task, **self.settings})


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
    batch: int
    max_unreadable: float

    def job(self) -> Job:
        kind = {"embed": Encoder, "predict": Classifier}[self.task]
        encoder = self.model if isinstance(self.model, Encoder) else kind(self.model)
        if not isinstance(encoder, kind):
            raise ConfigError("model= is an Encoder, which gives vectors and no answers; wanted a Classifier")
        if self.task == "predict" and encoder.model.threshold:
            tell(
                f"note: {encoder.name} calls an image none of its classes below {encoder.model.threshold:.0%}; the "
                "answers that are written keep their probabilities, so that you can compare them"
            )
        width = {"width": encoder.model.config.feature_width} if self.task == "embed" else {}
        return Job(
            task=self.task,
            data=str(self.data),
            sources=open_images(self.data, split=self.split),
            encoder=encoder,
            place=Place(self.out),
            settings={**self.result, **width, "split": self.split, "piece": self.piece, "batch": self.batch},
            max_unreadable=self.max_unreadable,
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
    batch: int = BATCH,
    max_unreadable: float = MAX_UNREADABLE,
    track: Tracked | None = None,
) -> None:
    """Write the features of every image of `data` to the folder or URL `out`, as Parquet parts.

    `shard=(3, 64)` makes the third of 64 shares of the parts; unless given, that of this process under torchrun.
    `on="ray"` makes all of them on a Ray cluster.
    """
    if dtype not in ("float16", "float32"):
        raise ConfigError(f"dtype={dtype!r} is neither 'float16' nor 'float32'")
    common: dict[str, Any] = {"piece": piece, "batch": batch, "max_unreadable": max_unreadable}
    work = Work(task="embed", data=data, model=model, out=out, split=split, result={"dtype": dtype}, **common)
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
    batch: int = BATCH,
    max_unreadable: float = MAX_UNREADABLE,
    track: Tracked | None = None,
) -> None:
    """Write the `top` answers for every image of `data` to the folder or URL `out`, as `embed` does."""
    check_range("top", top, 1)
    common: dict[str, Any] = {"piece": piece, "batch": batch, "max_unreadable": max_unreadable}
    run(
        Work(task="predict", data=data, model=model, out=out, split=split, result={"top": top}, **common),
        shard,
        on,
        track,
    )


def run(work: Work, shard: Shard | None, on: str | None, track: Tracked | None) -> None:
    check_range("piece", work.piece, 1, MAX_PIECE)
    check_range("max_unreadable", work.max_unreadable, 0.0, 1.0)
    typed("batch", BatchSize, work.batch)
    require("pyarrow", "parquet")  # a missing one is said before the work
    share = shard_of(shard)
    if on is not None:
        if on != "ray":
            raise ConfigError(f"on={on!r} is not 'ray'")
        if share != (1, 1):
            raise ConfigError("shard= is for work by hand; on='ray' does all parts")
        from vitruvian.bulk.ray import run_on_ray

        amounts, total = run_on_ray(work)
    else:
        job = work.job()
        mine = range(share[0] - 1, job.parts, share[1])
        amounts, total = job.work(mine, job.begin()), sum(len(job.rows_of(part)) for part in mine)
    for _ in amounts if track is None else track(amounts, total):
        pass


def identity_of(description: Mapping[str, Any]) -> str:
    return short_hash([{name: value for name, value in sorted(description.items()) if name not in NAMES}])


def shard_of(shard: Shard | None) -> Shard:
    """The share asked for, or that of this process under torchrun, or everything."""
    number, count = shard or (environment_number("RANK", 0) + 1, environment_number("WORLD_SIZE", 1))
    if not 1 <= number <= count:
        raise ConfigError(f"shard={number}/{count} is not one of 1/{count} to {count}/{count}")
    return number, count
