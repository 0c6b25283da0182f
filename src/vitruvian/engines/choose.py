"""The engine of a model: the requested one, or the fastest on this machine, measured once and cached."""

import math
import os
import random
import shutil
import statistics
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from vitruvian.cache import cache_folder, file_lock
from vitruvian.engines.export import MAX_ONNX_BYTES, Format, Forward, check_outputs, evaluating, export, float_bytes
from vitruvian.engines.runtimes import Session, SplitGraph, installed, versions
from vitruvian.errors import FileError, VitruvianError, argument
from vitruvian.files import digest, file_stamp, read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_cores
from vitruvian.progress import print_status
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import tensors_digest
from vitruvian.weights.description import fingerprint

EXPORT_VERSION = 4  # of the exported graphs; increment it to invalidate cached ones
MAX_CACHED_GRAPHS = 8  # in the cache; the least recently used are removed
RECORD = "exported.json"  # stamps and checksums of a cached graph's files, written last
ROUNDS = 15  # measurements per engine, interleaved
MIN_ROUNDS, MAX_SECONDS = 3, 15.0  # fewer rounds, but at least 3, if a large model takes longer than this
REST_SECONDS = 0.03  # before each measurement, because torch's threads keep spinning after a call

Key = TypeVar("Key")


class RunMode(NamedTuple):
    """How an engine computes a batch."""

    engine: str
    split: bool = False  # each core computes its own images; otherwise all cores share each operation
    fixed: bool = False  # the graph is opened for a fixed batch size (one image, or a core's piece); otherwise for any


class Engine:
    """The logits of a model by one engine; the graph is exported, checked and opened when first needed."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self._forwards: dict[tuple[int, ...], Forward] = {}
        self.whole_images = False  # whether the last chosen mode gives each core its own images

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, channels, rows, columns) -> (B, K).

        The mode chosen for the first batch of an image size is kept. A single image after larger batches, often the
        last of many, is run like them, unless `prepare` was called for single images.
        """
        key, batch_key = (len(pixels) > 1, *pixels.shape[1:]), (True, *pixels.shape[1:])
        if key not in self._forwards:
            self._forwards[key] = self._forwards.get(batch_key) or self._choose(pixels)
        return self._forwards[key](pixels)

    def prepare(self, pixels: Tensor) -> None:
        """Choose, open and run the mode for batches like this one, so that the first request does not wait for it."""
        self._forwards[len(pixels) > 1, *pixels.shape[1:]] = self._choose(pixels)
        self(pixels)

    def _choose(self, pixels: Tensor) -> Forward:
        mode = fastest_mode(self.model, pixels) if self.name == "auto" else default_mode(self.name, len(pixels))
        self.whole_images = mode.split
        return open_forward(self.model, mode, (pixels.shape[2], pixels.shape[3]))


def default_mode(engine: str, batch_size: int) -> RunMode:
    """The usually fastest mode of an engine."""
    return RunMode(engine, split=batch_size > 1, fixed=engine != "torch")


def open_forward(model: Model, mode: RunMode, size: Size) -> Forward:
    """The forward pass of a model in `mode` on images of `size`.

    Raises ConversionError if the engine's outputs differ from the model's; this is checked once for a cached graph.
    """
    if mode.engine == "torch":
        forward: Forward = partial(map_over_cores, model) if mode.split else torch.inference_mode()(model.__call__)
        return forward
    graph = cached_graph(model, mode.engine, size)
    if mode.split and mode.fixed:
        session: Forward = SplitGraph(graph, mode.engine)
    else:
        session = Session(graph, mode.engine, split=mode.split, batch_size=1 if mode.fixed else None)
    record = graph.with_name(f"{mode.engine}.checked.json")
    with suppress(FileError):
        if isinstance(read_object(record).get("largest_difference"), float):
            return session
    with evaluating(model):
        what, hint = f"the outputs of {mode.engine}", f"use {argument('engine', 'torch')}, and please report this"
        difference, _ = check_outputs(model, session, [(3, model.config.in_channels, *size)], what, hint=hint)
    with suppress(FileError):  # a read-only cache: the next start checks again
        write_json(record, {"largest_difference": difference})
    return session


def cached_graph(model: Model, engine: str, size: Size) -> Path:
    """Path of the model's graph in the cache; exported the first time.

    Both runtimes read ONNX equally fast. If only OpenVINO is installed, its own format is exported.
    """
    fits = "onnxruntime" in installed() and float_bytes(model) <= MAX_ONNX_BYTES
    to: Format = "onnx" if fits or engine == "onnxruntime" else "openvino"
    exporters = versions(("torch", "onnxruntime" if to == "onnx" else "openvino"))
    weights, config = tensors_digest(model.state_dict()), fingerprint(model.config.to_json())
    folder = cache_folder() / "engines" / short_hash([EXPORT_VERSION, weights, config, list(size), exporters])
    path = folder / ("model.onnx" if to == "onnx" else "openvino")
    files = [path] if to == "onnx" else [path / "model.xml", path / "model.bin"]
    if not is_intact(folder / RECORD, files):  # checked before locking, since a read-only cache cannot be locked
        try:
            with file_lock(folder / "lock"):
                if not is_intact(folder / RECORD, files):  # another process may have written it meanwhile
                    remove_graph(folder, files[0])
                    print_status(f"note: exporting the model for {engine}, once ...")
                    export(model, path, to=to, image_size=size)
                    write_record(folder / RECORD, files)
                    remove_old_graphs(folder.parent)
        except FileError as error:
            raise error.replace(hint="set $VITRUVIAN_CACHE to use another cache folder") from error
    with suppress(OSError):
        os.utime(folder)
    return files[0]


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


def fastest_mode(model: Model, pixels: Tensor) -> RunMode:
    """The fastest engine and mode for batches like `pixels` on this machine; measured once, then cached."""
    machine = [processor_name(), os.cpu_count(), torch.get_num_threads(), versions(installed())]
    key = short_hash([machine, fingerprint(model.config.to_json()), list(pixels.shape)])
    file = cache_folder() / "engines" / f"{key}.json"
    with suppress(FileError, KeyError):
        cached = read_object(file)
        if cached["engine"] in installed() and all(isinstance(cached[name], bool) for name in ("split", "fixed")):
            return RunMode(cached["engine"], cached["split"], cached["fixed"])
    print_status("note: measuring which engine is the fastest, once for this model and batch size ...")
    forwards, complete = open_candidates(model, pixels)
    seconds = measure(forwards, pixels, ROUNDS, MAX_SECONDS)
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    engines = dict.fromkeys(mode.engine for mode in medians)
    per_engine = {name: min(medians[mode] for mode in medians if mode.engine == name) for name in engines}
    rates = ", ".join(f"{name} {len(pixels) / median:.3g}" for name, median in per_engine.items())
    print_status(f"note: using {best.engine}; images per second: {rates}")
    if not complete:
        print_status("note: the next start measures again, with the engines that were skipped")
        return best
    try:
        write_json(file, best._asdict())
    except FileError as error:
        print_status(f"note: the next start measures again: {error}")
    return best


def open_candidates(model: Model, pixels: Tensor) -> tuple[dict[RunMode, Forward], bool]:
    """All modes of the installed engines that can run the model, and whether to cache the choice among them.

    An engine that fails is skipped with a note. If its graph could not be written (a full disk), it may work next time.
    """
    size = (pixels.shape[2], pixels.shape[3])
    can_split = len(pixels) > 1 and torch.get_num_threads() > 1
    forwards: dict[RunMode, Forward] = {}
    complete = True
    for name in installed():
        modes = [RunMode(name), default_mode(name, len(pixels))] if can_split else [default_mode(name, 1)]
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
