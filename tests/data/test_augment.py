"""Training views: what they depend on, what they leave alone, and how they deal with odd images."""

import io
import itertools
import json
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvian.config import Preprocess
from vitruvian.data.augment import Augment, inception_box, normalize_batch, random_resized_box, train_transform
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.errors import ConfigError, ImageError, MissingExtraError, UnknownNameError

EVERYTHING = Augment(
    image_size=(24, 32),
    rand_augment=2,
    color_jitter=(0.4, 0.4, 0.4, 0.1),
    random_erasing=0.5,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
)


def levels(rows=60, columns=90, channels=3):
    return np.random.default_rng(0).integers(0, 256, (rows, columns, channels)[: 2 + (channels > 1)], dtype=np.uint8)


def encoded(array, kind="JPEG", **options):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def rng(*numbers):
    return np.random.default_rng(numbers or (0,))


def plain(size, **changes):
    return train_transform(Augment(image_size=size, crop="none", hflip=0.0, **changes))


def test_a_view_depends_on_image_settings_and_generator_alone():
    view, other = train_transform(EVERYTHING), pickle.loads(pickle.dumps(train_transform(EVERYTHING)))
    data = encoded(levels(), quality=95)
    first = [view(data, rng(0, 3, i)) for i in range(40)]
    again = [other(data, rng(0, 3, i)) for i in reversed(range(40))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(first))


def test_a_view_has_the_size_and_kind_that_the_settings_say():
    for channels in (1, 3):
        settings = EVERYTHING.replace(mean=(0.5,) * channels, std=(0.5,) * channels)
        for image in (levels(), levels(channels=1), encoded(levels()), Image.fromarray(levels())):
            view = train_transform(settings)(image, rng())
            assert view.shape == (channels, 24, 32)
            assert view.dtype == torch.float32
            assert view.is_contiguous()
            assert view.abs().max() <= 1


@pytest.mark.parametrize("crop", ["inception", "resized", "pad", "center", "none"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 5), (33, 64)])
def test_images_of_any_shape_have_a_view(shape, crop):
    for image in (levels(*shape), encoded(levels(*shape))):
        for seed in range(5):
            assert train_transform(EVERYTHING.replace(crop=crop))(image, rng(seed)).shape == (3, 24, 32)


def test_uint8_views_normalized_later_equal_float_views():
    later = EVERYTHING.replace(output="uint8")
    small = train_transform(later)(levels(), rng(1))
    assert small.dtype == torch.uint8
    assert torch.equal(normalize_batch(small, later), train_transform(EVERYTHING)(levels(), rng(1)))


def test_an_unchanged_image_has_the_values_of_the_apply_preprocess():
    mean, std = EVERYTHING.mean, EVERYTHING.std
    expected = apply_preprocess(Image.fromarray(levels(8, 9)), Preprocess(image_size=(8, 9), mean=mean, std=std))
    assert torch.equal(plain((8, 9), mean=mean, std=std)(levels(8, 9), rng()), expected)


@pytest.mark.parametrize(
    "change", [{"random_erasing": 1.0}, {"rand_augment": 4}, {"crop": "pad", "random_erasing": 1.0}]
)
def test_the_image_given_stays_as_it_was(change):
    view = train_transform(Augment(**{"image_size": (16, 16), "crop": "none", "hflip": 0.0} | change))
    image = levels(16, 16)
    for seed in range(50):
        view.levels(image, rng(seed))
    assert np.array_equal(image, levels(16, 16))


def test_gray_becomes_three_equal_channels_and_color_becomes_luma():
    three = plain((6, 7))(levels(6, 7, channels=1), rng())
    assert torch.equal(three, three[:1].expand(3, -1, -1))
    one = plain((6, 7), mean=(0.0,), std=(1.0,))(levels(6, 7), rng())
    luma = torch.from_numpy(levels(6, 7) @ np.array([0.299, 0.587, 0.114])).float() / 255
    assert torch.allclose(one[0], luma, atol=0.51 / 255 + 1e-6)  # rounded to whole levels


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
def test_other_formats_are_read_too(kind):
    flat = np.full((20, 30, 3), 85, np.uint8)
    assert torch.allclose(plain((10, 10))(encoded(flat, kind), rng()), torch.tensor(85 / 127.5 - 1), atol=2 / 127.5)


def test_cmyk_and_transparent_images_are_seen_as_rgb():
    cmyk, clear = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (9, 9), (255, 0, 0)).convert("CMYK").save(cmyk, "JPEG", quality=100)
    Image.new("RGBA", (9, 9), (0, 0, 0, 0)).save(clear, "PNG")
    red = plain((4, 4))(cmyk.getvalue(), rng()).mean((1, 2))
    assert torch.allclose(red, torch.tensor([1.0, -1.0, -1.0]), atol=0.05)
    assert torch.equal(plain((4, 4))(clear.getvalue(), rng()), torch.ones(3, 4, 4))


def test_a_view_shows_a_rotated_photograph_upright():
    stored, exif = np.zeros((40, 60, 3), np.uint8), Image.Exif()
    stored[:, :30] = 255  # the left half as stored is the upper half of the upright image
    exif[0x0112] = 6
    view = plain((10, 10))(encoded(stored, exif=exif), rng())
    assert view[:, :4].min() > 0.9
    assert view[:, 6:].max() < -0.9


def test_a_large_image_is_averaged_not_sampled():
    noise = levels(512, 512)  # a standard deviation of 74 levels, and a sixteenth of it after averaging 16 x 16
    for image in (noise, encoded(noise, quality=95), encoded(noise, "PNG")):
        assert plain((32, 32))(image, rng()).std() < 6 / 127.5


def test_pad_shows_the_whole_range_of_positions_and_black_beyond():
    image = np.full((8, 8), 255, np.uint8)
    settings = Augment(image_size=(8, 8), crop="pad", padding=2, hflip=0.0, mean=(0.0,), std=(1.0,))
    seen = {
        tuple((train_transform(settings)(image, rng(i))[0].sum(d) > 0).nonzero()[0].item() for d in (0, 1))
        for i in range(200)
    }
    assert seen == {(x, y) for x in range(3) for y in range(3)}
    assert train_transform(settings.replace(padding_mode="reflect"))(image, rng()).min() == 1


def test_pad_scales_a_image_to_just_cover_the_view():
    wide = np.zeros((10, 40), np.uint8)
    wide[:, 20:] = 255
    settings = Augment(image_size=(20, 20), crop="pad", padding=0, hflip=0.0, mean=(0.0,), std=(1.0,))
    shares = [train_transform(settings)(wide, rng(i)).mean().item() for i in range(200)]
    assert min(shares) == 0
    assert max(shares) == 1


def test_flip_mirrors_as_often_as_it_says():
    settings = Augment(image_size=(6, 7), crop="none", hflip=0.25)
    straight = plain((6, 7))(levels(6, 7), rng())
    views = [train_transform(settings)(levels(6, 7), rng(i)) for i in range(400)]
    mirrored = sum(torch.equal(view, straight.flip(2)) for view in views)
    assert mirrored + sum(torch.equal(view, straight) for view in views) == 400
    assert 70 <= mirrored <= 130  # 100, give or take 3.5 standard deviations


def test_erasing_changes_one_rectangle_of_the_stated_area():
    before = plain((40, 40))(levels(40, 40), rng())
    for seed in range(30):
        after = train_transform(Augment(image_size=(40, 40), crop="none", hflip=0.0, random_erasing=1.0))(
            levels(40, 40), rng(seed)
        )
        rows, columns = (before != after).any(0).nonzero(as_tuple=True)
        area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)
        assert 0.01 <= area / 1600 <= 0.36  # 0.02 to 1/3, with sides in whole pixels


def boxes(draw, area, ratio=(3 / 4, 4 / 3), size=(300, 400), count=3000):
    generator = rng(1)
    found = np.array([draw(size, area, ratio, generator) for _ in range(count)])
    top, left, rows, columns = found.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + rows <= size[0]).all()
    assert (left + columns <= size[1]).all()
    return rows, columns, rows * columns / (size[0] * size[1])


@pytest.mark.parametrize("draw", [inception_box, random_resized_box])
def test_random_parts_keep_to_image_area_and_ratio(draw):
    rows, columns, share = boxes(draw, (0.05, 0.9))
    assert share.min() >= 0.05 * 0.97
    assert share.max() <= 0.9 * 1.01
    assert (abs(np.log(columns / rows)) <= np.log(4 / 3) + 2 / rows).all()  # sides are whole pixels


def test_the_two_ways_to_draw_a_part_differ_as_their_sources_do():
    # Small enough areas fit in every shape, so nothing is drawn again: uniform area, or uniform height.
    uniform_area = boxes(random_resized_box, (0.04, 0.36))[2].mean()
    uniform_height = boxes(inception_box, (0.04, 0.36))[2].mean()
    assert uniform_area == pytest.approx(0.20, abs=0.005)
    # of sides uniform between 0.2 and 0.6: (0.6^3 - 0.2^3) / 3 / 0.4
    assert uniform_height == pytest.approx(0.1733, abs=0.005)


def test_where_no_part_fits_the_whole_or_the_middle_is_taken():
    area, ratio = (0.5, 1.0), (3 / 4, 4 / 3)
    assert inception_box((10, 300), area, ratio, rng()) == (0, 0, 10, 300)
    assert random_resized_box((10, 300), area, ratio, rng()) == (0, 143, 10, 13)
    assert random_resized_box((300, 10), area, ratio, rng()) == (143, 0, 13, 10)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"crop": "five"}, "crop='five' is not one of inception, resized, pad, random, center, none"),
        ({"scale": (0.5, 0.2)}, "scale=(0.5, 0.2) is not (minimum, maximum) between 0.0001 and 1.0"),
        ({"ratio": (0.0, 1.0)}, "ratio=(0.0, 1.0) is not (minimum, maximum) between 0.01 and 100.0"),
        ({"hflip": 2.0}, "hflip=2.0 is not between 0.0 and 1.0"),
        ({"padding": -1}, "padding=-1 is not between 0 and 1024"),
        ({"padding_mode": "white"}, "padding_mode='white' is not one of constant, reflect"),
        ({"rand_augment_magnitude": 25.0}, "rand_augment_magnitude=25.0 is not between 0.0 and 20.0"),
        ({"color_jitter": (0.1, 0.1)}, "color_jitter=[0.1, 0.1] does not have 4 values"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.9)}, "color_jitter hue=0.9 is not between 0.0 and 0.5"),
        ({"mean": (0.5, 0.5)}, "mean=(0.5, 0.5) and std=(0.5, 0.5, 0.5) need one value for each of 1 or 3 channels"),
        ({"output": "float16"}, "output='float16' is not one of float32, uint8"),
        ({"mixup_alpha": -1.0}, "mixup_alpha=-1.0 is not between 0.0 and 1000000.0"),
        ({"image_size": 0}, "image_size=0 is not a positive number or (rows, columns)"),
        ({"interpolation": "linear"}, "interpolation='linear' is not one of"),
        (
            {"ops": (("gausian_blur", 1.0, 1.0),)},
            "unknown operation in augment.ops 'gausian_blur'; did you mean gaussian_blur",
        ),
        ({"ops": (("grayscale", 1.5, 1.0),)}, "ops=1.5 is not between 0.0 and 1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, text):
    with pytest.raises(ConfigError) as caught:
        Augment(**change)
    assert text in str(caught.value)


def test_further_operations_come_up_as_often_as_they_should():
    settings = Augment(image_size=(6, 7), crop="none", hflip=0.0, ops=(("grayscale", 0.25, 1.0),))
    colored = levels(6, 7)
    views = [train_transform(settings)(colored, rng(seed)) for seed in range(200)]
    gray = sum(bool((view == view[:1]).all()) for view in views)
    assert 35 < gray < 65


def test_settings_survive_json():
    assert Augment.from_json(json.loads(json.dumps(EVERYTHING.to_json()))) == EVERYTHING
    with pytest.raises(UnknownNameError, match="rand_augment"):
        Augment.from_json({"randaugment_layer": 2})


@pytest.mark.parametrize("array", [np.zeros((4, 4)), np.zeros((4, 4, 4), np.uint8), np.zeros((0, 4), np.uint8)])
def test_an_array_that_is_no_image_is_said_so(array):
    with pytest.raises(ImageError, match="is not an image; expected uint8"):
        plain((4, 4))(array, rng())


@pytest.mark.parametrize("data", [b"", b"text", encoded(levels(), "PNG")[:500], encoded(levels())[:900]])
def test_unreadable_bytes_are_an_image_error(data):
    with pytest.raises(ImageError):
        plain((4, 4))(data, rng())


def test_a_missing_package_is_said_before_training_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[train\]'"):
        train_transform(Augment())
