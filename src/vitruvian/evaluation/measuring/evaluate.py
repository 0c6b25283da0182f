"""Evaluate a model on a dataset: every image counted, with intervals, calibration and ReaL labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, Source
from vitruvian.data.transform import Transform
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.measuring.calibration import (
    Calibration,
    bin_numbers,
    calibration,
    calibration_error,
    confidences,
)
from vitruvian.evaluation.measuring.inference import Answers, answers_of, with_task_preprocess
from vitruvian.evaluation.measuring.intervals import LEVEL, Interval, bootstrap, class_mean_interval, share_interval
from vitruvian.evaluation.measuring.label_files import (
    mappings_beside,
    read_ids,
    read_objectnet,
    read_real,
    real_answers,
)
from vitruvian.evaluation.measuring.label_spaces import LabelSpace, label_space
from vitruvian.evaluation.measuring.metrics import SHOWN_MISTAKES, Counts, Measures, Tally, ranks
from vitruvian.inference import Classifier, Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Seed, validate
from vitruvian.tasks import extra_file
from vitruvian.weights.load import locate, run_facts
from vitruvian.weights.save import save

# n images, C classes of the label space

SPLITS = ("test", "val")
"""What is evaluated unless a split is named: the first of these, or else the first that there is."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on one split of a dataset; accuracies in percent."""

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
    """By the name of the number in `to_json`."""
    calibration: Calibration
    unreadable: dict[str, str]
    """Why an image could not be counted, by key."""
    left_out: int
    """Images of classes that the model does not have."""
    notes: tuple[str, ...]
    """What the dataset left out or is strange, and whether the model was trained on these images."""
    classifier: Classifier
    """What was evaluated; its view is the one that was used."""
    source: Source
    """The images."""

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
            "view": view_json(self.classifier),
            "flip": self.classifier.flip,
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


def evaluate(
    data: object,
    model: Encoder | Model | str | Path,
    *,
    template: str | None = None,
    flip: bool = False,
    split: str | None = None,
    preprocess: Preprocess | Transform | None = None,
    real: str | Path | None = None,
    wordnet_ids: str | Path | None = None,
    mappings: str | Path | None = None,
    seed: int = 0,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> Evaluation:
    """How good a model is on one split of a dataset, the same numbers as `vit evaluate` prints.

    `data` is whatever `vit evaluate` takes, a `torch.utils.data.Dataset` or a dataset of Hugging Face; `model` a file,
    a folder, a published name, a model or a Classifier; a CLIP or SigLIP is measured zero-shot, with the names of the
    classes as its words, in `template`. The split is `test`, or else `val`, or else the first. With `flip`, an image
    and its mirror image are answered together.
    `view` replaces the model's preprocessing: other settings, or any callable from a PIL image to a tensor.
    `real` is a file of ReaL labels, `wordnet_ids` one with the WordNet id of each output, `mappings` ObjectNet's
    folder; what a task brings is found by itself. The seed is of the calibration.
    """
    validate("seed", Seed, seed)
    opened = open_dataset(data)
    place = fspath(data) if isinstance(data, str | PathLike) else ""
    classifier = with_task_preprocess(classifier_of(model, opened.classes, template, flip=flip), data, preprocess)
    name = chosen_split(opened, split)
    mappings = extra_file(place, "mappings") or mappings_beside(place) if mappings is None else Path(mappings)
    space = space_for(opened.classes, classifier.model, ids=wordnet_ids, mappings=mappings)
    real_file = extra_file(place, "real") if real is None else Path(real)
    labels = None if real_file is None else read_real(real_file)
    if labels is not None and not space.has_imagenet:
        raise DataError("ReaL labels are classes of ImageNet-1k, and the model does not have all of them")
    answers = answers_of(classifier, opened.splits[name], space, batch_size=batch_size, track=track)
    dev = None
    if name == "test" and "val" in opened.splits:
        dev = answers_of(classifier, opened.splits["val"], space, batch_size=batch_size, track=track)
    keys = map(opened.splits[name].key, answers.numbers.tolist())
    right_by_real = None if labels is None else real_answers(keys, answers.imagenet, labels)[1]
    temperature = classifier.model.meta.temperature
    return Evaluation(
        data=opened.name,
        model=classifier.name,
        split=name,
        part="the whole dataset" if len(opened.splits) == 1 else f"the split {name!r}",
        space=space,
        measures=measures_of(answers, space, temperature),
        among_all=100.0 * float(answers.right_among_all.mean()),
        real=None if right_by_real is None else 100.0 * float(right_by_real.mean()),
        real_count=0 if right_by_real is None else len(right_by_real),
        intervals=intervals(answers, right_by_real, temperature, seed=seed),
        calibration=calibration(answers, temperature, dev, "the split 'val'", seed=seed),
        unreadable=answers.unreadable,
        left_out=answers.left_out,
        notes=(*opened.notes, *training_notes(classifier.name, place, name)),
        classifier=classifier,
        source=opened.splits[name],
    )


def classifier_of(
    model: Encoder | Model | str | Path, classes: tuple[str, ...], template: str | None, *, flip: bool
) -> Classifier:
    """The model with its own head, or without one with the names of the classes as words."""
    encoder = model if isinstance(model, Encoder) else Encoder(model)
    if isinstance(encoder, Classifier) and template is None:
        return encoder
    if encoder.model.config.num_classes and template is not None:
        raise ConfigError(
            f"{argument('template')} is for a CLIP or SigLIP without a head of its own, and this model has one"
        )
    words = None if encoder.model.config.num_classes else classes
    classifier = Classifier(
        encoder.model, device=encoder.device, engine=encoder.engine, flip=flip, labels=words, template=template
    )
    classifier.name = encoder.name
    return classifier.with_preprocess(encoder.preprocess)


def space_for(classes: tuple[str, ...], model: Model, *, ids: str | Path | None, mappings: Path | None) -> LabelSpace:
    total = model.config.num_classes
    return label_space(
        classes,
        labels=model.meta.labels,
        total=total,
        ids=None if ids is None else read_ids(Path(ids), total),
        groups=None if mappings is None else read_objectnet(mappings),
    )


def view_json(classifier: Classifier) -> Any:
    """The settings of the view, or the name of the callable that makes it."""
    view = classifier.preprocess
    return view.to_json() if isinstance(view, Preprocess) else getattr(view, "__qualname__", type(view).__qualname__)


def chosen_split(data: Dataset, wanted: str | None) -> str:
    if wanted is not None:
        return next(iter(data.only(wanted).splits))
    return usual_split(data.splits)


def usual_split(names: Iterable[str]) -> str:
    """What is taken of these splits unless one is named."""
    held = list(names)
    return next((name for name in SPLITS if name in held), held[0])


def training_notes(model: str, data: str, split: str) -> tuple[str, ...]:
    """That the model was trained on images that are measured, where the folder of its run says so."""
    found = run_facts(locate(model), data) if split == "train" and Path(model).expanduser().is_dir() else None
    if found is None:
        return ()
    folder, run = found
    return (
        f"the model was trained on {run.get('training_images')} of these images; "
        f"for its accuracy on those held out see {folder / 'report.html'}",
    )


def measures_of(answers: Answers, space: LabelSpace, temperature: float) -> Measures:
    """The measures over the classes of the space, with the probabilities that the model gives."""
    tally = Tally(len(space.classes), mistakes=SHOWN_MISTAKES)
    for rows, logits in answers.pieces():
        labels, numbers = torch.from_numpy(answers.labels[rows]), torch.from_numpy(answers.numbers[rows])
        tally.add(logits / temperature, labels, numbers)
    return tally.measures()


def intervals(
    answers: Answers, real: NDArray[np.bool_] | None, temperature: float, *, seed: int
) -> dict[str, Interval]:
    """The interval of each number that has one, by its name in reports."""
    confidence, right, _ = confidences(answers, temperature)
    bins = bin_numbers(confidence)

    def error(drawn: NDArray[np.float64]) -> float:
        weights = drawn / drawn.sum()
        return calibration_error(bins, weights * confidence, weights * right)

    counts, correct = np.bincount(answers.labels), np.bincount(answers.labels, right).astype(np.int64)
    found = {
        "top1": share_interval(right),
        "top5": share_interval(among_best(answers, 5)),
        "mean_per_class": class_mean_interval(correct, counts),
        "top1_among_all_outputs": share_interval(answers.right_among_all),
        "calibration_error": bootstrap(error, len(answers), seed=seed),
    }
    return found if real is None else found | {"real": share_interval(real)}


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


def save_calibrated(evaluation: Evaluation, folder: Path) -> None:
    """Write the model, with its own view, and the fitted temperature, which every later prediction uses."""
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
    if evaluation.classifier.model.meta.score_function == "sigmoid":
        raise DataError(
            f"{folder}: not written, as the temperature is of a softmax, and this model answers by sigmoids"
        )
    if evaluation.restricted:
        raise DataError(
            f"{folder}: not written, as the temperature was fitted with {evaluation.space.competing} of the model's "
            f"{evaluation.space.total} outputs; evaluate on all its classes"
        )
    model, meta = evaluation.classifier.model, evaluation.classifier.model.meta
    try:
        model.meta = meta.replace(temperature=fitted.temperature)
        save(model, folder)
    finally:
        model.meta = meta
