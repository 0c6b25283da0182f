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
    inception_box,
    pad_and_crop,
    rand_augment,
    random_erasing,
    random_resized_box,
    resize_levels,
    to_gray,
    to_rgb_levels,
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
    """Augmentation of training images, applied in the order of the fields; 0 disables a step."""

    image_size: Size = (224, 224)
    """Rows and columns of the result, in pixels; a single number means a square."""
    crop: Crop = "inception"
    """`inception`: a crop with uniform height and aspect ratio, as TensorFlow draws it for the paper; `resized`: a crop
    with uniform area and log-uniform aspect ratio, the RandomResizedCrop of torchvision and timm; both are resized to
    `image_size`. `pad`: resize to just cover `image_size`, pad, and crop at a random position, like RandomCrop;
    `center`: the largest center crop with the aspect ratio of `image_size`; `none`: squash the full image."""
    scale: tuple[float, float] = (0.05, 1.0)
    """Minimum and maximum share of the image in an `inception` or `resized` crop; the paper uses 0.05, others 0.08."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Minimum and maximum aspect ratio (width / height) of that crop."""
    padding: Annotated[int, Range(0, 1024)] = 4
    """Pixels added on each side for `pad`."""
    padding_mode: PaddingMode = "constant"
    """`constant`: black."""
    interpolation: Interpolation = "bilinear"
    """Filter for resizing; a crop at least twice as large as the result is first averaged down by a power of two."""
    hflip: Share = 0.5
    """Probability of a horizontal flip."""
    alternate_flip: bool = False
    """Instead of `hflip`, flip each image in every other epoch, half of them in the first."""
    rand_augment: Annotated[int, Range(0, 16)] = 0
    """Number of random operations of RandAugment per image."""
    rand_augment_magnitude: Annotated[float, Range(0.0, 10.0)] = 10.0
    """Magnitude from 0 to 10, in the ranges of big_vision (see augment_ops.py), not those of torchvision and timm."""
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Brightness, contrast, saturation: a factor between 1 - x and 1 + x; hue: a shift by up to x of the circle."""
    ops: tuple[tuple[str, Share, Share], ...] = ()
    """Further operations of the table OPS, in this order: name, probability, strength from 0 to 1."""
    random_erasing: Share = 0.0
    """Probability that a rectangle of 2 to 33% of the image is replaced by noise."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    """Subtracted from values between 0 and 1; one number for gray images, three for RGB."""
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    output: Output = "float32"
    """`uint8` leaves normalization to `normalize`: a quarter of the bytes from worker to training process."""
    mixup_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    """Parameter of the Beta distribution of the mixing ratio."""
    cutmix_alpha: Annotated[float, Range(0.0, 1e6)] = 0.0
    mixup_prob: Share = 1.0
    """Probability that a batch is mixed if an alpha is set; with two alphas, half of it for each."""

    def check(self) -> None:
        for name, span, low, high in (("scale", self.scale, 1e-4, 1.0), ("ratio", self.ratio, 0.01, 100.0)):
            if len(span) != 2 or not low <= span[0] <= span[1] <= high:
                raise ConfigError(f"{name}={span} is not (minimum, maximum) between {low} and {high}")
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
        """Whether batches are mixed, so that their targets are soft."""
        return self.mixup_prob > 0 and max(self.mixup_alpha, self.cutmix_alpha) > 0


TrainImage = RawImage | Image.Image
"""An encoded image, pixel values (rows, columns) or (rows, columns, 3), or a Pillow image."""


def train_transform(settings: Augment) -> TrainTransform:
    """The transform with these settings; a missing package raises here, not later in a worker."""
    require_packages()
    return TrainTransform(settings)


def require_packages() -> None:
    """Raise MissingExtraError if a package that augmentation needs is not installed."""
    opencv()
    require("simplejpeg", "train")


@dataclass(frozen=True, slots=True)
class TrainTransform:
    """`transform(image, rng)` returns a tensor (channels, rows, columns) that depends on nothing but the settings."""

    settings: Augment

    def __call__(self, image: TrainImage, rng: np.random.Generator) -> Tensor:
        """Normalized float32, or uint8 if the settings ask for it."""
        levels = self.levels(image, rng)
        if self.settings.output == "uint8":
            return torch.from_numpy(channels_first(levels))
        return torch.from_numpy(normalize_planes(levels, self.settings))

    def levels(self, image: TrainImage, rng: np.random.Generator) -> Levels:
        """The augmented image before normalization: uint8, (rows, columns, 3) RGB or (rows, columns) gray."""
        s = self.settings
        levels = crop_and_resize(image, s, rng)
        if s.crop == "pad":
            levels = pad_and_crop(levels, s.image_size, s.padding, s.padding_mode, rng)
        if s.hflip and not s.alternate_flip and rng.random() < s.hflip:
            levels = opencv().flip(levels, 1)
        if s.rand_augment:
            levels = rand_augment(levels, s.rand_augment, s.rand_augment_magnitude, rng)
        if any(s.color_jitter):
            levels = color_jitter(levels, s.color_jitter, rng)
        for op, probability, strength in s.ops:
            if rng.random() < probability:
                levels = OPS[op](levels, strength, rng)
        if s.random_erasing and rng.random() < s.random_erasing:
            levels = random_erasing(levels, rng)
        return levels


def crop_and_resize(image: TrainImage, settings: Augment, rng: np.random.Generator) -> Levels:
    """A random crop of the image, resized, with as many channels as the settings have."""
    if isinstance(image, bytes) and (header := read_header(image)) is not None:
        box, size = choose_crop(header.size, settings, rng)
        levels = decode_box(image, header, box, size)
    else:
        levels = as_levels(image)
        box, size = choose_crop(levels.shape[:2], settings, rng)
        levels = box.crop(levels)
    levels = resize_levels(levels, size, settings.interpolation)
    return to_gray(levels) if settings.channels == 1 else to_rgb_levels(levels)


MAX_ASPECT = 64
"""Maximum aspect ratio for `pad`; of a longer image only the center is used, to save memory."""


def choose_crop(size: Size, settings: Augment, rng: np.random.Generator) -> tuple[Box, Size]:
    """The box to crop from an image of `size`, and the size to resize it to."""
    full = Box(0, 0, *size)
    match settings.crop:
        case "inception":
            return inception_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "resized":
            return random_resized_box(size, settings.scale, settings.ratio, rng), settings.image_size
        case "pad":
            longest = (MAX_ASPECT, 1) if size[0] > size[1] else (1, MAX_ASPECT)
            part = full if max(size) <= MAX_ASPECT * min(size) else center_box(size, longest)
            return part, cover_size((part.rows, part.columns), settings.image_size)
        case "center":
            return center_box(size, settings.image_size), settings.image_size
        case _:
            return full, settings.image_size


def as_levels(image: TrainImage) -> Levels:
    """The full image as uint8 RGB, or gray for a gray array."""
    if not isinstance(image, np.ndarray):
        return np.asarray(decode(image))
    levels = image[..., 0] if image.ndim == 3 and image.shape[2] == 1 else image
    if levels.dtype != np.uint8 or levels.ndim not in (2, 3) or levels.shape[2:] not in ((), (3,)) or not levels.size:
        expected = "expected uint8 (rows, columns) or (rows, columns, 3)"
        raise ImageError(f"an array of {image.dtype} {image.shape} is not an image; {expected}")
    return levels


def channels_first(levels: Levels) -> Levels:
    """(rows, columns, channels) or (rows, columns) -> (channels, rows, columns)."""
    rows, columns, *_ = levels.shape
    planes = np.empty((levels.size // (rows * columns), rows, columns), np.uint8)
    opencv().split(levels, list(planes))
    return planes


def normalize_planes(levels: Levels, settings: Augment) -> NDArray[np.float32]:
    """Normalized values, channels first; identical to those of evaluation preprocessing."""
    planes = channels_first(levels)
    pixels = np.empty(planes.shape, np.float32)
    for plane, table, target in zip(planes, level_tables(settings.mean, settings.std), pixels):
        opencv().LUT(plane, table, dst=target)
    return pixels


def normalize(pixels: Tensor, settings: Augment) -> Tensor:
    """Normalize uint8 images (..., channels, rows, columns) to float32 (v / 255 - mean) / std, on their device."""
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
    """Mix a batch by Mixup or CutMix.

    One draw from `rng` is used for the batch. Image 2i is mixed with 2i + 1 and vice versa, an odd last one with
    itself: processes that share a batch in even, contiguous parts and have equal generators mix like one process.

    Args:
        pixels: Normalized float images (B, C, H, W).
        labels: Class indices (B,).
        classes: Number of classes K.
        settings: The probabilities and alphas.
        rng: Random generator.
        smoothing: Share of each label that is distributed over all classes.
        repeats: Consecutive images that are versions of one image, which are not mixed with each other.

    Returns:
        Mixed images (B, C, H, W), and soft targets (B, K) that add up to one.
    """
    if not pixels.is_floating_point():
        raise ConfigError(f"mixing needs normalized pixels, not {pixels.dtype}: call normalize first")
    targets = smooth_labels(labels, classes, smoothing)
    if not settings.mixes or rng.random() >= settings.mixup_prob:
        return pixels, targets
    partners = mixing_partners(len(pixels), repeats).to(pixels.device)
    has_cutmix = settings.cutmix_alpha > 0
    if rng.random() < has_cutmix / (has_cutmix + (settings.mixup_alpha > 0)):  # one half if both have an alpha
        box = cutmix_box(
            (pixels.shape[2], pixels.shape[3]), rng.beta(settings.cutmix_alpha, settings.cutmix_alpha), rng
        )
        share = 1.0 - box.rows * box.columns / (pixels.shape[2] * pixels.shape[3])
        rows, columns = slice(box.top, box.top + box.rows), slice(box.left, box.left + box.columns)
        pixels = pixels.clone()
        pixels[:, :, rows, columns] = pixels[:, :, rows, columns][partners]
    else:
        share = rng.beta(settings.mixup_alpha, settings.mixup_alpha)
        pixels = pixels[partners].lerp_(pixels, share)
    return pixels, targets[partners].lerp_(targets, share)


def smooth_labels(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """1 - `smoothing` for the label, and `smoothing` divided among all classes: (B,) -> (B, K) float32."""
    return F.one_hot(labels, classes).float().mul_(1.0 - smoothing).add_(smoothing / classes)


def mixing_partners(count: int, repeats: int = 1) -> Tensor:
    """1, 0, 3, 2, ... in groups of `repeats`; an image without a partner is mixed with itself."""
    indices = torch.arange(count)
    partners = (indices // repeats ^ 1) * repeats + indices % repeats
    return torch.where(partners < count, partners, indices)


def cutmix_box(size: Size, share: float, rng: np.random.Generator) -> Box:
    """About 1 - `share` of an image, with its aspect ratio, around a random point and clipped at the edges."""
    side = math.sqrt(1.0 - share)
    spans = []
    for length, draw in zip(size, rng.random(2).tolist()):
        middle, reach = int(draw * length), int(side * length) / 2
        start, stop = max(0, math.floor(middle - reach)), min(length, math.floor(middle + reach))
        spans.append((start, stop - start))
    (top, rows), (left, columns) = spans
    return Box(top, left, rows, columns)
