"""Limits of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from vitruvian.config import DEFAULT_BATCH_SIZE
from vitruvian.settings import MAX_INT, BatchSize, Range, Settings

Count = Annotated[int, Range(1, MAX_INT)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceLimits(Settings):
    """Limits of one request and of all requests together."""

    batch_size: BatchSize = DEFAULT_BATCH_SIZE
    """Maximum batch size of the model."""
    queue: Count = 64
    """Maximum number of accepted images per model; further requests get status 429."""
    max_images: Count = 32
    """Maximum number of images per request."""
    max_bytes: Count = 20_000_000
    """Maximum number of bytes in the body of a request."""
    max_pixels: Count = 40_000_000
    """Maximum number of pixels per image, whatever the size of its file."""
    max_seconds: Annotated[float, Range(0.01, 1e6)] = 30.0
    """Time limit in seconds, separately for the headers, the body, decoding and the response."""
