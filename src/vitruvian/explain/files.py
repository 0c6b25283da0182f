"""What an explanation leaves on the disk beside its page: images and arrays, each file whole or not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitruvian.weights.store import install, staging

LONGEST_NAME = 60


def write_image(path: Path, image: Image.Image) -> Path:
    with staging(path) as staged:
        image.save(staged, "PNG", optimize=True)
        install(staged, path)
    return path


def write_arrays(path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    """An npz file that loads without pickle."""
    with staging(path) as staged:
        np.savez_compressed(staged, **arrays)  # type: ignore[arg-type]
        install(staged, path)
    return path


def file_name(text: str) -> str:
    """The text in characters that every file system takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:LONGEST_NAME] or "image"
