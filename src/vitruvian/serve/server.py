"""The server process: socket, connections, log, and a shutdown that finishes accepted requests."""

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vitruvian.engines.graph import Graph
from vitruvian.engines.runtimes import EngineName, check_engine
from vitruvian.errors import ConfigError, argument, require
from vitruvian.model.build import Model
from vitruvian.progress import log_status
from vitruvian.serve.batching import ServiceLimits
from vitruvian.text import format_bytes

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from vitruvian.serve.middleware import Metrics

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_HEADER_BYTES = 65_536  # of the request line and headers together, and between two chunks of a body


def serve(
    models: Mapping[str, Model | Graph],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: ServiceLimits | None = None,
    engine: EngineName = "torch",
    api_key: str = "",
    hosts: tuple[str, ...] = (),
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
        on_start: Called with the URL.
    """
    uvicorn = require("uvicorn", "serve")
    for module in ("fastapi", "httptools", "python_multipart", "prometheus_client"):
        require(module, "serve")
    from vitruvian.serve.app import create_app
    from vitruvian.serve.middleware import AccessPolicy, Metrics

    if not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
        raise ConfigError("the API key has characters that no HTTP header can contain", hint="use letters and digits")
    listener = open_socket(host, port)
    if host in LOOPBACK:
        hosts = (*LOOPBACK, *hosts)
    set_up_logging()
    limits = limits or ServiceLimits()
    access = AccessPolicy(api_key=api_key, hosts=tuple(name.lower() for name in hosts))
    metrics = Metrics()
    app, _ = create_app(models, limits=limits, access=access, engine=check_engine(engine), metrics=metrics)
    config = uvicorn.Config(
        app,
        http=connection_class(limits, metrics),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=max(1, round(3 * limits.max_seconds)),
    )
    name = f"[{host}]" if ":" in host else host
    on_start(f"http://{name}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run(sockets=[listener])


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


class HeadersTooLarge(Exception):
    """Stops the parser; the response was sent."""


def connection_class(limits: ServiceLimits, metrics: "Metrics") -> "type[HttpToolsProtocol]":
    """uvicorn's connection with limits on the size and time of headers, and JSON for invalid requests.

    uvicorn limits neither with httptools; with h11 it limits the size only, and responds in plain text.
    """
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

    from vitruvian.serve.middleware import HEADERS, Refused

    class LimitedConnection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _in_headers = True
        _bytes_since_body = 0  # received since the last byte of a body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._bytes_since_body += len(data)
            if self._in_headers and self._timer is None:
                self._start_timer()
            super().data_received(data)
            if self._bytes_since_body > MAX_HEADER_BYTES:
                self._refuse_headers()

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self._in_headers, self._bytes_since_body = False, 0
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
                self._refuse_headers()
                raise HeadersTooLarge
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
            response = Refused(status, message).response(request_id)
            response.headers.update({"connection": "close", **HEADERS, "x-request-id": request_id})
            lines = "".join(f"{name}: {value}\r\n" for name, value in response.headers.items())
            self.transport.write(STATUS_LINE[status] + lines.encode() + b"\r\n" + response.body)
            self.transport.close()
            client = self.client[0] if self.client else ""
            metrics.log_response("other", {"request_id": request_id, "client": client, "status": status})

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(limits.max_seconds, self._on_timeout)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _on_timeout(self) -> None:
            self._timer = None
            if self.cycle is not None and not self.cycle.response_complete:  # the last request is still being served
                self._start_timer()
            elif self._bytes_since_body:
                self._refuse(408, f"the headers did not arrive within {limits.max_seconds:g} s")
            else:
                self.transport.close()

    return LimitedConnection
