"""Few-shot accuracy of the model in training, at every evaluation (recipe setting `eval_fewshot`)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.config import Preprocess
from vitruvian.data.loader import Batch, Loader
from vitruvian.data.sources import Source, take
from vitruvian.data.transform import Transform
from vitruvian.errors import DataError
from vitruvian.evaluation.metrics import autocast
from vitruvian.evaluation.probe_classifiers import SEEDS, Labels, fit_fewshot, shuffle_classes
from vitruvian.model.build import Model
from vitruvian.training.distributed import Processes
from vitruvian.training.objective import autocast_dtype
from vitruvian.training.recipe import Recipe
from vitruvian.training.splits import validation_loader

# n images, F features


class FewShot:
    """Least squares on the features of a few images per class, as `vit probe` computes it."""

    def __init__(
        self, recipe: Recipe, sources: Sequence[Source], transform: Preprocess | Transform, processes: Processes
    ) -> None:
        """`sources` are the images to choose the shots from and to test on, or none."""
        self.processes, self.dtype = processes, autocast_dtype(recipe, processes.device)
        self.loaders: list[Loader] = []
        self.draws: list[Labels] = []  # the images of each seed, as positions in the first loader's source
        if not sources:
            return
        train, test = sources
        self.num_classes = len(train.classes)
        labels = np.asarray(train.labels(), np.int64)
        shots, count = recipe.fewshot_shots, self.num_classes
        draws = [np.concatenate([o[:shots] for o in shuffle_classes(labels, classes=count, seed=s)]) for s in SEEDS]
        used = np.unique(np.concatenate(draws))  # only these need features
        self.draws = [np.searchsorted(used, draw) for draw in draws]
        parts = (take(train, used, train.name), test)
        self.loaders = [validation_loader(part, recipe, transform, processes) for part in parts]

    def scalars(self, model: Model, batches: Callable[[Loader], Iterator[Batch]]) -> dict[str, float]:
        """The accuracy in percent, averaged over the seeds, as `fewshot`; empty without images to measure it on."""
        if not self.loaders:
            return {}
        training = model.training
        model.eval()
        try:
            (x, y), (test, truth) = (self.features(model, loader, batches(loader)) for loader in self.loaders)
        finally:
            model.train(training)
        is_read = truth >= 0
        accuracies = []
        for draw in (draw[y[draw] >= 0] for draw in self.draws):
            classifier = fit_fewshot(x[draw], y[draw], classes=self.num_classes)
            accuracies.append(100.0 * float((classifier.predictions(test[is_read]) == truth[is_read]).mean()))
        return {"fewshot": float(np.mean(accuracies))}

    def features(self, model: Model, loader: Loader, batches: Iterator[Batch]) -> tuple[NDArray[np.float32], Labels]:
        """Features (n, F) and labels (n,) of all images, from all processes; an unreadable image has the label -1."""
        parts: list[tuple[Labels, Labels, NDArray[np.float32]]] = []
        pixels = torch.empty(0)
        with torch.no_grad():
            for batch in batches:
                if len(batch):
                    pixels = batch.pixels.to(self.processes.device)
                elif not len(pixels):
                    raise DataError("fewer few-shot images than processes", where=loader.source.name)
                # A process without images joins in: a sharded model needs all processes in every forward pass.
                with autocast(self.processes.device, self.dtype):
                    values = model.features(pixels)[: len(batch)].float().cpu().numpy()
                parts.append((batch.indices.numpy(), batch.labels.numpy(), values))
        labels = np.full(len(loader.source), -1, np.int64)
        features = np.zeros((len(labels), model.config.feature_width), np.float32)
        for indices, truth, values in (part for parts in self.processes.all_gather(parts) for part in parts):
            labels[indices], features[indices] = truth, values
        return features, labels
