"""Exported graphs answer like their model at every open shape, and carry what it takes to use them."""

import json

import numpy as np
import onnx
import openvino_telemetry
import pytest
import torch

import vitruvian as vt
from vitruvian.engines import export as exporting
from vitruvian.engines.export import export
from vitruvian.engines.graph import find_graph, open_graph
from vitruvian.errors import CheckpointError, ConfigError, ConversionError
from vitruvian.weights.description import Description

pytestmark = pytest.mark.openvino

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=2, width=16, mlp_dim=16, num_heads=2, num_classes=3)


def tiny_model(**changes):
    model = vt.build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.meta = model.meta.replace(labels=("cat", "dog", "owl"))
    model.meta = model.meta.replace(
        preprocess=vt.Preprocess(image_size=16, fit="crop", scaled_size=(20, 20), mean=(0.1, 0.2, 0.3))
    )
    model.meta = model.meta.replace(temperature=1.5)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def exported(folder):
    """One model as an ONNX file of any batch and size, and as an OpenVINO folder of one size."""
    model = tiny_model()
    report = export(model, folder / "any.onnx", to="onnx", dynamic_size=True)
    export(model, folder / "openvino", to="openvino")
    return model, report


@pytest.mark.parametrize("size", [(16, 16), (40, 24)])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_an_onnx_file_of_any_size_answers_like_the_model_in_both_runtimes(exported, folder, engine, size):
    model, _ = exported
    pixels = torch.randn(5, 3, *size)
    graph = open_graph(folder / "any.onnx", engine=engine)
    torch.testing.assert_close(graph(pixels), model(pixels).detach(), atol=1e-5, rtol=1e-5)


def test_openvinos_converter_reports_nothing_to_its_makers(exported):
    assert openvino_telemetry.Telemetry().consent is False


def test_the_report_names_what_was_compared(exported):
    _, report = exported
    assert report.batch_size is None
    assert report.image_size is None
    assert {shape[0] for shape in report.checked} == {1, 3}
    assert len({shape[2:] for shape in report.checked}) == 3
    assert report.largest_difference < 1e-5 < report.largest_answer


@pytest.mark.parametrize("name", ["any.onnx", "openvino"])
def test_preprocessing_and_labels_travel_with_the_graph(exported, folder, name):
    model, _ = exported
    graph = open_graph(find_graph(folder / name))
    assert (graph.meta.preprocess, graph.meta.labels, graph.meta.temperature) == (
        model.meta.preprocess,
        model.meta.labels,
        1.5,
    )
    assert graph.config == model.config


def test_a_classifier_of_the_file_gives_the_answers_of_the_model(exported, folder):
    model, _ = exported
    images = [np.full((30, 20, 3), level, np.uint8) for level in (0, 90, 200)]
    wanted = vt.Classifier(model).predict(images)
    for name in ("any.onnx", "openvino"):
        for found, answers in zip(vt.Classifier(folder / name).predict(images), wanted):
            assert [a.label for a in found] == [a.label for a in answers]
            assert [a.probability for a in found] == pytest.approx([a.probability for a in answers], abs=1e-5)


def test_a_fixed_batch_also_takes_a_short_one(folder):
    model = tiny_model(pool="mean", depth=1)
    export(model, folder / "four", to="openvino", batch_size=4)
    pixels = torch.randn(6, 3, 16, 16)
    graph = open_graph(find_graph(folder / "four"))
    assert graph.graph.single.shape[0] == 4
    torch.testing.assert_close(graph(pixels), model(pixels).detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(vt.VitruvianError, match=r"takes images of 3x16x16, not 3x24x16"):
        graph(torch.zeros(1, 3, 24, 16))


@pytest.mark.parametrize("changes", [{}, {"distillation": True}])
def test_a_fixed_batch_may_be_the_number_of_heads(tmp_path, changes):
    """onnxscript's optimizer takes one for the other where reshapes stand around a product."""
    model = tiny_model(depth=1, **changes)
    report = export(model, tmp_path / "two.onnx", batch_size=TINY.num_heads)
    assert report.checked == ((2, 3, 16, 16),)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_border_of_a_resnets_max_pooling_is_zeros_in_a_graph_too(folder, engine):
    """ONNX Runtime's Pad_Fusion makes it minus infinity where zeros are padded, which only negative maps show."""
    model = vt.build(vt.ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=3), seed=1).eval()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    if not (folder / "bit.onnx").exists():
        export(model, folder / "bit.onnx")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = open_graph(folder / "bit.onnx", engine=engine)(pixels)
    torch.testing.assert_close(found, model(pixels).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_relative_positions_meet_the_queries_as_they_are_in_a_graph_too(tmp_path, to):
    done = export(tiny_model(pos_embed="relative"), tmp_path / ("rel.onnx" if to == "onnx" else "rel"), to=to)
    assert done.largest_difference < 1e-5


def test_a_torch_program_keeps_the_batch_open_and_is_not_run_by_predict(folder):
    model = tiny_model(depth=1)
    export(model, folder / "model.pt2", to="torch")
    carried = {"vitruvian.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=carried).module()
    pixels = torch.randn(7, 3, 16, 16)
    torch.testing.assert_close(program(pixels), model(pixels))
    assert json.loads(carried["vitruvian.json"])["labels"] == ["cat", "dog", "owl"]
    with pytest.raises(CheckpointError, match=r"a program of torch.export"):
        vt.Classifier(folder / "model.pt2")


def test_a_graph_that_answers_otherwise_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setitem(exporting.WRITERS, "torch", lambda *_: lambda pixels: torch.zeros(len(pixels), 3))
    (tmp_path / "model.pt2").write_text("what was there")
    with pytest.raises(ConversionError, match=r"not written, the torch graph differs by"):
        export(tiny_model(depth=1), tmp_path / "model.pt2", to="torch")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["what was there"]


@pytest.mark.parametrize(
    ("path", "to", "changes", "message"),
    [
        ("model.xml", "openvino", {}, "is a folder, give the name of a folder"),
        ("model", "onnx", {}, r"is a file that ends in \.onnx"),
        ("model.onnx", "onxx", {}, "unknown format 'onxx'"),
        ("m.pt2", "torch", {"trim": True}, "images that the patches do not divide are trimmed"),
        ("m.pt2", "torch", {"stem": vt.StemConfig(stages=(1,), width=32), "patch_size": 1}, "without a stem"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path, path, to, changes, message):
    with pytest.raises(vt.VitruvianError, match=message):
        export(tiny_model(**changes), tmp_path / path, to=to, dynamic_size=True)
    with pytest.raises(ConversionError, match="the head is all zeros"):
        export(vt.build(TINY), tmp_path / "zeros.onnx")
    assert not list(tmp_path.iterdir())


def foreign(folder, path, **settings):
    """The file as another exporter would have left it, with JSON files beside it."""
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
    wanted = vt.Preprocess(image_size=24, interpolation="bicubic", mean=(0.2,) * 3, std=(0.3,) * 3)
    assert classifier.seen_as == wanted
    both = foreign(tmp_path / "b", folder / "any.onnx", processor_config={"image_processor": seen})
    assert vt.Classifier(both).seen_as == wanted
    image = np.full((9, 9, 3), 77, np.uint8)
    probabilities = exported[0](wanted(image)[None]).softmax(-1)[0].sort(descending=True).values.tolist()
    assert [a.probability for a in classifier.predict([image])[0]] == pytest.approx(probabilities, abs=1e-5)


def test_a_file_of_timms_exporter_is_used_with_its_config(exported, folder, tmp_path):
    cfg = {"input_size": [3, 32, 32], "mean": [0.4] * 3, "std": [0.5] * 3, "crop_pct": 0.8, "interpolation": "bicubic"}
    path = foreign(tmp_path / "b", folder / "any.onnx", config={"pretrained_cfg": cfg, "label_names": ["x", "y", "z"]})
    classifier = vt.Classifier(path)
    assert classifier.labels == ("x", "y", "z")
    assert (classifier.seen_as.image_size, classifier.seen_as.scaled_size) == ((32, 32), (40, 40))
    assert classifier.seen_as.mean == (0.4,) * 3


def test_a_file_without_settings_asks_for_them(exported, folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"neither the graph nor a config\.json beside it says its image size"):
        vt.Classifier(foreign(tmp_path / "c", folder / "any.onnx"))
    path = foreign(tmp_path / "d", folder / "any.onnx", config={"image_size": 16})
    with pytest.raises(vt.VitruvianError, match=r"put its preprocessor_config\.json beside"):
        vt.Classifier(path).predict([np.zeros((9, 9, 3), np.uint8)])


def test_a_size_that_a_graph_cannot_take_is_refused_when_it_is_opened(exported, folder):
    with pytest.raises(ConfigError, match="image of 20x20 pixels is not divisible by the patch of 8"):
        open_graph(folder / "any.onnx", image_size=20)
    with pytest.raises(ConfigError, match="image of 16x20 pixels is not divisible by the patch of 8"):
        open_graph(folder / "any.onnx")(torch.zeros(1, 3, 16, 20))
    with pytest.raises(
        ConfigError, match=r"model\.xml: the graph takes images of 3x16x16, not 3x32x32: leave image_size="
    ):
        open_graph(folder / "openvino" / "model.xml", image_size=32)


def test_what_a_runtime_says_of_images_is_one_line(exported, folder, tmp_path):
    seen = {"image_mean": [0.2] * 3, "image_std": [0.3] * 3, "size": {"height": 20, "width": 20}, "resample": 3}
    path = foreign(tmp_path / "f", folder / "any.onnx", preprocessor_config=seen)
    with pytest.raises(
        CheckpointError, match=r"model\.onnx: onnxruntime cannot run it on images of 3x20x20: .{20,200}$"
    ):
        vt.Classifier(path).predict([np.zeros((9, 9, 3), np.uint8)])


def flat_graph(path, *, output="logits", dtype=onnx.TensorProto.FLOAT, channels=3, carried=None):
    """Pixels as the answer, of images of 2x2."""
    shape, width = ["batch", channels, 2, 2], channels * 4
    value = onnx.helper.make_tensor_value_info
    ends = [value("pixels", dtype, shape)], [value(output, dtype, ["batch", width])]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Flatten", ["pixels"], [output])], "flat", *ends)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    if carried is not None:
        onnx.helper.set_model_props(made, {"vitruvian": json.dumps(carried)})
    onnx.save(made, path)
    return path


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_a_graph_of_other_numbers_than_float32_is_refused(tmp_path, engine, dtype):
    path = flat_graph(tmp_path / "m.onnx", dtype=getattr(onnx.TensorProto, dtype.upper()))
    with pytest.raises(CheckpointError, match=r"takes pixels .*\[.*3, 2, 2\], and images are normalized float32"):
        open_graph(path, engine=engine)


def test_features_of_another_exporter_are_no_answers(tmp_path):
    """transformers' ViTModel has one vector an image, which would pass for logits of 768 classes."""
    path = flat_graph(tmp_path / "model.onnx", output="pooler_output")
    with pytest.raises(ConfigError, match="this model has no head, so it gives features but no answers"):
        vt.Classifier(path)


@pytest.mark.parametrize("changes", [{"num_classes": 5}, {"in_channels": 1}])
def test_a_description_of_another_graph_is_refused(tmp_path, changes):
    model = vt.build(TINY.replace(**({"image_size": 16, "num_classes": 12} | changes)))
    path = flat_graph(tmp_path / "model.onnx", carried=Description.of(model).to_json())
    with pytest.raises(CheckpointError, match=r"model\.onnx: describes a model of .* belongs to another graph"):
        open_graph(path)


def test_what_is_for_weights_is_refused_of_a_graph(exported, folder):
    for given in ({"num_heads": 2}, {"device": "cuda"}):
        with pytest.raises(ConfigError, match="heads= and device= are for weights"):
            vt.Classifier(folder / "any.onnx", **given)


def test_a_folder_with_a_graph_of_another_name_says_which(tmp_path):
    flat_graph(tmp_path / "int8.onnx")
    with pytest.raises(CheckpointError, match=r"no weights but an exported graph, for predict, .*int8\.onnx"):
        vt.Classifier(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"x\.onnx: onnxruntime cannot run it"):
        vt.Classifier(tmp_path / "x.onnx")
