"""Exported graphs compute the model's logits at every dynamic shape, and contain preprocessing and labels."""

import json

import numpy as np
import onnx
import pytest
import torch

import vitruvian as vt
from vitruvian.engines import export as exporting
from vitruvian.engines.export import export
from vitruvian.engines.graph import find_graph, open_graph
from vitruvian.errors import CheckpointError, ConfigError, ConversionError

pytestmark = pytest.mark.slow

RUNTIMES = ["onnxruntime", pytest.param("openvino", marks=pytest.mark.openvino)]
TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=2, width=16, mlp_dim=16, num_heads=2, num_classes=3)


def tiny_model(**changes):
    model = vt.build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    preprocess = vt.Preprocess(image_size=16, fit="crop", scaled_size=(20, 20), mean=(0.1, 0.2, 0.3))
    model.meta = model.meta.replace(labels=("cat", "dog", "owl"), preprocess=preprocess, temperature=1.5)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def exported(folder):
    """A model as an ONNX file for any batch and image size."""
    model = tiny_model()
    return model, export(model, folder / "any.onnx", to="onnx", dynamic_size=True)


@pytest.fixture(scope="module")
def openvino_folder(exported, folder):
    """The same model as an OpenVINO folder for one image size."""
    export(exported[0], folder / "openvino", to="openvino")
    return folder / "openvino"


@pytest.mark.parametrize("engine", RUNTIMES)
def test_a_graph_may_have_the_features_as_a_second_output(exported, folder, tmp_path, engine):
    model, pixels = tiny_model(pool="map"), torch.randn(5, 3, 16, 16)
    export(model, tmp_path / "both.onnx", features=True)
    operators = [node.op_type for node in onnx.load(str(tmp_path / "both.onnx")).graph.node]
    assert operators.count("Softmax") + operators.count("Attention") == 3  # features are on the way to the logits
    graph = open_graph(tmp_path / "both.onnx", engine=engine)
    torch.testing.assert_close(graph(pixels), model(pixels).detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(graph.features(pixels), model.features(pixels).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"exported graphs return logits only.*--features"):
        open_graph(folder / "any.onnx", engine=engine).features(pixels)


def test_a_torch_program_may_have_the_features_as_a_second_output(tmp_path):
    model, pixels = tiny_model(depth=1), torch.randn(2, 3, 16, 16)
    export(model, tmp_path / "both.pt2", to="torch", features=True)
    logits, features = torch.export.load(tmp_path / "both.pt2").module()(pixels)
    torch.testing.assert_close(logits, model(pixels))
    torch.testing.assert_close(features, model.features(pixels))


@pytest.mark.parametrize("size", [(16, 16), (40, 24)])
@pytest.mark.parametrize("engine", RUNTIMES)
def test_an_onnx_file_of_any_size_computes_the_models_logits_in_both_runtimes(exported, folder, engine, size):
    model, _ = exported
    pixels = torch.randn(5, 3, *size)
    graph = open_graph(folder / "any.onnx", engine=engine)
    torch.testing.assert_close(graph(pixels), model(pixels).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.openvino
def test_openvinos_converter_sends_no_usage_statistics(openvino_folder):
    import openvino_telemetry

    assert openvino_telemetry.Telemetry().consent is False


def test_the_result_lists_the_compared_shapes(exported):
    _, report = exported
    assert report.batch_size is None
    assert report.image_size is None
    assert {shape[0] for shape in report.checked} == {1, 3}
    assert len({shape[2:] for shape in report.checked}) == 3
    assert report.largest_difference < 1e-5 < report.largest_output


FILES = ["any.onnx", pytest.param("openvino", marks=pytest.mark.openvino)]


@pytest.mark.parametrize("name", FILES)
def test_a_graph_contains_preprocessing_and_labels(exported, folder, name, request):
    model, _ = exported
    path = request.getfixturevalue("openvino_folder") if name == "openvino" else folder / name
    graph = open_graph(find_graph(path))
    assert graph.meta.replace(origin="") == model.meta.replace(origin="")
    assert graph.config == model.config


@pytest.mark.parametrize("name", FILES)
def test_a_classifier_of_the_file_gives_the_predictions_of_the_model(exported, folder, name, request):
    model, _ = exported
    path = request.getfixturevalue("openvino_folder") if name == "openvino" else folder / name
    images = [np.full((30, 20, 3), level, np.uint8) for level in (0, 90, 200)]
    for ours, expected in zip(vt.Classifier(path).predict(images), vt.Classifier(model).predict(images)):
        assert [p.label for p in ours] == [p.label for p in expected]
        assert [p.probability for p in ours] == pytest.approx([p.probability for p in expected], abs=1e-5)


@pytest.mark.openvino
def test_a_fixed_batch_size_also_accepts_a_short_batch(folder):
    model = tiny_model(pool="mean", depth=1)
    export(model, folder / "four", to="openvino", batch_size=4)
    pixels = torch.randn(6, 3, 16, 16)
    graph = open_graph(find_graph(folder / "four"))
    assert graph.graph.single.shape[0] == 4
    torch.testing.assert_close(graph(pixels), model(pixels).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(vt.VitruvianError, match=r"takes images of 3x16x16, not 3x24x16"):
        graph(torch.zeros(1, 3, 24, 16))


@pytest.mark.parametrize("changes", [{}, {"distillation": True}])
def test_a_fixed_batch_size_may_equal_the_number_of_heads(tmp_path, changes):
    """onnxscript's optimizer takes one for the other where reshapes stand around a product."""
    model = tiny_model(depth=1, **changes)
    report = export(model, tmp_path / "two.onnx", batch_size=TINY.num_heads)
    assert report.checked == ((2, 3, 16, 16),)


@pytest.mark.parametrize("engine", RUNTIMES)
def test_max_pooling_of_an_exported_resnet_pads_with_zeros(folder, engine):
    """ONNX Runtime's Pad_Fusion makes it minus infinity where zeros are padded, which only negative maps show."""
    model = vt.build(vt.ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=3), seed=1).eval()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    if not (folder / "bit.onnx").exists():
        export(model, folder / "bit.onnx")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    result = open_graph(folder / "bit.onnx", engine=engine)(pixels)
    torch.testing.assert_close(result, model(pixels).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", ["onnx", pytest.param("openvino", marks=pytest.mark.openvino)])
def test_relative_positions_are_added_to_unscaled_queries(tmp_path, to):
    done = export(tiny_model(pos_embed="relative"), tmp_path / ("rel.onnx" if to == "onnx" else "rel"), to=to)
    assert done.largest_difference < 1e-5


def test_a_torch_program_accepts_any_batch_size_and_is_not_run_by_predict(folder):
    model = tiny_model(depth=1)
    export(model, folder / "model.pt2", to="torch")
    carried = {"vitruvian.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=carried).module()
    pixels = torch.randn(7, 3, 16, 16)
    torch.testing.assert_close(program(pixels), model(pixels))
    assert json.loads(carried["vitruvian.json"])["labels"] == ["cat", "dog", "owl"]
    with pytest.raises(CheckpointError, match=r"a torch.export program"):
        vt.Classifier(folder / "model.pt2")


def test_a_graph_with_other_outputs_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(exporting.WRITERS, "torch", lambda *_: lambda pixels: torch.zeros(len(pixels), 3))
    (tmp_path / "model.pt2").write_text("what was there")
    with pytest.raises(ConversionError, match=r"not written, the outputs of the torch graph differ"):
        export(tiny_model(depth=1), tmp_path / "model.pt2", to="torch")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["what was there"]


@pytest.mark.parametrize(
    ("path", "to", "changes", "message"),
    [
        ("model.xml", "openvino", {}, "is a folder; give the name of a folder"),
        ("model", "onnx", {}, r"must end in \.onnx"),
        ("model.onnx", "onxx", {}, "unknown format 'onxx'"),
        ("m.pt2", "torch", {"trim": True}, "this model trims images that the patches do not divide"),
        ("m.pt2", "torch", {"stem": vt.StemConfig(stages=(1,), width=32), "patch_size": 1}, "without a stem"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused(tmp_path, path, to, changes, message):
    with pytest.raises(vt.VitruvianError, match=message):
        export(tiny_model(**changes), tmp_path / path, to=to, dynamic_size=True)
    with pytest.raises(ConversionError, match="the head is all zeros"):
        export(vt.build(TINY), tmp_path / "zeros.onnx")
    assert not list(tmp_path.iterdir())


def foreign(folder, path, **settings):
    """A copy as another exporter would write it, with JSON files beside it."""
    folder.mkdir(parents=True)
    graph = onnx.load(path)
    del graph.metadata_props[:]
    onnx.save(graph, folder / "model.onnx")
    for name, content in settings.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder / "model.onnx"


def test_a_file_of_transformers_exporter_is_used_with_the_settings_beside_it(exported, folder, tmp_path):
    names = {str(i): name for i, name in enumerate("abc")}
    seen = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "size": {"height": 24, "width": 24}, "resample": 3}
    path = foreign(tmp_path / "a", folder / "any.onnx", config={"id2label": names}, preprocessor_config=seen)
    classifier = vt.Classifier(path)
    assert classifier.labels == ("a", "b", "c")
    expected = vt.Preprocess(image_size=24, interpolation="bicubic", mean=(0.2,) * 3, std=(0.3,) * 3)
    assert classifier.preprocess == expected
    both = foreign(tmp_path / "b", folder / "any.onnx", processor_config={"image_processor": seen})
    assert vt.Classifier(both).preprocess == expected
    image = np.full((9, 9, 3), 77, np.uint8)
    probabilities = (
        exported[0](vt.preprocess_image(image, expected)[None]).softmax(-1)[0].sort(descending=True).values.tolist()
    )
    assert [p.probability for p in classifier.predict([image])[0]] == pytest.approx(probabilities, abs=1e-5)


def test_a_file_of_timms_exporter_is_used_with_its_config(exported, folder, tmp_path):
    cfg = {"input_size": [3, 32, 32], "mean": [0.4] * 3, "std": [0.5] * 3, "crop_pct": 0.8, "interpolation": "bicubic"}
    path = foreign(tmp_path / "b", folder / "any.onnx", config={"pretrained_cfg": cfg, "label_names": ["x", "y", "z"]})
    classifier = vt.Classifier(path)
    assert classifier.labels == ("x", "y", "z")
    assert (classifier.preprocess.image_size, classifier.preprocess.scaled_size) == ((32, 32), (40, 40))
    assert classifier.preprocess.mean == (0.4,) * 3


def test_a_file_without_settings_asks_for_them(exported, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"neither the graph nor a config\.json beside it states its image size"):
        vt.Classifier(foreign(tmp_path / "c", folder / "any.onnx"))
    path = foreign(tmp_path / "d", folder / "any.onnx", config={"image_size": 16})
    with pytest.raises(vt.VitruvianError, match=r"put its preprocessor_config\.json beside"):
        vt.Classifier(path).predict([np.zeros((9, 9, 3), np.uint8)])


def test_a_size_that_a_graph_cannot_take_is_refused_when_it_is_opened(exported, folder):
    with pytest.raises(ConfigError, match="image of 20x20 pixels is not divisible by the patch of 8"):
        open_graph(folder / "any.onnx", image_size=20)
    with pytest.raises(ConfigError, match="image of 16x20 pixels is not divisible by the patch of 8"):
        open_graph(folder / "any.onnx")(torch.zeros(1, 3, 16, 20))


@pytest.mark.openvino
def test_another_size_than_that_of_a_fixed_graph_is_refused(openvino_folder):
    with pytest.raises(ConfigError, match=r"model\.xml: the graph takes images of 3x16x16, not 3x32x32; omit"):
        open_graph(openvino_folder / "model.xml", image_size=32)


def test_the_error_of_a_runtime_is_one_line(exported, folder, tmp_path):
    seen = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "size": {"height": 20, "width": 20}, "resample": 3}
    path = foreign(tmp_path / "f", folder / "any.onnx", preprocessor_config=seen)
    with pytest.raises(
        CheckpointError, match=r"model\.onnx: onnxruntime cannot run it on images of 3x20x20: .{20,300}$"
    ):
        vt.Classifier(path).predict([np.zeros((9, 9, 3), np.uint8)])


def test_options_for_weights_are_refused_for_a_graph(exported, folder):
    for name, value in (("num_heads", 2), ("device", "cuda")):
        with pytest.raises(ConfigError, match=f"^{name}= is for weights"):
            vt.Classifier(folder / "any.onnx", **{name: value})
