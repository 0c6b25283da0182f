"""One model over any number of images: pieces of work, each written as one Parquet part.

Which images form a piece, and which of them a batch, does not depend on who does the work. So a result is the same
bytes for one process or for many, and after any number of interruptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
from torch import Tensor

from vitruvian.bulk.images import Images, ReadImages
from vitruvian.bulk.parts import DamagedPart, Rows, columns_of, encoded, part_name, read_part
from vitruvian.bulk.place import Place
from vitruvian.config import Preprocess
from vitruvian.data.decode import Unreadable
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.probes.store import HEADS, model_keys
from vitruvian.files import json_bytes, parse_object, short_hash
from vitruvian.inference import MAX_UNREADABLE, Classifier, Encoder, check_readable, load_batches
from vitruvian.progress import print_status
from vitruvian.text import printable
from vitruvian.weights.checkpoint_files import tensors_digest

FORMAT = 1
JOB_FILE = "job.json"
MAX_PIECE = 2**20
SAMPLED_KEYS = 256
"""Keys that go into the identity of local data."""

NAMES = ("model", "data")
"""What job.json says for people only: the same files may have another path on another machine."""

Task = Literal["predict", "embed"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be computed over which images, and where it goes."""

    task: Task
    data: str
    """As it was given."""
    images: Images
    encoder: Encoder
    place: Place
    settings: Mapping[str, Any]
    """What else the result depends on: `dtype` or `top`, `piece` and `batch`."""
    max_unreadable: float = MAX_UNREADABLE
    workers: int = 0
    """Processes that read and decode; 0 means threads of this one."""

    @property
    def preprocess(self) -> Preprocess:
        preprocess = self.encoder.preprocess
        if not isinstance(preprocess, Preprocess):
            raise ConfigError("a bulk job needs preprocessing settings, not a callable")
        return preprocess

    @property
    def description(self) -> dict[str, Any]:
        """All that the result depends on, as `job.json` has it."""
        names = [len(self), *(f"{split}: {len(source)}" for split, source in self.images.sources.items())]
        content = {
            "format": FORMAT,
            "task": self.task,
            "model": self.encoder.name,
            "model_key": self._model_keys[0],
            "data": self.data,
            "data_key": short_hash([*names, *self._some_keys()]),
            "images": len(self),
            "preprocess": self.preprocess.to_json(),
            **self.settings,
        }
        return dict(parse_object(json_bytes(content), JOB_FILE))  # with lists for tuples, as it is read again

    @cached_property
    def _model_keys(self) -> tuple[str, ...]:
        """Of what the result depends on in the model, and as earlier versions wrote it."""
        keys = model_keys(self.encoder)
        if self.task == "embed":
            return keys
        assert isinstance(self.encoder, Classifier)
        model = self.encoder.model
        head = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(HEADS)}
        answers = [tensors_digest(head), model.meta.temperature, model.meta.score_function, list(self.encoder.labels)]
        return tuple(short_hash([key, *answers]) for key in keys)

    def _some_keys(self) -> list[str]:
        """Enough keys to tell one dataset of this size from another, unless each would be fetched."""
        if self.images.remote:
            return []
        return [self.images.key(number) for number in np.linspace(0, len(self) - 1, SAMPLED_KEYS, dtype=int).tolist()]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def parts(self) -> int:
        return -(-len(self) // int(self.settings["piece"]))

    def rows_of(self, part: int) -> range:
        piece = int(self.settings["piece"])
        return range(part * piece, min((part + 1) * piece, len(self)))

    def batches_of(self, part: int) -> list[range]:
        """The numbers of the images of a part that the model gets together."""
        rows, batch = self.rows_of(part), int(self.settings["batch_size"])
        return [rows[start : start + batch] for start in range(0, len(rows), batch)]

    def begin(self) -> str:
        """The job's identity, once it is sure that the folder holds no other job."""
        description = self.description
        if JOB_FILE in self.place.names():
            where = f"{self.place}/{JOB_FILE}"
            before = read_description(self.place)
            description |= self._same(before)
            changed = [name for name, value in description.items() if before.get(name) != value and name not in NAMES]
            if changed:
                was = ", ".join(f"{name} was {printable(str(before.get(name)))[:60]}" for name in changed[:3])
                raise DataError(f"{where}: this folder belongs to another job ({was}); choose another folder")
        else:
            self.place.write(JOB_FILE, json_bytes(description))
        return identity_of(description)

    def _same(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """What an earlier version has described in other words: it is part of the identity of what is there."""
        found = {}
        if before.get("model_key") in self._model_keys:
            found["model_key"] = before["model_key"]
        try:
            if Preprocess.from_json(before["preprocess"]) == self.preprocess:
                found["preprocess"] = before["preprocess"]
        except (ConfigError, LookupError, TypeError, AttributeError):
            pass  # not preprocessing: told with the other differences
        return found

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
                print_status(f"{self.place}/{name}: damaged, made again")
                wanted.append(part)
        batches = (batch for part in wanted for batch in self.batches_of(part))
        load = ReadImages(self.images, self.preprocess)
        loaded = load_batches(load, batches, ahead=2 * int(self.settings["batch_size"]), workers=self.workers)
        computed = self.encoder.run(self._forward, loaded)
        with ThreadPoolExecutor(1, thread_name_prefix="write") as writer:  # the model does not wait for the place
            written: Future[None] | None = None
            for part in wanted:
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

    def _write(self, part: int, rows: Rows, identity: str) -> None:
        self.place.write(part_name(part, self.parts), encoded(rows.table(self.columns, identity)))

    def _check_readable(self, rows: Rows) -> None:
        unreadable = [Unreadable(details.key, why) for details, why in zip(rows.details, rows.errors) if why]
        try:
            check_readable(self.data, unreadable, len(rows.details), max_unreadable=self.max_unreadable)
        except DataError as error:
            raise error.replace(
                hint=f"the part from image {rows.first:,} on is not written; the limit is "
                f"{argument('max_unreadable', self.max_unreadable, 'g')}"
            ) from None

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
        vectors = values.numpy().astype(self.settings["dtype"])
        finite = np.isfinite(vectors).all(axis=1)
        return [vector if is_finite else None for vector, is_finite in zip(vectors, finite.tolist())]

    @property
    def columns(self) -> Any:
        return columns_of({"task": self.task, **self.settings})


def read_description(place: Place) -> dict[str, Any]:
    """What `job.json` says, which can be made anew where it is damaged."""
    try:
        return parse_object(place.read(JOB_FILE), f"{place}/{JOB_FILE}", raises=DataError)
    except DataError as error:
        raise error.replace(hint="remove it and run the job again, which keeps the parts") from error


def identity_of(description: Mapping[str, Any]) -> str:
    return short_hash([{name: value for name, value in sorted(description.items()) if name not in NAMES}])
