"""Two-tower models and images that the tests of words share."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from two_towers import save_clip, save_siglip


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """Folder, model and tokenizer of a CLIP."""
    folder = tmp_path_factory.mktemp("clip")
    return folder, *save_clip(folder)


@pytest.fixture(scope="session")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    return folder, *save_siglip(folder, model_input_names=["input_ids"], padding_side="right")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of two classes with two images each."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for name in ("cat", "red_dog"):
        (folder / name).mkdir()
        for number in range(2):
            pixels = generator.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder
