"""The folder of a run: what is in it, for whoever reads it during or after training.

`run.json` facts · `recipe.toml` the settings as run · `metrics.jsonl` · `checkpoints/` · `best/` the best weights so
far, where the recipe chooses by validation · `unreadable.json` images that were skipped · `model/` the
result · `report.html` · `result.json` the numbers of the model, which is there when the run is over.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import PIL
import torch

from vitruvian import __version__
from vitruvian.cache import Lock
from vitruvian.data.formats import BUILT_IN
from vitruvian.errors import TrainingError, argument
from vitruvian.files import digest, is_unfinished, read_object, write_json, write_text
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.text import describe_error
from vitruvian.training.journal import METRICS_FILE, Line, read_journal
from vitruvian.training.recipe import Recipe
from vitruvian.training.recipes import read_recipe, to_toml
from vitruvian.weights.description import fingerprint
from vitruvian.weights.load import RUN_FILE, load

RUNS = Path("runs")
"""Where runs, sweeps and studies go that are given no folder."""

FAILED_FILE = "failed.json"
"""In the folder of a run that diverged and is one of many: why."""
LOCK_FILE = ".lock"
RESULT_FILE = "result.json"
"""The numbers of the model, and a digest of each file that makes up the result; the last file of a run."""

RunState = Literal["waiting", "begun", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run by its folder."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> Run:
        """The run in a folder that `vit train` has begun."""
        path = Path(folder).expanduser()
        if not (path / RUN_FILE).is_file():
            what = "not a training run: it has no run.json" if path.is_dir() else "no such folder"
            raise TrainingError(f"{what}", where=path)
        return cls(path)

    @property
    def facts(self) -> dict[str, Any]:
        """`data`, `classes`, sizes, `steps`, `parameters`, `environment` and so on."""
        return read_sealed(self.folder / RUN_FILE)

    @property
    def recipe(self) -> Recipe:
        """All settings as run."""
        return read_recipe(self.folder / "recipe.toml")

    def metrics(self, split: str | None = None) -> list[Line]:
        """The lines of metrics.jsonl, or those of one split (`train`, `val`)."""
        return [line for line in read_journal(self.folder / METRICS_FILE) if split in (None, line["split"])]

    @property
    def finished(self) -> bool:
        """Whether the model and its result are written."""
        return (self.folder / RESULT_FILE).is_file() and (self.folder / "model").is_dir()

    @property
    def state(self) -> RunState:
        """Told by what is in the folder, so that it is right whenever a process was killed."""
        if not (self.folder / RUN_FILE).is_file():
            return "waiting"
        if (self.folder / FAILED_FILE).is_file():
            return "failed"
        return "done" if self.finished else "begun"

    @property
    def evaluation(self) -> Line:
        """The line of metrics of the saved model, once there is one."""
        line: Line = read_sealed(self.folder / RESULT_FILE)["evaluation"]
        return line

    def result(self, *keys: str) -> dict[str, float]:
        """These numbers of the saved model; none before the run is done."""
        return {key: self.evaluation[key] for key in keys} if self.state == "done" else {}

    def seal(self, evaluation: Line) -> None:
        """Write result.json, which ends a run: the numbers of its model, and what its files are."""
        paths = [self.folder / METRICS_FILE, *sorted((self.folder / "model").iterdir())]
        files = {path.relative_to(self.folder).as_posix(): digest(path) for path in paths}
        write_sealed(self.folder / RESULT_FILE, {"evaluation": evaluation, "files": files})

    def damage(self) -> str:
        """In what the files of a finished run are not what they were; empty if in nothing."""
        try:
            return changed_file(self.folder, read_sealed(self.folder / RESULT_FILE)["files"])
        except TrainingError:
            return f"{RESULT_FILE} has changed"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def best(self, step: int) -> Path:
        """Where the weights are that were the best after so many steps."""
        return self.folder / "best" / f"step-{step:08d}"

    def forget_checkpoints(self) -> None:
        """Remove them: nothing goes on from here."""
        shutil.rmtree(self.checkpoints, ignore_errors=True)

    @property
    def unreadable(self) -> dict[str, str]:
        """Images that were skipped, and why."""
        path = self.folder / "unreadable.json"
        return read_object(path, raises=TrainingError) if path.is_file() else {}

    def model(self) -> Model:
        """The trained model."""
        return load(self.folder)


def create(folder: Path, recipe: Recipe, facts: dict[str, Any]) -> Run:
    """Write the settings and the facts of a new run into its folder, the facts last: then it is a run."""
    try:
        Run(folder).checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot be written: {error.strerror}", where=folder) from error
    try:
        write_text(folder / "recipe.toml", to_toml(recipe.to_json()))
    except UnicodeEncodeError as error:
        raise TrainingError(f"a name that is not UTF-8 cannot be kept in recipe.toml: {error}", where=folder) from error
    write_sealed(folder / RUN_FILE, {**facts, "recipe": recipe.to_json()})
    return Run(folder)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    write_json(path, {**content, "digest": fingerprint(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote, if nothing has changed it since."""
    content = read_object(path, raises=TrainingError)
    if content.pop("digest", None) != fingerprint(content):
        raise TrainingError("has changed since it was written", where=path, hint="put it back, or start a new run")
    return content


def changed_file(folder: Path, digests: dict[str, str]) -> str:
    """The first file of a folder that is not what it was, in words; empty where all are."""
    for name, was in digests.items():
        try:
            if digest(folder / name) != was:
                return f"{name} has changed"
        except OSError as error:
            return f"{name}: {describe_error(error)}"
    return ""


@contextmanager
def claimed(out: str | Path | None, name: str) -> Iterator[Path]:
    """The folder of a new run, which no other process can take or train in: `out`, or a new one in `runs/`.

    Refused where there is a run, or anything else. If nothing comes of it, the folder is gone afterwards.
    """
    folder = new_folder(name) if out is None else Path(out).expanduser()
    if (folder / RUN_FILE).exists():
        raise TrainingError(
            "there is already a run",
            where=folder,
            hint=f"continue it with `vit train --resume {folder}`, or choose another {argument('out')}",
        )
    if folder.exists() and (not folder.is_dir() or not is_free(folder)):
        raise TrainingError(f"exists and is not empty; choose another {argument('out')}", where=folder)
    was_there = folder.is_dir() and out is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot be written: {error.strerror}", where=folder) from error
    try:
        with owned(folder):
            if not is_free(folder):  # another process came first, and has ended
                raise TrainingError(f"there is already a run; choose another {argument('out')}", where=folder)
            yield folder
    finally:
        if not was_there and not (folder / RUN_FILE).exists() and is_free(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_free(folder: Path) -> bool:
    """Whether nothing is in the folder but what a start leaves that ends before there is a run."""
    mine = {LOCK_FILE, "checkpoints", *(("recipe.toml",) if (folder / LOCK_FILE).exists() else ())}
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
            raise TrainingError(
                f"cannot be written: {error.strerror}; choose another {argument('out')}", where=folder
            ) from error


@contextmanager
def owned(folder: Path, *, wait_seconds: float = 0) -> Iterator[None]:
    """A context in which no other process trains in the folder; refused while another does for longer than that."""
    lock = Lock(folder / LOCK_FILE)
    end = time.monotonic() + wait_seconds
    while not (mine := lock.acquire(wait=False)) and time.monotonic() < end:
        time.sleep(0.1)
    if not mine:
        raise TrainingError(
            f"{lock.holder()} is training in it; wait for its end, or choose another {argument('out')}", where=folder
        )
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
        "processor": processor_name(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": sys.argv,
    }
