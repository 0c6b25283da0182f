"""ONNX Runtime and OpenVINO behind one interface: open a graph file, run it on tensors."""

import importlib
import importlib.util
import math
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitruvian.config import ENGINE_NAMES, ENGINES
from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, VitruvianError, argument, require
from vitruvian.machine import has_vnni
from vitruvian.model.batching import even_pieces, map_over_cores
from vitruvian.text import describe_error
from vitruvian.weights.checkpoint_files import METADATA_KEY

# B images, K outputs

EngineName = str  # torch, onnxruntime, openvino or auto; or a variant, such as torch:bf16 (see `config.ENGINES`)
FORMATS = {"onnxruntime": "onnx", "openvino": "openvino"}  # export format of each runtime, and the name of its extra
EXTRAS = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino",)}  # packages of each runtime
DEVICES = {f"{name}:{key}": (name, device) for name in FORMATS for key, device in ENGINES[name].items()}
FLOATS = ("float16", "float32", "double", "bfloat16", "f16", "f64", "bf16")  # in the words of either runtime
MAX_VALUES = 2**27  # maximum number of values in a batch of pixels of fixed size: 512 MiB
FEATURES = "features"  # name of the output that the head reads
REQUIRES_KEY = f"{METADATA_KEY}_requires"  # metadata of int8 graphs that are right only on some processors
BATCH_AXIS = "batch"  # name of the dynamic batch axis in our ONNX files

Array = NDArray[np.float32]
T = TypeVar("T")


def installed() -> list[str]:
    return ["torch", *(name for name, needed in EXTRAS.items() if all(map(importlib.util.find_spec, needed)))]


def runtime_devices(engine: str) -> list[str]:
    """The devices of a runtime, as it calls them: CPU, CUDA, GPU."""
    if engine == "openvino":
        return [name.partition(".")[0] for name in openvino_core().available_devices]
    names: list[str] = require(engine, "onnx").get_available_providers()
    return [name.removesuffix("ExecutionProvider") for name in names]


@cache
def openvino_core() -> Any:
    """OpenVINO's `Core`, one for the whole process.

    When its CPU plugin is loaded, it replaces the stack of signal handlers, and when it is unloaded, it restores the
    one it found. Two plugins that are unloaded in the order of loading leave a stack that has been freed, on which the
    next signal, such as Ctrl-C, ends the process with a segmentation fault.
    """
    return require("openvino", "openvino").Core()


def present(names: list[str]) -> list[str]:
    """These installed engines, and those of their devices that they can use besides the CPU."""
    devices = {name: runtime_devices(name) for name in names[1:]}
    return [*names, *(key for key, (engine, device) in DEVICES.items() if device in devices.get(engine, ()))]


def check_engine(name: str, device: str = "cpu") -> EngineName:
    """Return the name of an engine that is known, installed and able to run on `device`."""
    if name not in ENGINE_NAMES:
        raise UnknownNameError("engine", name, ENGINE_NAMES if ":" in name else ENGINES, see=f"({', '.join(ENGINES)})")
    engine = name.partition(":")[0]
    for module in EXTRAS.get(engine, ()):
        require(module, FORMATS[engine])
    if name in DEVICES and name not in present(installed()):
        reason = f"{argument('engine', name)} is not available: {engine} has only {', '.join(runtime_devices(engine))}"
        raise ConfigError(reason, hint=f"install a build of {engine} and drivers for it, or use another engine")
    if engine != "torch" and device.partition(":")[0] != "cpu":
        if name == "auto":
            return "torch"
        reason = f"{argument('engine', name)} runs on the CPU"
        raise ConfigError(reason, hint=f"{argument('device', device)} needs {argument('engine', 'torch')}")
    return name


def versions(packages: Iterable[str]) -> list[str]:
    """Names and versions, as part of cache keys: outputs and speed may change with a release."""
    lines = []
    for name in packages:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # distributed under another name, such as onnxruntime-gpu
            lines.append(f"{name} {importlib.import_module(name).__version__}")
    return lines


class Port(NamedTuple):
    """An input or output of a graph."""

    name: str
    shape: tuple[int | None, ...]  # None for dynamic axes
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('any' if side is None else str(side) for side in self.shape)}]"


class RuntimeGraph(NamedTuple):
    """A graph opened by a runtime."""

    inputs: list[Port]
    outputs: list[Port]
    run: Callable[[Array, int], Array]  # from pixels and the index of an output to its values; thread-safe
    metadata: dict[str, str]  # what our exporter embeds: a model's description as JSON, and required instructions


def open_onnxruntime(module: Any, path: Path, split: bool, batch_size: int | None, device: str) -> RuntimeGraph:
    options = module.SessionOptions()
    options.intra_op_num_threads = 1 if split else torch.get_num_threads()
    options.log_severity_level = 3
    # otherwise idle threads keep spinning and take a core from decoding, from torch or from another runtime
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if batch_size is not None:
        options.add_free_dimension_override_by_name(BATCH_AXIS, batch_size)
    # at a fixed batch size, MatMulAddFusion would turn int8 products back into float ones
    disabled = ["MatMulAddFusion"] if is_quantized(path) else None
    provider = f"{device}ExecutionProvider"
    session = module.InferenceSession(str(path), options, providers=[provider], disabled_optimizers=disabled)
    if session.get_providers()[0] != provider:  # it falls back to the CPU, with a warning at most
        raise RuntimeError(f"{device} cannot be used here; are its drivers and libraries installed?")

    def port(node: Any) -> Port:
        shape = tuple(side if isinstance(side, int) else None for side in node.shape)
        dtype = node.type.removeprefix("tensor(").removesuffix(")")
        return Port(node.name, shape, {"float": "float32"}.get(dtype, dtype))

    inputs, outputs = [port(node) for node in session.get_inputs()], [port(node) for node in session.get_outputs()]

    def run(pixels: Array, index: int) -> Array:
        output: Array = session.run([outputs[index].name], {inputs[0].name: pixels})[0]
        return output

    return RuntimeGraph(inputs, outputs, run, session.get_modelmeta().custom_metadata_map)


def is_quantized(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"QuantizeLinear") >= 0 or content.find(b"FakeQuantize") >= 0


class SerialFirstCall:
    """Runs the first call of a process alone; later calls run concurrently.

    OpenVINO's Python binding initializes itself in the first inference. If two threads start it at once, one holds the
    GIL and waits for the initialization while the other initializes and waits for the GIL: a deadlock.
    """

    def __init__(self) -> None:
        self._lock, self._done = threading.Lock(), False

    def __call__(self, function: Callable[[], T]) -> T:
        if self._done:
            return function()
        with self._lock:
            result = function()
            self._done = True
        return result


_openvino_call = SerialFirstCall()


def open_openvino(module: Any, path: Path, split: bool, batch_size: int | None, device: str) -> RuntimeGraph:
    core, cores = openvino_core(), torch.get_num_threads()
    graph = core.read_model(path)
    if batch_size is not None and graph.inputs[0].get_partial_shape()[0].is_dynamic:
        graph.reshape([batch_size, *list(graph.inputs[0].get_partial_shape())[1:]])
    streams = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": cores} if split else {"PERFORMANCE_HINT": "LATENCY"}
    settings = {"INFERENCE_NUM_THREADS": cores, **streams} if device == "CPU" else {}
    compiled = core.compile_model(graph, device, settings | {"INFERENCE_PRECISION_HINT": "f32"})

    def port(node: Any) -> Port:
        shape = tuple(None if side.is_dynamic else side.get_length() for side in node.get_partial_shape())
        dtype = node.element_type.to_string()
        return Port(node.get_any_name(), shape, {"f32": "float32"}.get(dtype, dtype))

    paths = [[*prefix, key] for prefix in ([], ["framework"]) for key in (METADATA_KEY, REQUIRES_KEY)]  # of ONNX files
    metadata = {path[-1]: graph.get_rt_info(path).astype(str) for path in paths if graph.has_rt_info(path)}
    local = threading.local()

    def infer(pixels: Array, index: int) -> Array:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        output: Array = local.request.infer([pixels], share_inputs=True)[index].copy()
        return output

    def run(pixels: Array, index: int) -> Array:
        return _openvino_call(lambda: infer(pixels, index))

    return RuntimeGraph([port(node) for node in graph.inputs], [port(node) for node in graph.outputs], run, metadata)


OPENERS = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}


class Session:
    """An open graph: normalized pixels (B, channels, rows, columns) -> logits (B, K); thread-safe."""

    def __init__(self, path: Path, engine: str, *, split: bool = False, batch_size: int | None = None) -> None:
        """Open a graph that uses all cores for each call, or with `split` one core per piece of a batch.

        `batch_size` fixes a dynamic batch axis of our files, which lets the runtime optimize more.
        """
        runtime, device = DEVICES.get(engine, (engine, "CPU"))
        module = require(runtime, FORMATS[runtime])
        self.path, self.engine, self.split = path, engine, split
        with self.one_line_errors(""):
            inputs, outputs, self._run_graph, metadata = OPENERS[runtime](module, path, split, batch_size, device)
        self.metadata = metadata.get(METADATA_KEY, "")
        if metadata.get(REQUIRES_KEY) == "vnni" and not has_vnni():
            reason = "its 8-bit weights saturate on this processor, which has no VNNI"
            raise CheckpointError(reason, where=path, hint="write it again with 7 bits, or on this machine")
        described = ", ".join(map(str, inputs))
        self.shape = inputs[0].shape if inputs else ()
        if len(inputs) != 1 or len(self.shape) != 4 or self.shape[1] is None:
            what = f"expected one input of (B, channels, rows, columns) images, the graph has {described}"
            raise CheckpointError(what, where=path)
        if inputs[0].dtype != "float32":
            what = f"expected float32 pixels, the graph takes {described}"
            raise CheckpointError(what, where=path, hint="export it in float32")
        vectors = [port for port in outputs if len(port.shape) == 2]
        choices = [port for port in vectors if port.name == "logits"] or vectors
        if len(choices) != 1:
            names = ", ".join(port.name for port in outputs)
            raise CheckpointError(f"none of its outputs ({names}) is one vector of logits per image", where=path)
        self.output, (_, num_outputs), dtype = choices[0]
        if dtype not in FLOATS:
            raise CheckpointError(f"its output {self.output!r} is {dtype}, not logits", where=path)
        if num_outputs is None:
            raise CheckpointError(f"the size of its output {self.output!r} is not fixed", where=path)
        self.widths = {port.name: port.shape[1] for port in vectors if port.dtype in FLOATS}  # of each output
        size = 1 if self.shape[0] is None else self.shape[0]
        if not 0 < size * math.prod(side or 1 for side in self.shape[1:]) <= MAX_VALUES:
            raise CheckpointError(f"a batch of {described} is empty or too large", where=path)
        self.num_outputs, self._index = num_outputs, {port.name: index for index, port in enumerate(outputs)}

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        """The logits, or the output of that name."""
        run = partial(self._run, name=output or self.output)
        return map_over_cores(run, pixels) if self.split else run(pixels)

    def _run(self, pixels: Tensor, name: str) -> Tensor:
        """Run in the calling thread, in batches of the graph's size if that is fixed; a short last batch is padded."""
        size, count = self.shape[0], len(pixels)
        if size is not None and size < count:
            return torch.cat([self._run(batch, name) for batch in torch.split(pixels, size)])
        if size is not None and size > count:
            pixels = torch.cat([pixels, pixels[-1:].expand(size - count, -1, -1, -1)])
        with self.one_line_errors(f" on images of {'x'.join(map(str, pixels.shape[1:]))}"):
            output = self._run_graph(pixels.float().contiguous().numpy(), self._index[name])
            expected = (len(pixels), self.widths[name])
            if output.shape != expected:
                raise ValueError(f"{name!r} has shape {output.shape}, not {expected}")
            return torch.from_numpy(output)[:count]

    @contextmanager
    def one_line_errors(self, what: str) -> Iterator[None]:
        """Turn the errors of a runtime, which may have any type and many lines, into a CheckpointError."""
        try:
            yield
        except VitruvianError:
            raise
        except Exception as error:
            reason = f"{self.engine} cannot run it{what}: {describe_error(error)}"
            raise CheckpointError(reason, where=self.path) from error


class SplitGraph:
    """A graph that runs a batch in pieces, one core per piece.

    A fixed batch size lets a runtime optimize more, so a session is opened for the size of the pieces. At most two
    sessions are kept: one for single images, and one for the first batch that splits evenly. A short last batch must
    not wait for a third.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.engine = path, engine
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        sizes = {len(piece) for piece in even_pieces(pixels, torch.get_num_threads())}
        size = sizes.pop() if len(sizes) == 1 else 1
        with self._lock:  # batches may overlap
            if size not in self._sessions and max(self._sessions, default=1) > 1:
                size = 1
            if size not in self._sessions:
                self._sessions[size] = Session(self.path, self.engine, split=True, batch_size=size)
        return self._sessions[size](pixels, output)


class OpenGraph:
    """A graph file in its fastest configuration: all cores share a single image, a larger batch is split over cores."""

    def __init__(self, path: Path, engine: str) -> None:
        self.path, self.engine = path, engine
        self.single = Session(path, engine, batch_size=None if engine in DEVICES else 1)
        self._split = SplitGraph(path, engine)

    def __call__(self, pixels: Tensor, output: str = "") -> Tensor:
        is_whole = torch.get_num_threads() == 1 or self.engine in DEVICES
        if len(pixels) == 1 or is_whole or self.single.shape[0] not in (None, 1):
            return self.single(pixels, output)
        return self._split(pixels, output)
