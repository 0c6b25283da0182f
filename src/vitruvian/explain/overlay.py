"""Draw maps over images, with the part that the model sees marked, and write the files of `vit explain`."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitruvian.config import Preprocess
from vitruvian.data.preprocess import Bounds, geometry, resize_for_display
from vitruvian.files import atomic_open
from vitruvian.report.color import apply_color_map
from vitruvian.settings import Size

WEAKEST, STRONGEST = 0.4, 0.75  # opacity of the color at the minimum and at the maximum of the map
LONGEST_NAME = 60
UNPAINTED = 0.5  # brightness of the patches without a color
OUTSIDE = 0.35  # brightness of the part that the model does not see

FloatBox = tuple[float, float, float, float]  # left, top, right, bottom


def seen_box(size: Size, preprocess: Preprocess) -> FloatBox:
    """The part of an image of `size` (rows, columns) that the model sees, in pixels of the image."""
    (height, width), (left, top, right, bottom) = geometry(size, preprocess)
    down, across = size[0] / height, size[1] / width
    return left * across, top * down, right * across, bottom * down


def overlay(
    image: Image.Image,
    values: NDArray[np.floating],
    preprocess: Preprocess,
    *,
    patch: Size | None = None,
    ends: tuple[float, float] | None = None,
) -> Image.Image:
    """Draw a map over a gray copy of the image. The part that the model does not see is dark.

    Args:
        image: The upright RGB image.
        values: The map (R, C).
        preprocess: The preprocessing of the model.
        patch: Row and column of a query patch to frame.
        ends: The values between which colors range; by default the minimum and the maximum of the map.
    """
    shown = resize_for_display(image)
    box = shown_box(shown, preprocess)
    size = box[2] - box[0], box[3] - box[1]
    heat = Image.fromarray(stretch(values, ends).astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    weights = np.asarray(heat).clip(0, 1)[:, :, None]
    strength = WEAKEST + (STRONGEST - WEAKEST) * weights
    below = np.asarray(shown.crop(box).convert("L"))[:, :, None]
    mixed = strength * apply_color_map(weights[:, :, 0]) + (1 - strength) * below
    canvas = darken_around(shown, Image.fromarray(np.rint(mixed).astype(np.uint8)), box)
    if patch is None:
        return canvas
    (left, top), down, across = box[:2], size[1] / values.shape[0], size[0] / values.shape[1]
    corner = round(left + patch[1] * across), round(top + patch[0] * down)
    return draw_frame(canvas, (*corner, round(left + (patch[1] + 1) * across), round(top + (patch[0] + 1) * down)))


def paint(image: Image.Image, colors: NDArray[np.floating], preprocess: Preprocess) -> Image.Image:
    """Paint patches over a gray copy of the image. Patches without a color, and what the model does not see, are dark.

    Args:
        image: The upright RGB image.
        colors: Red, green and blue of each patch from 0 to 1, (R, C, 3); NaN for none.
        preprocess: The preprocessing of the model.
    """
    shown = resize_for_display(image)
    box = shown_box(shown, preprocess)
    size = box[2] - box[0], box[3] - box[1]
    # colors are interpolated with the weight that they have, so that they do not fade to black at the edges
    known = ~np.isnan(colors[:, :, :1])
    layers = np.concatenate([np.where(known, colors, 0.0), known], axis=2).astype(np.float32)
    smooth = [Image.fromarray(layers[:, :, k]).resize(size, Image.Resampling.BILINEAR) for k in range(4)]
    values = np.stack([np.asarray(channel) for channel in smooth], axis=2)
    weight = values[:, :, 3:]
    below = np.asarray(shown.crop(box).convert("L"))[:, :, None] * (weight + (1 - weight) * UNPAINTED)
    mixed = STRONGEST * 255 * values[:, :, :3] + (1 - STRONGEST * weight) * below
    return darken_around(shown, Image.fromarray(np.rint(mixed.clip(0, 255)).astype(np.uint8)), box)


def image_with_crop(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """The image with a frame around the part that the model sees."""
    shown = resize_for_display(image)
    box = shown_box(shown, preprocess)
    return darken_around(shown, shown.crop(box), box)


def shown_box(shown: Image.Image, preprocess: Preprocess) -> Bounds:
    left, top, right, bottom = map(round, seen_box((shown.height, shown.width), preprocess))
    left, top = min(left, shown.width - 1), min(top, shown.height - 1)
    return left, top, max(left + 1, min(right, shown.width)), max(top + 1, min(bottom, shown.height))


def stretch(values: NDArray[np.floating], ends: tuple[float, float] | None = None) -> NDArray[np.float64]:
    """Scale values from the range between `ends`, or theirs, to 0 to 1; all 0 if they are equal."""
    exact: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    low, high = ends or (float(exact.min()), float(exact.max()))
    return (exact - low) / ((high - low) or 1.0)


def darken_around(image: Image.Image, inside: Image.Image, box: Bounds) -> Image.Image:
    """A dark gray copy of the image, with `inside` in the framed box."""
    canvas = image.convert("L").convert("RGB").point(lambda level: level * OUTSIDE)
    canvas.paste(inside, box)
    return draw_frame(canvas, box)


def draw_frame(image: Image.Image, box: Bounds) -> Image.Image:
    """Draw a white frame with a dark edge around the box, unless it is the whole image."""
    if box != (0, 0, *image.size):
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = box
        pen.rectangle((left - 1, top - 1, right, bottom), outline=(0, 0, 0), width=3)
        pen.rectangle((left, top, right - 1, bottom - 1), outline=(255, 255, 255), width=1)
    return image


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    """Write an npz file that loads without pickle."""
    with atomic_open(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return path


def file_name(text: str) -> str:
    """The text with characters that every file system allows."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:LONGEST_NAME] or "image"
