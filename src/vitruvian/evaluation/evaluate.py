"""Evaluate a model on a dataset, with confidence intervals, calibration and ReaL labels."""

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
from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, Source
from vitruvian.data.transform import Transform
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation.calibration import Calibration, bin_numbers, calibration, calibration_error, confidences
from vitruvian.evaluation.dataset_logits import DatasetLogits, compute_logits
from vitruvian.evaluation.label_spaces import (
    LabelSpace,
    label_space,
    mappings_beside,
    read_ids,
    read_objectnet,
    read_real,
    score_real,
)
from vitruvian.evaluation.metrics import (
    LEVEL,
    SHOWN_MISTAKES,
    Counts,
    Interval,
    Measures,
    Tally,
    accuracy_interval,
    bootstrap,
    class_mean_interval,
    ranks,
)
from vitruvian.inference import Classifier, Encoder
from vitruvian.model.build import ImageModel, Model
from vitruvian.progress import Track, no_tracking
from vitruvian.settings import Seed, validate
from vitruvian.tasks import extra_file
from vitruvian.weights.load import locate, run_facts
from vitruvian.weights.save import save

# n images, C classes of the label space

SPLITS = ("test", "val")
"""The split to evaluate by default: the first of these that exists, else the first of the dataset."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of `evaluate`; accuracies in percent."""

    data: str
    model: str
    split: str
    part: str
    """Description of the images."""
    space: LabelSpace
    measures: Measures
    among_all: float
    """Top-1 if all outputs of the model compete, including those that mean no class of the data."""
    real: float | None
    real_count: int
    """Number of images with a ReaL label."""
    intervals: dict[str, tuple[float, float]]
    """95% intervals by the names in `to_json`."""
    calibration: Calibration
    unreadable: list[Unreadable]
    left_out: int
    """Number of images of classes that the model does not have."""
    notes: tuple[str, ...]
    """Remarks on the dataset, and whether the model was trained on these images."""
    classifier: Classifier
    source: Source

    @property
    def restricted(self) -> bool:
        """Whether the model has outputs that mean no class of the data."""
        return self.space.competing < self.space.total

    def to_json(self) -> dict[str, Any]:
        """The evaluation as a JSON object, with the nonzero confusions as [label, prediction, images]."""
        measures, space = self.measures, self.space
        return {
            "data": self.data,
            "model": self.model,
            "split": self.split,
            "preprocess": preprocess_json(self.classifier),
            "flip": self.classifier.flip,
            **measures.scalars(),
            "top1_among_all_outputs": self.among_all,
            "real": self.real,
            "real_count": self.real_count,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "interval_percent": LEVEL,
            "calibration": self.calibration.to_json(),
            "label_space": {"matched_by": space.about, "outputs": space.total, "competing": space.competing},
            "unreadable": dict(self.unreadable),
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
    """Evaluate a model on one split of a dataset; the numbers are those of `vit evaluate`.

    Args:
        data: Anything `vit evaluate` accepts, a `torch.utils.data.Dataset` or a Hugging Face dataset.
        model: A file, directory, published name, model or Classifier. A CLIP or SigLIP is evaluated zero-shot with the
            names of the classes.
        template: Prompt template for zero-shot evaluation.
        flip: Average the logits of each image and its mirror image.
        split: By default `test`, else `val`, else the first split.
        preprocess: Replaces the model's preprocessing: settings, or any callable from a PIL image to a tensor.
        real: A file of ReaL labels. The files of a known task are found without this.
        wordnet_ids: A file with the WordNet id of each output.
        mappings: ObjectNet's directory of mappings.
        seed: Random seed for the bootstrap and the choice of calibration images.
        batch_size: Number of images per batch.
        track: Wraps the iterator over images to show progress.

    Raises:
        DataError: The data cannot be read, or its classes do not match the model's.
        VitruvianError: The model cannot be loaded, or produced NaN or infinite outputs.
    """
    validate("seed", Seed, seed)
    opened = open_dataset(data)
    path = fspath(data) if isinstance(data, str | PathLike) else ""
    classifier = classifier_of(model, opened.classes, template, flip=flip).with_task_preprocess(data, preprocess)
    name = chosen_split(opened, split)
    mappings = extra_file(path, "mappings") or mappings_beside(path) if mappings is None else Path(mappings)
    space = space_for(opened.classes, classifier.model, ids=wordnet_ids, mappings=mappings)
    real_file = extra_file(path, "real") if real is None else Path(real)
    labels = None if real_file is None else read_real(real_file)
    if labels is not None and not space.has_imagenet:
        raise DataError("ReaL labels need a model with all classes of ImageNet-1k")
    outputs = compute_logits(classifier, opened.splits[name], space, batch_size=batch_size, track=track)
    dev = None
    if name == "test" and "val" in opened.splits:
        dev = compute_logits(classifier, opened.splits["val"], space, batch_size=batch_size, track=track)
    keys = map(opened.splits[name].key, outputs.indices.tolist())
    right_by_real = None if labels is None else score_real(keys, outputs.imagenet, labels)[1]
    temperature = classifier.model.meta.temperature
    return Evaluation(
        data=opened.name,
        model=classifier.name,
        split=name,
        part="the whole dataset" if len(opened.splits) == 1 else f"the split {name!r}",
        space=space,
        measures=measures_of(outputs, space, temperature),
        among_all=100.0 * float(outputs.right_among_all.mean()),
        real=None if right_by_real is None else 100.0 * float(right_by_real.mean()),
        real_count=0 if right_by_real is None else len(right_by_real),
        intervals=intervals(outputs, right_by_real, temperature, seed=seed),
        calibration=calibration(outputs, temperature, dev, "the split 'val'", seed=seed),
        unreadable=outputs.unreadable,
        left_out=outputs.left_out,
        notes=(*opened.notes, *training_notes(classifier.name, path, name)),
        classifier=classifier,
        source=opened.splits[name],
    )


def classifier_of(
    model: Encoder | Model | str | Path, classes: tuple[str, ...], template: str | None, *, flip: bool
) -> Classifier:
    """A classifier with the model's own head, or for zero-shot evaluation with the names of the classes."""
    encoder = model if isinstance(model, Encoder) else Encoder(model)
    if isinstance(encoder, Classifier) and template is None:
        return encoder
    if encoder.model.config.num_classes and template is not None:
        raise ConfigError(
            f"{argument('template')} is for a CLIP or SigLIP without a classification head; this model has one"
        )
    words = None if encoder.model.config.num_classes else classes
    classifier = Classifier(
        encoder.model, device=encoder.device, engine=encoder.engine, flip=flip, labels=words, template=template
    )
    classifier.name = encoder.name
    return classifier.with_preprocess(encoder.preprocess)


def space_for(
    classes: tuple[str, ...], model: ImageModel, *, ids: str | Path | None, mappings: Path | None
) -> LabelSpace:
    total = model.config.num_classes
    return label_space(
        classes,
        labels=model.meta.labels,
        total=total,
        ids=None if ids is None else read_ids(Path(ids), total),
        groups=None if mappings is None else read_objectnet(mappings),
    )


def preprocess_json(classifier: Classifier) -> Any:
    """The preprocessing settings, or the name of the callable."""
    used = classifier.preprocess
    return used.to_json() if isinstance(used, Preprocess) else getattr(used, "__qualname__", type(used).__qualname__)


def chosen_split(data: Dataset, split: str | None) -> str:
    """The name of the split that is asked for, or of the default one. Raises DataError if it does not exist."""
    return default_split(data.splits) if split is None else next(iter(data.only(split).splits))


def default_split(names: Iterable[str]) -> str:
    available = list(names)
    return next((name for name in SPLITS if name in available), available[0])


def training_notes(model: str, data: str, split: str) -> tuple[str, ...]:
    """A warning if the directory of the model's run shows that it was trained on the evaluated images."""
    facts = run_facts(locate(model), data) if split == "train" and Path(model).expanduser().is_dir() else None
    if facts is None:
        return ()
    folder, run = facts
    return (
        f"the model was trained on {run.get('training_images')} of these images; "
        f"for its validation accuracy see {folder / 'report.html'}",
    )


def measures_of(outputs: DatasetLogits, space: LabelSpace, temperature: float) -> Measures:
    tally = Tally(len(space.classes), mistakes=SHOWN_MISTAKES)
    for rows, logits in outputs.pieces():
        labels, indices = torch.from_numpy(outputs.labels[rows]), torch.from_numpy(outputs.indices[rows])
        tally.add(logits / temperature, labels, indices)
    return tally.measures()


def intervals(
    outputs: DatasetLogits, real: NDArray[np.bool_] | None, temperature: float, *, seed: int
) -> dict[str, Interval]:
    """Confidence intervals by the names of `Evaluation.to_json`."""
    confidence, right, _ = confidences(outputs, temperature)
    bins = bin_numbers(confidence)

    def error(drawn: NDArray[np.float64]) -> float:
        weights = drawn / drawn.sum()
        return calibration_error(bins, weights * confidence, weights * right)

    counts, correct = np.bincount(outputs.labels), np.bincount(outputs.labels, right).astype(np.int64)
    ends = {
        "top1": accuracy_interval(right),
        "top5": accuracy_interval(is_among_best(outputs, 5)),
        "mean_per_class": class_mean_interval(correct, counts),
        "top1_among_all_outputs": accuracy_interval(outputs.right_among_all),
        "calibration_error": bootstrap(error, len(outputs), seed=seed),
    }
    return ends if real is None else ends | {"real": accuracy_interval(real)}


def is_among_best(outputs: DatasetLogits, count: int) -> NDArray[np.bool_]:
    """(n,) Whether the label is among the `count` best predictions."""
    hits = [ranks(logits, torch.from_numpy(outputs.labels[rows])) < count for rows, logits in outputs.pieces()]
    return np.asarray(torch.cat(hits))


def class_rows(measures: Measures, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    counts, correct = measures.class_counts.tolist(), measures.class_correct.tolist()
    return [{"class": name, "images": n, "right": right} for name, n, right in zip(classes, counts, correct)]


def without_zeros(confusion: Counts) -> list[list[int]]:
    rows, columns = np.nonzero(confusion)
    triples: list[list[int]] = np.stack([rows, columns, confusion[rows, columns]], axis=1).tolist()
    return triples


def save_calibrated(evaluation: Evaluation, folder: Path) -> None:
    """Save the model with its own preprocessing and the fitted temperature, which every later prediction uses.

    Raises:
        DataError: No temperature was fitted, or it cannot be used.
    """
    fitted, model = evaluation.calibration, evaluation.classifier.torch_model
    if fitted.temperature is None or fitted.before is None or fitted.after is None:
        raise DataError(f"not written, no temperature fitted: {fitted.obstacle}", where=folder)
    if fitted.after.loss >= fitted.before.loss:
        raise DataError(
            f"not written, temperature {fitted.temperature:.3f} does not help: cross-entropy {fitted.before.loss:.4f} "
            f"becomes {fitted.after.loss:.4f} on images that it was not fitted on",
            where=folder,
        )
    if model.meta.score_function == "sigmoid":
        raise DataError("not written, temperatures are for models with a softmax; this one has sigmoids", where=folder)
    if evaluation.restricted:
        raise DataError(
            f"not written, the temperature was fitted with {evaluation.space.competing} of the model's "
            f"{evaluation.space.total} outputs",
            where=folder,
            hint="evaluate on all its classes",
        )
    meta = model.meta
    try:
        model.meta = meta.replace(temperature=fitted.temperature)
        save(model, folder)
    finally:
        model.meta = meta
