"""Listeners of a run (progress, TensorBoard, experiment trackers), and upload to the Hugging Face Hub."""

import base64
import importlib
import io
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from PIL import Image

from vitruvian.cache import scratch_folder
from vitruvian.errors import (
    ConfigError,
    ConversionError,
    HubError,
    MissingExtraError,
    TrainingError,
    UnknownNameError,
    require,
)
from vitruvian.evaluation.metrics import headline
from vitruvian.files import read_object, write_text
from vitruvian.model.build import Model
from vitruvian.progress import Progress, on_terminal, print_status
from vitruvian.report.html import PAGE
from vitruvian.text import describe_error
from vitruvian.training.run_folder import CARD_FILE, EVENTS_FOLDER, METRICS_FILE, Line, Run, model_card, read_journal
from vitruvian.weights.checkpoint_files import Description
from vitruvian.weights.load import RUN_FILE, load
from vitruvian.weights.save import TOLERANCE, compare, write

PROJECT = "vitruvian"
MAX_IMAGES = 16  # images of the report that are logged
EMBEDDED = re.compile(r"data:image/(?:png|jpeg|webp);base64,([A-Za-z0-9+/=]+)")


class Listener:
    """Receives the events of a run; override the methods you need."""

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        """The run starts, or resumes after `done` steps."""

    def stepped(self, step: int) -> None:
        """`step` steps are done."""

    def recorded(self, line: Line) -> None:
        """`line` was added to metrics.jsonl."""

    def said(self, text: str) -> None:
        """A note for the user."""

    def finished(self) -> None:
        """The run ended, successfully or not; called once."""


def notify(listeners: Sequence[Listener], text: str) -> None:
    for listener in listeners:
        listener.said(text)


def scalars(line: Line) -> dict[str, float]:
    """The numbers of a line of metrics by the names of trackers: `loss/train`, `top1/val`."""
    numbers = {name: value for name, value in line.items() if name != "step" and isinstance(value, int | float)}
    split = line.get("split", "run")
    return {f"{name}/{split}": float(value) for name, value in numbers.items() if not isinstance(value, bool)}


@cache
def print_once(text: str) -> None:
    """Print a status line, but the same text only once per process: a sweep has many runs."""
    print_status(text)


class TensorBoard(Listener):
    """Writes each line of metrics.jsonl as events: `loss/train`, `loss/val`, `top1/val` and so on.

    A resumed run appends, and TensorBoard drops the events written after the last checkpoint. Without the package
    `tensorboard` nothing is written, which is reported once.
    """

    _writer: Any = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        try:
            require("tensorboard", "train")
        except MissingExtraError as error:
            print_once(f"no TensorBoard events are written; {error}")
            return
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(folder / EVENTS_FOLDER), purge_step=done or None)
        except OSError as error:
            raise TrainingError(f"cannot be written: {error.strerror}", where=folder / EVENTS_FOLDER) from error
        if done:  # purging includes the checkpoint's own step, whose lines were written before the checkpoint
            for line in read_journal(folder / METRICS_FILE):
                if line.get("step") == done:
                    self.recorded(line)

    def recorded(self, line: Line) -> None:
        if self._writer is None:
            return
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["step"])
        self._writer.flush()  # no event before a checkpoint may be lost with the process

    def finished(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class ProgressListener(Listener):
    """Shows a progress bar with loss, learning rate and speed; prints evaluations and notes as lines."""

    _progress: Progress | None = None

    def started(self, *, folder: Path, steps: int, done: int) -> None:
        self._progress = Progress("step", steps, done=done)
        if not on_terminal():
            print_status(f"{folder}: step {done} of {steps}")

    def stepped(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(step)

    def recorded(self, line: Line) -> None:
        is_training = line["split"] == "train"
        name = "train" if is_training else "validation"
        text = f"epoch {line['epoch']:.2f}  {name} loss {line['loss']:.4f}  {headline(line)[1]}"
        if not is_training:
            print_status(f"step {line['step']}  {text}")
        elif self._progress is not None:
            self._progress.detail = f"{text}  lr {line['lr']:.2e}  {line['images_per_second']:.0f} img/s"

    def said(self, text: str) -> None:
        print_status(f"note: {text}")

    def finished(self) -> None:
        if self._progress is not None:
            self._progress.close()


class Tracker(Listener):
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

    def begin(self, run: Run, config: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int) -> None: ...

    def keep(self, run: Run, images: Sequence[Image.Image]) -> None:
        """Store the report's images and the model of a finished run."""

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


def run_key(run: Run) -> str:
    """An identifier of a run that stays when it is resumed."""
    return sha256(f"{run.folder.resolve()} {run.facts.get('started')}".encode()).hexdigest()[:16]


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
        where = {"dir": str(run.folder), "id": run_key(run), "resume": "allow"}
        self.session = self.module.init(project=PROJECT, name=run.folder.name, config=config, **where)

    def log(self, values: dict[str, float], step: int) -> None:
        self.session.log(values, step=step)

    def keep(self, run: Run, images: Sequence[Image.Image]) -> None:
        if images:
            self.session.log({f"report/{i}": self.module.Image(image) for i, image in enumerate(images)})
        artifact = self.module.Artifact(f"model-{run_key(run)}", type="model")
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


class Trackio(WandB):
    """Trackio, which has the functions of W&B, on this machine or in the Space of TRACKIO_SPACE_ID."""

    package = "trackio"

    def begin(self, run: Run, config: dict[str, Any]) -> None:
        name = f"{run.folder.name}-{run_key(run)[:6]}"
        self.session = self.module.init(project=PROJECT, name=name, config=config, resume="allow", embed=False)


TRACKERS = {"wandb": WandB, "mlflow": MLflow, "trackio": Trackio, "tensorboard": None}  # always written


def open_trackers(names: Sequence[str]) -> list[Listener]:
    """Listeners for these trackers, each once. Raises MissingExtraError with the pip command of a missing package."""
    for name in names:
        if name not in TRACKERS:
            raise UnknownNameError("tracker", name, TRACKERS, see=f"({', '.join(TRACKERS)})")
    return [kind() for kind in map(TRACKERS.__getitem__, dict.fromkeys(names)) if kind is not None]


LIBRARIES = {"huggingface": "transformers", "timm": "timm"}  # by the family of their files


def push(
    source: Model | str | Path, name: str, *, private: bool = False, license: str = "", report: str | Path | None = None
) -> str:
    """Upload a model to a repository of the Hugging Face Hub, which is created if it does not exist.

    transformers and timm open it if they can express the model, and `load` in any case.

    Args:
        source: A run, a model, or a file, directory or published name.
        name: The repository, such as "user/photos"; `private` makes a new one private.
        license: The license for the card, such as "mit"; by default that of the weights a run started from, if known.
        report: A folder of `vit evaluate --out`, whose numbers the card then has.

    Returns:
        The address of the repository. Raises HubError if the Hub refuses the upload or cannot be reached.
    """
    hub, utils = require("huggingface_hub", "hub"), require("huggingface_hub.utils", "hub")
    try:
        utils.validate_repo_id(name)
    except ValueError as error:
        raise ConfigError(describe_error(error), where=name) from error
    if "/" not in name:
        raise ConfigError("not the name of a repository, such as user/photos", where=name)
    with TemporaryDirectory(dir=scratch_folder()) as folder:
        write_repository(source, Path(folder) / "model", license=license, report=report, repository=name)
        try:
            hub.create_repo(name, private=private, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=f"{folder}/model", commit_message="Upload the model")
        except Exception as error:  # of huggingface_hub and of what is below it
            raise HubError(describe_error(error), where=name, hint="`hf auth login` stores a token") from error
    return f"{hub.constants.ENDPOINT}/{name}"


def write_repository(source: Model | str | Path, folder: Path, **card: Any) -> None:
    """Write the files of a repository into a new folder; the weights are read back and compared with the model."""
    model, notes, libraries = source if isinstance(source, Model) else load(source), list[str](), list[str]()
    with TemporaryDirectory(dir=scratch_folder()) as scratch:
        timm, more = Path(scratch) / "timm", dict[str, Any]()
        for family, path in (("timm", timm), ("huggingface", folder), ("native", folder)):
            if family == "native" and libraries:
                break
            try:
                notes += write(model, path, family, config=more)
            except ConversionError as error:
                notes.append(error.reason)
                continue
            if family == "timm":  # beside the files of transformers, under another name
                more = read_object(path / "config.json")
                more["pretrained_cfg"]["hf_hub_filename"] = "timm.bin"  # timm then looks for timm.safetensors
            libraries += [LIBRARIES[family]] if family in LIBRARIES else []
            compared = compare(model, load(path), family=family, path=path, seed=0)
            if not compared["largest_difference"] <= TOLERANCE * max(1.0, compared["largest_output"]):
                raise ConversionError(f"the {family} weights that were read back differ", hint="please report this")
        if "timm" in libraries and "transformers" in libraries:
            shutil.copyfile(timm / "model.safetensors", folder / "timm.safetensors")
        elif "timm" in libraries:
            shutil.copytree(timm, folder)
    write_text(folder / CARD_FILE, card_of(model, source, libraries=libraries[::-1], notes=notes, **card))


def card_of(model: Model, source: object, *, report: str | Path | None = None, **more: Any) -> str:
    """The model card of a model, with the facts of a run if `source` is one, and of a report of `vit evaluate`."""
    is_run = isinstance(source, str | Path) and (Path(source).expanduser() / RUN_FILE).is_file()
    numbers = None if report is None else read_object(Path(report).expanduser() / "evaluation.json")
    run = Run.open(str(source)) if is_run else None
    return model_card(Description.of(model), run, report=numbers, **more)
