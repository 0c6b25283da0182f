"""Every test has a cache folder of its own and one thread, so that numbers repeat."""

import pytest
import torch


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
