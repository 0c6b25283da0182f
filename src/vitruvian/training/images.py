"""The images of a run: which are for training and which for validation, and loaders of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import cast

import numpy as np

from vitruvian.config import ModelConfig, Preprocess, ViTConfig
from vitruvian.cost import TRAINING_PASSES, multiply_adds
from vitruvian.data.augment import Augment, train_transform
from vitruvian.data.columns import CHUNK, read_chunk
from vitruvian.data.loader import Batch, Loader
from vitruvian.data.sources import Concat, Dataset, Source, first_samples, hold_out
from vitruvian.data.transform import Transform, as_transform
from vitruvian.errors import ConfigError
from vitruvian.settings import Size
from vitruvian.training.distributed import Processes
from vitruvian.training.given import DataRef
from vitruvian.training.recipe import Recipe

SHOWN_CLASSES = 3
"""That a note names."""
TEST_SEED = 0
"""Of the test split that is held out of data without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The two parts of a dataset that a run uses."""

    name: str
    train: Source
    validation: Source
    validation_is: str
    """What the validation images are, in words."""
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes


def images_for(data: object, recipe: Recipe) -> Images:
    """The images to train on and to validate with.

    The split `val`, or else `test`, or else a share of each class held out. A run that chooses its weights by
    validation never does so on `test`.
    """
    found = DataRef.of(data).dataset
    images = protocol_images(found, recipe) if recipe.validation != "auto" else usual_images(found, recipe)
    if recipe.objective == "labels":
        images = replace(images, notes=(*images.notes, *unlearned(images)))
    if not recipe.max_train_samples:
        return images
    return replace(images, train=first_samples(images.train, recipe.max_train_samples, recipe.seed))


def unlearned(images: Images) -> list[str]:
    """A note on classes that are measured and cannot be learned; none where that would fetch all images."""
    if images.train.remote or images.validation.remote:
        return []
    missing = sorted(labels_in(images.validation) - labels_in(images.train))
    if not missing:
        return []
    names = ", ".join(repr(images.classes[number]) for number in missing[:SHOWN_CLASSES])
    more = ", ..." if len(missing) > SHOWN_CLASSES else ""
    what, whose = ("1 class has", "its") if len(missing) == 1 else (f"{len(missing):,} classes have", "their")
    return [f"{what} images to measure and none to learn from: {names}{more}; all {whose} answers will be wrong"]


def labels_in(source: Source) -> set[int]:
    """Which labels there are, in pieces, as there can be many images."""
    labels = source.labels()
    return {int(label) for start in range(0, len(labels), CHUNK) for label in np.unique(read_chunk(labels, start))}


def usual_images(found: Dataset, recipe: Recipe) -> Images:
    """The images of a run that follows no protocol."""
    allowed = ("val",) if recipe.patience > 0 or recipe.final == "best" else ("val", "test")
    train, name = found.train, next((name for name in allowed if name in found.splits), "")
    if name:
        held, held_is = found.splits[name], f"the split {name!r}"
    else:
        train, held = hold_out(train, recipe.val_fraction, recipe.seed)
        held_is = f"{recipe.val_fraction:.0%} of each class, held out"
    return Images(name=found.name, train=train, validation=held, validation_is=held_is, notes=found.notes)


def protocol_images(found: Dataset, recipe: Recipe) -> Images:
    """The images of one step of the paper's protocol.

    `dev` learns from all but the dev split, which is `val`, or else held out, and never sees the test split. `test`
    learns from both and is measured on `test`, or on `val` where there is no `test`. Where there is neither, the test
    split too is held out, the same images for every seed.
    """
    train, test, test_is = found.train, found.splits.get("test"), "the split 'test'"
    dev = found.splits.get("val")
    if test is None and dev is not None:
        test, dev, test_is = dev, None, "the split 'val'"
    elif test is None:
        train, test = hold_out(train, recipe.val_fraction, TEST_SEED)
        test_is = f"{recipe.val_fraction:.0%} of each class, held out for testing"
    measured, measured_is = test, test_is
    if recipe.validation == "dev":
        measured_is = "the split 'val'"
        if dev is None:
            train, dev = hold_out(train, recipe.val_fraction, recipe.seed)
            measured_is = f"{recipe.val_fraction:.0%} of each class, held out for choosing"
        measured = dev
    elif dev is not None:
        train = Concat([train, dev], name=f"{found.name} (train and val)")
    return Images(name=found.name, train=train, validation=measured, validation_is=measured_is, notes=found.notes)


class TrainingBatches:
    """The batches of a run in order, at the resolution that the recipe has for each step."""

    def __init__(
        self, source: Source, recipe: Recipe, augment: Augment, processes: Processes, *, view: Transform | None = None
    ) -> None:
        """`view` takes the place of the recipe's."""
        self.source, self.recipe, self.augment, self.processes = source, recipe, augment, processes
        self._view, self._size = view, cast(Size | None, None)
        self._loader = self.loader(augment.image_size)
        self.per_epoch = self._loader.steps_per_epoch
        """Steps of an epoch."""
        self.total = recipe.steps or max(1, round(recipe.epochs * self.per_epoch))
        """Steps of the whole run."""
        self.per_evaluation = max(1, round(recipe.eval_every * self.per_epoch)) if recipe.eval_every else self.total
        """Steps from one evaluation to the next."""
        self.stages = stages_of(recipe, augment.image_size, self.total)

    def loader(self, size: Size) -> Loader:
        """The loader for views of this size; there is one at a time."""
        if size != self._size:
            self.close()
            recipe, processes = self.recipe, self.processes
            self._loader = Loader(
                self.source,
                transform=as_transform(self._view)
                if self._view
                else train_transform(self.augment.replace(image_size=size)),
                batch_size=recipe.batch_size,
                training=True,
                seed=recipe.seed,
                workers=recipe.workers,
                rank=processes.rank,
                world=processes.world_size,
                sampling=recipe.sampling,
                repeats=recipe.aug_repeats,
                alternate_flip=self.augment.alternate_flip,
                max_unreadable=recipe.max_unreadable,
            )
            self._size = size
        return self._loader

    def from_step(self, start: int) -> Iterator[Batch]:
        """The batches of step `start` and all later ones, as an unbroken run has them."""
        step = start
        while step < self.total:
            epoch, number = divmod(step, self.per_epoch)
            stage = next(stage for stage in self.stages if step < stage.end)
            end = min(stage.end, (epoch + 1) * self.per_epoch)
            loader = self.loader(stage.size)
            yield from islice(loader.batches(epoch, start=number), end - step)
            step = end

    def keys(self, step: int) -> list[str]:
        samples, _ = self._loader.plan.batch(*divmod(step, self.per_epoch))
        return [self.source.key(int(index)) for index in samples]

    def close(self) -> None:
        if self._size is not None:
            self._loader.close()


def validation_loader(source: Source, recipe: Recipe, view: Preprocess | Transform, processes: Processes) -> Loader:
    return Loader(
        source,
        transform=as_transform(view),
        batch_size=recipe.eval_batch_size or recipe.batch_size,
        training=False,
        workers=recipe.workers,
        rank=processes.rank,
        world=processes.world_size,
        max_unreadable=recipe.max_unreadable,
    )


def fitting_batch_size(recipe: Recipe, images: int, world: int) -> int:
    """The recipe's batch size, or the largest that so few images fill."""
    unit = world * recipe.aug_repeats // np.gcd(world, recipe.aug_repeats)
    if recipe.batch_size <= images:
        return recipe.batch_size
    fitting = int(images // unit * unit)
    if not fitting:
        raise ConfigError(f"{images} images to train on are too few for {world} processes")
    return fitting


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps from `start` to before `end`, with views of one size."""

    start: int
    end: int
    size: Size


def stages_of(recipe: Recipe, size: Size, steps: int) -> tuple[Stage, ...]:
    """The stages of a run of so many steps that begins with this size."""
    sizes = {0: size} | {round(share * steps): (side, side) for share, side in recipe.resolutions}
    starts = [start for start in sorted(sizes) if start < steps]
    return tuple(Stage(start, end, sizes[start]) for start, end in zip(starts, [*starts[1:], steps]))


def step_multiply_adds(recipe: Recipe, config: ModelConfig, size: Size) -> int:
    """Of a step with views of this size, forward and backward; tokens that are left out save their share."""
    kept = 1 - recipe.patch_drop if isinstance(config, ViTConfig) else 1
    return round(multiply_adds(config, size) * TRAINING_PASSES * recipe.batch_size * kept)


def run_multiply_adds(recipe: Recipe, config: ModelConfig, stages: tuple[Stage, ...]) -> int:
    return sum(step_multiply_adds(recipe, config, stage.size) * (stage.end - stage.start) for stage in stages)
