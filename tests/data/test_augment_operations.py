"""Every operation on colors and places means what it means in Pillow."""

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from vitruvian.data import augment as ops
from vitruvian.data.augment import OPS, RAND_AUGMENT, rand_augment


def sample(mode="RGB"):
    y, x = np.mgrid[:50, :64]
    noise = np.random.default_rng(0).integers(0, 80, (50, 64))
    levels = np.stack([40 + 2 * x + noise // 2, 30 + 3 * y + noise // 4, 20 + noise * 2], axis=-1)
    return Image.fromarray(levels.clip(0, 240).astype(np.uint8)).convert(mode)


def difference(ours, pillow):
    return np.asarray(ours).astype(int) - np.asarray(pillow).astype(int)


EXACT = {
    "invert": (lambda x: OPS["invert"](x, 1, None), ImageOps.invert),
    "autocontrast": (ops.autocontrast, ImageOps.autocontrast),
    "equalize": (ops.equalize, ImageOps.equalize),
    "posterize to 1 bit": (lambda x: OPS["posterize"](x, 0.25, None), lambda p: ImageOps.posterize(p, 1)),
    "posterize to 4 bits": (lambda x: OPS["posterize"](x, 1, None), lambda p: ImageOps.posterize(p, 4)),
    "solarize from 0": (lambda x: OPS["solarize"](x, 0, None), lambda p: ImageOps.solarize(p, 0)),
    "solarize from 100": (lambda x: OPS["solarize"](x, 100 / 256, None), lambda p: ImageOps.solarize(p, 100)),
    "solarize from 256": (lambda x: OPS["solarize"](x, 1, None), lambda p: p),
    "solarize add": (
        lambda x: OPS["solarize_add"](x, 1, None),
        lambda p: p.point(lambda v: min(v + 110, 255) if v < 128 else v),
    ),
    "darker": (lambda x: ops.brightness(x, 0.37), lambda p: ImageEnhance.Brightness(p).enhance(0.37)),
    "brighter": (lambda x: ops.brightness(x, 1.9), lambda p: ImageEnhance.Brightness(p).enhance(1.9)),
    "less contrast": (lambda x: ops.contrast(x, 0.1), lambda p: ImageEnhance.Contrast(p).enhance(0.1)),
    "more contrast": (lambda x: ops.contrast(x, 1.9), lambda p: ImageEnhance.Contrast(p).enhance(1.9)),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_operations_on_single_values_equal_pillow(name, mode):
    ours, pillow = EXACT[name]
    image = sample(mode)
    assert not difference(ours(np.asarray(image)), pillow(image)).any()


@pytest.mark.parametrize("value", [0, 77, 255])
def test_a_image_of_one_color_has_no_contrast_to_stretch(value):
    flat = np.full((5, 6, 3), value, np.uint8)
    assert np.array_equal(ops.autocontrast(flat), flat)
    assert np.array_equal(ops.equalize(flat), flat)


@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.9])
def test_blends_equal_pillow_but_for_rounding(factor):
    image = sample()
    levels = np.asarray(image)
    # Pillow cuts off where OpenCV rounds; its luma differs by 1 now and then, which the factor 1.9 can double.
    assert abs(difference(ops.saturation(levels, factor), ImageEnhance.Color(image).enhance(factor))).max() <= 2
    assert abs(difference(ops.sharpness(levels, factor), ImageEnhance.Sharpness(image).enhance(factor))).max() <= 1


@pytest.mark.parametrize("turn", [0.0, 0.1, -0.3, 0.5])
def test_hue_turns_as_in_pillow(turn):
    hue, *rest = sample().convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(round(turn * 255) % 256))
    expected = Image.merge("HSV", (turned, *rest)).convert("RGB")
    # Both go through 8-bit hue, but round on other steps: up to 2 of 256 hues, at most 12 levels.
    found = difference(ops.hue(np.asarray(sample()), turn), expected)
    assert abs(found).max() <= 12
    assert abs(found).mean() < 1


@pytest.mark.parametrize(
    "matrix",
    [(1, 0.3, 0, 0, 1, 0), (1, -0.17, 0, 0, 1, 0), (1, 0, 0, 0.3, 1, 0), (1, 0, 9.3, 0, 1, 0), (1, 0, 0, 0, 1, -8)],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_moved_pixels_equal_pillow(matrix, mode):
    image = sample(mode)
    gray = (128,) * len(mode)
    expected = image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST, fillcolor=gray)
    assert not difference(ops.affine(np.asarray(image), matrix), expected).any()


@pytest.mark.parametrize("degrees", [30, -13])
def test_rotation_equals_pillow(degrees):
    expected = sample().rotate(degrees, fillcolor=(128, 128, 128))
    # A source exactly between two pixels may be rounded the other way.
    assert (difference(ops.rotate(np.asarray(sample()), degrees), expected) != 0).mean() < 0.005


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_enlarging_equals_pillow_but_for_rounding(interpolation):
    filters = Image.Resampling
    smooth = sample().resize((16, 12), filters.BOX)
    expected = smooth.resize((40, 30), getattr(filters, interpolation.upper()))
    ours = ops.resize_levels(np.asarray(smooth), (30, 40), interpolation)
    # bicubic: Pillow's kernel has a = -0.5, OpenCV's -0.75; lanczos: three lobes against four
    allowed = {"nearest": 0, "bilinear": 1, "bicubic": 8, "lanczos": 8}[interpolation]
    assert abs(difference(ours, expected)).max() <= allowed


def test_jitter_of_nothing_changes_nothing_and_stays_within_its_strength():
    levels = np.asarray(sample())
    assert np.array_equal(ops.color_jitter(levels, (0, 0, 0, 0), np.random.default_rng(0)), levels)
    means = [
        ops.color_jitter(levels, (0.2, 0, 0, 0), np.random.default_rng(i)).mean() / levels.mean() for i in range(200)
    ]
    assert 0.79 < min(means) < 0.82
    assert 1.18 < max(means) < 1.21


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_operation_gives_an_image_of_the_same_kind(name, mode):
    levels = np.asarray(sample(mode))
    for magnitude in (0.0, 5.0, 10.0):
        changed = OPS[name](levels, magnitude / 10, np.random.default_rng(0))
        assert changed.shape == levels.shape
        assert changed.dtype == np.uint8


def test_randaugment_has_the_operations_of_big_vision_and_uses_all_of_them(monkeypatch):
    used = set()
    for name in RAND_AUGMENT:
        monkeypatch.setitem(
            RAND_AUGMENT, name, lambda levels, strength, rng, name=name: used.add((name, strength)) or levels
        )
    for seed in range(40):
        rand_augment(np.asarray(sample()), 4, 9.0, np.random.default_rng(seed))
    assert used == {(name, 0.9) for name in RAND_AUGMENT}
    assert len(used) == 16


def test_shifts_and_holes_grow_with_the_view():
    white = np.full((224, 112), 255, np.uint8)
    shifted = OPS["translate_x"](white, 1.0, np.random.default_rng(0))
    assert (shifted[0] == 128).sum() == 50
    holes = [
        (OPS["cutout"](np.full((224, 224), 255, np.uint8), 1.0, np.random.default_rng(i)) == 128).sum()
        for i in range(30)
    ]
    assert max(holes) == 80 * 80
