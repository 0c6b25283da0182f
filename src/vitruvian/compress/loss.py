"""The accuracy that a faster model loses, with its uncertainty: from labels if there are any, and without them.

Without labels, the loss is estimated from the original model's probabilities: where the two predictions differ, it is
the probability of the original prediction minus that of the new one. If the probabilities are calibrated, its mean is
the expected loss of top-1. It varies less than a count of correct predictions over as many labeled images.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.cache import scratch_folder
from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_images
from vitruvian.data.sources import Source
from vitruvian.engines.export import Forward
from vitruvian.engines.graph import ImageModel
from vitruvian.errors import DataError
from vitruvian.evaluation.evaluate import default_split, open_for
from vitruvian.evaluation.label_spaces import LabelSpace, label_space
from vitruvian.evaluation.target_metrics import MEASURES, scores_of
from vitruvian.inference import Classifier, probabilities_of
from vitruvian.model.build import Model
from vitruvian.progress import Track, print_status, track
from vitruvian.text import plural

# n images, K outputs

MIN_IMAGES = 32  # fewest images to measure a loss on
BATCH_SIZE = 16
RESAMPLES = 100  # bootstrap resamples for the standard error of a metric of several labels or numbers
SAME_NUMBER = 0.01  # standard deviations by which two predicted numbers may differ and count as the same
ONE_SIDED = 1.645  # standard errors of a one-sided 95% confidence bound


@dataclass(frozen=True, kw_only=True, eq=False)
class PixelSample:
    """Preprocessed images, memory-mapped from a file, with their labels if the model has their classes."""

    name: str
    pixels: NDArray[np.float32]  # (n, channels, rows, columns)
    labels: NDArray[np.int64]  # (n,) classes in the label space; -1 if unknown
    space: LabelSpace | None
    targets: NDArray[np.float64] | None = None  # (n, K) of several labels or numbers; NaN if unknown

    def batches(self) -> list[Tensor]:
        return [self.tensor(slice(i, i + BATCH_SIZE)) for i in range(0, len(self.pixels), BATCH_SIZE)]

    def tensor(self, rows: slice) -> Tensor:
        return torch.from_numpy(np.array(self.pixels[rows]))

    def part(self, rows: slice) -> Self:
        targets = None if self.targets is None else self.targets[rows]
        return dataclasses.replace(self, pixels=self.pixels[rows], labels=self.labels[rows], targets=targets)

    def logits(self, forward: Forward, label: str) -> Tensor:
        """Logits (n, K) of a model, with a progress bar."""
        starts = range(0, len(self.pixels), BATCH_SIZE)
        return torch.cat([forward(self.tensor(slice(i, i + BATCH_SIZE))) for i in track(starts, len(starts), label)])


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyLoss:
    """The predictions of a faster model compared with the original's, in percent and percentage points."""

    images: int
    agreement: float  # percent of images with the same prediction
    expected: float  # expected loss of top-1 in points, by the original model's probabilities
    expected_error: float  # standard error of `expected`
    labeled: int  # images whose label is a class of the model; the following fields are about these
    before: float | None = None
    after: float | None = None
    error: float | None = None  # standard error of the paired difference
    metric: str = "top-1"  # what these are: top-1 or mAP in percent, or the mean absolute error (MAE)

    @property
    def points(self) -> float:
        """Upper bound of the loss in points: the larger of the 95% bound of `expected` and the loss on labels."""
        bound = self.expected + ONE_SIDED * self.expected_error
        if self.before is None or self.after is None:
            return bound
        change = 100 * (self.after / self.before - 1) if self.metric == "MAE" else self.before - self.after
        return max(bound, change)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"points": self.points}

    def __str__(self) -> str:
        text = (
            f"{self.images:,} images: {self.agreement:.1f}% same predictions, expected loss {self.expected:.2f} points "
            f"(standard error {self.expected_error:.2f})"
        )
        if self.before is not None:
            text += f"; {self.metric} {self.before:.2f} -> {self.after:.2f} on {self.labeled:,} labels"
            text += f" (standard error of the difference {self.error:.2f})"
        return text


def expected_losses(model: Model, before: Tensor, after: Tensor) -> Tensor:
    """Expected loss (n,) of each image as a fraction, for logits (n, K) of the original and the faster model."""
    probabilities = probabilities_of(model, before.double())
    old, new = before.argmax(dim=1), after.argmax(dim=1)
    return (probabilities.gather(1, old[:, None]) - probabilities.gather(1, new[:, None]))[:, 0]


def accuracy_loss(model: Model, before: Tensor, after: Tensor, sample: PixelSample) -> AccuracyLoss:
    """Compare the logits (n, K) of the original and the faster model."""
    compare = compare_classes if model.meta.target.kind == "single" else compare_targets
    same, lost, measured = compare(model, before, after, sample)
    return AccuracyLoss(
        images=len(lost),
        agreement=100 * float(same.mean()),
        expected=100 * float(lost.mean()),
        expected_error=100 * float(lost.std(ddof=1)) / sqrt(len(lost)),
        **measured,
    )


Comparison = tuple[NDArray[np.bool_], NDArray[np.float64], dict[str, Any]]
"""Whether predictions are the same, the expected loss (n,) of each image, and the fields of AccuracyLoss on labels."""


def compare_classes(model: Model, before: Tensor, after: Tensor, sample: PixelSample) -> Comparison:
    labeled = np.flatnonzero(sample.labels >= 0)
    measured: dict[str, Any] = {"labeled": len(labeled)}
    if sample.space is not None and len(labeled) >= MIN_IMAGES:
        ranks = [sample.space.rank_among_all(logits[labeled], sample.labels[labeled]) for logits in (before, after)]
        correct = [(rank < 1).astype(np.float64) for rank in ranks]
        measured["before"], measured["after"] = (100 * float(values.mean()) for values in correct)
        measured["error"] = 100 * float((correct[0] - correct[1]).std()) / sqrt(len(labeled))
    same = (before.argmax(dim=1) == after.argmax(dim=1)).numpy()
    return same, expected_losses(model, before, after).numpy(), measured


def compare_targets(model: Model, before: Tensor, after: Tensor, sample: PixelSample) -> Comparison:
    """For several labels in mAP, for numbers in percent of the mean absolute error.

    Without labels it is the probability of changed decisions, or the change of numbers in percent of their standard
    deviation.
    """
    target = model.meta.target
    is_labels = target.kind == "multi"
    old, new = (scores_of(outputs.numpy(), target) for outputs in (before, after))
    if is_labels:
        least = np.array(target.thresholds or (0.5,))
        same = (old >= least) == (new >= least)
        lost = np.where(same, 0.0, np.abs(2 * old - 1)).mean(axis=1)
    else:
        changes = np.abs(new - old) / np.array(target.std or (1.0,))
        same, lost = changes < SAME_NUMBER, changes.mean(axis=1)
    truth = np.full(old.shape, np.nan) if sample.targets is None else sample.targets
    labeled = np.flatnonzero((~np.isnan(truth)).any(axis=1))
    measured: dict[str, Any] = {"metric": "mAP" if is_labels else "MAE", "labeled": len(labeled)}
    if len(labeled) >= MIN_IMAGES:
        facts: dict[str, Any] = {"names": ("",) * old.shape[1], "indices": labeled, "loss": 0.0, "target": target}
        kind, name = MEASURES[target.kind], "map" if is_labels else "mae"
        pair = [kind(targets=truth[labeled], scores=scores[labeled], **facts) for scores in (old, new)]
        rng, n = np.random.default_rng(0), len(labeled)
        draws = [np.bincount(rng.integers(n, size=n), minlength=n).astype(np.float64) for _ in range(RESAMPLES)]
        differences = [pair[0].values(drawn)[name] - pair[1].values(drawn)[name] for drawn in draws]
        measured["before"], measured["after"] = (one.values(np.ones(n))[name] for one in pair)
        measured["error"] = float(np.nanstd(differences))
    return same, lost, measured


def read_sample(classifier: Classifier, data: object, *, images: int, training: bool, seed: int = 0) -> PixelSample:
    """Preprocess at most `images` random images of a dataset or folder; of its training split if `training`."""
    source, space = open_labeled(data, classifier.model, training=training)
    order = np.random.default_rng(seed).permutation(len(source))[:images]
    size = classifier.model.meta.preprocess.require_one_size("a fast graph")
    shape = (len(order), classifier.model.config.in_channels, *size)
    stored = np.memmap(scratch_folder() / "pixels.f32", np.float32, "w+", shape=shape)
    unreadable: list[Unreadable] = []
    read: list[int] = []
    reading: Track = partial(track, label="images read")
    batches = classifier.run_source(Tensor.contiguous, source, order, unreadable=unreadable, track=reading)
    for indices, pixels in batches:
        stored[len(read) : len(read) + len(indices)] = pixels.numpy()
        read += indices
    if unreadable:
        print_status(f"note: skipped {plural(len(unreadable), 'unreadable image')} of {source.name}")
    if len(read) < MIN_IMAGES:
        reason = f"{plural(len(read), 'image')}, but at least {MIN_IMAGES} are needed to measure a loss"
        raise DataError(reason, where=source.name)
    labels = np.full(len(read), -1) if space is None else space.labels[np.asarray(source.labels())[read]]
    targets = None
    if source.targets is not None and classifier.model.meta.target.kind != "single":
        columns = [classifier.labels.index(name) if name in classifier.labels else -1 for name in source.classes]
        rows = source.targets.rows(np.asarray(source.labels())[read])
        targets = np.full((len(read), len(classifier.labels)), np.nan)
        targets[:, [column for column in columns if column >= 0]] = rows[:, [column >= 0 for column in columns]]
    return PixelSample(name=source.name, pixels=stored[: len(read)], labels=labels, space=space, targets=targets)


def open_labeled(data: object, model: ImageModel, *, training: bool) -> tuple[Source, LabelSpace | None]:
    """The images, and the label space of their classes if the model has them."""
    target = model.meta.target
    try:
        dataset = open_for(data, target, model.meta.labels or ())
    except DataError:
        splits = open_images(data)
        return next(iter(splits.values())), None
    split = dataset.splits["train" if training and "train" in dataset.splits else default_split(dataset.splits)]
    if target.kind != "single":
        return split, None
    try:
        return split, label_space(dataset.classes, labels=model.meta.labels, total=model.config.num_classes)
    except DataError:
        estimated = "the loss is estimated from its probabilities"
        print_status(f"note: the classes of {dataset.name} are not the model's; {estimated}")
        return split, None
