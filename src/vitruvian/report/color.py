"""The colors of everything that is drawn: a palette for lines, and one color map for values.

The palette is Okabe and Ito's, darkened for white paper. The ten anchors of the map are viridis (S. van der Walt and
N. Smith, CC0): from dark violet over green to yellow. Lightness rises all the way, so the map also works in gray.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLORS = ("#0072b2", "#d55e00", "#007a59", "#a94a82", "#946500", "#2f7fb5")
"""Of the lines of a chart, told apart by color-blind eyes; the stylesheet has lighter ones for dark screens."""
INK, SOFT, LINE, PAPER = "#1c1e21", "#5d646e", "#d9dde3", "#ffffff"
"""Text, lesser text, fine lines and what is below them, on light screens and in images."""
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")

Values = NDArray[np.floating]
Rgb = NDArray[np.uint8]
"""(..., 3), 0 to 255."""


@cache
def color_map() -> Rgb:
    """256 colors, (256, 3)."""
    anchors = np.array([list(bytes.fromhex(anchor)) for anchor in VIRIDIS], dtype=np.float64)
    places = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(places, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def colored(values: Values, low: float = 0.0, high: float = 1.0) -> Rgb:
    """Values between `low` and `high` as colors; what lies outside takes the color of the end."""
    span = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    return color_map()[np.rint(np.nan_to_num(span).clip(0, 1) * 255).astype(np.intp)]


def color_bar(width: int, height: int) -> Image.Image:
    """The colors from low to high, from left to right."""
    return Image.fromarray(np.broadcast_to(colored(np.linspace(0, 1, width))[None], (height, width, 3)).copy())
