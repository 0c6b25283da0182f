"""The HTTP application: routes that read a request, ask the service and write JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from vitruvian import __version__
from vitruvian.engines.sessions import EngineName
from vitruvian.errors import UnknownNameError, VitruvianError
from vitruvian.explain.explainer import MapSettings
from vitruvian.model.build import Model
from vitruvian.serve import schema
from vitruvian.serve.batching import Closed, Full
from vitruvian.serve.docs import docs_page
from vitruvian.serve.gate import Access, Gate, problem
from vitruvian.serve.limits import Limits
from vitruvian.serve.metrics import Metrics
from vitruvian.serve.requests import Asked, Refused, read_request
from vitruvian.serve.samples import add_page
from vitruvian.serve.service import Served, Service, TookTooLong

log = logging.getLogger("vitruvian.serve")
O = TypeVar("O", bound=schema.Options)  # noqa: E741

PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"description": "A broken body"},
    401: {"description": "No API key, or a wrong one"},
    403: {"description": "Another host or origin"},
    404: {"description": "No model of this name"},
    408: {"description": "The body was too slow"},
    413: {"description": "More bytes or images than allowed"},
    415: {"description": "Neither a form nor JSON"},
    422: {"description": "A field that cannot be, or no image that can be read"},
    429: {"description": "The queue is full; Retry-After tells when to come back"},
    503: {"description": "Shutting down, or no answer in time"},
}
for described in PROBLEMS.values():
    described["model"] = schema.Problem


def create_app(
    models: Mapping[str, Model],
    *,
    limits: Limits | None = None,
    access: Access | None = None,
    engine: EngineName = "torch",
    metrics: Metrics | None = None,
) -> tuple[ASGIApp, Service]:
    """The application for these models by name, and the service inside it."""
    bounds, counters = limits or Limits(), metrics or Metrics()
    service = Service(models, bounds, counters.batch, engine)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="Vitruvian",
        version=__version__,
        description="Image recognition with Vision Transformers.",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    add_states(app, service, counters)
    add_questions(app, service)
    add_page(app)
    add_errors(app)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(docs_page(app.openapi()), media_type="text/html")

    return Gate(app, limits=bounds, allowed=access or Access(), metrics=counters), service


def add_states(app: FastAPI, service: Service, metrics: Metrics) -> None:
    """The routes that tell of the service itself."""

    @app.get("/health", summary="Is the process alive?")
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/ready", summary="Has every batch size of every model been computed once?", responses={503: {}})
    async def ready() -> JSONResponse:
        waiting = [name for name, served in service.models.items() if not served.warm.done()]
        return JSONResponse({"ready": not waiting, "warming_up": waiting}, 503 if waiting else 200)

    @app.get("/models", summary="The models by name; the first one answers where none is named.")
    async def models() -> dict[str, list[dict[str, Any]]]:
        return {"models": [served.facts() for served in service.models.values()]}

    @app.get("/metrics", summary="Counters in Prometheus' text format.", response_class=Response)
    async def counters() -> Response:
        return Response(metrics.text(service), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_questions(app: FastAPI, service: Service) -> None:
    """The routes that images are sent to."""
    limits = service.limits
    arriving: set[Request] = set()

    async def asked(request: Request, options: type[O], most_images: int) -> tuple[Asked[O], Served]:
        if service.full or len(arriving) >= limits.queue:  # before the body is read: the memory stays bounded, too
            raise Full(next(iter(service.models.values())).batcher.retry_seconds())
        arriving.add(request)
        try:
            read = await read_request(request, options, limits, most_images=most_images)
        finally:
            arriving.discard(request)
        served = service.named(read.options.model)
        request.state.model, request.state.images = served.name, len(read.images)
        return read, served

    def body(options: type[schema.Options], most_images: int) -> dict[str, Any]:
        return {"requestBody": schema.body_schema(options, most_images=most_images)}

    many = limits.max_images

    @app.post(
        "/predict",
        summary="What is in these images?",
        response_model=schema.Predictions,
        responses=PROBLEMS,
        openapi_extra=body(schema.PredictOptions, many),
    )
    async def predict(request: Request) -> Response:
        read, served = await asked(request, schema.PredictOptions, many)
        found = await unless_gone(request, service.predict(served, read.images, read.options))
        return JSONResponse({"model": served.name, "predictions": named(read.names, found)})

    @app.post(
        "/embed",
        summary="What the head reads of these images, as vectors.",
        response_model=schema.Embeddings,
        responses=PROBLEMS,
        openapi_extra=body(schema.Options, many),
    )
    async def embed(request: Request) -> Response:
        read, served = await asked(request, schema.Options, many)
        found = await unless_gone(request, service.embed(served, read.images))
        return JSONResponse({"model": served.name, "embeddings": named(read.names, found)})

    @app.post(
        "/explain",
        summary="What the answer rests on: maps of one image, as arrays and as overlays.",
        response_model=schema.Explanation,
        responses=PROBLEMS,
        openapi_extra=body(schema.ExplainOptions, 1),
    )
    async def explain(request: Request) -> Response:
        read, served = await asked(request, schema.ExplainOptions, 1)
        chosen = read.options
        settings = MapSettings(
            methods=tuple(chosen.maps), layer=chosen.layer, head=chosen.head, patch=chosen.patch, target=chosen.target
        )
        found = await unless_gone(request, service.explain(served, read.images[0], settings))
        return JSONResponse({"model": served.name, "name": read.names[0], **found})

    @app.post(
        "/inspect",
        summary="What happens inside the model on the way to its answer to one image; for the page.",
        responses=PROBLEMS,
        openapi_extra=body(schema.InspectOptions, 1),
    )
    async def inspect(request: Request) -> Response:
        read, served = await asked(request, schema.InspectOptions, 1)
        chosen = read.options
        call = service.inspect(
            served, read.images[0], chosen.parts, layer=chosen.layer, target=chosen.target, patches=chosen.erased
        )
        return JSONResponse({"model": served.name, "name": read.names[0], **await unless_gone(request, call)})


def named(names: Sequence[str], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each result with its image's name; Refused where no image could be read."""
    if all("error" in result for result in found):
        raise Refused(422, found[0]["error"])
    return [{"name": name, **result} for name, result in zip(names, found)]


async def unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
    """The answer, given up when the client closes its connection."""
    working, gone = asyncio.ensure_future(answer), asyncio.ensure_future(request.receive())
    try:
        while True:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if gone.result()["type"] == "http.disconnect":
                raise ClientDisconnect
            gone = asyncio.ensure_future(request.receive())
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def add_errors(app: FastAPI) -> None:
    """One form for everything that goes wrong: a sentence and the request's id."""

    def on(kind: type[Exception], refusal: Callable[[Any], Refused]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return problem(refusal(error), request.state.request_id)

        app.add_exception_handler(kind, handler)

    on(Refused, lambda error: error)
    on(UnknownNameError, lambda error: Refused(404 if error.kind == "model" else 422, str(error)))
    on(VitruvianError, lambda error: Refused(422, str(error)))
    on(Full, lambda error: Refused(429, str(error), headers={"retry-after": str(error.retry_seconds)}))
    on(Closed, lambda error: Refused(503, str(error), headers={"retry-after": "1"}))
    on(TookTooLong, lambda error: Refused(503, str(error), headers={"retry-after": "1"}))
    on(ClientDisconnect, lambda _: Refused(499, "the client has gone"))
    on(HTTPException, routing)
    on(Exception, unforeseen)


def routing(error: HTTPException) -> Refused:
    """What the router says, in a sentence."""
    said = {404: "there is nothing at this path; /docs lists the routes", 405: "this path does not take this method"}
    text = said.get(error.status_code, str(error.detail))
    return Refused(error.status_code, text, headers=dict(error.headers or {}))


def unforeseen(error: Exception) -> Refused:
    log.error("internal error", exc_info=error)
    return Refused(500, "internal error; the service's log tells more")
