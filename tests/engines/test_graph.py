"""Graph files that cannot be used are refused with a reason."""

import json

import onnx
import pytest

import vitruvian as vt
from vitruvian.engines.graph import open_graph
from vitruvian.errors import CheckpointError, ConfigError
from vitruvian.weights.checkpoint_files import Description

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=2, width=16, mlp_dim=16, num_heads=2, num_classes=3)
RUNTIMES = ["onnxruntime", pytest.param("openvino", marks=pytest.mark.openvino)]


def flat_graph(path, *, output="logits", dtype=onnx.TensorProto.FLOAT, channels=3, metadata=None):
    """Pixels as the answer, of images of 2x2."""
    shape, width = ["batch", channels, 2, 2], channels * 4
    value = onnx.helper.make_tensor_value_info
    ends = [value("pixels", dtype, shape)], [value(output, dtype, ["batch", width])]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Flatten", ["pixels"], [output])], "flat", *ends)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    if metadata is not None:
        onnx.helper.set_model_props(made, {"vitruvian": json.dumps(metadata)})
    onnx.save(made, path)
    return path


@pytest.mark.parametrize("engine", RUNTIMES)
@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_a_graph_of_another_dtype_than_float32_is_refused(tmp_path, engine, dtype):
    path = flat_graph(tmp_path / "m.onnx", dtype=getattr(onnx.TensorProto, dtype.upper()))
    with pytest.raises(CheckpointError, match=r"expected float32 pixels, the graph takes pixels .*\[.*3, 2, 2\]"):
        open_graph(path, engine=engine)


def test_features_of_another_exporter_are_not_logits(tmp_path):
    """transformers' ViTModel has one vector an image, which would pass for logits of 768 classes."""
    path = flat_graph(tmp_path / "model.onnx", output="pooler_output")
    with pytest.raises(ConfigError, match="this model has no classification head"):
        vt.Classifier(path)


@pytest.mark.parametrize("changes", [{"num_classes": 5}, {"in_channels": 1}])
def test_a_description_of_another_graph_is_refused(tmp_path, changes):
    model = vt.build(TINY.replace(**({"image_size": 16, "num_classes": 12} | changes)))
    path = flat_graph(tmp_path / "model.onnx", metadata=Description.of(model).to_json())
    with pytest.raises(CheckpointError, match=r"model\.onnx: the description has .* belongs to another graph"):
        open_graph(path)


def test_a_folder_with_a_graph_of_another_name_says_which(tmp_path):
    flat_graph(tmp_path / "int8.onnx")
    with pytest.raises(CheckpointError, match=r"has no weights, only a graph, .*int8\.onnx"):
        vt.Classifier(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"x\.onnx: onnxruntime cannot run it"):
        vt.Classifier(tmp_path / "x.onnx")
