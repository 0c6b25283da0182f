"""Graphs of other exporters that lie about their inputs and outputs: one line that names the file."""

import json

import numpy as np
import pytest
import torch

from vitruvian.engines.graph import open_graph
from vitruvian.errors import CheckpointError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper, types = onnx.helper, onnx.TensorProto
PIXELS = ["batch", 3, 4, 4]


def write_graph(path, *, pixels=PIXELS, classes=2, last="Identity", dtype=types.FLOAT, **options):
    """A linear classifier of 4 x 4 pixels, whose logits pass through one more node."""
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "W"], ["y"]),
        helper.make_node(last, ["y"], ["logits"], **options),
    ]
    ports = [helper.make_tensor_value_info("x", types.FLOAT, pixels)]
    ports.append(helper.make_tensor_value_info("logits", dtype, [pixels[0], classes]))
    weight = helper.make_tensor("W", types.FLOAT, [48, classes], [0.1] * (48 * classes))
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def test_an_output_of_text_is_not_logits(tmp_path):
    path = write_graph(tmp_path / "g.onnx", last="Cast", to=types.STRING, dtype=types.STRING)
    with pytest.raises(CheckpointError, match=r"g.onnx: its output 'logits' is string, not logits"):
        open_graph(path)


@pytest.mark.parametrize("size", [0, 10**9, 2**40])
def test_a_batch_of_an_impossible_size_is_refused(tmp_path, size):
    path = write_graph(tmp_path / "g.onnx", pixels=[size, *PIXELS[1:]])
    with pytest.raises(CheckpointError, match=r"g.onnx: a batch of x float32\[.*\] is empty or too large"):
        open_graph(path)


def test_an_output_of_another_shape_than_declared_is_refused(tmp_path):
    graph = open_graph(write_graph(tmp_path / "g.onnx"))
    graph.graph.single._run_graph = lambda pixels, index: np.zeros((len(pixels), 1), np.float32)
    with pytest.raises(CheckpointError, match=r"g.onnx: .* 'logits' has shape \(1, 1\), not \(1, 2\)"):
        graph(torch.zeros(1, 3, 4, 4))


def test_the_first_graph_of_a_cascade_has_the_same_classes(tmp_path):
    path = write_graph(tmp_path / "model.onnx")
    write_graph(tmp_path / "first.onnx", classes=3)
    (tmp_path / "cascade.json").write_text(json.dumps({"threshold": 1.0}))
    with pytest.raises(CheckpointError, match=r"first.onnx: has 3 outputs, the graph after it in the cascade has 2"):
        open_graph(path).first_pass()


@pytest.mark.parametrize("content", ['{"threshold": "x"}', '{"\x1b": 1}', "[" * 5000])
def test_a_damaged_cascade_is_one_line(tmp_path, content):
    path = write_graph(tmp_path / "model.onnx")
    (tmp_path / "cascade.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"(model.onnx|cascade.json): ") as caught:
        open_graph(path)
    assert str(caught.value).isprintable()
