"""How good a model is on labeled images: every example counted once, in memory that does not grow with them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
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
"""Most confident mistakes that a report shows with their images."""

MEASURE_NAMES = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "mean_per_class": "mean per class"}
"""What reports call the accuracies of `Measures.scalars`."""

Counts = NDArray[np.int64]
Kept = TypeVar("Kept")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A wrong answer."""

    index: int
    """The example's number in its source."""
    label: int
    prediction: int
    probability: float
    """What the model gave its prediction."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measures:
    """What was measured over a set of examples; accuracies in percent."""

    count: int
    loss: float
    """Mean cross-entropy, whatever the model was trained with."""
    top1: float
    top5: float
    """The label is among the five best answers, or among all where there are fewer classes."""
    class_counts: Counts
    """(K,) examples of each class."""
    class_correct: Counts
    """(K,) of them, those answered rightly."""
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
    def top5_tells(self) -> bool:
        """Whether a label among the five best answers says anything: there are more classes than that."""
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
    """Counts that grow batch by batch; those of several processes add up."""

    def __init__(self, classes: int, *, mistakes: int = 0) -> None:
        """Keeps the `mistakes` most confident mistakes."""
        check_range("classes", classes, 2)
        check_range("mistakes", mistakes, 0)
        self.classes = classes
        self.most_mistakes = mistakes
        squared = classes**2 if classes <= MAX_CONFUSION_CLASSES else 0
        self.sums = torch.zeros(2 + 2 * classes + squared, dtype=torch.float64)
        """Loss, top-5, counts and right answers of each class, confusions: all that is added up, and nothing else."""
        self._parts = np.split(self.sums.numpy(), np.cumsum([1, 1, classes, classes]))
        self._worst: list[tuple[float, int, Mistake]] = []

    def add(self, logits: Tensor, labels: Tensor, indices: Tensor) -> None:
        """Count the answers (B, K) to the examples with these numbers; equal logits rank in the order of classes."""
        answers, truth = logits.detach().cpu().double(), labels.cpu()
        self._check(answers, truth, indices)
        scores = answers.log_softmax(dim=-1)
        rank = ranks(answers, truth)
        # numpy names the first of equal maxima, PyTorch any of them
        predictions = answers.numpy().argmax(axis=1)
        loss, top5, counts, correct, confusion = self._parts
        loss -= scores.gather(1, truth[:, None]).sum().item()
        top5 += (rank < 5).sum().item()
        np.add.at(counts, truth.numpy(), 1)
        np.add.at(correct, truth.numpy()[predictions == truth.numpy()], 1)
        if len(confusion):
            np.add.at(confusion, truth.numpy() * self.classes + predictions, 1)
        for row in np.flatnonzero(predictions != truth.numpy()).tolist():
            probability = scores[row, predictions[row]].exp().item()
            self._remember(
                Mistake(
                    index=int(indices[row]),
                    label=int(truth[row]),
                    prediction=int(predictions[row]),
                    probability=probability,
                )
            )

    def _check(self, answers: Tensor, truth: Tensor, indices: Tensor) -> None:
        if answers.shape != (len(truth), self.classes):
            raise VitruvianError(
                f"the model answers {tuple(answers.shape)}, where {len(truth)} examples "
                f"of {self.classes} classes want {(len(truth), self.classes)}"
            )
        if len(truth) and not 0 <= int(truth.min()) <= int(truth.max()) < self.classes:
            raise DataError(f"labels from {truth.min()} to {truth.max()}, where there are {self.classes} classes")
        broken = answers.isnan().any(dim=1) | (answers == torch.inf).any(dim=1)
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
        """Make this the tally of all processes of `torch.distributed`, in each of them."""
        sums, found = from_all_ranks(self.sums, self.mistakes, device)
        self.sums.copy_(sums)
        self._worst.clear()
        for mistake in found:
            self._remember(mistake)

    @property
    def mistakes(self) -> list[Mistake]:
        """Those kept, the most confident first."""
        return [mistake for *_, mistake in sorted(self._worst, key=lambda entry: entry[:2], reverse=True)]

    def measures(self) -> Measures:
        """The measures of what was counted so far; DataError where that is nothing."""
        loss, top5, counts, correct, confusion = self._parts
        count = int(counts.sum())
        if not count:
            raise DataError("there is not one example to measure the model on")
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


def from_all_ranks(sums: Tensor, kept: list[Kept], device: torch.device | str) -> tuple[Tensor, list[Kept]]:
    """What all processes have counted, added up, and what they have kept."""
    moved = sums.to(device)
    dist.all_reduce(moved)
    found: list[list[Kept]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, kept)
    return moved.cpu(), list(chain.from_iterable(found))


def ranks(logits: Tensor, labels: Tensor) -> Tensor:  # (B, K), (B,) -> (B,)
    """How many classes come before the label; equal logits rank in the order of classes."""
    own = logits.gather(1, labels[:, None])
    earlier = torch.arange(logits.shape[1]) < labels[:, None]
    return ((logits > own) | ((logits == own) & earlier)).sum(dim=1)


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
    """The measures of a model over all examples of the batches, without dropout.

    `dtype` computes under autocast. With `all_ranks`, every process of `torch.distributed` gives its own batches,
    equally many, and all get the measures of the whole; a process without a part in a batch calls the model all the
    same, for a model that is spread over processes needs them all.
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
    """Give every batch to `count`, which calls the model and returns what one image of it is called with.

    The model is not in training meanwhile. With `all_ranks`, that image is seen again for each empty batch.
    """
    training = model.training
    model.eval()
    try:
        with torch.no_grad():  # inference_mode would make tensors that sharded models cannot use again in training
            stand_in: tuple[Tensor, ...] | None = None
            for batch in batches:
                if len(batch):
                    stand_in = count(batch)
                elif all_ranks:
                    if stand_in is None:
                        raise DataError("there are fewer examples to measure the model on than processes")
                    model(*stand_in)
    finally:
        model.train(training)


def autocast(device: torch.device | str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype)
