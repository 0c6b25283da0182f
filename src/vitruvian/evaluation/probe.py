"""Probe the features of a frozen model: few-shot, linear and nearest-neighbor accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.formats import open_dataset
from vitruvian.data.transform import Transform
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.evaluation.features import FeatureSet, Labels, ProbeFeatures, compute_features, open_store, probe_sources
from vitruvian.evaluation.probe_classifiers import (
    SEEDS,
    choose_l2,
    choose_neighbors,
    fewshot_predictions,
    fit_linear,
    neighbor_predictions,
    possible_shots,
)
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import check_range
from vitruvian.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The accuracy of one probe on the test images, in percent."""

    probe: str
    setting: str
    top1: float
    """Mean over the runs."""
    mean_per_class: float
    """Mean per-class accuracy, averaged over the runs."""
    runs: tuple[float, ...]
    """Top-1 of each seed; one value if nothing is random."""
    deviation: float
    """Standard deviation of the runs (population); 0 for one run."""
    tried: dict[str, float] = field(default_factory=dict)
    """Accuracy of each setting on the images that the setting was chosen by."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """The result of `probe`."""

    data: str
    model: str
    classes: int
    train_images: int
    test_images: int
    test_is: str
    """Description of the test images."""
    results: tuple[ProbeResult, ...]
    unreadable: dict[str, str]
    """Reasons by key."""
    notes: tuple[str, ...]
    computed: int
    """Number of features that were not in the store."""
    feature_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """The probes to run; None means the default shots, and choosing the number of neighbors."""

    only: tuple[str, ...] = ("fewshot", "linear", "neighbors")
    shots: tuple[int, ...] | None = None
    neighbors: int | None = None

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in PROBES:
                raise UnknownNameError("probe", name, PROBES, see=f"(there are {', '.join(PROBES)})")
        if not self.only:
            raise ConfigError(f"no probe given; choose from {', '.join(PROBES)}")
        check_range("neighbors", 1 if self.neighbors is None else self.neighbors, 1)


def probe_result(task: ProbeFeatures, probe: str, setting: str, runs: Sequence[Labels]) -> ProbeResult:
    top1, per_class = zip(*map(task.accuracy, runs))
    return ProbeResult(
        probe=probe,
        setting=setting,
        top1=float(np.mean(top1)),
        mean_per_class=float(np.mean(per_class)),
        runs=top1,
        deviation=float(np.std(top1)),
    )


def fewshot(task: ProbeFeatures, settings: ProbeSettings) -> Iterator[ProbeResult]:
    shots, _ = possible_shots(task.train.labels, task.train.classes, settings.shots)
    for count in shots:
        runs = [
            fewshot_predictions(task.train.examples, task.test.values, classes=task.classes, shots=count, seed=seed)
            for seed in SEEDS
        ]
        yield probe_result(task, "few-shot", f"{count}-shot", runs)


def linear(task: ProbeFeatures, settings: ProbeSettings) -> Iterator[ProbeResult]:
    train, dev = task.selection()
    l2, tried = choose_l2(train, dev, classes=task.classes)
    predictions = fit_linear(*task.everything, classes=task.classes, l2=l2).predictions(task.test.values)
    accuracies = {f"l2 {value:.2g}": accuracy for value, accuracy in tried.items()}
    yield replace(probe_result(task, "linear", f"l2 {l2:.2g}", [predictions]), tried=accuracies)


def neighbors(task: ProbeFeatures, settings: ProbeSettings) -> Iterator[ProbeResult]:
    known, count = task.everything, settings.neighbors
    tried: dict[int, float] = {}
    if count is None:
        count, tried = choose_neighbors(known, classes=task.classes)
    predictions = neighbor_predictions(known, task.test.values, classes=task.classes, neighbors=count)
    accuracies = {f"{tried_count} nearest": accuracy for tried_count, accuracy in tried.items()}
    yield replace(probe_result(task, "neighbors", f"{count} nearest", [predictions]), tried=accuracies)


PROBES: dict[str, Callable[[ProbeFeatures, ProbeSettings], Iterator[ProbeResult]]] = {
    "fewshot": fewshot,
    "linear": linear,
    "neighbors": neighbors,
}


def probe(
    data: object,
    model: Encoder | Model | str | Path,
    *,
    only: Sequence[str] = ("fewshot", "linear", "neighbors"),
    shots: Sequence[int] | None = None,
    neighbors: int | None = None,
    preprocess: Preprocess | Transform | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> ProbeReport:
    """Probe a frozen model on a dataset; the numbers are those of `vit probe`.

    Args:
        data: Anything `vit evaluate` accepts, a `torch.utils.data.Dataset` or a Hugging Face dataset.
        model: A file, directory, published name, model or Encoder; it needs no head.
        only: The probes to run.
        shots: Training images per class of the few-shot probe; by default 1, 5, 10 and 25.
        neighbors: Number of nearest neighbors; by default it is chosen on the training images.
        preprocess: Replaces the model's preprocessing: settings, or any callable from a PIL image to a tensor, with
            which features are not stored.
        batch_size: Number of images per batch.
        track: Wraps the iterator over images to show progress.

    Raises:
        DataError: The data cannot be read, or has too few images.
    """
    settings = ProbeSettings(only=tuple(only), shots=None if shots is None else tuple(shots), neighbors=neighbors)
    opened = open_dataset(data)
    encoder = (model if isinstance(model, Encoder) else Encoder(model)).with_task_preprocess(data, preprocess)
    parts = probe_sources(opened)
    notes = list(opened.notes)
    if "fewshot" in settings.only:  # before features are computed
        labels = np.asarray(parts.train.labels(), np.int64)
        possible_shots(labels, opened.classes, settings.shots)
    started = time.monotonic()
    store = open_store(encoder)
    features = [compute_features(encoder, source, store, batch_size=batch_size, track=track) for source in parts.all]
    feature_seconds = time.monotonic() - started
    if store.damaged:
        notes.append(f"{plural(store.damaged, 'feature', 'was|were')} corrupt in the cache and computed again")
    return probe_features(
        features,
        settings,
        data=opened.name,
        model=encoder.name,
        test_is=parts.test_is,
        notes=notes,
        feature_seconds=feature_seconds,
    )


def probe_features(
    features: Sequence[FeatureSet],
    settings: ProbeSettings,
    *,
    data: str,
    model: str,
    test_is: str,
    notes: Sequence[str],
    feature_seconds: float,
) -> ProbeReport:
    """Run the probes on the features of the training, test and, if there is one, dev images."""
    train, test, *dev = features
    task = ProbeFeatures(train=train, test=test, dev=dev[0] if dev else None)
    notes = list(notes)
    if "fewshot" in settings.only:  # now for the readable images
        notes += filter(None, [possible_shots(task.train.labels, task.train.classes, settings.shots)[1]])
    return ProbeReport(
        data=data,
        model=model,
        classes=task.classes,
        train_images=len(task.everything[1]),
        test_images=len(task.test),
        test_is=test_is,
        results=tuple(timed_results(task, settings)),
        unreadable=dict(image for part in task.sets for image in part.unreadable),
        notes=tuple(notes),
        computed=sum(part.computed for part in task.sets),
        feature_seconds=feature_seconds,
    )


def timed_results(task: ProbeFeatures, settings: ProbeSettings) -> Iterator[ProbeResult]:
    for name in (name for name in PROBES if name in settings.only):
        started = time.monotonic()
        for result in PROBES[name](task, settings):
            yield replace(result, seconds=time.monotonic() - started)
            started = time.monotonic()
