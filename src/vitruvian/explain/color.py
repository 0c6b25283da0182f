"""One color map for everything that is drawn: even steps in lightness, told apart by color-blind eyes.

The ten anchors are viridis (S. van der Walt and N. Smith, CC0): from dark violet over green to yellow. Lightness rises
all the way, so the map also works in gray.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ANCHORS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")

Values = NDArray[np.floating]
Rgb = NDArray[np.uint8]
"""(..., 3), 0 to 255."""


@cache
def palette() -> Rgb:
    """256 colors, (256, 3)."""
    anchors = np.array([list(bytes.fromhex(anchor)) for anchor in ANCHORS], dtype=np.float64)
    places = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(places, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def colored(values: Values, low: float = 0.0, high: float = 1.0) -> Rgb:
    """Values between `low` and `high` as colors; what lies outside takes the color of the end."""
    span = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    return palette()[np.rint(np.nan_to_num(span).clip(0, 1) * 255).astype(np.intp)]


def stretched(values: Values) -> NDArray[np.float64]:
    """Values moved to 0 to 1, least to greatest; all 0 where they are all the same."""
    exact: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    span = float(np.ptp(exact))
    return (exact - exact.min()) / (span or 1.0)


def color_bar(width: int, height: int) -> Image.Image:
    """The colors from low to high, from left to right."""
    return Image.fromarray(np.broadcast_to(colored(np.linspace(0, 1, width))[None], (height, width, 3)).copy())
