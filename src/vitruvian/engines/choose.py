"""The engine of a model: the requested one, or the fastest on this machine, measured once and cached."""

import atexit
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from vitruvian.cache import cache_folder, file_lock, scratch_folder
from vitruvian.config import TOLERANCE
from vitruvian.engines.export import EngineForward, Forward, check_outputs, evaluating, export, fits_onnx
from vitruvian.engines.graph import open_single
from vitruvian.engines.runtimes import (
    DEVICES,
    FEATURES,
    EngineName,
    Session,
    SplitGraph,
    check_engine,
    installed,
    present,
    versions,
)  # fmt: skip
from vitruvian.engines.torch_variant import TorchVariant
from vitruvian.errors import ConversionError, FileError, VitruvianError, argument
from vitruvian.files import digest, file_stamp, fingerprint, read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.model.batching import eval_mode, map_over_cores
from vitruvian.model.build import Model
from vitruvian.progress import print_status
from vitruvian.settings import Size
from vitruvian.text import describe_error
from vitruvian.weights.checkpoint_files import tensors_digest
from vitruvian.weights.load import load
from vitruvian.weights.save import save

EXPORT_VERSION = 5  # of the exported graphs; increment it to invalidate cached ones
MAX_CACHED_GRAPHS = 8  # in the cache; the least recently used are removed
RECORD = "exported.json"  # stamps and checksums of a cached graph's files, written last
ROUNDS = 15  # measurements per engine, interleaved
MIN_ROUNDS, MAX_SECONDS = 3, 15.0  # fewer rounds, but at least 3, if a large model takes longer than this
REST_SECONDS = 0.03  # before each measurement, because torch's threads keep spinning after a call
OPEN_FROM = 64  # images from which on opening a remembered engine takes less time than it saves
CHOOSE_FROM = 256  # images from which on `auto` chooses an engine
FINISH_SECONDS = 20.0  # maximum time after a job, and no longer than it took, to complete a choice that it began
WARM_UP, TRIAL_ROUNDS = 1, 5  # of a choice during a job: batches per candidate that are not counted, and those that are
CLEARLY_SLOWER = 1.5  # candidates that take this many times as long as the best are dropped after a round
EXPORT_APART = """
import json, os, sys
if hasattr(os, "nice"):
    os.nice(10)
from vitruvian.engines.choose import export_engines
print(json.dumps(export_engines(sys.argv[1], tuple(json.loads(sys.argv[2])))))
"""

Key = TypeVar("Key")


class RunMode(NamedTuple):
    """How an engine computes a batch."""

    engine: str
    split: bool = False  # each core computes its own images; otherwise all cores share each operation
    fixed: bool = False  # the graph is opened for a fixed batch size (one image, or a core's piece); otherwise for any


class EngineTrial:
    """Finds the fastest of several ways to compute batches by computing real ones, with each way in turn."""

    def __init__(self, forwards: dict[RunMode, EngineForward], batch_size: int) -> None:
        self.forwards, self.batch_size = forwards, batch_size
        self.seconds: dict[RunMode, list[float]] = {mode: [] for mode in forwards}

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        mode = min(self.seconds, key=lambda mode: len(self.seconds[mode]))
        begin = time.perf_counter()
        values = self.forwards[mode](pixels, output)
        if len(pixels) == self.batch_size:  # a short last batch is not comparable
            self.add(mode, time.perf_counter() - begin)
        return values

    def add(self, mode: RunMode, seconds: float) -> None:
        """Add a measurement. At the end of a round, the ways that are clearly slower than the best are dropped."""
        self.seconds[mode].append(seconds)
        rounds = {len(times) for times in self.seconds.values()}
        if len(rounds) == 1 and rounds.pop() > WARM_UP:
            limit = CLEARLY_SLOWER * min(self.shortest.values())
            self.seconds = {mode: self.seconds[mode] for mode, times in self.shortest.items() if times <= limit}

    @property
    def shortest(self) -> dict[RunMode, float]:
        """The shortest time of each way: other load, such as decoding, only adds to it."""
        return {mode: min(times[WARM_UP:]) for mode, times in self.seconds.items()}

    @property
    def best(self) -> RunMode | None:
        """The fastest way, once it is known."""
        rounds = min(len(times) for times in self.seconds.values()) - WARM_UP
        if rounds < (1 if len(self.seconds) == 1 else TRIAL_ROUNDS):
            return None
        return min(self.shortest, key=self.shortest.__getitem__)


class Choice:
    """What computes single images, or batches, of one image size: a given mode, or the one that `auto` chooses.

    `auto` starts with torch. A remembered choice is opened if the number of images repays it. A new one is made in the
    background: another process exports the graphs, because tracing a model here would disturb its forward passes, and
    a thread opens them. Then batches are computed by all candidates in turn, and the fastest computes the rest. A graph
    `single` that was written for single images is used for them instead of a choice.
    """

    def __init__(self, model: Model, pixels: Tensor, mode: RunMode | None = None, single: Path | None = None) -> None:
        self.model, self.pixels = model, pixels
        self.mode = mode or default_mode("torch", len(pixels))
        self.forward = open_forward(model, self.mode, self.size)
        self.is_final = mode is not None or len(installed()) == 1
        self.started = time.monotonic()
        self.trial: EngineTrial | None = None
        self.thread: threading.Thread | None = None
        self.is_checked = False  # whether this process has compared the engine with torch
        self.single = single if len(pixels) == 1 else None

    @property
    def size(self) -> Size:
        return self.pixels.shape[2], self.pixels.shape[3]

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        values = (self.trial or self.forward)(pixels, output)
        if self.is_checked or self.trial is not None or self.mode.engine == "torch":
            return values
        return self._check(pixels, values, output)

    def _check(self, pixels: Tensor, values: Tensor, output: str) -> Tensor:
        """Compare an image of each core's piece with torch, which computes this and all later batches if they differ.

        The graph was compared when it was exported, but a runtime may still fail on this machine or in this process.
        """
        with eval_mode(self.model):
            expected = torch_forward(self.model, False, pixels[::4], output)
            largest = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
            if torch.allclose(values[::4], expected, rtol=0.0, atol=TOLERANCE * max(1.0, largest), equal_nan=True):
                self.is_checked = True
                return values
            difference = (values[::4] - expected).abs().max()
            self.mode = default_mode("torch", len(pixels))
            self.forward = open_forward(self.model, self.mode, self.size)
            print_status(f"note: continuing with torch: outputs of the engine differ from torch's by {difference:.2g}")
            return self.forward(pixels, output)

    def advance(self, images: int) -> str:
        """Take the next step, given the number of images that are known to come; returns what to print about it."""
        if self.is_final or images < OPEN_FROM:
            return ""
        if self.single is not None:
            return self.open_single()
        if self.thread is None:
            if (mode := remembered_mode(self.model, self.pixels)) is not None:
                self.is_final = True
                try:
                    self.forward, self.mode = open_forward(self.model, mode, self.size), mode
                except VitruvianError as error:
                    return f"engine: torch, because {mode.engine} failed: {error}"
                return f"engine: {mode.engine}"
            if images < CHOOSE_FROM:
                return ""
            self.thread = threading.Thread(target=self._open, args=(torch.get_num_threads(),), daemon=True)
            self.thread.start()
            return "engine: torch, until the fastest engine has been chosen in the background, once for this model"
        if self.trial is None or (best := self.trial.best) is None:
            return ""
        rate = len(self.pixels) / self.trial.shortest[best]
        self.forward, self.mode, self.trial, self.is_final = self.trial.forwards[best], best, None, True
        remember(self.model, self.pixels, best)
        return f"engine: {best.engine} from here on, {rate:.3g} images per second"

    def open_single(self) -> str:
        """Open the graph for single images, whose loss was measured when it was written; returns what to print."""
        assert self.single is not None
        session = open_single(self.single, tuple(self.pixels.shape[1:]), self.model.config.num_classes)
        self.is_final = True
        if session is None:
            return ""
        exact = self.forward

        def forward(pixels: Tensor, output: str = "") -> Tensor:
            return exact(pixels, output) if output else session(pixels)  # it has no features

        self.forward, self.mode, self.is_checked = forward, RunMode(session.engine), True
        return f"engine: {session.engine} for single images"

    def _open(self, cores: int) -> None:
        try:
            torch.set_num_threads(cores)  # a new thread does not always inherit the setting
            forwards, _ = open_candidates(self.model, self.pixels, export_apart(self.model, self.size))
            self.trial = EngineTrial(forwards, len(self.pixels))
        except Exception as error:  # whatever it is, torch works
            self.is_final = True
            print_status(f"note: continuing with torch: {describe_error(error)}")

    def finish(self, end: float) -> None:
        """Complete a choice that has begun, until the time `end`; wait once, not after every job on a busy machine."""
        late = choice_file(self.model, self.pixels).with_suffix(".late")
        if self.thread is None or self.is_final or late.exists():
            return
        seconds = max(0.0, end - time.monotonic())
        at_most = f"at most {max(1, round(seconds))} s; Ctrl-C skips it"
        print_status(f"note: choosing the fastest engine for the next time, once for this model, {at_most} ...")
        self.thread.join(seconds)
        while self.trial is not None and time.monotonic() < end:
            self(self.pixels)
            self.advance(CHOOSE_FROM)
        done = self.trial is None and not self.thread.is_alive()
        if not done:
            with suppress(FileError):
                write_json(late, {})
        print_status(f"note: the next time uses {self.mode.engine}" if done else "note: a longer job will choose")


class Engine:
    """The outputs of a model by one engine; the graph is exported, checked and opened when first needed."""

    choices: ClassVar[list[Choice]] = []  # all of this process, for `finish_choices`

    def __init__(self, model: Model, name: str, single: Path | None = None) -> None:
        """`single` is a graph for single images, which `auto` uses for their logits."""
        self.model, self.name, self.single = model, name, single if name == "auto" else None
        self.quiet = False
        self._choices: dict[tuple[int, ...], Choice] = {}
        self._images = 0
        self._expected: int | None = None
        self._is_named = name != "auto"  # whether a line has named the engine
        self._turn, self._cores = threading.Lock(), threading.Lock()

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        """(B, channels, rows, columns) -> logits (B, K), or the features (B, F).

        The mode chosen for the first batch of an image size is kept. A single image after larger batches, often the
        last of many, is run like them, unless `prepare` was called for single images. Calls may overlap; those that
        need all cores wait for each other.
        """
        key, batch_key = (len(pixels) > 1, *pixels.shape[1:]), (True, *pixels.shape[1:])
        with self._turn:
            if key not in self._choices:
                self._choices[key] = self._choices.get(batch_key) or self._begin(pixels)
            choice = self._choices[key]
            self._images += len(pixels)
            images = max(self._images, self._expected or 0)
            line = choice.advance(images)
            if not self.quiet and (line or (not self._is_named and images >= OPEN_FROM)):
                print_status(line or f"engine: {choice.mode.engine}")
                self._is_named = True
        with nullcontext() if choice.mode.split and choice.trial is None else self._cores:
            return choice(pixels, output)

    def expect(self, images: int) -> None:
        """Announce a job of this many further images, or 0 if it is not known.

        For a job, `auto` opens or chooses another engine without waiting, if the images repay it. Without one, as if a
        caller measured the model on a batch of pixels, it is chosen in the first call.
        """
        self._expected = self._images + images

    def prepare(self, pixels: Tensor) -> RunMode:
        """Choose, open and run the mode for batches like this one, so that the first request does not wait for it."""
        choice = self._choose(pixels)
        self._choices[len(pixels) > 1, *pixels.shape[1:]] = choice
        self._is_named = True  # the caller reports the mode
        self(pixels)
        return choice.mode

    def _begin(self, pixels: Tensor) -> Choice:
        if self.name != "auto" or self._expected is None:
            return self._choose(pixels)
        choice = Choice(self.model, pixels, single=self.single)
        self.choices.append(choice)
        return choice

    def _choose(self, pixels: Tensor) -> Choice:
        mode = default_mode(self.name, len(pixels))
        if self.single is not None and len(pixels) == 1:
            choice = Choice(self.model, pixels, default_mode("torch", 1), self.single)
            choice.open_single()
            return choice
        if self.name == "auto":
            mode = remembered_mode(self.model, pixels) or fastest_mode(self.model, pixels)
        return Choice(self.model, pixels, mode)


def finish_choices() -> None:
    """Complete the choices of `auto` that this process has begun, in no more time than the job took, or FINISH_SECONDS.

    Ctrl-C skips them.
    """
    now = time.monotonic()
    took = now - min((choice.started for choice in Engine.choices), default=now)
    with suppress(KeyboardInterrupt):
        for choice in Engine.choices:
            choice.finish(now + min(took, FINISH_SECONDS))


def default_mode(engine: str, batch_size: int) -> RunMode:
    """The usually fastest mode of an engine."""
    return RunMode(engine, batch_size > 1 and engine not in DEVICES, engine not in ("torch", *DEVICES))


def open_forward(model: Model, mode: RunMode, size: Size) -> EngineForward:
    """The forward pass of a model in `mode` on images of `size`.

    Raises ConversionError if the engine's outputs differ from the model's; this is checked once for a cached graph.
    """
    if mode.engine == "torch":
        return partial(torch_forward, model, mode.split)
    if mode.engine.startswith("torch:"):
        return TorchVariant(model, mode.engine)
    graph = cached_graph(model, mode.engine, size)
    session: SplitGraph | Session
    if mode.split and mode.fixed:
        session = SplitGraph(graph, mode.engine)
    else:
        session = Session(graph, mode.engine, split=mode.split, batch_size=1 if mode.fixed else None)
    record = graph.with_name(f"{mode.engine.replace(':', '-')}.checked.json")
    with suppress(FileError):
        if isinstance(read_object(record).get("largest_difference"), float):
            return session
    what, hint = f"the outputs of {mode.engine}", f"use {argument('engine', 'torch')}, and please report this"
    shapes = [(3, model.config.in_channels, *size)]
    with evaluating(model):
        difference, _ = check_outputs(model, session, shapes, what, features=model.head is not None, hint=hint)
    with suppress(FileError):  # a read-only cache: the next start checks again
        write_json(record, {"largest_difference": difference})
    return session


def torch_forward(model: Model, split: bool, pixels: Tensor, output: str = "") -> Tensor:
    function: Forward = model.features if output == FEATURES else model
    if split:
        return map_over_cores(function, pixels)
    with torch.inference_mode():
        return function(pixels)


def graph_files(model: Model, engine: str, size: Size) -> tuple[Path, list[Path]]:
    """The folder of the model's graph in the cache, and its files.

    Both runtimes read ONNX equally fast. If only OpenVINO is installed, its own format is exported.
    """
    is_onnx = engine.startswith("onnxruntime") or ("onnxruntime" in installed() and fits_onnx(model))
    exporters = versions(("torch", "onnxruntime" if is_onnx else "openvino"))
    weights, config = tensors_digest(model.state_dict()), fingerprint(model.config.to_json())
    folder = cache_folder() / "engines" / short_hash([EXPORT_VERSION, weights, config, list(size), exporters])
    names = ["model.onnx"] if is_onnx else ["openvino/model.xml", "openvino/model.bin"]
    return folder, [folder / name for name in names]


def cached_graph(model: Model, engine: str, size: Size) -> Path:
    """Path of the model's graph in the cache, with logits and features; exported the first time."""
    folder, files = graph_files(model, engine, size)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main and not is_intact(folder / RECORD, files) and engine not in export_apart(model, size):
        raise ConversionError(f"the export of the model for {engine} failed")  # here it would disturb other threads
    if not is_intact(folder / RECORD, files):  # checked before locking, since a read-only cache cannot be locked
        try:
            with file_lock(folder / "lock"):
                if not is_intact(folder / RECORD, files):  # another process may have written it meanwhile
                    remove_graph(folder, files[0])
                    print_status(f"note: exporting the model for {engine}, once ...")
                    is_onnx = len(files) == 1  # else a folder
                    path = files[0] if is_onnx else files[0].parent
                    export(model, path, to="onnx" if is_onnx else "openvino", image_size=size, features=True)
                    write_record(folder / RECORD, files)
                    remove_old_graphs(folder.parent)
        except FileError as error:
            raise error.replace(hint="set $VITRUVIAN_CACHE to use another cache folder") from error
    with suppress(OSError):
        os.utime(folder)
    return files[0]


def export_apart(model: Model, size: Size) -> list[str]:
    """Engines that can run the model, whose graphs another process, of low priority, has exported and checked."""
    with TemporaryDirectory(dir=scratch_folder()) as folder:
        save(model, Path(folder) / "model")
        command = [sys.executable, "-c", EXPORT_APART, f"{folder}/model", json.dumps(size)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        atexit.register(child.kill)
        output, _ = child.communicate()
        atexit.unregister(child.kill)
    if child.returncode:
        raise ConversionError("the export of the model failed")
    failures: dict[str, str] = json.loads(output.splitlines()[-1])
    for name, reason in failures.items():
        print_status(f"note: skipping {name}: {reason}")
    return [name for name in present(installed()) if name not in failures]


def export_engines(path: str, size: Size) -> dict[str, str]:
    """Export and check the graphs of a model for the installed engines; returns why some of them failed."""
    model, failures = load(path).eval(), dict[str, str]()
    for name in present(installed())[1:]:
        try:
            open_forward(model, RunMode(name), size)
        except VitruvianError as error:
            failures[name] = str(error)
    return failures


def write_record(record: Path, files: list[Path]) -> None:
    stamps, checksums = [file_stamp(file) for file in files], [digest(file) for file in files]
    write_json(record, {"stamps": stamps, "sha256": checksums})


def is_intact(record: Path, files: list[Path]) -> bool:
    """Whether the cached files are intact: by size and mtime, else (in a copied cache) by SHA-256."""
    with suppress(OSError, FileError):
        content = read_object(record)
        if content.get("stamps") == [file_stamp(file) for file in files]:
            return True
        if content.get("sha256") == [digest(file) for file in files]:
            with suppress(FileError):
                write_record(record, files)
            return True
    return False


def remove_graph(folder: Path, graph: Path) -> None:
    """Remove a graph and its records, but not the lock, which is held."""
    if (folder / RECORD).exists():
        print_status(f"note: {graph}: the cached graph is damaged and will be exported again")
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != "lock":
            with suppress(OSError):
                path.unlink()


def remove_old_graphs(folder: Path) -> None:
    """Remove all but the most recently used graphs."""
    used: dict[Path, float] = {}
    for path in folder.iterdir():
        with suppress(OSError):  # another process may remove it meanwhile
            if path.is_dir():
                used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[:-MAX_CACHED_GRAPHS]:
        shutil.rmtree(path, ignore_errors=True)


def choice_file(model: Model, pixels: Tensor) -> Path:
    """Where the choice for single images or for batches like `pixels` on this machine is remembered."""
    machine = [processor_name(), os.cpu_count(), torch.get_num_threads(), versions(installed())]
    goal = ["single" if len(pixels) == 1 else "batch", *pixels.shape[1:]]
    return cache_folder() / "engines" / f"{short_hash([machine, fingerprint(model.config.to_json()), goal])}.json"


def remembered_mode(model: Model, pixels: Tensor) -> RunMode | None:
    with suppress(FileError, KeyError):
        cached = read_object(choice_file(model, pixels))
        names = present(installed()) if cached["engine"] in DEVICES else installed()
        if cached["engine"] in names and all(isinstance(cached[name], bool) for name in ("split", "fixed")):
            return RunMode(cached["engine"], cached["split"], cached["fixed"])
    return None


def remember(model: Model, pixels: Tensor, mode: RunMode) -> None:
    try:
        write_json(choice_file(model, pixels), mode._asdict())
    except FileError as error:
        print_status(f"note: the next start measures again: {error}")


def fastest_mode(model: Model, pixels: Tensor) -> RunMode:
    """Measure the fastest engine and mode for batches like `pixels` on this machine, and remember it."""
    print_status("note: measuring which engine is the fastest, once for this model and batch size ...")
    in_main = threading.current_thread() is threading.main_thread()  # in other threads, the model may be in use
    engines = present(installed()) if in_main else export_apart(model, (pixels.shape[2], pixels.shape[3]))
    forwards, complete = open_candidates(model, pixels, engines)
    seconds = measure(forwards, pixels, ROUNDS, MAX_SECONDS)
    shortest = {mode: min(times) for mode, times in seconds.items()}  # other load only adds time
    best = min(shortest, key=shortest.__getitem__)
    names = dict.fromkeys(mode.engine for mode in shortest)
    per_engine = {name: min(shortest[mode] for mode in shortest if mode.engine == name) for name in names}
    rates = ", ".join(f"{name} {len(pixels) / time:.3g}" for name, time in per_engine.items())
    print_status(f"note: using {best.engine}; images per second: {rates}")
    if complete:
        remember(model, pixels, best)
    else:
        print_status("note: the next start measures again, with the engines that were skipped")
    return best


def fastest_engine(model: Model, pixels: Tensor, images: int) -> EngineName:
    """The remembered engine for batches like `pixels`, or the fastest one; torch for few images."""
    if images < OPEN_FROM or len(installed()) == 1:
        return "torch"
    mode = remembered_mode(model, pixels)
    if mode is None and images >= CHOOSE_FROM:
        mode = fastest_mode(model, pixels)
    return check_engine("torch" if mode is None else mode.engine)


def open_candidates(model: Model, pixels: Tensor, engines: Sequence[str]) -> tuple[dict[RunMode, EngineForward], bool]:
    """All modes of these engines that can run the model, and whether to cache the choice among them.

    An engine that fails is skipped with a note. If its graph could not be written (a full disk), it may work next time.
    """
    size = (pixels.shape[2], pixels.shape[3])
    can_split = len(pixels) > 1 and torch.get_num_threads() > 1
    forwards: dict[RunMode, EngineForward] = {}
    complete = True
    for name in engines:
        modes = [default_mode(name, len(pixels))]
        modes += [RunMode(name)] if can_split and name not in DEVICES else []
        try:
            forwards |= {mode: open_forward(model, mode, size) for mode in modes}
        except VitruvianError as error:
            complete = complete and not isinstance(error, FileError)
            print_status(f"note: skipping {name}: {error}")
    return forwards, complete


def measure(
    forwards: dict[Key, Forward], pixels: Tensor, rounds: int, max_seconds: float = math.inf
) -> dict[Key, list[float]]:
    """Seconds of each forward pass per round, in a random order so that other load affects all alike."""
    seconds: dict[Key, list[float]] = {key: [] for key in forwards}
    for forward in forwards.values():
        forward(pixels)
    order, start = random.Random(0), time.perf_counter()
    for i in range(rounds):
        if i >= MIN_ROUNDS and time.perf_counter() - start > max_seconds:
            break
        for key in order.sample(list(forwards), len(forwards)):
            time.sleep(REST_SECONDS)
            begin = time.perf_counter()
            forwards[key](pixels)
            seconds[key].append(time.perf_counter() - begin)
    return seconds
