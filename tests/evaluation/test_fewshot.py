"""Few-shot least squares against the written-out problem, and the way images are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.probe_classifiers import fewshot_predictions, fit_fewshot, possible_shots, shuffle_classes


def case(images, width, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centers = rng.normal(size=(classes, width))
    return (centers[labels] + rng.normal(size=(images, width))).astype(np.float32), labels


def written_out(features, labels, others, classes, l2):
    """Scores by the definition: least squares with sqrt(l2) I as further rows, a class at a time."""
    x = features.astype(np.float64)
    mean, std = x.mean(axis=0), np.sqrt(((x - x.mean(axis=0)) ** 2).mean(axis=0)) + 1e-5
    x = np.hstack([(x - mean) / std, np.full((len(x), 1), 100.0)])
    rows = np.vstack([x, np.sqrt(l2) * np.eye(x.shape[1])])
    z = np.hstack([(others - mean) / std, np.full((len(others), 1), 100.0)])
    scores = np.empty((len(others), classes))
    for number in range(classes):
        targets = np.concatenate([np.where(labels == number, 1.0, -1.0), np.zeros(x.shape[1])])
        scores[:, number] = z @ np.linalg.lstsq(rows, targets, rcond=None)[0]
    return scores


@pytest.mark.parametrize(("images", "width"), [(5, 64), (125, 32), (64, 63), (64, 64), (125, 192)])
def test_scores_are_those_of_the_written_out_problem_in_float64(images, width):
    features, labels = case(images, width)
    others, _ = case(40, width, seed=1)
    found = fit_fewshot(features, labels, classes=5).logits(others).numpy()
    np.testing.assert_allclose(found, written_out(features, labels, others, 5, 2.0**10), atol=1e-6, rtol=0)


def test_the_regularization_is_not_scaled_by_the_number_of_images():
    features, labels = case(60, 16)
    found = fit_fewshot(features, labels, classes=5, l2=7.0).logits(features).numpy()
    np.testing.assert_allclose(found, written_out(features, labels, features, 5, 7.0), atol=1e-6, rtol=0)


def test_the_bias_is_hardly_regularized_so_scores_have_the_mean_of_the_targets():
    features, labels = case(50, 8)
    scores = fit_fewshot(features, labels, classes=5).logits(features).numpy()
    np.testing.assert_allclose(scores.mean(axis=0), -0.6, atol=2e-3)  # a fifth +1, the rest -1; 1e4 n against l2


def test_a_feature_that_is_always_the_same_does_no_harm():
    features, labels = case(20, 8)
    features[:, 3] = 7.0
    assert np.isfinite(fit_fewshot(features, labels, classes=5).logits(features).numpy()).all()


def test_images_are_drawn_as_the_release_draws_them_class_after_class_from_one_generator():
    labels = np.array([1, 0, 1, 0, 0, 1, 2])
    rng = np.random.default_rng(2)
    expected = [rng.permutation([1, 3, 4]), rng.permutation([0, 2, 5]), rng.permutation([6])]
    for found, wanted in zip(shuffle_classes(labels, classes=3, seed=2), expected, strict=True):
        assert found.tolist() == wanted.tolist()


def test_predictions_use_only_the_drawn_images():
    features, labels = case(50, 16)
    chosen = np.concatenate([picked[:3] for picked in shuffle_classes(labels, classes=5, seed=1)])
    elsewhere = features.copy()
    elsewhere[np.setdiff1d(np.arange(50), chosen)] = np.nan
    found = [fewshot_predictions((x, labels), features, classes=5, shots=3, seed=1) for x in (features, elsewhere)]
    assert found[0].tolist() == found[1].tolist()


def test_shots_that_a_class_does_not_have_are_left_out_with_a_line_or_refused_if_asked_for():
    labels = np.array([0] * 30 + [1] * 7)
    assert possible_shots(labels, ("cat", "dog"), None) == (
        [1, 5],
        "no few-shot accuracy for 10, 25 shots: class 'dog' has 7 training images",
    )
    assert possible_shots(labels, ("cat", "dog"), (7, 2)) == ([2, 7], "")
    with pytest.raises(DataError, match="'dog' has 7 training images, 8 shots need 8; use at most 7"):
        possible_shots(labels, ("cat", "dog"), (2, 8))
    with pytest.raises(ConfigError, match="shots=0 is not at least 1"):
        possible_shots(labels, ("cat", "dog"), (0,))
