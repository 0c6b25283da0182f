"""Uploaded bytes as what a model sees and what an overlay is drawn on, small enough to wait in a queue."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from vitruvian.data.decode import decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.explain.overlay import FloatBox, displayed, seen_box
from vitruvian.machine import trim_memory
from vitruvian.model.build import Model

LARGE_PIXELS = 4_000_000
"""Of an image whose memory is returned to the system at once; the C library would keep it."""


@dataclass(frozen=True, slots=True)
class Upload:
    """One decoded image; at its own size it may take a hundred megabytes, so that is not kept."""

    pixels: Tensor
    """Normalized (channels, rows, columns)."""
    shown: Image.Image
    """At a size for the screen."""
    seen: FloatBox
    """The part the model sees, in the image's own pixels."""


def decode_view(image: bytes, model: Model, max_pixels: int) -> Tensor:
    """The normalized pixels (channels, rows, columns) that the model sees."""
    upright = decode(image, max_pixels=max_pixels)
    pixels, large = apply_preprocess(upright, model.preprocess), is_large(upright)
    del upright
    if large:
        trim_memory()
    return pixels


def decode_upload(image: bytes, model: Model, max_pixels: int) -> Upload:
    """The image for its explanation."""
    upright = decode(image, max_pixels=max_pixels)
    seen = seen_box((upright.height, upright.width), model.preprocess)
    upload, large = Upload(apply_preprocess(upright, model.preprocess), displayed(upright), seen), is_large(upright)
    del upright
    if large:
        trim_memory()
    return upload


def is_large(image: Image.Image) -> bool:
    return image.width * image.height > LARGE_PIXELS
