"""Evaluate a model on a dataset, with confidence intervals, calibration and ReaL labels."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vitruvian.config import DEFAULT_BATCH_SIZE, Preprocess
from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_dataset, open_images
from vitruvian.data.groups import values_by
from vitruvian.data.sources import Concat, Dataset, Source, first_samples
from vitruvian.data.transform import Transform
from vitruvian.errors import ConfigError, DataError, argument
from vitruvian.evaluation import label_spaces, metrics
from vitruvian.evaluation.calibration import (
    SAVED_ON,
    Calibration,
    Rejection,
    bin_numbers,
    calibration,
    calibration_error,
    calibration_split,
    fit_rejection,
)
from vitruvian.evaluation.conformal import ConformalSets, check_coverage, fit_sets, fit_target_sets
from vitruvian.evaluation.corruptions import CorruptionResult, check_kinds, measure_corruptions
from vitruvian.evaluation.label_spaces import DatasetLogits, LabelSpace
from vitruvian.evaluation.metrics import ImageMeasures, Interval, accuracy_interval
from vitruvian.evaluation.target_metrics import TargetMeasures, measure_outputs
from vitruvian.inference import Classifier, Encoder
from vitruvian.model.build import Model
from vitruvian.progress import Track, no_tracking
from vitruvian.report.html import notebook
from vitruvian.settings import Seed, validate
from vitruvian.targets import KINDS, LOWER_IS_BETTER, Target
from vitruvian.tasks import extra_file
from vitruvian.text import brief
from vitruvian.weights.load import locate, run_facts
from vitruvian.weights.save import save


@dataclass(frozen=True, slots=True)
class Slice:
    """The images of one value of a column, with the most important metric."""

    name: str
    count: int
    value: float  # NaN if undefined, such as the mAP of images without labels
    interval: Interval


def measure_slices(measures: ImageMeasures, values: Sequence[str], by: str, seed: int) -> tuple[Slice, ...]:
    """A slice for each distinct value among those of all images of the source; worst first (ties: larger first).

    Raises:
        DataError: There is only one value.
    """
    names, which = np.unique(np.array([values[i] for i in measures.indices.tolist()], object), return_inverse=True)
    if len(names) < 2:
        raise DataError(f"{argument('by', by)}: all {measures.count:,} images have the value {names[0]!r}")
    slices = []
    for index, name in enumerate(names):
        part = measures.part(np.flatnonzero(which == index))
        value = part.scalars().get(measures.metric, np.nan)
        slices.append(Slice(str(name), part.count, value, part.intervals(seed)[measures.metric]))
    worst = -1 if measures.metric in LOWER_IS_BETTER else 1
    return tuple(sorted(slices, key=lambda part: (np.isnan(part.value), worst * part.value, -part.count)))


# n images, C classes of the label space

SPLITS = ("test", "val")  # the default split is the first of these that exists, else the first of the dataset


NAMES = (
    metrics.MEASURE_NAMES
    | metrics.TARGET_NAMES
    | {
        "real": "ReaL accuracy",
        "top1_among_all_outputs": "top-1 among all outputs",
        "top5_among_all_outputs": "top-5 among all outputs",
        "calibration_error": "calibration error",
    }
)
"""Display names of the numbers that have an interval."""


def metric_table(evaluation: "Evaluation | TargetEvaluation") -> tuple[Sequence[str], list[Sequence[str]]]:
    """Headings, and a row for each metric with its interval."""
    unit, number = (">value", "{:.4g}") if isinstance(evaluation, TargetEvaluation) else (">percent", "{:.2f}")
    intervals = evaluation.intervals
    cells = [(NAMES[k], *map(number.format, (value, *intervals[k]))) for k, value in evaluation.numbers.items()]
    rows: list[Sequence[str]] = [(name, value, f"{low} to {high}") for name, value, low, high in cells]
    return ("", unit, f"{metrics.LEVEL:g}% interval"), rows


@dataclass(frozen=True, kw_only=True)
class EvaluatedImages:
    """Fields that all evaluations share: the model, the images, slices and prediction sets."""

    data: str
    model: str
    split: str
    unreadable: list[Unreadable]
    left_out: int = 0  # number of images of classes that the model does not have
    notes: tuple[str, ...]  # remarks on the dataset, and whether the model was trained on these images
    classifier: Classifier
    source: Source
    by: str  # the column of the slices
    slices: tuple[Slice, ...]  # the most important metric in each part of the images, the worst first
    sets: ConformalSets | None
    corruptions: CorruptionResult | None
    seed: int

    def shared_json(self) -> dict[str, Any]:
        """The part of `to_json` that all evaluations have."""
        return {
            "data": self.data,
            "model": self.model,
            "split": self.split,
            "interval_percent": metrics.LEVEL,
            "by": self.by,
            "slices": [
                asdict(part) | {"value": finite(part.value), "interval": list(map(finite, part.interval))}
                for part in self.slices
            ],
            "sets": None if self.sets is None else asdict(self.sets),
            "corruptions": None if self.corruptions is None else asdict(self.corruptions),
            "unreadable": dict(self.unreadable),
            "notes": list(self.notes),
        }


def finite(value: float) -> float | None:
    """The value as JSON can hold it: None for NaN."""
    return None if np.isnan(value) else float(value)


@dataclass(frozen=True, kw_only=True)
class Evaluation(EvaluatedImages):
    """The result of `evaluate`; accuracies in percent."""

    part: str  # description of the images
    space: LabelSpace
    measures: metrics.Measures
    right_by_real: NDArray[np.bool_] | None = field(repr=False)  # of the images with a ReaL label
    calibration: Calibration
    outputs: DatasetLogits = field(repr=False)  # the logits of each image
    rejection: Rejection | None

    @cached_property
    def right(self) -> dict[str, NDArray[np.bool_]]:
        """Which images are right if all outputs compete, including those of no class of the data, or by ReaL labels."""
        rank = self.outputs.rank_among_all
        right = {"top1_among_all_outputs": rank < 1, "top5_among_all_outputs": rank < 5}
        return right if self.right_by_real is None else right | {"real": self.right_by_real}

    @property
    def accuracies(self) -> dict[str, float]:
        """The accuracies of `right`."""
        return {name: 100.0 * float(right.mean()) for name, right in self.right.items()}

    @property
    def real(self) -> float | None:
        return self.accuracies.get("real")

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95% intervals by the names in `to_json`."""
        bins = bin_numbers(self.measures.probabilities)
        gaps = self.measures.right - self.measures.probabilities

        def error(drawn: NDArray[np.float64]) -> float:
            return calibration_error(bins, drawn / drawn.sum() * gaps)

        ends = self.measures.intervals() | {name: accuracy_interval(right) for name, right in self.right.items()}
        return ends | {"calibration_error": metrics.bootstrap(error, self.measures.count, seed=self.seed)}

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that have an interval, in the order of display."""
        mapped = ["top1_among_all_outputs", "top5_among_all_outputs"] if self.space.is_mapped else []
        names = [*mapped, "top1", *(["top5"] if self.measures.is_top5_meaningful else []), "mean_per_class", "real"]
        names += ["top1_among_all_outputs"] if self.restricted and not mapped else []
        numbers = self.measures.scalars() | self.accuracies | {"calibration_error": self.calibration.now.error}
        return {name: numbers[name] for name in (*names, "calibration_error") if name in numbers}

    @property
    def summary(self) -> str:
        """Images, classes and the way of evaluation in one line."""
        space = self.space
        line = f"{self.measures.count:,} images of {self.part}, {len(space.classes):,} classes"
        line += f" matched with the model's outputs by {space.about}"
        if self.restricted:
            line += f"; restricted to {space.competing:,} of the model's {space.total:,} outputs"
        return line + ("; averaged with the mirrored image" if self.classifier.flip else "")

    def _repr_html_(self) -> str:
        return notebook(self.summary, *metric_table(self), self.notes)

    @property
    def restricted(self) -> bool:
        """Whether the model has outputs that mean no class of the data."""
        return self.space.competing < self.space.total

    @property
    def headline(self) -> dict[str, float]:
        """Top-1 and top-5 as papers report them: among all outputs for classes by a mapping, as those of ObjectNet."""
        numbers, suffix = self.measures.scalars() | self.accuracies, "_among_all_outputs" * self.space.is_mapped
        return {name: numbers[f"{name}{suffix}"] for name in ("top1", "top5")}

    def to_json(self) -> dict[str, Any]:
        """The evaluation as a JSON object, with the nonzero confusions as [label, prediction, images]."""
        measures, space, used = self.measures, self.space, self.classifier.preprocess
        classes = zip(space.classes, measures.class_counts.tolist(), measures.class_correct.tolist())
        confusion = None
        if measures.confusion is not None:
            cells = np.nonzero(measures.confusion)
            confusion = np.column_stack([*cells, measures.confusion[cells]]).tolist()
        if isinstance(used, Preprocess):
            preprocess: Any = used.to_json()
        else:
            preprocess = getattr(used, "__qualname__", type(used).__qualname__)
        return self.shared_json() | {
            "preprocess": preprocess,
            "flip": self.classifier.flip,
            **measures.scalars(),
            "headline": self.headline,
            **({"real": None} | self.accuracies),
            "real_count": len(self.right.get("real", ())),
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "calibration": asdict(self.calibration),
            "unknown": None if self.rejection is None else self.rejection.to_json(),
            "label_space": {"matched_by": space.about, "outputs": space.total, "competing": space.competing},
            "left_out": self.left_out,
            "classes": [{"class": name, "images": count, "right": right} for name, count, right in classes],
            "confusion": confusion,
        }


@dataclass(frozen=True, kw_only=True)
class TargetEvaluation(EvaluatedImages):
    """The result of `evaluate` for several labels or numbers."""

    measures: TargetMeasures

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        return self.measures.intervals(self.seed)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics of all images by name."""
        return {name: value for name, value in self.measures.scalars().items() if name in self.intervals}

    def fit(self) -> dict[str, Any]:
        """Changes to the model's metadata: thresholds, margins and prediction sets fitted to these images."""
        if self.measures.names != self.classifier.labels:
            raise DataError(f"only {brief(self.measures.names)} can be fitted", where=self.data, hint="add the others")
        target = replace(self.measures, fitted=False).fit()
        if self.sets is None:
            return {"target": target}
        share = self.sets.requested / 100
        if target.margins:
            return {"target": target.replace(margins=tuple(-t for t in self.sets.thresholds), coverage=share)}
        return {"target": target, "coverage": share, "set_threshold": self.sets.threshold}

    @property
    def summary(self) -> str:
        measures, row = self.measures, KINDS[self.measures.target.kind]
        return f"{measures.count:,} images of the split {self.split!r}, {row.title}: {brief(measures.names)}"

    def _repr_html_(self) -> str:
        return notebook(self.summary, *metric_table(self), self.notes)

    def to_json(self) -> dict[str, Any]:
        per_output = self.measures.per_output().items()
        outputs = {name: list(map(finite, values)) for name, values in per_output}
        return self.shared_json() | {
            "target": self.measures.target.kind,
            "count": self.measures.count,
            **self.numbers,
            "intervals": {name: list(self.intervals[name]) for name in self.numbers},
            "outputs": {"name": list(self.measures.names), **outputs},
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
    by: str = "",
    coverage: float | None = None,
    corruptions: Sequence[str] = (),
    sample: int = 0,
    unknown: str | Path | None = None,
    seed: int = 0,
    batch_size: int = DEFAULT_BATCH_SIZE,
    track: Track = no_tracking,
) -> Evaluation | TargetEvaluation:
    """Evaluate a model on one split of a dataset; the numbers are those of `vit evaluate`.

    A model of several labels or numbers has other metrics, in a TargetEvaluation.

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
        by: Also measure slices: a column of the manifest, or a regular expression on the path.
        coverage: Also fit conformal prediction sets that contain the label with this probability, such as 0.95.
        corruptions: Also measure these kinds of ImageNet-C's corruptions at 5 strengths; ["all"] for all 15.
        sample: Corrupt only this many images, classes balanced; 0 for all.
        unknown: Also fit a threshold that rejects images such as those in this folder or dataset, of none of the
            model's classes.
        seed: Random seed for the bootstrap and the choice of calibration images.
        batch_size: Number of images per batch.
        track: Wraps the iterator over images to show progress.

    Raises:
        DataError: The data cannot be read, or its classes do not match the model's.
        VitruvianError: The model cannot be loaded, or produced NaN or infinite outputs.
    """
    validate("seed", Seed, seed)
    if coverage is not None:
        check_coverage(coverage)
    kinds = check_kinds(corruptions)
    encoder = model if isinstance(model, Encoder) else Encoder(model)
    target = encoder.model.meta.target
    if target.kind != "single":
        for option, value in {"unknown": unknown, "real": real, "template": template}.items():
            if value:
                raise ConfigError(f"{argument(option)} is for models of one class per image")
    opened = open_for(data, target, encoder.model.meta.labels or ())
    classifier = classifier_of(encoder, opened.classes, template, flip=flip).with_task_preprocess(data, preprocess)
    name = default_split(opened.splits) if split is None else next(iter(opened.only(split).splits))
    source = opened.splits[name]
    values = values_by(source, by) if by else []  # before the model runs
    run: Any = {"batch_size": batch_size, "track": track}
    facts: Any = {"data": opened.name, "model": classifier.name, "split": name, "classifier": classifier}
    path, notes = fspath(data) if isinstance(data, str | PathLike) else "", list(opened.notes)
    if name == "train" and Path(classifier.name).expanduser().is_dir():
        trained = run_facts(locate(classifier.name), path)
        if trained is not None:
            notes.append(
                f"the model was trained on {trained[1].get('training_images')} of these images; "
                f"for its validation accuracy see {trained[0] / 'report.html'}"
            )
    facts |= {"source": source, "by": by, "seed": seed, "notes": tuple(notes)}

    def corrupt(measure: Callable[[Classifier, Source], ImageMeasures]) -> CorruptionResult | None:
        part = source if sample == 0 else first_samples(source, min(sample, len(source)), seed)
        return measure_corruptions(classifier, part, kinds, measure, seed=seed) if kinds else None

    if target.kind != "single":
        measured, unreadable = run_targets(classifier, source, **run)
        return TargetEvaluation(
            measures=measured,
            unreadable=unreadable,
            corruptions=corrupt(lambda model, part: run_targets(model, part, **run)[0]),
            slices=measure_slices(measured, values, by, seed) if by else (),
            sets=None if coverage is None else fit_target_sets(measured, coverage),
            **facts,
        )
    meta, total = classifier.model.meta, classifier.model.config.num_classes
    others = None if unknown is None else Concat(list(open_images(unknown).values()), name=str(unknown))
    if mappings is None:
        mappings = extra_file(path, "mappings") or label_spaces.mappings_beside(path)
    space = label_spaces.label_space(
        opened.classes,
        labels=meta.labels,
        total=total,
        ids=None if wordnet_ids is None else label_spaces.read_ids(Path(wordnet_ids), total),
        groups=None if mappings is None else label_spaces.read_objectnet(Path(mappings)),
    )
    real_file = extra_file(path, "real") if real is None else Path(real)
    labels = None if real_file is None else label_spaces.read_real(real_file)
    if labels is not None and not space.has_imagenet:
        raise DataError("ReaL labels need a model with all classes of ImageNet-1k")
    outputs = label_spaces.compute_logits(classifier, source, space, **run)
    dev = None
    if name == "test" and "val" in opened.splits:
        dev = label_spaces.compute_logits(classifier, opened.splits["val"], space, **run)
    keys = map(source.key, outputs.indices.tolist())
    measures, fit = outputs.measures(meta.temperature), calibration_split(outputs, dev, seed=seed)
    calibrated = calibration(outputs, meta.temperature, fit)
    t = calibrated.temperature if calibrated.helps and calibrated.temperature else meta.temperature
    rejection = None
    if others is not None:
        rejection = fit_rejection(classifier, source, others, temperature=t, seed=seed, **run)
    return Evaluation(
        part="the whole dataset" if len(opened.splits) == 1 else f"the split {name!r}",
        space=space,
        measures=measures,
        right_by_real=None if labels is None else label_spaces.score_real(keys, outputs.imagenet, labels),
        calibration=calibrated,
        outputs=outputs,
        slices=measure_slices(measures, values, by, seed) if by else (),
        sets=None if coverage is None else fit_sets(fit, outputs, coverage=coverage, t=t),
        corruptions=corrupt(lambda model, part: label_spaces.compute_logits(model, part, space, **run).measures()),
        rejection=rejection,
        unreadable=outputs.unreadable,
        left_out=outputs.left_out,
        **facts,
    )


def open_for(data: object, target: Target, labels: tuple[str, ...]) -> Dataset:
    """The dataset with the target of a model: columns named like its outputs if there are any, else the labels."""
    if target.kind == "single":
        return open_dataset(data)
    columns = f"{target.kind}:{','.join(labels)}" if target.kind in ("multi", "number") else target.kind
    try:
        return open_dataset(data, target=columns, accepts=(target.kind,))
    except DataError:
        return open_dataset(data, target=target.kind, accepts=(target.kind,))


def run_targets(classifier: Classifier, source: Source, **options: Any) -> tuple[TargetMeasures, list[Unreadable]]:
    """Run a model of several labels or numbers on a source; the metrics, and the images that cannot be read.

    Raises:
        DataError: The source has labels, numbers or levels that the model does not know.
    """
    target, labels = classifier.model.meta.target, classifier.labels
    assert source.targets is not None
    missing = [label for label in source.classes if label not in labels]
    if missing or source.targets.levels != target.levels:
        what = f"levels {brief(source.targets.levels)}" if not missing else f"{brief(missing)} in the data"
        known = target.levels or labels
        raise DataError(f"the model does not know {what}; it predicts {brief(known)}", where=source.name)
    columns = [labels.index(label) for label in source.classes]
    chosen = {
        key: tuple(getattr(target, key)[column] for column in columns)
        for key in ("thresholds", "mean", "std", "margins")
        if getattr(target, key)
    }
    unreadable: list[Unreadable] = []
    rows = np.arange(len(source))
    parts = list(classifier.run_source(classifier.logits, source, rows, unreadable=unreadable, **options))
    indices = np.array([index for part, _ in parts for index in part], np.int64)
    measures = measure_outputs(
        np.concatenate([values.numpy()[:, columns] for _, values in parts]),
        np.asarray(source.labels())[indices],
        indices,
        source.targets,
        target.replace(**chosen),
        fitted=bool(target.thresholds or target.margins),
    )
    return measures, unreadable


def evaluate_classes(data: object, model: Encoder | Model | str | Path, **options: Any) -> Evaluation:
    """`evaluate` for models of one class per image. Raises ConfigError for others."""
    evaluation = evaluate(data, model, **options)
    if isinstance(evaluation, TargetEvaluation):
        raise ConfigError("this is for models of one class per image", where=evaluation.model)
    return evaluation


def classifier_of(
    model: Encoder | Model | str | Path, classes: tuple[str, ...], template: str | None, *, flip: bool
) -> Classifier:
    """A classifier with the model's own head, or for zero-shot evaluation with the names of the classes."""
    encoder = model if isinstance(model, Encoder) else Encoder(model)
    if isinstance(encoder, Classifier) and template is None and (encoder.flip or not flip):
        return encoder
    if encoder.model.config.num_classes and template is not None:
        reason = f"{argument('template')} is for a CLIP or SigLIP without a classification head; this model has one"
        raise ConfigError(reason)
    words = None if encoder.model.config.num_classes else classes
    classifier = Classifier(
        encoder.model, device=encoder.device, engine=encoder.engine, flip=flip, labels=words, template=template
    )
    classifier.name = encoder.name
    return classifier.with_preprocess(encoder.preprocess)


def default_split(names: Iterable[str]) -> str:
    available = list(names)
    return next((name for name in SPLITS if name in available), available[0])


def save_calibrated(evaluation: Evaluation | TargetEvaluation, folder: Path) -> list[str]:
    """Save the model with everything fitted here: temperature, conformal sets and the threshold for unknown images.

    For several labels these are the thresholds, for numbers the margins of their intervals.

    Returns:
        Notes on what was not saved.

    Raises:
        DataError: Nothing was fitted, or it cannot be used.
    """
    model = evaluation.classifier.torch_model
    if isinstance(evaluation, TargetEvaluation):
        save_with(model, folder, **evaluation.fit())
        return []
    fitted, space = evaluation.calibration, evaluation.space
    changes, obstacle, hint = dict[str, Any](), "", ""
    if fitted.temperature is None or fitted.before is None or fitted.after is None:
        obstacle = f"no temperature fitted: {fitted.obstacle}"
    elif not fitted.helps:
        losses = f"cross-entropy {fitted.before.loss:.4f} becomes {fitted.after.loss:.4f}"
        obstacle = f"temperature {fitted.temperature:.3f} does not help: {losses} on images that it was not fitted on"
    else:
        changes["temperature"] = fitted.temperature
    notes = [obstacle] if obstacle else []
    if evaluation.sets is not None:
        changes |= {"coverage": evaluation.sets.requested / 100, "set_threshold": evaluation.sets.threshold}
    if changes and evaluation.restricted:
        obstacle = f"the temperature was fitted with {space.competing} of the model's {space.total} outputs"
        hint = "evaluate on all its classes"
    rejection = evaluation.rejection
    if rejection is not None:
        changes |= {"threshold": rejection.threshold, "threshold_on": SAVED_ON[rejection.chosen]}
    if not changes or hint:
        raise DataError(f"not written, {obstacle}", where=folder, hint=hint)
    save_with(model, folder, None if rejection is None else rejection.head, **changes)
    return notes


def save_with(model: Model, folder: Path, head: nn.Linear | None = None, **changes: Any) -> None:
    """Save the model with changes to its metadata and perhaps another head; the model itself is not changed."""
    before = model.meta, model.head
    try:
        model.meta, model.head = model.meta.replace(**changes), head or model.head
        save(model, folder)
    finally:
        model.meta, model.head = before
