"""Conformal sets that keep their promise, in files and predictions; slices with the worst one named."""

import csv
import json

import numpy as np
import pytest
import torch
import typer
from colors import COLORS, make_colors, tiny_model
from test_calibration import honest, outputs
from typer.testing import CliRunner

from vitruvian.cli.evaluate import evaluate as command
from vitruvian.data.formats import open_dataset
from vitruvian.errors import ConfigError, DataError
from vitruvian.evaluation.calibration import CalibrationSplit, calibration_split
from vitruvian.evaluation.conformal import conformal_threshold, expected_coverage, fit_sets
from vitruvian.evaluation.evaluate import evaluate, save_calibrated
from vitruvian.evaluation.metrics import wilson
from vitruvian.evaluation.probe_classifiers import fit_linear
from vitruvian.evaluation.report import write_evaluation
from vitruvian.inference import Classifier
from vitruvian.weights.load import load
from vitruvian.weights.save import save

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(command)


def sets_of(whole, seed, coverage, temperature=1.0):
    return fit_sets(calibration_split(whole, None, seed=seed), whole, coverage=coverage, t=temperature)


@pytest.mark.parametrize("coverage", [0.8, 0.95])
@pytest.mark.parametrize("scale", [1.0, 5.0])  # also a model that is far too confident
def test_sets_contain_the_label_as_often_as_promised(coverage, scale):
    logits, labels = honest(1000)
    found = sets_of(outputs(scale * logits, labels), 0, coverage)
    assert found.coverage == pytest.approx(100 * coverage, abs=1.0)
    # on images that are not part of the fitting at all: 10 sets of 1000 have 0.5 points of noise
    others = []
    for seed in range(10):
        logits, labels = honest(1000, seed=seed + 1)
        probability = torch.from_numpy(scale * logits).softmax(dim=1).numpy()[np.arange(1000), labels]
        others.append(100 * (probability >= found.threshold).mean())
    assert np.mean(others) == pytest.approx(100 * coverage, abs=2.5)  # the 1000 fitted images have 1.3 points


def test_sets_contain_the_label_as_often_as_promised_on_handwritten_digits():
    data = open_dataset("digits")
    pixels = {n: np.stack([s.read(i) for i in range(len(s))]).reshape(len(s), -1) for n, s in data.splits.items()}
    train, test = (np.asarray(data.splits[name].labels(), np.int64) for name in ("train", "test"))
    head = fit_linear(pixels["train"][:300].astype(np.float32), train[:300], classes=10, l2=0.01)
    whole = outputs(head.logits(pixels["test"].astype(np.float32)).numpy(), test)
    for promise in (0.8, 0.9, 0.95):
        found = sets_of(whole, 0, promise)
        assert found.coverage == pytest.approx(100 * promise, abs=1.5)
        assert found.mean_size < 2.5


def test_a_threshold_worked_out_by_hand():
    logits = np.log([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]])
    whole = outputs(logits, [0, 0, 0, 1])  # the labels have 0.9, 0.6, 0.3, 0.8
    rows = np.arange(4)
    fit = CalibrationSplit(outputs(logits, [0, 0, 0, 1]), rows, rows, "")
    found = fit_sets(fit, whole, coverage=0.6, t=1.0)  # floor(0.4 * 5) = the second smallest
    assert found.threshold == pytest.approx(0.6)
    assert (found.coverage, found.mean_size, found.single) == (75.0, 1.0, 100.0)
    with pytest.raises(ConfigError, match=r"coverage=0.95 needs at least 19 images to fit on, there are 4"):
        fit_sets(fit, whole, coverage=0.95, t=1.0)


@pytest.fixture
def photos(tmp_path):
    return make_colors(tmp_path / "photos", {"train": 2, "test": 30}, noise=60.0)


def color_model():
    model = tiny_model()
    model.meta = model.meta.replace(labels=tuple(COLORS))
    return model


def test_a_model_is_saved_with_its_sets_and_predicts_them(tmp_path, photos):
    found = evaluate(photos, color_model(), coverage=0.8)
    assert found.sets.requested == 80.0
    save_calibrated(found, tmp_path / "model")
    meta = load(tmp_path / "model").meta
    assert (meta.coverage, meta.set_threshold) == (0.8, pytest.approx(found.sets.threshold))
    classifier, source = Classifier(tmp_path / "model"), open_dataset(photos).splits["test"]
    results = list(classifier.stream([source.read(i) for i in range(90)], top=3))
    covered = [source.classes[source.label(i)] in result.prediction_set for i, result in enumerate(results)]
    assert 100 * np.mean(covered) == pytest.approx(80, abs=15)  # all were fitted on
    for result in results:
        assert set(result.prediction_set) == {
            p.label for p in result.predictions if p.probability >= meta.set_threshold
        }
    assert results[0].to_json()["prediction_set"] == list(results[0].prediction_set)
    assert color_model().meta.replace(coverage=0.9).for_new_head().coverage == 0
    with pytest.raises(ConfigError, match=r"coverage=1.5 is not between 0.5 and 1"):
        evaluate(photos, color_model(), coverage=1.5)


def make_manifest(photos):
    """The test images by two cameras, one of which makes only blue ones."""
    source = open_dataset(photos).splits["test"]
    with open(photos / "list.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split", "camera"])
        for index in range(len(source)):
            label = source.classes[source.label(index)]
            writer.writerow([source.key(index), label, "test", "old" if label == "blue" else "new"])
    return photos / "list.csv"


def test_accuracy_is_measured_in_slices_and_the_worst_is_named(tmp_path, photos):
    manifest = make_manifest(photos)
    found = evaluate(manifest, color_model(), by="camera")
    accuracy = found.measures.class_accuracy  # of blue, green, red
    expected = {"old": accuracy[0], "new": (accuracy[1] + accuracy[2]) / 2}
    assert {part.name: part.value for part in found.slices} == pytest.approx(expected)
    assert [part.value for part in found.slices] == pytest.approx(sorted(expected.values()))
    worst = found.slices[0]
    assert worst.interval == pytest.approx(wilson(worst.value / 100 * worst.count, worst.count))
    by_path = evaluate(photos, color_model(), by=r"/(\w+)/")
    assert {part.name: part.value for part in by_path.slices} == pytest.approx(dict(zip(found.space.classes, accuracy)))
    page = write_evaluation(found, tmp_path / "report").read_text()
    assert "Slices by camera" in page
    assert json.loads(json.dumps(found.to_json()))["slices"][0]["name"] == worst.name
    with pytest.raises(DataError, match=r"by='split': all 90 images have the value 'test'"):
        evaluate(manifest, color_model(), by="split")


def test_the_command_prints_slices_and_sets(tmp_path, photos):
    save(color_model(), tmp_path / "model")
    words = [make_manifest(photos), "--model", tmp_path / "model", "--by", "camera", "--coverage", "0.9"]
    ran = CliRunner().invoke(app, [str(word) for word in words])
    assert ran.exit_code == 0, ran.output
    assert "worst: camera " in ran.output
    assert "prediction sets for 90%, fitted on all 90 images, measured in ten folds" in ran.output
    assert "with this many images to fit on: 8" in ran.output  # 90 images: from 82.9 or so


@pytest.mark.parametrize(("coverage", "count"), [(0.8, 100), (0.9, 500), (0.95, 39)])
def test_thresholds_cover_new_images_as_often_as_their_number_lets_expect(coverage, count):
    """Of a score that is uniform on 0 to 1, a threshold t covers 1 - t of the new images."""
    generator = np.random.default_rng(0)
    true = np.array([1 - conformal_threshold(generator.random(count), coverage) for _ in range(4000)])
    assert 100 * true.mean() >= 100 * coverage - 0.1  # the promise, with the noise of 4,000 fits
    low, high = expected_coverage(coverage, count)
    within = 100 * ((100 * true >= low) & (100 * true <= high)).mean()
    assert within == pytest.approx(95, abs=1.5)  # 4,000 fits have 0.35 points
