"""Training augmentation: its settings, the transform of one image, and mixing of batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Interpolation
from vitruvian.data.augment_ops import (
    OPS,
    PaddingMode,
    center_box,
    color_jitter,
    gray,
    inception_box,
    rand_augment,
    random_erasing,
    resized_box,
    rgb,
    scaled,
    window,
)
from vitruvian.data.decode import RawImage, decode
from vitruvian.data.jpeg import Box, Levels, decode_box, opencv, read_header
from vitruvian.data.preprocess import cover_size, level_tables
from vitruvian.errors import ConfigError, ImageError, UnknownNameError, require
from vitruvian.settings import Range, Settings, Share, Size, check_range

Crop = Literal["inception", "resized", "pad", "center", "none"]


Output = Literal["float32", "uint8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augment(Settings):
    """How an image is changed each time it is trained on, in the order of the fields; 0 leaves a change out."""

    image_size: Size = (224, 224)
    """Rows and columns of the view, in pixels; a single number means a square."""
    crop: Crop = "inception"
    """`inception`: a part with uniform height and ratio, as TensorFlow draws it for the paper; `resized`: a part
    with uniform area and log-uniform ratio, the RandomResizedCrop of torchvision and timm; both scaled to
    `image_size`. `pad`: scaled to just cover `image_size`, padded, and a window cut anywhere, as RandomCrop does;
    `center`: the middle that has the shape of `image_size`; `none`: the whole image, squashed."""
    scale: tuple[float, float] = (0.05, 1.0)
    """Least and greatest share of the image that `inception` and `resized` keep; 0.05 is the paper's, 0.08 usual."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and greatest width / height of that part."""
    padding: Annotated[int, Range(0, 1024)] = 4
    """Pixels that `pad` adds on each side."""
    padding_mode: PaddingMode = "constant"
    """`constant`: black."""
    interpolation: Interpolation = "bilinear"
    """Between pixels when scaling; a part at least twice as large as the view is first averaged down."""
    hflip: Share = 0.5
    """Chance of a horizontal flip."""
    alternate_flip: bool = False
    """In place of `hflip`: each image is flipped in every other epoch, half of them in the first."""
    rand_augment: Annotated[int, Range(0, 16)] = 0
    """Operations one after the other, each drawn anew from the 16 of RandAugment."""
    rand_augment_magnitude: Annotated[float, Range(0.0, 10.0)] = 10.0
    """Of 10, in the ranges of big_vision (see ops.py); torchvision's and timm's scales are others."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Brightness, contrast, saturation: a factor between 1 - x and 1 + x; hue: a turn of up to x of the circle."""
    ops: tuple[tuple[str, Share, Share], ...] = ()
    """More operations of the table OPS, one after the other: name, chance, strength from 0 to 1."""
    random_erasing: Share = 0.0
    """Chance that a rectangle of 2 to 33% of the view becomes noise."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1; one number for gray views, three for RGB."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    output: Output = "float32"
    """`uint8` leaves mean and std to `normalize`: a quarter of the bytes from worker to training process."""
    mixup_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Of the Beta distribution that a batch's share is drawn from."""
    cutmix_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    mixup_prob: Share = 1.0
    """Chance that a batch is mixed at all, given an alpha; with two alphas, each has half of it."""

    def check(self) -> None:
        _check_span("scale", self.scale, 1e-4, 1.0)
        _check_span("ratio", self.ratio, 0.01, 100.0)
        for op, _, _ in self.ops:
            if op not in OPS:
                raise UnknownNameError("operation in augment.ops", op, OPS)
        for name, strength, most in zip(
            ("brightness", "contrast", "saturation", "hue"), self.color_jitter, (1.0, 1.0, 1.0, 0.5)
        ):
            check_range(f"color_jitter {name}", strength, 0.0, most)
        if len(self.mean) not in (1, 3) or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise ConfigError(f"mean={self.mean} and std={self.std} are not one number each for 1 or 3 channels")

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed, so that their targets are shares of classes."""
        return self.mixup_prob > 0 and max(self.mixup_alpha, self.cutmix_alpha) > 0


def _check_span(name: str, span: tuple[float, float], low: float, high: float) -> None:
    if len(span) != 2 or not low <= span[0] <= span[1] <= high:
        raise ConfigError(f"{name}={span} is not (least, greatest) between {low} and {high}")


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


LONGEST = 64
"""Longer side over shorter side of what `pad` scales; of a longer image the middle, for the memory."""


def visible_part(size: Size, settings: Augment, rng: np.random.Generator) -> tuple[Box, Size]:
    """The part of an image of `size` that the view shows, and the size it is scaled to."""
    whole = Box(0, 0, *size)
    match settings.crop:
        case "inception":
            return inception_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "resized":
            return resized_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "pad":
            longest = (LONGEST, 1) if size[0] > size[1] else (1, LONGEST)
            part = whole if max(size) <= LONGEST * min(size) else center_box(size, longest)
            return part, cover_size((part.rows, part.columns), settings.image_size)
        case "center":
            return center_box(size, settings.image_size), settings.image_size
        case _:
            return whole, settings.image_size


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


def mix(
    pixels: Tensor,
    labels: Tensor,
    *,
    classes: int,
    settings: Augment,
    rng: np.random.Generator,
    smoothing: float = 0.0,
    repeats: int = 1,
) -> tuple[Tensor, Tensor]:
    """Normalized float images (B, C, H, W) mixed by Mixup or CutMix, and each one's shares of the classes (B, K).

    One draw from `rng` serves the whole batch. Image 2i is mixed with 2i + 1 and the other way round, an odd
    last one with itself: processes that share a batch in even, contiguous parts and have equal generators mix
    as one process would. `repeats` is the number of views of one image that follow each other, which are not
    mixed among themselves. `smoothing` of each label is spread over all classes. Shares add up to one.
    """
    if not pixels.is_floating_point():
        raise ConfigError(f"mixing needs normalized pixels, not {pixels.dtype}: call normalize first")
    targets = smoothed(labels, classes, smoothing)
    if not settings.mixes or rng.random() >= settings.mixup_prob:
        return pixels, targets
    partners = neighbors(len(pixels), repeats).to(pixels.device)
    pastes = settings.cutmix_alpha > 0
    if rng.random() < pastes / (pastes + (settings.mixup_alpha > 0)):  # one half where both have an alpha
        box = pasted_box(
            (pixels.shape[2], pixels.shape[3]), rng.beta(settings.cutmix_alpha, settings.cutmix_alpha), rng
        )
        kept = 1.0 - box.rows * box.columns / (pixels.shape[2] * pixels.shape[3])
        rows, columns = slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns)
        pixels = pixels.clone()
        pixels[:, :, rows, columns] = pixels[:, :, rows, columns][partners]
    else:
        kept = rng.beta(settings.mixup_alpha, settings.mixup_alpha)
        pixels = pixels[partners].lerp_(pixels, kept)
    return pixels, targets[partners].lerp_(targets, kept)


def smoothed(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """One minus `smoothing` for the label, and `smoothing` divided among all classes: (B,) -> (B, K) float32."""
    return F.one_hot(labels, classes).float().mul_(1.0 - smoothing).add_(smoothing / classes)


def neighbors(count: int, repeats: int = 1) -> Tensor:
    """1, 0, 3, 2, ... in groups of `repeats`; what has no neighbor stays alone."""
    places = torch.arange(count)
    partners = (places // repeats ^ 1) * repeats + places % repeats
    return torch.where(partners < count, partners, places)


def pasted_box(size: Size, kept: float, rng: np.random.Generator) -> Box:
    """About 1 - `kept` of an image, in its proportions, around a random point and cut off at the edges."""
    side = math.sqrt(1.0 - kept)
    spans = []
    for length, draw in zip(size, rng.random(2).tolist()):
        middle, reach = int(draw * length), int(side * length) / 2
        start, stop = max(0, math.floor(middle - reach)), min(length, math.floor(middle + reach))
        spans.append((start, stop - start))
    (top, rows), (left, columns) = spans
    return Box(top, left, rows, columns)
