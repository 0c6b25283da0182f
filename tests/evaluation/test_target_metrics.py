"""Metrics of several labels and of numbers: parity with scikit-learn, unknown targets, thresholds and margins."""

import numpy as np
import pytest

from vitruvian.errors import DataError, NotFiniteError
from vitruvian.evaluation.target_metrics import (
    LabelMeasures,
    NumberMeasures,
    f1_threshold,
    f1_thresholds,
    fit_margins,
    measure_outputs,
)
from vitruvian.targets import Target, make_table, parse_numbers

sklearn = pytest.importorskip("sklearn.metrics")


def label_measures(scores, targets, **options):
    names = tuple(map(str, range(targets.shape[1])))
    target = Target(kind="multi", thresholds=options.pop("thresholds", ()))
    return LabelMeasures(
        names=names, indices=np.arange(len(scores)), targets=targets, scores=scores, loss=0.0, target=target, **options
    )


def number_measures(scores, targets, **options):
    names = tuple(map(str, range(targets.shape[1])))
    values = {"names": names, "indices": np.arange(len(scores)), "loss": 0.0, "target": Target(kind="number")}
    return NumberMeasures(targets=targets, scores=scores, **(values | options))


@pytest.mark.parametrize("seed", range(4))
def test_label_metrics_equal_those_of_scikit_learn(seed):
    generator = np.random.default_rng(seed)
    targets = (generator.random((200, 7)) < 0.3).astype(float)
    scores = generator.random((200, 7)) if seed % 2 else generator.integers(5, size=(200, 7)) / 5  # with ties
    measures = label_measures(scores, targets, thresholds=(0.4,) * 7, fitted=True)
    values, said = measures.scalars(), scores >= 0.4
    expected = {
        "map": 100 * sklearn.average_precision_score(targets, scores, average="macro"),
        "map_micro": 100 * sklearn.average_precision_score(targets, scores, average="micro"),
        "f1": 100 * sklearn.f1_score(targets, said, average="macro"),
        "hamming": 100 * sklearn.hamming_loss(targets, said),
        "coverage": sklearn.coverage_error(targets, scores),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    per_label = 100 * sklearn.average_precision_score(targets, scores, average=None)
    assert measures.per_output()["AP %"] == pytest.approx(per_label, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_number_metrics_equal_those_of_scikit_learn(seed):
    generator = np.random.default_rng(seed)
    targets = generator.normal(5, 2, (100, 3))
    scores = targets + generator.normal(0, 1, (100, 3))
    values = number_measures(scores, targets).scalars()
    correlations = [np.corrcoef(scores[:, k], targets[:, k])[0, 1] for k in range(3)]
    expected = {
        "mae": sklearn.mean_absolute_error(targets, scores),
        "rmse": sklearn.root_mean_squared_error(targets, scores),
        "r2": sklearn.r2_score(targets, scores),
        "correlation": np.mean(correlations),
    }
    assert {name: values[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_unknown_targets_are_left_out():
    generator = np.random.default_rng(0)
    targets, scores = (generator.random((60, 2)) < 0.4).astype(float), generator.random((60, 2))
    hidden = targets.copy()
    hidden[::3, 0] = np.nan
    known = np.arange(60) % 3 != 0
    precision = label_measures(scores, hidden).per_output()["AP %"]
    assert precision[0] == pytest.approx(100 * sklearn.average_precision_score(targets[known, 0], scores[known, 0]))
    assert precision[1] == pytest.approx(100 * sklearn.average_precision_score(targets[:, 1], scores[:, 1]))
    numbers = number_measures(scores, hidden).per_output()
    assert numbers["mae"][0] == pytest.approx(np.abs(scores - targets)[known, 0].mean())
    assert numbers["images"].tolist() == [40, 60]


def test_intervals_contain_the_metric_and_shrink_with_more_images():
    widths = []
    for count in (50, 800):
        generator = np.random.default_rng(0)
        targets = (generator.random((count, 3)) < 0.3).astype(float)
        measures = label_measures(targets * 0.3 + generator.random((count, 3)), targets)
        values, ends = measures.scalars(), measures.intervals()
        assert all(ends[name][0] <= values[name] <= ends[name][1] for name in ("map", "map_micro", "hamming"))
        widths.append(ends["map"][1] - ends["map"][0])
    assert widths[1] < widths[0] / 2


def test_a_threshold_maximizes_f1_and_rare_labels_share_one():
    scores = np.array([0.9, 0.8, 0.6, 0.3, 0.1])
    assert f1_threshold(scores, np.array([1.0, 1, 0, 1, 0])) == pytest.approx(0.2)
    assert f1_threshold(scores, np.array([1.0, 1, 0, np.nan, 0])) == pytest.approx(0.7)
    assert f1_threshold(scores, np.zeros(5)) == 0.5
    generator = np.random.default_rng(0)
    targets = (generator.random((100, 3)) < (0.5, 0.5, 0.02)).astype(float)
    scores = targets * 0.2 + 0.8 * np.random.default_rng(1).random((100, 3))
    thresholds = f1_thresholds(scores, targets)
    assert thresholds[2] == f1_threshold(scores.ravel(), targets.ravel())
    assert thresholds[0] == f1_threshold(scores[:, 0], targets[:, 0])


def test_reported_decisions_are_not_flattered_by_their_own_thresholds():
    generator = np.random.default_rng(1)
    targets, scores = (generator.random((40, 30)) < 0.2).astype(float), generator.random((40, 30))  # no signal
    own = np.array(label_measures(scores, targets).fit().thresholds)
    flattered = sklearn.f1_score(targets, scores >= own, average="macro")
    assert label_measures(scores, targets).scalars()["f1"] < 100 * flattered - 5


def test_margins_cover_new_values_as_promised():
    generator = np.random.default_rng(0)
    targets = generator.normal(size=(4000, 1))
    scores = targets + generator.standard_t(3, (4000, 1))
    margin = fit_margins(scores[:2000], targets[:2000])
    covered = (np.abs(scores - targets)[2000:] <= margin).mean()
    assert covered == pytest.approx(0.9, abs=0.015)  # two standard errors of 2,000 images
    assert number_measures(scores, targets).covered == pytest.approx(90, abs=1.5)


def test_outputs_are_standardized_numbers_in_any_order_of_images():
    table = parse_numbers(["10", "20", "30"], None)
    target = Target(kind="number", mean=(20.0,), std=(5.0,))
    outputs = np.array([[2.0], [-2.0], [0.1]])
    measures = measure_outputs(outputs, np.array([2, 0, 1]), np.array([7, 3, 5]), table, target)
    assert measures.indices.tolist() == [3, 5, 7]
    assert measures.scores[:, 0].tolist() == pytest.approx([10, 20.5, 30])
    with pytest.raises(NotFiniteError, match="the model's outputs for example 3 are NaN or infinite"):
        measure_outputs(outputs * np.nan, np.array([0]), np.array([3]), table, target)
    with pytest.raises(DataError, match="no examples"):
        measure_outputs(outputs[:0], np.array([], int), np.array([], int), table, target)


def test_a_label_without_a_positive_image_has_no_average_precision():
    table = make_table("multi", "ab", [{0: 1.0}, {}])
    measures = measure_outputs(
        np.array([[3.0, 0], [-3, 0]]), np.array([0, 1]), np.arange(2), table, Target(kind="multi")
    )
    assert np.isnan(measures.per_output()["AP %"][1])
    assert measures.scalars()["map"] == 100
