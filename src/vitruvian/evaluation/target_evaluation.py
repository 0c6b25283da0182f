"""Evaluate a model of several labels or numbers on a dataset; outputs and targets are matched by name."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from vitruvian.data.decode import Unreadable
from vitruvian.data.formats import open_dataset
from vitruvian.data.sources import Dataset, Source
from vitruvian.errors import DataError
from vitruvian.evaluation.metrics import LEVEL, Interval
from vitruvian.evaluation.target_metrics import TargetMeasures, measure_outputs
from vitruvian.inference import Classifier
from vitruvian.progress import Track
from vitruvian.targets import KINDS, Target
from vitruvian.text import brief

# n images, K outputs of the model, C of them in the data


@dataclass(frozen=True, kw_only=True)
class TargetEvaluation:
    """The result of `evaluate` for several labels or numbers."""

    data: str
    model: str
    split: str
    measures: TargetMeasures
    unreadable: list[Unreadable]
    notes: tuple[str, ...]
    classifier: Classifier
    source: Source
    seed: int
    left_out: int = 0  # every image counts

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        return self.measures.intervals(self.seed)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics of all images by name."""
        return {name: value for name, value in self.measures.scalars().items() if name in self.intervals}

    def fit(self) -> Target:
        """The model's target with thresholds or margins fitted to these images."""
        if self.measures.names != self.classifier.labels:
            raise DataError(f"only {brief(self.measures.names)} can be fitted", where=self.data, hint="add the others")
        return replace(self.measures, fitted=False).fit()

    @property
    def summary(self) -> str:
        measures, row = self.measures, KINDS[self.measures.target.kind]
        return f"{measures.count:,} images of the split {self.split!r}, {row.title}: {brief(measures.names)}"

    def to_json(self) -> dict[str, Any]:
        per_output = self.measures.per_output().items()
        outputs = {name: [None if np.isnan(v) else float(v) for v in values] for name, values in per_output}
        return {
            "data": self.data,
            "model": self.model,
            "split": self.split,
            "target": self.measures.target.kind,
            "count": self.measures.count,
            **self.numbers,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "interval_percent": LEVEL,
            "outputs": {"name": list(self.measures.names), **outputs},
            "unreadable": dict(self.unreadable),
            "notes": list(self.notes),
        }


def open_for(data: object, target: Target, labels: tuple[str, ...]) -> Dataset:
    """The dataset with the target of a model: columns called like its outputs if there are any, else the labels."""
    columns = f"{target.kind}:{','.join(labels)}" if target.kind in ("multi", "number") else target.kind
    try:
        return open_dataset(data, target=columns, accepts=(target.kind,))
    except DataError:
        return open_dataset(data, target=target.kind, accepts=(target.kind,))


def evaluate_targets(
    data: object, classifier: Classifier, *, split: str | None, seed: int, batch_size: int, track: Track
) -> TargetEvaluation:
    """Evaluate a model on one split of a dataset.

    Raises:
        DataError: The data cannot be read, or has labels, numbers or levels that the model does not know.
    """
    target, labels = classifier.model.meta.target, classifier.labels
    opened = open_for(data, target, labels)
    name = next((n for n in ("test", "val") if n in opened.splits), next(iter(opened.splits)))
    name = name if split is None else next(iter(opened.only(split).splits))
    source = opened.splits[name]
    assert source.targets is not None
    missing = [label for label in source.classes if label not in labels]
    if missing or source.targets.levels != target.levels:
        what = f"levels {brief(source.targets.levels)}" if not missing else f"{brief(missing)} in the data"
        known = target.levels or labels
        raise DataError(f"the model does not know {what}; it predicts {brief(known)}", where=opened.name)
    columns = [labels.index(label) for label in source.classes]
    chosen = {
        key: tuple(getattr(target, key)[column] for column in columns)
        for key in ("thresholds", "mean", "std", "margins")
        if getattr(target, key)
    }
    unreadable: list[Unreadable] = []
    parts = list(
        classifier.run_source(
            classifier.logits, source, np.arange(len(source)), unreadable=unreadable, batch_size=batch_size, track=track
        )
    )
    indices = np.array([index for part, _ in parts for index in part], np.int64)
    outputs = np.concatenate([values.numpy()[:, columns] for _, values in parts])
    measures = measure_outputs(
        outputs,
        np.asarray(source.labels())[indices],
        indices,
        source.targets,
        target.replace(**chosen),
        fitted=bool(target.thresholds or target.margins),
    )
    return TargetEvaluation(
        data=opened.name,
        model=classifier.name,
        split=name,
        measures=measures,
        unreadable=unreadable,
        notes=opened.notes,
        classifier=classifier,
        source=source,
        seed=seed,
    )
