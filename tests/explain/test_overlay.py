"""Overlays: colors in even steps, maps in their place, the crop marked."""

import numpy as np
import pytest
from PIL import Image

from vitruvian.config import Preprocess
from vitruvian.explain import image_with_crop, overlay, seen_box
from vitruvian.explain.figures import grid_of_grids, tile_images
from vitruvian.explain.overlay import stretch
from vitruvian.report.color import apply_color_map, color_map

CROP = Preprocess(image_size=224, fit="crop", scaled_size=256)
SQUASH = Preprocess(image_size=224, fit="squash")


def lightness(rgb):
    """CIE L* of sRGB colors."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16


# Machado, Oliveira and Fernandes (2009), severity 1: what is seen without one kind of cone, in linear RGB.
BLINDNESS = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def test_lightness_rises_in_even_steps():
    steps = np.diff(lightness(color_map()[::15] / 255.0))
    assert steps.min() > 0
    assert steps.max() < 1.6 * steps.min()


@pytest.mark.parametrize("matrix", BLINDNESS.values(), ids=BLINDNESS)
def test_lightness_rises_for_color_blind_eyes_too(matrix):
    colors = color_map()[::15] / 255.0
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    seen = (linear @ np.array(matrix).T).clip(0, 1)
    assert np.diff(116 * np.cbrt(seen @ [0.2126, 0.7152, 0.0722])).min() > 0


def test_values_are_stretched_to_all_colors_and_a_flat_map_takes_the_lowest():
    assert stretch(np.array([2.0, 3.0, 6.0])).tolist() == [0, 0.25, 1]
    assert stretch(np.full((2, 2), 5.0)).tolist() == [[0, 0], [0, 0]]
    ends = apply_color_map(np.array([-9.0, 0.0, 1.0, 9.0]))
    assert ends.tolist() == [color_map()[0].tolist()] * 2 + [color_map()[255].tolist()] * 2


def test_the_seen_box_is_the_crop_in_the_images_own_pixels():
    assert seen_box((512, 1024), CROP) == (288, 32, 736, 480)  # 7/8 of the height, centered
    assert seen_box((1024, 512), CROP) == (32, 288, 480, 736)
    assert seen_box((300, 700), SQUASH) == (0, 0, 700, 300)


@pytest.mark.parametrize("size", [(640, 320), (320, 640), (400, 300), (1, 600)])
def test_overlays_keep_the_images_size(size):
    image = Image.new("RGB", size, "gray")
    assert overlay(image, np.eye(4), CROP).size == size
    assert image_with_crop(image, CROP).size == size


def test_large_images_are_reduced_and_tiny_ones_enlarged_at_their_aspect_ratio():
    assert overlay(Image.new("RGB", (6400, 3200)), np.eye(4), CROP).size == (640, 320)
    assert overlay(Image.new("RGB", (8, 4)), np.eye(4), CROP).size == (256, 128)


def test_the_top_patch_is_bright_in_its_place_and_nothing_is_apply_color_map_outside_the_crop():
    values = np.zeros((14, 14))
    values[3, 10] = 1
    image = Image.new("RGB", (600, 400), (200, 120, 60))
    pixels = np.asarray(overlay(image, values, CROP)).astype(int)
    left, top, right, bottom = seen_box((400, 600), CROP)
    assert (left, top, right, bottom) == pytest.approx((125, 25, 475, 375), abs=1)
    inside = pixels[30:370, 130:470, 1]  # green tells yellow from violet
    row, column = np.unravel_index(inside.argmax(), inside.shape)
    assert abs(row + 30 - (top + 3.5 * 25)) <= 13  # half a patch of 25 pixels
    assert abs(column + 130 - (left + 10.5 * 25)) <= 13
    outside = pixels[:, : int(left) - 4]
    assert (np.ptp(outside, axis=2) == 0).all()
    assert outside.max() < 80


def test_the_crop_is_framed_and_a_whole_view_is_not():
    image = Image.new("RGB", (400, 400), (90, 90, 90))
    framed = np.asarray(image_with_crop(image, CROP))
    assert framed[25, 200].tolist() == [255, 255, 255]
    assert framed[200, 200].tolist() == [90, 90, 90]
    assert (np.asarray(image_with_crop(image, SQUASH)) == 90).all()


def test_the_patch_a_map_looks_from_is_framed():
    image = Image.new("RGB", (400, 400), (90, 90, 90))
    marked = np.asarray(overlay(image, np.zeros((4, 4)), SQUASH, patch=(1, 2)))
    white = np.argwhere((marked == 255).all(axis=2))
    assert white.min(axis=0).tolist() == [100, 200]
    assert white.max(axis=0).tolist() == [199, 299]


def test_drawings_have_a_place_for_every_number():
    assert tile_images(np.zeros((28, 16, 16, 3), np.uint8), 7).size == (7 * 70 + 18, 4 * 70 + 18)
    assert tile_images(np.zeros((3, 16, 16, 3), np.uint8), 7).width == 3 * 70 + 18
    assert max(grid_of_grids(np.zeros((37, 37, 37, 37)), 0, 1).size) < 1600
    assert grid_of_grids(np.zeros((1, 1, 1, 1)), 0, 1).width > 200
