"""How much a frozen model already knows of a dataset: few-shot, linear and nearest-neighbor accuracy."""

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
from vitruvian.evaluation.measuring.inference import with_task_preprocess
from vitruvian.evaluation.probes.features import FeatureSet, Labels, Task, features_of, parts_of
from vitruvian.evaluation.probes.fewshot import SEEDS, fewshot_predictions, possible_shots
from vitruvian.evaluation.probes.linear import chosen_l2, fit
from vitruvian.evaluation.probes.neighbors import chosen_neighbors, neighbor_predictions
from vitruvian.evaluation.probes.store import open_store
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import check_range
from vitruvian.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """One probe's accuracy on the test images, in percent."""

    probe: str
    setting: str
    top1: float
    """The mean where there are several runs."""
    mean_per_class: float
    """Mean of the classes' accuracies; of several runs, their mean."""
    runs: tuple[float, ...]
    """Top-1 of each seed; one where nothing is random."""
    deviation: float
    """Standard deviation of the runs (of the population), zero for one."""
    tried: dict[str, float] = field(default_factory=dict)
    """Accuracy of each setting on the images that it was chosen by."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What was probed, on what, and how well."""

    data: str
    model: str
    classes: int
    train_images: int
    test_images: int
    test_is: str
    """What the test images are, in words."""
    results: tuple[ProbeResult, ...]
    unreadable: dict[str, str]
    """Why an image was left out, by key."""
    notes: tuple[str, ...]
    computed: int
    """Features that were not in the store."""
    feature_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to probe with; None means the usual shots, and a number of neighbors that is chosen."""

    only: tuple[str, ...] = ("fewshot", "linear", "neighbors")
    shots: tuple[int, ...] | None = None
    neighbors: int | None = None

    def __post_init__(self) -> None:
        for name in self.only:
            if name not in PROBES:
                raise UnknownNameError("probe", name, PROBES, see=f"(there are {', '.join(PROBES)})")
        if not self.only:
            raise ConfigError(f"no probe is named; there are {', '.join(PROBES)}")
        check_range("neighbors", 1 if self.neighbors is None else self.neighbors, 1)


def outcome(task: Task, probe: str, setting: str, runs: Sequence[Labels]) -> ProbeResult:
    top1, per_class = zip(*map(task.accuracy, runs))
    return ProbeResult(
        probe=probe,
        setting=setting,
        top1=float(np.mean(top1)),
        mean_per_class=float(np.mean(per_class)),
        runs=top1,
        deviation=float(np.std(top1)),
    )


def fewshot(task: Task, wanted: Wanted) -> Iterator[ProbeResult]:
    shots, _ = possible_shots(task.train.labels, task.train.classes, wanted.shots)
    for count in shots:
        found = [
            fewshot_predictions(task.train.examples, task.test.values, classes=task.classes, shots=count, seed=seed)
            for seed in SEEDS
        ]
        yield outcome(task, "few-shot", f"{count} a class", found)


def linear(task: Task, wanted: Wanted) -> Iterator[ProbeResult]:
    train, dev = task.choosing()
    l2, tried = chosen_l2(train, dev, classes=task.classes)
    found = fit(*task.everything, classes=task.classes, l2=l2).predictions(task.test.values)
    shares = {f"l2 {value:.2g}": share for value, share in tried.items()}
    yield replace(outcome(task, "linear", f"l2 {l2:.2g}", [found]), tried=shares)


def neighbors(task: Task, wanted: Wanted) -> Iterator[ProbeResult]:
    known, count = task.everything, wanted.neighbors
    tried: dict[int, float] = {}
    if count is None:
        count, tried = chosen_neighbors(known, classes=task.classes)
    found = neighbor_predictions(known, task.test.values, classes=task.classes, neighbors=count)
    shares = {f"{number} nearest": share for number, share in tried.items()}
    yield replace(outcome(task, "neighbors", f"{count} nearest", [found]), tried=shares)


PROBES: dict[str, Callable[[Task, Wanted], Iterator[ProbeResult]]] = {
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
    """Probe a frozen model on a dataset, the same numbers as `vit probe` prints.

    `data`, `model` and `view` are as `evaluate` takes them; a model needs no head. None for shots means the usual
    ones, and for neighbors a number that is chosen. With a callable as view, features are not kept.
    """
    wanted = Wanted(only=tuple(only), shots=None if shots is None else tuple(shots), neighbors=neighbors)
    opened = open_dataset(data)
    encoder = with_task_preprocess(model if isinstance(model, Encoder) else Encoder(model), data, preprocess)
    parts = parts_of(opened)
    notes = list(opened.notes)
    if "fewshot" in wanted.only:  # before minutes are spent on features
        labels = np.asarray(parts.train.labels(), np.int64)
        possible_shots(labels, opened.classes, wanted.shots)
    started = time.monotonic()
    store = open_store(encoder)
    found = [features_of(encoder, source, store, batch_size=batch_size, track=track) for source in parts.sources]
    feature_seconds = time.monotonic() - started
    if store.damaged:
        notes.append(f"{plural(store.damaged, 'feature', 'was|were')} damaged in the cache and computed anew")
    return report_of(
        found,
        wanted,
        data=opened.name,
        model=encoder.name,
        test_is=parts.test_is,
        notes=notes,
        feature_seconds=feature_seconds,
    )


def report_of(
    found: Sequence[FeatureSet],
    wanted: Wanted,
    *,
    data: str,
    model: str,
    test_is: str,
    notes: Sequence[str],
    feature_seconds: float,
) -> ProbeReport:
    """Probe the features of the images to learn from, of the test images and, if there are such, to choose by."""
    train, test, *dev = found
    task = Task(train=train, test=test, dev=dev[0] if dev else None)
    said = list(notes)
    if "fewshot" in wanted.only:  # of the images that could be read
        said += filter(None, [possible_shots(task.train.labels, task.train.classes, wanted.shots)[1]])
    return ProbeReport(
        data=data,
        model=model,
        classes=task.classes,
        train_images=len(task.everything[1]),
        test_images=len(task.test),
        test_is=test_is,
        results=tuple(timed_results(task, wanted)),
        unreadable={key: why for part in task.sets for key, why in part.unreadable.items()},
        notes=tuple(said),
        computed=sum(part.computed for part in task.sets),
        feature_seconds=feature_seconds,
    )


def timed_results(task: Task, wanted: Wanted) -> Iterator[ProbeResult]:
    for name in (name for name in PROBES if name in wanted.only):
        started = time.monotonic()
        for result in PROBES[name](task, wanted):
            yield replace(result, seconds=time.monotonic() - started)
            started = time.monotonic()
