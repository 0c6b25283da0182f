"""Out-of-fold predictions: each image predicted by a model that was trained on the other folds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.order import IndexArray
from vitruvian.data.sources import Concat, Source
from vitruvian.evaluation import metrics
from vitruvian.evaluation.target_metrics import TargetMeasures
from vitruvian.files import open_table
from vitruvian.settings import Record

PREDICTIONS_FILE = "predictions.csv"

# n images


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldResult(Record):
    """The most important metric of cross-validation; in JSON it has its own name, such as `top1`."""

    metric: str
    value: float  # over all images
    interval: metrics.Interval
    runs: tuple[float, ...]  # of each fold
    mean: float  # over the folds
    deviation: float  # sample standard deviation of the folds
    count: int  # images

    def to_json(self) -> dict[str, Any]:
        content = Record.to_json(self)
        return {self.metric: content.pop("value")} | content

    def __str__(self) -> str:
        text = metrics.number_format(self.metric)
        ends = f"{text} to {text}".format(*self.interval)
        folds = f"mean of {len(self.runs)} folds {text} ± {text}".format(self.mean, self.deviation)
        name = metrics.METRIC_TEXTS[self.metric].format(self.value)
        return f"{name} ({metrics.LEVEL:g}% interval {ends}) on {self.count:,} images out of fold; {folds}"


def fold_result(
    metric: str,
    weighted: Callable[[NDArray[np.float64]], float],
    interval: metrics.Interval,
    folds: IndexArray,
    groups: IndexArray | None,
) -> FoldResult:
    """Summarize the predictions of images in these folds (n,).

    Args:
        metric: The name of the metric.
        weighted: The metric if each image counts as often as it was drawn (n,).
        interval: That of images drawn one by one.
        folds: The fold of each image.
        groups: The group of each image; for the interval, those of one group are drawn together.
    """
    runs = tuple(weighted((folds == fold).astype(np.float64)) for fold in np.unique(folds))
    if groups is not None:
        names, member = np.unique(groups, return_inverse=True)
        interval = metrics.bootstrap(lambda drawn: weighted(drawn[member]), len(names), seed=0)
    return FoldResult(
        metric=metric,
        value=weighted(np.ones(len(folds))),
        interval=interval,
        runs=runs,
        mean=float(np.mean(runs)),
        deviation=float(np.std(runs, ddof=1)),
        count=len(folds),
    )


def write_predictions(path: Path, measures: metrics.ImageMeasures, images: Source, folds: IndexArray) -> None:
    """Write a row per readable image; `vit doctor --predictions` finds wrong labels with those of classes."""

    def predictions() -> Iterator[dict[str, Any]]:
        if isinstance(measures, metrics.Measures):
            columns = (measures.predictions, measures.probabilities.round(6), measures.label_probabilities.round(6))
            for predicted, of_best, of_label in zip(*(column.tolist() for column in columns)):
                name = images.classes[predicted]
                yield {"prediction": name, "probability": of_best, "label_probability": of_label}
        elif isinstance(measures, TargetMeasures):
            for scores in measures.scores.tolist():
                yield {f"predicted {name}": round(score, 6) for name, score in zip(measures.names, scores)}

    with open_table(path, {}) as write:
        for index, predicted in zip(measures.indices.tolist(), predictions()):
            part, inner = 0, index
            if isinstance(images, Concat):  # of train and val
                source, inner = images.part(index)
                part = images.parts.index(source)
            image = {"path": images.key(index), "split": ("train", "val")[part], "index": inner}
            write([{**image, "label": images.label_text(index), **predicted, "fold": int(folds[index]) + 1}])
