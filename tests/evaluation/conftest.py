"""A cache of its own for each test of probes and evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nothing else uses."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VITRUVIAN_CACHE", str(folder))
    return folder
