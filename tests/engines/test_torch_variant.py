"""Lower precision and torch.compile: what changes, what is reported, and what is refused."""

import json
from functools import partial

import pytest
import torch

import vitruvian as vt
from vitruvian import machine
from vitruvian.config import ViTConfig
from vitruvian.engines.bench import bench
from vitruvian.engines.torch_variant import TorchVariant, torch_engine
from vitruvian.errors import ConfigError
from vitruvian.evaluation.features import open_store
from vitruvian.inference import Encoder
from vitruvian.model.build import build
from vitruvian.training.recipe import Recipe

LINE = "precision: bf16 changes {} of {} top-1 predictions ({}) in the first batch, compared with float32\n"


@pytest.fixture
def model():
    config = ViTConfig(image_size=(16, 16), patch_size=8, depth=2, width=32, mlp_dim=64, num_heads=2, num_classes=5)
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture
def pixels():
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_bf16_changes_logits_little_and_reports_the_first_batch_once(model, pixels, capsys):
    exact = vt.Classifier(model).logits(pixels)
    classifier = vt.Classifier(model, precision="bf16")
    logits = classifier.logits(pixels)
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.05 * exact.abs().max()  # 8 bits of mantissa, two blocks
    changed = int((logits.argmax(1) != exact.argmax(1)).sum())
    assert capsys.readouterr().err == LINE.format(changed, 8, f"{changed / 8:.1%}")
    classifier.logits(pixels)
    assert capsys.readouterr().err == ""
    assert repr(classifier).endswith("torch:bf16 on cpu)")
    assert next(model.parameters()).dtype == torch.float32


def test_changed_predictions_are_counted(model, pixels, capsys):
    variant = TorchVariant(model, "torch:bf16")
    expected = torch.eye(5)
    expected_line = LINE.format(2, 5, "40.0%").strip()
    values = expected[[1, 0, 2, 3, 4]].clone()
    assert variant._difference(values, expected, "") == expected_line
    values = expected.clone()
    values[3] = torch.nan
    values[4, 0] = torch.inf
    assert variant._difference(values, expected, "") == expected_line


def test_features_report_their_difference_and_have_a_store_of_their_own(model, pixels, capsys):
    encoder = Encoder(model, precision="bf16")
    encoder.features(pixels)
    assert "precision: bf16 changes features by 0.0" in capsys.readouterr().err
    names = {open_store(Encoder(model, precision=name)).folder.name for name in ("float32", "bf16", "fp16")}
    assert len(names) == 3


def test_an_evaluation_and_a_cascade_keep_the_precision(model, capsys):
    from vitruvian.evaluation.evaluate import classifier_of

    assert classifier_of(Encoder(model, precision="bf16"), (), None, flip=False).engine == "torch:bf16"


def test_compiled_models_give_the_same_logits(model, pixels, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # needs no C++ compiler
    classifier = vt.Classifier(model, compile=True)
    torch.testing.assert_close(classifier.logits(pixels), vt.Classifier(model).logits(pixels))
    assert len(classifier._forward._compiled) == 1
    assert capsys.readouterr().err == ""


def test_a_failing_compiler_is_reported_and_the_model_runs_without_it(model, pixels, monkeypatch, capsys):
    def fail(function):
        raise RuntimeError("no compiler\nwith many lines")

    monkeypatch.setattr(torch, "compile", fail)
    classifier = vt.Classifier(model, compile=True)
    assert torch.equal(classifier.logits(pixels), vt.Classifier(model).logits(pixels))
    assert capsys.readouterr().err == "note: torch.compile failed, continuing without it: no compiler with many lines\n"
    classifier.logits(pixels)
    assert capsys.readouterr().err == ""


def test_a_model_in_training_stays_in_training(model, pixels):
    vt.Classifier(model.train(), precision="bf16").logits(pixels)
    assert model.training


def test_the_precision_of_auto_depends_on_the_device(monkeypatch):
    for flags, allows_amx, expected in (
        ({"avx512f"}, False, "float32"),
        ({"avx512f", "avx512_bf16"}, False, "bf16"),
        ({"avx512f", "avx512_bf16", "amx_bf16"}, True, "bf16"),
        ({"avx512f", "avx512_bf16", "amx_bf16"}, False, "float32"),
    ):
        monkeypatch.setattr(machine, "processor_flags", lambda flags=flags: flags)
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda allows=allows_amx: allows)
        assert machine.choose_precision("auto", "cpu") == expected
    assert machine.choose_precision("auto", "mps") == "fp16"
    for has_bf16, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert machine.choose_precision("auto", "cuda:1") == expected
    assert machine.choose_precision("fp16", "cpu") == "fp16"
    assert torch_engine("auto", "auto", False, "cpu") == "auto"
    assert torch_engine("torch", "bf16", True, "cpu") == "torch:bf16+compile"


def test_other_engines_and_unknown_words_are_refused(model):
    with pytest.raises(ConfigError, match=r"precision= needs engine='torch', not onnxruntime"):
        vt.Classifier(model, engine="onnxruntime", precision="bf16")
    with pytest.raises(ConfigError, match=r"precision='bf15' is not one of .*; did you mean 'bf16'\?"):
        vt.Classifier(model, precision="bf15")


def test_the_bench_measures_both_precisions(model):
    speeds = bench(model, engines=["torch"], batches=[2], rounds=1, precision="bf16").speeds
    assert [speed.engine for speed in speeds] == ["torch", "torch:bf16"]


def test_recipes_take_the_short_names_and_store_the_long_ones():
    assert Recipe(steps=1, precision="bf16") == Recipe(steps=1, precision="bfloat16")
    assert json.dumps(Recipe(steps=1, precision="fp16").to_json()).count('"float16"') == 1
    with pytest.raises(ConfigError, match="sam_rho needs precision='float32' or 'bfloat16'"):
        Recipe(steps=1, precision="auto", sam_rho=0.1)
