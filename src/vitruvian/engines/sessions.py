"""The runtimes behind one contract: a file with a graph becomes a function from pixels to answers."""

from __future__ import annotations

import importlib.util
import mmap
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, require
from vitruvian.model.cores import even_pieces, map_over_cores
from vitruvian.weights.files import CARRIED

EngineName = Literal["torch", "onnxruntime", "openvino", "auto"]
FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}
"""What is exported for each runtime."""
EXTRAS = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino",)}
"""The packages that each runtime needs to run our models; the extra is named like its format."""
BATCH_AXIS = "batch"
"""What ONNX files of ours call the open batch."""

Answer = TypeVar("Answer")
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
    if name != "torch" and torch.device(device).type != "cpu":
        raise ConfigError(f"engine={name!r} runs on the CPU; device={device!r} needs engine='torch'")
    return found


def versions(names: Iterable[str]) -> list[str]:
    """Of engines, since each may answer otherwise, or faster, in its next one."""
    return [f"{name} {version(name)}" for name in names]


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """An open graph: `run` takes normalized pixels (B, channels, rows, columns), and may be called by many threads."""

    run: Run
    shape: tuple[int | None, ...]
    """Of the input; None where it is open."""
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
                self._held[size] = open_session(self.path, self.engine, split=True, batch=size)
        return self._held[size](pixels)


class OpenGraph:
    """A graph in a file, opened as it runs soonest: all cores share a single image, of more a core takes whole ones."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.engine = path, engine
        self.single = open_session(path, engine, batch=1)
        self._many = WholeImages(path, engine)

    def __call__(self, pixels: Tensor) -> Tensor:
        if len(pixels) == 1 or torch.get_num_threads() == 1 or self.single.shape[0] not in (None, 1):
            return self.single(pixels)
        return self._many(pixels)


def open_session(path: Path, engine: str, *, split: bool = False, batch: int | None = None) -> Session:
    """A graph that is ready to run with all cores; with `split`, one core a call.

    `batch` fixes the batch of a graph of ours where it is open, which lets the runtime prepare more.
    """
    module = require(engine, FORMATS[engine])
    threads = 1 if split else torch.get_num_threads()
    try:
        if engine == "onnxruntime":
            return _onnxruntime(module, path, threads, split, batch)
        return _openvino(module, path, threads, split, batch)
    except (CheckpointError, ConfigError):
        raise
    except Exception as error:  # the runtimes raise anything
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{path}: {engine} cannot run it: {reason}") from error


def _onnxruntime(module: Any, path: Path, threads: int, split: bool, batch: int | None) -> Session:
    options = module.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # else its threads spin on after an answer, and take a core from decoding, from torch, from another runtime
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if batch is not None:
        options.add_free_dimension_override_by_name(BATCH_AXIS, batch)
    session = module.InferenceSession(
        str(path),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["MatMulAddFusion"] if is_quantized(path) else None,
    )
    inputs = session.get_inputs()
    dims = [side if isinstance(side, int) else None for side in inputs[0].shape]
    shape = _image_input(path, [(each.name, each.shape) for each in inputs], dims)
    names = [(each.name, list(each.shape)) for each in session.get_outputs()]
    output = _vector_output(path, names)
    found = session.get_modelmeta().custom_metadata_map

    def run(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        answer: NDArray[np.float32] = session.run([output], {inputs[0].name: pixels})[0]
        return answer

    return Session(
        run=run, shape=shape, outputs=_width(path, names, output), carried=found.get(CARRIED, ""), split=split
    )


def is_quantized(path: Path) -> bool:
    """Whether an ONNX file has products in int8.

    With a fixed batch, ONNX Runtime would first join each product with the sum behind it, and then compute it in float.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(b"QuantizeLinear") >= 0


class AloneAtFirst:
    """Lets the first call of a process end before another begins.

    OpenVINO's binding sets itself up in its first inference. Of two threads that begin it at once, one holds Python's
    lock and waits for the set-up, the other holds the set-up and waits for Python's lock, forever.
    """

    def __init__(self) -> None:
        self._lock, self._done = threading.Lock(), False

    def __call__(self, work: Callable[[], Answer]) -> Answer:
        if self._done:
            return work()
        with self._lock:
            answer = work()
            self._done = True
        return answer


_openvino_at_first = AloneAtFirst()


def _openvino(module: Any, path: Path, threads: int, split: bool, batch: int | None) -> Session:
    core = module.Core()
    graph = core.read_model(path)
    if batch is not None and graph.inputs[0].get_partial_shape()[0].is_dynamic:
        graph.reshape([batch, *list(graph.inputs[0].get_partial_shape())[1:]])
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    if split:  # as many at once as there are cores, a core each
        cores = torch.get_num_threads()
        settings |= {"NUM_STREAMS": cores, "INFERENCE_NUM_THREADS": cores, "PERFORMANCE_HINT": "THROUGHPUT"}
    compiled = core.compile_model(graph, "CPU", settings)

    def sides(port: Any) -> list[int | None]:
        return [None if side.is_dynamic else side.get_length() for side in port.get_partial_shape()]

    ports = [(port.get_any_name(), sides(port)) for port in graph.inputs]
    shape = _image_input(path, ports, ports[0][1])
    names = [(port.get_any_name(), sides(port)) for port in graph.outputs]
    output = _vector_output(path, names)
    place = [name for name, _ in names].index(output)
    held = next(
        (each for each in ([CARRIED], ["framework", CARRIED]) if graph.has_rt_info(each)), None
    )  # the last: ONNX
    carried = graph.get_rt_info(held).astype(str) if held else ""
    local = threading.local()

    def run(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        answer: NDArray[np.float32] = local.request.infer([pixels], share_inputs=True)[place].copy()
        return answer

    return Session(
        run=lambda pixels: _openvino_at_first(lambda: run(pixels)),
        shape=shape,
        outputs=_width(path, names, output),
        carried=carried,
        split=split,
    )


def _image_input(path: Path, inputs: list[Any], dims: list[int | None]) -> tuple[int | None, ...]:
    """The shape of the only input, which must be a batch of images."""
    if len(inputs) != 1 or len(dims) != 4 or dims[1] is None:
        found = ", ".join(f"{name} {list(shape)}" for name, shape in inputs)
        raise CheckpointError(f"{path}: not a graph of (B, channels, rows, columns) images: its inputs are {found}")
    return tuple(dims)


def _vector_output(path: Path, outputs: list[tuple[str, list[Any]]]) -> str:
    """The output that answers: `logits`, or the only one that gives a vector an image."""
    names = [name for name, shape in outputs if len(shape) == 2]
    chosen = "logits" if "logits" in names else names[0] if len(names) == 1 else ""
    if not chosen:
        found = ", ".join(name for name, _ in outputs)
        raise CheckpointError(f"{path}: none of its outputs ({found}) is one vector of logits an image")
    return chosen


def _width(path: Path, outputs: list[tuple[str, list[Any]]], output: str) -> int:
    width = dict(outputs)[output][1]
    if not isinstance(width, int):
        raise CheckpointError(f"{path}: the graph does not say how long its output {output!r} is")
    return width
