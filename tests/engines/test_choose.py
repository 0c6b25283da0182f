"""Engines compute the model's logits; the fastest is measured once and cached."""

import importlib.util
import json

import numpy as np
import pytest
import torch

import vitruvian as vt
from vitruvian.engines import choose, runtimes
from vitruvian.engines.choose import RunMode, measure
from vitruvian.errors import ConfigError, ConversionError, MissingExtraError

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
RUNTIMES = ["onnxruntime", pytest.param("openvino", marks=pytest.mark.openvino)]


def random_model(seed=0):
    model = vt.build(TINY).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRUVIAN_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def images():
    return [np.full((20, 30, 3), level, np.uint8) for level in (0, 50, 200)]


def without(monkeypatch, *names):
    """Pretend that these packages are not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else real(name))


@pytest.fixture
def no_openvino(monkeypatch):
    """Hide OpenVINO, which must not be loaded in the process of most tests."""
    monkeypatch.setattr(choose, "installed", lambda: ["torch", "onnxruntime"])


@pytest.mark.openvino
def test_openvino_computes_the_logits_of_torch_and_exports_once(model, images, cache, capsys):
    expected = vt.Classifier(model).predict(images)
    result = vt.Classifier(model, engine="openvino").predict(images)
    for one, other in zip(result, expected):
        assert [p.label for p in one] == [p.label for p in other]
        assert [p.probability for p in one] == pytest.approx([p.probability for p in other], abs=1e-5)
    assert "exporting the model for openvino" in capsys.readouterr().err
    vt.Classifier(model, engine="openvino").predict(images, batch_size=2)
    assert capsys.readouterr().err == ""
    assert len(list((cache / "engines").glob("*/model.onnx"))) == 1


@pytest.mark.openvino
def test_other_weights_have_another_graph(model, images, cache):
    other = vt.build(TINY)
    other.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
    ours, expected = (vt.Classifier(other, engine=engine).predict(images) for engine in ("openvino", "torch"))
    assert ours[0][0].probability == pytest.approx(expected[0][0].probability, abs=1e-5)
    assert len(list((cache / "engines").glob("*/model.onnx"))) == 2


@pytest.mark.openvino
def test_auto_measures_once(model, cache, monkeypatch, capsys):
    without(monkeypatch, "onnxruntime")
    pixels = torch.randn(2, 3, 16, 16)
    engine = choose.Engine(model, "auto")
    chosen = engine.prepare(pixels)
    assert chosen.engine in ("torch", "openvino")
    assert f"using {chosen.engine}; images per second: torch" in capsys.readouterr().err
    monkeypatch.setattr(choose, "measure", None)
    assert choose.Engine(model, "auto").prepare(torch.randn(5, 3, 16, 16)) == chosen
    torch.testing.assert_close(engine(pixels), model(pixels).detach())
    (file,) = (cache / "engines").glob("*.json")
    assert json.loads(file.read_text()) == chosen._asdict()


@pytest.mark.slow
def test_auto_works_without_a_cache(model, tmp_path, monkeypatch, capsys, no_openvino):
    pixels = torch.randn(2, 3, 16, 16)
    (tmp_path / "file").touch()
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "file" / "cache"))
    engine = choose.Engine(model, "auto")
    engine.prepare(pixels)
    torch.testing.assert_close(engine(pixels), model(pixels).detach())
    assert "note: the next start measures again" in capsys.readouterr().err


FAST = RunMode("onnxruntime", split=True, fixed=True)


@pytest.fixture
def candidates(model, monkeypatch, no_openvino, tmp_path):
    """Opens torch and an engine of its own without a process; returns the engines that computed a batch."""
    used = []

    def run(mode, pixels, output=""):
        used.append(mode.engine)
        return choose.torch_forward(model, mode.split, pixels, output)

    def open_forward(_, mode, size):
        return lambda *given: run(mode, *given)

    seconds = {"torch": 2.0, "onnxruntime": 1.0}
    add = choose.EngineTrial.add
    monkeypatch.setattr(choose.EngineTrial, "add", lambda self, mode, _: add(self, mode, seconds[mode.engine]))
    monkeypatch.setattr(choose, "open_forward", open_forward)
    monkeypatch.setattr(choose, "export_apart", lambda *_: ["torch", "onnxruntime"])
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    monkeypatch.setattr(choose.Engine, "choices", [])
    monkeypatch.setattr(choose, "OPEN_FROM", 8)
    monkeypatch.setattr(choose, "CHOOSE_FROM", 16)
    return used


def test_few_images_never_wait_for_another_engine(model, candidates, monkeypatch, capsys):
    choose.remember(model, torch.zeros(1, 3, 16, 16), FAST)
    monkeypatch.setattr(choose, "remembered_mode", None)
    classifier = vt.Classifier(model, engine="auto")
    classifier.predict([np.zeros((9, 9, 3), np.uint8)])
    classifier.predict([np.zeros((9, 9, 3), np.uint8)] * 6, batch_size=3)
    assert set(candidates) == {"torch"}
    assert capsys.readouterr().err == ""


def test_a_remembered_engine_computes_a_long_job_from_the_first_image(model, candidates, capsys):
    choose.remember(model, torch.zeros(4, 3, 16, 16), FAST)
    vt.Classifier(model, engine="auto").predict([np.zeros((9, 9, 3), np.uint8)] * 9, batch_size=3)
    assert candidates == ["onnxruntime"] * 3
    assert capsys.readouterr().err == "engine: onnxruntime\n"


def test_a_stream_of_unknown_length_opens_a_remembered_engine_when_it_is_long_enough(model, candidates, capsys):
    choose.remember(model, torch.zeros(4, 3, 16, 16), FAST)
    images = (np.zeros((9, 9, 3), np.uint8) for _ in range(16))
    list(vt.Classifier(model, engine="auto").stream(images, batch_size=4))
    assert candidates == ["torch", *["onnxruntime"] * 3]
    assert capsys.readouterr().err == "engine: onnxruntime\n"


def test_an_engine_is_chosen_while_torch_computes_and_then_computes_the_rest(model, candidates, capsys):
    engine, pixels = choose.Engine(model, "auto"), torch.randn(4, 3, 16, 16)
    engine.expect(100)
    results = [engine(pixels)]
    (choice,) = engine.choices
    choice.thread.join()
    results += [engine(pixels) for _ in range(25)]
    for result in results:
        torch.testing.assert_close(result, model(pixels).detach())
    torch.testing.assert_close(engine(pixels, "features"), model.features(pixels).detach())
    assert candidates[0] == "torch"
    assert candidates[-10:] == ["onnxruntime"] * 10
    chosen = "engine: onnxruntime from here on, 4 images per second"
    begun = "engine: torch, until the fastest engine has been chosen in the background, once for this model"
    assert capsys.readouterr().err.splitlines() == [begun, chosen]
    assert choose.remembered_mode(model, pixels).engine == "onnxruntime"


def test_a_choice_that_a_short_job_began_is_completed_at_its_end(model, candidates, capsys):
    engine, pixels = choose.Engine(model, "auto"), torch.zeros(8, 3, 16, 16)
    engine.expect(16)
    engine(pixels)
    engine.choices[0].started -= 100  # a job that took longer
    choose.finish_choices()
    assert choose.remembered_mode(model, pixels).engine == "onnxruntime"
    end = "at most 20 s; Ctrl-C skips it ...\nnote: the next time uses onnxruntime\n"
    assert capsys.readouterr().err.endswith(end)


def test_completing_a_choice_takes_no_longer_than_the_job(model, candidates, monkeypatch, capsys):
    engine, pixels = choose.Engine(model, "auto"), torch.zeros(8, 3, 16, 16)
    engine.expect(16)
    engine(pixels)
    choice = engine.choices[0]
    choice.thread.join()
    monkeypatch.setattr(choose.time, "monotonic", lambda: choice.started + 3.0)
    waited = []
    monkeypatch.setattr(choice.thread, "join", waited.append)
    choose.finish_choices()
    assert waited == [pytest.approx(3.0)]
    assert "at most 3 s; Ctrl-C skips it" in capsys.readouterr().err


def test_a_choice_that_takes_too_long_is_left_for_the_next_job(model, candidates, monkeypatch, capsys):
    monkeypatch.setattr(choose, "FINISH_SECONDS", 0.0)
    engine, pixels = choose.Engine(model, "auto"), torch.zeros(8, 3, 16, 16)
    engine.expect(16)
    engine(pixels)
    engine.choices[0].thread.join()
    choose.finish_choices()
    assert choose.remembered_mode(model, pixels) is None
    assert capsys.readouterr().err.endswith("note: a longer job will choose\n")
    choose.finish_choices()  # waits once
    assert capsys.readouterr().err == ""


def test_the_shortest_times_decide_after_a_warm_up():
    slow, late, fast = RunMode("torch"), RunMode("onnxruntime"), RunMode("openvino")
    trial = choose.EngineTrial(dict.fromkeys((slow, late, fast)), 4)
    for seconds in ((1.0, 9.0, 9.0), (9.0, 1.4, 1.0)):
        assert trial.best is None
        for mode, time in zip((slow, late, fast), seconds):
            trial.add(mode, time)
    assert list(trial.seconds) == [late, fast]
    for _ in range(choose.TRIAL_ROUNDS - 1):
        trial.add(late, 0.9)
        trial.add(fast, 5.0)
    assert trial.best == late


def test_a_failed_choice_leaves_torch(model, candidates, monkeypatch, capsys):
    def fail(*_):
        raise ConversionError("the export of the model failed")

    monkeypatch.setattr(choose, "export_apart", fail)
    engine, pixels = choose.Engine(model, "auto"), torch.zeros(8, 3, 16, 16)
    engine.expect(100)
    engine(pixels)
    engine.choices[0].thread.join()
    engine(pixels)
    choose.finish_choices()
    assert candidates == ["torch", "torch"]
    assert "note: continuing with torch: the export of the model failed" in capsys.readouterr().err


def test_without_engines_auto_is_torch(model, candidates, monkeypatch, capsys):
    monkeypatch.setattr(choose, "installed", lambda: ["torch"])
    vt.Classifier(model, engine="auto").predict([np.zeros((9, 9, 3), np.uint8)] * 40)
    assert set(candidates) == {"torch"}
    assert capsys.readouterr().err == "engine: torch\n"


@pytest.mark.slow
def test_another_process_exports_and_checks_the_graphs(model, tmp_path, monkeypatch, capsys, no_openvino):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path))
    engines = choose.export_apart(model, (16, 16))
    assert engines == ["torch", "onnxruntime"]
    monkeypatch.setattr(choose, "export", None)
    monkeypatch.setattr(choose, "check_outputs", None)
    pixels = torch.randn(4, 3, 16, 16)
    forwards, complete = choose.open_candidates(model, pixels, engines)
    assert complete
    assert len(forwards) == (4 if torch.get_num_threads() > 1 else 2)
    for forward in forwards.values():
        for output, expected in (("", model(pixels)), ("features", model.features(pixels))):
            torch.testing.assert_close(forward(pixels, output), expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.openvino
def test_without_onnxruntime_openvino_has_its_own_format(model, images, cache, monkeypatch):
    without(monkeypatch, "onnxruntime")
    ours, expected = (vt.Classifier(model, engine=engine).predict(images) for engine in ("openvino", "torch"))
    assert ours[0][0].probability == pytest.approx(expected[0][0].probability, abs=1e-5)
    assert len(list((cache / "engines").glob("*/openvino/model.xml"))) == 1


@pytest.mark.slow
def test_an_engine_with_other_outputs_is_refused_and_skipped_by_auto(cache, monkeypatch, capsys, no_openvino):
    other = vt.build(TINY).eval()
    real = choose.Session
    monkeypatch.setattr(choose, "Session", lambda *given, **named: lambda x: real(*given, **named)(x) + 1)
    pixels = torch.randn(1, 3, 16, 16)
    torch.nn.init.normal_(other.head.weight, generator=torch.Generator().manual_seed(3))
    with pytest.raises(ConversionError, match="the outputs of onnxruntime differ from the model's by 1"):
        vt.Classifier(other, engine="onnxruntime").logits(pixels)
    assert choose.fastest_mode(other, pixels).engine == "torch"
    assert "note: skipping onnxruntime: the outputs of onnxruntime differ" in capsys.readouterr().err


def test_an_engine_that_fails_in_this_process_is_replaced_by_torch(model, capsys):
    """Its graph was right when it was exported."""
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    choice = choose.Choice(model, pixels, RunMode("torch"))
    with torch.inference_mode():
        expected = model(pixels)
    wrong = expected.clone()
    wrong[4:] = 0.0  # one piece of the batch
    choice.mode, choice.forward = RunMode("onnxruntime", split=True), lambda pixels, output="": wrong
    torch.testing.assert_close(choice(pixels), expected, atol=1e-5, rtol=0)
    assert choice.mode.engine == "torch"
    assert "note: continuing with torch: outputs of the engine differ from torch's by" in capsys.readouterr().err


def test_the_shortest_time_wins(model, monkeypatch):
    slow, fast = RunMode("torch"), RunMode("openvino", split=True)
    monkeypatch.setattr(choose, "open_candidates", lambda *_: ({slow: None, fast: None}, True))
    monkeypatch.setattr(choose, "measure", lambda *_: {slow: [3.0, 3.0, 9.0], fast: [2.0, 99.0, 99.0]})
    assert choose.fastest_mode(model, torch.zeros(7, 3, 16, 16)) == fast


@pytest.mark.slow
@pytest.mark.parametrize("engine", RUNTIMES)
def test_graphs_for_single_images_and_for_pieces_compute_the_models_logits(model, engine):
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    for mode in (RunMode(engine, fixed=True), RunMode(engine, split=True, fixed=True)):
        forward = choose.open_forward(model, mode, (16, 16))
        for batch in (pixels[:1], pixels[:5], pixels):
            torch.testing.assert_close(forward(batch), model(batch).detach(), rtol=0, atol=1e-5)


def test_batches_and_single_images_have_their_own_mode_once_prepared(model, monkeypatch):
    asked = []
    monkeypatch.setattr(choose, "remembered_mode", lambda _, pixels: asked.append(len(pixels)) or RunMode("torch"))
    engine = choose.Engine(model, "auto")
    engine.expect(1000)
    for batch in (4, 3, 1):  # a short last batch is run like the others
        assert len(engine(torch.zeros(batch, 3, 16, 16))) == batch
    assert asked == [4]
    engine.prepare(torch.zeros(1, 3, 16, 16))
    engine(torch.zeros(1, 3, 16, 16))
    assert asked == [4, 1]
    other = choose.Engine(model, "auto")  # without a job, the first call chooses
    other(torch.zeros(1, 3, 16, 16))
    other(torch.zeros(5, 3, 16, 16))
    assert asked == [4, 1, 1, 5]


@pytest.mark.slow
def test_a_slow_measurement_has_few_rounds():
    ways = {RunMode("one"): lambda pixels: pixels, RunMode("other"): lambda pixels: pixels}
    assert {len(result) for result in measure(ways, torch.zeros(1), 5, 0.0).values()} == {3}
    assert {len(result) for result in measure(ways, torch.zeros(1), 5).values()} == {5}


def test_the_least_recently_used_graphs_are_removed(tmp_path):
    for number in range(choose.MAX_CACHED_GRAPHS + 2):
        (tmp_path / str(number)).mkdir()
    choose.remove_old_graphs(tmp_path)
    assert len(list(tmp_path.iterdir())) == choose.MAX_CACHED_GRAPHS


def test_a_missing_package_is_reported_with_its_extra(model, monkeypatch):
    monkeypatch.setitem(runtimes.EXTRAS, "openvino", ("openvino_that_is_not_here",))
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[openvino\]'"):
        vt.Classifier(model, engine="openvino")


def test_unknown_engines_and_devices_are_reported(model):
    with pytest.raises(ConfigError, match=r"unknown engine 'openvin'; did you mean openvino\?"):
        vt.Classifier(model, engine="openvin")
    assert runtimes.check_engine("auto", "cuda") == "torch"
    with pytest.raises(ConfigError, match=r"engine='openvino' runs on the CPU; device='gpu9' needs engine='torch'"):
        vt.Classifier(model, engine="openvino", device="gpu9")
