"""What a frozen model sees in each image of a source: computed once, then taken from the store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitruvian.config import BATCH
from vitruvian.data.decode import RawImage
from vitruvian.data.parallel import Track, untracked
from vitruvian.data.sources.base import Source
from vitruvian.errors import VitruvianError
from vitruvian.evaluation.store import Features, FeatureStore, image_key
from vitruvian.evaluation.vectors import Unreadable, images_of, nothing_readable, reasons, vectors
from vitruvian.predict import Encoder

# n images that can be read, F features


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureSet:
    """The features of one split, of the images that could be read."""

    values: Features
    """(n, F)"""
    labels: NDArray[np.int64]
    """(n,)"""
    classes: tuple[str, ...]
    unreadable: dict[str, str]
    """Why an image cannot be used, by key."""
    computed: int
    """How many were not in the store."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def examples(self) -> tuple[Features, NDArray[np.int64]]:
        return self.values, self.labels


def features_of(
    encoder: Encoder, source: Source, store: FeatureStore, *, batch: int = BATCH, track: Track = untracked
) -> FeatureSet:
    """The features of all images of a source; new ones are in the store afterwards, and every so often before."""
    values = np.zeros((len(source), encoder.model.config.feature_width), np.float32)
    unreadable: Unreadable = {}
    waiting: dict[int, bytes] = {}

    def unknown() -> Iterator[tuple[int, RawImage | None]]:
        for number, image in track(images_of(source, np.arange(len(source)), unreadable), len(source)):
            if image is not None:
                key = image_key(image)
                found = store.find(key)
                if found is None:
                    waiting[number] = key
                    yield number, image
                else:
                    values[number] = found

    computed = 0
    try:
        for numbers, found in vectors(encoder, encoder.features, unknown(), unreadable=unreadable, batch=batch):
            for number, row in zip(numbers, found.numpy()):
                if not np.isfinite(row).all():
                    raise VitruvianError(f"{source.key(number)}: the model's features are not finite numbers")
                values[number] = row
                store.add(waiting.pop(number), row)
            computed += len(numbers)
    finally:
        store.flush()
    used = np.array([number for number in range(len(source)) if number not in unreadable], np.int64)
    if not len(used):
        raise nothing_readable(source, unreadable)
    return FeatureSet(
        values=values if len(used) == len(values) else values[used],
        labels=np.asarray(source.labels())[used].astype(np.int64),
        classes=source.classes,
        unreadable=reasons(source, unreadable),
        computed=computed,
    )
