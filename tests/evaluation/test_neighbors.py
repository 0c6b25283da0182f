"""Nearest neighbors against a plain loop."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitruvian.evaluation.probe_classifiers import choose_neighbors, neighbor_predictions


def case(images=60, width=8, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centers = np.random.default_rng(9).normal(size=(classes, width))
    return (centers[labels] + 1.5 * rng.normal(size=(images, width))).astype(np.float32), labels


def cosine(a, b):
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def vote(train, query, count, without=None):
    """The class with the largest sum of exp(similarity / 0.07) among the nearest."""
    features, labels = (part.astype(np.float64) if part.dtype == np.float32 else part for part in train)
    near = sorted((cosine(query.astype(np.float64), x), i) for i, x in enumerate(features) if i != without)[-count:]
    votes = np.zeros(4)
    for similarity, i in near:
        votes[labels[i]] += math.exp(similarity / 0.07)
    return int(votes.argmax())


@pytest.mark.parametrize("count", [1, 5, 60, 999])
def test_predictions_are_those_of_a_plain_loop(count):
    train, (test, _) = case(), case(images=23, seed=1)
    found = neighbor_predictions(train, test, classes=4, counts=[count])[count]
    assert found.tolist() == [vote(train, query, count) for query in test]


def test_the_length_of_features_means_nothing():
    train, (test, _) = case(), case(images=23, seed=1)
    lengths = np.random.default_rng(2).uniform(0.1, 10, size=(60, 1)).astype(np.float32)
    one = neighbor_predictions(train, test, classes=4, counts=[5])[5]
    other = neighbor_predictions((train[0] * lengths, train[1]), test * 3, classes=4, counts=[5])[5]
    assert one.tolist() == other.tolist()


def test_the_number_of_neighbors_is_chosen_by_asking_about_each_image_without_itself():
    train = case()
    best, shares = choose_neighbors(train, classes=4, candidates=(1, 7, 1000))
    for count in (1, 7):
        right = [vote(train, x, count, without=i) == train[1][i] for i, x in enumerate(train[0])]
        assert shares[count] == pytest.approx(100 * np.mean(right))
    assert sorted(shares) == [1, 7, 59]  # no more than there are others
    assert best == min(count for count in shares if shares[count] == max(shares.values()))
