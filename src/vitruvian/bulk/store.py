"""The vectors of `vit embed` for other work: probes and the doctor, without computing them again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.bulk.images import Images
from vitruvian.bulk.merge import Result, open_result
from vitruvian.cache import scratch_folder
from vitruvian.data.decode import RawImage
from vitruvian.data.formats import open_images
from vitruvian.data.names import natural_key
from vitruvian.data.sources import Dataset, PartSource, Source, make_dataset
from vitruvian.errors import DataError, ImageError
from vitruvian.evaluation.probes.features import FeatureSet, parts_of
from vitruvian.evaluation.probes.probe import ProbeReport, Wanted, report_of
from vitruvian.progress import Track, no_tracking
from vitruvian.text import printable

# n images, D wide

SAMPLED_KEYS = 64
"""Images whose names are compared to tell whether vectors are of some data."""


class VectorSource(Source):
    """The rows of one split: labels and names, but no images."""

    def __init__(self, name: str, classes: tuple[str, ...], labels: NDArray[np.int32], first: int) -> None:
        self.name, self.classes, self._labels, self.first = name, classes, labels, first

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> NDArray[np.int32]:
        return self._labels

    def read(self, index: int) -> RawImage:
        raise ImageError("a vector without its image", where=self.key(index))


@dataclass(frozen=True)
class Store:
    """All vectors of one result, mapped from a file, with what the parts say of their images."""

    result: Result
    values: NDArray[Any]
    """(n, D) NaN where an image has no vector."""
    keys: list[str]
    splits: list[str]
    labels: list[str | None]
    errors: dict[str, str]
    """Why an image has no vector, by key."""

    def check_of(self, data: str | Path, split: str | None = None) -> None:
        """DataError where the vectors are not of these images, as far as their number and some names tell."""
        images = Images(open_images(data, split=split))
        where = f"{self.result.place}: vectors of {self.result.job['data']}"
        if len(images) != len(self.keys):
            raise DataError(f"{where}, {len(self.keys):,} images; {data} has {len(images):,}: make them anew")
        for number in np.linspace(0, len(images) - 1, SAMPLED_KEYS, dtype=int).tolist():
            if printable(images.key(number)) != self.keys[number]:
                raise DataError(
                    f"{where}, whose image {number} is {self.keys[number]}; in {data} it is "
                    f"{printable(images.key(number))}: make them anew"
                )

    @cached_property
    def dataset(self) -> Dataset:
        """The splits as sources of labels, for whoever divides them into parts."""
        name = str(self.result.place)
        if None in self.labels:
            raise DataError("vectors of images without classes; a probe needs labels", where=name)
        classes = tuple(sorted({label for label in self.labels if label is not None}, key=natural_key))
        numbers = {label: number for number, label in enumerate(classes)}
        sources: dict[str, Source] = {}
        for split in dict.fromkeys(self.splits):
            first = self.splits.index(split)
            count = self.splits.count(split)
            labels = np.array([numbers[label or ""] for label in self.labels[first : first + count]], np.int32)
            sources[split] = VectorSource(f"{name} ({split})", classes, labels, first)
        return make_dataset(name, sources)

    def features(self, source: Source) -> FeatureSet:
        """The vectors of a split, or of a part of one."""
        numbers = np.array([number_of(source, index) for index in range(len(source))], np.int64)
        values = np.asarray(self.values[numbers], np.float32)
        known = np.isfinite(values[:, 0])
        return FeatureSet(
            values=values[known],
            labels=np.asarray(source.labels())[known].astype(np.int64),
            classes=source.classes,
            unreadable={self.keys[number]: self.errors[self.keys[number]] for number in numbers[~known].tolist()},
            computed=0,
        )


def number_of(source: Source, index: int) -> int:
    """The number of the row behind a sample."""
    while isinstance(source, PartSource):
        source, index = source.part(index)
    assert isinstance(source, VectorSource)
    return source.first + index


def open_store(where: str | Path, *, track: Track = no_tracking) -> Store:
    """The vectors in a folder or behind a URL of `vit embed`."""
    result = open_result(where)
    if result.job["task"] != "embed":
        raise DataError("answers, not vectors; make them with `vit embed`", where=where)
    width = int(result.job["width"])
    shape = (result.images, width)
    values = np.memmap(scratch_folder() / "vectors", result.job["dtype"], "w+", shape=shape)
    store = Store(result, values, [], [], [], {})
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
    """As `probe`, of the vectors that `vit embed` wrote; neither the images nor the model are needed."""
    wanted = Wanted(only=tuple(only), shots=None if shots is None else tuple(shots), neighbors=neighbors)
    started = time.monotonic()
    store = open_store(where, track=track)
    parts = parts_of(store.dataset)
    found = [store.features(source) for source in parts.sources]
    return report_of(
        found,
        wanted,
        data=f"{store.result.job['data']}",
        model=str(store.result.job["model"]),
        test_is=parts.test_is,
        notes=[],
        feature_seconds=time.monotonic() - started,
    )
