"""The HTTP application: routes that parse a request, call the service and return JSON, and the files of the page.

Among the page's sample images, `cat.jpg` (Stefan van der Walt) and `coffee.jpg` (Rachel Michetti) are CC0, and
`rocket.jpg` (SpaceX) is in the public domain.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI, Request
from PIL import Image
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from vitruvian import __version__
from vitruvian.data.formats import open_dataset
from vitruvian.engines.graph import Graph
from vitruvian.engines.runtimes import EngineName
from vitruvian.errors import UnknownNameError, VitruvianError
from vitruvian.model.build import Model
from vitruvian.report.html import render
from vitruvian.serve.batching import QueueFull, ShuttingDown
from vitruvian.serve.inspection import Json
from vitruvian.serve.limits import ServiceLimits
from vitruvian.serve.middleware import AccessPolicy, Metrics, Refused, RequestMiddleware
from vitruvian.serve.requests import (
    ERRORS,
    EmbedResponse,
    ExplainOptions,
    ExplainResponse,
    ImageRequest,
    InspectOptions,
    Options,
    PredictOptions,
    PredictResponse,
    body_schema,
    read_request,
)
from vitruvian.serve.service import ServedModel, Service, TimedOut

log = logging.getLogger("vitruvian.serve")
O = TypeVar("O", bound=Options)  # noqa: E741

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "jpg": "image/jpeg", "svg": "image/svg+xml"}
"""Content types of the page's files by extension. The system's table may be wrong, and browsers must not guess."""
REVALIDATE = {"cache-control": "no-cache"}


def create_app(
    models: Mapping[str, Model | Graph],
    *,
    limits: ServiceLimits | None = None,
    access: AccessPolicy | None = None,
    engine: EngineName = "torch",
    metrics: Metrics | None = None,
) -> tuple[ASGIApp, Service]:
    """The application for these models by name, and the service behind it."""
    limits, metrics = limits or ServiceLimits(), metrics or Metrics()
    service = Service(models, limits, metrics.count_batch, engine)

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
    add_status_routes(app, service, metrics)
    add_image_routes(app, service)
    add_page(app)
    add_error_handlers(app)
    return RequestMiddleware(app, limits=limits, access=access or AccessPolicy(), metrics=metrics), service


def add_status_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.get("/health", summary="Whether the process is alive.")
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/ready", summary="Whether every model is warmed up at every batch size.", responses={503: {}})
    async def ready() -> JSONResponse:
        waiting = [name for name, served in service.models.items() if not served.warm.done()]
        return JSONResponse({"ready": not waiting, "warming_up": waiting}, 503 if waiting else 200)

    @app.get("/models", summary="The models by name; the first is the default.")
    async def models() -> dict[str, list[dict[str, Any]]]:
        return {"models": [served.facts() for served in service.models.values()]}

    @app.get("/metrics", summary="Metrics in Prometheus' text format.", response_class=Response)
    async def prometheus() -> Response:
        accepted = {name: served.batcher.accepted for name, served in service.models.items()}
        return Response(metrics.text(accepted), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_image_routes(app: FastAPI, service: Service) -> None:
    limits = service.limits
    arriving: set[Request] = set()

    async def read(request: Request, options: type[O], max_images: int) -> tuple[ImageRequest[O], ServedModel]:
        """Parse a request and find its model; refuses it before the body is read if there is no room."""
        if service.is_full or len(arriving) >= limits.queue:  # bounds the memory of bodies, too
            raise QueueFull(service.retry_seconds())
        arriving.add(request)
        try:
            parsed = await read_request(request, options, limits, max_images)
        finally:
            arriving.discard(request)
        served = service.find_model(parsed.options.model)
        request.state.model, request.state.images = served.name, len(parsed.images)
        return parsed, served

    def add_route(
        path: str,
        summary: str,
        compute: Callable[[ServedModel, list[bytes], O], Awaitable[list[Json]]],
        options: type[O],
        response: type[BaseModel] | None,
        *,
        single: bool = False,
    ) -> None:
        """A route for several images, whose response lists their results, or for a `single` one."""
        max_images = 1 if single else limits.max_images

        async def endpoint(request: Request) -> Response:
            parsed, served = await read(request, options, max_images)
            results = await until_disconnect(request, compute(served, parsed.images, parsed.options))
            if all("error" in result for result in results):
                raise Refused(422, results[0]["error"])
            results = [{"name": name, **result} for name, result in zip(parsed.names, results)]
            return JSONResponse({"model": served.name, **(results[0] if single else {"results": results})})

        app.post(
            path,
            name=path[1:],
            summary=summary,
            response_model=response,
            responses=ERRORS,
            openapi_extra={"requestBody": body_schema(options, max_images=max_images)},
        )(endpoint)

    explain, inspect = "Maps of one image, as arrays and overlays.", "Intermediate results for one image, for the page."
    add_route("/predict", "Classify images.", service.predict, PredictOptions, PredictResponse)
    add_route("/embed", "Feature vectors of images.", service.embed, Options, EmbedResponse)
    add_route("/explain", explain, service.explain, ExplainOptions, ExplainResponse, single=True)
    add_route("/inspect", inspect, service.inspect, InspectOptions, None, single=True)


async def until_disconnect(request: Request, result: Awaitable[Any]) -> Any:
    """The result; cancelled if the client closes its connection."""
    working, receiving = asyncio.ensure_future(result), asyncio.ensure_future(request.receive())
    try:
        while True:
            await asyncio.wait({working, receiving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if receiving.result()["type"] == "http.disconnect":
                raise ClientDisconnect
            receiving = asyncio.ensure_future(request.receive())
    finally:
        for task in (working, receiving):
            task.cancel()
        await asyncio.gather(working, receiving, return_exceptions=True)


@cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name. Only these can be requested."""
    folder = files("vitruvian.serve") / "page"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES}


@cache
def digit_png(digit: int) -> bytes:
    """The first test image of a digit: white on black, 8 x 8 pixels."""
    test = open_dataset("digits").splits["test"]
    pixels = test.read(int(np.flatnonzero(test.labels() == digit)[0]))
    assert isinstance(pixels, np.ndarray)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def add_page(app: FastAPI) -> None:
    """The page, its files and samples, and the documentation of the routes."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(page_files()["index.html"], media_type="text/html", headers=REVALIDATE)

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in page_files():
            raise Refused(404, "the page has no such file")
        kind = TYPES[name.rpartition(".")[2]]
        return Response(page_files()[name], media_type=kind, headers=REVALIDATE)

    @app.get("/page/digit/{digit}", include_in_schema=False)
    async def digit_file(digit: str) -> Response:
        if digit not in tuple("0123456789"):
            raise Refused(404, "digits are 0 to 9")
        return Response(digit_png(int(digit)), media_type="image/png", headers=REVALIDATE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(render("api.html", paths=app.openapi()["paths"]), media_type="text/html")


def add_error_handlers(app: FastAPI) -> None:
    """Every error becomes a JSON object with a message and the request's id."""

    def handle(kind: type[Exception], refusal: Callable[[Any], Refused]) -> None:
        async def handler(request: Request, error: Exception) -> Response:
            return refusal(error).response(request.state.request_id)

        app.add_exception_handler(kind, handler)

    def retry(error: Exception) -> Refused:
        return Refused(503, str(error), headers={"retry-after": "1"})

    def routing_error(error: HTTPException) -> Refused:
        messages = {404: "nothing at this path; /docs lists the routes", 405: "this path does not allow this method"}
        message = messages.get(error.status_code, str(error.detail))
        return Refused(error.status_code, message, headers=dict(error.headers or {}))

    def internal_error(error: Exception) -> Refused:
        log.error("internal error", exc_info=error)
        return Refused(500, "internal error; see the log of the service")

    handle(Refused, lambda error: error)
    handle(UnknownNameError, lambda error: Refused(404 if error.kind == "model" else 422, str(error)))
    handle(VitruvianError, lambda error: Refused(422, str(error)))
    handle(QueueFull, lambda error: Refused(429, str(error), headers={"retry-after": str(error.retry_seconds)}))
    handle(ShuttingDown, retry)
    handle(TimedOut, retry)
    handle(ClientDisconnect, lambda _: Refused(499, "the client disconnected"))
    handle(HTTPException, routing_error)
    handle(Exception, internal_error)
