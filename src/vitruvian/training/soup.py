"""Averaged weights of a sweep's seeds (model soups), mixed with the weights they started from (WiSE-FT).

M. Wortsman et al., 2022: arXiv:2203.05482 and arXiv:2109.01903. Seeds that are trained without the dev split choose the
average on it. The seeds of the result, which are trained on the dev split too, are then averaged in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vitruvian.evaluation.target_metrics import TargetMeasures
from vitruvian.model.build import Model, empty
from vitruvian.model.lora import plain_state
from vitruvian.settings import Record
from vitruvian.targets import LOWER_IS_BETTER
from vitruvian.text import plural
from vitruvian.training.distributed import Processes
from vitruvian.training.initial_model import model_for
from vitruvian.training.objective import Labels, TargetRows, ValidationMetrics
from vitruvian.training.run_folder import Run
from vitruvian.training.splits import DataRef, split_data, validation_loader
from vitruvian.weights.load import SOUP_FOLDER, assemble, load
from vitruvian.weights.save import save

SHARES = (1.0, 0.75, 0.5)  # of the fine-tuned weights in an average; the rest are the weights before fine-tuning


@dataclass(frozen=True, kw_only=True, slots=True)
class Soup(Record):
    """The best average on the dev split, and whether it is better there than every seed."""

    name: str
    metric: str
    dev: float  # of the average, on the dev split
    single: float  # of the best seed alone
    kept: bool
    measures: dict[str, float]  # of the kept average of the seeds of the result, on the test split

    def __str__(self) -> str:
        result = f"kept, with {self.measures[self.metric]:.4g} in the result" if self.kept else "not kept"
        values = f"{self.metric} {self.dev:.4g} on the dev split, the best seed alone {self.single:.4g}"
        return f"{self.name}: {values}; {result}"


def make_soup(
    dev: Sequence[Path], test: Sequence[Path], data: DataRef, out: Path, metric: str, processes: Processes
) -> Soup:
    """Choose an average of the runs `dev` on the dev split; save that of the runs `test` if it is better than each."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values, single = {}, max(sign * Run(folder).result(metric)[metric] for folder in dev)
    for share in SHARES if len(dev) > 1 else SHARES[1:]:
        values[share] = sign * measure(average_weights(dev, share), Run(dev[0]), data, processes).scalars()[metric]
    share = max(values, key=values.__getitem__)
    name = f"average of {plural(len(test), 'seed')}"
    name += f" and {1 - share:.0%} of the starting weights" if share < 1 else ""
    measures, kept = dict[str, float](), values[share] > single
    if kept:
        model = average_weights(test, share)
        metrics = measure(model, Run(test[0]), data, processes)
        if isinstance(metrics, TargetMeasures):
            model.meta = model.meta.replace(target=metrics.fit())
        model.meta, measures = model.meta.replace(origin=f"{name}; {model.meta.origin}"), metrics.scalars()
        processes.on_main(lambda: save(model, out / SOUP_FOLDER / "model"))
    found = {"dev": sign * values[share], "single": sign * single}
    return Soup(name=name, metric=metric, **found, kept=kept, measures=measures)


def average_weights(folders: Sequence[Path], share: float) -> Model:
    """The mean of the models of runs that differ in their seed, all but the head mixed with the starting weights."""
    models = [load(folder) for folder in folders]
    states, meta, config = [model.state_dict() for model in models], models[0].meta, models[0].config
    start = plain_state(model_for(Run(folders[0]).recipe, meta.labels or (), meta.target)) if share < 1 else states[0]
    state = dict(states[0])
    for name in (name for name, tensor in state.items() if tensor.is_floating_point()):
        state[name] = torch.stack([each[name] for each in states]).mean(dim=0)
        if not name.startswith("head"):
            state[name] = torch.lerp(start[name], state[name], share)
    return assemble(empty(config), state, meta)


def measure(model: Model, run: Run, data: DataRef, processes: Processes) -> ValidationMetrics:
    """The metrics of a model on the validation images of a run."""
    splits, recipe, model = split_data(data, run.recipe), run.recipe, model.to(processes.device)
    objective = Labels(recipe, model, processes)
    if splits.train.targets is not None:
        objective = TargetRows(recipe, model, splits.train, processes)
    with validation_loader(splits.validation, recipe, model.meta.preprocess, processes) as loader:
        images = len(splits.validation)
        return objective.evaluate(loader.batches(0), images, all_ranks=processes.is_distributed)
