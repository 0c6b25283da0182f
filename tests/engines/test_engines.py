"""Engines answer like torch; the fastest is measured once and remembered; what is missing is said."""

import importlib.metadata
import importlib.util
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import vitruvian as vt
from vitruvian.engines import cached, choose, runtimes, sessions
from vitruvian.engines.bench import bench, computed
from vitruvian.errors import ConfigError, ConversionError, ImageError, MissingExtraError

pytestmark = pytest.mark.openvino

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRUVIAN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model():
    model = vt.build(TINY).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def images():
    return [np.full((20, 30, 3), level, np.uint8) for level in (0, 50, 200)]


def without(monkeypatch, *names):
    """As if these packages were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else real(name))


def test_openvino_answers_like_torch_and_exports_once(model, images, cache, capsys):
    wanted = vt.Classifier(model).predict(images)
    found = vt.Classifier(model, engine="openvino").predict(images)
    for one, other in zip(found, wanted):
        assert [a.label for a in one] == [a.label for a in other]
        assert [a.probability for a in one] == pytest.approx([a.probability for a in other], abs=1e-5)
    assert "exporting the model for openvino" in capsys.readouterr().err
    vt.Classifier(model, engine="openvino").predict(images, batch_size=2)
    assert capsys.readouterr().err == ""
    assert len(list((cache / "engines").glob("*/model.onnx"))) == 1


def test_other_weights_are_other_graphs(model, images, cache):
    other = vt.build(TINY)
    other.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    answers = vt.Classifier(other, engine="openvino").predict(images)
    assert answers[0][0].probability == pytest.approx(vt.Classifier(other).predict(images)[0][0].probability, abs=1e-5)
    assert len(list((cache / "engines").glob("*/model.onnx"))) == 2


def test_auto_measures_once_and_remembers(model, cache, monkeypatch, capsys):
    without(monkeypatch, "onnxruntime")
    pixels = torch.randn(2, 3, 16, 16)
    chosen = choose.fastest(model, pixels)
    assert chosen.engine in ("torch", "openvino")
    assert f"{chosen.engine} is used; images per second: torch" in capsys.readouterr().err
    monkeypatch.setattr(choose, "measure", None)
    assert choose.fastest(model, pixels) == chosen
    torch.testing.assert_close(vt.Classifier(model, engine="auto").logits(pixels), model(pixels).detach())
    (remembered,) = (cache / "engines").glob("*.json")
    assert json.loads(remembered.read_text()) == chosen._asdict()


def test_auto_answers_where_nothing_can_be_remembered(model, tmp_path, monkeypatch, capsys):
    pixels = torch.randn(2, 3, 16, 16)
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "file" / "cache"))
    answers = [vt.Classifier(model, engine=engine).logits(pixels) for engine in ("auto", "torch")]
    torch.testing.assert_close(*answers)
    assert "note: the next start measures again" in capsys.readouterr().err


def test_openvino_alone_has_its_own_format(model, images, cache, monkeypatch):
    without(monkeypatch, "onnxruntime")
    answers = vt.Classifier(model, engine="openvino").predict(images)
    assert answers[0][0].probability == pytest.approx(vt.Classifier(model).predict(images)[0][0].probability, abs=1e-5)
    assert len(list((cache / "engines").glob("*/openvino/model.xml"))) == 1


def test_an_engine_that_answers_otherwise_is_refused_and_auto_leaves_it_out(cache, monkeypatch, capsys):
    other = vt.build(TINY).eval()
    real = choose.open_session
    monkeypatch.setattr(choose, "open_session", lambda *given, **named: lambda x: real(*given, **named)(x) + 1)
    pixels = torch.randn(1, 3, 16, 16)
    torch.nn.init.normal_(other.head.weight, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ConversionError, match="onnxruntime answers 1 away from the model"):
        vt.Classifier(other, engine="onnxruntime").logits(pixels)
    assert choose.fastest(other, pixels).engine == "torch"
    assert "note: onnxruntime is left out: onnxruntime answers 1 away" in capsys.readouterr().err


def test_the_fastest_is_taken(model, monkeypatch):
    slow, fast = choose.Way("torch"), choose.Way("openvino", split=True)
    monkeypatch.setattr(choose, "candidates", lambda *_: ({slow: None, fast: None}, True))
    monkeypatch.setattr(choose, "measure", lambda *_: {slow: [3.0, 3.0, 9.0], fast: [2.0, 99.0, 2.0]})
    assert choose.fastest(model, torch.zeros(7, 3, 16, 16)) == fast


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_graph_for_single_images_or_for_pieces_answers_like_the_model(model, engine):
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    for way in (choose.Way(engine, single=True), choose.Way(engine, split=True, single=True)):
        forward = choose.forward_of(model, way, (16, 16))
        for batch in (pixels[:1], pixels[:5], pixels):
            torch.testing.assert_close(forward(batch), model(batch).detach(), rtol=0, atol=1e-5)


def test_batches_and_single_images_have_a_way_each_once_prepared(model, monkeypatch):
    asked = []
    monkeypatch.setattr(choose, "fastest", lambda _, pixels: asked.append(len(pixels)) or choose.Way("torch"))
    engine = choose.Engine(model, "auto")
    for batch in (4, 3, 1):  # a short last batch is not measured
        assert len(engine(torch.zeros(batch, 3, 16, 16))) == batch
    assert asked == [4]
    engine.prepare(torch.zeros(1, 3, 16, 16))
    engine(torch.zeros(1, 3, 16, 16))
    assert asked == [4, 1]
    other = choose.Engine(model, "auto")
    other(torch.zeros(1, 3, 16, 16))
    other(torch.zeros(5, 3, 16, 16))
    assert asked == [4, 1, 1, 5]


def test_only_the_graphs_that_were_used_last_stay(tmp_path):
    for number in range(cached.KEPT_GRAPHS + 2):
        (tmp_path / str(number)).mkdir()
    cached.forget_old(tmp_path)
    assert len(list(tmp_path.iterdir())) == cached.KEPT_GRAPHS


def test_a_missing_package_is_said_with_its_extra(model, monkeypatch):
    monkeypatch.setitem(sessions.EXTRAS, "openvino", ("openvino_that_is_not_here",))
    with pytest.raises(MissingExtraError, match=r"pip install 'vitruvian\[openvino\]'"):
        vt.Classifier(model, engine="openvino")


def test_a_package_that_was_published_under_another_name_has_a_version(monkeypatch):
    """`onnxruntime-gpu` is imported as onnxruntime, and no package of that name is known."""
    import onnxruntime

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sessions, "version", unknown)
    assert sessions.versions(["onnxruntime"]) == [f"onnxruntime {onnxruntime.__version__}"]


def test_wrong_engines_and_devices_are_said(model):
    with pytest.raises(ConfigError, match=r"unknown engine 'openvin'; did you mean openvino\?"):
        vt.Classifier(model, engine="openvin")
    with pytest.raises(ConfigError, match=r"engine='auto' runs on the CPU; device='cuda' needs engine='torch'"):
        vt.Classifier(model, engine="auto", device="cuda")
    with pytest.raises(ConfigError, match=r"engine='openvino' runs on the CPU; device='gpu9' needs engine='torch'"):
        vt.Classifier(model, engine="openvino", device="gpu9")


def test_the_bench_names_every_part(model):
    found = bench(model, engines=["torch"], batches=(1, 2), rounds=3)
    assert [(s.engine, s.batch_size) for s in found.speeds] == [("torch", 1), ("torch", 2)]
    assert all(s.p50_ms <= s.p90_ms <= s.p99_ms for s in found.speeds)
    assert all(s.of_limit > 0 for s in found.speeds)
    assert list(found.shares) == ["decode", "resize", "embed", "attention", "MLP", "norms, sums, head"]


def test_a_merging_models_attention_is_not_shown_as_taking_no_time(model):
    """Its parts are called one by one, which hooks do not see."""
    shares = bench(vt.with_merging(model, 1), engines=["torch"], batches=[1], rounds=1).shares
    assert all(shares.values())
    assert set(shares) == {"decode", "resize", "embed", "MLP", "attention, merging, norms, head"}


def test_an_engine_that_cannot_run_a_model_is_left_out_of_its_bench_unless_it_is_named(model, capsys):
    adaptive = vt.with_merging(model, thresholds=(0.5,))
    found = bench(adaptive, batches=[1], rounds=1)
    assert [speed.engine for speed in found.speeds] == ["torch"]
    assert "onnxruntime is left out: tome_thresholds" in capsys.readouterr().err
    with pytest.raises(ConversionError, match="tome_thresholds"):
        bench(adaptive, engines=["onnxruntime"], batches=[1], rounds=1)


def test_an_image_that_cannot_be_decoded_is_named_before_anything_is_measured(model, tmp_path, monkeypatch):
    (tmp_path / "x.jpg").write_bytes(b"nothing")
    monkeypatch.setattr("vitruvian.engines.bench.matmul_gflops", lambda: pytest.fail("measured"))
    with pytest.raises(ImageError, match=r"x\.jpg: not an image"):
        bench(model, engines=["torch"], image=tmp_path / "x.jpg")
    with pytest.raises(ImageError, match=r"missing\.jpg"):
        bench(model, engines=["torch"], image=tmp_path / "missing.jpg")


def test_the_tokens_that_the_last_block_leaves_out_are_not_counted(model):
    whole = vt.build(TINY.replace(pool="mean"))
    D, N, M = 16, 5, 16
    assert computed(whole, (16, 16)) - computed(model, (16, 16)) == (N - 1) * (D * D + 2 * D * M + 2 * N * D)


def test_openvinos_first_inference_runs_alone():
    """Two at once may wait for each other forever; later ones run side by side."""
    inside, most, together = [], [], threading.Barrier(4)

    def work(number):
        inside.append(number)
        most.append(len(inside))
        time.sleep(0.02)
        inside.remove(number)
        return number

    def called(number):
        together.wait()
        return alone(lambda: work(number))

    alone = runtimes.AloneAtFirst()
    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(called, range(4))) == [0, 1, 2, 3]
        assert max(most) == 1
        assert alone(lambda: list(threads.map(lambda n: alone(lambda: n), range(4)))) == [0, 1, 2, 3]


def test_every_openvino_inference_lets_the_first_one_end(model, tmp_path, monkeypatch):
    seen = []

    def noted(work):
        seen.append(threading.get_ident())
        return work()

    monkeypatch.setattr(runtimes, "_openvino_at_first", noted)
    vt.export(model, tmp_path / "m.onnx")
    sessions.open_session(tmp_path / "m.onnx", "openvino")(torch.zeros(1, 3, 16, 16))
    assert seen == [threading.get_ident()]
