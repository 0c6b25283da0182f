"""Probes of several labels and of numbers on frozen features."""

import numpy as np
import pytest
import torch

from vitruvian.config import ViTConfig
from vitruvian.errors import DataError
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.evaluation.probe import probe
from vitruvian.evaluation.probe_classifiers import STRENGTHS, fit_linear, fit_numbers, fit_ridge, neighbor_scores
from vitruvian.inference import Encoder
from vitruvian.model.build import build
from vitruvian.training.initial_model import probe_model

sklearn = pytest.importorskip("sklearn.linear_model")


def test_ridge_regressions_equal_those_of_scikit_learn_and_leave_out_unknown_values():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 5))
    y = x @ generator.normal(size=(5, 2)) + generator.normal(size=(60, 2)) + 3
    unit = float(np.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0))).mean())

    def error(strength):  # 60 fits, each without one image
        kept = ~np.eye(len(x), dtype=bool)
        fits = [sklearn.Ridge(alpha=strength * unit).fit(x[rest], y[rest]) for rest in kept]
        return np.mean([(fit.predict(x[i : i + 1]) - y[i]) ** 2 for i, fit in enumerate(fits)])

    weight, bias = fit_ridge(torch.from_numpy(x), torch.from_numpy(y))
    expected = sklearn.Ridge(alpha=min(STRENGTHS, key=error) * unit).fit(x, y)
    assert np.allclose(weight.T, expected.coef_, atol=1e-6)
    assert np.allclose(bias, expected.intercept_, atol=1e-6)
    y[::2, 1] = np.nan
    weight, bias = fit_numbers(x, y)
    alone, other = fit_numbers(x[1::2], y[1::2, 1:])
    assert np.allclose(weight[:, 1], alone[:, 0])
    assert np.allclose(bias[1], other[0])


def test_each_label_has_its_own_logistic_regression():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(80, 4)).astype(np.float32)
    y = (x[:, :2] + generator.normal(size=(80, 2)) > 0).astype(float)
    both = fit_linear(x, y, classes=2, l2=0.1).logits(x)
    y[:, 0] = np.nan
    alone = fit_linear(x, y, classes=2, l2=0.1).logits(x)
    assert torch.allclose(both[:, 1], alone[:, 1], atol=1e-3)  # both converge to a gradient of 1e-5
    assert alone[:, 0].abs().max() < 1e-6


def test_neighbors_leave_out_unknown_targets():
    x = np.eye(3, dtype=np.float32)
    y = np.array([[1.0, np.nan], [0.0, 5.0], [0.0, 7.0]])
    scores = neighbor_scores((x, y), x[:1] + 1e-6, count=1)
    assert scores.tolist() == [[1.0, 6.0]]


@pytest.mark.parametrize("target", ["multi:red,green,blue", "number:brightness"])
def test_a_frozen_model_is_probed_by_the_metrics_of_the_target(tmp_path, monkeypatch, target):
    from mixtures import write_mixtures

    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    config = ViTConfig(image_size=8, patch_size=4, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=0)
    report = probe(write_mixtures(tmp_path), build(config, seed=0), target=target)
    metrics = {result.probe: result.metrics for result in report.results}
    if target.startswith("multi"):
        assert metrics["linear"]["map"] > 80
        assert {"few-shot", "linear", "neighbors"} == metrics.keys()
    else:
        assert metrics["ridge"]["r2"] > 0.5
    assert "top1" not in report.to_json()["results"][0]


@pytest.mark.parametrize("target", ["multi:red,green,blue", "number:brightness"])
def test_a_probe_is_saved_as_a_model_of_its_target(tmp_path, monkeypatch, target):
    from mixtures import write_mixtures

    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path / "cache"))
    config = ViTConfig(image_size=8, patch_size=4, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=0)
    data, encoder = write_mixtures(tmp_path / "data"), Encoder(build(config, seed=0), device="cpu")
    model = probe_model(data, encoder, target=target)
    kind, _, names = target.partition(":")
    assert (model.meta.target.kind, model.meta.labels) == (kind, tuple(names.split(",")))
    report, evaluation = probe(data, encoder, target=target, only=["linear"]), evaluate(data, model)
    for name in ("map",) if kind == "multi" else ("mae", "r2"):  # thresholds are not saved
        assert report.results[0].metrics[name] > 0
        assert evaluation.numbers[name] == pytest.approx(report.results[0].metrics[name], rel=1e-3)
    with pytest.raises(DataError, match="of several labels or numbers, only the linear probe can be saved"):
        probe_model(data, encoder, target=target, shots=1)
