"""Classification metrics and their confidence intervals.

Every example counts once, over any number of batches and processes. A fraction of images has Wilson's interval,
which has a width even if all predictions are correct (E. B. Wilson, 1927). The intervals of the classes combine to that
of their mean by square roots of sums of squares (MOVER: G. Y. Zou et al., 2009). Other numbers use the bootstrap.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from math import sqrt
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.config import ScoreFunction
from vitruvian.data.loader import Batch
from vitruvian.errors import DataError, NotFiniteError, VitruvianError
from vitruvian.model.batching import eval_mode
from vitruvian.settings import check_range
from vitruvian.targets import LOWER_IS_BETTER

# B examples, K classes

MAX_CONFUSION_CLASSES = 2000  # the confusion matrix of more classes is not kept: it would take more than 32 MB
SHOWN_MISTAKES = 24  # number of most confident mistakes that a report shows
MEASURE_NAMES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "mean per class"}
"""Names of the accuracies of `Measures.scalars` in reports."""
TARGET_NAMES = {
    "map": "mAP, %",
    "map_micro": "mAP of all decisions, %",
    "f1": "mean F1, %",
    "hamming": "wrong decisions, %",
    "coverage": "labels to cover all",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "r2": "R²",
    "correlation": "correlation",
}
"""Display names of the metrics of several labels and of numbers."""
METRIC_TEXTS = {
    "top1": "top-1 {:.2f}%",
    "map": "mAP {:.2f}%",
    "label_accuracy": "correct labels {:.2f}%",
    "mae": "mean absolute error {:.4g}",
}
"""How the most important metric of each kind of target is written."""

Counts = NDArray[np.int64]
Interval = tuple[float, float]  # lower and upper end, in percent
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageMeasures(ABC):
    """Metrics over a set of images, from what is known about each: arrays whose rows are images."""

    indices: NDArray[np.int64]  # (n,) of the images in their source

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    @abstractmethod
    def metric(self) -> str:
        """The name of the most important metric."""

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """The single numbers, as a record of metrics holds them."""

    @abstractmethod
    def intervals(self, seed: int = 0) -> dict[str, Interval]:
        """The confidence interval of each metric."""

    @abstractmethod
    def weighted(self, drawn: NDArray[np.float64]) -> float:
        """The most important metric, if each image counts as often as it was drawn (n,)."""

    def join(self, *others: Self) -> Self:
        """The metrics of these images and of others, in the order of their indices."""
        parts = {field.name: [getattr(part, field.name) for part in (self, *others)] for field in fields(self)}
        order = np.argsort(np.concatenate(parts["indices"]), kind="stable")
        arrays = {name: values for name, values in parts.items() if isinstance(values[0], np.ndarray)}
        return replace(self, **{name: np.concatenate(values)[order] for name, values in arrays.items()})

    def part(self, rows: NDArray[np.int64]) -> Self:
        """The metrics of some of the images."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: array[rows] for name, array in values.items() if isinstance(array, np.ndarray)})


@dataclass(frozen=True, kw_only=True, eq=False)
class Measures(ImageMeasures):
    """Metrics of one class per image; accuracies in percent."""

    labels: NDArray[np.int64]  # (n,)
    predictions: NDArray[np.int64]  # (n,)
    ranks: NDArray[np.int64]  # (n,) classes ranked before the label; equal logits rank in the order of classes
    probabilities: NDArray[np.float64]  # (n,) of the predictions
    label_probabilities: NDArray[np.float64]  # (n,)
    losses: NDArray[np.float64]  # (n,) cross-entropy without label smoothing; with sigmoids, summed over the classes
    classes: int  # K
    score_function: ScoreFunction = "softmax"

    @property
    def metric(self) -> str:
        return "top1"

    @property
    def right(self) -> NDArray[np.bool_]:
        return self.predictions == self.labels

    @property
    def loss(self) -> float:
        return float(self.losses.mean())

    @property
    def top1(self) -> float:
        return 100.0 * float(self.right.mean())

    @property
    def top5(self) -> float:
        """The label is among the five best predictions, or among all if there are fewer classes."""
        return 100.0 * float((self.ranks < 5).mean())

    @cached_property
    def class_counts(self) -> Counts:
        """(K,) examples of each class."""
        return np.bincount(self.labels, minlength=self.classes)

    @cached_property
    def class_correct(self) -> Counts:
        """(K,) correctly classified examples of each class."""
        return np.bincount(self.labels[self.right], minlength=self.classes)

    @cached_property
    def class_predicted(self) -> Counts:
        """(K,) predictions of each class."""
        return np.bincount(self.predictions, minlength=self.classes)

    @cached_property
    def confusion(self) -> Counts | None:
        """(K, K) by label (row) and prediction (column); None beyond MAX_CONFUSION_CLASSES."""
        if self.classes > MAX_CONFUSION_CLASSES:
            return None
        cells = np.bincount(self.labels * self.classes + self.predictions, minlength=self.classes**2)
        return cells.reshape(self.classes, self.classes)

    @property
    def mistakes(self) -> Counts:
        """The rows of the wrong predictions, the most confident one first."""
        wrong = np.flatnonzero(~self.right)
        return wrong[np.lexsort((self.indices[wrong], -self.probabilities[wrong]))]

    @property
    def class_accuracy(self) -> NDArray[np.float64]:
        """(K,) accuracy within each class; NaN where it has no example."""
        present = np.where(self.class_counts > 0, self.class_counts, np.nan)
        return np.asarray(100.0 * self.class_correct / present)

    @property
    def loss_name(self) -> str:
        return "cross-entropy" if self.score_function == "softmax" else "binary cross-entropy"

    @property
    def is_top5_meaningful(self) -> bool:
        """Whether top-5 accuracy is meaningful: there are more than five classes."""
        return self.classes > 5

    @property
    def mean_per_class(self) -> float:
        return float(self.class_accuracy[self.class_counts > 0].mean())

    def intervals(self, seed: int = 0) -> dict[str, Interval]:
        return {
            "top1": accuracy_interval(self.right),
            "top5": accuracy_interval(self.ranks < 5),
            "mean_per_class": class_mean_interval(self.class_correct, self.class_counts),
        }

    def weighted(self, drawn: NDArray[np.float64]) -> float:
        return 100.0 * float(drawn @ self.right / drawn.sum())

    def class_rates(self, label: int) -> list[tuple[float, Interval | None]]:
        """Recall, precision and F1 of a class in percent, with Wilson's intervals; NaN and None if they are unknown.

        F1 is 2 J / (1 + J), where J is the fraction of correct predictions among images of the class or predicted as
        it.
        """
        right, count, predicted = (int(c[label]) for c in (self.class_correct, self.class_counts, self.class_predicted))

        def rate(total: int) -> tuple[float, Interval | None]:
            return (100.0 * right / total, wilson(right, total)) if total else (np.nan, None)

        jaccard, ends = rate((count + predicted - right) * (count > 0))
        low, high = (200.0 * end / (100.0 + end) for end in ends or (0.0, 0.0))
        return [rate(count), rate(predicted), (200.0 * jaccard / (100.0 + jaccard), ends and (low, high))]

    def scalars(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("count", "loss", "top1", "top5", "mean_per_class")}


def probabilities(logits: Tensor, score_function: ScoreFunction) -> Tensor:  # (n, K) -> (n, K)
    return logits.softmax(dim=1) if score_function == "softmax" else logits.sigmoid()


def score_logits(
    logits: Tensor, labels: Tensor, indices: Tensor, *, classes: int, score_function: ScoreFunction = "softmax"
) -> tuple[Tensor, ...]:
    """What `Measures` needs of images with these logits (B, K): indices, labels, predictions, ranks and so on."""
    scores, truth = logits.detach().cpu().double(), labels.cpu()
    if scores.shape != (len(truth), classes):
        shape = tuple(scores.shape)
        raise VitruvianError(f"the model returned logits {shape} for {len(truth)} examples of {classes} classes")
    if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < classes:
        raise DataError(f"labels from {truth.min()} to {truth.max()}, expected 0 to {classes - 1}")
    broken = scores.isnan().any(dim=1) | (scores == torch.inf).any(dim=1)
    if broken.any():
        index = int(indices[int(broken.nonzero()[0])])
        raise NotFiniteError(f"the model's outputs for example {index} are NaN or infinite")
    # NumPy's argmax is the first of equal maxima; PyTorch returns any of them
    best = torch.from_numpy(scores.numpy().argmax(axis=1))
    of_best, of_label = probabilities(scores, score_function).gather(1, torch.stack([best, truth], 1)).unbind(1)
    # cross-entropy subtracts the label's logit from ln(sum(e^x)), or with sigmoids from the sum of ln(1 + e^x)
    total = scores.logsumexp(dim=1) if score_function == "softmax" else F.softplus(scores).sum(dim=1)
    losses = total - scores.gather(1, truth[:, None])[:, 0]
    return indices, truth, best, ranks(scores, truth), of_best, of_label, losses


def class_measures(columns: Sequence[Tensor], *, classes: int, score_function: ScoreFunction = "softmax") -> Measures:
    """The metrics of images, from the columns of `score_logits`, in the order of their indices."""
    check_range("classes", classes, 2)
    order = columns[0].argsort(stable=True)
    names = ("indices", "labels", "predictions", "ranks", "probabilities", "label_probabilities", "losses")
    arrays: Any = {name: column[order].numpy() for name, column in zip(names, columns)}
    return Measures(**arrays, classes=classes, score_function=score_function)


def number_format(metric: str) -> str:
    """The format of a metric's numbers: percentages have two decimals, errors four digits."""
    return "{:.4g}" if metric in LOWER_IS_BETTER else "{:.2f}"


def headline(scalars: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the most important metric in a record, and its text, such as `top-1 91.20%`."""
    name = next(name for name in METRIC_TEXTS if name in scalars)
    return name, METRIC_TEXTS[name].format(scalars[name])


def ranks(logits: Tensor, labels: Tensor) -> Tensor:  # (B, K), (B,) -> (B,)
    """Number of classes ranked before the label; equal logits rank in the order of classes."""
    label_logits = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    return ((logits > label_logits) | ((logits == label_logits) & earlier)).sum(dim=1)


def measure_classes(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    classes: int,
    score_function: ScoreFunction = "softmax",
    **options: Any,
) -> Measures:
    """Evaluate a model of one class per image on all examples of the batches, with the options of `score_batches`."""
    kind: Any = {"classes": classes, "score_function": score_function}

    def score(outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        return score_logits(outputs, batch.labels, batch.indices, **kind)

    return class_measures(score_batches(model, batches, score, **options), **kind)


def score_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    score: Callable[[Tensor, Batch], tuple[Tensor, ...]],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    all_ranks: bool = False,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Columns of what `score` returns for each batch and its outputs, with the model in eval mode.

    Args:
        model: Called with normalized pixels.
        batches: Batches of a `Loader`.
        score: Returns tensors with a row for each image.
        device: Device of the model.
        dtype: Compute under autocast to this type.
        all_ranks: Every process of `torch.distributed` passes its own batches, equally many, and gets the rows of all.
        forward: Called instead of the model, such as its method `features`.

    Raises:
        DataError: There are no images.
    """
    forward = forward or model

    def run(batch: Batch) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        pixels = batch.pixels.to(device, non_blocking=True)
        with autocast(device, dtype):
            return score(forward(pixels), batch), (pixels[:1],)

    parts = run_batches(model, batches, run, all_ranks=all_ranks, forward=forward)
    if not parts:
        raise DataError("there are no examples to evaluate the model on")
    return [torch.cat(column) for column in zip(*parts)]


def run_batches(
    model: nn.Module,
    batches: Iterable[Batch],
    run: Callable[[Batch], tuple[Item, tuple[Tensor, ...]]],
    *,
    all_ranks: bool,
    forward: Callable[..., object] | None = None,
) -> list[Item]:
    """The results of `run` for every batch, with the model in eval mode.

    `run` calls `forward`, by default the model, and also returns its arguments for a single image. With `all_ranks`,
    the results are those of all processes, and a process whose part of a batch is empty calls it with these arguments
    again: a sharded model needs all processes in every forward pass.
    """
    forward = forward or model
    results: list[Item] = []
    with eval_mode(model), torch.no_grad():  # inference_mode would make tensors that sharded models cannot train with
        single_image: tuple[Tensor, ...] | None = None
        for batch in batches:
            if len(batch):
                result, single_image = run(batch)
                results.append(result)
            elif all_ranks:
                if single_image is None:
                    raise DataError("fewer evaluation examples than processes")
                forward(*single_image)
    if not all_ranks:
        return results
    gathered: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, results)
    return list(chain.from_iterable(gathered))


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


LEVEL = 95.0  # confidence level in percent
Z = 1.959963984540054  # standard errors on either side of the mean that contain LEVEL percent of a normal distribution
RESAMPLES = 1000

Statistic = Callable[[NDArray[np.float64]], Any]  # a number, or several, from how often each image was drawn (n,)


def wilson(right: float, count: float) -> Interval:
    """Wilson's interval of the fraction `right` / `count`."""
    fraction, z2 = right / count, Z**2 / count
    center = (fraction + z2 / 2) / (1 + z2)
    half = sqrt(z2 * (fraction * (1 - fraction) + z2 / 4)) / (1 + z2)
    low = center - half if right else 0.0  # exact at the ends, where the formula rounds
    high = center + half if right < count else 1.0
    return 100.0 * low, 100.0 * high


def accuracy_interval(right: NDArray[np.bool_]) -> Interval:
    return wilson(float(right.sum()), len(right))


def class_mean_interval(right: NDArray[np.int64], counts: NDArray[np.int64]) -> Interval:
    """Interval of the mean per-class accuracy, from correct predictions (K,) and images (K,).

    Wilson's, for the number of images K^2 / sum(1 / n_k) that would have this variance in a simple mean. With equally
    many images per class, it is the interval of the accuracy.
    """
    right, counts = right[counts > 0], counts[counts > 0]
    effective = len(counts) ** 2 / float((1.0 / counts).sum())
    return wilson(float((right / counts).mean()) * effective, effective)


def mean_f1(confusion: Counts) -> tuple[float, Interval]:
    """The mean F1 of the classes that have images, in percent, and its interval.

    The variance is that of the delta method (Takahashi et al., 2022). The interval is Wilson's for the number of
    images whose accuracy would have this variance, at most that of the mean per-class accuracy.
    """
    right, counts, total = np.diag(confusion), confusion.sum(axis=1), confusion.sum()
    both, present = counts + confusion.sum(axis=0), counts > 0
    f1 = np.divide(2.0 * right, both, out=np.zeros(len(both)), where=both > 0)
    mean = float(f1[present].mean())
    slope = np.divide(f1, both, out=np.zeros(len(both)), where=both > 0)  # times the number of images, as below
    rows, columns = np.nonzero(confusion)
    gradient = (rows == columns) * 2.0 / both[rows] - slope[rows] - slope[columns]
    shares = confusion[rows, columns] / total
    variance = total * float(shares @ gradient**2 - (shares @ gradient) ** 2) / int(present.sum()) ** 2
    effective = int(present.sum()) ** 2 / float((1.0 / counts[present]).sum())
    if variance > 0:
        effective = min(effective, float(mean * (1 - mean) / variance))
    return 100.0 * mean, wilson(mean * effective, effective)


def bootstrap(statistic: Statistic, count: int, *, seed: int, resamples: int = RESAMPLES) -> Any:
    """The central LEVEL percent of a statistic over `resamples` draws of `count` images with replacement.

    An interval; or a list of intervals, if the statistic is a list of numbers. NaN is left out.
    """
    generator = np.random.default_rng(seed)
    values = [
        statistic(np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64))
        for _ in range(resamples)
    ]
    return central(values)


def central(draws: Sequence[Any] | NDArray[np.float64]) -> Any:
    """The central LEVEL percent of draws (n,), or a list of those of draws (n, K); NaN where all draws are NaN."""
    tail = (100.0 - LEVEL) / 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice")
        ends = np.nanpercentile(draws, [tail, 100.0 - tail], axis=0)
    return tuple(ends.tolist()) if ends.ndim == 1 else list(zip(*ends.tolist()))
