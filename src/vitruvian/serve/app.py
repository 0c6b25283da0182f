"""The HTTP server: routes that call the service and return JSON, the files of the page, and the process.

Among the page's sample images, `cat.jpg` (Stefan van der Walt) and `coffee.jpg` (Rachel Michetti) are CC0, and
`rocket.jpg` (SpaceX) is in the public domain. The digits are the first of each class in the test split of `digits`.
"""

import asyncio
import json
import logging
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.resources import files
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from vitruvian import __version__
from vitruvian.engines.graph import Graph
from vitruvian.engines.runtimes import EngineName, check_engine
from vitruvian.errors import ConfigError, UnknownNameError, VitruvianError, argument
from vitruvian.model.build import Model
from vitruvian.progress import log_status
from vitruvian.report.html import render
from vitruvian.serve import protocols
from vitruvian.serve.batching import Refused, ServiceLimits, queue_full
from vitruvian.serve.inspection import Json
from vitruvian.serve.middleware import (
    PUBLIC_PATHS,
    AccessPolicy,
    LimitedConnection,
    Metrics,
    RequestMiddleware,
    problem_response,
)
from vitruvian.serve.requests import (
    ExplainOptions,
    InspectOptions,
    Options,
    PredictOptions,
    api,
    describe,
    read_request,
    request_schema,
)
from vitruvian.serve.service import ServedModel, Service
from vitruvian.serve.watch import WatchedFolder

log = logging.getLogger("vitruvian.serve")

LOOPBACK = ("localhost", "127.0.0.1", "::1")

# Content types of the page's files by extension. The system's table may be wrong, and browsers must not guess.
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
TYPES |= {"jpg": "image/jpeg", "png": "image/png"}


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
        dependencies=[Depends(refuse_query)],
        lifespan=lifespan,
    )
    add_status_routes(app, service, metrics)
    add_image_routes(app, service)
    add_page(app)

    async def handle(request: Request, error: Exception) -> Response:
        """Every error becomes a JSON object with a message and the request's id."""
        return problem_response(refusal(error), request.state.request_id, request.url.path)

    for kind in (Refused, VitruvianError, ClientDisconnect, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    access = access or AccessPolicy()
    describe_access(app, access)
    return RequestMiddleware(app, limits=limits, access=access, metrics=metrics, paths=paths), service


def refuse_query(request: Request) -> None:
    """Refuse query parameters where there are none; the page may be opened with any."""
    path, names = request.url.path, ", ".join(map(repr, request.query_params))
    if names and path != "/" and (request.method == "GET" or path.startswith(("/v1/", "/v2/"))):
        raise Refused(422, f"unknown query parameter {names}: this path has none")


def describe_access(app: FastAPI, access: AccessPolicy) -> None:
    """Add the schemas of responses and the API key, if there is one, to the OpenAPI schema."""
    schema = app.openapi()  # cached by FastAPI
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(api()["schemas"])
    if not access.api_key:
        return
    key = {"type": "apiKey", "in": "header", "name": "X-API-Key"}
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}, "key": key}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["security"] = [] if path in PUBLIC_PATHS else [{"bearer": []}, {"key": []}]


def add_status_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    def get(path: str, *statuses: int, tell: Callable[..., Json | Response]) -> None:
        """A GET route that returns the result of `tell`, with status 503 if that has `ready` False."""

        async def endpoint(request: Request) -> Response:
            content = tell(**request.path_params)
            if isinstance(content, Response):
                return content
            return JSONResponse(content, 200 if content.get("ready", True) else 503)

        app.get(path, name=path[1:], **describe(path, 422, *statuses))(endpoint)

    def ready() -> Json:
        waiting = [name for name, served in service.models.items() if not served.warm.done()]
        failed = [name for name, served in service.models.items() if served.warm.done() and not served.is_ready]
        return {"ready": not waiting and not failed, "warming_up": waiting, **({"failed": failed} if failed else {})}

    def prometheus() -> Response:
        accepted = {name: served.batcher.accepted for name, served in service.models.items()}
        return Response(metrics.text(accepted), media_type="text/plain; version=0.0.4; charset=utf-8")

    get("/health", tell=lambda: {"status": "ok", "version": __version__})
    get("/ready", 503, tell=ready)
    get("/models", tell=lambda: {"models": [served.facts() for served in service.models.values()]})
    get("/metrics", tell=prometheus)
    get("/v2", tell=lambda: {"name": "vitruvian", "version": __version__, "extensions": []})
    get("/v2/health/live", tell=lambda: {"live": True})
    get("/v2/health/ready", 503, tell=ready)
    get("/v2/models/{name}", 404, tell=lambda name: protocols.metadata(service.find_model(name)))
    is_ready = lambda name: {"name": name, "ready": service.find_model(name).is_ready}  # noqa: E731
    get("/v2/models/{name}/ready", 404, 503, tell=is_ready)


def several(served: ServedModel, names: list[str], results: list[Json], _: object) -> Json:
    return {"model": served.name, "results": [{"name": name, **result} for name, result in zip(names, results)]}


def single(served: ServedModel, names: list[str], results: list[Json], _: object) -> Json:
    return {"model": served.name, "name": names[0], **results[0]}


def add_image_routes(app: FastAPI, service: Service) -> None:
    limits = service.limits
    arriving: set[Request] = set()

    def post(path: str, options: Any, compute: Any, respond: Any = several, read: Any = read_request) -> None:
        """A route that reads values and options, computes a result for each, and puts them into a response."""
        max_images = 1 if respond is single else limits.max_images

        async def endpoint(request: Request) -> Response:
            if service.is_full or len(arriving) >= limits.queue:  # before its body is read, which takes memory, too
                raise queue_full(service.retry_seconds())
            arriving.add(request)
            try:
                names, values, fields = await read(request, options, limits, max_images)
            finally:
                arriving.discard(request)
            with service.using(request.path_params.get("name") or fields.model) as served:
                request.state.model, request.state.images = served.name, len(values)
                results = await until_disconnect(request, compute(served, values, fields))
            if all("error" in result for result in results):
                raise Refused(422, results[0]["error"])
            return JSONResponse(respond(served, names, results, fields))

        example = api()["routes"][path]["request"]
        if read is read_request:
            schema = request_schema(options, example, max_images=max_images)
        else:
            fields = options.model_json_schema(ref_template="#/components/schemas/{model}")
            api()["schemas"].update(fields.pop("$defs", {}))
            body = {"schema": fields, "example": example}
            schema = {"requestBody": {"required": True, "content": {"application/json": body}}}
        app.post(path, name=path[1:], **describe(path), openapi_extra=schema)(endpoint)

    post("/predict", PredictOptions, service.predict)
    post("/embed", Options, service.embed)
    post("/explain", ExplainOptions, service.explain, single)
    post("/inspect", InspectOptions, service.inspect, single)
    for path, (options, compute, respond) in protocols.ROUTES.items():
        post(path, options, partial(compute, service), respond, protocols.read_values)


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
    """The files of the page by name, with the colors of all reports. Only these can be requested."""
    folder = files("vitruvian.serve") / "page"
    sources = [file for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES]
    sources.append(files("vitruvian.report") / "templates" / "base.css")
    return {file.name: file.read_bytes() for file in sources}


def static(request: Request, content: bytes, kind: str) -> Response:
    """The content with its ETag, or 304 if the browser has it already."""
    headers = {"cache-control": "no-cache", "etag": f'W/"{zlib.crc32(content):08x}-{len(content)}"'}
    if headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)


def add_page(app: FastAPI) -> None:
    """The page, its files and samples, and the documentation of the routes."""

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return static(request, render("page_inside.html").encode(), "text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_file(request: Request, name: str) -> Response:
        if name not in page_files():
            raise Refused(404, "the page has no such file")
        return static(request, page_files()[name], TYPES[name.rpartition(".")[2]])

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        url = str(request.base_url).rstrip("/")
        return static(request, render("api.html", paths=app.openapi()["paths"], url=url).encode(), "text/html")


ROUTING_ERRORS = {404: "nothing at this path; /docs lists the routes", 405: "this path does not allow this method"}


def refusal(error: Exception) -> Refused:
    """The response to an error."""
    match error:
        case Refused():
            return error
        case VitruvianError():
            is_unknown_model = isinstance(error, UnknownNameError) and error.kind == "model"
            return Refused(404 if is_unknown_model else 422, str(error))
        case ClientDisconnect():
            return Refused(499, "the client disconnected")
        case HTTPException():
            message = ROUTING_ERRORS.get(error.status_code, str(error.detail))
            return Refused(error.status_code, message, headers=dict(error.headers or {}))
    log.error("internal error", exc_info=error)
    return Refused(500, "internal error; see the log of the service")


def serve(
    models: Mapping[str, Model | Graph],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: ServiceLimits | None = None,
    engine: EngineName = "torch",
    api_key: str = "",
    hosts: tuple[str, ...] = (),
    watched: WatchedFolder | None = None,
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve models over HTTP until SIGTERM or SIGINT.

    Args:
        models: Models by name; the first is the default.
        port: 0 takes a free port.
        engine: Computes the predictions of /predict.
        api_key: Required from clients, if set.
        hosts: Host names by which clients may address the service, in addition to those of a loopback address. By
            default any, unless `host` is a loopback address.
        watched: A folder of further models, which are already among `models`; its changes are followed.
        on_start: Called with the URL.
    """
    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise ConfigError("the API key has characters that no HTTP header can contain", hint="use letters and digits")
    listener = open_socket(host, port)
    if host in LOOPBACK:
        hosts = (*LOOPBACK, *hosts)
    set_up_logging()
    limits = limits or ServiceLimits()
    access = AccessPolicy(api_key=api_key, hosts=tuple(name.lower() for name in hosts))
    metrics = Metrics()
    app, service = create_app(models, limits=limits, access=access, engine=check_engine(engine), metrics=metrics)
    config = uvicorn.Config(
        app,
        http=partial(LimitedConnection, limits, metrics),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=max(1, round(3 * limits.max_seconds)),
    )
    name = f"[{host}]" if ":" in host else host
    on_start(f"http://{name}:{listener.getsockname()[1]}")
    stopped = threading.Event()
    if watched is not None:
        threading.Thread(target=watched.follow, args=(service, stopped), daemon=True).start()
    uvicorn.Server(config).run(sockets=[listener])
    stopped.set()


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        hint = f"choose another {argument('host')} or {argument('port')}"
        raise ConfigError(str(error.strerror), where=f"{host}:{port}", hint=hint) from None
    listener.set_inheritable(True)
    return listener


class JsonFormatter(logging.Formatter):
    """One line of JSON per record; access lines are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "vitruvian.serve.access":
            return record.getMessage()
        line = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line})


def set_up_logging() -> None:
    """Log one line per request and errors to stderr, as JSON; other libraries' warnings about clients are dropped."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    levels = {"vitruvian.serve": logging.INFO, "asyncio": logging.ERROR, "uvicorn": logging.ERROR}
    for name, level in {**levels, "python_multipart": logging.CRITICAL}.items():
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
    log_status(logging.getLogger("vitruvian.serve").info)
