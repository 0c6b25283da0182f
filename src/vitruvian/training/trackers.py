"""Experiment trackers as listeners of a run: settings, metrics, the report with its images, and the model."""

import base64
import importlib
import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from vitruvian.errors import MissingExtraError, TrainingError, UnknownNameError
from vitruvian.progress import print_status
from vitruvian.report.html import PAGE
from vitruvian.text import describe_error
from vitruvian.training.journal import Line, Listener, scalars
from vitruvian.training.run_folder import Run

PROJECT = "vitruvian"
MAX_IMAGES = 16  # images of the report that are logged
EMBEDDED = re.compile(r"data:image/(?:png|jpeg|webp);base64,([A-Za-z0-9+/=]+)")


class Tracker(Listener, ABC):
    """Sends a run to a tracker. If that fails while the run trains, one line says so and the run continues."""

    package: ClassVar[str]
    pip: ClassVar[str] = ""  # its name on PyPI, if another one
    failed = False

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module(self.package)
        except ImportError as error:
            hint = f"pip install {self.pip or self.package}"
            raise MissingExtraError(f"this needs the package {self.package!r}: run {hint}") from error

    @abstractmethod
    def begin(self, run: Run, config: dict[str, Any]) -> None: ...

    @abstractmethod
    def log(self, values: dict[str, float], step: int) -> None: ...

    @abstractmethod
    def keep(self, run: Run, images: Sequence[Image.Image]) -> None:
        """Store the report's images and the model of a finished run."""

    @abstractmethod
    def end(self) -> None: ...

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self.run = Run(folder)
        facts = self.run.facts
        names = ("data", "training_images", "validation_images", "steps", "parameters", "environment")
        config = self.run.recipe.to_json() | {f"run.{name}": facts.get(name) for name in names}
        try:
            self.begin(self.run, config)
        except Exception as error:
            raise TrainingError(f"the tracker {self.package} cannot start: {describe_error(error)}") from error

    def attempt(self, function: Callable[..., object], *arguments: Any) -> None:
        if self.failed:
            return
        try:
            function(*arguments)
        except Exception as error:
            self.failed = True
            print_status(f"note: {self.package} failed and gets nothing more of this run: {describe_error(error)}")

    def recorded(self, line: Line) -> None:
        self.attempt(self.log, scalars(line), line["step"])

    def finished(self) -> None:
        if self.run.finished:
            self.attempt(self.keep, self.run, report_images(self.run.folder / PAGE))
        self.attempt(self.end)


def report_images(page: Path) -> list[Image.Image]:
    """The first images of a report."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    images = []
    for match in list(EMBEDDED.finditer(text))[:MAX_IMAGES]:
        with suppress(OSError):
            images.append(Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGB"))
    return images


class WandB(Tracker):
    """Weights & Biases. A resumed run continues; WANDB_MODE=offline writes files only."""

    package = "wandb"

    def begin(self, run: Run, config: dict[str, Any]) -> None:
        key = sha256(f"{run.folder.resolve()} {run.facts.get('started')}".encode()).hexdigest()[:16]
        where = {"dir": str(run.folder), "id": key, "resume": "allow"}
        self.session = self.module.init(project=PROJECT, name=run.folder.name, config=config, **where)

    def log(self, values: dict[str, float], step: int) -> None:
        self.session.log(values, step=step)

    def keep(self, run: Run, images: Sequence[Image.Image]) -> None:
        if images:
            self.session.log({"report": [self.module.Image(image) for image in images]})
        artifact = self.module.Artifact(f"model-{self.session.id}", type="model")
        artifact.add_dir(str(run.folder / "model"))
        artifact.add_file(str(run.folder / PAGE))
        self.session.log_artifact(artifact)

    def end(self) -> None:
        self.session.finish()


class MLflow(Tracker):
    """MLflow, at MLFLOW_TRACKING_URI. A resumed run is a new run there."""

    package, pip = "mlflow", "mlflow-skinny"

    def begin(self, run: Run, config: dict[str, Any]) -> None:
        self.module.set_experiment(PROJECT)
        self.module.start_run(run_name=run.folder.name)
        self.module.log_params({name: str(value)[:500] for name, value in config.items()})

    def log(self, values: dict[str, float], step: int) -> None:
        self.module.log_metrics(values, step=step)

    def keep(self, run: Run, images: Sequence[Image.Image]) -> None:
        for i, image in enumerate(images):
            self.module.log_image(image, f"report/{i}.png")
        self.module.log_artifacts(str(run.folder / "model"), "model")
        self.module.log_artifact(str(run.folder / PAGE))

    def end(self) -> None:
        self.module.end_run()


TRACKERS: dict[str, type[Tracker] | None] = {"wandb": WandB, "mlflow": MLflow, "tensorboard": None}  # always written


def open_trackers(names: Sequence[str]) -> list[Listener]:
    """Listeners for these trackers, each once. Raises MissingExtraError with the pip command of a missing package."""
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS, see=f"({', '.join(TRACKERS)})")
    return [kind() for kind in map(TRACKERS.__getitem__, dict.fromkeys(names)) if kind is not None]
