"""Classification metrics and their confidence intervals.

`Tally` counts every example once, over any number of batches and processes. A fraction of images has Wilson's interval,
which has a width even if all predictions are correct (E. B. Wilson, 1927). The intervals of the classes combine to that
of their mean by square roots of sums of squares (MOVER: G. Y. Zou et al., 2009). Other numbers use the bootstrap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import sqrt
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from vitruvian.data.loader import Batch
from vitruvian.errors import DataError, NotFiniteError, VitruvianError
from vitruvian.settings import check_range

# B examples, K classes

MAX_CONFUSION_CLASSES = 2000
"""The confusion matrix of more classes is not kept: it would take more than 32 MB."""

SHOWN_MISTAKES = 24
"""Number of most confident mistakes that a report shows."""

MEASURE_NAMES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "mean per class"}
"""Names of the accuracies of `Measures.scalars` in reports."""

Counts = NDArray[np.int64]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong prediction."""

    index: int
    """Index of the example in its source."""
    label: int
    prediction: int
    probability: float
    """Probability of the prediction."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measures:
    """Metrics over a set of examples; accuracies in percent."""

    count: int
    loss: float
    """Mean cross-entropy, whatever the training loss."""
    top1: float
    top5: float
    """The label is among the five best predictions, or among all if there are fewer classes."""
    class_counts: Counts
    """(K,) examples of each class."""
    class_correct: Counts
    """(K,) correctly classified examples of each class."""
    confusion: Counts | None
    """(K, K) examples by label (row) and prediction (column); None beyond MAX_CONFUSION_CLASSES."""
    mistakes: tuple[Mistake, ...] = ()
    """The most confident ones, the worst first, as many as were asked for."""

    @property
    def class_accuracy(self) -> NDArray[np.float64]:
        """(K,) accuracy within each class; NaN where it has no example."""
        present = np.where(self.class_counts > 0, self.class_counts, np.nan)
        return np.asarray(100.0 * self.class_correct / present)

    @property
    def is_top5_meaningful(self) -> bool:
        """Whether top-5 accuracy is meaningful: there are more than five classes."""
        return len(self.class_counts) > 5

    @property
    def mean_per_class(self) -> float:
        return float(self.class_accuracy[self.class_counts > 0].mean())

    def scalars(self) -> dict[str, float]:
        """The single numbers, as a record of metrics holds them."""
        return {
            "count": self.count,
            "loss": self.loss,
            "top1": self.top1,
            "top5": self.top5,
            "mean_per_class": self.mean_per_class,
        }


class Tally:
    """Accumulates metrics over batches and processes, in memory that does not grow with the examples."""

    def __init__(self, classes: int, *, mistakes: int = 0) -> None:
        """Accumulate over `classes` classes and keep the `mistakes` most confident mistakes."""
        check_range("classes", classes, 2)
        check_range("mistakes", mistakes, 0)
        self.classes = classes
        self.most_mistakes = mistakes
        squared = classes**2 if classes <= MAX_CONFUSION_CLASSES else 0
        self.sums = torch.zeros(2 + 2 * classes + squared, dtype=torch.float64)
        """Loss, top-5 hits, images and hits per class, confusion matrix: everything that is summed over processes."""
        self._parts = np.split(self.sums.numpy(), np.cumsum([1, 1, classes, classes]))
        self._worst: list[tuple[float, int, Mistake]] = []

    def add(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Add logits (B, K) of the examples with these indices; equal logits rank in the order of classes."""
        scores, truth = logits.detach().cpu().double(), labels.cpu()
        self._check(scores, truth, indices)
        log_probabilities = scores.log_softmax(dim=-1)
        rank = ranks(scores, truth)
        predictions = scores.numpy().argmax(axis=1)  # the first of equal maxima; PyTorch returns any of them
        loss, top5, counts, correct, confusion = self._parts
        loss -= log_probabilities.gather(1, truth[:, None]).sum().item()
        top5 += (rank < 5).sum().item()
        np.add.at(counts, truth.numpy(), 1)
        np.add.at(correct, truth.numpy()[predictions == truth.numpy()], 1)
        if len(confusion):
            np.add.at(confusion, truth.numpy() * self.classes + predictions, 1)
        for row in np.flatnonzero(predictions != truth.numpy()).tolist():
            probability = log_probabilities[row, predictions[row]].exp().item()
            self._remember(
                Mistake(
                    index=int(indices[row]),
                    label=int(truth[row]),
                    prediction=int(predictions[row]),
                    probability=probability,
                )
            )

    def _check(self, logits: Tensor, truth: Tensor, indices: Tensor) -> None:
        if logits.shape != (len(truth), self.classes):
            raise VitruvianError(
                f"the model returned logits {tuple(logits.shape)} for {len(truth)} examples of {self.classes} classes"
            )
        if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < self.classes:
            raise DataError(f"labels from {truth.min()} to {truth.max()}, expected 0 to {self.classes - 1}")
        broken = logits.isnan().any(dim=1) | (logits == torch.inf).any(dim=1)
        if broken.any():
            index = int(indices[int(broken.nonzero()[0])])
            raise NotFiniteError(f"the model's outputs for example {index} are NaN or infinite")

    def _remember(self, mistake: Mistake) -> None:
        entry = (mistake.probability, -mistake.index, mistake)
        if len(self._worst) < self.most_mistakes:
            heapq.heappush(self._worst, entry)
        elif self._worst and entry[:2] > self._worst[0][:2]:
            heapq.heapreplace(self._worst, entry)

    def add_up(self, device: torch.device | str = "cpu") -> None:
        """All-reduce over the processes of `torch.distributed`."""
        sums, mistakes = from_all_ranks(self.sums, self.mistakes, device)
        self.sums.copy_(sums)
        self._worst.clear()
        for mistake in mistakes:
            self._remember(mistake)

    @property
    def mistakes(self) -> list[Mistake]:
        """The most confident mistakes, in order of confidence."""
        return [mistake for *_, mistake in sorted(self._worst, key=lambda entry: entry[:2], reverse=True)]

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
        )


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
    all_ranks: bool = False,
) -> Measures:
    """Evaluate a model in eval mode on all examples of the batches.

    Args:
        model: Called with normalized pixels; returns logits (B, K).
        batches: Batches of a `Loader`.
        classes: Number of classes.
        device: Where the model is.
        dtype: Compute under autocast to this type.
        mistakes: Number of the most confident mistakes to keep.
        all_ranks: Every process of `torch.distributed` passes its own batches, equally many, and gets the metrics over
            all of them.
    """
    tally = Tally(classes, mistakes=mistakes)

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
    training = model.training
    model.eval()
    try:
        with torch.no_grad():  # inference_mode would make tensors that sharded models cannot use again in training
            single_image: tuple[Tensor, ...] | None = None
            for batch in batches:
                if len(batch):
                    single_image = count(batch)
                elif all_ranks:
                    if single_image is None:
                        raise DataError("fewer evaluation examples than processes")
                    model(*single_image)
    finally:
        model.train(training)


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)


LEVEL = 95.0
"""Confidence level in percent."""
Z = 1.959963984540054
"""Standard errors on either side of the mean that contain LEVEL percent of a normal distribution."""
RESAMPLES = 1000

Interval = tuple[float, float]
"""Lower and upper end, in percent."""
Statistic = Callable[[NDArray[np.float64]], float]
"""Computes a number from how often each image was drawn (n,)."""


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
    """Interval of the mean per-class accuracy, from correct predictions (K,) and images (K,)."""
    filled = [(float(r), float(n)) for r, n in zip(right.tolist(), counts.tolist()) if n]
    accuracies = np.array([100.0 * r / n for r, n in filled])
    ends = np.array([wilson(r, n) for r, n in filled])
    down, up = (np.sqrt(np.square(ends[:, side] - accuracies).sum()) / len(accuracies) for side in (0, 1))
    return float(accuracies.mean() - down), float(accuracies.mean() + up)


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
