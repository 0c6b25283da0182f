"""A model is written in int8 only if it keeps the predictions and is faster; its graph computes the simulation."""

import numpy as np
import pytest
import torch
from compress_models import LABELS, PIXELS, faster, model_with_an_outlier, tiny_model

import vitruvian as vt
from vitruvian.compress import int8
from vitruvian.compress.int8 import write_int8
from vitruvian.compress.loss import PixelSample, accuracy_loss, read_sample
from vitruvian.compress.optimize import CALIBRATION_IMAGES
from vitruvian.config import CascadeConfig, ResNetConfig
from vitruvian.engines import runtimes
from vitruvian.engines.export import export
from vitruvian.engines.graph import open_graph
from vitruvian.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    DataError,
    FileError,
    MissingExtraError,
    UnknownNameError,
)


@pytest.fixture(scope="module")
def quantized(images, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    model = tiny_model()
    model.meta = model.meta.replace(
        cascade=CascadeConfig(threshold=0.0, image_size=8)
    )  # the whole model is what becomes int8
    report = vt.quantize(model, path, calibrate=images, evaluate=images, max_loss=10, weight_bits=7, timer=faster)
    model.meta = model.meta.replace(cascade=None)
    return model, path, report


@pytest.mark.slow
def test_a_quantized_model_predicts_like_its_model_and_contains_its_metadata(quantized, images):
    model, path, report = quantized
    graph = open_graph(path)
    assert (graph.meta.labels, graph.meta.temperature) == (LABELS, 1.5)
    assert graph.meta.preprocess == model.meta.preprocess
    files = sorted(images.iterdir())
    answers = [vt.Classifier(each).predict(files, top=1) for each in (model, path)]
    same = np.mean([old[0].label == new[0].label for old, new in zip(*answers)])
    assert 100 * same == pytest.approx(report.loss.agreement)
    assert same > 0.9
    assert report.speedup > 1
    assert report.weight_bits == 7
    assert len(report.sensitivity) == 8


@pytest.mark.slow
def test_the_graph_computes_what_the_simulation_says(quantized, images):
    """So the sensitivity is that of the layers as they run; a value near half a step may be rounded either way."""
    model, path, report = quantized
    classifier = vt.Classifier(model)
    sample = read_sample(classifier, images, images=CALIBRATION_IMAGES, training=True)
    ready, inputs = int8.prepare(model, sample.batches())
    layers = int8.gptq_layers(ready, inputs, sample.batches(), bits=7)
    chosen = {name: layer for name, layer in layers.items() if name not in report.float_layers}
    pixels = sample.tensor(slice(None))
    simulated = int8.simulate(ready, chosen)(pixels)
    with torch.no_grad():
        wanted = model(pixels)
    off = (open_graph(path)(pixels) - simulated).abs().mean()
    assert off < 0.3 * (simulated - wanted).abs().mean()


@pytest.mark.slow
def test_a_graph_with_a_channel_in_float_computes_what_the_simulation_says(tmp_path):
    model, pixels = model_with_an_outlier()
    ready, inputs = int8.prepare(model, [pixels])
    layers = int8.gptq_layers(ready, inputs, [pixels], bits=7)
    export(ready, tmp_path / "float.onnx")
    write_int8(tmp_path / "float.onnx", tmp_path / "int8.onnx", ready, layers)
    simulated = int8.simulate(ready, layers)(pixels)
    with torch.no_grad():
        wanted = ready(pixels)
    off = (open_graph(tmp_path / "int8.onnx")(pixels) - simulated).abs().mean()
    assert off < 0.3 * (simulated - wanted).abs().mean()


@pytest.mark.slow
def test_layers_that_read_the_same_input_may_have_different_ranges(tmp_path):
    """Attention and MLP of a parallel block read one norm; each may have another channel in float."""
    model, pixels = tiny_model(block="parallel"), PIXELS
    ready, inputs = int8.prepare(model, [pixels])
    name = "blocks.0.attn.qkv"
    inputs[name] = int8.Int8Input(ends=tuple(end / 4 for end in inputs["blocks.0.mlp.fc1"].ends), float_channels=(2,))
    layers = int8.gptq_layers(ready, inputs, [pixels], bits=7)
    export(ready, tmp_path / "float.onnx")
    chosen = {name: layers[name], "blocks.0.mlp.fc1": layers["blocks.0.mlp.fc1"]}
    write_int8(tmp_path / "float.onnx", tmp_path / "int8.onnx", ready, chosen)
    simulated = int8.simulate(ready, chosen)(pixels)
    torch.testing.assert_close(open_graph(tmp_path / "int8.onnx")(pixels), simulated, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_a_quantized_graph_runs_in_int8_at_a_fixed_batch_size_too(quantized, tmp_path):
    """ONNX Runtime writes what it runs: a product that it computes in float is none of integers."""
    import onnx
    import onnxruntime

    _, path, report = quantized
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "runs.onnx")
    options.log_severity_level = 3
    real = onnxruntime.SessionOptions
    onnxruntime.SessionOptions = lambda: options
    try:
        runtimes.Session(path, "onnxruntime", batch_size=1)
    finally:
        onnxruntime.SessionOptions = real
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "runs.onnx")).graph.node]
    int8_products = kinds.count("MatMulIntegerToFloat") + kinds.count("DynamicQuantizeMatMul")
    assert int8_products >= len(report.sensitivity) - len(report.float_layers)


@pytest.mark.slow
def test_a_loss_beyond_the_limit_writes_nothing(images, tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "best_range", lambda values: (0.0, 1e-3))  # everything is clipped
    monkeypatch.setattr("vitruvian.compress.optimize.check_runs", lambda *_: None)
    with pytest.raises(ConversionError, match=r"not written, .* points may be lost, more than max_loss=0.5"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=images, timer=faster)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_slower_model_is_not_written(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.compress.optimize.check_runs", lambda *_: None)  # a second process

    def slower(forwards, pixels):
        return {"float": 1.0, "int8": 1.25}

    with pytest.raises(ConversionError, match=r"not written, int8 is not faster on this machine: 0.80 times"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=images, max_loss=100, timer=slower)
    assert not list(tmp_path.iterdir())


def test_bad_requests_are_refused_before_anything_is_read(images, tmp_path, monkeypatch):
    given = {"calibrate": images, "evaluate": images}
    taken = tmp_path / "taken.onnx"
    taken.write_text("mine")
    for path, changes, error, text in [
        (taken, {}, ConversionError, "taken.onnx: already exists"),
        (tmp_path / "q.bin", {}, ConversionError, "must end in .onnx"),
        (tmp_path / "q.onnx", {"max_loss": -1}, ConfigError, "max_loss"),
        (tmp_path / "q.onnx", {"weight_bits": 4}, ConfigError, "weight_bits=4 is not 7 or 8"),
        (tmp_path / "q.onnx", {"engine": "torch"}, UnknownNameError, "torch"),
        (tmp_path / "q.onnx", {"calibrate": tmp_path / "nowhere"}, DataError, "nowhere"),
    ]:
        with pytest.raises(error, match=text):
            vt.quantize(tiny_model(), path, **given | changes)
    assert taken.read_text() == "mine"
    monkeypatch.setattr(int8, "has_vnni", lambda: False)
    with pytest.raises(ConfigError, match="weight_bits=8 saturates on this processor"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", **given, weight_bits=8)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match="onnx"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", **given)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [7, 8])
def test_a_graph_with_8_bit_weights_is_refused_on_processors_without_vnni(tmp_path, monkeypatch, bits):
    model = tiny_model()
    ready, inputs = int8.prepare(model, [PIXELS], bits)
    export(ready, tmp_path / "float.onnx")
    write_int8(tmp_path / "float.onnx", tmp_path / "q.onnx", ready, int8.rounded_layers(ready, inputs, bits))
    monkeypatch.setattr(runtimes, "has_vnni", lambda: True)
    assert open_graph(tmp_path / "q.onnx").meta.labels == LABELS
    monkeypatch.setattr(runtimes, "has_vnni", lambda: False)
    if bits == 7:
        open_graph(tmp_path / "q.onnx")
    else:
        with pytest.raises(
            CheckpointError, match=r"q\.onnx: its 8-bit weights saturate on this processor, which has no"
        ):
            open_graph(tmp_path / "q.onnx")


@pytest.mark.parametrize(("vnni", "bits"), [(True, 8), (False, 7)])
def test_the_processor_decides_the_bits_of_the_weights(monkeypatch, vnni, bits):
    monkeypatch.setattr(int8, "has_vnni", lambda: vnni)
    assert int8.default_bits() == bits


def test_too_few_images_measure_no_loss(images, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for number in range(5):
        (few / f"{number}.png").write_bytes((images / f"{number}.png").read_bytes())
    with pytest.raises(DataError, match="5 images, but at least 32 are needed"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=few)


def test_the_loss_is_the_probability_that_changed_predictions_lose():
    probabilities = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.7, 0.1]])
    model = tiny_model()
    model.meta = model.meta.replace(temperature=1.0)
    after = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0], [0, 1.0, 0]])
    sample = PixelSample(name="", pixels=np.zeros((4, 1, 1, 1), np.float32), labels=np.full(4, -1), space=None)
    found = accuracy_loss(model, probabilities.log(), after, sample)
    assert (found.agreement, found.after) == (75.0, None)
    assert found.expected == pytest.approx(100 * 0.3 / 4, rel=1e-5)
    assert found.points > found.expected


def test_a_resnet_is_refused_before_images_are_read(tmp_path):
    resnet = vt.build(ResNetConfig(image_size=(32, 32), stages=(1, 1, 1, 1), width=32, num_classes=3))
    torch.nn.init.normal_(resnet.head.weight, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="int8 is for Vision Transformers"):
        vt.quantize(resnet, tmp_path / "q.onnx", calibrate=tmp_path / "nowhere", evaluate=tmp_path / "nowhere")


@pytest.mark.parametrize("command", [vt.quantize, vt.optimize, vt.export])
def test_an_unwritable_destination_is_reported_before_the_model_is_read(command, images, tmp_path):
    (tmp_path / "file").touch()
    folders = {"calibrate": images, "evaluate": images} if command is vt.quantize else {"calibrate": images}
    with pytest.raises(FileError, match="cannot be written: Not a directory"):
        command("no model", tmp_path / "file" / "x.onnx", **({} if command is vt.export else folders))
