"""Bootstrap intervals against the law of large numbers and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitruvian.evaluation.measuring.intervals import class_mean, intervals, share, share_among


def test_an_interval_is_about_two_standard_errors_to_either_side():
    right = np.arange(1000) % 4 != 0
    low, high = intervals({"top1": share(right)}, 1000, seed=0)["top1"]
    error = 100 * math.sqrt(0.75 * 0.25 / 1000)
    assert (low, high) == pytest.approx((75 - 1.96 * error, 75 + 1.96 * error), abs=0.25)  # 1000 draws, steps of 0.1


def test_the_same_seed_gives_the_same_digits_and_another_one_others():
    right = np.arange(100) % 3 == 0
    one, same, other = (intervals({"a": share(right)}, 100, seed=seed, resamples=50) for seed in (1, 1, 2))
    assert one == same != other


def test_all_right_has_no_width():
    assert intervals({"a": share(np.ones(9, bool))}, 9, seed=0) == {"a": (100.0, 100.0)}


def test_the_mean_of_classes_counts_those_that_were_drawn():
    statistic = class_mean(np.array([0, 0, 1, 2]), np.array([True, False, True, False]))
    assert statistic(np.array([1.0, 1.0, 1.0, 1.0])) == pytest.approx(50.0)
    assert statistic(np.array([3.0, 1.0, 0.0, 1.0])) == pytest.approx(37.5)


def test_a_share_among_some_skips_draws_without_them():
    statistic = share_among(np.array([1, 3]), np.array([True, False]))
    assert statistic(np.array([5.0, 3.0, 5.0, 1.0])) == 75.0
    assert math.isnan(statistic(np.array([1.0, 0.0, 1.0, 0.0])))
    low, high = intervals({"a": statistic}, 4, seed=0)["a"]
    assert 0.0 <= low <= high <= 100.0
