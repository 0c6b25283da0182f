"""Probe the features of a frozen model: few-shot, linear and nearest-neighbor accuracy."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.doctor.overlap import split_notes
from vitruvian.data.formats import open_dataset
from vitruvian.data.groups import assign_folds, group_numbers, hold_out_groups
from vitruvian.data.order import IndexArray
from vitruvian.data.sources import Dataset, Source, all_but_test
from vitruvian.data.transform import Transform
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.evaluation import probe_classifiers as classifiers
from vitruvian.evaluation.features import FeatureSet, compute_features, open_store
from vitruvian.evaluation.metrics import (
    TARGET_NAMES,
    ImageMeasures,
    Interval,
    accuracy_interval,
    class_measures,
    score_logits,
    wilson,
)
from vitruvian.evaluation.out_of_fold import fold_result, write_predictions
from vitruvian.evaluation.probe_classifiers import HOLD_OUT, Examples, Labels, hold_out_examples
from vitruvian.evaluation.target_metrics import MEASURES
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import notebook
from vitruvian.settings import Record, check_range
from vitruvian.targets import KINDS, Target, TargetTable
from vitruvian.text import plural


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """The accuracy of one probe on the test images, in percent; of several labels and numbers, their metrics."""

    probe: str
    setting: str
    top1: float  # mean over the runs
    mean_per_class: float  # mean per-class accuracy, averaged over the runs
    runs: tuple[float, ...]  # top-1 of each seed; one value if nothing is random
    deviation: float  # standard deviation of the runs (population); 0 for one run
    tried: dict[str, float] = field(default_factory=dict)  # accuracy of each setting on the images it was chosen by
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # of several labels or numbers, instead of accuracies
    interval: tuple[float, float] | None = None  # of top1, over the test images


@dataclass(frozen=True, kw_only=True)
class ProbeReport(Record):
    """The result of `probe`."""

    data: str
    model: str
    classes: int
    train_images: int
    test_images: int
    test_is: str  # description of the test images
    results: tuple[ProbeResult, ...]
    unreadable: dict[str, str]  # reasons by key
    notes: tuple[str, ...]
    computed: int  # number of features that were not in the store
    feature_seconds: float
    target: str = "single"

    @property
    def summary(self) -> str:
        """Training and test images in one line."""
        return (
            f"{self.train_images:,} training images of {plural(self.classes, KINDS[self.target].noun)}, "
            f"{self.test_images:,} test images: {self.test_is}"
        )

    def table(self) -> tuple[list[str], list[tuple[str, ...]]]:
        """Headings, and a row for each probe; the standard deviation is that of the seeds."""
        rows: list[tuple[str, ...]] = []
        if self.target != "single":
            names = KINDS[self.target].metrics
            rows = [(r.probe, r.setting, *(f"{r.metrics[name]:.4g}" for name in names)) for r in self.results]
            return ["probe", "setting", *(f">{TARGET_NAMES[name]}" for name in names)], rows
        for r in self.results:
            spread = [f"± {r.deviation:.2f}"] * (len(r.runs) > 1)
            spread += ["95% interval {:.2f} to {:.2f}".format(*r.interval)] if r.interval else []
            rows.append((r.probe, r.setting, f"{r.top1:.2f}", ", ".join(spread), f"{r.mean_per_class:.2f}"))
        return ["probe", "setting", ">top-1 %", "", ">mean per class %"], rows

    def _repr_html_(self) -> str:
        return notebook(self.summary, *self.table(), self.notes)

    def to_json(self) -> dict[str, Any]:
        content = Record.to_json(self)
        for result in content["results"]:
            for name in ("top1", "mean_per_class", "runs", "deviation") if result["metrics"] else ("metrics",):
                del result[name]
            for name, value in result.get("metrics", {}).items():
                result["metrics"][name] = None if np.isnan(value) else value  # such as the mAP without a label
        return content


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


def probe_sources(data: Dataset, group_by: str = "") -> tuple[list[Source], str]:
    """The images to train on, to test on and, unless a part of the first is used, to choose settings by.

    Returns:
        Two or three sources, and a description of the test images: the split `test`, else `val`, else a part of each
        class, or of the groups (`group_by`), held out from `train`.
    """
    splits = data.splits
    if "test" in splits and "train" in splits:
        return [data.train, splits["test"], *([splits["val"]] if "val" in splits else [])], "the split 'test'"
    if "val" in splits and "train" in splits:
        return [data.train, splits["val"]], "the split 'val'"
    everything = data.train if "train" in splits else next(iter(splits.values()))
    *sources, test_is = hold_out_groups(everything, HOLD_OUT, 0, group_by)
    return sources, test_is


@dataclass(frozen=True, kw_only=True)
class ProbeInputs:
    """The inputs of every probe: features and labels of each split, and the settings that depend on the data."""

    train: Examples
    dev: Examples | None  # None if a part of `train` is used instead
    test: Examples
    classes: int
    shots: list[int]
    neighbors: int | None
    targets: TargetTable | None = None
    predictions: dict[str, Labels] = field(default_factory=dict)  # of the test images, by probes that are not random
    linear: list[ImageMeasures] = field(default_factory=list)  # of the linear probe

    @property
    def kind(self) -> str:
        return "single" if self.targets is None else self.targets.kind

    @property
    def everything(self) -> Examples:
        """The examples to train on once the settings are chosen."""
        if self.dev is None:
            return self.train
        return np.concatenate([self.train[0], self.dev[0]]), np.concatenate([self.train[1], self.dev[1]])

    def result(
        self, probe: str, setting: str, runs: Sequence[NDArray[Any]], tried: dict[str, float] | None = None
    ) -> ProbeResult:
        """The accuracy of each run's predictions (m,) of the test images; with targets, metrics of scores (m, K)."""
        truth, top1, per_class, metrics = self.test[1], [0.0], [0.0], {}
        if self.targets is not None:
            facts: dict[str, Any] = {"names": self.targets.names, "loss": 0.0, "target": Target(kind=self.kind)}
            facts |= {"indices": np.arange(len(truth)), "targets": truth}
            measured = [MEASURES[self.kind](scores=scores, **facts) for scores in runs]
            values = [measures.values(np.ones(len(truth))) for measures in measured]
            metrics = {name: float(np.mean([run[name] for run in values])) for name in KINDS[self.kind].metrics}
            self.linear.extend(measured if probe in ("linear", "ridge") else ())
        else:
            if len(runs) == 1:
                self.predictions[probe] = runs[0]
            counts = np.bincount(truth, minlength=self.classes)
            right = [predictions == truth for predictions in runs]
            hits = [np.bincount(truth, row, minlength=self.classes) for row in right]
            top1 = [100.0 * float(row.mean()) for row in right]
            per_class = [100.0 * float((row[counts > 0] / counts[counts > 0]).mean()) for row in hits]
        return ProbeResult(
            probe=probe,
            setting=setting,
            top1=float(np.mean(top1)),
            mean_per_class=float(np.mean(per_class)),
            runs=() if metrics else tuple(top1),
            deviation=float(np.std(top1)),
            tried={} if metrics else tried or {},
            metrics=metrics,
            interval=None if metrics else wilson(float(np.mean(top1)) / 100 * len(truth), len(truth)),
        )


def fewshot(inputs: ProbeInputs) -> Iterator[ProbeResult]:
    options: Any = {"classes": inputs.classes, "kind": inputs.kind}
    for count in inputs.shots:
        runs = [
            classifiers.fewshot_predictions(inputs.train, inputs.test[0], shots=count, seed=seed, **options)
            for seed in classifiers.SEEDS
        ]
        yield inputs.result("few-shot", f"{count}-shot", runs)


def linear(inputs: ProbeInputs) -> Iterator[ProbeResult]:
    test = inputs.test[0]
    if inputs.kind not in ("single", "multi"):
        yield inputs.result("ridge", "leave-one-out", [classifiers.number_predictions(inputs.everything, test)])
        return
    train, dev = (
        hold_out_examples(inputs.train, classes=inputs.classes) if inputs.dev is None else (inputs.train, inputs.dev)
    )
    l2, tried = classifiers.choose_l2(train, dev, classes=inputs.classes)
    classifier = classifiers.fit_linear(*inputs.everything, classes=inputs.classes, l2=l2)
    if inputs.kind == "multi":
        runs = [classifier.logits(test).sigmoid().numpy()]
    else:
        truth = torch.from_numpy(inputs.test[1])
        columns = score_logits(classifier.logits(test), truth, torch.arange(len(truth)), classes=inputs.classes)
        inputs.linear.append(class_measures(columns, classes=inputs.classes))
        runs = [classifier.predictions(test)]
    yield inputs.result("linear", f"l2 {l2:.2g}", runs, {f"l2 {value:.2g}": top1 for value, top1 in tried.items()})


def neighbors(inputs: ProbeInputs) -> Iterator[ProbeResult]:
    known, test, count = inputs.everything, inputs.test[0], inputs.neighbors
    tried: dict[int, float] = {}
    if inputs.targets is not None:
        count = min(count or classifiers.TARGET_NEIGHBORS, len(known[0]))
        runs: list[NDArray[Any]] = [classifiers.neighbor_scores(known, test, count=count)]
    else:
        if count is None:
            count, tried = classifiers.choose_neighbors(known, classes=inputs.classes)
        runs = [classifiers.neighbor_predictions(known, test, classes=inputs.classes, counts=[count])[count]]
    accuracies = {f"{tried_count} nearest": top1 for tried_count, top1 in tried.items()}
    yield inputs.result("neighbors", f"{count} nearest", runs, accuracies)


PROBES = {"fewshot": fewshot, "linear": linear, "neighbors": neighbors}


def probe(
    data: object,
    model: Encoder | Model | str | Path,
    *,
    only: Sequence[str] = ("fewshot", "linear", "neighbors"),
    shots: Sequence[int] | None = None,
    neighbors: int | None = None,
    group_by: str = "",
    target: str = "auto",
    folds: int = 0,
    predictions: Path | None = None,
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
        group_by: Images of one group are held out together: a column of the manifest, or a regular expression on the
            path. By default the column `group`, if there is one.
        target: What to predict, as for `open_dataset`; by default what the data states.
        folds: Cross-validate in this many folds of all images but the test split; 0: no cross-validation.
        predictions: With `folds`, a CSV file for the linear probe's prediction of each image by the other folds.
        preprocess: Replaces the model's preprocessing: settings, or any callable from a PIL image to a tensor, with
            which features are not stored.
        batch_size: Number of images per batch.
        track: Wraps the iterator over images to show progress.

    Raises:
        DataError: The data cannot be read, or has too few images.
    """
    settings = ProbeSettings(only=tuple(only), shots=None if shots is None else tuple(shots), neighbors=neighbors)
    opened = open_dataset(data, target=target, accepts=KINDS)
    encoder = (model if isinstance(model, Encoder) else Encoder(model)).with_task_preprocess(data, preprocess)
    assigned = None
    if folds:
        sources, test_is = [all_but_test(opened)], f"each of {folds} folds in turn"
        assigned = assign_folds(sources[0], folds, 0, group_by)
    else:
        sources, test_is = probe_sources(opened, group_by)
    if "fewshot" in settings.only and not folds and sources[0].targets is None:  # before features are computed
        classifiers.possible_shots(np.asarray(sources[0].labels(), np.int64), opened.classes, settings.shots)
    started = time.monotonic()
    store = open_store(encoder)
    features = [compute_features(encoder, source, store, batch_size=batch_size, track=track) for source in sources]
    facts: Any = {"data": opened.name, "model": encoder.name, "test_is": test_is, "started": started}
    notes = list(opened.notes)
    if assigned is None:
        report = probe_features(features, settings, **facts)[1]
        notes += split_notes(sources[0], sources[1], test_is, group_by, track)
    else:
        report, measures = probe_folds(features[0], sources[0], assigned, group_by, settings, **facts)
        if predictions is not None and measures is not None:
            write_predictions(predictions, measures, sources[0], assigned)
    if store.damaged:
        notes.append(f"{plural(store.damaged, 'feature', 'was|were')} corrupt in the cache and computed again")
    return replace(report, notes=(*notes, *report.notes))


def probe_folds(
    everything: FeatureSet, images: Source, assigned: IndexArray, group_by: str, settings: ProbeSettings, **facts: Any
) -> tuple[ProbeReport, ImageMeasures | None]:
    """Run the probes once per fold of the images; also returns the metrics of the linear probe, if it runs."""
    unreadable = {image.key for image in everything.unreadable}
    readable = np.array([i for i in range(len(images)) if not unreadable or images.key(i) not in unreadable])
    folds, reports = assigned[readable], []
    measures: list[ImageMeasures] = []
    right: dict[str, NDArray[np.float64]] = {}
    for fold in np.unique(folds).tolist():
        rows = [np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)]
        parts = [replace(everything, values=everything.values[r], labels=everything.labels[r]) for r in rows]
        inputs, report = probe_features(parts, settings, **facts)
        reports.append(report)
        measures += [replace(part, indices=readable[rows[1]]) for part in inputs.linear]
        for name, predicted in inputs.predictions.items():
            right.setdefault(name, np.zeros(len(readable)))[rows[1]] = predicted == parts[1].labels
    groups = group_numbers(images, group_by)
    groups = None if groups is None else groups[readable]

    def interval(name: str) -> Interval:
        def accuracy(drawn: NDArray[np.float64]) -> float:
            return 100.0 * float(drawn @ right[name] / drawn.sum())

        return fold_result("top1", accuracy, accuracy_interval(right[name] > 0), folds, groups).interval

    by_name: dict[str, list[ProbeResult]] = {}
    for result in (result for report in reports for result in report.results):
        by_name.setdefault(result.setting if result.probe == "few-shot" else result.probe, []).append(result)
    results = [
        ProbeResult(
            probe=same[0].probe,
            setting=name if same[0].probe == "few-shot" else f"{len(reports)} folds",
            top1=float(np.mean([result.top1 for result in same])),
            mean_per_class=float(np.mean([result.mean_per_class for result in same])),
            runs=tuple(result.top1 for result in same),
            deviation=float(np.std([result.top1 for result in same])),
            seconds=sum(result.seconds for result in same),
            metrics={metric: float(np.mean([r.metrics[metric] for r in same])) for metric in same[0].metrics},
            interval=interval(name) if name in right else None,
        )
        for name, same in by_name.items()
        if len(same) == len(reports)  # a class may have too few images for some shots in one fold
    ]
    facts = {"results": tuple(results), "test_images": len(everything), "unreadable": dict(everything.unreadable)}
    return replace(reports[0], **facts), measures[0].join(*measures[1:]) if measures else None


def probe_features(
    features: Sequence[FeatureSet], settings: ProbeSettings, *, started: float, **facts: Any
) -> tuple[ProbeInputs, ProbeReport]:
    """Run the probes on the features of `probe_sources`, whose computation began at `started`.

    `facts` has the other fields of the report: data, model and test_is.
    """
    feature_seconds = time.monotonic() - started
    train, test, *dev = features
    shots: list[int] = []
    note, labels, rows = "", train.labels, train.examples[1]
    if train.targets is not None:  # each label counts; of numbers, each image
        is_multi = train.targets.kind == "multi"
        labels = np.nonzero(rows == 1)[1] if is_multi else np.repeat(range(rows.shape[1]), len(rows))
    if "fewshot" in settings.only:  # of the readable images
        shots, note = classifiers.possible_shots(labels, train.classes, settings.shots)
    inputs = ProbeInputs(
        train=train.examples,
        dev=dev[0].examples if dev else None,
        test=test.examples,
        classes=len(train.classes),
        shots=shots,
        neighbors=settings.neighbors,
        targets=train.targets,
    )
    results = []
    for run in (run for name, run in PROBES.items() if name in settings.only):
        started = time.monotonic()
        for result in run(inputs):
            results.append(replace(result, seconds=time.monotonic() - started))
            started = time.monotonic()
    return inputs, ProbeReport(
        classes=inputs.classes,
        train_images=len(train) + sum(map(len, dev)),
        test_images=len(test),
        results=tuple(results),
        unreadable=dict(image for part in features for image in part.unreadable),
        notes=(note,) if note else (),
        computed=sum(part.computed for part in features),
        feature_seconds=feature_seconds,
        target=inputs.kind,
        **facts,
    )
