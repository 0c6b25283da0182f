"""The server process: its socket, its log lines, and an end that finishes what was accepted."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Mapping

from vitruvian.engines.sessions import EngineName, check_engine
from vitruvian.errors import ConfigError, argument, require
from vitruvian.model.build import Model
from vitruvian.serve.limits import Limits

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def serve(
    models: Mapping[str, Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    engine: EngineName = "torch",
    api_key: str = "",
    hosts: tuple[str, ...] = (),
    started: Callable[[str], None] = lambda url: None,
) -> None:
    """Answer HTTP requests until a signal; `started` hears the address.

    `engine` computes the answers of /predict. Port 0 takes a free one. `hosts` are the names by which clients may
    call; on a loopback address its own names, elsewhere any, unless told.
    """
    uvicorn = require("uvicorn", "serve")
    require("fastapi", "serve")
    require("httptools", "serve")
    require("python_multipart", "serve")
    require("prometheus_client", "serve")
    from vitruvian.serve.app import create_app
    from vitruvian.serve.connection import connection_class
    from vitruvian.serve.gate import Access
    from vitruvian.serve.metrics import Metrics

    listening = bound(host, port)
    if host in LOOPBACK:
        hosts = (*LOOPBACK, *hosts)
    write_log()
    bounds = limits or Limits()
    access = Access(api_key=api_key, hosts=tuple(h.lower() for h in hosts))
    metrics = Metrics()
    app, _ = create_app(models, limits=bounds, access=access, engine=check_engine(engine), metrics=metrics)
    settings = uvicorn.Config(
        app,
        http=connection_class(bounds, metrics),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=max(1, round(3 * bounds.max_seconds)),
    )
    name = f"[{host}]" if ":" in host else host
    started(f"http://{name}:{listening.getsockname()[1]}")
    uvicorn.Server(settings).run(sockets=[listening])


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        raise ConfigError(
            f"{host}:{port}: {error.strerror}; choose another {argument('host')} or {argument('port')}"
        ) from None
    listening.set_inheritable(True)
    return listening


def write_log() -> None:
    """Access lines as JSON and errors with their traceback, all on stderr; uvicorn's warnings are about clients."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name, level in (("vitruvian.serve", logging.INFO), ("uvicorn", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
