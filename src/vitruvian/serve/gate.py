"""What every request passes: its id, the checks of host, origin and key, the limits of its body, and the log."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitruvian.serve.limits import Limits
from vitruvian.serve.metrics import Metrics
from vitruvian.serve.requests import Refused
from vitruvian.text import format_bytes

access = logging.getLogger("vitruvian.serve.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
"""Paths that need no key, beside the page's own files; they tell nothing of what was asked."""
DRAIN_SECONDS = 3.0
"""How long the body of a refused request is read and thrown away, so that its client reads the answer."""
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'self'",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Who may ask."""

    api_key: str = field(default="", repr=False)
    """Wanted as `Authorization: Bearer KEY` or `X-API-Key: KEY`; empty for none."""
    hosts: tuple[str, ...] = ()
    """Names by which clients may call the service; empty for any."""

    def check(self, method: str, path: str, headers: Headers) -> None:
        """Raise Refused where host, origin or key are wrong."""
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            raise Refused(400, "the request has more than one Host header")
        if self.hosts and host_name(host) not in self.hosts:
            raise Refused(403, "this Host is not served here; allow it with --allow-host")
        if method not in ("GET", "HEAD"):
            if any(address(origin) != host for origin in headers.getlist("origin")):
                raise Refused(403, "requests from pages of another origin are refused")
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                raise Refused(403, "requests from pages of another origin are refused")
        if self.api_key and path not in OPEN and not path.startswith("/page/"):
            scheme, _, token = headers.get("authorization", "").partition(" ")
            given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
            if not hmac.compare_digest(given.encode(), self.api_key.encode()):
                raise Refused(401, "an API key is wanted", headers={"www-authenticate": "Bearer"})


class Gate:
    """The outermost layer of the service."""

    def __init__(self, app: ASGIApp, *, limits: Limits, allowed: Access, metrics: Metrics) -> None:
        self.app, self.limits, self.allowed, self.metrics = app, limits, allowed, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        body = Body(receive, headers, self.limits)
        status = 499  # the client left before there was an answer

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = {**HEADERS, "x-request-id": request_id}
                if not body.complete:  # what is still on its way would be taken for the next request
                    extra["connection"] = "close"
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in extra.items())]
            await send(message)

        try:
            try:
                self.allowed.check(scope["method"], scope["path"], headers)
                body.check()
            except Refused as refused:
                await body.drain()
                await problem(refused, request_id)(scope, receive, sending)
                return
            await self.app(scope, body.receive, sending)
        finally:
            self.tell(scope, status, time.monotonic() - started, body)

    def tell(self, scope: MutableMapping[str, Any], status: int, seconds: float, body: Body) -> None:
        state = scope["state"]
        line = {
            "request_id": state["request_id"],
            "client": (scope.get("client") or ("",))[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "bytes": body.read,
        }
        line |= {key: state[key] for key in ("model", "images") if key in state}
        write_access(self.metrics, getattr(scope.get("route"), "path", "other"), line)


def write_access(metrics: Metrics, route: str, line: dict[str, Any]) -> None:
    """Count a response, and log it as one line of JSON."""
    metrics.response(route, line["status"], line.get("seconds", 0.0))
    access.info(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **line}))


class Body:
    """The body of a request, no longer and no slower than it may be."""

    def __init__(self, receive: Receive, headers: Headers, limits: Limits) -> None:
        self._receive, self.limits = receive, limits
        length = headers.get("content-length", "").lstrip("0") or "0"
        self.length = int(length) if length.isdecimal() and len(length) <= 20 else limits.max_bytes + 1
        self.waits = "100-continue" in headers.get("expect", "").lower()
        self.complete = not self.length and "transfer-encoding" not in headers
        self.read = 0
        self.deadline = time.monotonic() + limits.max_seconds

    def check(self) -> None:
        if self.length > self.limits.max_bytes:
            raise self.too_large()

    def too_large(self) -> Refused:
        return Refused(413, f"the body has more than {format_bytes(self.limits.max_bytes)}")

    async def receive(self) -> Message:
        if self.complete:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.limits.max_seconds:g} s") from None
        self.read += len(message.get("body", b""))
        self.complete = not message.get("more_body", False)
        if self.read > self.limits.max_bytes:
            raise self.too_large()
        return message

    async def drain(self) -> None:
        """Read what a refused client still sends, for a while: one whose writing fails may never read the answer."""
        if self.waits:
            return
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.complete:
                    message = await self._receive()
                    self.complete = not message.get("more_body", False)
        except TimeoutError:
            pass


def problem(refused: Refused, request_id: str) -> Response:
    content = {"error": str(refused), "request_id": request_id}
    return JSONResponse(content, refused.status, refused.headers)


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty where it is none."""
    try:
        name = urlsplit(f"//{host}").hostname if host.count("@") == 0 else None
    except ValueError:  # half an IPv6 address
        return ""
    return (name or "").lower()


def address(origin: str) -> str | None:
    """Host and port of an Origin header."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
