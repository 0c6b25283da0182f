"""Evaluate a model on a data set: every image counted, with intervals, calibration and ReaL labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.config import BATCH
from vitruvian.data.sources import Dataset, open_dataset
from vitruvian.errors import DataError
from vitruvian.evaluation.measuring.calibration import (
    Calibration,
    bin_numbers,
    calibration,
    calibration_error,
    confidences,
)
from vitruvian.evaluation.measuring.inference import Answers, answers_of
from vitruvian.evaluation.measuring.intervals import LEVEL, Statistic, class_mean, intervals, share, share_among
from vitruvian.evaluation.measuring.label_files import RealLabels, real_answers
from vitruvian.evaluation.measuring.label_spaces import LabelSpace, label_space
from vitruvian.evaluation.measuring.metrics import Counts, Measures, Tally, ranks
from vitruvian.evaluation.pages.sections import SHOWN_MISTAKES
from vitruvian.model.build import Model
from vitruvian.predict import Classifier
from vitruvian.progress import Track, untracked
from vitruvian.weights.save import save

# n images, C classes of the label space

SPLITS = ("test", "val")
"""What is evaluated unless a split is named: the first of these, or else the first that there is."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is evaluated, and how."""

    split: str | None = None
    real: RealLabels | None = None
    """ReaL labels of ImageNet's validation images."""
    ids: Sequence[str] | None = None
    """WordNet id of each output, for models whose labels do not tell."""
    groups: Mapping[str, Sequence[int]] | None = None
    """Numbers in ImageNet-1k that each class means (ObjectNet)."""
    seed: int = 0
    """Of the bootstrap, and of the images that a temperature is fitted on."""
    batch: int = BATCH


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on one split of a data set; accuracies in percent."""

    data: str
    model: str
    split: str
    part: str
    """Which images, in words."""
    space: LabelSpace
    measures: Measures
    among_all: float
    """Top-1 where all outputs of the model compete, also those that mean no class of the data."""
    real: float | None
    real_count: int
    """Images that have a ReaL label."""
    intervals: dict[str, tuple[float, float]]
    """Bootstrap intervals by the name of the number in `to_json`."""
    calibration: Calibration
    unreadable: dict[str, str]
    """Why an image could not be counted, by key."""
    left_out: int
    """Images of classes that the model does not have."""
    notes: tuple[str, ...]
    """What the data set left out or is strange."""

    @property
    def restricted(self) -> bool:
        """Whether the model has outputs that mean no class of the data."""
        return self.space.competing < self.space.total

    def to_json(self) -> dict[str, Any]:
        """All of it; the confusion matrix as [label, prediction, images] without zeros."""
        measures, space = self.measures, self.space
        return {
            "data": self.data,
            "model": self.model,
            "split": self.split,
            **measures.scalars(),
            "top1_among_all_outputs": self.among_all,
            "real": self.real,
            "real_count": self.real_count,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "interval_percent": LEVEL,
            "calibration": self.calibration.to_json(),
            "label_space": {"matched_by": space.about, "outputs": space.total, "competing": space.competing},
            "unreadable": self.unreadable,
            "left_out": self.left_out,
            "notes": list(self.notes),
            "classes": class_rows(measures, space.classes),
            "confusion": None if measures.confusion is None else without_zeros(measures.confusion),
        }


@dataclass(frozen=True, slots=True)
class Real:
    """Answers to the images that have a ReaL label."""

    rows: NDArray[np.int64]
    right: NDArray[np.bool_]


def evaluate(
    data: Dataset | str | Path, classifier: Classifier, options: Options, *, model: str = "", track: Track = untracked
) -> Evaluation:
    """Evaluate on one split; `model` is what to call the model in reports."""
    opened = data if isinstance(data, Dataset) else open_dataset(data)
    split, space = chosen_split(opened, options.split), space_of(opened, classifier, options)
    answers = answers_of(classifier, opened.splits[split], space, batch=options.batch, track=track)
    real = real_of(opened, split, answers, options)
    dev = None
    if split == "test" and "val" in opened.splits:
        dev = answers_of(classifier, opened.splits["val"], space, batch=options.batch, track=track)
    temperature = classifier.model.temperature
    return Evaluation(
        data=opened.name,
        model=model,
        split=split,
        part="the whole data set" if len(opened.splits) == 1 else f"the split {split!r}",
        space=space,
        measures=measures_of(answers, space, temperature),
        among_all=100.0 * float(answers.right_among_all.mean()),
        real=None if real is None else 100.0 * float(real.right.mean()),
        real_count=0 if real is None else len(real.rows),
        intervals=intervals(statistics(answers, temperature, real), len(answers), seed=options.seed),
        calibration=calibration(answers, temperature, dev, "the split 'val'", seed=options.seed),
        unreadable=answers.unreadable,
        left_out=answers.left_out,
        notes=opened.notes,
    )


def chosen_split(data: Dataset, wanted: str | None) -> str:
    if wanted is not None:
        return next(iter(data.only(wanted).splits))
    return next((name for name in SPLITS if name in data.splits), next(iter(data.splits)))


def space_of(data: Dataset, classifier: Classifier, options: Options) -> LabelSpace:
    space = label_space(
        data.classes,
        labels=classifier.model.labels,
        total=classifier.model.config.classes,
        ids=options.ids,
        groups=options.groups,
    )
    if options.real is not None and not space.has_imagenet:
        raise DataError("ReaL labels are classes of ImageNet-1k, and the model does not have all of them")
    return space


def real_of(data: Dataset, split: str, answers: Answers, options: Options) -> Real | None:
    if options.real is None:
        return None
    source = data.splits[split]
    keys = (source.key(number) for number in answers.numbers.tolist())
    return Real(*real_answers(keys, answers.imagenet, options.real))


def measures_of(answers: Answers, space: LabelSpace, temperature: float) -> Measures:
    """The measures over the classes of the space, with the probabilities that the model gives."""
    tally = Tally(len(space.classes), mistakes=SHOWN_MISTAKES)
    for rows, logits in answers.pieces():
        labels, numbers = torch.from_numpy(answers.labels[rows]), torch.from_numpy(answers.numbers[rows])
        tally.add(logits / temperature, labels, numbers)
    return tally.measures()


def statistics(answers: Answers, temperature: float, real: Real | None) -> dict[str, Statistic]:
    """What gets an interval, by its name in reports."""
    confidence, right, _ = confidences(answers, temperature)
    bins = bin_numbers(confidence)

    def error(drawn: NDArray[np.float64]) -> float:
        weights = drawn / drawn.sum()
        return calibration_error(bins, weights * confidence, weights * right)

    found = {
        "top1": share(right),
        "top5": share(among_best(answers, 5)),
        "mean_per_class": class_mean(answers.labels, right),
        "top1_among_all_outputs": share(answers.right_among_all),
        "calibration_error": error,
    }
    return found if real is None else found | {"real": share_among(real.rows, real.right)}


def among_best(answers: Answers, count: int) -> NDArray[np.bool_]:
    """(n,) Whether the label is among the `count` best answers."""
    found = [ranks(logits, torch.from_numpy(answers.labels[rows])) < count for rows, logits in answers.pieces()]
    return np.asarray(torch.cat(found))


def class_rows(measures: Measures, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    counts, correct = measures.class_counts.tolist(), measures.class_correct.tolist()
    return [{"class": name, "images": n, "right": right} for name, n, right in zip(classes, counts, correct)]


def without_zeros(confusion: Counts) -> list[list[int]]:
    rows, columns = np.nonzero(confusion)
    triples: list[list[int]] = np.stack([rows, columns, confusion[rows, columns]], axis=1).tolist()
    return triples


def save_calibrated(evaluation: Evaluation, model: Model, folder: Path) -> None:
    """Write the model natively with the fitted temperature, which every later prediction uses."""
    fitted = evaluation.calibration
    if fitted.temperature is None:
        raise DataError(f"{folder}: not written, as no temperature was fitted: {fitted.obstacle}")
    assert fitted.before is not None
    assert fitted.after is not None
    if fitted.after.loss >= fitted.before.loss:
        raise DataError(
            f"{folder}: not written, as temperature {fitted.temperature:.3f} does not help: cross-entropy "
            f"{fitted.before.loss:.4f} becomes {fitted.after.loss:.4f} on the images that it was not fitted on"
        )
    if evaluation.restricted:
        raise DataError(
            f"{folder}: not written, as the temperature was fitted with {evaluation.space.competing} of the model's "
            f"{evaluation.space.total} outputs; evaluate on all its classes"
        )
    model.temperature = fitted.temperature
    save(model, folder)
