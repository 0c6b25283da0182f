"""The interface fuzzed by its own description: no input, however odd, is an error of the service."""

from __future__ import annotations

from collections import Counter

import pytest
from tiny_service import tiny_vit

from vitruvian.serve.batching import ServiceLimits

EXAMPLES = 25
ROUTES = [
    "/health",
    "/ready",
    "/models",
    "/metrics",
    "/predict",
    "/embed",
    "/explain",
    "/inspect",
    "/v1/embeddings",
    "/v2",
]
ROUTES += ["/v2/health/live", "/v2/health/ready"]
ROUTES += ["/v2/models/{name}", "/v2/models/{name}/ready", "/v2/models/{name}/infer"]


@pytest.fixture(scope="module")
def description():
    schemathesis = pytest.importorskip("schemathesis")  # here: every worker imports this file
    from vitruvian.serve.app import create_app

    app, service = create_app({"tiny": tiny_vit()}, limits=ServiceLimits(max_images=3, max_bytes=100_000, batch_size=4))
    for served in service.models.values():
        served.warm.result(30)

    async def lasting(scope, receive, send):
        """The application, which every call of the fuzzer would otherwise start and end."""
        if scope["type"] == "http":
            await app(scope, receive, send)
            return
        for step in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{step}.complete"})

    yield schemathesis.openapi.from_asgi("/openapi.json", lasting)
    service.stop()


@pytest.mark.slow
def test_every_route_is_fuzzed(description):
    assert sorted(operation.ok().path for operation in description.get_all_operations()) == sorted(ROUTES)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_request_makes_the_service_fail(description, route, mode):
    from hypothesis import HealthCheck, given, settings
    from schemathesis import Case, GenerationMode

    statuses: Counter[int] = Counter()
    operation = next(each.ok() for each in description.get_all_operations() if each.ok().path == route)

    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def fuzzed(case: Case) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()) >= {"type", "title", "status", "detail", "request_id"}
            assert str(response.status_code) in operation.definition.raw["responses"] or response.status_code == 405

    try:
        fuzzed()
    except Exception as error:
        if "Unsatisfiable" not in type(error).__name__:  # some routes take nothing that could be wrong
            raise
    assert statuses or mode == "negative"
