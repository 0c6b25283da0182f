"""The engine of a model: the one that was asked for, or the fastest here, measured once and remembered."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitruvian.cache import cache_folder, file_lock
from vitruvian.engines.cached import forget, forget_old, is_whole, record
from vitruvian.engines.export import TOLERANCE, Forward, compare, evaluating, export, fits_onnx
from vitruvian.engines.sessions import FORMATS, WholeImages, installed, open_session, versions
from vitruvian.errors import ConversionError, FileError, VitruvianError, argument
from vitruvian.files import read_object, short_hash, write_json
from vitruvian.machine import processor_name
from vitruvian.model.build import Model
from vitruvian.model.cores import map_over_cores
from vitruvian.progress import print_status
from vitruvian.weights.description import fingerprint
from vitruvian.weights.store import tensors_digest


class Way(NamedTuple):
    """How a batch is computed."""

    engine: str
    split: bool = False
    """A core takes whole images; else all cores share every operation."""
    single: bool = False
    """The graph is opened for single images, or for the pieces that a core takes; else for any batch."""


LAYOUT = 4
"""Raised when graphs are written otherwise, so that old ones are not used."""
ROUNDS = 15
"""Times that each engine is measured, in turn."""
FEWEST_ROUNDS, MOST_SECONDS = 3, 15.0
"""Of these measurements; a large model on a large batch is measured less often."""
REST_SECONDS = 0.03
"""Before each is measured: torch's threads go on spinning after an answer, and take a core from the next engine."""


class Engine:
    """The logits of a model by one engine; the graph is exported, checked and opened when it is first needed."""

    def __init__(self, model: Model, name: str) -> None:
        self.model, self.name = model, name
        self._forwards: dict[tuple[int, ...], Forward] = {}
        self.whole_images = False
        """Each core takes whole images of the batches that were seen; else all cores share every operation."""

    def __call__(self, pixels: Tensor) -> Tensor:
        """(B, channels, rows, columns) -> (B, K).

        What the first batch of a size was measured with stays. A single image after larger batches, often the last of
        many, is run like them, unless it was prepared for.
        """
        key, many = (len(pixels) > 1, *pixels.shape[1:]), (True, *pixels.shape[1:])
        if key not in self._forwards:
            self._forwards[key] = self._forwards.get(many) or self._chosen(pixels)
        return self._forwards[key](pixels)

    def prepare(self, pixels: Tensor) -> None:
        """Choose, open and run the way for batches like this one, so that none of them waits for it."""
        self._forwards[len(pixels) > 1, *pixels.shape[1:]] = self._chosen(pixels)
        self(pixels)

    def _chosen(self, pixels: Tensor) -> Forward:
        way = fastest(self.model, pixels) if self.name == "auto" else usual_way(self.name, len(pixels))
        self.whole_images = way.split
        return forward_of(self.model, way, (pixels.shape[2], pixels.shape[3]))


def usual_way(engine: str, batch_size: int) -> Way:
    """How an engine that was asked for runs."""
    return Way(engine, split=batch_size > 1, single=engine != "torch")


def forward_of(model: Model, way: Way, size: tuple[int, int]) -> Forward:
    """The model as one engine runs it on images of this size."""
    if way.engine == "torch":
        return (lambda pixels: map_over_cores(model, pixels)) if way.split else without_gradients(model)
    graph = cached_graph(model, way.engine, size)
    if way.split and way.single:
        session: Forward = WholeImages(graph, way.engine)
    else:
        session = open_session(graph, way.engine, split=way.split, batch_size=1 if way.single else None)
    checked = graph.with_name(f"{way.engine}.checked.json")
    if not was_checked(checked):
        difference = check_answers(model, session, size, way.engine)
        with suppress(FileError):  # a cache that is read only: the next start checks again
            write_json(checked, {"largest_difference": difference})
    return session


def was_checked(file: Path) -> bool:
    with suppress(FileError):
        return isinstance(read_object(file).get("largest_difference"), float)
    return False


def check_answers(model: Model, session: Forward, size: tuple[int, int], engine: str) -> float:
    """How far an engine's answers are from the model's, if that is within what other orders of sums change."""
    with evaluating(model):
        difference, largest = compare(model, session, (3, model.config.in_channels, *size))
    if not difference <= TOLERANCE * max(1.0, largest):  # also refuses NaN
        raise ConversionError(
            f"{engine} answers {difference:.2g} away from the model, where {TOLERANCE * max(1.0, largest):.2g} "
            f"is allowed; use {argument('engine', 'torch')}, and please report this"
        )
    return difference


def without_gradients(model: Model) -> Forward:
    def forward(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(pixels)

    return forward


def cached_graph(model: Model, engine: str, size: tuple[int, int]) -> Path:
    """The model's graph in the cache folder, exported and compared with the model the first time.

    Both runtimes read ONNX, and are equally quick with it; OpenVINO alone is given its own format.
    """
    to = "onnx" if "onnxruntime" in installed() and fits_onnx(model) else FORMATS[engine]
    held = versions(("torch", "onnxruntime" if to == "onnx" else "openvino"))
    key = short_hash(
        [LAYOUT, tensors_digest(model.state_dict()), fingerprint(model.config.to_json()), list(size), held]
    )
    folder = cache_folder() / "engines" / key
    path = folder / ("model.onnx" if to == "onnx" else "openvino")
    graph = path if to == "onnx" else path / "model.xml"
    if not is_whole(graph):  # a whole one needs no lock, which a cache that is read only does not give
        try:
            with file_lock(folder / "lock"):
                if not is_whole(graph):  # another process may have written it meanwhile
                    forget(graph)
                    print_status(f"note: exporting the model for {engine}, once ...")
                    export(model, path, to=to, image_size=size)  # type: ignore[arg-type]
                    record(graph)
                    forget_old(folder.parent)
        except FileError as error:
            raise error.replace(hint="$VITRUVIAN_CACHE says which folder is used") from error
    with suppress(OSError):
        os.utime(folder)
    return graph


def fastest(model: Model, pixels: Tensor) -> Way:
    """The way that answers these pixels soonest on this machine."""
    machine = [processor_name(), os.cpu_count(), torch.get_num_threads(), versions(installed())]
    key = short_hash([machine, fingerprint(model.config.to_json()), list(pixels.shape)])
    file = cache_folder() / "engines" / f"{key}.json"
    with suppress(FileError, KeyError):
        known = read_object(file)
        if known["engine"] in installed() and all(isinstance(known[name], bool) for name in ("split", "single")):
            return Way(known["engine"], known["split"], known["single"])
    print_status("note: measuring which engine is the fastest here, once for this model and batch ...")
    found, lasting = candidates(model, pixels)
    seconds = measure(found, pixels, ROUNDS, MOST_SECONDS)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    best = min(medians, key=medians.__getitem__)
    rates = [f"{each.engine} {len(pixels) / medians[each]:.3g}" for each in best_of(medians)]
    print_status(f"note: {best.engine} is used; images per second: {', '.join(rates)}")
    if not lasting:
        print_status("note: the next start measures again, with the engines that are left out now")
        return best
    try:
        write_json(file, best._asdict())
    except FileError as error:
        print_status(f"note: the next start measures again: {error}")
    return best


def best_of(medians: dict[Way, float]) -> list[Way]:
    """Each engine in its faster way."""
    names = dict.fromkeys(way.engine for way in medians)
    return [min((way for way in medians if way.engine == name), key=medians.__getitem__) for name in names]


def ways_of(engine: str, batch_size: int) -> list[Way]:
    """The ways of an engine that may be its fastest."""
    if batch_size == 1 or torch.get_num_threads() == 1:
        return [usual_way(engine, 1)]
    return [Way(engine), usual_way(engine, batch_size)]


def candidates(model: Model, pixels: Tensor) -> tuple[dict[Way, Forward], bool]:
    """Every installed engine in each of its ways, and whether that lasts: one that fails is said and left out, and
    one whose graph could only not be written may run the next time."""
    size = (pixels.shape[2], pixels.shape[3])
    found: dict[Way, Forward] = {}
    lasting = True
    for name in installed():
        ways = ways_of(name, len(pixels))
        try:
            found |= {way: forward_of(model, way, size) for way in ways}
        except VitruvianError as error:
            lasting = lasting and not isinstance(error, FileError)
            print_status(f"note: {name} is left out: {error}")
    return found, lasting


def measure(
    forwards: dict[Way, Forward], pixels: Tensor, rounds: int, most_seconds: float = math.inf
) -> dict[Way, list[float]]:
    """Seconds of each, one after the other in an order drawn anew, so that what else happens falls on all."""
    seconds: dict[Way, list[float]] = {key: [] for key in forwards}
    for forward in forwards.values():
        forward(pixels)
    order, begin = random.Random(0), time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - begin > most_seconds:
            break
        for key in order.sample(list(forwards), len(forwards)):
            time.sleep(REST_SECONDS)
            start = time.perf_counter()
            forwards[key](pixels)
            seconds[key].append(time.perf_counter() - start)
    return seconds
