"""Clients of a service with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from tiny_service import tiny_vit

from vitruvian.model.vit import ViT


@pytest.fixture(scope="session")
def model() -> ViT:
    return tiny_vit()


@pytest.fixture
def client_of() -> Iterator[Callable[..., httpx.Client]]:
    """A client of an application in this process, with its own event loop in a thread."""
    from starlette.testclient import TestClient

    from vitruvian.serve.app import create_app

    opened = []

    def make(models: dict[str, ViT], **settings: object) -> httpx.Client:
        app, service = create_app(models, **settings)
        client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        client.__enter__()
        opened.append(client)
        for served in service.models.values():
            served.warm.result(300)
        client.service = service
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def client(client_of, model):
    return client_of({"tiny": model})
