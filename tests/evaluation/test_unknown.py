"""Unknown images: the measures of scores, a threshold fitted on some images and kept on others, and in saved models."""

import json

import numpy as np
import pytest
from colors import COLORS, make_colors, tiny_model
from PIL import Image

from vitruvian.engines.export import export
from vitruvian.errors import DataError
from vitruvian.evaluation.calibration import SAVED_ON, auroc, false_positives
from vitruvian.evaluation.evaluate import evaluate, save_calibrated
from vitruvian.evaluation.report import write_evaluation
from vitruvian.inference import Classifier


def test_auroc_counts_pairs():
    rng = np.random.default_rng(0)
    known, unknown = rng.integers(3, 12, 40).astype(float), rng.integers(0, 9, 30).astype(float)
    pairs = (known[:, None] > unknown) + 0.5 * (known[:, None] == unknown)
    assert auroc(known, unknown) == pytest.approx(100 * pairs.mean())
    assert auroc(known, known) == pytest.approx(50)
    assert auroc(unknown + 100, unknown) == 100


def test_false_positives_are_counted_where_95_of_100_known_images_are_accepted():
    known = np.arange(100.0)
    assert false_positives(known, np.array([3.5, 4.0, 4.5, 50.0])) == 75.0
    assert (known >= 4).mean() >= 0.95


@pytest.fixture
def data(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 2, "test": 30})
    rng = np.random.default_rng(1)
    (tmp_path / "others").mkdir()
    for number in range(60):  # yellow, with little noise
        pixels = np.array([230, 230, 30]) + rng.normal(size=(12, 14, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "others" / f"{number}.png")
    return photos, tmp_path / "others"


def color_model():
    model = tiny_model()
    model.meta = model.meta.replace(labels=tuple(COLORS))
    return model


def test_a_threshold_rejects_unknown_images_in_every_engine(tmp_path, data):
    photos, others = data
    model = color_model()
    before = model.head.weight.detach().clone()
    found = evaluate(photos, model, unknown=others)
    fitted = found.rejection
    assert set(fitted.auroc) == {"probability", "energy", "fitted energy", "neighbors", "mahalanobis"}
    assert fitted.chosen in SAVED_ON
    assert fitted.auroc[fitted.chosen] > 95  # yellow is no class
    assert (fitted.accepted, fitted.rejected) == (pytest.approx(95, abs=12), pytest.approx(100, abs=15))
    assert "Unknown images" in write_evaluation(found, tmp_path / "report").read_text()
    assert json.loads(json.dumps(found.to_json()))["unknown"]["chosen"] == fitted.chosen
    save_calibrated(found, tmp_path / "model")
    assert (model.head.weight == before).all()
    classifier = Classifier(tmp_path / "model")
    unknown = [path.read_bytes() for path in sorted(others.iterdir())]
    known = [path.read_bytes() for path in sorted((photos / "test").rglob("*.png"))]
    rejected = [result.rejected for result in classifier.stream(unknown)]
    assert np.mean(rejected) > 0.8
    assert np.mean([result.rejected for result in classifier.stream(known)]) < 0.2
    old, new = Classifier(model).predict(known[:5]), classifier.predict(known[:5])
    if found.calibration.helps is False:  # rejection alone changes no probability
        assert [p.probability for p in old[0]] == pytest.approx([p.probability for p in new[0]], abs=1e-5)
    export(classifier.torch_model, tmp_path / "model.onnx")
    assert [result.rejected for result in Classifier(tmp_path / "model.onnx").stream(unknown)] == rejected


def test_too_few_images_are_an_error(tmp_path, data):
    photos, others = data
    for path in sorted(others.iterdir())[5:]:
        path.unlink()
    with pytest.raises(DataError, match="others: 5 images are too few, at least 16 are needed"):
        evaluate(photos, color_model(), unknown=others)
