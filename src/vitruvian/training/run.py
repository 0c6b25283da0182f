"""The folder of a run: what is in it, for whoever reads it during or after training.

`run.json` facts · `recipe.toml` the settings as run · `metrics.jsonl` · `checkpoints/` · `best/` the best weights so
far, where the recipe chooses by validation · `unreadable.json` images that were skipped · `report.html` · `model/`
the result, which is there when the run is over.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import PIL
import torch

from vitruvian import __version__
from vitruvian.data.sources import BUILT_IN
from vitruvian.errors import TrainingError
from vitruvian.files import Lock, is_unfinished, write_json, write_text
from vitruvian.model.build import Model
from vitruvian.training.journal import METRICS_FILE, Line, read_journal
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import read_recipe, to_toml
from vitruvian.weights.load import RUN_FILE, load

RUNS = Path("runs")
"""Where runs, sweeps and studies go that are given no folder."""

FAILED_FILE = "failed.json"
"""In the folder of a run that diverged and is one of many: why."""
LOCK_FILE = ".lock"

RunState = Literal["waiting", "begun", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run by its folder."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        path = Path(folder).expanduser()
        if not (path / RUN_FILE).is_file():
            what = "not a training run: it has no run.json" if path.is_dir() else "no such folder"
            raise TrainingError(f"{path}: {what}")
        return cls(path)

    @property
    def facts(self) -> dict[str, Any]:
        """`data`, `classes`, sizes, `steps`, `parameters`, `environment` and so on."""
        try:
            facts = json.loads((self.folder / RUN_FILE).read_text(encoding="utf-8"))
        except ValueError as error:
            raise TrainingError(f"{self.folder / RUN_FILE}: not valid JSON: {error}") from error
        if not isinstance(facts, dict):
            raise TrainingError(f"{self.folder / RUN_FILE}: not a JSON object")
        return facts

    @property
    def recipe(self) -> Recipe:
        return read_recipe(self.folder / "recipe.toml")

    def metrics(self, split: str | None = None) -> list[Line]:
        """The lines of metrics.jsonl, or those of one split (`train`, `val`)."""
        return [line for line in read_journal(self.folder / METRICS_FILE) if split in (None, line["split"])]

    @property
    def finished(self) -> bool:
        return (self.folder / "model").is_dir()

    @property
    def state(self) -> RunState:
        """Told by what is in the folder, so that it is right whenever a process was killed."""
        if not (self.folder / RUN_FILE).is_file():
            return "waiting"
        if (self.folder / FAILED_FILE).is_file():
            return "failed"
        return "done" if self.finished else "begun"

    def result(self, *keys: str) -> dict[str, float]:
        """These numbers of the last evaluation; none before the run is done."""
        lines = self.metrics("val") if self.state == "done" else []
        return {key: lines[-1][key] for key in keys} if lines else {}

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def forget_checkpoints(self) -> None:
        """Remove them: nothing goes on from here."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    @property
    def unreadable(self) -> dict[str, str]:
        """Images that were skipped, and why."""
        path = self.folder / "unreadable.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def model(self) -> Model:
        """The trained model."""
        return load(self.folder)


def create(folder: Path, recipe: Recipe, facts: dict[str, Any]) -> Run:
    """Write the settings and the facts of a new run into its folder, the facts last: then it is a run."""
    try:
        Run(folder).checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written: {error.strerror}") from error
    write_text(folder / "recipe.toml", to_toml(recipe.to_json()))
    write_json(folder / RUN_FILE, facts)
    return Run(folder)


@contextmanager
def claimed(out: str | Path | None, name: str) -> Iterator[Path]:
    """The folder of a new run, which no other process can take or train in: `out`, or a new one in `runs/`.

    Refused where there is a run, or anything else. If nothing comes of it, the folder is gone afterwards.
    """
    folder = new_folder(name) if out is None else Path(out).expanduser()
    if (folder / RUN_FILE).exists():
        raise TrainingError(
            f"{folder}: there is already a run; continue it with `vit train --resume {folder}`, or choose another out="
        )
    if folder.exists() and (not folder.is_dir() or not is_free(folder)):
        raise TrainingError(f"{folder}: exists and is not empty; choose another out=")
    was_there = folder.is_dir() and out is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"{folder}: cannot be written: {error.strerror}") from error
    try:
        with owned(folder):
            if not is_free(folder):  # another process came first, and has ended
                raise TrainingError(f"{folder}: there is already a run; choose another out=")
            yield folder
    finally:
        if not was_there and not (folder / RUN_FILE).exists() and is_free(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_free(folder: Path) -> bool:
    """Whether nothing is in the folder but what a start leaves that ends before there is a run."""
    mine = {LOCK_FILE, "recipe.toml", "checkpoints"}
    left = [path for path in folder.iterdir() if path.name not in mine and not is_unfinished(path)]
    return not left and not (folder / RUN_FILE).exists() and not any(folder.glob("checkpoints/*"))


def new_folder(name: str) -> Path:
    """A folder in `runs/` that this process has made."""
    number = 1
    while True:
        folder = RUNS / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
        except OSError as error:
            raise TrainingError(f"{folder}: cannot be written: {error.strerror}; choose another out=") from error


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """A context in which no other process trains in the folder; refused while another does."""
    lock = Lock(folder / LOCK_FILE)
    if not lock.acquire(wait=False):
        raise TrainingError(f"{folder}: {lock.holder()} is training in it; wait for its end, or choose another out=")
    try:
        yield
    finally:
        lock.release()


def lasting_path(name: str | Path) -> str:
    """A path that exists, in full; a published name as it is."""
    place = Path(name).expanduser()
    return str(place.resolve() if place.exists() else name)


def lasting_data(data: str | Path) -> str:
    """A path that exists, in full; a built-in name, a task or an address as it is."""
    return str(data) if str(data) in BUILT_IN else lasting_path(data)


def environment() -> dict[str, Any]:
    """What a run's numbers and its time depend on beside its settings and data."""
    return {
        "vitruvian": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "pillow": PIL.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
    }


def processor() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
