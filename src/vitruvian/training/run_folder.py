"""The folder of a run: its files, and how processes create, lock and verify it.

`run.json` facts · `recipe.toml` all settings · `metrics.jsonl` · `events/` TensorBoard · `checkpoints/` · `best/` the
best weights so far, if the recipe selects by validation · `unreadable.json` skipped images · `model/` the trained model
· `adapter/` LoRA's updates · `report.html` · `result.json` the metrics of the model · `README.md` the model card.
"""

import itertools
import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

import numpy
import PIL
import torch

from vitruvian import __version__
from vitruvian.cache import Lock
from vitruvian.catalog import find_published, title_of
from vitruvian.cost import parameters
from vitruvian.data.formats import BUILT_IN
from vitruvian.errors import TrainingError, argument
from vitruvian.evaluation.metrics import headline, wilson
from vitruvian.files import digest, fingerprint, is_unfinished, parse_object, read_object, write_json, write_text
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.report.html import PAGE, notebook, render
from vitruvian.text import describe_error, format_duration, plural
from vitruvian.training.recipe import Recipe, read_recipe, to_toml
from vitruvian.weights.checkpoint_files import Description
from vitruvian.weights.load import RUN_FILE, load

SHOWN = 20  # number of classes that a model card names
RUNS = Path("runs")  # default parent folder of runs, sweeps and studies

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "events"
FAILED_FILE = "failed.json"  # why a run of a sweep or study diverged
LOCK_FILE = ".lock"
RECIPE_FILE = "recipe.toml"
CARD_FILE = "README.md"
RESULT_FILE = "result.json"
"""The metrics of the model and a digest of each result file; it makes a run finished."""

EMPTY = sha256().hexdigest()  # digest of an empty file

Line = dict[str, Any]  # of metrics.jsonl
RunState = Literal["waiting", "begun", "done", "failed"]


class Journal:
    """Appends to metrics.jsonl."""

    def __init__(self, path: Path, keep_bytes: int, keep_digest: str) -> None:
        """Truncates an existing file to `keep_bytes`, its size at the checkpoint that the run resumes from."""
        self.path = path
        content = path.read_bytes()[:keep_bytes] if path.is_file() else b""
        self._hash = sha256(content)
        if self.digest() != keep_digest:
            reason = "has changed since the checkpoint was written"
            raise TrainingError(reason, where=path, hint="restore it, or start a new run")
        self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115  (open as long as the run)
        self._file.truncate(keep_bytes)

    def record(self, line: Line) -> None:
        try:
            written = json.dumps(line).encode() + b"\n"
            self._file.write(written)
            self._file.flush()
            self._hash.update(written)
        except OSError as error:
            raise TrainingError(f"cannot be written: {error.strerror}", where=self.path) from error

    def sync(self) -> int:
        """Flush the file to disk; returns its size in bytes."""
        os.fsync(self._file.fileno())
        return self.path.stat().st_size

    def digest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[Line]:
    """The lines of metrics.jsonl; an incomplete last line, still being written, is skipped."""
    if path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
            if line.endswith(b"\n"):
                yield parse_object(line, f"{path}, line {number}", raises=TrainingError)


@dataclass(frozen=True, slots=True)
class Run:
    """A training run, finished or not, read from its folder."""

    folder: Path

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """The run in a folder that `vit train` has written.

        Raises:
            TrainingError: the folder does not exist or is not a training run.
        """
        path = Path(folder).expanduser()
        if not (path / RUN_FILE).is_file():
            what = "not a training run: it has no run.json" if path.is_dir() else "no such folder"
            raise TrainingError(what, where=path)
        return cls(path)

    @property
    def facts(self) -> dict[str, Any]:
        """`data`, `classes`, sizes, `steps`, `parameters`, `environment` and so on."""
        return read_sealed(self.folder / RUN_FILE)

    @property
    def recipe(self) -> Recipe:
        """All settings."""
        return read_recipe(self.folder / RECIPE_FILE)

    def metrics(self, split: str | None = None) -> list[Line]:
        """The lines of metrics.jsonl, of all splits or one (`train`, `val`)."""
        return [line for line in read_journal(self.folder / METRICS_FILE) if split in (None, line["split"])]

    @property
    def finished(self) -> bool:
        """Whether the model and its metrics are written."""
        return (self.folder / RESULT_FILE).is_file() and (self.folder / "model").is_dir()

    @property
    def state(self) -> RunState:
        """Derived from the files in the folder, so that it is right even if a process was killed."""
        if not (self.folder / RUN_FILE).is_file():
            return "waiting"
        if (self.folder / FAILED_FILE).is_file():
            return "failed"
        return "done" if self.finished else "begun"

    @property
    def evaluation(self) -> Line:
        """The metrics of the saved model."""
        line: Line = read_sealed(self.folder / RESULT_FILE)["evaluation"]
        return line

    def _repr_html_(self) -> str:
        if self.state != "done":
            return notebook(f"{self.folder}: {self.state}", (), ())
        rows = [(name, value) for name, value in self.evaluation.items() if isinstance(value, int | float)]
        heading = f"{self.folder}: {describe_result(self.evaluation, self.facts['validation'])}"
        return notebook(heading, ("metric", ">value"), rows, [f"report: {self.folder / PAGE}"])

    def to_json(self) -> dict[str, Any]:
        """The folder, what it was measured on, the metrics of its weights, and how many images could not be read."""
        facts = {"folder": str(self.folder), "validation": self.facts["validation"], "unreadable": len(self.unreadable)}
        return {**facts, "steps": self.facts["steps"], **self.evaluation}

    def result(self, *keys: str) -> dict[str, float]:
        """The main metrics of the saved model; empty until the run is complete."""
        if self.state != "done":
            return {}
        return {key: value for key, value in self.evaluation.items() if key in keys}

    @property
    def diverged(self) -> str:
        """Why training was stopped early, if its loss exploded; the model then has the best weights before that."""
        return str(read_sealed(self.folder / RESULT_FILE).get("diverged", ""))

    def seal(self, evaluation: Line, diverged: str = "") -> None:
        """Write result.json, which ends a run: the metrics of its model and the digests of its files."""
        folders = (sorted(self.folder.glob(f"{name}/*")) for name in ("model", "adapter"))
        paths = [self.folder / METRICS_FILE, *itertools.chain(*folders)]
        files = {path.relative_to(self.folder).as_posix(): digest(path) for path in paths}
        content = {"evaluation": evaluation, "files": files} | ({"diverged": diverged} if diverged else {})
        write_sealed(self.folder / RESULT_FILE, content)
        result, environment = describe_result(evaluation, str(self.facts["validation"])), self.facts["environment"]
        time = f"{format_duration(evaluation['seconds'])} on {environment['processor']}"
        recipe = self.recipe.replace(result=result, time=time).to_json()
        write_text(self.folder / RECIPE_FILE, to_toml(recipe))
        described = Description.from_json(self.facts["model"], f"{self.folder}/{RUN_FILE}")
        write_text(self.folder / CARD_FILE, model_card(described, self))

    def damage(self) -> str:
        """How the files of a finished run have changed since they were written; empty if they have not."""
        try:
            return find_changed_file(self.folder, read_sealed(self.folder / RESULT_FILE)["files"])
        except TrainingError:
            return f"{RESULT_FILE} has changed"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def best(self, step: int) -> Path:
        """The folder of the best weights, if those were the weights after `step` steps."""
        return self.folder / "best" / f"step-{step:08d}"

    def remove_old(self, recipe: Recipe, *, keep_best: bool) -> None:
        """Delete what a finished run no longer needs: all but the last checkpoint, and perhaps the best weights.

        Checkpoints that were asked for by `checkpoint_steps` stay.
        """
        for path in () if recipe.checkpoint_steps else sorted(self.checkpoints.glob("step-*"))[:-1]:
            shutil.rmtree(path, ignore_errors=True)
        if not keep_best:
            shutil.rmtree(self.folder / "best", ignore_errors=True)

    @property
    def unreadable(self) -> dict[str, str]:
        """Skipped images, with the reasons."""
        path = self.folder / "unreadable.json"
        return read_object(path, raises=TrainingError) if path.is_file() else {}

    def model(self) -> Model:
        """The trained model."""
        return load(self.folder)


def describe_result(evaluation: Line, validation: str) -> str:
    """The accuracy with its interval and what it was measured on."""
    name, text = headline(evaluation)
    images = f"{plural(evaluation['count'], 'image')} ({validation})"
    if name != "top1":
        ends = (evaluation.get(f"{name}_low"), evaluation.get(f"{name}_high"))
        unknown = None in ends or evaluation["count"] < 2  # resampling a single image shows no variation
        interval = "" if unknown else " (95% confidence interval {:.4g} to {:.4g})".format(*ends)
        return f"{text}{interval} on {images}"
    low, high = wilson(evaluation["top1"] / 100 * evaluation["count"], evaluation["count"])
    interval = f"95% confidence interval {low:.1f} to {high:.1f}%"
    what = f"{evaluation['patches']} masked patches in " if "patches" in evaluation else ""
    return f"accuracy {evaluation['top1']:.2f}% ({interval}) on {what}{images}"


def model_card(model: Description, run: Run | None = None, **more: Any) -> str:
    """The model card as Markdown with the Hub's metadata: architecture, training data and measured results.

    `more` has what the template card.md knows besides: `license`, `libraries`, `notes`, `report` and `repository`.
    """
    context: dict[str, Any] = {"license": "", "libraries": [], "notes": [], "report": None, "repository": ""} | more
    if run is not None:
        facts, recipe, measured = run.facts, run.recipe, run.evaluation
        context |= {"facts": facts, "recipe": recipe, "measured": measured, "origin": find_published(recipe.weights)}
        context["result"] = describe_result(measured, str(facts["validation"]))
    name, count = title_of(model.config), parameters(model.config)
    return render("card.md", name=name, parameters=count, model=model, run=run, shown=SHOWN, **context).lstrip()


def write_run(folder: Path, recipe: Recipe, facts: dict[str, Any]) -> Run:
    """Write the settings and the facts of a run; run.json, written last, makes the folder a run."""
    run = Run(folder)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot be written: {error.strerror}", where=folder) from error
    write_text(folder / RECIPE_FILE, to_toml(recipe.to_json()))
    write_sealed(folder / RUN_FILE, {**facts, "recipe": recipe.to_json()})
    return run


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with a digest of its content."""
    write_json(path, {**content, "digest": fingerprint(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    """The content that `write_sealed` wrote; TrainingError if it has been edited."""
    content = read_object(path, raises=TrainingError)
    if content.pop("digest", None) != fingerprint(content):
        raise TrainingError("has changed since it was written", where=path, hint="restore it, or start a new run")
    return content


def find_changed_file(folder: Path, digests: dict[str, str]) -> str:
    """Describe the first file that does not match its digest; empty if all do."""
    for name, expected in digests.items():
        try:
            if digest(folder / name) != expected:
                return f"{name} has changed"
        except OSError as error:
            return f"{name}: {describe_error(error)}"
    return ""


@contextmanager
def claim_folder(out: str | Path | None, name: str) -> Iterator[Path]:
    """A context with the locked folder of a new run: `out`, which must be empty, or a new one in `runs/`.

    The folder is removed afterwards if no run was created in it.
    """
    other, taken = f"choose another {argument('out')}", "this folder already contains a run"
    folder = make_folder(name) if out is None else Path(out).expanduser()
    if (folder / RUN_FILE).exists():
        raise TrainingError(taken, where=folder, hint=f"continue it with `vit train --resume {folder}`, or {other}")
    if not is_free(folder):
        raise TrainingError("exists and is not empty", where=folder, hint=other)
    existed = folder.is_dir() and out is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot be written: {error.strerror}", where=folder) from error
    try:
        with lock_folder(folder):
            if not is_free(folder):  # another process came first, and has ended
                raise TrainingError(taken, where=folder, hint=other)
            yield folder
    finally:
        if not existed and not (folder / RUN_FILE).exists() and is_free(folder):
            shutil.rmtree(folder, ignore_errors=True)


def is_free(folder: Path) -> bool:
    """Whether a folder is new, or empty except for the remains of a run that failed before it was created."""
    if not folder.is_dir():
        return not folder.exists()
    leftovers = {LOCK_FILE, "checkpoints", *((RECIPE_FILE,) if (folder / LOCK_FILE).exists() else ())}
    files = [path for path in folder.iterdir() if path.name not in leftovers and not is_unfinished(path)]
    return not files and not (folder / RUN_FILE).exists() and not any(folder.glob("checkpoints/*"))


def make_folder(name: str) -> Path:
    """Create the first free folder `runs/NAME-1`, `runs/NAME-2`, ..."""
    folders = (RUNS / f"{name}-{suffix}" for suffix in itertools.count(1))
    while True:
        folder = next(folders)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            hint = f"choose another {argument('out')}"
            raise TrainingError(f"cannot be written: {error.strerror}", where=folder, hint=hint) from error


def series_folder(name: str, out: str | Path | None, file: str, kind: str, settings: Mapping[str, Any]) -> Path:
    """`out`, if it is free or has this series of runs; by default the first such folder `runs/NAME-1`, ...

    A folder with `file` contains a series of this kind, which is the same if it was started with these `settings`.
    """

    def obstacle(folder: Path) -> str:
        if (folder / file).is_file():
            before = read_object(folder / file, raises=TrainingError).get("settings", {})
            change = next(list_changes(before, settings), "")
            return change and f"contains a {kind} with {change}"
        is_taken = folder.exists() if out is None else not is_free(folder)
        return f"exists and is not a {kind}" if is_taken else ""

    if out is None:
        folders = (RUNS / f"{name}-{suffix}" for suffix in itertools.count(1))
        return next(folder for folder in folders if not obstacle(folder))
    folder = Path(out).expanduser()
    if reason := obstacle(folder):
        raise TrainingError(reason, where=folder, hint=f"choose another {argument('out')}")
    return folder


UNSET = {"image_size", "epochs", "steps", "eval_batch_size", "max_train_samples"}
"""Settings for which 0 means that they are not set."""


def list_changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The values in which two JSON objects differ, by their full names."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*now, *before]):
            yield from list_changes(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now and not before and name in UNSET:
        yield f"no {name}, not {name}={now}"
    elif before != now:
        yield f"{name}={before}, not {now or 'unset' if name in UNSET else now}"


@contextmanager
def lock_folder(folder: Path, *, wait_seconds: float = 0) -> Iterator[None]:
    """A context in which no other process trains in the folder; TrainingError if one still does after the wait."""
    lock = Lock(folder / LOCK_FILE)
    end = time.monotonic() + wait_seconds
    while not (is_locked := lock.acquire(wait=False)) and time.monotonic() < end:
        time.sleep(0.1)
    if not is_locked:
        hint = f"wait until it ends, or choose another {argument('out')}"
        raise TrainingError(f"{lock.holder()} is training in it", where=folder, hint=hint)
    try:
        yield
    finally:
        lock.release()


def absolute_path(name: str | Path) -> str:
    """An existing path as an absolute one; a published name unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve() if path.exists() else name)


def absolute_data(data: str | Path) -> str:
    """Make an existing path absolute; return a built-in name, a task or a URL unchanged."""
    return str(data) if str(data) in BUILT_IN else absolute_path(data)


def command_line() -> str:
    """The command as one would type it."""
    program, *arguments = sys.argv
    is_vit = Path(program).name in ("vit", "__main__.py")
    return shlex.join(["vit" if is_vit else program, *arguments])


def environment() -> dict[str, Any]:
    """Versions, hardware and command line, for the record."""
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
        "command": command_line(),
    }
