"""A map laid over its image at the image's own aspect ratio, with the part that the model sees marked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vitruvian.config import Preprocess
from vitruvian.data.preprocess import Bounds, geometry
from vitruvian.report.color import apply_color_map
from vitruvian.settings import Size

LONGEST_SIDE = 640
"""Pixels; larger images are reduced."""
SHORTEST_LONGEST_SIDE = 256
"""Smaller images are enlarged, their pixels left square."""
WEAKEST, STRONGEST = 0.4, 0.75
"""Share of the color in the image, at the map's least value and at its greatest."""
OUTSIDE = 0.35
"""Brightness of what the model does not see."""

FloatBox = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def seen_box(size: Size, preprocess: Preprocess) -> FloatBox:
    """The part of an image of (rows, columns) that the model sees, in the image's own pixels."""
    (height, width), (left, top, right, bottom) = geometry(size, preprocess)
    down, across = size[0] / height, size[1] / width
    return left * across, top * down, right * across, bottom * down


def overlay(
    image: Image.Image, values: NDArray[np.floating], preprocess: Preprocess, *, patch: Size | None = None
) -> Image.Image:
    """The upright RGB image with the map (R, C) of its view in color, from its least value to its greatest.

    The image turns gray below the colors; what the model does not see is dark, behind a frame. The `patch`
    (row, column) that a map looks from has a frame of its own.
    """
    shown = displayed(image)
    box = shown_box(shown, preprocess)
    size = box[2] - box[0], box[3] - box[1]
    heat = Image.fromarray(stretched(values).astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    heights = np.asarray(heat).clip(0, 1)[:, :, None]
    strength = WEAKEST + (STRONGEST - WEAKEST) * heights
    below = np.asarray(shown.crop(box).convert("L"))[:, :, None]
    mixed = strength * apply_color_map(heights[:, :, 0]) + (1 - strength) * below
    canvas = darkened(shown)
    canvas.paste(Image.fromarray(np.rint(mixed).astype(np.uint8)), box)
    canvas = framed(canvas, box)
    return canvas if patch is None else framed(canvas, patch_box(box, patch, (values.shape[0], values.shape[1])))


def image_with_crop(image: Image.Image, preprocess: Preprocess) -> Image.Image:
    """The image itself with the part the model sees framed."""
    shown = displayed(image)
    box = shown_box(shown, preprocess)
    canvas = darkened(shown)
    canvas.paste(shown.crop(box), box)
    return framed(canvas, box)


def displayed(image: Image.Image) -> Image.Image:
    """The image at a size for the screen."""
    longest = max(image.size)
    if longest > LONGEST_SIDE:
        scale, resample = LONGEST_SIDE / longest, Image.Resampling.LANCZOS
    elif longest < SHORTEST_LONGEST_SIDE:
        scale, resample = float(-(-SHORTEST_LONGEST_SIDE // longest)), Image.Resampling.NEAREST
    else:
        return image
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), resample)


def shown_box(shown: Image.Image, preprocess: Preprocess) -> Bounds:
    left, top, right, bottom = map(round, seen_box((shown.height, shown.width), preprocess))
    left, top = min(left, shown.width - 1), min(top, shown.height - 1)
    return left, top, max(left + 1, min(right, shown.width)), max(top + 1, min(bottom, shown.height))


def patch_box(box: Bounds, patch: Size, grid: Size) -> Bounds:
    """The place of a patch (row, column) inside the box that the grid fills."""
    left, top, right, bottom = box
    down, across = (bottom - top) / grid[0], (right - left) / grid[1]
    corner = round(left + patch[1] * across), round(top + patch[0] * down)
    return *corner, round(left + (patch[1] + 1) * across), round(top + (patch[0] + 1) * down)


def stretched(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Values moved to 0 to 1, least to greatest; all 0 where they are all the same."""
    exact: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    return (exact - exact.min()) / (float(np.ptp(exact)) or 1.0)


def darkened(image: Image.Image) -> Image.Image:
    return image.convert("L").convert("RGB").point(lambda level: level * OUTSIDE)


def framed(image: Image.Image, box: Bounds) -> Image.Image:
    """A white frame with a dark edge around the box, unless that is the whole image."""
    if box != (0, 0, *image.size):
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = box
        pen.rectangle((left - 1, top - 1, right, bottom), outline=(0, 0, 0), width=3)
        pen.rectangle((left, top, right - 1, bottom - 1), outline=(255, 255, 255), width=1)
    return image
