"""The images of a run: data and transforms from the caller, training and validation splits, and their loaders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from vitruvian.cache import scratch_folder
from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.cost import TRAINING_PASSES, multiply_adds
from vitruvian.data.augment import Augment, require_packages, train_transform
from vitruvian.data.columns import CHUNK, read_chunk
from vitruvian.data.formats import open_dataset
from vitruvian.data.loader import Batch, Loader
from vitruvian.data.sources import Concat, Dataset, Source, Subset, first_samples, hold_out
from vitruvian.data.transform import Transform, as_transform
from vitruvian.data.workers import unguarded_script
from vitruvian.errors import ConfigError, TrainingError
from vitruvian.evaluation.features import FeatureSet, compute_features, open_store
from vitruvian.inference import Encoder
from vitruvian.progress import no_tracking, track
from vitruvian.settings import Size
from vitruvian.training.distributed import Processes
from vitruvian.training.recipe import Recipe
from vitruvian.training.run_folder import Run, absolute_data
from vitruvian.weights.load import run_facts

MAX_NAMES = 3
"""Classes that a note names."""
TEST_SEED = 0
"""Seed for holding a test split out of data without one."""
HOLD_OUT_SETTINGS = ("seed", "val_fraction")
"""Settings that decide which images of each class are held out."""


class DataRef:
    """The data of a run, by name or as an object; opened once, when it is first needed."""

    def __init__(self, data: object) -> None:
        self.data = data
        is_name = isinstance(data, str | Path)
        self.name = absolute_data(str(data)) if is_name else ""
        """Name or absolute path for run.json; empty for an object."""
        self.short_name = Path(self.name.rstrip("/*")).stem or ("run" if is_name else "data")

    @classmethod
    def of(cls, data: object) -> DataRef:
        return data if isinstance(data, cls) else cls(data)

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self.data)


@dataclass(frozen=True, slots=True)
class CustomTransforms:
    """Transforms of the caller, which replace the model's preprocessing and the recipe's augmentation."""

    transform: Transform | None = None
    """For evaluation."""
    train_transform: Transform | None = None

    @property
    def names(self) -> list[str]:
        """The arguments that must be passed again to resume."""
        return [name for name in ("transform", "train_transform") if getattr(self, name) is not None]

    def check(self, recipe: Recipe) -> None:
        if self.train_transform is None:
            require_packages()
        elif recipe.resolutions or recipe.train_scale != 1:
            raise TrainingError("resolutions and train_scale cannot be used with train_transform=")

    def check_resume(self, run: Run) -> None:
        """Raise TrainingError unless the run started with the same arguments."""
        before = run.facts.get("transforms", [])
        if self.names != before:
            names = ", ".join(f"{name}=" for name in before) or "no transform of yours"
            raise TrainingError(f"the run started with {names}", where=run.folder, hint="pass the same to resume")
        self.check(run.recipe)

    def notes(self) -> list[str]:
        if self.transform is None:
            return []
        return ["evaluated with your transform=; the saved model has the preprocessing of the recipe instead"]


NO_TRANSFORMS = CustomTransforms()


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The training and validation images of a run."""

    name: str
    train: Source
    validation: Source
    validation_is: str
    """Description of the validation images."""
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    def with_notes(self, *notes: str) -> Splits:
        return replace(self, notes=(*self.notes, *notes))

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "classes": list(self.classes),
            "training images": len(self.train),
            "validation images": len(self.validation),
        }


def split_data(data: object, recipe: Recipe) -> Splits:
    """The training and validation images that a recipe uses.

    Validates on the split `val`, else on `test`, else on a fraction of each class that is held out. A run that selects
    its weights by validation never does so on `test`.
    """
    dataset = DataRef.of(data).dataset
    choose = usual_splits if recipe.validation == "auto" else protocol_splits
    train, validation, validation_is = choose(dataset, recipe)
    splits = Splits(
        name=dataset.name, train=train, validation=validation, validation_is=validation_is, notes=dataset.notes
    )
    if recipe.objective == "labels":
        splits = splits.with_notes(*missing_class_notes(splits))
    if not recipe.max_train_samples:
        return splits
    return replace(splits, train=first_samples(splits.train, recipe.max_train_samples, recipe.seed))


def missing_class_notes(splits: Splits) -> list[str]:
    """A note on classes without training images; none for remote data, whose labels would have to be downloaded."""
    if splits.train.remote or splits.validation.remote:
        return []
    missing = sorted(labels_in(splits.validation) - labels_in(splits.train))
    if not missing:
        return []
    names = ", ".join(repr(splits.classes[label]) for label in missing[:MAX_NAMES])
    more = ", ..." if len(missing) > MAX_NAMES else ""
    subject = "1 class has" if len(missing) == 1 else f"{len(missing):,} classes have"
    return [f"{subject} validation images but no training images: {names}{more}; they will all be misclassified"]


def labels_in(source: Source) -> set[int]:
    """The labels that occur, read in chunks, as there can be many images."""
    labels = source.labels()
    return {int(label) for start in range(0, len(labels), CHUNK) for label in np.unique(read_chunk(labels, start))}


def usual_splits(dataset: Dataset, recipe: Recipe) -> tuple[Source, Source, str]:
    """Training images, validation images and their description, outside the fine-tuning protocol."""
    allowed = ("val",) if recipe.patience > 0 or recipe.final == "best" else ("val", "test")
    train, name = dataset.train, next((name for name in allowed if name in dataset.splits), "")
    if name:
        return train, dataset.splits[name], f"the split {name!r}"
    train, validation = hold_out(train, recipe.val_fraction, recipe.seed)
    return train, validation, f"{recipe.val_fraction:.0%} of each class, held out"


def protocol_splits(dataset: Dataset, recipe: Recipe) -> tuple[Source, Source, str]:
    """Training images, validation images and their description, in a trial of the paper's fine-tuning protocol.

    `dev` trains on all but the dev split, which is `val` or else held out, and never uses the test split. `test`
    trains on both and is evaluated on `test`, or on `val` if there is no `test`. With neither of them, the test split
    is held out as well, the same images for every seed.
    """
    train, test, validation_is = dataset.train, dataset.splits.get("test"), "the split 'test'"
    dev = dataset.splits.get("val")
    if test is None and dev is not None:
        test, dev, validation_is = dev, None, "the split 'val'"
    elif test is None:
        train, test = hold_out(train, recipe.val_fraction, TEST_SEED)
        validation_is = f"{recipe.val_fraction:.0%} of each class, held out for testing"
    validation = test
    if recipe.validation == "dev":
        validation_is = "the split 'val'"
        if dev is None:
            train, dev = hold_out(train, recipe.val_fraction, recipe.seed)
            validation_is = f"{recipe.val_fraction:.0%} of each class, held out for choosing"
        validation = dev
    elif dev is not None:
        train = Concat([train, dev], name=f"{dataset.name} (train and val)")
    return train, validation, validation_is


def leakage_notes(data: str, recipe: Recipe, validation_is: str) -> list[str]:
    """A note for each run (of the weights or the teacher) that held out other images of the same data."""
    if "held out" not in validation_is:  # a split that no run trains on
        return []

    def choice(settings: Any) -> str:
        return ", ".join(f"{key}={settings.get(key)}" for key in HOLD_OUT_SETTINGS)

    notes = []
    for source in filter(None, (recipe.weights, recipe.teacher)):
        folder, facts = run_facts(source, data) or (None, {})
        before, now = choice(facts.get("recipe") or {}), choice(recipe.to_json())
        if folder is None or (facts.get("validation") == validation_is and before == now):
            continue
        notes.append(
            f"{folder} held out other images ({before}; here {now}) and was trained on images that are held out here: "
            "their accuracy will be too high; use the same settings in both runs to avoid it"
        )
    return notes


def fit_workers(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe, without workers if they could not start, and a note about that."""
    line = unguarded_script() if recipe.workers else ""
    if not line:
        return recipe, []
    note = f'workers=0: {line} is outside `if __name__ == "__main__":`, without which no worker process can start'
    return recipe.replace(workers=0), [note]


def fit_batch_size(recipe: Recipe, images: int, world: int) -> int:
    """The recipe's batch size, or the largest that this number of images fills."""
    unit = world * recipe.aug_repeats // np.gcd(world, recipe.aug_repeats)
    if recipe.batch_size <= images:
        return recipe.batch_size
    batch_size = int(images // unit * unit)
    if not batch_size:
        raise ConfigError(f"{images} training images are too few for {world} processes")
    return batch_size


class TrainingBatches:
    """The batches of a run in order, at the resolution that the recipe has for each step."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        augment: Augment,
        processes: Processes,
        *,
        transform: Transform | None = None,
    ) -> None:
        """`transform` replaces the recipe's augmentation."""
        self.source, self.recipe, self.augment, self.processes = source, recipe, augment, processes
        self._transform, self._size = transform, cast(Size | None, None)
        self._loader = self.loader(augment.image_size)
        self.per_epoch = self._loader.steps_per_epoch
        """Steps per epoch."""
        self.total = recipe.steps or max(1, round(recipe.epochs * self.per_epoch))
        """Steps of the run."""
        self.per_evaluation = max(1, round(recipe.eval_every * self.per_epoch)) if recipe.eval_every else self.total
        """Steps between evaluations."""
        self.stages = resolution_stages(recipe, augment.image_size, self.total)

    def loader(self, size: Size) -> Loader:
        """The loader for training images of this size; there is one at a time."""
        if size != self._size:
            self.close()
            recipe, transform = self.recipe, self._transform
            self._loader = Loader(
                self.source,
                transform=as_transform(transform)
                if transform
                else train_transform(self.augment.replace(image_size=size)),
                batch_size=recipe.batch_size,
                training=True,
                seed=recipe.seed,
                workers=recipe.workers,
                rank=self.processes.rank,
                world=self.processes.world_size,
                sampling=recipe.sampling,
                repeats=recipe.aug_repeats,
                alternate_flip=self.augment.alternate_flip,
                max_unreadable=recipe.max_unreadable,
            )
            self._size = size
        return self._loader

    def from_step(self, start: int) -> Iterator[Batch]:
        """The batches of step `start` and all later ones, the same as in an uninterrupted run."""
        step = start
        while step < self.total:
            epoch, offset = divmod(step, self.per_epoch)
            stage = next(stage for stage in self.stages if step < stage.end)
            end = min(stage.end, (epoch + 1) * self.per_epoch)
            yield from islice(self.loader(stage.size).batches(epoch, start=offset), end - step)
            step = end

    def keys(self, step: int) -> list[str]:
        """The images of a batch."""
        samples, _ = self._loader.plan.batch(*divmod(step, self.per_epoch))
        return [self.source.key(int(index)) for index in samples]

    def close(self) -> None:
        if self._size is not None:
            self._loader.close()


def validation_loader(
    source: Source, recipe: Recipe, transform: Preprocess | Transform, processes: Processes
) -> Loader:
    return Loader(
        source,
        transform=as_transform(transform),
        batch_size=recipe.eval_batch_size or recipe.batch_size,
        training=False,
        workers=recipe.workers,
        rank=processes.rank,
        world=processes.world_size,
        max_unreadable=recipe.max_unreadable,
    )


def subset(source: Source, indices: NDArray[np.int64], name: str) -> Source:
    """Some images of a source; their indices are kept in a temporary file."""
    path = scratch_folder() / "subset.i64"
    indices.astype("i8").tofile(path)
    return Subset(source, path, name=name)


def subsample(source: Source, most: int) -> Source:
    """The source, or `most` of its images at equal distances."""
    if len(source) <= most:
        return source
    indices = np.linspace(0, len(source) - 1, most).astype("i8")
    return subset(source, indices, f"{source.name} ({most:,} of {len(source):,})")


def shared_features(encoder: Encoder, source: Source, processes: Processes, *, label: str) -> FeatureSet:
    """The features of all images. Each process computes a part and reads the others from the feature store.

    Machines that do not share a cache folder compute all of them.
    """
    follow = partial(track, label=label) if processes.is_main else no_tracking
    if processes.is_distributed:
        part = subset(source, np.arange(processes.rank, len(source), processes.world_size), source.name)
        compute_features(encoder, part, open_store(encoder), track=follow)
        processes.barrier()
    return compute_features(encoder, source, open_store(encoder), track=follow)


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps from `start` to before `end`, with images of one size."""

    start: int
    end: int
    size: Size


def resolution_stages(recipe: Recipe, size: Size, steps: int) -> tuple[Stage, ...]:
    """The stages of a run of `steps` steps that starts with images of `size`."""
    sizes = {0: size} | {round(fraction * steps): (side, side) for fraction, side in recipe.resolutions}
    starts = [start for start in sorted(sizes) if start < steps]
    return tuple(Stage(start, end, sizes[start]) for start, end in zip(starts, [*starts[1:], steps]))


def step_multiply_adds(recipe: Recipe, config: ModelConfig, size: Size) -> int:
    """Multiply-adds of a step with images of this size, forward and backward; dropped patches save their fraction."""
    fraction = 1 - recipe.patch_drop if isinstance(config, ViTConfig) else 1
    return round(multiply_adds(config, size) * TRAINING_PASSES * recipe.batch_size * fraction)


def run_multiply_adds(recipe: Recipe, config: ModelConfig, stages: tuple[Stage, ...]) -> int:
    return sum(step_multiply_adds(recipe, config, stage.size) * (stage.end - stage.start) for stage in stages)
