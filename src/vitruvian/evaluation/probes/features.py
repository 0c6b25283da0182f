"""Features of a frozen model, computed once and then taken from the store, for each part that a probe uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.data.decode import RawImage, Unreadable
from vitruvian.data.sources import Dataset, Source, hold_out
from vitruvian.errors import DataError, ImageError, VitruvianError, argument
from vitruvian.evaluation.probes.fewshot import shuffled_classes
from vitruvian.evaluation.probes.store import Features, FeatureStore, image_key
from vitruvian.inference import NOT_FINITE, Encoder, batched, check_readable, read_images
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import BatchSize, validate

# n images that can be read, F features

HELD = 0.2
"""Share of each class that is held out where a split is missing; the seed of the choice is 0."""

Labels = NDArray[np.int64]
Examples = tuple[NDArray[Any], Labels]
"""Features (n, F) and labels (n,)."""


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
    encoder: Encoder,
    source: Source,
    store: FeatureStore,
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> FeatureSet:
    """The features of all images of a source, from the store or computed and added to it.

    A batch has the images of consecutive indices that are neither stored nor unreadable. So batches, and with them the
    last bits of the features, do not depend on where an earlier call was interrupted.
    """
    validate("batch_size", BatchSize, batch_size)
    values = np.zeros((len(source), encoder.model.config.feature_width), np.float32)
    unreadable: dict[int, str] = {}
    keys: dict[int, bytes] = {}

    def unknown() -> Iterator[list[tuple[int, RawImage | ImageError]]]:
        images = track(read_images(source, np.arange(len(source))), len(source))
        for batch in batched(images, batch_size):
            missing: list[tuple[int, RawImage | ImageError]] = []
            for index, image in batch:
                if not isinstance(image, ImageError):
                    keys[index] = image_key(image)
                    stored = store.find(keys[index])
                    if stored is not None:
                        values[index] = stored
                        continue
                missing.append((index, image))
            yield missing

    computed = 0
    try:
        for batch in encoder.run(encoder.features, encoder.load(unknown(), ahead=2 * batch_size)):
            unreadable |= {index: error.reason for index, error in batch.unreadable}
            for index, row in zip(batch.readable, batch.values.numpy()):
                if not np.isfinite(row).all():
                    raise VitruvianError(NOT_FINITE, where=source.key(index))
                values[index] = row
                store.add(keys[index], row)
            store.flush(full=True)
            computed += len(batch.readable)
    finally:
        store.flush()
    used = np.array([index for index in range(len(source)) if index not in unreadable], np.int64)
    missing = [Unreadable(source.key(index), why) for index, why in unreadable.items()]
    check_readable(source.name, missing, len(source))
    return FeatureSet(
        values=values if len(used) == len(values) else values[used],
        labels=np.asarray(source.labels())[used].astype(np.int64),
        classes=source.classes,
        unreadable=dict(missing),
        computed=computed,
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The images of each role."""

    train: Source
    dev: Source | None
    """To choose settings by; None where a share of `train` has to do."""
    test: Source
    test_is: str
    """What the test images are, in words."""

    @property
    def sources(self) -> list[Source]:
        return [self.train, self.test, *([] if self.dev is None else [self.dev])]


def parts_of(data: Dataset) -> Parts:
    """Tested on the split `test`, or else `val`, or else a share of each class held out from `train`."""
    splits = data.splits
    if "test" in splits and "train" in splits:
        return Parts(train=data.train, dev=splits.get("val"), test=splits["test"], test_is="the split 'test'")
    if "val" in splits and "train" in splits:
        return Parts(train=data.train, dev=None, test=splits["val"], test_is="the split 'val'")
    whole = data.train if "train" in splits else next(iter(splits.values()))
    train, test = hold_out(whole, HELD, seed=0)
    return Parts(train=train, dev=None, test=test, test_is=f"{HELD:.0%} of each class, held out")


@dataclass(frozen=True, kw_only=True)
class Task:
    """The features of all parts."""

    train: FeatureSet
    dev: FeatureSet | None
    test: FeatureSet

    @property
    def classes(self) -> int:
        return len(self.train.classes)

    @property
    def sets(self) -> list[FeatureSet]:
        return [self.train, self.test, *([] if self.dev is None else [self.dev])]

    @property
    def everything(self) -> Examples:
        """What there is to learn from once the settings are chosen."""
        if self.dev is None:
            return self.train.examples
        both = (self.train, self.dev)
        return np.concatenate([part.values for part in both]), np.concatenate([part.labels for part in both])

    def choosing(self) -> tuple[Examples, Examples]:
        """What to learn from, and what to choose by."""
        if self.dev is not None:
            return self.train.examples, self.dev.examples
        return divided(self.train)

    def accuracy(self, found: Labels) -> tuple[float, float]:
        """Top-1 and the mean of the classes' accuracies on the test images, in percent."""
        right, truth = found == self.test.labels, self.test.labels
        counts = np.bincount(truth, minlength=self.classes)
        shares = np.bincount(truth, right, minlength=self.classes)[counts > 0] / counts[counts > 0]
        return 100.0 * float(right.mean()), 100.0 * float(shares.mean())


def divided(known: FeatureSet) -> tuple[Examples, Examples]:
    """What to learn from, and HELD of each class to choose by."""
    values, labels = known.examples
    held = held_numbers(labels, classes=len(known.classes))
    rest = np.setdiff1d(np.arange(len(labels)), held)
    return (values[rest], labels[rest]), (values[held], labels[held])


def held_numbers(labels: Labels, *, classes: int) -> Labels:
    """HELD of each class, at least one and never all; DataError where no class has two images."""
    picked: Sequence[Labels] = shuffled_classes(labels, classes=classes, seed=0)
    held = [of[: min(max(1, round(HELD * len(of))), len(of) - 1)] for of in picked if len(of)]
    numbers = np.sort(np.concatenate(held))
    if not len(numbers):
        raise DataError(
            f"no class has two images to learn from, so no setting can be chosen; use {argument('only', 'fewshot')}"
        )
    return numbers
