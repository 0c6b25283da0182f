"""Colors of charts and maps: a palette for lines and a color map for values.

The palette is Okabe and Ito's, darkened for white paper. The color map is viridis (S. van der Walt and N. Smith, CC0),
interpolated between ten anchors. Its lightness increases monotonically, so that it also works in gray.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLORS = ("#0072b2", "#d55e00", "#007a59", "#a94a82", "#946500", "#2f7fb5")
"""Chart lines, distinguishable with color blindness: `--c0` ... in `style.css`, which also has them for dark mode."""
TRAINING, HELD_OUT, OTHER = 0, 1, 2  # indices of the colors of training images, held-out images and others
INK, SOFT, LINE, PAPER = "#1c1e21", "#5d646e", "#d9dde3", "#ffffff"  # text, secondary text, thin lines, background
VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")

Rgb = NDArray[np.uint8]  # (..., 3), 0 to 255


@cache
def color_map() -> Rgb:
    """256 colors, (256, 3)."""
    anchors = np.array([list(bytes.fromhex(anchor)) for anchor in VIRIDIS], dtype=np.float64)
    positions = np.linspace(0, len(anchors) - 1, 256)
    channels = [np.interp(positions, np.arange(len(anchors)), anchors[:, channel]) for channel in range(3)]
    return np.rint(np.stack(channels, axis=1)).astype(np.uint8)


def apply_color_map(values: NDArray[np.floating], low: float = 0.0, high: float = 1.0) -> Rgb:
    """Map values between `low` and `high` to colors; values outside are clipped."""
    span = (np.asarray(values, dtype=np.float64) - low) / (high - low)
    return color_map()[np.rint(np.nan_to_num(span).clip(0, 1) * 255).astype(np.intp)]


def color_bar(width: int, height: int) -> Image.Image:
    """The color map from left (low) to right (high)."""
    return Image.fromarray(np.broadcast_to(apply_color_map(np.linspace(0, 1, width))[None], (height, width, 3)).copy())
