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
from vitruvian.data.sources import Source
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.evaluate import Evaluation, evaluate_classes
from vitruvian.evaluation.metrics import LEVEL, Interval, Z
from vitruvian.evaluation.report import with_interval
from vitruvian.inference import Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import flatten, render, short_name, write_report
from vitruvian.text import plural
from vitruvian.training.run_folder import Run
from vitruvian.training.splits import DataRef, split_data
from vitruvian.weights.load import RUN_FILE

SHOWN = 24  # number of images that a page shows

# n images that all models were evaluated on, M models


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """A model compared with the first one on the same images; in percent."""

    model: str
    difference: float  # top-1 accuracy minus that of the first model
    interval: Interval
    p: float  # of McNemar's exact test: how often chance alone gives a difference as large
    only_first: int  # images that only the first model classifies correctly
    only_this: int


@dataclass(frozen=True, slots=True)
class ImageDifference:
    """An image that the models classify differently."""

    key: str
    label: str
    predictions: tuple[str, ...]  # of each model
    index: int  # in the source


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`; accuracies in percent."""

    data: str
    images_are: str
    count: int
    models: tuple[str, ...]
    top1: tuple[float, ...]  # of each model
    intervals: tuple[Interval, ...]
    pairs: tuple[PairedDifference, ...]  # each other model with the first
    classes: tuple[tuple[str, int, tuple[float, ...]], ...]  # name, images and accuracies; the largest spread first
    images: tuple[ImageDifference, ...]
    settings: dict[str, tuple[str, ...]]  # values of each model for every setting in which they differ
    notes: tuple[str, ...]
    source: Source = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        simple = ("data", "images_are", "count", "models", "top1", "intervals", "settings", "notes")
        classes = [{"class": name, "images": count, "top1": values} for name, count, values in self.classes]
        return {name: getattr(self, name) for name in simple} | {
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
    evaluations = [evaluate_classes(data, model, split=split, batch_size=batch_size, track=track) for model in models]
    first = evaluations[0]
    short = [short_name(evaluation.model) for evaluation in evaluations]
    names = tuple(f"{name} ({i})" if short.count(name) > 1 else name for i, name in enumerate(short, 1))
    if any(evaluation.space.labels.tolist() != first.space.labels.tolist() for evaluation in evaluations):
        raise DataError("the models know different classes of the data", where=first.data)
    indices: NDArray[np.int64] = reduce(np.intersect1d, [evaluation.measures.indices for evaluation in evaluations])
    measures = [e.measures.part(np.flatnonzero(np.isin(e.measures.indices, indices))) for e in evaluations]
    predictions = np.stack([part.predictions for part in measures])  # (M, n)
    right = np.stack([part.right for part in measures])
    classes, labels, counts = first.space.classes, measures[0].labels, measures[0].class_counts.tolist()
    accuracies = zip(*(part.class_accuracy.tolist() for part in measures))  # of each class, M values
    by_class = [row for row in zip(classes, counts, accuracies) if row[1]]
    differing = np.flatnonzero((predictions != predictions[0]).any(axis=0))
    # first the images on which the models differ in being right
    order = sorted(differing.tolist(), key=lambda i: bool(right[:, i].all() or not right[:, i].any()))
    return Comparison(
        data=first.data,
        images_are=images_are or first.part,
        count=len(indices),
        models=names,
        top1=tuple(part.top1 for part in measures),
        intervals=tuple(part.intervals()["top1"] for part in measures),
        pairs=tuple(paired_difference(name, right[0], row) for name, row in zip(names[1:], right[1:])),
        classes=tuple(sorted(by_class, key=lambda row: min(row[2]) - max(row[2]))),
        images=tuple(
            ImageDifference(
                first.source.key(index), classes[labels[i]], tuple(map(classes.__getitem__, guesses)), index
            )
            for i, index, guesses in ((i, int(indices[i]), predictions[:, i]) for i in order)
        ),
        settings=differing_settings([settings_of(evaluation, run) for evaluation, run in zip(evaluations, runs)]),
        notes=tuple(dict.fromkeys(note for evaluation in evaluations for note in evaluation.notes)),
        source=first.source,
    )


def find_run(model: object) -> Run | None:
    """The training run of a model that is given as a folder of one."""
    path = Path(model).expanduser() if isinstance(model, str | Path) else Path(str(getattr(model, "name", "")))
    return next((Run(folder) for folder in (path, path.parent) if (folder / RUN_FILE).is_file()), None)


def held_out_images(runs: Sequence[Run | None]) -> tuple[Source, str]:
    """The images that every run held out, and their description."""
    hint = f"give {argument('data')} to compare them on"
    if any(run is None or not run.facts.get("data") for run in runs):
        raise ConfigError("not all of these are runs that name their data", hint=hint)
    splits = [split_data(DataRef(run.facts["data"]), run.recipe) for run in runs if run is not None]
    keys = [[part.validation.key(i) for i in range(len(part.validation))] for part in splits]
    if any(other != keys[0] for other in keys):
        raise DataError("the runs held out different images", where=splits[0].name, hint=hint)
    return splits[0].validation, splits[0].validation_is


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


def settings_of(evaluation: Evaluation, run: Run | None) -> dict[str, str]:
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


def describe_pair(pair: PairedDifference, first: str) -> str:
    """One line: the difference from the model `first`, its interval and p-value, and the images that differ."""
    low, high = pair.interval
    verdict = "not significant" if low <= 0 <= high else "better" if low > 0 else "worse"
    return (
        f"{pair.model} - {first}: {pair.difference:+.2f} points ({LEVEL:g}% interval {low:+.2f} to {high:+.2f}, "
        f"McNemar p = {pair.p:.2g}), {verdict}; {plural(pair.only_this, 'image', 'is|are')} correct "
        f"only for {pair.model}, {pair.only_first:,} only for {first}"
    )


def write_comparison(result: Comparison, folder: Path) -> Path:
    """Write compare.json and report.html into a new folder; returns the path of the page."""
    columns = [f">{name}" for name in result.models]
    page = render(
        "compare.html",
        title=" and ".join(result.models),
        subtitle=f"compared on {result.count:,} images of {Path(result.data).name}, {result.images_are}",
        tile_values=dict(zip(result.models, map(with_interval, result.top1, result.intervals))),
        pairs=[describe_pair(pair, result.models[0]) for pair in result.pairs],
        class_titles=["class", ">images", *(f"{name} %" for name in columns)],
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
