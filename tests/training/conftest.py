"""Every test has a cache folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path_factory.mktemp("cache")))
