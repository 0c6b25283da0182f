"""ONNX Runtime and OpenVINO alike: a file with a graph is opened, and takes and gives arrays."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitruvian.weights.files import CARRIED

BATCH_AXIS = "batch"
"""What ONNX files of ours call the open batch."""

Answer = TypeVar("Answer")
Arrays = Callable[[NDArray[np.float32], int], NDArray[np.float32]]
"""From the only input to the output of this number."""


class Port(NamedTuple):
    """An input or an output of a graph."""

    name: str
    shape: tuple[int | None, ...]
    """None where a side is open."""
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('any' if side is None else str(side) for side in self.shape)}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A graph that is ready to run, by many threads at once."""

    inputs: list[Port]
    outputs: list[Port]
    run: Arrays
    carried: str
    """The description that a file of ours holds, as JSON."""


def open_onnxruntime(module: Any, path: Path, threads: int, split: bool, batch_size: int | None) -> Opened:
    options = module.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # else its threads spin on after an answer, and take a core from decoding, from torch, from another runtime
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if batch_size is not None:
        options.add_free_dimension_override_by_name(BATCH_AXIS, batch_size)
    session = module.InferenceSession(
        str(path),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["MatMulAddFusion"] if is_quantized(path) else None,
    )

    def port(each: Any) -> Port:
        sides = tuple(side if isinstance(side, int) else None for side in each.shape)
        kind = each.type.removeprefix("tensor(").removesuffix(")")
        return Port(each.name, sides, {"float": "float32"}.get(kind, kind))

    inputs, outputs = [port(each) for each in session.get_inputs()], [port(each) for each in session.get_outputs()]

    def run(pixels: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        answer: NDArray[np.float32] = session.run([outputs[number].name], {inputs[0].name: pixels})[0]
        return answer

    carried = session.get_modelmeta().custom_metadata_map.get(CARRIED, "")
    return Opened(inputs=inputs, outputs=outputs, run=run, carried=carried)


def is_quantized(path: Path) -> bool:
    """Whether a file of ONNX, or of OpenVINO, has products in int8.

    With a fixed batch, ONNX Runtime would first join each product with the sum behind it, and then compute it in float.
    """
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(b"QuantizeLinear") >= 0 or held.find(b"FakeQuantize") >= 0


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


def open_openvino(module: Any, path: Path, threads: int, split: bool, batch_size: int | None) -> Opened:
    core = module.Core()
    graph = core.read_model(path)
    if batch_size is not None and graph.inputs[0].get_partial_shape()[0].is_dynamic:
        graph.reshape([batch_size, *list(graph.inputs[0].get_partial_shape())[1:]])
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    if split:  # as many at once as there are cores, a core each
        cores = torch.get_num_threads()
        settings |= {"NUM_STREAMS": cores, "INFERENCE_NUM_THREADS": cores, "PERFORMANCE_HINT": "THROUGHPUT"}
    compiled = core.compile_model(graph, "CPU", settings)

    def port(each: Any) -> Port:
        sides = tuple(None if side.is_dynamic else side.get_length() for side in each.get_partial_shape())
        return Port(each.get_any_name(), sides, {"f32": "float32"}.get(kind := each.element_type.to_string(), kind))

    held = next(
        (each for each in ([CARRIED], ["framework", CARRIED]) if graph.has_rt_info(each)), None
    )  # the last: ONNX
    local = threading.local()

    def infer(pixels: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        answer: NDArray[np.float32] = local.request.infer([pixels], share_inputs=True)[number].copy()
        return answer

    return Opened(
        inputs=[port(each) for each in graph.inputs],
        outputs=[port(each) for each in graph.outputs],
        run=lambda pixels, number: _openvino_at_first(lambda: infer(pixels, number)),
        carried=graph.get_rt_info(held).astype(str) if held else "",
    )


OPENERS = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}
