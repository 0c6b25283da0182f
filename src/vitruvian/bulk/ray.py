"""Bulk work on a Ray cluster: one stateful actor class over `map_batches`; the scheduling is Ray's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vitruvian.bulk.run import Work
from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.errors import ConfigError, argument, require
from vitruvian.inference import Classifier

IMAGE_COLUMNS = ("bytes", "image", "path")


class Parts:
    """An actor that makes parts of a job; what is written is the checkpoint, so a lost worker costs no rows."""

    def __init__(self, work: Work) -> None:
        self.job = work.job()
        self.identity = self.job.begin()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"images": np.array([sum(self.job.work([int(part)], self.identity)) for part in batch["id"]])}


class Answers:
    """An actor that answers batches of a Ray dataset's own images."""

    def __init__(self, model: str, top: int) -> None:
        self.classifier, self.top = Classifier(model), top

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        column = next((name for name in IMAGE_COLUMNS if name in batch), None)
        if column is None:
            raise ConfigError(f"columns {', '.join(batch)}; wanted images in one of {', '.join(IMAGE_COLUMNS)}")
        found = list(self.classifier.stream(batch[column], top=self.top, batch_size=max(1, len(batch[column]))))
        answers = np.empty(len(found), object)
        answers[:] = [[prediction.to_json() for prediction in each.predictions] for each in found]
        return {**batch, "predictions": answers, "error": np.array([each.error for each in found], object)}


def predict(
    dataset: Any, model: str | Path, *, top: int = 5, batch_size: int = DEFAULT_BATCH_SIZE, workers: int | None = None
) -> Any:
    """A Ray dataset with the columns `predictions` and `error` beside its own.

    The images are in a column `bytes`, `image` (arrays) or `path`. The model is a file, folder or published name that
    every node can load.
    """
    pool = require("ray.data", "ray").ActorPoolStrategy(size=workers or actors())
    settings = {"model": str(model), "top": top}
    return dataset.map_batches(Answers, fn_constructor_kwargs=settings, batch_size=batch_size, compute=pool, num_cpus=1)


def run_on_ray(work: Work, *, workers: int | None = None) -> tuple[Iterator[int], int]:
    """Make all parts of a job that are not there, on the cluster that Ray is connected to or on a local one.

    Gives numbers of images as they are done, and how many there are.
    """
    if not isinstance(work.model, str | Path) or not isinstance(work.data, str | Path):
        raise ConfigError(
            f"{argument('on', 'ray')} needs data and a model that every node can open",
            hint="give a path, a URL or a published name",
        )
    count = workers or actors()
    job = work.job()
    job.begin()  # a folder of another job is refused before anything starts
    data = require("ray.data", "ray")
    data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    made = data.range(job.parts, override_num_blocks=job.parts).map_batches(
        Parts,
        fn_constructor_kwargs={"work": work},
        batch_size=1,
        compute=data.ActorPoolStrategy(size=count),
        num_cpus=1,
    )
    return (int(row["images"]) for row in made.iter_rows()), len(job)


def actors() -> int:
    """One for each processor but one, which reads."""
    ray = require("ray", "ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    return max(1, int(ray.cluster_resources().get("CPU", 2)) - 1)
