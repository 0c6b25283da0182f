"""Calibration error by hand, and temperatures that are known beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vitruvian.evaluation.calibration import bin_numbers, calibration_split, fit_temperature, reliability
from vitruvian.evaluation.calibration import calibration as calibration_of
from vitruvian.evaluation.label_spaces import DatasetLogits


def outputs(logits, labels, score_function="softmax"):
    count = len(labels)
    return DatasetLogits(
        indices=np.arange(count),
        labels=np.asarray(labels),
        logits=np.asarray(logits, np.float32),
        rank_among_all=np.zeros(count, np.int64),
        imagenet=np.empty(0, np.int64),
        unreadable=[],
        left_out=0,
        score_function=score_function,
    )


def calibration(found, temperature, dev, *, seed):
    return calibration_of(found, temperature, calibration_split(found, dev, seed=seed))


def honest(count, classes=5, seed=0):
    """Labels that are drawn by the probabilities of the logits: temperature 1 is right."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return logits.numpy(), labels.numpy()


def test_the_error_of_a_case_worked_out_by_hand():
    sure, unsure = math.log(9), math.log(1.5)  # probabilities 0.9 and 0.6
    found = reliability(outputs([[sure, 0], [sure, 0], [0, sure], [unsure, 0]], [0, 1, 1, 1]), 1.0)
    assert [(part.count, part.confidence, part.accuracy) for part in found.bins] == [
        (1, pytest.approx(60.0), 0.0),
        (3, pytest.approx(90.0), pytest.approx(200 / 3)),
    ]
    assert found.error == pytest.approx(0.25 * 60 + 0.75 * (90 - 200 / 3))
    assert found.loss == pytest.approx(-(2 * math.log(0.9) + math.log(0.1) + math.log(0.4)) / 4)


def test_a_bin_has_its_upper_edge_and_not_its_lower_one():
    assert bin_numbers(np.array([1e-9, 1 / 15, 1 / 15 + 1e-9, 0.5, 1.0])).tolist() == [0, 0, 1, 7, 14]


def test_the_error_agrees_with_a_plain_loop_over_bins():
    logits, labels = honest(500)
    found = reliability(outputs(3 * logits, labels), 1.0)
    probabilities = torch.from_numpy(3 * logits).double().softmax(dim=1).numpy()
    total = 0.0
    for low in range(15):
        inside = (probabilities.max(axis=1) > low / 15) & (probabilities.max(axis=1) <= (low + 1) / 15)
        if inside.any():
            right = (probabilities.argmax(axis=1) == labels)[inside].mean()
            total += inside.mean() * abs(right - probabilities.max(axis=1)[inside].mean())
    assert found.error == pytest.approx(100 * total)


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_the_fitted_temperature_undoes_a_factor_of_the_logits(factor):
    logits, labels = honest(4000)
    whole = outputs(factor * logits, labels)
    found = fit_temperature(whole, np.arange(4000))
    assert found == pytest.approx(factor, rel=0.05)  # labels are a sample
    loss = reliability(whole, found).loss
    assert all(reliability(whole, other * found).loss > loss for other in (0.99, 1.01))


def test_sigmoid_models_are_calibrated_with_sigmoids():
    logits, labels = np.array([[2.0, -1.0], [0.0, 1.0]]), [0, 0]
    probability = 1 / (1 + np.exp(-logits))
    found = reliability(outputs(logits, labels, "sigmoid"), 1.0)
    assert [row.confidence for row in found.bins] == pytest.approx([100 * probability[1, 1], 100 * probability[0, 0]])
    loss = -np.log([probability[0, 0], 1 - probability[0, 1], probability[1, 0], 1 - probability[1, 1]]).sum() / 2
    assert found.loss == pytest.approx(loss)


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_the_temperature_of_a_sigmoid_model_has_the_least_binary_cross_entropy(factor):
    logits, labels = honest(2000)
    whole = outputs(factor * (logits - 2), labels, "sigmoid")
    found = fit_temperature(whole, np.arange(2000))
    loss = reliability(whole, found).loss
    assert all(reliability(whole, other * found).loss > loss for other in (0.99, 1.01))


def test_no_temperature_is_given_where_all_answers_are_right_or_images_few():
    logits, labels = honest(60)
    right = calibration(outputs(logits, logits.argmax(axis=1)), 1.0, None, seed=0)
    assert (right.temperature, right.before) == (None, None)
    why = "all 30 calibration images are classified correctly"
    assert right.obstacle == f"{why} (a random part of 30 of the 60 images)"
    wrong = calibration(outputs(logits, logits.argmin(axis=1)), 1.0, None, seed=0)
    assert "no better than chance" in wrong.obstacle
    few = calibration(outputs(logits[:20], labels[:20]), 1.0, None, seed=0)
    assert (few.temperature, few.obstacle) == (None, "10 images are too few, at least 20 are needed")


def test_a_temperature_is_judged_on_images_that_it_was_not_fitted_on():
    logits, labels = honest(400)
    found = calibration(outputs(3 * logits, labels), 1.0, None, seed=0)
    assert found.now.count == 400
    assert (found.before.count, found.after.count) == (200, 200)
    assert found.after.error < found.before.error
    dev = outputs(3 * honest(300, seed=1)[0], honest(300, seed=1)[1])
    other = calibration(outputs(3 * logits, labels), 1.0, dev, seed=0)
    assert (other.before.count, other.fitted_on) == (400, "300 images of the split 'val'")


def test_the_models_own_temperature_is_the_state_before():
    logits, labels = honest(400)
    whole = outputs(3 * logits, labels)
    assert calibration(whole, 3.0, None, seed=0).now == reliability(whole, 3.0)
