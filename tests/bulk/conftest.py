"""Images, and a small model to ask about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitruvian.config import ViTConfig
from vitruvian.model.build import Model, build


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRUVIAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return build(ViTConfig(image_size=16, patch_size=8, width=16, depth=1, num_heads=2, num_classes=3)).eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of 12 images; number 5 is not an image."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for number in range(24):
        path = folder / "ab"[number // 12] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 20, 3), np.uint8)).save(path)
    (folder / "a" / "05.png").write_bytes(b"not an image")
    return folder
