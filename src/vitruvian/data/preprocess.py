"""The view of an image that a model asks for: resized, cut and normalized, as its family does it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import ImageInput, decode
from vitruvian.errors import ConfigError
from vitruvian.settings import Size

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}

LARGEST_RESIZE = 2**27
"""Pixels an image is resized to before its center is cut; a longer one is cut while it is resized."""

NAFLEX_PRECISION, NAFLEX_LARGEST = 1e-5, 100.0
"""Of the scale of an image that keeps its shape."""

Bounds = tuple[int, int, int, int]
"""Left, top, right, bottom."""

FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.intp]


def preprocess_image(image: ImageInput, preprocess: Preprocess) -> Tensor:
    """Normalized float32 pixels (channels, rows, columns) of a Pillow image, a path, bytes, an open file or an array.

    An array holds 8-bit gray levels (rows, columns) or RGB (rows, columns, 3). What `model.preprocess(image)` gives.
    """
    return view(decode(image), preprocess)


def view(image: Image.Image, preprocess: Preprocess) -> Tensor:
    """Normalized float32 pixels (channels, rows, columns) of an upright RGB image."""
    return normalized(levels_of(image, preprocess)[None], preprocess)[0]


def levels_of(image: Image.Image, preprocess: Preprocess) -> NDArray[Any]:
    """Values of 0 to 255 (rows, columns, channels) of an upright RGB image, not yet normalized.

    Resized with Pillow to 8 bits and cut like torchvision and timm, bit for bit. Without antialias, sampled like
    TensorFlow and kept in float.
    """
    if not preprocess.stated:
        raise ConfigError(
            "nothing says how this model's images are prepared: put its preprocessor_config.json beside the weights, "
            "pass preprocess= when loading, or set model.preprocess = vt.Preprocess(...)"
        )
    if len(preprocess.mean) == 1:
        image = image.convert("L")
    elif len(preprocess.mean) != 3:
        raise ConfigError(f"an image has 1 or 3 channels, and the model wants {len(preprocess.mean)}")
    scaled, box = geometry((image.height, image.width), preprocess)
    if preprocess.antialias or preprocess.interpolation == "nearest":
        levels: NDArray[Any] = np.asarray(resized(image, scaled, box, FILTERS[preprocess.interpolation]))
    elif preprocess.interpolation == "bilinear":
        levels = sampled(image, scaled, box)
    else:
        raise ConfigError(f"antialias=False is known for bilinear and nearest, not for {preprocess.interpolation}")
    left, top, right, bottom = box
    return levels.reshape(bottom - top, right - left, -1)


def geometry(size: Size, preprocess: Preprocess) -> tuple[Size, Bounds]:
    """The size the whole image is scaled to, and the part of it that is kept."""
    if preprocess.fit == "naflex":
        height, width = naflex_size(size, preprocess)
        return (height, width), (0, 0, width, height)
    rows, columns = preprocess.image_size
    scaled = preprocess.scaled_size or preprocess.image_size
    height, width = scaled if preprocess.fit == "squash" else covering(size, scaled)
    whole = int if preprocess.floor_crop else round
    top, left = whole((height - rows) / 2), whole((width - columns) / 2)
    return (height, width), (left, top, left + columns, top + rows)


def naflex_size(size: Size, preprocess: Preprocess) -> Size:
    """Whole patches in about the shape of the image, each side rounded up, as many as are allowed together.

    The scale is searched by halves as in SigLIP 2's processor, so that both end at the same size.
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


def covering(size: Size, target: Size) -> Size:
    """The smallest size of the same shape that covers `target`.

    The side that is free is cut to whole pixels as torchvision does it for a square target, and rounded as
    timm does it for others.
    """
    whole = int if target[0] == target[1] else round
    (height, width), (rows, columns) = size, target
    if rows * width >= columns * height:
        return rows, whole(rows * width / height)
    return whole(columns * height / width), columns


def resized(image: Image.Image, scaled: Size, box: Bounds, resample: Image.Resampling) -> Image.Image:
    """The part `box` of the image scaled to `scaled`."""
    rows, columns = scaled
    if max(rows, image.height) * columns > LARGEST_RESIZE:
        return resized_part(image, scaled, box, resample)
    if image.size != (columns, rows):
        image = image.resize((columns, rows), resample)
    return image if box == (0, 0, columns, rows) else image.crop(box)


def resized_part(image: Image.Image, scaled: Size, box: Bounds, resample: Image.Resampling) -> Image.Image:
    """The same without making more of the scaled image than is kept, shrinking the longer side first.

    For images so long that the rest would take gigabytes. A value may differ by rounding.
    """
    left, top, right, bottom = box
    if image.height > image.width:  # Pillow resizes along rows first
        turned = image.transpose(Image.Transpose.TRANSPOSE)
        part = resized_part(turned, scaled[::-1], (top, left, bottom, right), resample)
        return part.transpose(Image.Transpose.TRANSPOSE)
    x, y = image.width / scaled[1], image.height / scaled[0]
    source = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    return image.resize((right - left, bottom - top), resample, box=source)


def sampled(image: Image.Image, scaled: Size, box: Bounds) -> FloatArray:
    """The same part, float, bilinear between the four nearest pixels however far apart the samples are."""
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
    """Of samples start..stop of `scaled`: the pixels on both sides, and how far towards the second they lie."""
    step, half = np.float32(length / scaled), np.float32(0.5)
    place = (np.arange(start, stop, dtype=np.float32) + half) * step - half  # centers of pixels lie at halves
    first = np.floor(place)
    last = length - 1
    return first.clip(0, last).astype(np.intp), (first + 1).clip(0, last).astype(np.intp), place - first


def normalized(levels: NDArray[Any], preprocess: Preprocess) -> Tensor:
    """Values of 0 to 255 (B, rows, columns, channels) as (v / 255 - mean) / std, channels first."""
    images, rows, columns, channels = levels.shape
    pixels = np.empty((images, channels, rows, columns), np.float32)
    for channel, table in enumerate(tables(preprocess.mean, preprocess.std)):
        seen = levels[..., channel]
        if levels.dtype == np.uint8:
            pixels[:, channel] = np.take(table, seen, mode="clip")
        else:
            pixels[:, channel] = seen / np.float32(255)
            pixels[:, channel] -= np.float32(preprocess.mean[channel])
            pixels[:, channel] /= np.float32(preprocess.std[channel])
    return torch.from_numpy(pixels)


@lru_cache(maxsize=64)
def tables(mean: tuple[float, ...], std: tuple[float, ...]) -> FloatArray:
    """The normalized value of each of the 256 levels, a row for each channel."""
    levels = np.arange(256, dtype=np.float32)[None] / np.float32(255)
    return (levels - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]
