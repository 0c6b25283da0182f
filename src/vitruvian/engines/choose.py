"""The engine of a model: the requested one, or the fastest on this machine, measured once and cached."""

from __future__ import annotations

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
from vitruvian.engines.export import TOLERANCE, Forward, compare, evaluating, export, fits_onnx
from vitruvian.engines.runtimes import FORMATS, SplitGraph, installed, open_session, versions
from vitruvian.errors import ConversionError, FileError, VitruvianError, argument
from vitruvian.files import digest, file_stamp, read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_cores
from vitruvian.progress import print_status
from vitruvian.settings import Size
from vitruvian.weights.checkpoint_files import tensors_digest
from vitruvian.weights.description import fingerprint

EXPORT_VERSION = 4
"""Version of the exported graphs; increment it to invalidate cached ones."""
MAX_CACHED_GRAPHS = 8
"""Maximum number of exported graphs in the cache; the least recently used are removed."""
RECORD = "exported.json"
"""File beside a cached graph with the stamps and checksums of its files, written last."""
ROUNDS = 15
"""Number of measurements per engine, interleaved."""
MIN_ROUNDS, MAX_SECONDS = 3, 15.0
"""Fewer rounds, but at least 3, if the measurements of a large model take longer than this."""
REST_SECONDS = 0.03
"""Pause before each measurement: torch's threads keep spinning after a call and take a core from the next engine."""

Key = TypeVar("Key")


class RunMode(NamedTuple):
    """How an engine computes a batch."""

    engine: str
    split: bool = False
    """Each core computes its own images; otherwise all cores share each operation."""
    fixed: bool = False
    """The graph is opened for a fixed batch size (one image, or a core's piece); otherwise for any."""


class Engine:
    """The logits of a model by one engine; the graph is exported, checked and opened when first needed."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self._forwards: dict[tuple[int, ...], Forward] = {}
        self.whole_images = False
        """Whether the last chosen mode gives each core its own images."""

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
        session = open_session(graph, mode.engine, split=mode.split, batch_size=1 if mode.fixed else None)
    record = graph.with_name(f"{mode.engine}.checked.json")
    if not has_record(record):
        difference = check_outputs(model, session, size, mode.engine)
        with suppress(FileError):  # a read-only cache: the next start checks again
            write_json(record, {"largest_difference": difference})
    return session


def has_record(record: Path) -> bool:
    with suppress(FileError):
        return isinstance(read_object(record).get("largest_difference"), float)
    return False


def check_outputs(model: Model, session: Forward, size: Size, engine: str) -> float:
    """Largest difference between the outputs of an engine and the model; raises ConversionError above TOLERANCE."""
    with evaluating(model):
        difference, largest = compare(model, session, (3, model.config.in_channels, *size))
    allowed = TOLERANCE * max(1.0, largest)
    if not difference <= allowed:  # also refuses NaN
        raise ConversionError(
            f"the outputs of {engine} differ from the model's by {difference:.2g}, {allowed:.2g} is allowed",
            hint=f"use {argument('engine', 'torch')}, and please report this",
        )
    return difference


def cached_graph(model: Model, engine: str, size: Size) -> Path:
    """Path of the model's graph in the cache; exported the first time.

    Both runtimes read ONNX equally fast. If only OpenVINO is installed, its own format is exported.
    """
    to = "onnx" if "onnxruntime" in installed() and fits_onnx(model) else FORMATS[engine]
    exporters = versions(("torch", "onnxruntime" if to == "onnx" else "openvino"))
    weights, config = tensors_digest(model.state_dict()), fingerprint(model.config.to_json())
    folder = cache_folder() / "engines" / short_hash([EXPORT_VERSION, weights, config, list(size), exporters])
    path = folder / ("model.onnx" if to == "onnx" else "openvino")
    graph = path if to == "onnx" else path / "model.xml"
    if not is_intact(graph):  # checked before locking, since a read-only cache cannot be locked
        try:
            with file_lock(folder / "lock"):
                if not is_intact(graph):  # another process may have written it meanwhile
                    remove_graph(graph)
                    print_status(f"note: exporting the model for {engine}, once ...")
                    export(model, path, to="onnx" if to == "onnx" else "openvino", image_size=size)
                    write_record(graph)
                    remove_old_graphs(folder.parent)
        except FileError as error:
            raise error.replace(hint="set $VITRUVIAN_CACHE to use another cache folder") from error
    with suppress(OSError):
        os.utime(folder)
    return graph


def record_path(graph: Path) -> Path:
    return (graph.parent if graph.suffix == ".onnx" else graph.parent.parent) / RECORD


def graph_files(graph: Path) -> list[Path]:
    return [graph] if graph.suffix == ".onnx" else [graph, graph.with_suffix(".bin")]


def write_record(graph: Path) -> None:
    files = graph_files(graph)
    stamps, checksums = [file_stamp(file) for file in files], [digest(file) for file in files]
    write_json(record_path(graph), {"stamps": stamps, "sha256": checksums})


def is_intact(graph: Path) -> bool:
    """Whether the cached files are intact: by size and mtime, else (in a copied cache) by SHA-256."""
    with suppress(OSError, FileError):
        record, files = read_object(record_path(graph)), graph_files(graph)
        if record.get("stamps") == [file_stamp(file) for file in files]:
            return True
        if record.get("sha256") == [digest(file) for file in files]:
            with suppress(FileError):
                write_record(graph)
            return True
    return False


def remove_graph(graph: Path) -> None:
    """Remove a graph and its records, but not the lock, which is held."""
    if record_path(graph).exists():
        print_status(f"note: {graph}: the cached graph is damaged and will be exported again")
    for path in record_path(graph).parent.iterdir():
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
