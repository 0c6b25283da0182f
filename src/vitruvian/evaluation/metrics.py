"""Classification metrics and their confidence intervals.

`Tally` counts every example once, over any number of batches and processes. A fraction of images has Wilson's interval,
which has a width even if all predictions are correct (E. B. Wilson, 1927). The intervals of the classes combine to that
of their mean by square roots of sums of squares (MOVER: G. Y. Zou et al., 2009). Other numbers use the bootstrap.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.config import ScoreFunction
from vitruvian.data.loader import Batch
from vitruvian.errors import DataError, NotFiniteError, VitruvianError
from vitruvian.model.cores import eval_mode
from vitruvian.settings import check_range

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


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong prediction."""

    index: int  # index of the example in its source
    label: int
    prediction: int
    probability: float  # probability of the prediction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measures:
    """Metrics over a set of examples; accuracies in percent."""

    count: int
    loss: float  # mean cross-entropy without label smoothing; with sigmoids, binary and summed over the classes
    top1: float
    top5: float  # the label is among the five best predictions, or among all if there are fewer classes
    class_counts: Counts  # (K,) examples of each class
    class_correct: Counts  # (K,) correctly classified examples of each class
    confusion: Counts | None  # (K, K) by label (row) and prediction (column); None beyond MAX_CONFUSION_CLASSES
    mistakes: tuple[Mistake, ...] = ()  # the most confident ones, the worst first, as many as were asked for
    score_function: ScoreFunction = "softmax"

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
        return len(self.class_counts) > 5

    @property
    def mean_per_class(self) -> float:
        return float(self.class_accuracy[self.class_counts > 0].mean())

    @property
    def intervals(self) -> dict[str, Interval]:
        """The confidence interval of each accuracy."""
        hits = {name: round(getattr(self, name) * self.count / 100) for name in ("top1", "top5")}
        mean = class_mean_interval(self.class_correct, self.class_counts)
        return {name: wilson(right, self.count) for name, right in hits.items()} | {"mean_per_class": mean}

    @property
    def class_scores(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(K,) precision and F1 of each class in percent; NaN without images, and if there is no confusion matrix."""
        nan = np.full(len(self.class_counts), np.nan)
        if self.confusion is None:
            return nan, nan
        predicted = self.confusion.sum(axis=0)
        both = self.class_counts + predicted
        precision = np.divide(100.0 * self.class_correct, predicted, out=nan.copy(), where=predicted > 0)
        f1 = np.divide(200.0 * self.class_correct, both, out=nan, where=self.class_counts > 0)
        return precision, f1

    def scalars(self) -> dict[str, float]:
        """The single numbers, as a record of metrics holds them."""
        return {name: getattr(self, name) for name in ("count", "loss", "top1", "top5", "mean_per_class")}


class Tally:
    """Accumulates metrics over batches and processes, in memory that does not grow with the examples."""

    def __init__(self, classes: int, *, mistakes: int = 0, score_function: ScoreFunction = "softmax") -> None:
        """Accumulate over `classes` classes and keep the `mistakes` most confident mistakes."""
        check_range("classes", classes, 2)
        check_range("mistakes", mistakes, 0)
        self.classes = classes
        self.most_mistakes, self.score_function = mistakes, score_function
        squared = classes**2 if classes <= MAX_CONFUSION_CLASSES else 0
        self.sums = torch.zeros(2 + 2 * classes + squared, dtype=torch.float64)
        """Loss, top-5 hits, images and hits per class, confusion matrix: everything that is summed over processes."""
        self._parts = np.split(self.sums.numpy(), np.cumsum([1, 1, classes, classes]))
        self.mistakes: list[Mistake] = []  # the most confident ones, the worst first

    def add(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Add logits (B, K) of the examples with these indices; equal logits rank in the order of classes."""
        scores, truth = logits.detach().cpu().double(), labels.cpu()
        if scores.shape != (len(truth), self.classes):
            raise VitruvianError(
                f"the model returned logits {tuple(scores.shape)} for {len(truth)} examples of {self.classes} classes"
            )
        if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < self.classes:
            raise DataError(f"labels from {truth.min()} to {truth.max()}, expected 0 to {self.classes - 1}")
        broken = scores.isnan().any(dim=1) | (scores == torch.inf).any(dim=1)
        if broken.any():
            index = int(indices[int(broken.nonzero()[0])])
            raise NotFiniteError(f"the model's outputs for example {index} are NaN or infinite")
        if self.score_function == "softmax":
            log_probabilities = scores.log_softmax(dim=-1)
            total = log_probabilities.gather(1, truth[:, None]).sum()
        else:  # ln sigmoid(x) for the label and ln sigmoid(-x) for all others; they differ by x
            log_probabilities = F.logsigmoid(scores)
            total = scores.gather(1, truth[:, None]).sum() + F.logsigmoid(-scores).sum()
        rank = ranks(scores, truth)
        predictions = scores.numpy().argmax(axis=1)  # the first of equal maxima; PyTorch returns any of them
        loss, top5, counts, correct, confusion = self._parts
        loss -= total.item()
        top5 += (rank < 5).sum().item()
        np.add.at(counts, truth.numpy(), 1)
        np.add.at(correct, truth.numpy()[predictions == truth.numpy()], 1)
        if len(confusion):
            np.add.at(confusion, truth.numpy() * self.classes + predictions, 1)
        wrong = np.flatnonzero(predictions != truth.numpy()).tolist()
        self._remember(
            Mistake(int(indices[row]), int(truth[row]), guess, log_probabilities[row, guess].exp().item())
            for row, guess in zip(wrong, predictions[wrong].tolist())
        )

    def _remember(self, mistakes: Iterable[Mistake]) -> None:
        candidates = [*self.mistakes, *mistakes]
        self.mistakes = heapq.nlargest(self.most_mistakes, candidates, key=lambda m: (m.probability, -m.index))

    def add_up(self, device: torch.device | str = "cpu") -> None:
        """All-reduce over the processes of `torch.distributed`."""
        sums, mistakes = from_all_ranks(self.sums, self.mistakes, device)
        self.sums.copy_(sums)
        self.mistakes = []
        self._remember(mistakes)

    def measures(self) -> Measures:
        """The metrics of all examples so far. Raises DataError if there are none."""
        loss, top5, counts, correct, confusion = self._parts
        count = int(counts.sum())
        if not count:
            raise DataError("there are no examples to evaluate the model on")
        square = confusion.reshape(self.classes, self.classes).astype(np.int64) if len(confusion) else None
        return Measures(
            count=count,
            loss=float(loss[0]) / count,
            top1=100.0 * float(correct.sum()) / count,
            top5=100.0 * float(top5[0]) / count,
            class_counts=counts.astype(np.int64),
            class_correct=correct.astype(np.int64),
            confusion=square,
            mistakes=tuple(self.mistakes),
            score_function=self.score_function,
        )


def headline(scalars: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the most important metric in a record, and its text, such as `top-1 91.20%`."""
    name = next(name for name in METRIC_TEXTS if name in scalars)
    return name, METRIC_TEXTS[name].format(scalars[name])


def from_all_ranks(sums: Tensor, objects: list[Item], device: torch.device | str) -> tuple[Tensor, list[Item]]:
    """All-reduce `sums` and gather the objects of all processes."""
    moved = sums.to(device)
    dist.all_reduce(moved)
    gathered: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, objects)
    return moved.cpu(), list(chain.from_iterable(gathered))


def ranks(logits: Tensor, labels: Tensor) -> Tensor:  # (B, K), (B,) -> (B,)
    """Number of classes ranked before the label; equal logits rank in the order of classes."""
    label_logits = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    return ((logits > label_logits) | ((logits == label_logits) & earlier)).sum(dim=1)


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    classes: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    mistakes: int = 0,
    score_function: ScoreFunction = "softmax",
    all_ranks: bool = False,
) -> Measures:
    """Evaluate a model in eval mode on all examples of the batches.

    Args:
        model: Called with normalized pixels; returns logits (B, K).
        batches: Batches of a `Loader`.
        dtype: Compute under autocast to this type.
        mistakes: Number of the most confident mistakes to keep.
        score_function: How logits become probabilities; decides the loss.
        all_ranks: Every process of `torch.distributed` passes its own batches, equally many, and gets the metrics over
            all of them.
    """
    tally = Tally(classes, mistakes=mistakes, score_function=score_function)

    def count(batch: Batch) -> tuple[Tensor, ...]:
        pixels = batch.pixels.to(device, non_blocking=True)
        with autocast(device, dtype):
            tally.add(model(pixels), batch.labels, batch.indices)
        return (pixels[:1],)

    count_all(model, batches, count, all_ranks=all_ranks)
    if all_ranks:
        tally.add_up(device)
    return tally.measures()


def count_all(
    model: nn.Module, batches: Iterable[Batch], count: Callable[[Batch], tuple[Tensor, ...]], *, all_ranks: bool
) -> None:
    """Call `count` for every batch, with the model in eval mode.

    `count` calls the model and returns its arguments for a single image. With `all_ranks`, a process whose part of a
    batch is empty calls the model with those again: a sharded model needs all processes in every forward pass.
    """
    with eval_mode(model), torch.no_grad():  # inference_mode would make tensors that sharded models cannot train with
        single_image: tuple[Tensor, ...] | None = None
        for batch in batches:
            if len(batch):
                single_image = count(batch)
            elif all_ranks:
                if single_image is None:
                    raise DataError("fewer evaluation examples than processes")
                model(*single_image)


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


LEVEL = 95.0  # confidence level in percent
Z = 1.959963984540054  # standard errors on either side of the mean that contain LEVEL percent of a normal distribution
RESAMPLES = 1000

Statistic = Callable[[NDArray[np.float64]], float]  # computes a number from how often each image was drawn (n,)


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


def class_intervals(measures: Measures, label: int) -> list[Interval | None]:
    """Wilson's intervals of recall, precision and F1 of a class; None if they are unknown.

    F1 is 2 J / (1 + J), where J is the fraction of correct predictions among images of the class or predicted as it.
    """
    right, count = int(measures.class_correct[label]), int(measures.class_counts[label])
    predicted = 0 if measures.confusion is None else int(measures.confusion[:, label].sum())
    recall, precision, jaccard = (
        wilson(right, total) if total else None for total in (count, predicted, count + predicted - right)
    )
    f1 = None if jaccard is None else tuple(200.0 * end / (100.0 + end) for end in jaccard)
    return [recall, precision, cast(Interval | None, f1)]


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


def bootstrap(statistic: Statistic, count: int, *, seed: int, resamples: int = RESAMPLES) -> Interval:
    """The central LEVEL percent of a statistic over `resamples` draws of `count` images with replacement."""
    generator = np.random.default_rng(seed)
    values = [
        statistic(np.bincount(generator.integers(count, size=count), minlength=count).astype(np.float64))
        for _ in range(resamples)
    ]
    tail = (100.0 - LEVEL) / 2
    low, high = np.percentile(values, [tail, 100.0 - tail])
    return float(low), float(high)
