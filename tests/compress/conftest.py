"""Images for calibration."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """70 images in a folder without classes."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(70):
        pixels = generator.integers(0, 256, (4, 4, 3), np.uint8)
        Image.fromarray(pixels).resize((20, 20)).save(folder / f"{number}.png")
    return folder
