"""Predictions for the images of a Ray dataset; the scheduling is Ray's."""

from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.bulk.job import ray_actors
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.errors import ConfigError, require
from vitruvian.inference import Classifier

IMAGE_COLUMNS = ("bytes", "image", "path")


class PredictionActor:
    """A Ray actor that classifies batches of images."""

    def __init__(self, model: str, top: int) -> None:
        self.classifier, self.top = Classifier(model), top

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        column = next((name for name in IMAGE_COLUMNS if name in batch), None)
        if column is None:
            raise ConfigError(f"columns {', '.join(batch)}; expected images in one of {', '.join(IMAGE_COLUMNS)}")
        results = list(self.classifier.stream(batch[column], top=self.top, batch_size=max(1, len(batch[column]))))
        predictions = np.empty(len(results), object)
        predictions[:] = [[prediction.to_json() for prediction in result.predictions] for result in results]
        return {**batch, "predictions": predictions, "error": np.array([result.error for result in results], object)}


def predict(
    dataset: Any, model: str | Path, *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE, workers: int | None = None
) -> Any:
    """Add the columns `predictions` and `error` to a Ray dataset.

    Args:
        dataset: A Ray dataset with images in a column `bytes`, `image` (arrays) or `path`.
        model: A file, directory or published name that every node can load.
        top: Number of predictions per image.
        batch_size: Number of images per batch.
        workers: Number of actors; by default one per processor except one.
    """
    pool = require("ray.data", "ray").ActorPoolStrategy(size=workers or ray_actors())
    settings = {"model": str(model), "top": top}
    return dataset.map_batches(
        PredictionActor, fn_constructor_kwargs=settings, batch_size=batch_size, compute=pool, num_cpus=1
    )
