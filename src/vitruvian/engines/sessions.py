"""The runtimes behind one contract: a file with a graph becomes a function from pixels to answers."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.engines.runtimes import OPENERS, Port
from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, VitruvianError, argument, require
from vitruvian.model.cores import even_pieces, map_over_cores

EngineName = Literal["torch", "onnxruntime", "openvino", "auto"]
FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}
"""What is exported for each runtime."""
EXTRAS = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino",)}
"""The packages that each runtime needs to run our models; the extra is named like its format."""

Run = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def installed() -> list[str]:
    """The engines that can run here."""
    found = [name for name, needed in EXTRAS.items() if all(map(importlib.util.find_spec, needed))]
    return ["torch", *found]


def check_engine(name: str, device: str = "cpu") -> EngineName:
    """A known engine whose packages are there."""
    known: tuple[EngineName, ...] = get_args(EngineName)
    found = next((each for each in known if each == name), None)
    if found is None:
        raise UnknownNameError("engine", name, known, see=f"({', '.join(known)})")
    for module in EXTRAS.get(name, ()):
        require(module, FORMATS[name])
    if name != "torch" and device.partition(":")[0] != "cpu":
        raise ConfigError(
            f"{argument('engine', name)} runs on the CPU",
            hint=f"{argument('device', device)} needs {argument('engine', 'torch')}",
        )
    return found


def versions(names: Iterable[str]) -> list[str]:
    """Of engines, since each may answer otherwise, or faster, in its next one."""
    return [f"{name} {version_of(name)}" for name in names]


def version_of(name: str) -> str:
    """Of an installed package, also of one that was published under another name, such as onnxruntime-gpu."""
    try:
        return version(name)
    except PackageNotFoundError:
        return str(importlib.import_module(name).__version__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An open graph: `run` takes normalized pixels (B, channels, rows, columns), and may be called by many threads."""

    run: Run
    shape: tuple[int | None, ...]
    """Of the input; None where it is open."""
    output: str
    """The name of what answers."""
    outputs: int
    """Length of an answer."""
    carried: str = ""
    """The description that a file of ours holds, as JSON."""
    split: bool = False
    """Each core takes whole images; else all cores share every operation."""

    def __call__(self, pixels: Tensor) -> Tensor:
        return map_over_cores(self._whole, pixels) if self.split else self._whole(pixels)

    def _whole(self, pixels: Tensor) -> Tensor:
        """All images by the calling thread, in batches of the graph's size where that is fixed."""
        if self.shape[0] in (None, len(pixels)):
            return torch.from_numpy(self.run(pixels.float().contiguous().numpy()))
        return torch.cat([self._filled(part) for part in torch.split(pixels, self.shape[0])])

    def _filled(self, part: Tensor) -> Tensor:
        """A batch that may be the short last one, for a graph of a fixed one."""
        assert self.shape[0] is not None
        missing = self.shape[0] - len(part)
        return self._whole(torch.cat([part, part[-1:].expand(missing, -1, -1, -1)]) if missing else part)[: len(part)]


class WholeImages:
    """A graph of which each core takes whole images: pieces of as many as are cut from a batch, else one by one.

    The batch of an open graph is fixed at the size of a piece, which lets a runtime prepare more. Two sizes are held at
    most, 1 and that of the first batch that is cut evenly; a short last batch must not wait for a third.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.engine = path, engine
        self._held: dict[int, Session] = {}
        self._opening = threading.Lock()

    def __call__(self, pixels: Tensor) -> Tensor:
        sizes = {len(piece) for piece in even_pieces(pixels, torch.get_num_threads())}
        size = sizes.pop() if len(sizes) == 1 else 1
        with self._opening:  # a batch may begin before the one before it is done
            if size not in self._held and max(self._held, default=1) > 1:
                size = 1
            if size not in self._held:
                self._held[size] = open_session(self.path, self.engine, split=True, batch_size=size)
        return self._held[size](pixels)


class OpenGraph:
    """A graph in a file, opened as it runs soonest: all cores share a single image, of more a core takes whole ones."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.engine = path, engine
        self.single = open_session(path, engine, batch_size=1)
        self._many = WholeImages(path, engine)

    def __call__(self, pixels: Tensor) -> Tensor:
        if len(pixels) == 1 or torch.get_num_threads() == 1 or self.single.shape[0] not in (None, 1):
            return self.single(pixels)
        return self._many(pixels)


def open_session(path: Path, engine: str, *, split: bool = False, batch_size: int | None = None) -> Session:
    """A graph that is ready to run with all cores; with `split`, one core a call.

    `batch` fixes the batch of a graph of ours where it is open, which lets the runtime prepare more.
    """
    module = require(engine, FORMATS[engine])
    threads = 1 if split else torch.get_num_threads()
    with failing(f"{path}: {engine} cannot run it"):
        opened = OPENERS[engine](module, path, threads, split, batch_size)
    pixels, number = image_input(path, opened.inputs), vector_output(path, opened.outputs)
    output = opened.outputs[number]
    if output.shape[1] is None:
        raise CheckpointError(f"{path}: the graph does not say how long its output {output.name!r} is")

    def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
        with failing(f"{path}: {engine} cannot run it on images of {'x'.join(map(str, images.shape[1:]))}"):
            return opened.run(images, number)

    return Session(
        run=run,
        shape=pixels.shape,
        output=output.name,
        outputs=output.shape[1],
        carried=opened.carried,
        split=split,
    )


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Errors of a runtime, which may be of any kind, in one line."""
    try:
        yield
    except VitruvianError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{what}: {reason}") from error


def image_input(path: Path, inputs: list[Port]) -> Port:
    """The only input, which must be a batch of normalized images."""
    found = ", ".join(map(str, inputs))
    if len(inputs) != 1 or len(inputs[0].shape) != 4 or inputs[0].shape[1] is None:
        raise CheckpointError(f"{path}: not a graph of (B, channels, rows, columns) images: its inputs are {found}")
    if inputs[0].dtype != "float32":
        raise CheckpointError(f"{path}: takes {found}, and images are normalized float32: export it in float32")
    return inputs[0]


def vector_output(path: Path, outputs: list[Port]) -> int:
    """Which output answers: `logits`, or the only one that gives a vector an image."""
    vectors = [number for number, port in enumerate(outputs) if len(port.shape) == 2]
    named = [number for number in vectors if outputs[number].name == "logits"]
    chosen = named or vectors
    if len(chosen) != 1:
        found = ", ".join(port.name for port in outputs)
        raise CheckpointError(f"{path}: none of its outputs ({found}) is one vector of logits an image")
    return chosen[0]
