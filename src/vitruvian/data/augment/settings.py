"""The settings of training views: which part of an image is seen, and what is done to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from vitruvian.config import Interpolation
from vitruvian.data.augment.ops import OPS
from vitruvian.errors import ConfigError, UnknownNameError
from vitruvian.settings import Range, Settings, Share, Size, check_range

Crop = Literal["inception", "resized", "pad", "center", "none"]
PaddingMode = Literal["constant", "reflect"]
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
