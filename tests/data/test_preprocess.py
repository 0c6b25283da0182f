"""Evaluation preprocessing: the numbers of torchvision, timm, transformers and TensorFlow."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitruvian
from vitruvian.config import IMAGENET_MEAN, IMAGENET_STD, ModelMeta, Preprocess
from vitruvian.data import preprocess
from vitruvian.data.preprocess import apply_preprocess, cover_size, preprocess_image
from vitruvian.data.transform import EvalTransform, as_transform
from vitruvian.errors import ConfigError, ImageError
from vitruvian.machine import peak_megabytes, reset_peak_memory


def noise(rows: int, columns: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8))


def levels(pixels: torch.Tensor) -> list[list[int]]:
    """The first channel as 8-bit values, from pixels normalized with mean and std 0.5."""
    return (pixels[0] * 127.5 + 127.5).round().int().tolist()


def golden_image() -> Image.Image:
    rows, columns = np.mgrid[0:9, 0:13]
    level = (rows * rows * 3 + columns * 17 + (rows * columns) % 5 * 20) % 256
    return Image.fromarray(np.stack([level, 255 - level, level // 2], -1).astype(np.uint8))


def test_cropping_gives_the_values_of_torchvision():
    seen = apply_preprocess(
        golden_image(), Preprocess(image_size=6, fit="crop", scaled_size=7, interpolation="bicubic")
    )
    assert levels(seen) == [  # Resize(7, BICUBIC), CenterCrop(6) of torchvision 0.28
        [60, 85, 92, 118, 150, 170],
        [104, 134, 105, 170, 193, 214],
        [124, 130, 133, 184, 214, 219],
        [135, 137, 164, 226, 233, 239],
        [153, 111, 188, 160, 153, 188],
        [174, 65, 191, 68, 40, 67],
    ]


def test_squashing_gives_the_values_of_torchvision():
    assert levels(apply_preprocess(golden_image(), Preprocess(image_size=6))) == [  # Resize((6, 6), BILINEAR)
        [21, 67, 95, 138, 176, 201],
        [50, 107, 122, 180, 203, 172],
        [81, 128, 144, 203, 202, 124],
        [100, 131, 157, 193, 192, 68],
        [134, 139, 143, 88, 81, 87],
        [133, 112, 78, 90, 112, 149],
    ]


@pytest.mark.parametrize("size", [(50, 70), (224, 224), (300, 500)])
def test_the_default_view_is_that_of_transformers_bit_for_bit(size):
    pil_vit = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
    image = noise(*size)
    theirs = pil_vit.ViTImageProcessorPil()(image)["pixel_values"][0]
    assert np.array_equal(apply_preprocess(image, Preprocess()).numpy(), theirs)


@pytest.mark.parametrize("interpolation", preprocess.FILTERS)
@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_a_image_of_the_right_size_is_only_normalized(interpolation, fit):
    image = noise(8, 6)
    settings = Preprocess(image_size=(8, 6), fit=fit, interpolation=interpolation, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    plain = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    assert torch.equal(apply_preprocess(image, settings), (plain - mean[:, None, None]) / std[:, None, None])


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (37, 91)])
def test_a_constant_image_stays_constant(size, antialias):
    image = Image.new("RGB", size, (255, 0, 51))
    settings = Preprocess(image_size=16, fit="crop", scaled_size=20, antialias=antialias)
    expected = torch.tensor([1.0, -1.0, -0.6])[:, None, None].expand(3, 16, 16)
    torch.testing.assert_close(apply_preprocess(image, settings), expected)  # 51 / 255 has no exact float


def test_the_crop_keeps_the_center():
    image = Image.new("L", (30, 10))
    image.paste(255, (10, 0, 20, 10))
    assert apply_preprocess(image.convert("RGB"), Preprocess(image_size=10, fit="crop")).min() == 1.0


def test_odd_margins_are_rounded_as_torchvision_rounds_them():
    for length, first in ((9, 2), (11, 4)):  # int(round(2.5)) is 2, int(round(3.5)) is 4
        ramp = Image.fromarray(np.tile(np.arange(length, dtype=np.uint8), (4, 1))).convert("RGB")
        wide = apply_preprocess(ramp, Preprocess(image_size=4, fit="crop"))
        tall = apply_preprocess(ramp.transpose(Image.Transpose.TRANSPOSE), Preprocess(image_size=4, fit="crop"))
        assert levels(wide)[0] == [first, first + 1, first + 2, first + 3]
        assert torch.equal(tall, wide.transpose(1, 2))


@pytest.mark.parametrize("interpolation", preprocess.FILTERS)
def test_a_crop_is_pillows_whole_resize_and_its_center(interpolation):
    settings = Preprocess(image_size=224, fit="crop", scaled_size=248, interpolation=interpolation)
    whole = noise(375, 500).resize((330, 248), preprocess.FILTERS[interpolation])
    plain = torch.from_numpy(np.array(whole.crop((53, 12, 277, 236)))).permute(2, 0, 1)
    assert torch.equal(apply_preprocess(noise(375, 500), settings), (plain / 255 - 0.5) / 0.5)


@pytest.mark.parametrize(
    ("size", "target", "expected"),
    [
        ((375, 500), (256, 256), (256, 341)),  # 341.33
        ((500, 375), (248, 248), (330, 248)),  # 330.67: torchvision cuts
        ((500, 375), (284, 213), (284, 213)),
        ((300, 500), (284, 213), (284, 473)),  # 473.33
        ((400, 300), (100, 150), (200, 150)),
        ((300, 401), (100, 100), (100, 133)),
        ((300, 401), (100, 50), (100, 134)),  # 133.67: timm rounds
        ((1, 1000), (8, 8), (8, 8000)),
    ],
)
def test_the_scaled_size_just_covers_the_target(size, target, expected):
    assert cover_size(size, target) == expected


@pytest.mark.parametrize("size", [(40, 60), (9, 7), (224, 100)])
def test_without_antialias_the_view_is_a_plain_bilinear_sample(size):
    image = noise(*size)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
    plain = F.interpolate(pixels, (16, 24), mode="bilinear", align_corners=False)[0] / 127.5 - 1
    seen = apply_preprocess(image, Preprocess(image_size=(16, 24), antialias=False))
    torch.testing.assert_close(seen, plain, rtol=0, atol=2e-5)  # positions are float32 in both, steps differ by one ulp
    assert not torch.equal(seen, apply_preprocess(image, Preprocess(image_size=(16, 24))))


def test_without_antialias_values_are_not_rounded_to_8_bits():
    image = Image.fromarray(np.array([[[0] * 3, [1] * 3]], np.uint8))
    seen = apply_preprocess(image, Preprocess(image_size=(1, 4), antialias=False))
    torch.testing.assert_close(seen[0, 0] * 127.5 + 127.5, torch.tensor([0.0, 0.25, 0.75, 1.0]), atol=1e-4, rtol=0)


def test_a_linear_ramp_stays_linear_without_antialias():
    ramp = Image.fromarray(np.tile(np.arange(0, 256, 4, dtype=np.uint8), (4, 1))).convert("RGB")
    inner = apply_preprocess(ramp, Preprocess(image_size=(4, 32), antialias=False))[0, 0, 1:-1].diff()
    torch.testing.assert_close(inner, torch.full((29,), 8 / 127.5), atol=1e-5, rtol=0)


def test_a_gray_model_gets_one_channel():
    seen = apply_preprocess(Image.new("RGB", (5, 5), (10, 20, 30)), Preprocess(image_size=4, mean=(0.0,), std=(1.0,)))
    assert seen.shape == (1, 4, 4)
    assert torch.equal(seen * 255, torch.full((1, 4, 4), 18.0))  # 0.299 R + 0.587 G + 0.114 B


@pytest.mark.parametrize("size", [(3, 200), (200, 3)])
@pytest.mark.parametrize("fit", ["crop", "squash"])
def test_images_too_long_to_be_resized_whole_give_nearly_the_same_view(monkeypatch, size, fit):
    settings = Preprocess(image_size=16, fit=fit, interpolation="bicubic")
    rows, columns = np.mgrid[0 : size[0], 0 : size[1]]
    image = Image.fromarray((rows + columns).astype(np.uint8)).convert("RGB")
    whole = apply_preprocess(image, settings)
    monkeypatch.setattr(preprocess, "LARGEST_RESIZE", 100)
    assert (apply_preprocess(image, settings) - whole).abs().max() <= 2.1 / 127.5  # two roundings to 8 bits


def test_an_endless_strip_takes_little_memory():
    strip = Image.new("RGB", (400_000, 1), (255, 255, 255))
    settings = Preprocess(image_size=224, fit="crop", scaled_size=248)  # the whole would be 248 x 99 million
    assert apply_preprocess(strip, settings).min() == 1.0
    assert apply_preprocess(strip.transpose(Image.Transpose.ROTATE_90), settings).min() == 1.0


def test_a_short_line_of_pixels_takes_little_memory():
    reset_peak_memory()
    before = peak_megabytes() or 0.0
    apply_preprocess(Image.new("RGB", (2000, 1)), Preprocess(image_size=224, fit="crop"))  # 448,000 x 224 as a whole
    assert (peak_megabytes() or 0.0) < before + 100


def test_what_a_image_cannot_give_is_refused():
    with pytest.raises(ConfigError, match="works with 8-bit RGB or gray images; this model reads stored"):
        apply_preprocess(noise(4, 4), Preprocess(mean=(0.5,) * 4, std=(0.5,) * 4))
    with pytest.raises(ConfigError, match="antialias=False supports bilinear and nearest, not bicubic"):
        apply_preprocess(noise(4, 4), Preprocess(interpolation="bicubic", antialias=False))


class Images(torch.utils.data.Dataset):
    """A dataset of other code, with a model's preprocessing as its transform."""

    def __init__(self, transform: EvalTransform) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(noise(9 + index, 13))


def test_a_transform_takes_images_paths_bytes_and_arrays(tmp_path):
    settings = Preprocess(image_size=(8, 6), fit="crop", interpolation="bicubic")
    image = golden_image()
    image.save(tmp_path / "image.png")
    expected = apply_preprocess(image, settings)
    assert expected.shape == (3, 8, 6)
    sources = (image, str(tmp_path / "image.png"), tmp_path / "image.png", (tmp_path / "image.png").read_bytes())
    for source in (*sources, np.asarray(image)):
        assert torch.equal(vitruvian.transform(settings)(source), expected)


def test_a_gray_array_is_an_image_and_other_arrays_are_refused():
    transform = vitruvian.transform(Preprocess(image_size=4))
    gray = np.full((5, 5), 255, np.uint8)
    assert torch.equal(transform(gray), torch.ones(3, 4, 4))
    with pytest.raises(ImageError, match=r"array of float64 \(5, 5, 3\): not an image of uint8 \(rows, columns\)"):
        transform(np.zeros((5, 5, 3)))


def test_the_transform_of_a_model_is_that_of_its_settings_and_reaches_the_workers_of_a_loader():
    settings = Preprocess(image_size=8)
    transform = vitruvian.transform(SimpleNamespace(meta=ModelMeta(preprocess=settings)))
    assert pickle.loads(pickle.dumps(transform)) == vitruvian.transform(settings) == as_transform(transform)
    batch = next(iter(torch.utils.data.DataLoader(Images(transform), batch_size=3, num_workers=1)))
    assert torch.equal(batch[2], preprocess_image(noise(11, 13), settings))
