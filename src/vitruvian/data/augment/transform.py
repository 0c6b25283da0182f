"""The training view: an image in any form and a random generator in, one augmented tensor out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.augment.color import color_jitter, gray, rgb
from vitruvian.data.augment.geometry import random_erasing, scaled, visible_part, window
from vitruvian.data.augment.ops import OPS, rand_augment
from vitruvian.data.augment.settings import Augment
from vitruvian.data.decode import RawImage, decode
from vitruvian.data.jpeg import Levels, decode_box, opencv, read_header
from vitruvian.data.preprocess import level_tables
from vitruvian.errors import ImageError, require

Viewable = RawImage | Image.Image
"""A file's contents, pixel values (rows, columns) or (rows, columns, 3), or a Pillow image."""


def train_transform(settings: Augment) -> TrainTransform:
    """The view for these settings; a missing package is said here, not later in a worker."""
    require_packages()
    return TrainTransform(settings)


def require_packages() -> None:
    """Refuse to begin where a package that training views need is missing."""
    opencv()
    require("simplejpeg", "train")


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """`view(image, rng)` is a tensor (channels, rows, columns) that depends on these two and the settings alone."""

    settings: Augment

    def __call__(self, image: Viewable, rng: np.random.Generator) -> Tensor:
        """Normalized float32, or uint8 if the settings say so."""
        levels = self.levels(image, rng)
        if self.settings.output == "uint8":
            return torch.from_numpy(channels_first(levels))
        return torch.from_numpy(normalized(levels, self.settings))

    def levels(self, image: Viewable, rng: np.random.Generator) -> Levels:
        """The view before normalization: uint8, (rows, columns, 3) RGB or (rows, columns) gray."""
        s = self.settings
        levels = seen(image, s, rng)
        if s.crop == "pad":
            levels = window(levels, s.image_size, s.padding, s.padding_mode, rng)
        if s.hflip and not s.alternate_flip and rng.random() < s.hflip:
            levels = opencv().flip(levels, 1)
        if s.rand_augment:
            levels = rand_augment(levels, s.rand_augment, s.rand_augment_magnitude, rng)
        if any(s.color_jitter):
            levels = color_jitter(levels, s.color_jitter, rng)
        for op, chance, strength in s.ops:
            if rng.random() < chance:
                levels = OPS[op](levels, strength, rng)
        if s.random_erasing and rng.random() < s.random_erasing:
            levels = random_erasing(levels, rng)
        return levels


def seen(image: Viewable, settings: Augment, rng: np.random.Generator) -> Levels:
    """The visible part of the image, scaled, with as many channels as the settings have."""
    if isinstance(image, bytes) and (header := read_header(image)) is not None:
        box, size = visible_part(header.size, settings, rng)
        levels = decode_box(image, header, box, size)
    else:
        levels = as_levels(image)
        box, size = visible_part(levels.shape[:2], settings, rng)
        levels = box.of(levels)
    levels = scaled(levels, size, settings.interpolation)
    return gray(levels) if settings.channels == 1 else rgb(levels)


def as_levels(image: Viewable) -> Levels:
    """The whole image as uint8 RGB, or gray where it comes as a gray array."""
    if not isinstance(image, np.ndarray):
        return np.asarray(decode(image))
    levels = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if levels.dtype != np.uint8 or levels.ndim not in (2, 3) or levels.shape[2:] not in ((), (3,)) or not levels.size:
        raise ImageError(
            f"array of {image.dtype} {image.shape} is no image: give uint8 (rows, columns) or (rows, columns, 3)"
        )
    return levels


def channels_first(levels: Levels) -> Levels:
    """(rows, columns, channels) or (rows, columns) -> (channels, rows, columns)."""
    rows, columns, *_ = levels.shape
    planes = np.empty((levels.size // (rows * columns), rows, columns), np.uint8)
    opencv().split(levels, list(planes))
    return planes


def normalized(levels: Levels, settings: Augment) -> NDArray[np.float32]:
    """The same values that the evaluation view gives to these levels, channels first."""
    planes = channels_first(levels)
    pixels = np.empty(planes.shape, np.float32)
    for plane, table, target in zip(planes, level_tables(settings.mean, settings.std), pixels):
        opencv().LUT(plane, table, dst=target)
    return pixels


def normalize(pixels: Tensor, settings: Augment) -> Tensor:
    """uint8 views (..., channels, rows, columns) as float32 (v / 255 - mean) / std, on their device."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (settings.mean, settings.std))
    return pixels.float().div_(255).sub_(mean).div_(std)
