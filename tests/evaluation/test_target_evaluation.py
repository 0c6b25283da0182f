"""Predictions and evaluations of models of several labels, numbers and levels."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vitruvian.cli.app import app
from vitruvian.config import ViTConfig
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.conformal import fit_target_sets
from vitruvian.evaluation.corruptions import Corrupted
from vitruvian.evaluation.evaluate import evaluate, evaluate_classes, run_targets, save_calibrated
from vitruvian.evaluation.probe import probe
from vitruvian.evaluation.report import write_evaluation
from vitruvian.evaluation.target_metrics import MEASURES
from vitruvian.inference import Classifier
from vitruvian.model.build import build
from vitruvian.targets import Target
from vitruvian.weights.load import load
from vitruvian.weights.save import save

CONFIG = ViTConfig(image_size=8, patch_size=4, depth=1, width=16, mlp_dim=16, num_heads=2, num_classes=3)
LABELS = ("red", "green", "blue")


def model_of(target, labels, **options):
    model = build(CONFIG.replace(num_classes=len(labels)), seed=0).eval()
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    score = "sigmoid" if target.kind == "multi" else "identity"
    preprocess = model.meta.preprocess.replace(image_size=(8, 8))
    model.meta = model.meta.replace(
        labels=labels, target=target, score_function=score, preprocess=preprocess, **options
    )
    return model


@pytest.fixture
def images(tmp_path):
    generator = np.random.default_rng(0)
    for index in range(12):
        pixels = generator.integers(0, 255, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    rows = [f"{i}.png,{i % 2},{int(i % 3 == 0)},{'' if i % 4 else 1},{10 + i},{'abc'[i % 3]}" for i in range(12)]
    (tmp_path / "list.csv").write_text("\n".join(["path,red,green,blue,age,label", *rows]))
    return tmp_path


def test_all_labels_above_their_threshold_are_predicted(images):
    path = images / "0.png"
    classifier = Classifier(model_of(Target(kind="multi", thresholds=(0.0, 1.0, 0.0)), LABELS))
    (result,) = classifier.stream([path])
    assert {prediction.label for prediction in result.predictions} == {"red", "blue"}
    assert result.predictions[0].probability >= result.predictions[1].probability
    assert result.to_json()["predictions"][0]["predicted"] is True
    none = Classifier(model_of(Target(kind="multi", thresholds=(1.0, 1.0, 1.0)), LABELS))
    (result,) = none.stream([path])
    assert (result.predictions, result.error) == ((), "")


def test_numbers_are_predicted_in_their_units_with_intervals(images):
    target = Target(kind="number", mean=(-100.0,), std=(5.0,), margins=(2.0,))
    classifier = Classifier(model_of(target, ("age",)))
    (result,) = classifier.stream([images / "0.png"])
    (number,) = result.predictions
    output = classifier.logits(next(iter(classifier.load([[("", images / "0.png")]], ahead=1)))[0][1][None])
    assert number.value == pytest.approx(float(output) * 5 - 100, abs=1e-3)
    assert number.interval == pytest.approx((number.value - 2, number.value + 2))
    assert not result.rejected  # although the value is negative
    assert number.to_json().keys() == {"label", "index", "value", "interval"}
    assert number.text == f"{number.value:.4g} ({number.value - 2:.4g} to {number.value + 2:.4g})"


def test_ordinal_classes_are_predicted_by_name(images):
    target = Target(kind="ordinal", mean=(1.0,), std=(0.01,), levels=("small", "medium", "large"))
    (result,) = Classifier(model_of(target, ("level",))).stream([images / "0.png"])
    assert result.predictions[0].label == "medium"


def test_a_saved_model_keeps_its_target(images):
    target = Target(kind="multi", thresholds=(0.25, 0.5, 0.75))
    save(model_of(target, LABELS), images / "model")
    assert load(images / "model").meta.target == target
    with pytest.raises(ConfigError, match=r"target.thresholds has 2 values for 3 labels"):
        model_of(Target(kind="multi", thresholds=(0.25, 0.5)), LABELS)


def test_labels_and_numbers_are_evaluated_by_name(images):
    model = model_of(Target(kind="multi"), ("blue", "red", "green"))
    evaluation = evaluate(images / "list.csv", model)
    assert evaluation.measures.names == ("blue", "red", "green")
    assert evaluation.measures.per_output()["images"].tolist() == [3, 6, 4]
    numbers = evaluate(images / "list.csv", model_of(Target(kind="number", mean=(15.0,), std=(3.0,)), ("age",)))
    assert numbers.measures.targets[:, 0].tolist() == list(range(10, 22))
    assert numbers.to_json()["mae"] == pytest.approx(numbers.measures.scalars()["mae"])
    json.dumps(evaluation.to_json())
    with pytest.raises(ConfigError, match="this is for models of one class per image"):
        evaluate_classes(images / "list.csv", model)
    with pytest.raises(ConfigError, match="unknown= is for models of one class per image"):
        evaluate(images / "list.csv", model, unknown=images)


def test_images_without_any_label_have_no_precision_and_valid_json(images):
    rows = [f"{i}.png,0,0,{'x' * (i % 2)}" for i in range(12)]
    (images / "none.csv").write_text("\n".join(["path,red,green,camera", *rows]))
    evaluation = evaluate(images / "none.csv", model_of(Target(kind="multi"), ("red", "green")), by="camera")
    text = json.dumps(evaluation.to_json(), allow_nan=False)
    assert "map" not in json.loads(text)
    assert json.loads(text)["slices"][0] == {"name": "", "count": 6, "value": None, "interval": [None, None]}
    rows = [f"{i}.png,{i % 2 * (i < 6)},{i % 3 // 2 * (i < 6)},{'train' if i < 6 else 'test'}" for i in range(12)]
    (images / "none.csv").write_text("\n".join(["path,red,green,split", *rows]))
    report = probe(images / "none.csv", build(CONFIG, seed=0), target="multi:red,green", only=["linear"])
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["results"][0]["metrics"]["map"] is None


@pytest.mark.parametrize("target", [Target(kind="multi"), Target(kind="number", mean=(15.0,), std=(3.0,))])
def test_labels_and_numbers_are_measured_under_corruptions(images, target):
    model = model_of(target, LABELS if target.kind == "multi" else ("age",))
    evaluation = evaluate(images / "list.csv", model, corruptions=["brightness", "contrast"])
    result, (metric, *_) = evaluation.corruptions, evaluation.measures.metrics
    assert (list(result.kinds), result.count, result.metric) == (["brightness", "contrast"], 12, metric)
    assert result.mean == pytest.approx(np.mean(list(result.kinds.values())))
    assert result.interval[0] <= result.mean <= result.interval[1]
    source = Corrupted(evaluation.source, "contrast", 5, 0)
    squashed = model.meta.preprocess.with_changes({"fit": "squash"})
    model.meta = model.meta.replace(preprocess=squashed)
    assert run_targets(Classifier(model), source)[0].scalars()[metric] == pytest.approx(result.kinds["contrast"][4])
    assert evaluation.to_json()["corruptions"]["metric"] == metric
    assert "Corruptions" in write_evaluation(evaluation, images / "out").read_text()


def test_slices_of_labels_and_numbers_have_the_metric_of_their_images(images):
    labels = evaluate(images / "list.csv", model_of(Target(kind="multi"), LABELS), by="label")
    numbers = evaluate(
        images / "list.csv", model_of(Target(kind="number", mean=(15.0,), std=(3.0,)), ("age",)), by="label"
    )
    for evaluation, metric, worst_first in ((labels, "map", 1), (numbers, "mae", -1)):
        assert {part.name: part.count for part in evaluation.slices} == {"a": 4, "b": 4, "c": 4}
        values = [part.value for part in evaluation.slices]
        assert values == sorted(values, key=lambda value: worst_first * value)
        for part in evaluation.slices:
            rows = np.flatnonzero(np.arange(12) % 3 == "abc".index(part.name))
            assert part.value == evaluation.measures.part(rows).scalars()[metric]
            assert part.interval[0] <= part.value <= part.interval[1]
    errors = np.abs(numbers.measures.scores - numbers.measures.targets)[:, 0]
    assert {p.name: p.value for p in numbers.slices} == pytest.approx(
        {k: errors["abc".index(k) :: 3].mean() for k in "abc"}
    )
    page = write_evaluation(numbers, images / "report").read_text()
    assert "Slices by label" in page
    assert "worst: label " in page
    assert json.loads(json.dumps(numbers.to_json()))["slices"][0]["name"] == numbers.slices[0].name


def measures_of(kind, scores, targets):
    names = tuple(f"output {k}" for k in range(scores.shape[1]))
    facts = {"indices": np.arange(len(scores)), "loss": 0.0, "target": Target(kind=kind)}
    return MEASURES[kind](names=names, scores=scores, targets=targets, **facts)


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_sets_of_labels_contain_all_labels_as_often_as_promised(coverage):
    generator = np.random.default_rng(0)
    scores = generator.random((6000, 4))
    targets = (generator.random((6000, 4)) < scores).astype(np.float64)  # a calibrated model
    targets[::7, 2] = np.nan
    sets = fit_target_sets(measures_of("multi", scores[:3000], targets[:3000]), coverage)
    has_labels = (targets[3000:] == 1).any(axis=1)
    inside = ((scores >= sets.threshold) | (targets != 1)).all(axis=1)[3000:][has_labels]
    assert 100 * inside.mean() == pytest.approx(100 * coverage, abs=2.0)  # both halves have 0.8 points
    assert sets.coverage == pytest.approx(100 * coverage, abs=0.5)
    assert sets.count == (targets[:3000] == 1).any(axis=1).sum()
    assert sets.mean_size == pytest.approx((scores[3000:] >= sets.threshold).sum(axis=1).mean(), abs=0.1)


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_intervals_of_numbers_contain_them_as_often_as_promised(coverage):
    generator = np.random.default_rng(0)
    targets = generator.normal(size=(6000, 2))
    targets[::5, 1] = np.nan
    scores = np.nan_to_num(targets) + generator.standard_t(3, (6000, 2)) * (1, 10)
    sets = fit_target_sets(measures_of("number", scores[:3000], targets[:3000]), coverage)
    assert sets.thresholds[1] == pytest.approx(10 * sets.thresholds[0], rel=0.2)
    inside = (np.abs(scores - targets) <= -np.array(sets.thresholds))[3000:][~np.isnan(targets[3000:])]
    assert 100 * inside.mean() == pytest.approx(100 * coverage, abs=2.0)
    assert sets.coverage == pytest.approx(100 * coverage, abs=0.5)
    assert (sets.mean_size, sets.expected[0] < 100 * coverage < sets.expected[1]) == (None, True)


def test_sets_of_labels_and_intervals_of_numbers_are_saved_and_predicted(images):
    labels = model_of(Target(kind="multi"), LABELS)
    sets = evaluate(images / "list.csv", labels, coverage=0.5)
    save_calibrated(sets, images / "sets")
    meta = load(images / "sets").meta
    assert (meta.coverage, meta.set_threshold) == (0.5, pytest.approx(sets.sets.threshold))
    (result,) = Classifier(images / "sets").stream([images / "0.png"])
    assert set(result.prediction_set) == {p.label for p in result.predictions if p.probability >= meta.set_threshold}
    numbers = evaluate(
        images / "list.csv", model_of(Target(kind="number", mean=(15.0,), std=(3.0,)), ("age",)), coverage=0.6
    )
    save_calibrated(numbers, images / "intervals")
    target = load(images / "intervals").meta.target
    assert (target.coverage, target.margins) == (0.6, (pytest.approx(-numbers.sets.threshold),))
    again = evaluate(images / "list.csv", images / "intervals")
    assert "values inside their 60% interval" in write_evaluation(again, images / "report").read_text()
    with pytest.raises(ConfigError, match=r"coverage=0.95 needs at least 19 images to fit on, there are 10"):
        evaluate(images / "list.csv", labels, coverage=0.95)


@pytest.mark.parametrize(
    ("target", "labels"),
    [(Target(kind="multi", thresholds=(0.1,) * 3), LABELS), (Target(kind="number", margins=(0.1,)), ("age",))],
)
def test_thresholds_and_margins_fitted_here_are_saved(images, target, labels):
    model = model_of(target, labels)
    found = evaluate(images / "list.csv", model)
    assert save_calibrated(found, images / "new") == []
    saved = load(images / "new").meta.target
    assert saved != target
    assert len(saved.thresholds or saved.margins) == len(labels)
    if target.kind == "number":  # the 12 errors are too few for 90%: the interval contains all of them
        assert saved.margins[0] == pytest.approx(np.abs(found.measures.scores - found.measures.targets).max())
        return
    assert model.meta.target == target
    (images / "red.csv").write_text("\n".join(["path,red", *(f"{i}.png,{i % 2}" for i in range(12))]))
    with pytest.raises(DataError, match="only red can be fitted; add the others"):
        save_calibrated(evaluate(images / "red.csv", model), images / "newer")


def test_labels_that_the_model_does_not_know_are_an_error(images):
    with pytest.raises(DataError, match="the model does not know a, b, c in the data; it predicts cat, dog"):
        evaluate(images / "list.csv", model_of(Target(kind="multi"), ("cat", "dog")))


@pytest.mark.slow
def test_the_commands_print_labels_and_numbers(images):
    save(model_of(Target(kind="multi", thresholds=(0.0, 1.0, 1.0)), LABELS), images / "labels")
    save(model_of(Target(kind="number", mean=(15.0,), std=(3.0,), margins=(1.0,)), ("age",)), images / "numbers")
    run, path = CliRunner().invoke, str(images / "0.png")
    assert "  red  " in run(app, ["predict", path, "--model", str(images / "labels")]).stdout
    assert " to " in run(app, ["predict", path, "--model", str(images / "numbers")]).stdout
    table = images / "all.csv"
    assert run(app, ["predict", path, "--model", str(images / "numbers"), "--out", str(table)]).exit_code == 0
    assert table.read_text().splitlines()[0] == "path,age,age_low,age_high,error"
    found = run(
        app, ["evaluate", str(images / "list.csv"), "--model", str(images / "labels"), "--out", str(images / "e")]
    )
    assert "mAP, %" in found.stdout
    assert "Each label" in (images / "e" / "report.html").read_text()
    assert run(app, ["explain", path, "--model", str(images / "labels"), "--out", str(images / "x")]).exit_code == 0
