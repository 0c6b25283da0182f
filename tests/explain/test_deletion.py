"""Deletion curves: what is removed, what is measured, and that gradient-weighted attention beats chance."""

import numpy as np
import pytest
import torch
from reference import random_model, random_pixels

from vitruvian.data.decode import decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError
from vitruvian.explain import Curve, deletion_curves, gradient_attention
from vitruvian.explain.deletion import cover_patches, rank_patches
from vitruvian.inference import Classifier


def test_the_highest_patch_goes_first_and_equal_ones_in_reading_order():
    assert rank_patches(torch.tensor([[0.1, 0.9, 0.1], [0.5, 0.9, 0.0]])).tolist() == [1, 4, 3, 0, 2, 5]


def test_removed_patches_have_the_views_mean_color_and_others_stay():
    pixels = torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(0))
    found = cover_patches(pixels, np.array([4]), (2, 3))
    mean = pixels.mean(dim=(1, 2))
    torch.testing.assert_close(found[:, 8:16, 8:16], mean[:, None, None].expand(3, 8, 8))
    kept = torch.ones(16, 24, dtype=torch.bool)
    kept[8:16, 8:16] = False
    assert torch.equal(found[:, kept], pixels[:, kept])


def test_the_area_of_a_falling_line_is_half_and_steps_are_trapezoids():
    assert Curve(np.array([0.0, 1.0]), np.array([1.0, 0.0])).area == 0.5
    assert Curve(np.array([0.0, 0.25, 1.0]), np.array([0.8, 0.4, 0.0])).area == pytest.approx(0.15 + 0.15)


def test_curves_start_at_the_answer_and_end_where_nothing_is_left():
    model = random_model()
    classifier = Classifier(model)
    pixels = random_pixels(model)[0]
    maps = {"up": torch.arange(6.0).view(2, 3), "down": -torch.arange(6.0).view(2, 3)}
    curves = deletion_curves(classifier, pixels, maps, 3)
    assert list(curves) == ["up", "down", "random"]
    blank = pixels.mean(dim=(1, 2), keepdim=True).expand_as(pixels)
    ends = classifier.logits(torch.stack([pixels, blank])).softmax(dim=-1)[:, 3].tolist()
    for curve in curves.values():
        assert curve.removed.tolist() == pytest.approx([i / 6 for i in range(7)])  # a grid of six has six steps
        assert [curve.probability[0], curve.probability[-1]] == pytest.approx(ends, abs=1e-6)
    half = classifier.logits(cover_patches(pixels, np.array([5, 4]), (2, 3))[None]).softmax(dim=-1)[0, 3]
    assert curves["up"].probability[2] == pytest.approx(float(half), abs=1e-6)


def test_random_orders_depend_on_the_seed_alone():
    model = random_model()
    pixels, maps = random_pixels(model)[0], {"map": torch.rand(2, 3)}
    areas = [deletion_curves(Classifier(model), pixels, maps, 0, seed=seed)["random"].area for seed in (0, 0, 1)]
    assert areas[0] == areas[1] != areas[2]


def test_maps_of_different_grids_are_refused():
    model = random_model()
    maps = {"a": torch.zeros(2, 3), "b": torch.zeros(3, 2)}
    with pytest.raises(ConfigError, match="maps of one image must have one shape"):
        deletion_curves(Classifier(model), random_pixels(model)[0], maps, 0)


@pytest.mark.slow
def test_class_maps_beat_random_deletion_on_imagenet_by_the_stated_margin(shared):
    classifier = Classifier(shared / "weights" / "vit_ti16_imagenet1k.safetensors")
    folders = sorted((shared / "data" / "imagenet-val-1000").iterdir())[::170]
    areas = []
    for folder in folders:
        pixels = apply_preprocess(decode(next(folder.iterdir())), classifier.model.meta.preprocess)
        index = int(classifier.logits(pixels[None]).argmax())
        maps = {"gradient": gradient_attention(classifier.model, pixels[None], [index])[0]}
        curves = deletion_curves(classifier, pixels, maps, index, steps=5)
        areas.append((curves["gradient"].area, curves["random"].area))
    found, random = np.mean(areas, axis=0)
    assert len(areas) == 6
    assert random - found > 0.15
