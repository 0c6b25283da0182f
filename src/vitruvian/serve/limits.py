"""What the service accepts, and how much of it at a time."""

from __future__ import annotations

from dataclasses import dataclass

from vitruvian.config import BATCH, Settings, check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits(Settings):
    """Bounds on one request and on all of them together."""

    batch: int = BATCH
    """Images the model computes at a time."""
    queue: int = 64
    """Images that are accepted at a time for each model; more are answered with 429."""
    max_images: int = 32
    """Images in one request."""
    max_bytes: int = 20_000_000
    """Bytes in the body of one request."""
    max_pixels: int = 40_000_000
    """Pixels of one image, whatever its file's size."""
    max_seconds: float = 30.0
    """For the body of a request to arrive, and again for its answer."""

    def __post_init__(self) -> None:
        for name in ("batch", "queue", "max_images", "max_bytes", "max_pixels"):
            check_range(name, getattr(self, name), 1)
        check_range("max_seconds", self.max_seconds, 0.01)
