"""Confidence intervals against published values, the law of large numbers and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vitruvian.evaluation.metrics import (
    accuracy_interval,
    bootstrap,
    class_mean_interval,
    class_measures,
    mean_f1,
    score_logits,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_the_one_in_the_literature(right, count, low, high):
    # R. G. Newcombe, Statistics in Medicine 17 (1998), Table I, method 3
    assert wilson(right, count) == pytest.approx((100 * low, 100 * high), abs=0.005)


def test_all_right_and_all_wrong_still_leave_doubt():
    assert accuracy_interval(np.ones(74, bool)) == pytest.approx((95.065, 100.0), abs=0.01)
    assert accuracy_interval(np.zeros(74, bool)) == pytest.approx((0.0, 4.935), abs=0.01)
    low, high = class_mean_interval(np.array([37, 37]), np.array([37, 37]))
    assert 90 < low < 96
    assert high == 100.0


def test_many_images_give_two_standard_errors_to_either_side_and_so_does_the_bootstrap():
    right = np.arange(1000) % 4 != 0
    error = 100 * math.sqrt(0.75 * 0.25 / 1000)
    normal = (75 - 1.96 * error, 75 + 1.96 * error)
    assert accuracy_interval(right) == pytest.approx(normal, abs=0.12)  # Wilson's leans to the middle
    drawn = bootstrap(lambda weights: 100 * float(weights @ right) / 1000, 1000, seed=0)
    assert drawn == pytest.approx(normal, abs=0.25)  # 1000 draws, steps of 0.1


def test_the_mean_of_equal_classes_is_about_as_sure_as_the_share_of_all_images():
    right, counts = np.array([40, 45, 50, 35]), np.full(4, 60)
    of_classes, of_all = class_mean_interval(right, counts), wilson(170, 240)
    assert of_classes == pytest.approx(of_all, abs=0.8)
    assert class_mean_interval(np.array([40, 0]), np.array([60, 0])) == pytest.approx(wilson(40, 60))


def test_the_same_seed_draws_the_same_images_and_another_one_others():
    right = np.arange(100) % 3 == 0
    one, same, other = (bootstrap(lambda w: float(w @ right), 100, seed=seed, resamples=50) for seed in (1, 1, 2))
    assert one == same != other


def test_the_mean_of_classes_with_one_image_each_has_the_interval_of_the_accuracy():
    assert class_mean_interval(np.array([1, 1, 0, 1]), np.ones(4, int)) == pytest.approx(wilson(3, 4))


@pytest.mark.parametrize(("count", "tolerance"), [(60, 2.0), (400, 0.7)])  # percent; Wilson's is not symmetric
def test_the_interval_of_the_mean_f1_is_about_that_of_resampling(count, tolerance):
    rng = np.random.default_rng(0)
    shares = np.array([0.30, 0.05, 0.02, 0.04, 0.25, 0.03, 0.06, 0.02, 0.23])
    confusion = rng.multinomial(count, shares).reshape(3, 3)
    value, interval = mean_f1(confusion)
    draws = [mean_f1(drawn.reshape(3, 3))[0] for drawn in rng.multinomial(count, confusion.ravel() / count, size=1000)]
    assert interval == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=tolerance)
    assert interval[0] < value < interval[1]


def test_without_mistakes_the_mean_f1_is_as_uncertain_as_the_accuracy():
    assert mean_f1(np.diag([6, 6, 6])) == (100.0, pytest.approx(wilson(18, 18)))
    assert mean_f1(np.array([[0, 5], [5, 0]]))[1] == pytest.approx(wilson(0, 10))


def test_recall_precision_and_f1_of_a_class_have_intervals():
    logits = torch.eye(3)[torch.tensor([0, 0, 1, 1, 1])]
    measures = class_measures(
        score_logits(logits, torch.tensor([0, 0, 0, 1, 1]), torch.arange(5), classes=3), classes=3
    )
    recall, precision, (f1, (low, high)) = measures.class_rates(0)
    assert (recall, precision) == ((200 / 3, wilson(2, 3)), (100.0, wilson(2, 2)))
    assert f1 == pytest.approx(80.0)
    assert low < f1 < high
    assert [interval for _, interval in measures.class_rates(2)] == [None, None, None]
