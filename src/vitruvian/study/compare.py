"""Compare models image by image on the same data: paired differences, classes, images and settings that differ."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from math import exp, fsum, lgamma, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.catalog import title_of
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.cost import parameters
from vitruvian.data.doctor.doctor_report import thumbnail_of
from vitruvian.data.sources import Dataset, Source
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.evaluate import Evaluation, TargetEvaluation, evaluate
from vitruvian.evaluation.metrics import LEVEL, TARGET_NAMES, Interval, Measures, Z, bootstrap, number_format
from vitruvian.evaluation.target_metrics import LabelMeasures, TargetMeasures
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import flatten, notebook, render, short_name, write_report
from vitruvian.targets import LOWER_IS_BETTER
from vitruvian.text import plural
from vitruvian.training.run_folder import Run
from vitruvian.training.splits import DataRef, split_data
from vitruvian.weights.load import RUN_FILE

SHOWN = 24  # number of images that a page shows

# n images that all models were evaluated on, M models


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """A model compared with the first one on the same images; accuracies and mAP in percent."""

    model: str
    difference: float  # of the metric, minus that of the first model
    interval: Interval
    p: float | None = None  # of McNemar's exact test: how often chance alone gives a difference as large
    only_first: int | None = None  # images that only the first model classifies correctly
    only_this: int | None = None  # these three are None for several labels and numbers


@dataclass(frozen=True, slots=True)
class ImageDifference:
    """An image that the models classify differently."""

    key: str
    label: str
    predictions: tuple[str, ...]  # of each model
    index: int  # in the source


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`; accuracies and mAP in percent. In JSON, the values have the name of the metric."""

    data: str
    images_are: str
    count: int
    models: tuple[str, ...]
    metric: str  # the most important of the kind of target
    values: tuple[float, ...]  # of each model
    intervals: tuple[Interval, ...]
    pairs: tuple[PairedDifference, ...]  # each other model with the first
    classes: tuple[tuple[str, int, tuple[float, ...]], ...]
    """Each class, label or number: name, images, and accuracy, AP or mean error by model; largest spread first."""
    images: tuple[ImageDifference, ...]
    settings: dict[str, tuple[str, ...]]  # values of each model for every setting in which they differ
    notes: tuple[str, ...]
    source: Source = field(repr=False)

    @property
    def summary(self) -> str:
        """The images in one line."""
        return f"{self.count:,} images of {self.data}, {self.images_are}"

    def format(self, value: float) -> str:
        """A value of the metric as text."""
        return number_format(self.metric).format(value)

    def table(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """Headings, and the metric of each model with its interval."""
        numbers = zip(self.models, self.values, self.intervals)
        rows: list[Sequence[str]] = [(n, self.format(v), " to ".join(map(self.format, ends))) for n, v, ends in numbers]
        return ("", f">{(TARGET_NAMES | {'top1': 'top-1 %'})[self.metric]}", f"{LEVEL:g}% interval"), rows

    def _repr_html_(self) -> str:
        pairs = [describe_pair(pair, self.models[0], self.metric) for pair in self.pairs]
        return notebook(self.summary, *self.table(), [*pairs, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        simple = ("data", "images_are", "count", "models", "intervals", "settings", "notes")
        classes = [{"class": name, "images": count, self.metric: values} for name, count, values in self.classes]
        return {name: getattr(self, name) for name in simple} | {
            self.metric: self.values,
            "pairs": [asdict(pair) for pair in self.pairs],
            "classes": classes,
            "images": [asdict(image) for image in self.images],
        }


def compare(
    models: Sequence[Encoder | Model | str | Path],
    data: object = None,
    *,
    split: str | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> Comparison:
    """Compare models image by image; the numbers are those of `vit compare`.

    Args:
        models: Runs, files, directories, published names, models or Classifiers; the first is the baseline.
        data: Anything `vit evaluate` accepts. By default the images that all runs held out.
        split: As for `evaluate`.
        batch_size: Number of images per batch.
        track: Wraps the iterator over images to show progress.

    Raises:
        ConfigError: There are fewer than two models, or no data is given and they are not runs.
        DataError: The runs held out different images, or the models have different classes.
    """
    if len(models) < 2:
        raise ConfigError("a comparison needs at least two models")
    runs = [find_run(model) for model in models]
    images_are = ""
    if data is None:
        if split is not None:
            raise ConfigError(f"{argument('split')} needs {argument('data')}")
        data, images_are = held_out_images(runs)
    evaluations = [evaluate(data, model, split=split, batch_size=batch_size, track=track) for model in models]
    first = evaluations[0]
    short = [short_name(evaluation.model) for evaluation in evaluations]
    names = tuple(f"{name} ({i})" if short.count(name) > 1 else name for i, name in enumerate(short, 1))
    if any(outputs_of(evaluation) != outputs_of(first) for evaluation in evaluations):
        raise DataError("the models know different classes of the data", where=first.data)
    indices: NDArray[np.int64] = reduce(np.intersect1d, [evaluation.measures.indices for evaluation in evaluations])
    measures = [e.measures.part(np.flatnonzero(np.isin(e.measures.indices, indices))) for e in evaluations]
    source, metric = first.source, measures[0].metric
    if isinstance(first, Evaluation):
        facts = compare_classes([part for part in measures if isinstance(part, Measures)], first.space.classes, names)
    else:
        facts = compare_targets([part for part in measures if isinstance(part, TargetMeasures)], names)
    by_class, pairs, images = facts
    values = tuple(part.weighted(np.ones(len(indices))) for part in measures)
    if np.isnan(values).any():
        raise DataError(f"the {metric} of these images is undefined: none has a known label", where=first.data)
    return Comparison(
        data=first.data,
        images_are=images_are or (first.part if isinstance(first, Evaluation) else f"the split {first.split!r}"),
        count=len(indices),
        models=names,
        metric=metric,
        values=values,
        intervals=tuple(part.intervals()[metric] for part in measures),
        pairs=tuple(pairs),
        classes=tuple(sorted(by_class, key=lambda row: min(row[2]) - max(row[2]))),
        images=tuple(
            ImageDifference(source.key(index), label or source.label_text(index), predictions, index)
            for label, predictions, index in ((label, texts, int(indices[row])) for row, label, texts in images)
        ),
        settings=differing_settings([settings_of(evaluation, run) for evaluation, run in zip(evaluations, runs)]),
        notes=tuple(dict.fromkeys(note for evaluation in evaluations for note in evaluation.notes)),
        source=source,
    )


ByClass = list[tuple[str, int, tuple[float, ...]]]
Different = list[tuple[int, str, tuple[str, ...]]]  # rows of images, their class if they have one, and predictions


def outputs_of(evaluation: Evaluation | TargetEvaluation) -> list[Any]:
    """What must be equal for models to be compared: the kind of target, and the classes or outputs."""
    if isinstance(evaluation, Evaluation):
        return ["single", *evaluation.space.labels.tolist()]
    return [evaluation.measures.target.kind, *evaluation.measures.names]


def compare_classes(
    measures: Sequence[Measures], classes: Sequence[str], names: Sequence[str]
) -> tuple[ByClass, list[PairedDifference], Different]:
    """Accuracies by class, differences and images of models of one class per image."""
    predictions = np.stack([part.predictions for part in measures])  # (M, n)
    right = np.stack([part.right for part in measures])
    accuracies = zip(*(part.class_accuracy.tolist() for part in measures))  # of each class, M values
    by_class = [row for row in zip(classes, measures[0].class_counts.tolist(), accuracies) if row[1]]
    pairs = [paired_difference(name, right[0], row) for name, row in zip(names[1:], right[1:])]
    differing = np.flatnonzero((predictions != predictions[0]).any(axis=0))
    # first the images on which the models differ in being right
    order = sorted(differing.tolist(), key=lambda i: bool(right[:, i].all() or not right[:, i].any()))
    labels = measures[0].labels
    return by_class, pairs, [(i, classes[labels[i]], tuple(classes[k] for k in predictions[:, i])) for i in order]


def compare_targets(
    measures: Sequence[TargetMeasures], names: Sequence[str]
) -> tuple[ByClass, list[PairedDifference], Different]:
    """Metrics by label or number, differences with paired bootstrap intervals, and images."""
    first = measures[0]
    columns = [list(part.per_output().values())[:2] for part in measures]  # images, and AP or mean absolute error
    values = zip(*(metric.tolist() for _, metric in columns))
    counts = columns[0][0].astype(np.int64).tolist()
    by_class = [row for row in zip(first.names, counts, values) if not np.isnan(row[2]).any()]
    pairs = []
    for name, other in zip(names[1:], measures[1:]):

        def difference(drawn: NDArray[np.float64], other: TargetMeasures = other) -> float:
            return other.weighted(drawn) - first.weighted(drawn)

        interval = bootstrap(difference, first.count, seed=0, resamples=first.resamples)
        pairs.append(PairedDifference(name, difference(np.ones(first.count)), interval))
    shown = [part.decisions if isinstance(part, LabelMeasures) else part.scores for part in measures]
    gaps = np.max([np.abs(np.subtract(row, shown[0], dtype=np.float64)) for row in shown], axis=0)  # (n, K)
    gaps = (gaps / np.maximum(gaps.mean(axis=0), 1e-12)).sum(axis=1)
    order = [row for row in np.argsort(-gaps, kind="stable").tolist() if gaps[row]]
    return by_class, pairs, [(row, "", tuple(part.text(row) for part in measures)) for row in order]


def find_run(model: object) -> Run | None:
    """The training run of a model that is given as a folder of one."""
    path = Path(model).expanduser() if isinstance(model, str | Path) else Path(str(getattr(model, "name", "")))
    return next((Run(folder) for folder in (path, path.parent) if (folder / RUN_FILE).is_file()), None)


def held_out_images(runs: Sequence[Run | None]) -> tuple[Dataset, str]:
    """The images that every run held out, and their description."""
    hint = f"give {argument('data')} to compare them on"
    if any(run is None or not run.facts.get("data") for run in runs):
        raise ConfigError("not all of these are runs that name their data", hint=hint)
    splits = [split_data(DataRef(run.facts["data"]), run.recipe) for run in runs if run is not None]
    keys = [[part.validation.key(i) for i in range(len(part.validation))] for part in splits]
    if any(other != keys[0] for other in keys):
        raise DataError("the runs held out different images", where=splits[0].name, hint=hint)
    images = splits[0].validation
    return Dataset(name=images.name, splits={"val": images}), splits[0].validation_is


def paired_difference(name: str, first: NDArray[np.bool_], other: NDArray[np.bool_]) -> PairedDifference:
    """The difference of two models on the same images.

    The interval is that of Agresti and Min (2005): Wald's with half an image added to each cell of the 2 x 2 table.
    """
    lost, gained, n = int((first & ~other).sum()), int((~first & other).sum()), len(first) + 2
    center, spread = (gained - lost) / n, Z * sqrt(lost + gained + 1 - (gained - lost) ** 2 / n) / n
    difference, p = 100.0 * (gained - lost) / len(first), mcnemar(lost, gained)
    interval = 100.0 * max(-1.0, center - spread), 100.0 * min(1.0, center + spread)
    return PairedDifference(name, difference, interval, p, only_first=lost, only_this=gained)


def mcnemar(lost: int, gained: int) -> float:
    """The two-sided p-value of McNemar's exact test: both kinds of differences are equally likely by chance."""
    n, least = lost + gained, min(lost, gained)
    tail = fsum(exp(lgamma(n + 1) - lgamma(i + 1) - lgamma(n - i + 1) - n * log(2)) for i in range(least + 1))
    return min(1.0, 2 * tail)


def settings_of(evaluation: Evaluation | TargetEvaluation, run: Run | None) -> dict[str, str]:
    """The settings of a model: its architecture, its input, and the recipe of its run."""
    model = evaluation.classifier.model
    known: dict[str, Any] = {"input": getattr(model.meta.preprocess, "summary", str)()}
    if isinstance(model, Model):
        known |= {"architecture": title_of(model.config), "parameters": f"{parameters(model.config):,}"}
    return dict(flatten(known | ({} if run is None else run.recipe.report_settings())))


def differing_settings(settings: Sequence[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys(name for known in settings for name in known)
    values = {name: tuple(known.get(name, "default") for known in settings) for name in names}
    return {name: row for name, row in values.items() if len(set(row)) > 1}


def describe_pair(pair: PairedDifference, first: str, metric: str) -> str:
    """One line: the difference from the model `first`, its interval and p-value, and the images that differ."""
    low, high = pair.interval
    is_better = (high < 0) if metric in LOWER_IS_BETTER else (low > 0)
    verdict = "not significant" if low <= 0 <= high else "better" if is_better else "worse"
    number, unit = ("{:+.4g}", "") if metric in LOWER_IS_BETTER else ("{:+.2f}", " points")
    difference, ends = number.format(pair.difference), f"{number} to {number}".format(low, high)
    text = f"{pair.model} - {first}: {difference}{unit} ({LEVEL:g}% interval {ends}"
    if pair.p is None or pair.only_this is None:
        return f"{text}), {verdict}"
    return (
        f"{text}, McNemar p = {pair.p:.2g}), {verdict}; {plural(pair.only_this, 'image', 'is|are')} correct "
        f"only for {pair.model}, {pair.only_first:,} only for {first}"
    )


def write_comparison(result: Comparison, folder: Path) -> Path:
    """Write compare.json and report.html into a new folder; returns the path of the page."""
    columns = [f">{name}" for name in result.models]
    text = "{:.4g} ({:.4g} to {:.4g})" if result.metric in LOWER_IS_BETTER else "{:.2f} % ({:.1f} to {:.1f})"
    tiles = [text.format(value, *ends) for value, ends in zip(result.values, result.intervals)]
    page = render(
        "compare.html",
        title=" and ".join(result.models),
        subtitle=f"compared on {result.count:,} images of {Path(result.data).name}, {result.images_are}",
        tile_values=dict(zip(result.models, tiles)),
        metric=(TARGET_NAMES | {"top1": "accuracy, %"})[result.metric],
        pairs=[describe_pair(pair, result.models[0], result.metric) for pair in result.pairs],
        class_titles=["class", ">images", *columns],
        classes=[(name, count, *values) for name, count, values in result.classes],
        setting_titles=["setting", *result.models],
        settings=[(name, *values) for name, values in result.settings.items()],
        image_count=len(result.images),
        images=[
            {"image": thumbnail_of(result.source, image.index), "key": image.key, "label": image.label}
            | {"predictions": list(zip(result.models, image.predictions))}
            for image in result.images[:SHOWN]
        ],
        notes=result.notes,
    )
    return write_report(folder, name="compare.json", numbers=result.to_json(), page=page)
