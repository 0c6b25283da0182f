"""ImageNet-C's corruptions: each stronger than the one before, repeatable, and by the published formulas."""

import numpy as np
import pytest
from colors import COLORS, make_colors, tiny_model
from PIL import Image
from scipy import ndimage

from vitruvian.errors import VitruvianError
from vitruvian.evaluation import corruptions
from vitruvian.evaluation.corruptions import CORRUPTIONS, corrupt_image, gaussian_blur, motion, zoom
from vitruvian.evaluation.evaluate import evaluate
from vitruvian.evaluation.report import write_evaluation


@pytest.fixture(scope="module")
def photo():
    """A picture with smooth shapes, edges and texture."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:300, :260] / 260
    levels = 0.4 + 0.3 * np.sin(9 * columns + 4 * rows)[..., None] * [1, 0.6, -0.5] + 0.2 * (rows > 0.5)[..., None]
    return Image.fromarray(((levels + 0.03 * rng.normal(size=(300, 260, 3))).clip(0, 1) * 255).astype(np.uint8))


def distance(photo, kind, strength):
    """How far an image is from the one without corruption, on average."""
    found = np.asarray(corrupt_image(photo, kind, strength, np.random.default_rng(strength)), np.float64)
    clean = np.asarray(corrupt_image(photo, "pixelate", 1, None), np.float64)
    return np.abs(found - clean).mean()


def test_there_are_15_kinds_of_5_strengths():
    assert len(CORRUPTIONS) == 15
    assert {len(parameters) for _, parameters in CORRUPTIONS.values()} == {5}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_changed_repeatably_and_more_at_the_highest_strength(photo, kind):
    first, again = (np.asarray(corrupt_image(photo, kind, 3, np.random.default_rng(0))) for _ in range(2))
    assert first.shape == (224, 224, 3)
    assert (first == again).all()
    # elastic transforms differ in kind, not in amount; frost darkens the image as it covers it
    if kind not in ("pixelate", "elastic_transform", "frost"):
        assert distance(photo, kind, 5) > distance(photo, kind, 1)


def test_blurs_are_those_of_scipy(photo):
    x = np.asarray(photo.resize((224, 224)), np.float64) / 255
    expected = ndimage.gaussian_filter(x, (1.5, 1.5, 0), mode="nearest")
    assert gaussian_blur(x, 1.5) == pytest.approx(expected, abs=1e-12)
    wide = ndimage.gaussian_filter(x, (100, 100, 0), mode="reflect", truncate=3.0)  # padded several times over
    assert gaussian_blur(x, 100, truncate=3.0, mode="symmetric") == pytest.approx(wide, abs=1e-12)
    part = x[37:187, 37:187]  # the center of 150 = ceil(224 / 1.5)
    enlarged = ndimage.zoom(part, (1.5, 1.5, 1), order=1)
    assert zoom(x, 1.5) == pytest.approx(enlarged[:224, :224], abs=1e-9)


def test_motion_is_a_half_gaussian_along_a_line():
    x = np.zeros((41, 41, 1))
    x[20, 20] = 1
    found = motion(x, 10, 3, 0.0)[..., 0]  # an image that looks to the right is moved to the left
    expected = np.exp(-(np.arange(21) ** 2) / 18)
    assert found[20, 20::-1] == pytest.approx(expected / expected.sum())
    assert found.sum() == pytest.approx(1)


def test_brightness_and_contrast_by_hand():
    x = np.array([[[0.2, 0.4, 0.1], [0.0, 0.0, 0.0]]])
    assert corruptions.brightness(x, 0.2, None) == pytest.approx(np.array([[[0.3, 0.6, 0.15], [0.2, 0.2, 0.2]]]))
    y = np.array([[[0.2] * 3, [0.6] * 3]])
    assert corruptions.contrast(y, 0.5, None) == pytest.approx(np.array([[[0.3] * 3, [0.5] * 3]]))


def test_a_model_is_measured_under_corruptions(tmp_path):
    photos = make_colors(tmp_path / "photos", {"train": 2, "test": 4})
    model = tiny_model()
    model.meta = model.meta.replace(labels=tuple(COLORS))
    found = evaluate(photos, model, corruptions=["brightness", "jpeg_compression"], sample=6)
    result = found.corruptions
    assert (list(result.kinds), result.count) == (["brightness", "jpeg_compression"], 6)
    assert result.mean == pytest.approx(np.mean([np.mean(values) for values in result.kinds.values()]))
    assert found.to_json()["corruptions"]["count"] == 6
    assert "Corruptions" in write_evaluation(found, tmp_path / "out").read_text()
    with pytest.raises(VitruvianError, match="unknown corruption 'snwo'; did you mean snow"):
        evaluate(photos, model, corruptions=["snwo"])
