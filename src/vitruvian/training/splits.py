"""The images of a run: data and transforms from the caller, training and validation splits, and their loaders."""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.cost import TRAINING_PASSES, multiply_adds
from vitruvian.data.augment import Augment, require_packages, train_transform
from vitruvian.data.columns import read_chunks
from vitruvian.data.formats import open_dataset
from vitruvian.data.groups import assign_folds, divide, hold_out_groups
from vitruvian.data.loader import Batch, Loader
from vitruvian.data.names import SPLITS
from vitruvian.data.sources import ClassSubset, Dataset, Source, all_but_test, first_samples, take
from vitruvian.data.transform import Transform, as_transform
from vitruvian.data.workers import unguarded_script
from vitruvian.errors import ConfigError, TrainingError
from vitruvian.evaluation.probe import probe_sources
from vitruvian.evaluation.probe_classifiers import possible_shots
from vitruvian.settings import Size
from vitruvian.targets import KINDS
from vitruvian.text import plural
from vitruvian.training.distributed import Processes
from vitruvian.training.recipe import OTHER_CLASSES, Recipe
from vitruvian.training.run_folder import absolute_data
from vitruvian.weights.load import run_facts

MAX_NAMES = 3  # classes that a note names
FOR_TESTING = " for testing"  # in the description of held-out images
HOLD_OUT_SETTINGS = ("split_seed", "val_fraction", "group_by", "fold")  # decide which images are held out


class DataRef:
    """The data of a run, by name or as an object; opened once, when it is first needed."""

    def __init__(self, data: object) -> None:
        self.data = data
        self._opened: dict[str, Dataset] = {}
        is_name = isinstance(data, str | Path)
        self.name = absolute_data(str(data)) if is_name else ""
        """Name or absolute path for run.json; empty for an object."""
        self.short_name = Path(self.name.rstrip("/*")).stem or ("run" if is_name else "data")

    @classmethod
    def of(cls, data: object) -> "DataRef":
        return data if isinstance(data, cls) else cls(data)

    @property
    def dataset(self) -> Dataset:
        return self.open("auto")

    def open(self, target: str) -> Dataset:
        """The data with this target, as in `Recipe.target`."""
        if target not in self._opened:
            self._opened[target] = open_dataset(self.data, target=target, accepts=KINDS)
        return self._opened[target]


@dataclass(frozen=True, slots=True)
class CustomTransforms:
    """Transforms of the caller, which replace the model's preprocessing and the recipe's augmentation."""

    transform: Transform | None = None  # for evaluation
    train_transform: Transform | None = None

    @property
    def names(self) -> list[str]:
        """The arguments that must be passed again to resume."""
        return [name for name in ("transform", "train_transform") if getattr(self, name) is not None]

    def check(self, recipe: Recipe) -> None:
        """Raise if a package is missing or the transforms do not fit the recipe."""
        if self.train_transform is None:
            require_packages()
        elif recipe.train_scale != 1:
            raise TrainingError("train_scale cannot be used with train_transform=")


NO_TRANSFORMS = CustomTransforms()


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The training and validation images of a run."""

    name: str
    train: Source
    validation: Source
    validation_is: str  # description of the validation images
    notes: list[str]
    fewshot: tuple[Source, ...] = ()  # images to train and to test a few-shot classifier on

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def sizes(self) -> dict[str, Any]:
        counts = {"training images": len(self.train), "validation images": len(self.validation)}
        return {"classes": list(self.classes), **counts}


def split_data(data: object, recipe: Recipe) -> Splits:
    """The training and validation images that a recipe uses.

    Validates on the split `val`, else on `test`, else on a fraction of each class that is held out. A run that selects
    its weights by validation never does so on `test`.
    """
    dataset = DataRef.of(data).open(recipe.target)
    allowed = ("val",) if recipe.patience > 0 or recipe.final == "best" else ("val", "test")
    name = next((name for name in allowed if name in dataset.splits), "")
    if recipe.validation != "auto":
        train, validation, validation_is = protocol_splits(dataset, recipe)
    elif recipe.fold[1]:
        train, validation, validation_is = fold_of(dataset, recipe)
    elif name:
        train, validation, validation_is = dataset.train, dataset.splits[name], f"the split {name!r}"
    else:
        share, seed = recipe.val_fraction, recipe.split_seed
        train, validation, validation_is = hold_out_groups(dataset.train, share, seed, recipe.group_by)
    notes = list(dataset.notes)
    for split in (split for split in dataset.splits if split not in SPLITS):
        images = plural(len(dataset.splits[split]), "image")
        notes.append(f"not used: the split {split!r} ({images}); the splits of a run are train, val and test")
    fewshot: tuple[Source, ...] = ()
    if recipe.eval_fewshot not in ("", OTHER_CLASSES):
        fewshot = tuple(probe_sources(open_dataset(recipe.eval_fewshot))[0][:2])
    if recipe.class_range != (0.0, 1.0):
        classes = range(len(train.classes))
        first, end = (round(share * len(classes)) for share in recipe.class_range)
        if end - first < 2:
            raise ConfigError(f"class_range={recipe.class_range} has {end - first} of {len(classes)} classes")
        rest = [*classes[:first], *classes[end:]]
        if recipe.eval_fewshot == OTHER_CLASSES:
            fewshot = ClassSubset(train, rest), ClassSubset(validation, rest)
        train, validation = (ClassSubset(source, classes[first:end]) for source in (train, validation))
    if fewshot:  # raises if a class has too few images
        possible_shots(np.asarray(fewshot[0].labels(), np.int64), fewshot[0].classes, [recipe.fewshot_shots])
    # The labels of remote data would have to be downloaded.
    if recipe.objective == "labels" and train.targets is None and not (train.remote or validation.remote):
        missing = sorted(labels_in(validation) - labels_in(train))
        names = ", ".join(repr(train.classes[label]) for label in missing[:MAX_NAMES])
        names += ", ..." if len(missing) > MAX_NAMES else ""
        subject = "1 class has" if len(missing) == 1 else f"{len(missing):,} classes have"
        if missing:
            notes.append(f"{subject} validation images but no training images: {names}; they will all be misclassified")
    if recipe.max_train_samples:
        train = first_samples(train, recipe.max_train_samples, recipe.seed)
    return Splits(
        name=dataset.name, train=train, validation=validation, validation_is=validation_is, notes=notes, fewshot=fewshot
    )


def labels_in(source: Source) -> set[int]:
    """The labels that occur, read in chunks, as there can be many images."""
    return {int(label) for _, chunk in read_chunks(source.labels()) for label in np.unique(chunk)}


def protocol_splits(dataset: Dataset, recipe: Recipe) -> tuple[Source, Source, str]:
    """Training images, validation images and their description, in a trial of the paper's fine-tuning protocol.

    `dev` trains on all but the dev split, which is `val` or else held out, and never uses the test split. `test`
    trains on both and is evaluated on `test`, or on `val` if there is no `test`. With neither of them, the test split
    is held out as well, the same images for every seed.
    """
    train, test, validation_is = dataset.train, dataset.splits.get("test"), "the split 'test'"
    dev = dataset.splits.get("val")
    share, by = recipe.val_fraction, recipe.group_by
    if recipe.fold[1]:
        train, test, validation_is = fold_of(dataset, recipe)
        dev = None
    elif test is None and dev is not None:
        test, dev, validation_is = dev, None, "the split 'val'"
    elif test is None:
        train, test, validation_is = hold_out_groups(train, share, recipe.split_seed, by)
        validation_is += FOR_TESTING
    validation = test
    if recipe.validation == "dev":
        validation_is = "the split 'val'"
        if dev is None:
            train, dev, validation_is = hold_out_groups(train, share, recipe.split_seed, by)
            validation_is += " for choosing"
        validation = dev
    elif dev is not None:
        train = all_but_test(dataset)
    return train, validation, validation_is


def fold_of(dataset: Dataset, recipe: Recipe) -> tuple[Source, Source, str]:
    """Training images, validation images and their description, in one fold of cross-validation."""
    images, (fold, folds) = all_but_test(dataset), recipe.fold
    chosen = assign_folds(images, folds, recipe.split_seed, recipe.group_by) == fold - 1
    return *divide(images, chosen, f"held out as fold {fold}"), f"fold {fold} of {folds}, held out"


def continue_from(recipe: Recipe, data: str, keys: Container[str]) -> tuple[Recipe, list[str]]:
    """The recipe of a run from the weights of another run on the same data, and notes.

    It holds out the same images, and its seed differs, so that it does not repeat the other run's augmented images. A
    model that the other run has enlarged keeps its size.
    Settings in `keys` are the user's and stay.
    """
    folder, facts = run_facts(recipe.weights, data) or (None, {})
    before = facts.get("recipe")
    if folder is None or not isinstance(before, dict):
        return recipe, []
    stored = {key: from_json(before[key]) for key in HOLD_OUT_SETTINGS if key in before and key not in keys}
    changes = {key: value for key, value in stored.items() if value != getattr(recipe, key)}
    if before.get("seed") == recipe.seed and "seed" not in keys:
        changes["seed"] = recipe.seed + 1
    if before.get("enlarge") == recipe.enlarge != 1 and "enlarge" not in keys and not recipe.image_size:
        changes["enlarge"] = 1.0
    text = ", ".join(f"{key}={value}" for key, value in changes.items())
    why = "the same images are held out and the augmentations are new"
    return recipe.replace(**changes), [f"{text}, because {folder} was trained on the same data: {why}"] if text else []


def from_json(value: Any) -> Any:
    """The value of a setting in run.json, in which a tuple is a list."""
    return tuple(value) if isinstance(value, list) else value


def leakage_notes(data: str, recipe: Recipe, splits: Splits) -> list[str]:
    """A note for each run (of the weights or the teacher) that held out other images of the same data."""
    validation_is = splits.validation_is.removesuffix(FOR_TESTING)
    if "held out" not in validation_is or recipe.validation == "dev":  # a split, or images that only choose an lr
        return []
    images = len(splits.train) + len(splits.validation)

    def choice(settings: Any) -> str:
        values = {key: from_json(settings.get(key)) for key in HOLD_OUT_SETTINGS}
        return ", ".join(f"{key}={value}" for key, value in values.items() if value not in (None, "", (0, 0)))

    notes = []
    for source in filter(None, (recipe.weights, recipe.teacher)):
        folder, facts = run_facts(source, data) or (None, {})
        if folder is None:
            continue
        before, now = choice(facts.get("recipe") or {}), choice(recipe.to_json())
        count = facts.get("training_images", 0) + facts.get("validation_images", 0)
        if count != images and not recipe.max_train_samples and not facts["recipe"].get("max_train_samples"):
            before, now = f"{before}, {count:,} images", f"{now}, {images:,} images"
        if str(facts.get("validation")).removesuffix(FOR_TESTING) == validation_is and before == now:
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
    if recipe.batch_size <= images:
        return recipe.batch_size
    unit = math.lcm(world, recipe.aug_repeats)
    if images < unit:
        raise ConfigError(f"{images} training images are too few for {world} processes")
    return images // unit * unit


def fit_to_data(recipe: Recipe, data: object, world: int) -> tuple[Recipe, Splits]:
    """The recipe for the target and the number of the images, which the splits note, and the splits."""
    splits = split_data(data, recipe)
    recipe, notes = recipe.for_target(splits.train.target)
    batch_size = fit_batch_size(recipe, len(splits.train), world)
    if batch_size != recipe.batch_size:
        notes = [*notes, f"batch_size is {batch_size}, not {recipe.batch_size}: there are no more images"]
    splits.notes.extend(notes)
    return recipe.replace(batch_size=batch_size), splits


class TrainingBatches:
    """The batches of a run in order."""

    def __init__(
        self, source: Source, recipe: Recipe, augment: Augment, processes: Processes, transform: Transform | None = None
    ) -> None:
        """`transform` replaces the recipe's augmentation."""
        self.loader = Loader(
            source,
            transform=as_transform(transform) if transform else train_transform(augment),
            batch_size=recipe.batch_size,
            training=True,
            seed=recipe.seed,
            workers=recipe.workers,
            rank=processes.rank,
            world=processes.world_size,
            sampling=recipe.sampling,
            repeats=recipe.aug_repeats,
            alternate_flip=augment.alternate_flip,
            max_unreadable=recipe.max_unreadable,
        )
        self.per_epoch = self.loader.steps_per_epoch  # in steps, as all of these
        self.total = recipe.steps or max(1, round(recipe.epochs * self.per_epoch))
        self.per_evaluation = max(1, round(recipe.eval_every * self.per_epoch)) if recipe.eval_every else self.total
        """Steps between evaluations."""

    def from_step(self, start: int) -> Iterator[Batch]:
        """The batches of step `start` and all later ones, the same as in an uninterrupted run."""
        step = start
        while step < self.total:
            epoch, offset = divmod(step, self.per_epoch)
            end = min(self.total, (epoch + 1) * self.per_epoch)
            yield from islice(self.loader.batches(epoch, start=offset), end - step)
            step = end

    def keys(self, step: int) -> list[str]:
        """The images of a batch."""
        samples, _ = self.loader.plan.batch(*divmod(step, self.per_epoch))
        return [self.loader.source.key(int(index)) for index in samples]


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


def subsample(source: Source, most: int) -> Source:
    """The source, or `most` of its images, evenly spaced."""
    if len(source) <= most:
        return source
    indices = np.linspace(0, len(source) - 1, most).astype("i8")
    return take(source, indices, f"{source.name} ({most:,} of {len(source):,})")


def run_multiply_adds(recipe: Recipe, config: ModelConfig, size: Size, steps: int) -> int:
    """Multiply-adds of all steps with images of `size`, forward and backward; dropped patches save their fraction."""
    fraction = 1 - recipe.patch_drop if isinstance(config, ViTConfig) else 1
    images = TRAINING_PASSES * recipe.batch_size * fraction * (2 if recipe.sam_rho else 1)
    return round(multiply_adds(config, size) * images) * steps
