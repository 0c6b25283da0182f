"""Cross-validation: one model per fold, measured on the images of that fold, and predictions for all images."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitruvian.data.groups import assign_folds
from vitruvian.data.sources import all_but_test
from vitruvian.errors import TrainingError, argument
from vitruvian.evaluation.calibration import probabilities
from vitruvian.evaluation.evaluate import evaluate_classes
from vitruvian.evaluation.out_of_fold import PREDICTIONS_FILE, FoldResult, OutOfFold
from vitruvian.files import read_object, write_json
from vitruvian.progress import print_status
from vitruvian.training.distributed import process_group
from vitruvian.training.finetune import Protocol, finetune, list_changes, train_series
from vitruvian.training.journal import Listener, ProgressListener
from vitruvian.training.recipe import DESCRIPTION, HARMLESS, Recipe
from vitruvian.training.run_folder import Run, lock_folder, series_folder
from vitruvian.training.splits import DataRef, fold_of

FOLDS_FILE = "folds.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidation:
    """A finished cross-validation."""

    folder: Path
    result: FoldResult
    runs: tuple[Run, ...]  # of each fold

    @property
    def predictions(self) -> Path:
        """The table of out-of-fold predictions."""
        return self.folder / PREDICTIONS_FILE

    def to_json(self) -> dict[str, Any]:
        files = {"folds": [str(run.folder) for run in self.runs], "predictions": str(self.predictions)}
        return {"folder": str(self.folder), **self.result.to_json(), **files}


def cross_validate(
    data: object,
    settings: Recipe | Protocol,
    folds: int,
    out: str | Path | None = None,
    *,
    listeners: Sequence[Listener] = (),
    report: Callable[[str], None] = print_status,
    progress: bool = True,
) -> CrossValidation:
    """Train one model per fold of all images but the test split, and predict each image by the model without it.

    Groups (`group_by` in the recipe) are never divided. The same call resumes an interrupted cross-validation.

    Args:
        data: As for `train`; a path or a name with a Protocol.
        settings: A recipe (`choose_recipe`) to train each model with, or a protocol (`protocol_for`), whose learning
            rate is then chosen within each fold, on images of the others.
        folds: Number of folds.
        out: Folder; by default one in `runs/`.
        listeners: Objects that are notified of the steps and metrics of all runs.
        report: Receives one line per run.
        progress: Show progress on stderr.

    Raises:
        ConfigError: There are fewer images or groups than folds.
        TrainingError: `out` has other files, or training diverged in a fold.
        Interrupted: A signal stopped a run; the same call resumes it.
    """
    ref = DataRef.of(data)
    recipe = settings if isinstance(settings, Recipe) else settings.recipe
    images = all_but_test(ref.dataset)
    if recipe.objective != "labels" or recipe.class_range != (0.0, 1.0) or images.targets is not None:
        raise TrainingError("cross-validation needs one label per image, and all classes")
    assigned = assign_folds(images, folds, recipe.split_seed, recipe.group_by)  # raises before anything is written
    recipes = [recipe.replace(fold=(fold, folds)) for fold in range(1, folds + 1)]
    now = identity(ref, settings, folds)

    def prepare() -> str:
        same = partial(differences, now)
        folder = series_folder(f"{ref.short_name}-folds", out, FOLDS_FILE, "cross-validation", same)
        if not (folder / FOLDS_FILE).is_file():
            write_json(folder / FOLDS_FILE, now)
        return str(folder)

    with process_group(recipe.device) as processes, ExitStack() as stack:
        folder = Path(processes.on_main(prepare))
        places = [folder / f"fold-{fold}" for fold in range(1, folds + 1)]
        series = list(zip(places, recipes, [f"fold {fold} of {folds}" for fold in range(1, folds + 1)]))
        processes.on_main(lambda: stack.enter_context(lock_folder(folder)))
        if isinstance(settings, Protocol):
            runs = []
            for place, changed, title in series:
                protocol = replace(settings, recipe=changed, seeds=1)
                named = partial(lambda title, text: report(f"{title}, {text}"), title)
                sweep = finetune(protocol, place, listeners=listeners, report=named, progress=progress)
                runs.append(Run(sweep.test[0].folder))
        else:
            followers = (ProgressListener(), *listeners) if progress else listeners
            train_series(series, ref, processes, listeners=followers, report=report, record=lambda: None)
            runs = [Run(place) for place in places]
        failed = next((run for run in runs if run.state != "done"), None)
        if failed is not None:
            reason = "training diverged in this fold"
            raise TrainingError(reason, where=failed.folder, hint=f"try a lower {argument('lr')}")
        found = OutOfFold(images, assigned, recipe.group_by)
        for fold, (run, changed) in enumerate(zip(runs, recipes)):
            evaluation = evaluate_classes(fold_of(ref.dataset, changed)[1], run.folder / "model")
            rows = np.flatnonzero(assigned == fold)[evaluation.outputs.indices]
            logits = torch.from_numpy(np.asarray(evaluation.outputs.logits)).double()
            found.add(rows, probabilities(logits, recipe.score_function).numpy())
        result = CrossValidation(folder=folder, result=found.result(), runs=tuple(runs))
        if processes.is_main:
            found.write(result.predictions)
            write_json(folder / FOLDS_FILE, now | {"result": result.to_json()})
        return result


def identity(data: DataRef, settings: Recipe | Protocol, folds: int) -> dict[str, Any]:
    """The settings, as JSON values, that must be equal to continue in the same folder."""
    recipe, lrs = (settings, ()) if isinstance(settings, Recipe) else (settings.recipe, settings.lrs)
    kept = {key: value for key, value in recipe.to_json().items() if key not in DESCRIPTION | HARMLESS | {"fold"}}
    values: dict[str, Any] = json.loads(json.dumps({"data": data.name, "folds": folds, "lrs": lrs, "recipe": kept}))
    return values


def differences(now: dict[str, Any], folder: Path) -> list[str]:
    """Settings in which the cross-validation in `folder` differs from this one."""
    before = read_object(folder / FOLDS_FILE, raises=TrainingError)
    before.pop("result", None)
    return list(list_changes(before, now))
