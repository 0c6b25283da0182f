"""The training view: a picture in any form and a random generator in, one augmented tensor out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.data.augment.colour import grey, jittered, rgb
from vitruvian.data.augment.geometry import erased, scaled, visible_part, window
from vitruvian.data.augment.randaugment import randaugment
from vitruvian.data.augment.settings import Augment
from vitruvian.data.decode import decode
from vitruvian.data.jpeg import Levels, decode_box, read_header
from vitruvian.data.opencv import opencv
from vitruvian.data.preprocess import tables
from vitruvian.data.sources.base import Picture
from vitruvian.errors import ImageError, require

Viewable = Picture | Image.Image
"""A file's contents, pixel values (rows, columns) or (rows, columns, 3), or a Pillow image."""


def training_view(settings: Augment) -> TrainingView:
    """The view for these settings; a missing package is said here, not later in a worker."""
    opencv()
    require("simplejpeg", "train")
    return TrainingView(settings)


@dataclass(frozen=True, slots=True)
class TrainingView:
    """`view(picture, rng)` is a tensor (channels, rows, columns) that depends on these two and the settings alone."""

    settings: Augment

    def __call__(self, picture: Viewable, rng: np.random.Generator) -> Tensor:
        """Normalised float32, or uint8 if the settings say so."""
        levels = self.levels(picture, rng)
        if self.settings.output == "uint8":
            return torch.from_numpy(channels_first(levels))
        return torch.from_numpy(normalised(levels, self.settings))

    def batch(self, pictures: Sequence[Viewable], rngs: Sequence[np.random.Generator]) -> Tensor:
        """The views of many pictures as one tensor (B, C, H, W), equal to those made one by one but faster."""
        s = self.settings
        views = np.empty((len(pictures), s.channels, *s.image_size), np.uint8)
        for place, (picture, rng) in enumerate(zip(pictures, rngs, strict=True)):
            levels = self.levels(picture, rng)
            views[place] = levels if levels.ndim == 2 else levels.transpose(2, 0, 1)
        pixels = torch.from_numpy(views)
        return pixels if s.output == "uint8" else normalise(pixels, s)

    def levels(self, picture: Viewable, rng: np.random.Generator) -> Levels:
        """The view before normalisation: uint8, (rows, columns, 3) RGB or (rows, columns) grey."""
        s = self.settings
        levels = seen(picture, s, rng)
        if s.crop == "pad":
            levels = window(levels, s.image_size, s.pad, s.pad_with, rng)
        if s.flip and rng.random() < s.flip:
            levels = opencv().flip(levels, 1)
        if s.randaugment_layers:
            levels = randaugment(levels, s.randaugment_layers, s.randaugment_magnitude, rng)
        if any(s.colour_jitter):
            levels = jittered(levels, s.colour_jitter, rng)
        if s.erasing and rng.random() < s.erasing:
            levels = erased(levels, rng)
        return levels


def seen(picture: Viewable, settings: Augment, rng: np.random.Generator) -> Levels:
    """The visible part of the picture, scaled, with as many channels as the settings have."""
    if isinstance(picture, bytes) and (header := read_header(picture)) is not None:
        box, size = visible_part(header.size, settings, rng)
        levels = decode_box(picture, header, box, size)
    else:
        levels = as_levels(picture)
        box, size = visible_part(levels.shape[:2], settings, rng)
        levels = box.of(levels)
    levels = scaled(levels, size, settings.interpolation)
    return grey(levels) if settings.channels == 1 else rgb(levels)


def as_levels(picture: Viewable) -> Levels:
    """The whole picture as uint8 RGB, or grey where it comes as a grey array."""
    if not isinstance(picture, np.ndarray):
        return np.asarray(decode(picture))
    levels = picture[..., 0] if picture.ndim == 3 and picture.shape[2] == 1 else picture
    if levels.dtype != np.uint8 or levels.ndim not in (2, 3) or levels.shape[2:] not in ((), (3,)) or not levels.size:
        raise ImageError(
            f"array of {picture.dtype} {picture.shape} is no picture: give uint8 (rows, columns) or (rows, columns, 3)"
        )
    return levels


def channels_first(levels: Levels) -> Levels:
    """(rows, columns, channels) or (rows, columns) -> (channels, rows, columns)."""
    rows, columns, *_ = levels.shape
    planes = np.empty((levels.size // (rows * columns), rows, columns), np.uint8)
    opencv().split(levels, list(planes))
    return planes


def normalised(levels: Levels, settings: Augment) -> NDArray[np.float32]:
    """The same values that the evaluation view gives to these levels, channels first."""
    planes = channels_first(levels)
    pixels = np.empty(planes.shape, np.float32)
    for plane, table, target in zip(planes, tables(settings.mean, settings.std), pixels):
        opencv().LUT(plane, table, dst=target)
    return pixels


def normalise(pixels: Tensor, settings: Augment) -> Tensor:
    """uint8 views (..., channels, rows, columns) as float32 (v / 255 - mean) / std, on their device."""
    mean, std = (torch.tensor(v, device=pixels.device).view(-1, 1, 1) for v in (settings.mean, settings.std))
    return pixels.float().div_(255).sub_(mean).div_(std)
