"""int8 keeps the answers or is not written; the fastest model within a loss is one that `vit predict` takes."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.compress import int8, merging, ranges
from vitruvian.compress.compress_report import frontier, optimize_page, write_quantized
from vitruvian.compress.gptq import gptq, nearest
from vitruvian.compress.int8_graph import write_int8
from vitruvian.compress.loss import Sample, loss_of, read_sample
from vitruvian.compress.optimize import write
from vitruvian.compress.quantize import CALIBRATION, least
from vitruvian.compress.search import Candidate, Limits, Search
from vitruvian.compress.smooth import channel_maxima, dense_layers, smoothed, watched
from vitruvian.config import CascadeConfig, ResNetConfig
from vitruvian.engines import runtimes
from vitruvian.engines.export import export
from vitruvian.engines.graph import open_graph
from vitruvian.errors import ConfigError, ConversionError, DataError, FileError, MissingExtraError, UnknownNameError

pytestmark = pytest.mark.openvino

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=2, width=16, mlp_dim=32, num_heads=2, num_classes=3)
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
    model.meta = model.meta.replace(labels=LABELS)
    model.meta = model.meta.replace(preprocess=vt.Preprocess(image_size=16, mean=(0.4, 0.5, 0.6)))
    model.meta = model.meta.replace(temperature=1.5)
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
    {"mlp_norm": True, "attn_norm": True},
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
    name = "blocks.0.attn.qkv"
    assert after[name].max() / after[name].median() < maxima[name].max() / maxima[name].median() / 2


def test_a_range_leaves_out_what_is_far_from_all_other_values():
    values = torch.cat([torch.linspace(-1, 1, 1_000_000), torch.tensor([3.0])])
    assert ranges.best_range(values)[1] == pytest.approx(1, abs=0.01)
    assert ranges.best_range(torch.zeros(9)) == (0.0, 1.0)


def test_weights_of_seven_bits_never_saturate_sixteen():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for codes, _ in (nearest(weight, 7), gptq(weight, torch.eye(32), 7)):
        assert codes.int().abs().max() * 255 * 2 < 2**15


def test_gptq_rounds_each_weight_by_itself_where_inputs_have_nothing_in_common():
    weight = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    moments = torch.diag(torch.rand(300, generator=torch.Generator().manual_seed(1)) + 0.1)
    for ours, wanted in zip(gptq(weight, moments, 7), nearest(weight, 7)):
        assert torch.equal(ours, wanted)


def test_gptq_changes_what_a_layer_gives_less_than_rounding_each_weight_by_itself():
    """Inputs of 300 channels, more than are rounded together, made of 40."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 300, generator=generator)
    mixed = torch.randn(40, 300, generator=generator)
    inputs = torch.randn(2000, 40, generator=generator) @ mixed + 0.1 * torch.randn(2000, 300, generator=generator)
    errors = []
    for codes, scale in (gptq(weight, inputs.T @ inputs, 7), nearest(weight, 7)):
        errors.append(float((inputs @ (codes * scale - weight).T).square().mean()))
    assert errors[0] < errors[1] / 4


def test_gptq_takes_channels_that_are_always_zero():
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    codes, scale = gptq(weight, torch.zeros(8, 8), 7)
    assert torch.equal(codes, nearest(weight, 7)[0])
    assert scale.isfinite().all()


def test_gptq_takes_moments_that_rounding_has_spoiled():
    """Sums in float32 of thousands of channels may leave an eigenvalue below zero."""
    generator = torch.Generator().manual_seed(0)
    weight, direction = torch.randn(4, 8, generator=generator), torch.randn(8, 1, generator=generator)
    moments = torch.eye(8) - 0.5 * direction @ direction.T
    assert torch.linalg.eigvalsh(moments).min() < -1
    codes, scale = gptq(weight, moments, 7)
    assert codes.int().abs().max() <= 63
    assert scale.isfinite().all()
    with pytest.raises(ConversionError, match="not finite"):
        gptq(weight, moments * torch.nan, 7)


def test_layers_in_int8_have_the_inputs_of_the_whole_model(monkeypatch):
    """A block after the other gives each layer what the model gives it."""
    model, pixels = tiny_model(), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    seen: dict[bytes, torch.Tensor] = {}
    monkeypatch.setattr(
        "vitruvian.compress.int8.gptq",
        lambda weight, moments, bits: seen.update({weight.numpy().tobytes(): moments}) or nearest(weight, bits),
    )
    entering = ranges.inputs_of(model, [pixels], 7)
    int8.int8_layers(model, entering, [pixels[:4], pixels[4:]], bits=7)
    wanted: dict[str, torch.Tensor] = {}
    with watched(dense_layers(model), lambda name, x: wanted.update({name: x.flatten(0, -2)})), torch.no_grad():
        model.forward_features(pixels)
    assert len(seen) == len(wanted) == 8
    for name, layer in dense_layers(model).items():
        each = entering[name]
        x = each.in_int8(each.rounded(wanted[name]), 0.0)
        given = seen[each.in_int8(layer.weight.detach(), 0.0).numpy().tobytes()]
        torch.testing.assert_close(given, x.T @ x, rtol=1e-3, atol=1e-3 * float(x.square().sum()))


def model_with_an_outlier():
    """One channel behind GELU has values a hundred times those of the others, and small weights."""
    model = tiny_model()
    with torch.no_grad():
        mlp = model.blocks[0].mlp
        mlp.fc1.weight[3] *= 100
        mlp.fc1.bias[3] *= 100
        mlp.fc2.weight[:, 3] /= 100
    return model, torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_a_channel_that_exceeds_the_others_stays_float():
    model, pixels = model_with_an_outlier()
    _, inputs = int8.prepared(model, [pixels])
    assert inputs["blocks.0.mlp.fc2"].float_channels == (3,)
    assert inputs["blocks.1.mlp.fc2"].float_channels == ()
    x = torch.arange(32.0).repeat(2, 1)
    assert inputs["blocks.0.mlp.fc2"].rounded(x)[0, 3] == 3
    assert inputs["blocks.0.mlp.fc2"].in_int8(x, 0.0)[1].tolist() == [*range(3), 0, *range(4, 32)]


def test_a_graph_with_a_channel_in_float_computes_what_the_simulation_says(tmp_path):
    model, pixels = model_with_an_outlier()
    ready, inputs = int8.prepared(model, [pixels])
    layers = int8.int8_layers(ready, inputs, [pixels], bits=7)
    export(ready, tmp_path / "float.onnx")
    write_int8(tmp_path / "float.onnx", tmp_path / "int8.onnx", ready, layers)
    simulated = int8.simulated(ready, layers)(pixels)
    with torch.no_grad():
        wanted = ready(pixels)
    off = (open_graph(tmp_path / "int8.onnx")(pixels) - simulated).abs().mean()
    assert off < 0.3 * (simulated - wanted).abs().mean()


def test_sensitivity_from_the_middle_is_that_of_the_whole_model():
    model, pixels = tiny_model(), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ready, inputs = int8.prepared(model, [pixels])
    layers = int8.int8_layers(ready, inputs, [pixels], bits=7)
    found = int8.sensitivity(ready, layers, pixels)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    name = "blocks.1.mlp.fc1"
    with torch.no_grad():
        wanted = ready(pixels).log_softmax(dim=1)
    given = int8.simulated(ready, {name: layers[name]})(pixels).log_softmax(dim=1)
    whole = (wanted.exp() * (wanted - given)).sum(dim=1).mean()
    assert found[name] == pytest.approx(float(whole), rel=1e-3, abs=1e-7)


def test_layers_that_read_the_same_with_other_ranges_are_rounded_apart(tmp_path):
    """Attention and MLP of a parallel block read one norm; each may have another channel in float."""
    model, pixels = tiny_model(block="parallel"), torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ready, inputs = int8.prepared(model, [pixels])
    name = "blocks.0.attn.qkv"
    inputs[name] = ranges.Int8Input(ends=tuple(end / 4 for end in inputs["blocks.0.mlp.fc1"].ends), float_channels=(2,))
    layers = int8.int8_layers(ready, inputs, [pixels], bits=7)
    export(ready, tmp_path / "float.onnx")
    chosen = {name: layers[name], "blocks.0.mlp.fc1": layers["blocks.0.mlp.fc1"]}
    write_int8(tmp_path / "float.onnx", tmp_path / "int8.onnx", ready, chosen)
    simulated = int8.simulated(ready, chosen)(pixels)
    torch.testing.assert_close(open_graph(tmp_path / "int8.onnx")(pixels), simulated, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def quantized(images, tmp_path_factory):
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    model = tiny_model()
    model.meta = model.meta.replace(
        cascade=CascadeConfig(threshold=0.0, image_size=8)
    )  # the whole model is what becomes int8
    report = vt.quantize(model, path, calibrate=images, evaluate=images, max_loss=10, timer=faster)
    model.meta = model.meta.replace(cascade=None)
    return model, path, report


def test_a_quantized_model_answers_like_its_model_and_carries_what_it_needs(quantized, images):
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


def test_the_graph_computes_what_the_simulation_says(quantized, images):
    """So the sensitivity is that of the layers as they run; a value near half a step may be rounded either way."""
    model, path, report = quantized
    classifier = vt.Classifier(model)
    sample = read_sample(classifier, images, images=CALIBRATION, training=True)
    ready, inputs = int8.prepared(model, sample.batches())
    layers = int8.int8_layers(ready, inputs, sample.batches(), bits=7)
    chosen = {name: layer for name, layer in layers.items() if name not in report.float_layers}
    pixels = sample.tensor(slice(None))
    simulated = int8.simulated(ready, chosen)(pixels)
    with torch.no_grad():
        wanted = model(pixels)
    off = (open_graph(path)(pixels) - simulated).abs().mean()
    assert off < 0.3 * (simulated - wanted).abs().mean()


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
        runtimes.open_session(path, "onnxruntime", batch_size=1)
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
    monkeypatch.setattr(ranges, "best_range", lambda values: (0.0, 1e-3))  # everything is clipped
    monkeypatch.setattr("vitruvian.compress.quantize.check_runs", lambda *_: None)
    with pytest.raises(ConversionError, match=r"not written, .* points may be lost where max_loss=0.5 is allowed"):
        vt.quantize(tiny_model(), tmp_path / "q.onnx", calibrate=images, evaluate=images, timer=faster)
    assert not list(tmp_path.iterdir())


def test_a_slower_model_is_not_written(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.compress.quantize.check_runs", lambda *_: None)  # a second process

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
    model.meta = model.meta.replace(temperature=1.0)
    after = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1.0, 0, 0], [0, 1.0, 0]])
    sample = Sample(name="", pixels=np.zeros((4, 1, 1, 1), np.float32), labels=np.full(4, -1), space=None)
    found = loss_of(model, probabilities.log(), after, sample)
    assert (found.agreement, found.top1_after) == (75.0, None)
    assert found.expected == pytest.approx(100 * 0.3 / 4, rel=1e-5)
    assert found.points > found.expected


@pytest.mark.slow
def test_the_fastest_model_within_the_loss_is_written_and_predicts(images, tmp_path, monkeypatch):
    monkeypatch.setattr(merging, "SHARES", (0.25,))
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    assert found.chosen.seconds == min(each.seconds for each in found.candidates if each.loss.points <= 20)
    assert found.baseline.name == "torch, float32"
    assert {"report.html", "optimize.json"} <= {file.name for file in (tmp_path / "fast").iterdir()}
    assert "<svg" in (tmp_path / "fast" / "report.html").read_text()
    answers = vt.Classifier(tmp_path / "fast").predict(sorted(images.iterdir())[:3])
    assert answers[0][0].label in LABELS
    with pytest.raises(ConversionError, match="exists already"):
        vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images)


def test_the_page_draws_the_frontier_and_names_what_was_written():
    def tried(name, points, speedup):
        return {"name": name, "engine": name, "loss": {"points": points}, "speedup": speedup}

    found = [tried("torch", 0.0, 1.0), tried("openvino", 0.0, 1.5), tried("int8", 0.4, 1.75), tried("worse", 0.6, 1.25)]
    numbers = {
        "candidates": found,
        "max_loss": 0.5,
        "images": "40 images",
        "batch_size": 16,
        "chosen": "int8",
        "speedup": 1.75,
    }
    page = optimize_page("a model", numbers, [], "a note")
    assert "Written: int8." in page
    assert "0.40" in page
    assert frontier([(0.0, 1.0), (0.0, 1.5), (0.4, 1.75), (0.6, 1.25)]) == [(0.0, 1.5), (0.4, 1.75)]


def half_as_fast(forwards, pixels):
    return {name: 2.0 if "int8" in name else 1.0 for name in forwards}


def test_int8_that_is_not_faster_costs_the_search_no_time(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(merging, "SHARES", ())
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=half_as_fast)
    assert {each.int8_layers for each in found.candidates} == {0}
    assert "it is left out" in capsys.readouterr().err


def test_a_model_that_merges_tokens_has_the_sensitivities_of_its_layers():
    model = tiny_model(tome_r=1)
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    ready, inputs = int8.prepared(model, [pixels])
    found = int8.sensitivity(ready, int8.quick_layers(ready, inputs), pixels)
    assert set(found) == set(dense_layers(model))
    assert all(value >= 0 for value in found.values())


def test_a_resnet_is_refused_before_images_are_read(tmp_path):
    resnet = vt.build(ResNetConfig(image_size=(32, 32), stages=(1, 1, 1, 1), width=32, num_classes=3))
    torch.nn.init.normal_(resnet.head.weight, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match="int8 is for Vision Transformers"):
        vt.quantize(resnet, tmp_path / "q.onnx", calibrate=tmp_path / "nowhere", evaluate=tmp_path / "nowhere")


def test_layers_with_equal_weights_stay_float_and_the_search_goes_on(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(merging, "SHARES", ())
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch", "onnxruntime"])
    model = tiny_model()
    first, second = (dense_layers(model)[f"blocks.{number}.mlp.fc2"] for number in (0, 1))
    second.weight.data = first.weight.data.clone()
    found = vt.optimize(model, tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    assert {each.int8_layers for each in found.candidates} == {0}
    equal = "blocks.0.mlp.fc2 and blocks.1.mlp.fc2 have equal weights"
    assert f"note: int8 is left out: {equal}" in capsys.readouterr().err
    with pytest.raises(ConversionError, match=equal):
        vt.quantize(model, tmp_path / "q.onnx", calibrate=images, evaluate=images)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_cascade_of_graphs_asks_the_whole_model_where_the_first_pass_is_unsure(engine, tmp_path):
    model = tiny_model(image_size=32)
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    limits = Limits(max_loss=1.0, seconds=0.0)
    search = Search(model, None, None, tmp_path, limits=limits, timer=faster, batch_size=8)
    with torch.no_grad():
        whole, first = model(pixels), vt.with_merging(model, (4, 0))(pixels)
    threshold = float((first / 1.5).softmax(dim=1).amax(dim=1).median())
    cascade = CascadeConfig(tome_r=(4, 0), threshold=threshold)
    chosen = Candidate(
        engine=engine, counts=(4, 0), int8_layers=0, loss=None, cascade=cascade, again=0.5, path=search.exported((4, 0))
    )
    write(search, chosen, tmp_path / "fast")
    answers = vt.Classifier(tmp_path / "fast").logits(pixels)
    sure = (first / 1.5).softmax(dim=1).amax(dim=1, keepdim=True) > threshold
    assert 0 < sure.sum() < 8
    torch.testing.assert_close(answers, torch.where(sure, first, whole), rtol=0, atol=1e-4)
    assert chosen.name == f"{engine}, float32, a cascade: 4 tokens merged in block 0, 50% seen again"


def test_a_cascade_costs_its_first_pass_and_the_whole_model_where_that_is_unsure(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.compress.search.FEWEST", 8)
    monkeypatch.setattr(merging, "SHARES", (0.5,))
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch"])
    monkeypatch.setattr(Search, "try_int8", lambda *_, **__: None)
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=0.01, timer=faster)
    (both,) = (each for each in found.candidates if each.cascade is not None)
    first = next(each for each in found.candidates if each.counts and each.cascade is None)
    assert both.seconds == pytest.approx(first.seconds + both.again * found.baseline.seconds)
    assert both.loss.images == 18


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_halving_finds_the_least_that_is_good(count):
    for border in range(count + 1):
        asked = []

        def good(number, border=border, asked=asked):
            asked.append(number)
            return number >= border

        assert least(count, good) == border
        assert len(asked) <= count.bit_length()


def test_tokens_merge_where_the_answers_change_the_least():
    model = tiny_model(depth=6, image_size=64)
    pixels = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    places = merging.candidates_of(6)
    assert places == [(1, 2, 3), (2, 3, 4)]
    found = merging.ladder(model, pixels)
    wanted = merging.answers(model, pixels)
    costs = {
        place: merging.cost_of(model, merging.counts_at(place, 6, 64, merging.TRIED_SHARE), pixels, wanted)
        for place in places
    }
    best = min(costs, key=costs.__getitem__)
    assert len(set(costs.values())) == 2
    assert all(tuple(layer for layer, r in enumerate(counts) if r) == best for counts in found)
    amounts = [max(counts) for counts in found]
    assert amounts == sorted(set(amounts))
    assert amounts[-1] == round(0.2 * 64)


def test_models_whose_patches_all_have_to_stay_merge_nothing():
    pixels = torch.zeros(2, 3, 16, 16)
    assert merging.ladder(tiny_model(pos_embed="relative"), pixels) == []
    assert merging.ladder(vt.with_merging(tiny_model(), 1), pixels) == []
    assert merging.ladder(tiny_model(depth=1), pixels) == []


def test_a_search_without_time_measures_the_engines_alone(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, minutes=0, timer=faster)
    assert {each.name for each in found.candidates} == {"torch, float32", "onnxruntime, float32"}
    said = capsys.readouterr().err
    assert "of at most 0" in said
    assert "the time was over before all was tried" in said
    with pytest.raises(ConfigError, match="minutes"):
        vt.optimize(tiny_model(), tmp_path / "other", calibrate=images, minutes=-1)


def test_one_graph_serves_float_and_int8(images, tmp_path, monkeypatch):
    """Exporting is what takes the time of a search."""
    exported = []

    def counted(model, path, **settings):
        exported.append(path.name)
        return export(model, path, **settings)

    monkeypatch.setattr(merging, "SHARES", (0.25,))
    monkeypatch.setattr("vitruvian.compress.search.export", counted)
    monkeypatch.setattr("vitruvian.compress.search.installed", lambda: ["torch", "onnxruntime"])
    found = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=50, timer=faster)
    merged = [each for each in found.candidates if each.counts and each.cascade is None]
    assert {each.int8_layers > 0 for each in merged} == {True, False}
    assert exported == ["float.onnx", "float1_0.onnx"]


@pytest.mark.parametrize("command", [vt.quantize, vt.optimize, vt.export])
def test_a_destination_that_cannot_be_written_is_said_before_the_model_is_read(command, images, tmp_path):
    (tmp_path / "file").touch()
    folders = {"calibrate": images, "evaluate": images} if command is vt.quantize else {"calibrate": images}
    with pytest.raises(FileError, match="cannot be written: Not a directory"):
        command("no model", tmp_path / "file" / "x.onnx", **({} if command is vt.export else folders))
