"""int8 keeps the answers or is not written; the fastest model within a loss is one that `vit predict` takes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.config import CascadeConfig
from vitruvian.engines import int8, sessions
from vitruvian.engines.graph import open_graph
from vitruvian.engines.smooth import channel_maxima, dense_layers, smoothed
from vitruvian.errors import ConfigError, ConversionError, DataError, MissingExtraError, UnknownNameError
from vitruvian.evaluation.fast.loss import Sample, loss_of
from vitruvian.evaluation.fast.optimize import Candidate, Search
from vitruvian.evaluation.fast.page import write_quantized

pytestmark = pytest.mark.openvino

TINY = vt.ViTConfig(image_size=16, patch_size=8, layers=2, width=16, mlp_width=32, heads=2, classes=3)
LABELS = ("cat", "dog", "owl")


def tiny_model(**changes):
    """With channels of very different sizes, which int8 alone does not suffer."""
    model = vt.build(TINY.replace(**changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if "norm" in name and parameter.dim() == 1:
                parameter[::4] *= 30
    model.labels = LABELS
    model.preprocess = vt.Preprocess(image_size=16, mean=(0.4, 0.5, 0.6))
    model.temperature = 1.5
    return model


def faster(forwards, pixels):
    """A machine on which int8 has twice the speed of float, and fewer tokens are faster still."""
    return {name: 0.5 ** ("int8" in name) / (1 + len(name)) for name in forwards}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """70 images in a folder without classes."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(70):
        pixels = generator.integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).resize((20, 20)).save(folder / f"{number}.png")
    return folder


VARIANTS = [
    {},
    {"norm": "rms"},
    {"mlp": "swiglu"},
    {"block": "parallel"},
    {"block": "res_post_norm"},
    {"mlp_norm": True, "attention_norm": True},
    {"qkv_bias": False, "dense_bias": False},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_moved_scales_change_no_bit_of_the_answers(changes):
    model, pixels = tiny_model(**changes), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    changed = smoothed(model, channel_maxima(model, [pixels]))
    before, after = dense_layers(model), dense_layers(changed)
    assert any(not torch.equal(before[name].weight, after[name].weight) for name in before)
    with torch.no_grad():
        assert torch.equal(model(pixels), changed(pixels))


def test_moved_scales_make_channels_more_alike():
    model, pixels = tiny_model(), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    maxima = channel_maxima(model, [pixels])
    after = channel_maxima(smoothed(model, maxima), [pixels])
    name = "blocks.0.attention.qkv"
    assert after[name].max() / after[name].median() < maxima[name].max() / maxima[name].median() / 2


def test_a_range_leaves_out_what_is_far_from_all_other_values():
    values = torch.cat([torch.linspace(-1, 1, 1_000_000), torch.tensor([3.0])])
    assert int8.best_range(values)[1] == pytest.approx(1, abs=0.01)
    assert int8.best_range(torch.zeros(9)) == (0.0, 1.0)


def test_weights_of_seven_bits_never_saturate_sixteen():
    weight = int8.rounded_weight(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), 7)
    steps = weight / (weight.abs().amax(dim=1, keepdim=True) / 63)
    assert steps.round().abs().max() * 255 * 2 < 2**15


def test_sensitivity_from_the_middle_is_that_of_the_whole_model():
    model, pixels = tiny_model(), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ready, ranges = int8.prepared(model, [pixels])
    found = int8.sensitivity(ready, ranges, pixels, bits=7)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    name = "blocks.1.mlp.fc1"
    with torch.no_grad():
        wanted = ready(pixels).log_softmax(dim=1)
    given = int8.simulated(ready, [name], ranges, 7)(pixels).log_softmax(dim=1)
    whole = (wanted.exp() * (wanted - given)).sum(dim=1).mean()
    assert found[name] == pytest.approx(float(whole), rel=1e-3, abs=1e-7)


@pytest.fixture(scope="module")
def quantized(images, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    model = tiny_model()
    report = vt.quantize(model, path, calibrate=images, evaluate=images, max_loss=10, timer=faster)
    return model, path, report


def test_a_quantized_model_answers_like_its_model_and_carries_what_it_needs(quantized, images):
    model, path, report = quantized
    graph = open_graph(path)
    assert (graph.labels, graph.temperature) == (LABELS, 1.5)
    assert graph.preprocess == model.preprocess
    files = sorted(images.iterdir())
    answers = [vt.Classifier(each).predict(files, top=1) for each in (model, path)]
    same = np.mean([old[0].label == new[0].label for old, new in zip(*answers)])
    assert 100 * same == pytest.approx(report.loss.agreement)
    assert same > 0.9
    assert report.speedup > 1
    assert report.weight_bits == 7
    assert len(report.sensitivity) == 8


def test_the_graph_computes_what_the_simulation_says(quantized, images):
    """So the sensitivity is that of the layers as they run; half a step of a weight may be rounded either way."""
    model, path, report = quantized
    pixels = torch.stack([model.preprocess(file) for file in sorted(images.iterdir())])
    ready, ranges = int8.prepared(model, [pixels])
    names = [name for name in ranges if name not in report.float_layers]
    simulated = int8.simulated(ready, names, ranges, 7)(pixels)
    with torch.no_grad():
        wanted = model(pixels)
    off = (open_graph(path)(pixels) - wanted).abs().mean()
    assert off < 3 * (simulated - wanted).abs().mean()


def test_a_quantized_graph_runs_in_int8_at_a_fixed_batch_too(quantized, tmp_path):
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
        sessions.open_session(path, "onnxruntime", batch=1)
    finally:
        onnxruntime.SessionOptions = real
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "runs.onnx")).graph.node]
    int8_products = kinds.count("MatMulIntegerToFloat") + kinds.count("DynamicQuantizeMatMul")
    assert int8_products >= len(report.sensitivity) - len(report.float_layers)


def test_the_page_draws_the_sensitivity(quantized, tmp_path):
    _, _, report = quantized
    page = write_quantized(tmp_path / "report", report.to_json(), str(report)).read_text()
    assert "<svg" in page
    assert "blocks.1.mlp.fc2" in page
    assert json.loads((tmp_path / "report" / "quantize.json").read_text())["loss"]["images"] == 70


def test_a_loss_beyond_the_limit_writes_nothing(images, tmp_path, monkeypatch):
    monkeypatch.setattr(int8, "best_range", lambda values: (0.0, 1e-3))  # everything is clipped
    monkeypatch.setattr("vitruvian.evaluation.fast.quantize.check_runs", lambda *_: None)
    with pytest.raises(ConversionError, match=r"not written, .* points may be lost where max_loss=0.5 is allowed"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=images, timer=faster)
    assert not list(tmp_path.iterdir())


def test_a_slower_model_is_not_written(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.evaluation.fast.quantize.check_runs", lambda *_: None)  # a second process

    def slower(forwards, pixels):
        return {"float": 1.0, "int8": 1.25}

    with pytest.raises(ConversionError, match=r"not written, int8 is not faster here: 0.80 times the speed of float"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=images, max_loss=100, timer=slower)
    assert not list(tmp_path.iterdir())


def test_bad_requests_are_refused_before_anything_is_read(images, tmp_path, monkeypatch):
    given = {"calibrate": images, "evaluate": images}
    taken = tmp_path / "taken.onnx"
    taken.write_text("mine")
    for path, changes, error, text in [
        (taken, {}, ConversionError, "taken.onnx: exists already"),
        (tmp_path / "q.bin", {}, ConversionError, "ends in .onnx"),
        (tmp_path / "q.onnx", {"max_loss": -1}, ConfigError, "max_loss"),
        (tmp_path / "q.onnx", {"weight_bits": 4}, ConfigError, "weight_bits=4 is neither 7 nor 8"),
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


def test_too_few_images_measure_no_loss(images, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for number in range(5):
        (few / f"{number}.png").write_bytes((images / f"{number}.png").read_bytes())
    with pytest.raises(DataError, match="has 5 images, and at least 32 are needed"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=few)


def test_a_loss_is_the_probability_that_changed_answers_give_up():
    probabilities = torch.tensor([[0.6, 0.3, 0.1]] * 3 + [[0.2, 0.7, 0.1]])
    model = tiny_model()
    model.temperature = 1.0
    after = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0], [0, 1.0, 0]])
    sample = Sample(name="", pixels=np.zeros((4, 1, 1, 1), np.float32), labels=np.full(4, -1), space=None)
    found = loss_of(model, probabilities.log(), after, sample)
    assert (found.agreement, found.top1_after) == (75.0, None)
    assert found.expected == pytest.approx(100 * 0.3 / 4, rel=1e-5)
    assert found.points > found.expected


@pytest.mark.slow
def test_the_fastest_model_within_the_loss_is_written_and_predicts(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.MERGED", (1,))
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    assert found.chosen.seconds == min(each.seconds for each in found.candidates if each.loss.points <= 20)
    assert found.baseline.name == "torch, float32"
    assert {"report.html", "optimize.json"} <= {file.name for file in (tmp_path / "fast").iterdir()}
    assert "<svg" in (tmp_path / "fast" / "report.html").read_text()
    answers = vt.Classifier(tmp_path / "fast").predict(sorted(images.iterdir())[:3])
    assert answers[0][0].label in LABELS
    with pytest.raises(ConversionError, match="exists already"):
        vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images)


def half_as_fast(forwards, pixels):
    return {name: 2.0 if "int8" in name else 1.0 for name in forwards}


def test_int8_that_is_not_faster_costs_the_search_no_time(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.MERGED", ())
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=half_as_fast)
    assert {each.int8_layers for each in found.candidates} == {0}
    assert "it is left out" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_cascade_of_graphs_asks_the_whole_model_where_the_first_pass_is_unsure(engine, tmp_path):
    model = tiny_model(image_size=32)
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    search = Search(model, None, None, tmp_path, max_loss=1.0, timer=faster, batch=8)
    with torch.no_grad():
        whole, first = model(pixels), vt.with_merging(model, 4)(pixels)
    threshold = float((first / 1.5).softmax(dim=1).amax(dim=1).median())
    cascade = CascadeConfig(tome_r=4, threshold=threshold)
    chosen = Candidate(
        engine=engine, tome_r=4, int8_layers=0, loss=None, cascade=cascade, again=0.5, path=search.exported(4)
    )
    search.write(chosen, tmp_path / "fast")
    answers = vt.Classifier(tmp_path / "fast").logits(pixels)
    sure = (first / 1.5).softmax(dim=1).amax(dim=1, keepdim=True) > threshold
    assert 0 < sure.sum() < 8
    torch.testing.assert_close(answers, torch.where(sure, first, whole), rtol=0, atol=1e-4)
    assert chosen.name == f"{engine}, float32, a cascade: 4 tokens merged a layer, 50% seen again"


def test_a_cascade_costs_its_first_pass_and_the_whole_model_where_that_is_unsure(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.FEWEST", 8)
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.FIRST", (1,))
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.MERGED", (1,))
    monkeypatch.setattr("vitruvian.evaluation.fast.optimize.installed", lambda: ["torch"])
    monkeypatch.setattr(Search, "int8", lambda *_: iter(()))
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    (both,) = (each for each in found.candidates if each.cascade is not None)
    first = next(each for each in found.candidates if each.tome_r == 1 and each.cascade is None)
    assert both.seconds == pytest.approx(first.seconds + both.again * found.baseline.seconds)
    assert both.loss.images == 18
