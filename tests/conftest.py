"""What tests of several folders use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real weights and pictures beside the project; tests that need it are skipped without it."""
    folder = Path(os.environ.get("VITRUVIAN_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here; set VITRUVIAN_SHARED")
    return folder
