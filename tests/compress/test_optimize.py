"""The fastest model within a loss is written and used by `vit predict`."""

import dataclasses
import json

import pytest
import torch
from compress_models import LABELS, faster, tiny_model

import vitruvian as vt
from vitruvian.compress import fewer_tokens
from vitruvian.compress.int8 import dense_layers
from vitruvian.compress.loss import AccuracyLoss
from vitruvian.compress.optimize import Candidate, CompressionSearch, Optimized, fastest_single, frontier
from vitruvian.config import CascadeConfig
from vitruvian.engines import choose, graph
from vitruvian.engines.export import export
from vitruvian.errors import CheckpointError, ConfigError, ConversionError
from vitruvian.weights.save import save


def half_as_fast(forwards, pixels):
    return {name: 2.0 if "int8" in name else 1.0 for name in forwards}


@pytest.mark.slow
def test_the_fastest_model_within_the_loss_is_written_and_predicts(images, tmp_path, monkeypatch):
    monkeypatch.setattr(fewer_tokens, "MERGED_SHARES", (0.25,))
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch", "onnxruntime"])
    result = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    assert result.chosen.seconds == min(each.seconds for each in result.candidates if each.loss.points <= 20)
    assert result.baseline.name == "torch, float32"
    assert {"report.html", "optimize.json"} <= {file.name for file in (tmp_path / "fast").iterdir()}
    assert "<svg" in (tmp_path / "fast" / "report.html").read_text()
    output = vt.Classifier(tmp_path / "fast").predict(sorted(images.iterdir())[:3])
    assert output[0][0].label in LABELS
    with pytest.raises(ConversionError, match="already exists"):
        vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images)


@pytest.mark.slow
def test_int8_that_is_not_faster_costs_the_search_no_time(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fewer_tokens, "MERGED_SHARES", ())
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch", "onnxruntime"])
    result = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=20, timer=half_as_fast)
    assert {each.int8_layers for each in result.candidates} == {0}
    assert "skipping int8" in capsys.readouterr().err


@pytest.mark.slow
def test_layers_with_equal_weights_stay_float_and_the_search_continues(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fewer_tokens, "MERGED_SHARES", ())
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch", "onnxruntime"])
    model = tiny_model()
    first, second = (dense_layers(model)[f"blocks.{number}.mlp.fc2"] for number in (0, 1))
    second.weight.data = first.weight.data.clone()
    result = vt.optimize(model, tmp_path / "fast", calibrate=images, max_loss=20, timer=faster)
    assert {each.int8_layers for each in result.candidates} == {0}
    equal = "blocks.0.mlp.fc2 and blocks.1.mlp.fc2 have equal weights"
    assert f"note: skipping int8: {equal}" in capsys.readouterr().err
    with pytest.raises(ConversionError, match=equal):
        vt.quantize(model, tmp_path / "q.onnx", calibrate=images, evaluate=images)


def candidate(points=0.0, **changes):
    loss = AccuracyLoss(images=10, agreement=100.0, expected=points, expected_error=0.0, labeled=0)
    return Candidate(**{"engine": "onnxruntime", "int8_layers": 0, "loss": loss, "path": "graph", **changes})


def test_the_page_draws_the_frontier_and_names_what_was_written():
    baseline = candidate(engine="torch", path="", seconds=1.0, single_seconds=1.0)
    chosen = candidate(points=0.4, int8_layers=8, seconds=0.5, single_seconds=0.5)
    others = [candidate(seconds=0.8, single_seconds=0.8), candidate(points=0.6, seconds=0.75, single_seconds=0.7)]
    request = {"path": "fast", "max_loss": 0.5, "batch_size": 16, "sample": "40 images"}
    candidates = (chosen, *others, baseline)
    page = Optimized(**request, candidates=candidates, chosen=chosen, single=chosen, baseline=baseline).page("a model")
    assert "a model: 2.00 times as fast" in page
    assert "Written: onnxruntime, int8 in 8 layers." in page
    assert "40 images; batch size 16, at most 0.5 points may be lost" in page
    assert "0.40" in page
    assert frontier([(0.0, 1.0), (0.0, 1.5), (0.4, 1.75), (0.6, 1.25)]) == [(0.0, 1.5), (0.4, 1.75)]


def test_single_images_have_the_fastest_graph_for_them():
    batches = candidate(int8_layers=8, seconds=1.0, single_seconds=0.3)
    exact = candidate(engine="openvino", seconds=2.0, single_seconds=0.2)
    others = [
        candidate(points=9.0, single_seconds=0.1),
        candidate(engine="torch", path="", single_seconds=0.1),
        candidate(cascade=CascadeConfig(threshold=0.5, tome_r=(1, 0)), single_seconds=0.1),
    ]
    assert fastest_single([batches, exact, *others], batches, 0.5) is exact
    weights = candidate(engine="torch", path="", single_seconds=0.3)
    assert fastest_single([weights, batches, exact], weights, 0.5) is exact
    assert fastest_single([others[1], batches, exact], others[1], 0.5) is others[1]
    cascade = dataclasses.replace(others[2], path="", single_seconds=0.3)
    assert fastest_single([cascade, batches, exact], cascade, 0.5) is cascade
    assert fastest_single([batches, *others], batches, 0.5) is batches


@pytest.mark.slow
def test_a_folder_may_hold_a_graph_for_single_images(tmp_path, capsys, monkeypatch):
    batches, single, pixels = tiny_model(), tiny_model(depth=1), torch.randn(3, 3, 16, 16)
    export(batches, tmp_path / "model.onnx")
    export(single, tmp_path / "single.onnx")
    (tmp_path / "cascade.json").write_text(json.dumps(CascadeConfig(threshold=0.0, image_size=8).to_json()))
    classifier = vt.Classifier(tmp_path)
    torch.testing.assert_close(classifier.logits(pixels[:1]), single(pixels[:1]).detach(), rtol=0, atol=1e-4)
    (tmp_path / "cascade.json").unlink()
    classifier = vt.Classifier(tmp_path)
    torch.testing.assert_close(classifier.logits(pixels), batches(pixels).detach(), rtol=0, atol=1e-4)
    monkeypatch.setattr(graph, "installed", lambda: ["torch"])
    torch.testing.assert_close(
        vt.Classifier(tmp_path).logits(pixels[:1]), batches(pixels[:1]).detach(), rtol=0, atol=1e-4
    )
    assert "note: single images are computed like batches, because onnxruntime is not" in capsys.readouterr().err
    monkeypatch.undo()
    export(tiny_model(num_classes=2, depth=1), tmp_path / "single.onnx")
    with pytest.raises(CheckpointError, match=r"single\.onnx: its input or output differs from that of the model"):
        vt.Classifier(tmp_path)


@pytest.mark.slow
def test_a_folder_of_weights_may_hold_a_graph_for_single_images(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "installed", lambda: ["torch", "onnxruntime"])
    monkeypatch.setattr(choose, "OPEN_FROM", 2)
    monkeypatch.setattr(choose, "fastest_mode", lambda model, pixels: choose.default_mode("torch", len(pixels)))
    batches, single, pixels = tiny_model(), tiny_model(depth=1), torch.randn(3, 3, 16, 16)
    save(batches, tmp_path / "fast")
    export(single, tmp_path / "fast" / "single.onnx")
    of_batches, of_single = batches(pixels).detach(), single(pixels[:1]).detach()

    def check(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)

    classifier = vt.Classifier(tmp_path / "fast", engine="auto")
    check(classifier.logits(pixels), of_batches)
    classifier.prepare(pixels[:1])  # as vit serve does; without it, the last image of many is run like them
    check(classifier.logits(pixels[:1]), of_single)
    check(classifier.features(pixels[:1]), batches.features(pixels[:1]).detach())
    alone = vt.Classifier(tmp_path / "fast", engine="auto")
    alone.expect(1)
    check(alone.logits(pixels[:1]), of_batches[:1])  # opening the graph would take longer than it saves
    check(alone.logits(pixels[:1]), of_single)
    check(vt.Classifier(tmp_path / "fast").logits(pixels[:1]), of_batches[:1])  # Python's default calls hooks
    check(vt.Classifier(tmp_path / "fast", engine="auto", tome_r=0).logits(pixels[:1]), of_batches[:1])
    export(tiny_model(num_classes=2, depth=1), tmp_path / "fast" / "single.onnx")
    with pytest.raises(CheckpointError, match=r"single\.onnx: its input or output differs from that of the model"):
        vt.Classifier(tmp_path / "fast", engine="auto").logits(pixels[:1])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.openvino)])
def test_a_cascade_of_graphs_runs_the_full_model_if_the_first_pass_is_uncertain(engine, tmp_path):
    model = tiny_model(image_size=32)
    pixels = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    search = CompressionSearch(model, None, None, tmp_path, max_loss=1.0, seconds=0.0, timer=faster)
    with torch.no_grad():
        full, first = model(pixels), vt.with_merging(model, (4, 0))(pixels)
    threshold = float((first / 1.5).softmax(dim=1).amax(dim=1).median())
    cascade = CascadeConfig(tome_r=(4, 0), threshold=threshold)
    chosen = Candidate(
        engine=engine, counts=(4, 0), int8_layers=0, loss=None, cascade=cascade, again=0.5, path=search.export((4, 0))
    )
    search.write(chosen, tmp_path / "fast")
    output = vt.Classifier(tmp_path / "fast").logits(pixels)
    certain = (first / 1.5).softmax(dim=1).amax(dim=1, keepdim=True) > threshold
    assert 0 < certain.sum() < 8
    torch.testing.assert_close(output, torch.where(certain, first, full), rtol=0, atol=1e-4)
    assert chosen.name == f"{engine}, float32, cascade (4 tokens merged in block 0; 50% computed again)"


@pytest.mark.slow
def test_a_cascade_costs_its_first_pass_and_the_full_model_for_uncertain_images(images, tmp_path, monkeypatch):
    monkeypatch.setattr("vitruvian.compress.optimize.MIN_IMAGES", 8)
    monkeypatch.setattr(fewer_tokens, "MERGED_SHARES", (0.5,))
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch"])
    monkeypatch.setattr(CompressionSearch, "try_int8", lambda *_, **__: None)
    result = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=0.01, timer=faster)
    (both,) = (each for each in result.candidates if each.cascade is not None)
    first = next(each for each in result.candidates if each.counts and each.cascade is None)
    assert both.seconds == pytest.approx(first.seconds + both.again * result.baseline.seconds)
    assert both.loss.images == 18


@pytest.mark.slow
def test_a_search_without_time_measures_the_engines_alone(images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch", "onnxruntime"])
    result = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, minutes=0, timer=faster)
    assert {each.name for each in result.candidates} == {"torch, float32", "onnxruntime, float32"}
    printed = capsys.readouterr().err
    assert "of 0" in printed
    assert "the time limit was reached before everything was tried" in printed
    with pytest.raises(ConfigError, match="minutes"):
        vt.optimize(tiny_model(), tmp_path / "other", calibrate=images, minutes=-1)


@pytest.mark.parametrize(
    ("seconds", "timed_out", "headline"),
    [
        (1.0, False, "nothing faster found"),
        (0.5, False, "2.00 times as fast"),
        (1.0, True, "nothing faster found, search stopped by the time limit"),
    ],
)
def test_the_headline_states_the_speedup_and_whether_time_ran_out(seconds, timed_out, headline):
    loss = AccuracyLoss(images=10, agreement=100.0, expected=0.0, expected_error=0.0, labeled=0)
    first, other = (
        Candidate(engine="torch", int8_layers=0, loss=loss, seconds=s, single_seconds=s) for s in (1.0, seconds)
    )
    common = {"path": "fast", "max_loss": 1.0, "batch_size": 1, "sample": "10 images"}
    result = Optimized(
        **common, candidates=(first, other), chosen=other, single=other, baseline=first, timed_out=timed_out
    )
    assert result.headline == headline
    assert result.to_json()["timed_out"] == timed_out
    assert headline in str(result)
    assert ("single images, torch, float32: not faster" in str(result)) == (seconds == 1.0)


@pytest.mark.slow
def test_one_graph_serves_float_and_int8(images, tmp_path, monkeypatch):
    """Exporting is what takes the time of a search."""
    exported = []

    def counted(model, path, **settings):
        exported.append(path.name)
        return export(model, path, **settings)

    monkeypatch.setattr(fewer_tokens, "MERGED_SHARES", (0.25,))
    monkeypatch.setattr("vitruvian.compress.optimize.export", counted)
    monkeypatch.setattr("vitruvian.compress.optimize.installed", lambda: ["torch", "onnxruntime"])
    result = vt.optimize(tiny_model(), tmp_path / "fast", calibrate=images, max_loss=50, timer=faster)
    merged = [each for each in result.candidates if each.counts and each.cascade is None]
    assert {each.int8_layers > 0 for each in merged} == {True, False}
    assert exported == ["float.onnx", "float1_0.onnx"]
