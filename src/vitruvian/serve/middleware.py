"""Around every request: limits of its connection and body, its id, access checks, access log and metrics."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitruvian.serve.batching import Refused, ServiceLimits
from vitruvian.text import format_bytes

access_log = logging.getLogger("vitruvian.serve.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Paths that need no API key, in addition to the page's files. They reveal nothing about requests.
PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"})
TITLES = {499: "Client Closed Request"}  # of statuses that are in no standard
MAX_HEADER_BYTES = 65_536  # of the request line and headers together, and between two chunks of a body
PIECE_BYTES = 16_384  # given to the parser at a time: the end of a request resets the count
DRAIN_SECONDS = 3.0  # how long the body of a refused request is read, so that its client reads the response
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'",
}
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)


def problem_response(refused: Refused, request_id: str, path: str = "") -> Response:
    """Problem details (RFC 9457); `error` repeats `detail`, where clients of the other protocols look for it."""
    title = TITLES.get(refused.status) or HTTPStatus(refused.status).phrase
    problem = {"type": "about:blank", "title": title, "status": refused.status, "detail": str(refused)}
    error = {"message": str(refused), "code": refused.status} if path.startswith("/v1/") else str(refused)
    content = {**problem, "error": error, "request_id": request_id}
    return JSONResponse(content, refused.status, refused.headers, "application/problem+json")


class Metrics:
    """Prometheus metrics of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter("vit_requests", "Responses", ["route", "status"], registry=self.registry)
        self.images = Counter("vit_images", "Images computed by the model", ["model"], registry=self.registry)
        self.accepted = Gauge("vit_accepted_images", "Images waiting or computed", ["model"], registry=self.registry)

        def histogram(name: str, about: str, label: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, [label], buckets=buckets, registry=self.registry)

        about = "From the first byte of a request to its response"
        self.seconds = histogram("vit_request_seconds", about, "route", SECONDS_BUCKETS)
        self.batches = histogram("vit_batch_images", "Images per batch", "model", BATCH_BUCKETS)
        self.compute = histogram("vit_batch_seconds", "Seconds per batch", "model", SECONDS_BUCKETS)

    def count_batch(self, model: str, images: int, seconds: float) -> None:
        self.images.labels(model).inc(images)
        self.batches.labels(model).observe(images)
        self.compute.labels(model).observe(seconds)

    def log_response(self, route: str, line: dict[str, Any]) -> None:
        """Count a response, and log it as one line of JSON."""
        self.requests.labels(route, str(line["status"])).inc()
        self.seconds.labels(route).observe(line.get("seconds", 0.0))
        access_log.info(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}))

    def text(self, accepted: Mapping[str, int]) -> bytes:
        """Prometheus' text format, with the accepted images of each model."""
        self.accepted.clear()  # of models that are no longer served
        for model, images in accepted.items():
            self.accepted.labels(model).set(images)
        return generate_latest(self.registry)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessPolicy:
    """Who may use the service."""

    api_key: str = field(default="", repr=False)  # in `Authorization: Bearer KEY` or `X-API-Key: KEY`; empty for none
    hosts: tuple[str, ...] = ()  # host names by which clients may address the service; empty for any

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise Refused if host, origin or API key are wrong."""
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            raise Refused(400, "the request has more than one Host header")
        if self.hosts and ("@" in host or split_url(f"//{host}").hostname not in self.hosts):
            raise Refused(403, "this Host is not served here; allow it with --allow-host")
        if method not in ("GET", "HEAD"):
            foreign = any(not host or split_url(origin).netloc != host for origin in headers.getlist("origin"))
            if foreign or headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                raise Refused(403, "requests from pages of another origin are refused")
        if self.api_key and path not in PUBLIC_PATHS and not path.startswith("/page/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            key = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(key.encode(), self.api_key.encode()):
                raise Refused(401, "an API key is required", headers={"www-authenticate": "Bearer"})


class RequestMiddleware:
    """The outermost layer of the application."""

    def __init__(
        self, app: ASGIApp, *, limits: ServiceLimits, access: AccessPolicy, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        self.app, self.limits, self.access, self.metrics, self.paths = app, limits, access, metrics, paths
        self.compressing = GZipMiddleware(app, minimum_size=1000, compresslevel=6)  # the page, reports of state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        started, method = time.monotonic(), scope["method"]
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        body = LimitedBody(receive, headers, self.limits)
        status = 499  # the client disconnected before there was a response

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                await body.drain()
                extra = {**HEADERS, "x-request-id": request_id}
                if not body.complete:  # the rest of the body would be taken for the next request
                    extra["connection"] = "close"
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
            await send(message)

        try:
            try:
                self.access.check(scope["method"], scope["path"], headers)
                body.check_length()
            except Refused as refused:
                await problem_response(refused, request_id, scope["path"])(scope, receive, send_with_headers)
                return
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # the server leaves out the body
            app = self.compressing if scope["method"] == "GET" else self.app
            await app(scope, body.receive, send_with_headers)
        finally:
            line = {
                "request_id": request_id,
                "client": (scope.get("client") or ("",))[0],
                "method": method,
                "path": scope["path"],
                "status": status,
                "seconds": round(time.monotonic() - started, 4),
                "bytes": body.bytes_read,
            }
            line |= {key: value for key, value in scope["state"].items() if key in ("model", "images")}
            refused_path = scope["path"] if scope["path"] in self.paths else "other"  # there is no route before routing
            route = scope.get("route")
            self.metrics.log_response(refused_path if route is None else route.path, line)


class LimitedBody:
    """The body of a request, limited in bytes and in seconds."""

    def __init__(self, receive: Receive, headers: Headers, limits: ServiceLimits) -> None:
        self._receive, self.limits = receive, limits
        length = headers.get("content-length", "").lstrip("0") or "0"
        self.length = int(length) if length.isdecimal() and len(length) <= 20 else limits.max_bytes + 1
        self.expects_continue = "100-continue" in headers.get("expect", "").lower()
        self.complete = not self.length and "transfer-encoding" not in headers
        self.bytes_read = 0
        self.deadline = time.monotonic() + limits.max_seconds

    def check_length(self) -> None:
        if max(self.length, self.bytes_read) > self.limits.max_bytes:
            raise Refused(413, f"the body has more than {format_bytes(self.limits.max_bytes)}")

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.limits.max_seconds:g} s") from None
        self.bytes_read += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        self.check_length()
        return message

    async def drain(self) -> None:
        """Read and discard the body for a while: a client that cannot finish writing may never read the response."""
        if self.complete or self.expects_continue or time.monotonic() > self.deadline:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.complete:
                    self.complete = not (await self._receive()).get("more_body", False)


def split_url(text: str) -> SplitResult:
    """The parts of a URL, all empty if it is invalid."""
    try:
        return urlsplit(text)
    except ValueError:  # an incomplete IPv6 address
        return urlsplit("")


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits on the size and time of headers, and JSON for invalid requests.

    uvicorn limits neither with httptools; with h11 it limits the size only, and responds in plain text.
    """

    _timer: asyncio.TimerHandle | None = None
    _in_headers = True
    _bytes_since_body = 0  # received since the last byte of a body

    def __init__(self, limits: ServiceLimits, metrics: Metrics, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits, self._metrics = limits, metrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._bytes_since_body += len(piece)
            if self._in_headers and self._timer is None:
                self._start_timer()
            super().data_received(piece)
            if self._bytes_since_body > MAX_HEADER_BYTES:
                self._refuse_headers()
            if self.transport.is_closing():
                return

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers, self._bytes_since_body = False, 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise ValueError  # stops the parser; the response was sent
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes_since_body = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers, self._bytes_since_body = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers have more than {format_bytes(MAX_HEADER_BYTES)}")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        request_id = secrets.token_hex(8)
        response = problem_response(Refused(status, message), request_id)
        response.headers.update({"connection": "close", **HEADERS, "x-request-id": request_id})
        lines = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
        self.transport.write(STATUS_LINE[status] + lines.encode() + b"\r\n" + response.body)
        self.transport.close()
        client = self.client[0] if self.client else ""
        self._metrics.log_response("other", {"request_id": request_id, "client": client, "status": status})

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.max_seconds, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:  # the last request is still being served
            self._start_timer()
        elif self._bytes_since_body:
            self._refuse(408, f"the headers did not arrive within {self._limits.max_seconds:g} s")
        else:
            self.transport.close()
