"""Segmenters: a linear head on patch tokens, its measure, its files and its tiles."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from reference import random_model

from vitruvian.config import ResNetConfig
from vitruvian.errors import ConfigError, DataError
from vitruvian.explain.masks import IGNORED, open_masks
from vitruvian.explain.patches import require_patches, tile_boxes
from vitruvian.explain.segment import (
    Segmenter,
    class_iou,
    fit_head,
    segment_images,
    train_segmenter,
)
from vitruvian.model.build import build


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """Images of a bright and a dark part, masks of the dark part, and a model."""
    root = tmp_path_factory.mktemp("scene")
    (root / "images").mkdir()
    (root / "masks").mkdir()
    rng = np.random.default_rng(0)
    for index in range(6):
        mask = np.zeros((32, 48), np.uint8)
        mask[:, : 8 + 4 * index] = 1
        pixels = np.where(mask, 40, 210)[:, :, None] + rng.integers(-20, 20, (32, 48, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{index}.png")
        Image.fromarray(mask).save(root / "masks" / f"{index}.png")
    return root


def images_of(root):
    return sorted(map(str, (root / "images").iterdir()))


@pytest.fixture(scope="module")
def trained(scene):
    model = random_model(image_size=(32, 48), patch_size=4)
    return train_segmenter(images_of(scene), scene / "masks", model, classes=["background", "dark"])


def test_images_that_were_not_trained_on_are_segmented(trained):
    rows = {name: (value, ends) for name, value, ends in trained.iou()}
    assert list(rows) == ["background", "dark", "mean of the classes"]
    assert all(low <= value <= high for value, (low, high) in rows.values())
    assert rows["mean of the classes"][0] > 80
    assert list(trained.curve) == [1, 4]
    assert trained.curve[4] == rows["mean of the classes"][0]
    assert trained.confusions.sum() == 6 * 32 * 48


@pytest.mark.slow
def test_a_saved_segmenter_gives_the_same_masks(trained, scene, tmp_path):
    for _ in range(2):  # the second time, it replaces the first
        trained.save(tmp_path / "segmenter")
    loaded = Segmenter.load(tmp_path / "segmenter")
    image = images_of(scene)[0]
    np.testing.assert_array_equal(loaded.predict(image), trained.segmenter.predict(image))
    assert json.loads((tmp_path / "segmenter" / "segment.json").read_text())["images"] == 6
    page = (tmp_path / "segmenter" / "report.html").read_text()
    assert "the segmenter has a mean IoU of" in page
    settings = tmp_path / "segmenter" / "segmenter.json"
    stored = json.loads(settings.read_text())
    for change, reason in (
        ({"tile": "a"}, "not a complete segmenter: tile='a' is not an integer"),
        ({"layers": [0, 1, 99]}, "layer 99 does not exist"),
        ({"classes": ["a"]}, "the head does not fit the model"),
    ):
        settings.write_text(json.dumps(stored | change))
        with pytest.raises(DataError, match=reason):
            Segmenter.load(tmp_path / "segmenter")
    for break_head in (lambda head: head.write_bytes(b"broken"), lambda head: head.unlink()):
        break_head(tmp_path / "segmenter" / "head.safetensors")
        with pytest.raises(DataError, match="not a complete segmenter"):
            Segmenter.load(tmp_path / "segmenter")


def test_predictions_are_masks_and_overlays(trained, scene, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    first, broken = segment_images(trained.segmenter, [images_of(scene)[0], str(tmp_path / "broken.png")], tmp_path)
    assert sum(first["shares"].values()) == pytest.approx(1)
    assert "broken.png" in broken["error"]
    mask = open_masks(tmp_path / "masks", ["background", "dark"]).read(tmp_path / "0.jpg", (48, 32))
    np.testing.assert_array_equal(mask, trained.segmenter.predict(images_of(scene)[0]))
    with Image.open(first["overlay"]) as overlay:
        assert overlay.size == (288, 192)


@pytest.mark.parametrize("size", [(100, 30), (31, 200), (64, 64), (10, 10)])
def test_tiles_cover_the_image_and_have_one_size(size):
    covered = np.zeros(size[::-1], int)
    for left, top, right, bottom in tile_boxes(size, 32):
        assert (right - left, bottom - top) == (min(32, size[0]), min(32, size[1]))
        covered[top:bottom, left:right] += 1
    assert covered.min() == 1
    assert tile_boxes(size, None) == [(0, 0, *size)]


def test_a_large_image_is_segmented_in_tiles(scene):
    model = random_model(image_size=16, patch_size=4)
    found = train_segmenter(images_of(scene), scene / "masks", model, classes=["background", "dark"], tile=16)
    assert len(found.examples[0].parts) == 12
    assert found.iou()[-1][1] > 80


def test_ignored_pixels_change_neither_the_head_nor_the_measure(scene, tmp_path):
    model = random_model(image_size=(32, 48), patch_size=4)
    for index in range(6):
        mask = np.asarray(Image.open(scene / "masks" / f"{index}.png")).copy()
        mask[:, 44:] = IGNORED
        Image.fromarray(mask).save(tmp_path / f"{index}.png")
    found = train_segmenter(images_of(scene), tmp_path, model, classes=["background", "dark"])
    assert found.confusions.sum() == 6 * 32 * 44
    weight, _ = fit_head(found.examples, 2)
    torch.testing.assert_close(weight, found.segmenter.weight)
    assert torch.isfinite(weight).all()


def test_masks_of_a_few_strokes_train_a_head(scene, tmp_path):
    model = random_model(image_size=(32, 48), patch_size=4)
    for index in range(6):
        mask = np.asarray(Image.open(scene / "masks" / f"{index}.png"))
        strokes = np.full_like(mask, IGNORED)
        strokes[::8] = mask[::8]  # a quarter of each patch at most
        Image.fromarray(strokes).save(tmp_path / f"{index}.png")
    found = train_segmenter(images_of(scene), tmp_path, model, classes=["background", "dark"])
    assert found.iou()[-1][1] > 80


def test_iou_is_the_shared_part_of_the_union():
    values = class_iou(np.array([[6, 2, 0], [1, 3, 0], [0, 0, 0]]))
    np.testing.assert_allclose(values, [100 * 6 / 9, 100 * 3 / 6, np.nan, (100 * 6 / 9 + 50) / 2])


def test_a_single_mask_trains_and_is_not_measured(scene, tmp_path):
    model = random_model(image_size=(32, 48), patch_size=4)
    found = train_segmenter(images_of(scene)[:1], scene / "masks", model)
    assert found.notes == ("not measured: a single mask leaves no other image to measure on",)
    assert found.to_json()["iou"] == []
    assert "Not measured" in found.page()


def test_what_cannot_be_trained_on_is_named(scene, tmp_path):
    model = random_model(image_size=(32, 48), patch_size=4)
    with pytest.raises(ConfigError, match="this model has no patch tokens; use a Vision Transformer"):
        require_patches(build(ResNetConfig(image_size=32, stages=(1,), width=32, num_classes=2)))
    with pytest.raises(DataError, match="no image has a mask of its name"):
        train_segmenter([scene / "other.jpg"], scene / "masks", model)
    for index in range(2):
        Image.new("L", (48, 32)).save(tmp_path / f"{index}.png")
    with pytest.raises(DataError, match="the masks show only the class '0'; a segmenter needs two"):
        train_segmenter(images_of(scene), tmp_path, model)
