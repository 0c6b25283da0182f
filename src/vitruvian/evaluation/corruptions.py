"""ImageNet-C: its corruptions, 15 kinds at 5 strengths (D. Hendrycks and T. Dietterich, 2019), and models under each.

The parameters are the published ones, for images of 224 x 224 pixels. Images are resized and cropped to that size,
corrupted, stored as JPEG of quality 85 as in the release, and then given to the model's preprocessing. Two kinds differ
from the release: `frost` is made of noise instead of six photographs of frost, and the motion of `motion_blur` and
`snow` repeats ImageMagick's formula instead of calling it.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitruvian.config import Preprocess
from vitruvian.data.decode import RawImage, decode
from vitruvian.data.order import generator_for
from vitruvian.data.sources import DerivedSource, Source
from vitruvian.errors import UnknownNameError
from vitruvian.evaluation.metrics import RESAMPLES, ImageMeasures, Interval, Measures, bootstrap, number_format
from vitruvian.inference import Classifier

SIDE, RESIZED, QUALITY = 224, 256, 85  # pixels before and after the crop, and the quality of the released JPEG files
STRENGTHS = 5

Pixels = NDArray[np.float64]  # (SIDE, SIDE, 3) from 0 to 1
Corrupt = Callable[[Pixels, Any, np.random.Generator], Pixels]


def planes(x: Pixels) -> Tensor:  # (rows, columns, C) -> (C, 1, rows, columns)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 0)))[:, None]


def from_planes(x: Tensor) -> Pixels:
    return np.moveaxis(x[:, 0].numpy(), 0, -1)


def gaussian_blur(x: Pixels, sigma: float, truncate: float = 4.0, mode: Any = "edge") -> Pixels:
    """Separable Gaussian blur of (rows, columns, C) up to `truncate` standard deviations, padded as `np.pad` does."""
    radius = int(truncate * sigma + 0.5)
    kernel = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / sigma) ** 2)
    y = planes(np.pad(x, ((radius, radius), (radius, radius), (0, 0)), mode=mode))
    for shape in ((1, 1, -1, 1), (1, 1, 1, -1)):
        y = F.conv2d(y, (kernel / kernel.sum()).view(shape))
    return from_planes(y)


def defocus_blur(x: Pixels, c: tuple[int, float], rng: np.random.Generator) -> Pixels:
    """Blur with a disk of this radius, whose edge is smoothed."""
    radius, smooth = c
    reach, edge = max(radius, 8), 1 if radius <= 8 else 2
    grid = np.arange(-reach, reach + 1)
    disk = (grid[:, None] ** 2 + grid**2 <= radius**2).astype(np.float64)[..., None]
    disk = gaussian_blur(disk / disk.sum(), smooth, truncate=edge / smooth, mode="reflect")
    kernel = torch.from_numpy(np.ascontiguousarray(disk[..., 0]))[None, None]
    return from_planes(F.conv2d(F.pad(planes(x), [reach] * 4, mode="reflect"), kernel))


def glass_blur(x: Pixels, c: tuple[float, int, int], rng: np.random.Generator) -> Pixels:
    """Pixels replaced by near ones, one after the other from the end, between two blurs.

    The release was made with code that meant to swap the two pixels, but copied one over the other.
    """
    sigma, reach, rounds = c
    levels = np.floor(gaussian_blur(x, sigma) * 255) / 255
    order = list(range(SIDE * SIDE))
    for _ in range(rounds):
        steps = iter(rng.integers(-reach, reach, (SIDE * SIDE, 2)).tolist())
        for row in range(SIDE - reach, reach, -1):
            for column, (dx, dy) in zip(range(SIDE - reach, reach, -1), steps):
                order[row * SIDE + column] = order[(row + dy) * SIDE + column + dx]
    return gaussian_blur(levels.reshape(-1, 3)[order].reshape(x.shape), sigma)


def motion(x: Pixels, radius: int, sigma: float, angle: float) -> Pixels:
    """ImageMagick's motion blur: a half Gaussian along a line, sampled at whole pixels."""
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
    rows, columns = np.arange(x.shape[0]), np.arange(x.shape[1])
    total = np.zeros_like(x)
    for i, weight in enumerate(weights / weights.sum()):
        down, right = math.ceil(i * sine - 0.5), math.ceil(i * cosine - 0.5)
        total += weight * x[np.clip(rows + down, 0, len(rows) - 1)][:, np.clip(columns + right, 0, len(columns) - 1)]
    return total


def motion_blur(x: Pixels, c: tuple[int, float], rng: np.random.Generator) -> Pixels:
    return motion(x, *c, rng.uniform(-45, 45))


def zoom(x: Pixels, factor: float) -> Pixels:
    """The center enlarged to the full size, by linear interpolation."""
    cropped = math.ceil(SIDE / factor)
    top, size = (SIDE - cropped) // 2, round(cropped * factor)
    part = planes(x[top : top + cropped, top : top + cropped])
    larger = from_planes(F.interpolate(part, (size, size), mode="bilinear", align_corners=True))
    trim = (size - SIDE) // 2
    return larger[trim : trim + SIDE, trim : trim + SIDE]


def zoom_blur(x: Pixels, c: tuple[float, float], rng: np.random.Generator) -> Pixels:
    factors = np.arange(1, *c)
    return (x + sum(zoom(x, float(factor)) for factor in factors)) / (len(factors) + 1)


def snow(x: Pixels, c: tuple[float, ...], rng: np.random.Generator) -> Pixels:
    mean, spread, size, least, radius, sigma, keep = c
    flakes = zoom(rng.normal(mean, spread, (SIDE, SIDE, 1)), size)
    flakes = np.floor(np.where(flakes < least, 0, flakes).clip(0, 1) * 255) / 255
    flakes = motion(flakes, int(radius), sigma, rng.uniform(-135, -45))
    gray = (x @ [0.299, 0.587, 0.114])[..., None]
    whitened = keep * x + (1 - keep) * np.maximum(x, gray * 1.5 + 0.5)
    return whitened + flakes + np.rot90(flakes, 2)


def plasma(rng: np.random.Generator, decay: float, side: int = 256) -> NDArray[np.float64]:
    """A random cloud from 0 to 1: the diamond-square algorithm, on a torus, with roughness divided by `decay`."""
    cloud, step, rough = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half = step // 2

        def mean(total: NDArray[np.float64], rough: float = rough) -> NDArray[np.float64]:
            return total / 4 + rough * rng.uniform(-rough, rough, total.shape)

        corners = cloud[::step, ::step]
        pairs = corners + np.roll(corners, -1, 0)
        cloud[half::step, half::step] = mean(pairs + np.roll(pairs, -1, 1))
        centers = cloud[half::step, half::step]
        above, left = centers + np.roll(centers, 1, 0), corners + np.roll(corners, -1, 1)
        cloud[::step, half::step] = mean(above + left)
        above, left = centers + np.roll(centers, 1, 1), corners + np.roll(corners, -1, 0)
        cloud[half::step, ::step] = mean(above + left)
        step, rough = half, rough / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


def fog(x: Pixels, c: tuple[float, float], rng: np.random.Generator) -> Pixels:
    most = x.max()
    return (x + c[0] * plasma(rng, c[1])[:SIDE, :SIDE, None]) * most / (most + c[0])


def frost(x: Pixels, c: tuple[float, float], rng: np.random.Generator) -> Pixels:
    """Bright, bluish crystals: ridges of random clouds, in place of the photographs of the release."""
    ridges = np.mean([1 - np.abs(2 * plasma(rng, decay) - 1) for decay in (1.5, 1.7, 2.0)], axis=0)[:SIDE, :SIDE]
    ice = ridges.clip(0, 1)[..., None] ** 3 * [0.85, 0.93, 1.0]
    return c[0] * x + c[1] * ice


def brightness(x: Pixels, c: float, rng: np.random.Generator) -> Pixels:
    """The value in HSV, which is the largest channel, raised with hue and saturation unchanged."""
    value = x.max(axis=2, keepdims=True)
    raised = np.clip(value + c, 0, 1)
    return np.where(value > 0, x * raised / np.where(value > 0, value, 1), raised)


def contrast(x: Pixels, c: float, rng: np.random.Generator) -> Pixels:
    mean = x.mean(axis=(0, 1))
    return (x - mean) * c + mean


def elastic_transform(x: Pixels, c: tuple[float, float, float], rng: np.random.Generator) -> Pixels:
    """A random affine map of three points, then small random shifts that vary smoothly."""
    strength, sigma, moved = (244 * value for value in c)  # 244 as in the release
    center, reach = SIDE // 2, SIDE // 3
    points = np.array([[center + reach] * 2, [center + reach, center - reach], [center - reach] * 2], np.float64)
    targets = np.column_stack([points + rng.uniform(-moved, moved, points.shape), np.ones(3)])
    back = np.linalg.solve(targets, points)  # (3, 2) from (x, y, 1) of the result to (x, y) of the image
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float64)

    def sample(image: Pixels, right: NDArray[np.float64], down: NDArray[np.float64]) -> Pixels:
        grid = torch.from_numpy(np.stack([right, down], -1) * 2 / (SIDE - 1) - 1)[None].expand(3, -1, -1, -1)
        return from_planes(F.grid_sample(planes(image), grid, padding_mode="reflection", align_corners=True))

    at = np.stack([columns, rows, np.ones_like(rows)], -1) @ back
    shifts = strength * gaussian_blur(rng.uniform(-1, 1, (SIDE, SIDE, 2)), sigma, truncate=3.0, mode="symmetric")
    return sample(sample(x, at[..., 0], at[..., 1]), columns + shifts[..., 0], rows + shifts[..., 1])


def through_pillow(change: Callable[[Image.Image, float], Image.Image]) -> Corrupt:
    def corrupt(x: Pixels, c: float, rng: np.random.Generator) -> Pixels:
        return np.asarray(change(as_image(x), c), np.float64) / 255

    return corrupt


def as_image(x: Pixels) -> Image.Image:
    return Image.fromarray((x.clip(0, 1) * 255).astype(np.uint8))


def encode(image: Image.Image, quality: float) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=int(quality))
    return Image.open(buffer).convert("RGB")


def coarsen(image: Image.Image, c: float) -> Image.Image:
    small = image.resize((int(SIDE * c), int(SIDE * c)), Image.Resampling.BOX)
    return small.resize((SIDE, SIDE), Image.Resampling.BOX)


CORRUPTIONS: dict[str, tuple[Corrupt, tuple[Any, ...]]] = {
    # kind: function, and its parameter at each strength
    "gaussian_noise": (lambda x, c, rng: x + rng.normal(scale=c, size=x.shape), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": (lambda x, c, rng: rng.poisson(x * c) / c, (60, 25, 12, 5, 3)),
    "impulse_noise": (
        lambda x, c, rng: np.where(rng.random(x.shape) < c, rng.random(x.shape) < 0.5, x),
        (0.03, 0.06, 0.09, 0.17, 0.27),
    ),
    "defocus_blur": (defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": (glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": (motion_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": (zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": (
        snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": (frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": (fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": (brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": (contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic_transform": (
        elastic_transform,
        ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    ),
    "pixelate": (through_pillow(coarsen), (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg_compression": (through_pillow(encode), (25, 18, 15, 10, 7)),
}


def corrupt_image(image: Image.Image, kind: str, strength: int, rng: np.random.Generator) -> Image.Image:
    """An image, resized to 256 on its shorter side and cropped to 224, corrupted at a strength from 1 to 5."""
    columns, rows = (max(RESIZED, round(side * RESIZED / min(image.size))) for side in image.size)
    left, top = round((columns - SIDE) / 2), round((rows - SIDE) / 2)
    cropped = image.convert("RGB").resize((columns, rows), Image.Resampling.BILINEAR)
    x = np.asarray(cropped.crop((left, top, left + SIDE, top + SIDE)), np.float64) / 255
    function, parameters = CORRUPTIONS[kind]
    return encode(as_image(function(x, parameters[strength - 1], rng)), QUALITY)


class Corrupted(DerivedSource):
    """The images of a source, corrupted; image i depends on the seed, the kind, the strength and i alone."""

    def __init__(self, source: Source, kind: str, strength: int, seed: int) -> None:
        super().__init__(source)
        self.kind, self.strength, self.seed = kind, strength, seed

    def read(self, index: int) -> RawImage:
        rng = generator_for(self.seed, list(CORRUPTIONS).index(self.kind), self.strength, index)
        return np.asarray(corrupt_image(decode(self.source.read(index)), self.kind, self.strength, rng))


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptionResult:
    """The most important metric on corrupted images."""

    metric: str
    kinds: dict[str, tuple[float, ...]]  # at each strength
    count: int  # images, each corrupted in every way
    mean: float  # over all kinds and strengths
    interval: Interval

    def rows(self) -> list[tuple[str, ...]]:
        """Kind, metric at each strength and their mean as text."""
        text = number_format(self.metric)
        rows = ((name, [*values, float(np.mean(values))]) for name, values in self.kinds.items())
        return [(name, *map(text.format, values)) for name, values in rows]


def check_kinds(kinds: Sequence[str]) -> list[str]:
    """The kinds to measure; `all` stands for all 15."""
    for kind in kinds:
        if kind not in (*CORRUPTIONS, "all"):
            raise UnknownNameError("corruption", kind, CORRUPTIONS, see=f"(there are {', '.join(CORRUPTIONS)})")
    return list(CORRUPTIONS) if "all" in kinds else list(dict.fromkeys(kinds))


def measure_corruptions(
    classifier: Classifier,
    source: Source,
    kinds: Sequence[str],
    measure: Callable[[Classifier, Source], ImageMeasures],
    *,
    seed: int = 0,
) -> CorruptionResult:
    """`measure` a model on every image of a source, corrupted in these ways at 5 strengths."""
    preprocess = classifier.preprocess
    if isinstance(preprocess, Preprocess):
        preprocess.require_rgb("the corruption of images")
    if isinstance(preprocess, Preprocess) and preprocess.fit == "crop":  # the images are already cropped
        classifier = classifier.with_preprocess(preprocess.with_changes({"fit": "squash"}))
    ways = [(kind, strength) for kind in kinds for strength in range(1, STRENGTHS + 1)]
    parts = [measure(classifier, Corrupted(source, kind, strength, seed)) for kind, strength in ways]
    count, metric = parts[0].count, parts[0].metric
    values = [part.weighted(np.ones(count)) for part in parts]
    right = [part.right for part in parts if isinstance(part, Measures)]
    share = np.mean(right, axis=0) if right else None  # (n,) of the ways in which an image is classified correctly

    def mean(drawn: NDArray[np.float64]) -> float:
        if share is not None:
            return 100.0 * float(drawn @ share / drawn.sum())
        return float(np.mean([part.weighted(drawn) for part in parts]))

    # A metric that sorts the images is slow, and so many ways of corruption vary little.
    resamples = RESAMPLES if share is not None else int(np.clip(RESAMPLES / len(parts), 50, RESAMPLES))
    return CorruptionResult(
        metric=metric,
        kinds={kind: tuple(values[i * STRENGTHS : (i + 1) * STRENGTHS]) for i, kind in enumerate(kinds)},
        count=count,
        mean=float(np.mean(values)),
        interval=bootstrap(mean, count, seed=seed, resamples=resamples),
    )
