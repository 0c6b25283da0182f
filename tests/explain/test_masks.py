"""Masks: indices, colors and COCO polygons."""

import json
from itertools import chain

import cv2
import numpy as np
import pytest
from PIL import Image

from vitruvian.errors import DataError
from vitruvian.explain.masks import IGNORED, CocoPolygons, open_masks


def save(path, pixels):
    Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def test_indices_are_classes_and_255_counts_for_none(tmp_path):
    save(tmp_path / "a.png", [[0, 2], [255, 0]])
    (tmp_path / "._a.png").write_bytes(b"metadata")  # hidden, as beside some masks of Pets
    masks = open_masks(tmp_path)
    assert masks.classes == ("0", "2")
    assert masks.read(tmp_path / "a.jpg", (2, 2)).tolist() == [[0, 1], [IGNORED, 0]]
    named = open_masks(tmp_path, ["ground", "cat", "dog"])
    assert named.read(tmp_path / "a.jpg", (2, 2)).tolist() == [[0, 2], [IGNORED, 0]]


def test_colors_are_classes(tmp_path):
    save(tmp_path / "a.png", [[(0, 0, 0), (255, 136, 0)]])
    assert open_masks(tmp_path).classes == ("#000000", "#ff8800")
    masks = open_masks(tmp_path, ["cat=#ff8800", "background = #000000"])
    assert masks.classes == ("cat", "background")
    assert masks.read(tmp_path / "a.jpg", (2, 1)).tolist() == [[1, 0]]


def test_polygons_are_drawn_over_the_background_in_their_order(tmp_path):
    square, corner = [0, 0, 3, 0, 3, 3, 0, 3], [0, 0, 1, 0, 1, 1, 0, 1]
    content = {
        "categories": [{"id": 7, "name": "head"}, {"id": 3, "name": "body"}],
        "images": [{"id": 1, "file_name": "x/a.jpg", "width": 6, "height": 5}],
        "annotations": [
            {"image_id": 1, "category_id": 3, "segmentation": [square]},
            {"image_id": 1, "category_id": 7, "segmentation": [corner]},
        ],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    masks = open_masks(tmp_path / "coco.json")
    assert masks.classes == ("background", "body", "head")
    mask = masks.read(tmp_path / "a.jpg", (6, 5))
    assert np.bincount(mask.ravel()).tolist() == [14, 12, 4]
    content["annotations"][0]["segmentation"] = {"counts": [1], "size": [5, 6]}
    (tmp_path / "coco.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="a has a run-length mask; convert it to polygons or PNG files"):
        open_masks(tmp_path / "coco.json").read(tmp_path / "a.jpg", (6, 5))
    content["annotations"][0]["segmentation"] = [[1, 2, 3]]
    (tmp_path / "coco.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="a has an invalid polygon"):
        open_masks(tmp_path / "coco.json").read(tmp_path / "a.jpg", (6, 5))


@pytest.mark.parametrize(
    ("pixels", "classes", "reason"),
    [
        ([[0, 9]], ["a", "b"], r"index 9 is none of the classes \(a, b\)"),
        ([[(1, 2, 3)]], ["a=#000000"], r"color #010203 is none of the classes \(a\)"),
        ([[(1, 2, 3)]], ["a=red"], "class 'a' needs a color such as #ff8800, not 'red'"),
        ([[0, 0, 0]], [], "the mask has 3 x 1 pixels, the image 2 x 1"),
        ([range(80)], [], "the masks have 80 colors or indices, more than 64; were they smoothed?"),
    ],
)
def test_what_a_mask_must_not_show_is_named(pixels, classes, reason, tmp_path):
    save(tmp_path / "a.png", [list(row) for row in pixels])
    with pytest.raises(DataError, match=reason):
        open_masks(tmp_path, classes).read(tmp_path / "a.jpg", (2, 1))


def test_two_masks_of_one_name_are_refused(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "a.png", [[0, 1]])
    with pytest.raises(DataError, match="two masks are called 'a'"):
        open_masks(tmp_path)
    assert open_masks(tmp_path / "val").classes == ("0", "1")


def test_gray_masks_may_have_an_alpha_channel(tmp_path):
    Image.fromarray(np.array([[0, 1]], np.uint8)).convert("LA").save(tmp_path / "a.png")
    assert open_masks(tmp_path).read(tmp_path / "a.jpg", (2, 1)).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("size", "polygon", "classes", "reason"),
    [
        (2, [0, 0, 1], 1, "a has an invalid polygon or size"),
        (2, [0, "x", 1, 1], 1, "a has an invalid polygon or size"),
        ("2", [0, 0, 1, 1, 1, 0], 1, "a has an invalid polygon or size"),
        (2, [0, 0, 1, 1, 1, 0], 255, "256 classes, at most 255 are possible"),
    ],
)
def test_invalid_polygons_and_too_many_classes_are_named(size, polygon, classes, reason, tmp_path):
    content = {
        "categories": [{"id": index, "name": str(index)} for index in range(classes)],
        "images": [{"id": 1, "file_name": "a.jpg", "width": size, "height": 2}],
        "annotations": [{"image_id": 1, "category_id": 0, "segmentation": [polygon]}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=reason):
        open_masks(tmp_path / "coco.json").read(tmp_path / "a.jpg", (2, 2))


def test_missing_and_damaged_masks_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no masks \(\*.png\) in this folder or below it; give a folder"):
        open_masks(tmp_path)
    (tmp_path / "coco.json").write_text('{"images": []}')
    with pytest.raises(DataError, match="not COCO polygons: 'categories' is missing"):
        open_masks(tmp_path / "coco.json")
    (tmp_path / "a.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(DataError, match=r"a.png: damaged mask: "):
        open_masks(tmp_path)


@pytest.mark.parametrize("smooth", [0.1, 1.0, 4.0])
def test_polygons_that_are_written_are_read_as_the_same_mask(smooth, tmp_path):
    """Also regions with holes, of a single pixel, and in one another."""
    rng, masks, written = np.random.default_rng(0), {}, CocoPolygons(["background", "b", "c"])
    for name in ("0.png", "1.png", "2.png"):
        noise = cv2.GaussianBlur(rng.normal(size=(40, 60)).astype(np.float32), (0, 0), smooth)
        masks[name] = np.digitize(noise, np.quantile(noise, [0.4, 0.7])).astype(np.uint8)
        written.add(name, masks[name])
    (tmp_path / "coco.json").write_text(json.dumps(written.to_json()))
    opened = open_masks(tmp_path / "coco.json")
    assert opened.classes == ("background", "b", "c")
    for name, mask in masks.items():
        np.testing.assert_array_equal(opened.read(tmp_path / name, (60, 40)), mask)
    annotation = written.to_json()["annotations"][0]
    left, top, width, height = annotation["bbox"]
    x, y = np.array(list(chain(*annotation["segmentation"]))).reshape(-1, 2).T
    assert (x.min(), y.min(), x.max(), y.max()) == (left, top, left + width - 1, top + height - 1)
    assert sum(each["area"] for each in written.to_json()["annotations"]) == sum((m > 0).sum() for m in masks.values())
