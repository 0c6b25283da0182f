"""The benchmark measures engines and the parts of a model."""

import pytest
import torch

import vitruvian as vt
from vitruvian.engines.bench import bench
from vitruvian.errors import ConversionError, ImageError

TINY = vt.ViTConfig(image_size=16, patch_size=8, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)


def random_model(seed=0):
    model = vt.build(TINY).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.mark.slow
def test_the_benchmark_names_every_part(model):
    result = bench(model, engines=["torch"], batches=(1, 2), rounds=3)
    assert [(s.engine, s.batch_size) for s in result.speeds] == [("torch", 1), ("torch", 2)]
    assert all(s.p50_ms <= s.p90_ms <= s.p99_ms for s in result.speeds)
    assert list(result.shares) == ["decode", "resize", "embed", "attention", "MLP", "norms, sums, head"]


@pytest.mark.slow
def test_attention_of_a_merging_model_is_part_of_the_rest(model):
    """Its steps are called one by one, which hooks do not see."""
    shares = bench(vt.with_merging(model, 1), engines=["torch"], batches=[1], rounds=1).shares
    assert all(shares.values())
    assert set(shares) == {"decode", "resize", "embed", "MLP", "attention, merging, norms, head"}


def test_an_engine_that_cannot_run_a_model_is_skipped_unless_it_is_named(model, monkeypatch, capsys):
    monkeypatch.setattr("vitruvian.engines.bench.installed", lambda: ["torch", "onnxruntime"])
    adaptive = vt.with_merging(model, thresholds=(0.5,))
    result = bench(adaptive, batches=[1], rounds=1)
    assert [speed.engine for speed in result.speeds] == ["torch"]
    assert "note: skipping onnxruntime: with tome_thresholds" in capsys.readouterr().err
    with pytest.raises(ConversionError, match="tome_thresholds"):
        bench(adaptive, engines=["onnxruntime"], batches=[1], rounds=1)


def test_an_image_that_cannot_be_decoded_is_named_before_anything_is_measured(model, tmp_path, monkeypatch):
    (tmp_path / "x.jpg").write_bytes(b"nothing")
    monkeypatch.setattr("vitruvian.engines.bench.measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ImageError, match=r"x\.jpg: not an image"):
        bench(model, engines=["torch"], image=tmp_path / "x.jpg")
    with pytest.raises(ImageError, match=r"missing\.jpg"):
        bench(model, engines=["torch"], image=tmp_path / "missing.jpg")
