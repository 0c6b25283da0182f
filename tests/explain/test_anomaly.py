"""Anomaly detectors: distances, coreset, threshold, measures against other implementations, files and errors."""

import json

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from reference import random_model
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from vitruvian.errors import ConfigError, DataError, NotFiniteError
from vitruvian.explain.anomaly import (
    Anomalies,
    AnomalyDetector,
    ScoredImage,
    choose_coreset,
    find_anomalies,
    find_masks,
    measure,
    roc_area,
    score,
    train_anomaly_detector,
)

RNG = np.random.default_rng


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Gray images as in MVTec AD: good ones, and some with a bright square and its mask."""
    root, rng = tmp_path_factory.mktemp("scene"), RNG(0)
    for folder in ("good", "test/good", "test/square", "ground_truth/square"):
        (root / folder).mkdir(parents=True)
    for index in range(8):
        for folder in ("good", "test/good", "test/square"):
            pixels = 90 + rng.integers(-20, 20, (32, 48, 3))
            if folder == "test/square":
                mask = np.zeros((32, 48), np.uint8)
                mask[8:20, 4 * index : 4 * index + 12] = 255
                pixels = np.where(mask[:, :, None], 250, pixels)
                Image.fromarray(mask).save(root / "ground_truth" / "square" / f"{index}_mask.png")
            Image.fromarray(pixels.astype(np.uint8)).save(root / folder / f"{index}.png")
    return root


def images_of(folder):
    return sorted(map(str, folder.rglob("*.png")))


@pytest.fixture(scope="module")
def trained(scene):
    return train_anomaly_detector(images_of(scene / "good"), random_model(image_size=(32, 48), patch_size=4))


def test_anomalies_are_found_where_they_are(trained, scene, tmp_path):
    findings = list(find_anomalies(trained.detector, images_of(scene / "test"), tmp_path))
    measured = measure(findings, scene / "ground_truth")
    assert measured["image_auroc"] == 100
    assert measured["pixel_auroc"] > 95
    assert measured["pro"] > 80
    assert all(finding.is_anomalous for finding in findings if "square" in finding.path)
    only = measure([finding for finding in findings if "square" in finding.path], scene / "ground_truth")
    assert list(only) == ["pixel_auroc", "pro"]
    assert measure(findings) == {name: measured[name] for name in ("image_auroc", "interval")}
    with Image.open(tmp_path / "overlays" / "16-7.png") as overlay:
        levels = np.asarray(overlay.resize((48, 32))).astype(int)
    saturation = levels.max(axis=2) - levels.min(axis=2)
    assert saturation[8:20, 28:40].mean() > max(150, saturation[24:].mean())


def test_scores_are_distances_to_the_nearest_good_patch(trained):
    tokens = torch.nn.functional.normalize(torch.randn(5, 6, trained.detector.features), dim=-1)
    finding = score("a", [((0, 0, 6, 5), tokens)], trained.detector.bank, (6, 5))
    nearest = NearestNeighbors(n_neighbors=1, metric="cosine").fit(trained.detector.bank.numpy())
    expected = nearest.kneighbors(tokens.flatten(0, 1).numpy())[0].reshape(5, 6)
    np.testing.assert_allclose(finding.pixels(), expected, atol=1e-5)  # float32
    assert finding.score == pytest.approx(expected.max(), abs=1e-5)


def test_the_coreset_covers_the_patches():
    tokens = torch.cat([torch.randn(50, 8, generator=torch.Generator().manual_seed(k)) * 0.01 + k for k in range(4)])
    assert sorted((choose_coreset(tokens, 4) // 50).tolist()) == [0, 1, 2, 3]
    assert choose_coreset(tokens, 300).tolist() == list(range(200))
    assert len(set(choose_coreset(tokens, 60).tolist())) == 60


@pytest.mark.parametrize("ties", [False, True])
def test_areas_are_those_of_scikit_learn(ties):
    scores, truth = RNG(0).normal(size=500), RNG(1).random(500) < 0.3
    scores = np.round(scores + truth) if ties else scores + truth
    weights = RNG(2).random(500)
    assert roc_area(scores, truth, ~truth) == pytest.approx(100 * roc_auc_score(truth, scores))
    weighted = 100 * roc_auc_score(truth, scores, sample_weight=weights)
    assert roc_area(scores, weights * truth, weights * ~truth) == pytest.approx(weighted)
    # the last image is anomalous: the curve ends with a step
    assert roc_area(np.array([4, 3, 2, 1]), *np.array([[1, 0, 0, 1], [0, 1, 1, 0]])) == pytest.approx(50)


def test_the_overlap_per_region_is_the_mean_over_regions():
    """By thresholds one after the other, as the authors of MVTec AD compute it."""
    values, mask = RNG(0).random((40, 60)).astype(np.float32), np.zeros((40, 60), np.uint8)
    for area in (np.s_[2:5, 3:9], np.s_[20:38, 10:50], np.s_[8:9, 40:42]):
        mask[area] = 1
        values[area] += 0.3
    count, regions = cv2.connectedComponents(mask)
    points = []
    for threshold in np.sort(values.ravel())[::-1]:
        found = values >= threshold
        overlap = np.mean([found[regions == region].mean() for region in range(1, count)])
        points.append((found[mask == 0].mean(), overlap))
    false, overlap = np.array([(0.0, 0.0), *points]).T
    inside = false <= 0.3
    area = np.trapezoid([*overlap[inside], np.interp(0.3, false, overlap)], [*false[inside], 0.3]) / 0.3
    areas = np.bincount(regions.ravel())
    weights = np.where(regions > 0, 1 / areas[regions], 0).ravel()
    assert roc_area(values.ravel(), weights, (mask == 0).ravel(), 0.3) == pytest.approx(100 * area)


def test_the_threshold_keeps_the_rate_of_false_alarms(scene):
    model, images = random_model(image_size=(32, 48), patch_size=4), images_of(scene / "good")
    half = train_anomaly_detector(images, model, false_alarms=0.5)
    assert sum(finding.is_anomalous for finding in half.findings) == 3  # the fifth of 8: (8 + 1) / 2, rounded up
    assert half.notes == ()
    few = train_anomaly_detector(images, model)
    assert few.detector.threshold == max(finding.score for finding in few.findings)
    assert few.notes == (
        "8 good images are too few for 5% false alarms: the threshold is their largest score, "
        "which 11% of good images exceed",
    )


@pytest.mark.slow
def test_a_saved_detector_gives_the_same_scores(trained, scene, tmp_path):
    for _ in range(2):  # the second time, it replaces the first
        trained.save(tmp_path / "detector")
    loaded, image = AnomalyDetector.load(tmp_path / "detector"), images_of(scene / "test")[0]
    assert loaded.check(image).to_json() == trained.detector.check(image).to_json()
    assert json.loads((tmp_path / "detector" / "anomaly.json").read_text())["threshold"] == loaded.threshold
    assert "0 of 8 images" in (tmp_path / "detector" / "report.html").read_text()
    (tmp_path / "detector" / "detector.json").write_text('{"layers": [0, 1, 2], "tile": null}')
    with pytest.raises(DataError, match="not a complete detector: 'threshold'"):
        AnomalyDetector.load(tmp_path / "detector")


@pytest.mark.slow
def test_the_page_states_the_result(trained, scene, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    images = [*images_of(scene / "test"), str(tmp_path / "broken.png")]
    findings = list(find_anomalies(trained.detector, images, tmp_path))
    assert "broken.png" in findings[-1].to_json()["error"]
    measured = measure(findings, scene / "ground_truth")
    Anomalies(detector=trained.detector, findings=findings, measured=measured).write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "of 16 images</b> are above the threshold" in page
    assert "with a probability of 100.0&nbsp;% (image AUROC; 95% interval: 100 to 100)" in page
    assert "broken.png: not an image" in page


def test_a_large_image_is_compared_in_tiles(scene):
    model = random_model(image_size=16, patch_size=4)
    tiled = train_anomaly_detector(images_of(scene / "good")[:3], model, tile=16, patches=100)
    finding = tiled.detector.check(images_of(scene / "test" / "square")[0])
    assert len(finding.parts) == 12
    assert len(tiled.detector.bank) == 100
    assert finding.pixels().shape == (32, 48)


def test_what_cannot_be_trained_or_measured_is_named(scene, tmp_path):
    images, model = images_of(scene / "good"), random_model(image_size=(32, 48), patch_size=4)
    with pytest.raises(DataError, match="1 good image; a threshold needs at least two"):
        train_anomaly_detector(images[:1], model)
    broken = random_model(image_size=(32, 48), patch_size=4)
    broken.blocks[0].norm1.weight.data[0] = torch.nan
    with pytest.raises(NotFiniteError, match="NaN or infinite"):
        train_anomaly_detector(images, broken)
    for wrong in ({"patches": 0}, {"false_alarms": 2}, {"tile": -1}, {"layers": [9]}):
        with pytest.raises(ConfigError):
            train_anomaly_detector(images, model, **wrong)
    findings = [ScoredImage(path, size=(48, 31)) for path in images_of(scene / "test")]
    with pytest.raises(DataError, match="the mask has 48 x 32 pixels, the image 48 x 31"):
        measure(findings, scene / "ground_truth")
    with pytest.raises(DataError, match="no image has a mask of its name"):
        find_masks([tmp_path / "a.png"], scene / "ground_truth")
    Image.new("L", (48, 32)).save(tmp_path / "0.png")
    with pytest.raises(DataError, match="the masks show no anomaly"):
        measure([ScoredImage("good/0.png", size=(48, 32))], tmp_path)
    same = [tmp_path / "a" / "0.png", tmp_path / "b" / "0.png"]
    with pytest.raises(DataError, match="two images have the same mask"):
        find_masks(same, scene / "ground_truth" / "square")
