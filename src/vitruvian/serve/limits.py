"""What the service accepts, and how much of it at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.settings import LARGEST, BatchSize, Range, Settings

Count = Annotated[int, Range(1, LARGEST)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(Settings):
    """Bounds on one request and on all of them together."""

    batch_size: BatchSize = DEFAULT_BATCH_SIZE
    """Images the model computes at a time."""
    queue: Count = 64
    """Images that are accepted at a time for each model; more are answered with 429."""
    max_images: Count = 32
    """Images in one request."""
    max_bytes: Count = 20_000_000
    """Bytes in the body of one request."""
    max_pixels: Count = 40_000_000
    """Pixels of one image, whatever its file's size."""
    max_seconds: Annotated[float, Range(0.01, 1e6)] = 30.0
    """For the body of a request to arrive, for its images to be decoded, and for the answer."""
