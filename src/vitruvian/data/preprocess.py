"""Evaluation preprocessing: resize, center crop and normalize, exactly as the original library of a model does."""

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.config import Interpolation, Preprocess
from vitruvian.data.decode import ImageInput, decode
from vitruvian.data.stored import read_stored
from vitruvian.errors import ConfigError
from vitruvian.settings import Size

if TYPE_CHECKING:
    from torch import Tensor  # imported by `apply_preprocess` only, so that other processes start quickly

FILTERS = {name: Image.Resampling["BOX" if name == "area" else name.upper()] for name in get_args(Interpolation)}
"""Pillow's filters by our names."""

LARGEST_RESIZE = 2**24  # maximum pixels of a resized image; above it, only the part that the crop keeps is resized
LONGEST_SIDE, SMALLEST_SIDE = 640, 256  # of an image on the screen; smaller ones are enlarged with square pixels
NAFLEX_PRECISION, NAFLEX_LARGEST = 1e-5, 100.0  # step and upper bound of the search for a scale, as in SigLIP 2
Bounds = tuple[int, int, int, int]  # left, top, right, bottom
FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.intp]


def preprocess_image(image: ImageInput, preprocess: Preprocess) -> "Tensor":
    """Decode, resize, crop and normalize an image.

    Args:
        image: A Pillow image, a path, bytes, an open file, or an array of 8-bit values, gray (rows, columns) or
            RGB (rows, columns, 3); for a model that reads stored channels, what `read_stored` accepts.
        preprocess: The settings, such as `model.meta.preprocess`.

    Returns:
        Normalized float32 pixels (channels, rows, columns).

    Raises:
        ImageError: The image cannot be decoded.
        ConfigError: The settings are unknown or cannot be applied to an image.
    """
    return apply_preprocess(open_image(image, preprocess), preprocess)


def open_image(image: ImageInput, preprocess: Preprocess) -> Image.Image | FloatArray:
    """An image as this preprocessing reads it: upright RGB, or its stored channels (rows, columns, channels)."""
    return read_stored(image, len(preprocess.mean)) if preprocess.is_stored else decode(image)


def apply_preprocess(image: Image.Image | FloatArray, preprocess: Preprocess) -> "Tensor":
    """Normalized float32 pixels (channels, rows, columns) of an opened image, as `image_pixels` computes them."""
    import torch

    return torch.from_numpy(image_pixels(image, preprocess))


def image_pixels(image: Image.Image | FloatArray, preprocess: Preprocess) -> FloatArray:
    """Normalized float32 pixels (channels, rows, columns) of an image from `open_image`.

    With antialias, resized by Pillow to 8 bits and cropped, bit-identical to torchvision and timm. Without it, sampled
    like TensorFlow, in float.
    """
    if not preprocess.stated:
        raise ConfigError(
            "the preprocessing of this model is unknown: put its preprocessor_config.json beside the weights, "
            "pass preprocess= when loading, or set model.meta = model.meta.replace(preprocess=vt.Preprocess(...))"
        )
    if isinstance(image, np.ndarray):
        planes = [Image.fromarray(np.ascontiguousarray(plane)) for plane in np.moveaxis(image, 2, 0)]
    else:
        preprocess.require_rgb("this")
        planes = [image.convert("L") if len(preprocess.mean) == 1 else image]
    scaled, box = geometry((planes[0].height, planes[0].width), preprocess)
    if preprocess.antialias or preprocess.interpolation == "nearest":
        parts: list[Any] = [resize(plane, scaled, box, FILTERS[preprocess.interpolation]) for plane in planes]
    elif preprocess.interpolation == "bilinear":
        parts = [sample_bilinear(plane, scaled, box) for plane in planes]
    else:
        raise ConfigError(f"antialias=False supports bilinear and nearest, not {preprocess.interpolation}")
    left, top, right, bottom = box
    levels = np.concatenate([np.asarray(part).reshape(bottom - top, right - left, -1) for part in parts], axis=2)
    unit = np.float32(1 if preprocess.is_stored else 255)
    pixels = np.empty((levels.shape[2], *levels.shape[:2]), np.float32)  # (v / 255 - mean) / std, channels first
    for channel, table in enumerate(level_tables(preprocess.mean, preprocess.std)):
        if levels.dtype == np.uint8:
            pixels[channel] = np.take(table, levels[..., channel], mode="clip")
        else:
            pixels[channel] = levels[..., channel] / unit
            pixels[channel] -= np.float32(preprocess.mean[channel])
            pixels[channel] /= np.float32(preprocess.std[channel])
    return pixels


def geometry(size: Size, preprocess: Preprocess) -> tuple[Size, Bounds]:
    """The size that the image is resized to, and the box of it that the crop keeps."""
    if preprocess.fit == "naflex":
        height, width = naflex_size(size, preprocess)
        return (height, width), (0, 0, width, height)
    rows, columns = preprocess.image_size
    scaled = preprocess.scaled_size or preprocess.image_size
    height, width = scaled if preprocess.fit == "squash" else cover_size(size, scaled)
    to_int = int if preprocess.floor_crop else round
    top, left = to_int((height - rows) / 2), to_int((width - columns) / 2)
    return (height, width), (left, top, left + columns, top + rows)


def naflex_size(size: Size, preprocess: Preprocess) -> Size:
    """The largest size in whole patches with about the image's aspect ratio and at most `max_num_patches` patches.

    The scale is found by the same bisection as in SigLIP 2's processor, so that both end at the same size.
    """
    patch, most = preprocess.patch_size, preprocess.max_num_patches
    assert patch is not None
    assert most is not None

    def patches(scale: float) -> Size:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
        return rows, columns

    low, high = NAFLEX_PRECISION / 10, NAFLEX_LARGEST
    while high - low >= NAFLEX_PRECISION:
        scale = (low + high) / 2
        rows, columns = patches(scale)
        low, high = (scale, high) if rows * columns <= most else (low, scale)
    rows, columns = patches(low)
    return rows * patch, columns * patch


def cover_size(size: Size, target: Size) -> Size:
    """The smallest size of the same aspect ratio that covers `target`.

    The free side is truncated for a square target, like torchvision, and rounded for others, like timm.
    """
    to_int = int if target[0] == target[1] else round
    (height, width), (rows, columns) = size, target
    if rows * width >= columns * height:
        return rows, to_int(rows * width / height)
    return to_int(columns * height / width), columns


def resize(image: Image.Image, scaled: Size, box: Bounds, resample: Image.Resampling) -> Image.Image:
    """The part `box` of the image resized to `scaled`."""
    rows, columns = scaled
    if max(rows, image.height) * columns > LARGEST_RESIZE:
        return resize_box(image, scaled, box, resample)
    if image.size != (columns, rows):
        image = image.resize((columns, rows), resample)
    return image if box == (0, 0, columns, rows) else image.crop(box)


def resize_box(image: Image.Image, scaled: Size, box: Bounds, resample: Image.Resampling) -> Image.Image:
    """Like `resize`, but computes only the pixels in `box`, shrinking the longer side first.

    For images so long that resizing all of them would take gigabytes. Values may differ by rounding.
    """
    left, top, right, bottom = box
    if image.height > image.width:  # Pillow resizes along rows first
        turned = image.transpose(Image.Transpose.TRANSPOSE)
        part = resize_box(turned, scaled[::-1], (top, left, bottom, right), resample)
        return part.transpose(Image.Transpose.TRANSPOSE)
    x, y = image.width / scaled[1], image.height / scaled[0]
    source = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    return image.resize((right - left, bottom - top), resample, box=source)


def resize_for_display(image: Image.Image) -> Image.Image:
    """The image at a size for the screen."""
    longest = max(image.size)
    if longest > LONGEST_SIDE:
        scale, resample = LONGEST_SIDE / longest, Image.Resampling.LANCZOS
    elif longest < SMALLEST_SIDE:
        scale, resample = float(-(-SMALLEST_SIDE // longest)), Image.Resampling.NEAREST
    else:
        return image
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resample)


def sample_bilinear(image: Image.Image, scaled: Size, box: Bounds) -> FloatArray:
    """The part `box` of the resized image as float, interpolated between the four nearest pixels without antialias."""
    left, top, right, bottom = box
    above, below, down = neighbors(image.height, scaled[0], top, bottom)
    before, after, across = neighbors(image.width, scaled[1], left, right)
    levels = np.asarray(image).reshape(image.height, image.width, -1)

    def between(rows: IndexArray) -> FloatArray:
        first = levels[rows[:, None], before].astype(np.float32)
        return first + (levels[rows[:, None], after] - first) * across[:, None]

    upper = between(above)
    return upper + (between(below) - upper) * down[:, None, None]


def neighbors(length: int, scaled: int, start: int, stop: int) -> tuple[IndexArray, IndexArray, FloatArray]:
    """For samples start..stop of `scaled`: the pixels on both sides, and the weight of the second."""
    step, half = np.float32(length / scaled), np.float32(0.5)
    position = (np.arange(start, stop, dtype=np.float32) + half) * step - half  # centers of pixels lie at halves
    first = np.floor(position)
    last = length - 1
    return first.clip(0, last).astype(np.intp), (first + 1).clip(0, last).astype(np.intp), position - first


@lru_cache(maxsize=64)
def level_tables(mean: tuple[float, ...], std: tuple[float, ...]) -> FloatArray:
    """The normalized value of each of the 256 levels: (channels, 256)."""
    levels = np.arange(256, dtype=np.float32)[None] / np.float32(255)
    return (levels - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]
