"""Add classes to a trained model in seconds: a new head on its frozen features, which the feature store keeps."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from vitruvian.errors import TrainingError, argument
from vitruvian.evaluation.features import FeatureSet, compute_features, open_store
from vitruvian.inference import Encoder
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import plain_state
from vitruvian.targets import SINGLE
from vitruvian.training.initial_model import fit_logistic, set_head
from vitruvian.training.run_folder import Run, make_folder
from vitruvian.training.splits import DataRef, split_data
from vitruvian.weights.load import Changes, assemble, change_head
from vitruvian.weights.save import save


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedClasses:
    """A model with more classes, and its accuracy in percent on images that were held out."""

    folder: Path
    added: tuple[str, ...]
    before: float  # of the old classes, by the model without the new ones
    after: float  # of the same images, among all classes
    new: float  # of the images of the new data, among all classes
    counts: tuple[int, int]  # held-out images of the run, and of the new data


def add_classes(run: str | Path | Run, data: object, out: str | Path | None = None) -> AddedClasses:
    """Add the classes of `data` to the model of a finished run, and save the model.

    Only the head is fitted, by logistic regression on the features of the run's training images and of `data`, so the
    run's data must still be there. Images of classes that the model has already are added to those.

    Args:
        run: A run with one label per image, or its folder.
        data: Images with labels; a part of each class is held out unless there is a split for validation.
        out: Folder of the new model, which must not exist; by default a new one in `runs/`.

    Raises:
        TrainingError: The run has not finished or its data cannot be found, or `data` has no new class.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    facts, recipe = run.facts, run.recipe
    if not run.finished or not facts.get("data"):
        reason = "has not finished" if not run.finished else "was trained on an object, which cannot be opened again"
        raise TrainingError(f"the run {reason}", where=run.folder)
    if out is not None and Path(out).expanduser().exists():
        raise TrainingError("exists", where=out, hint=f"choose another {argument('out')}")
    model, new = run.model(), DataRef.of(data)
    if model.meta.target != SINGLE or model.head is None:
        raise TrainingError("only a model with one label per image can get more classes", where=run.folder)
    old = split_data(facts["data"], recipe)
    more = split_data(new, recipe.replace(validation="auto", max_train_samples=0))
    added = tuple(name for name in more.classes if name not in old.classes)
    if not added:
        raise TrainingError("has no class that the model does not have", where=new.short_name)
    classes = (*old.classes, *added)
    encoder = Encoder(model)
    store = open_store(encoder)
    sources = (old.train, more.train, old.validation, more.validation)
    parts = [in_classes(compute_features(encoder, source, store), classes) for source in sources]
    features, held_out = parts[:2], parts[2:]
    values, labels = (np.concatenate([getattr(part, name) for part in features]) for name in ("values", "labels"))
    head = fit_logistic(replace(features[0], values=values, labels=labels, classes=classes))
    config, state = change_head(model.config, plain_state(model), Changes(num_classes=len(classes), head="new"))
    if model.config.feature_width != config.feature_width:
        raise TrainingError("a model with a pre-logits layer cannot get more classes", where=run.folder)
    meta = model.meta.for_new_head(classes).replace(origin=f"{model.meta.origin}; with {len(added)} more classes")
    extended = assemble(empty(config), state, meta)
    set_head(extended, head)
    pairs = (model, held_out[0]), (extended, held_out[0]), (extended, held_out[1])
    before, after, right = (accuracy(*pair) for pair in pairs)
    folder = make_folder(new.short_name) if out is None else Path(out).expanduser()
    save(extended, folder)
    counts = len(held_out[0]), len(held_out[1])
    return AddedClasses(folder=folder, added=added, before=before, after=after, new=right, counts=counts)


def in_classes(features: FeatureSet, classes: tuple[str, ...]) -> FeatureSet:
    """The features, with labels that are positions in another list of classes."""
    positions = np.array([classes.index(name) for name in features.classes])
    return replace(features, labels=positions[features.labels], classes=classes)


def accuracy(model: Model, features: FeatureSet) -> float:
    """Accuracy of a model's head in percent."""
    assert model.head is not None
    with torch.no_grad():
        logits = model.head(torch.from_numpy(features.values))
    return 100.0 * float((logits.argmax(dim=1).numpy() == features.labels).mean())
