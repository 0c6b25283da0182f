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
from vitruvian.evaluation.evaluate import evaluate, evaluate_classes, save_calibrated
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
    with pytest.raises(
        ConfigError, match="coverage= is for models of one class per image; numbers have intervals of 90%"
    ):
        evaluate(images / "list.csv", model, coverage=0.9)
    with pytest.raises(ConfigError, match="by= is for models of one class per image; evaluate a manifest of each part"):
        evaluate(images / "list.csv", model, by="label")


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
