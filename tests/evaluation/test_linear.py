"""The linear probe against another optimizer, and its choice of regularization."""

from __future__ import annotations

import tracemalloc
import weakref

import numpy as np
import pytest
import scipy.optimize
import torch

import vitruvian.evaluation.probe_classifiers as linear
from vitruvian.evaluation.probe_classifiers import choose_l2, fit_linear


def case(images=90, width=6, classes=3, seed=0, noise=1.0):
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centers = np.random.default_rng(9).normal(size=(classes, width))
    return (centers[labels] + noise * rng.normal(size=(images, width))).astype(np.float32), labels


def objective(flat, x, labels, l2):
    weights = flat.reshape(x.shape[1] + 1, -1)
    logits = x @ weights[:-1] + weights[-1]
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), labels]
    return losses.mean() + l2 / 2 * (weights[:-1] ** 2).sum()


@pytest.mark.parametrize("l2", [1.0, 0.01])
def test_the_fit_is_the_minimum_that_scipy_finds(l2):
    features, labels = case()
    found = fit_linear(features, labels, classes=3, l2=l2)
    x = (features.astype(np.float64) - found.mean.numpy()) / found.std.numpy()
    np.testing.assert_allclose(x.std(axis=0), 1.0, atol=1e-4)  # the 1e-5 added to deviations
    least = scipy.optimize.minimize(objective, np.zeros(21), (x, labels, l2), tol=1e-9)
    ours = objective(found.weights.numpy().ravel(), x, labels, l2)
    assert ours == pytest.approx(least.fun, abs=1e-8)


def test_the_bias_is_free():
    features, labels = case()
    lopsided = np.where(labels == 2, 0, labels)  # two thirds of class 0
    found = fit_linear(features, lopsided, classes=3, l2=1e4)
    shares = found.logits(features).softmax(dim=1).mean(dim=0)
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 3, 0.0], abs=1e-3)


def test_images_taken_in_pieces_change_nothing(monkeypatch):
    features, labels = case()
    whole = fit_linear(features, labels, classes=3, l2=0.1)
    monkeypatch.setattr(linear, "LINEAR_PIECE", 7)
    pieces = fit_linear(features, labels, classes=3, l2=0.1)
    torch.testing.assert_close(pieces.weights, whole.weights, atol=1e-4, rtol=0)  # where the optimizer stops
    assert pieces.predictions(features).tolist() == whole.predictions(features).tolist()


def test_two_fits_agree_to_the_last_digit():
    features, labels = case()
    one, other = (fit_linear(features, labels, classes=3, l2=0.01).weights for _ in range(2))
    assert torch.equal(one, other)


def test_the_regularization_that_is_best_elsewhere_is_chosen_and_of_equal_ones_the_strongest():
    train, dev = case(images=30, width=40, noise=3.0), case(images=300, width=40, seed=1, noise=3.0)
    best, shares = choose_l2(train, dev, classes=3, candidates=(1e-6, 10.0))
    for l2, share in shares.items():
        found = fit_linear(*train, classes=3, l2=l2).predictions(dev[0])
        assert share == pytest.approx(100 * (found == dev[1]).mean(), abs=1.0)  # another start of the optimizer
    assert shares[best] == max(shares.values())
    easy = case(noise=0.01)
    assert choose_l2(easy, easy, classes=3, candidates=(0.001, 0.01))[0] == 0.01


def test_a_fit_holds_no_float64_copy_of_the_features(monkeypatch):
    features, labels = case(images=20_000, width=64)
    monkeypatch.setattr(linear, "LINEAR_PIECE", 500)
    living, most = weakref.WeakSet(), []
    standardize = linear.LinearClassifier.standardize

    def watched(probe, some):
        made = standardize(probe, some)
        living.add(made)
        most.append(len(living))
        return made

    monkeypatch.setattr(linear.LinearClassifier, "standardize", watched)
    tracemalloc.start()
    try:
        fit_linear(features, labels, classes=3, l2=1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert max(most) <= 2  # one in use, one just made
    assert peak < features.nbytes / 2  # NumPy's part; a copy in float64 would be twice the features
