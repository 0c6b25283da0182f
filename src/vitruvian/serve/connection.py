"""One connection of a client: the head of a request no longer and no slower than it may be, other bytes refused."""

from __future__ import annotations

import asyncio
import json
import secrets

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitruvian.serve.gate import HEADERS, write_access
from vitruvian.serve.limits import Limits
from vitruvian.serve.metrics import Metrics
from vitruvian.text import format_bytes

MAX_HEAD_BYTES = 65_536
"""Of a request's line and headers together, and of what is between two pieces of a body."""


class HeadTooLarge(Exception):
    """Tells the parser to stop; the client was answered."""


def connection_class(limits: Limits, metrics: Metrics) -> type[HttpToolsProtocol]:
    """What uvicorn makes for each connection, with these limits."""

    class Connection(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _in_head = True
        _since_body = 0
        """Bytes received that belong to no body."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._since_body += len(data)
            if self._in_head and self._timer is None:
                self._wait_for_head()
            super().data_received(data)
            if self._since_body > MAX_HEAD_BYTES:
                self._refuse_head()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            self._in_head, self._since_body = False, 0
            if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
                self._refuse_head()
                raise HeadTooLarge
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._since_body = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._in_head, self._since_body = True, 0
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "this is not a valid HTTP request")

        def _refuse_head(self) -> None:
            self._refuse(431, f"the headers have more than {format_bytes(MAX_HEAD_BYTES)}")

        def _refuse(self, status: int, text: str) -> None:
            if self.transport.is_closing():
                return
            request_id = secrets.token_hex(8)
            content = json.dumps({"error": text, "request_id": request_id}).encode()
            headers = {
                "content-type": "application/json",
                "content-length": str(len(content)),
                "connection": "close",
                **HEADERS,
                "x-request-id": request_id,
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[status] + lines.encode() + b"\r\n" + content)
            self.transport.close()
            client = self.client[0] if self.client else ""
            write_access(metrics, "other", {"request_id": request_id, "client": client, "status": status})

        def _wait_for_head(self) -> None:
            self._timer = self.loop.call_later(limits.max_seconds, self._head_is_late)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _head_is_late(self) -> None:
            self._timer = None
            if self.cycle is not None and not self.cycle.response_complete:  # the answer before it is still on its way
                self._wait_for_head()
            elif self._since_body:
                self._refuse(408, f"the headers did not arrive within {limits.max_seconds:g} s")
            else:
                self.transport.close()

    return Connection
