"""A hostile client on a plain connection: a 4xx with a sentence for each request; no memory and no secret is left."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn
from PIL import Image
from processes import Process
from tiny_service import encoded, photo, tiny_vit

import vitruvian as vt
from vitruvian.serve.batching import ServiceLimits

pytestmark = pytest.mark.slow

KEY = "s3cret-of-the-service"
MARK = "attack-boundary"
PAGE = b"GET /models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    vt.save(tiny_vit(), folder)
    limits = ("--max-seconds", "2", "--max-mb", "5", "--queue", "4")
    running = Process("--model", f"tiny={folder}", *limits, environment={"VITRUVIAN_API_KEY": KEY})
    yield running
    running.close()


def head(method: str = "POST", path: str = "/predict", *headers: str, host: str = "localhost") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"X-API-Key: {KEY}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def sent(body: bytes, kind: str, path: str = "/predict", *headers: str) -> bytes:
    return head("POST", path, f"Content-Type: {kind}", f"Content-Length: {len(body)}", *headers) + body


def of_json(text: str) -> bytes:
    return sent(text.encode(), "application/json")


def part(content: bytes, name: str = "image", about: str = '; filename="a.png"') -> bytes:
    return f'--{MARK}\r\nContent-Disposition: form-data; name="{name}"{about}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes, path: str = "/predict", headers: tuple[str, ...] = ()) -> bytes:
    body = b"".join(parts) + f"--{MARK}--\r\n".encode()
    return sent(body, f"multipart/form-data; boundary={MARK}", path, *headers)


def field(name: str, value: str) -> bytes:
    return part(value.encode(), name, about="")


def chunked(*headers: str) -> bytes:
    return head("POST", "/predict", "Content-Type: application/json", "Transfer-Encoding: chunked", *headers)


GOOD = part(photo(1))
IMAGE = base64.b64encode(photo(1)).decode()
HOSTILE = {
    "long header": (head("GET", "/health", "X-Long: " + "a" * 300_000), 431, "the headers have more than 65,536 bytes"),
    "many headers": (head("GET", "/health", *[f"X-{i}: 1" for i in range(20_000)]), 431, "the headers have more"),
    "long path": (head("GET", "/" + "a" * 60_000 + "?" + "b" * 60_000), 431, "the headers have more"),
    "trailers": (chunked() + b"2\r\n{}\r\n0\r\nX-T: " + b"x" * 300_000 + b"\r\n\r\n", 431, "the headers have more"),
    "chunk extension": (chunked() + b"2;" + b"x" * 300_000 + b"\r\n{}\r\n0\r\n\r\n", 431, "the headers have more"),
    "two lengths": (
        head("POST", "/predict", "Content-Length: 5", "Content-Length: 6"),
        400,
        "not a valid HTTP",
    ),
    "length and chunks": (chunked("Content-Length: 5") + b"0\r\n\r\n" + PAGE, 400, "not a valid HTTP"),
    "odd encoding": (head("POST", "/predict", "Transfer-Encoding: xchunked") + PAGE, 400, "not a valid HTTP"),
    "space in a header": (head("POST", "/predict", "Transfer-Encoding : chunked"), 400, "not a valid HTTP"),
    "negative length": (head("POST", "/predict", "Content-Length: -5"), 400, "not a valid HTTP"),
    "length of 20 digits": (
        head("POST", "/predict", f"Content-Length: {2**64 - 1}", "Expect: 100-continue"),
        413,
        "5.0",
    ),
    "broken chunk": (chunked() + b"zz\r\n{}\r\n", 400, "not a valid HTTP"),
    "endless chunk": (chunked() + b"f" * 20 + b"\r\n{}\r\n", 400, "not a valid HTTP"),
    "TLS": (bytes.fromhex("1603010200010001fc0303") + bytes(100), 400, "not a valid HTTP"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "not a valid HTTP"),
    "no host": (b"GET /models HTTP/1.1\r\nConnection: close\r\n\r\n", 403, "this Host is not served here"),
    "half a host": (head("GET", "/models", host="[::1"), 403, "this Host is not served here"),
    "host with a name": (head("GET", "/models", host="localhost@evil.example"), 403, "this Host is not served here"),
    "two hosts": (head("GET", "/models", "Host: evil.example"), 400, "more than one Host"),
    "half an origin": (form(GOOD, headers=("Origin: http://[",)), 403, "another origin"),
    "two origins": (form(GOOD, headers=("Origin: http://localhost", "Origin: http://evil")), 403, "another origin"),
    "escape": (head("GET", "/page/../../../etc/passwd"), 404, "nothing at this path"),
    "escape, encoded twice": (head("GET", "/page/%252e%252e/app.py"), 404, "nothing at this path"),
    "null in a path": (head("GET", "/page/%00"), 404, "the page has no such file"),
    "method": (head("DELETE", "/predict"), 405, "this path does not allow this method"),
    "websocket": (
        head("GET", "/predict", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA"),
        405,
        "this path does not allow this method",
    ),
    "key in the query": (
        f"GET /models?api_key={KEY} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode(),
        401,
        "an API key is required",
    ),
    "pickle": (form(part(b"\x80\x04\x95\x0e\0\0\0\0\0\0\0\x8c\x02os\x94.")), 422, "not an image"),
    "PostScript": (form(part(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), 422, "not an image"),
    "bomb": (form(part(encoded(Image.new("1", (30_000, 30_000))))), 422, "30000x30000 pixels exceed"),
    "33 images": (form(*[part(b"x")] * 33), 413, "33 images are more than the limit of 32"),
    "1,000 files": (form(*[part(b"x")] * 1000), 400, "Too many files"),
    "1,000 fields": (form(GOOD, *[field(f"f{i}", "1") for i in range(1000)]), 400, "Too many fields"),
    "a field of 2 MB": (form(GOOD, field("labels", "x" * 2_000_000)), 400, "malformed form"),
    "a field twice": (
        form(GOOD, field("model", "no"), field("model", "tiny")),
        422,
        "'model' occurs twice",
    ),
    "unknown model": (form(GOOD, field("model", "../tiny")), 404, "unknown model '../tiny'"),
    "words without a text tower": (form(GOOD, field("labels", "cat,dog")), 422, "no text tower"),
    "deep JSON": (of_json('{"images": ' + "[" * 100_000 + "]" * 100_000 + "}"), 400, "not valid JSON"),
    "100,000 images": (of_json('{"images": [' + '{"data": ""},' * 99_999 + "{}]}"), 413, "100000 images are more"),
    "100,000 fields": (
        of_json("{" + ",".join(f'"k{i}": 1' for i in range(100_000)) + "}"),
        422,
        "100000 fields are more than the limit of 20",
    ),
    "many fields of an image": (
        of_json('{"images": [{' + ",".join(f'"k{i}": 1' for i in range(1000)) + "}]}"),
        422,
        "images.0: 1000 fields are more than the limit of 20",
    ),
    "a long number": (of_json('{"images": [{"data": "AA=="}], "top": ' + "9" * 5000 + "}"), 400, "not valid JSON"),
    "half a character": (of_json('{"images": [{"data": "' + IMAGE + '", "name": "\\ud800"}]}'), 422, "images.0.name"),
    "no base64": (of_json('{"images": [{"data": "%%"}]}'), 422, "images.0.data: not base64"),
}


def response_of(service: Process, *pieces: bytes, pause: float = 0.0, seconds: float = 30) -> tuple[int, str]:
    """Status and body of the response to these bytes; 0 where the connection is closed without one."""
    host, port = service.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        except OSError:  # refused already
            pass
        try:
            while data := connection.recv(65536):
                received += data
        except ConnectionResetError:
            pass
    top, _, body = received.partition(b"\r\n\r\n")
    return int(top.split()[1]) if top else 0, body.decode()


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_request_is_refused_with_a_sentence(service, attack):
    content, status, text = HOSTILE[attack]
    found, body = response_of(service, content)
    problem = json.loads(body)
    assert (found, sorted(problem)) == (status, ["detail", "error", "request_id", "status", "title", "type"])
    assert text in problem["detail"]


@pytest.mark.parametrize("first", [1_000, 60_000, 100_000])
def test_trailers_are_limited_however_they_arrive(first):
    from vitruvian.serve.middleware import LimitedConnection, Metrics

    class Transport(asyncio.Transport):
        written = b""

        def write(self, data: bytes) -> None:
            self.written += data

        def is_closing(self) -> bool:
            return b"HTTP/1.1 4" in self.written

        def close(self) -> None:
            pass

        def pause_reading(self) -> None:
            pass

    async def send() -> bytes:
        async def app(scope, receive, send):
            await asyncio.Event().wait()

        config = uvicorn.Config(app, log_config=None)
        config.load()
        connection = LimitedConnection(
            ServiceLimits(), Metrics(), config=config, server_state=uvicorn.server.ServerState(), app_state={}
        )
        transport = Transport()
        connection.connection_made(transport)
        content = HOSTILE["trailers"][0]
        connection.data_received(content[:first])
        if not transport.written:
            connection.data_received(content[first:])
        connection.connection_lost(None)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return transport.written

    assert asyncio.run(send()).startswith(b"HTTP/1.1 431 ")


def test_headers_that_never_end_are_refused_or_closed(service):
    assert response_of(service, b"GET /health HTTP/1.1\r\nX: ", *[b"a" * 2**20] * 20)[0] in (0, 431)
    slow = response_of(service, b"GET /health HTTP/1.1\r\n", *[b"X: y\r\n"] * 14, pause=0.2)
    assert slow[0] == 408
    assert "the headers did not arrive within 2 s" in slow[1]
    assert response_of(service) == (0, "")  # a connection on which nothing comes is closed


def test_chunks_that_never_end_are_408(service):
    status, body = response_of(service, chunked(), *[b"1\r\n \r\n"] * 14, pause=0.2)
    assert (status, json.loads(body)["error"]) == (408, "the body did not arrive within 2 s")


def test_a_request_on_a_kept_connection_has_its_own_time(service):
    """The time for headers begins with their first byte, not with the connection."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=30)
    connection.connect()
    kept = connection.sock
    for _ in range(3):
        connection.request("GET", "/health")
        found = connection.getresponse()
        assert (found.status, json.loads(found.read())["status"]) == (200, "ok")
        time.sleep(1.2)
    assert connection.sock is kept
    connection.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_attacks_leave_no_memory_and_no_secret(service):
    def megabytes() -> float:
        pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    large = part(encoded(Image.new("L", (6000, 6000))))  # 108 MB as RGB
    cut = [part(encoded(Image.new("RGB", (6000, 6000)), kind)[:-200]) for kind in ("JPEG", "PNG")] * 2

    def wave() -> None:
        for route in ("/predict", "/explain", "/embed"):
            for _ in range(3):
                assert response_of(service, form(large, path=route), seconds=60)[0] in (
                    200,
                    503,
                )  # a slow machine may not
        assert response_of(service, form(*cut), seconds=60)[0] in (422, 503)
        for name in ("long header", "bomb", "100,000 images", "a field of 2 MB", "deep JSON"):
            response_of(service, HOSTILE[name][0])

    wave()  # libraries are loaded, pools are filled
    before = megabytes()
    wave()
    time.sleep(2.5)  # decoding that was given up ends, too
    assert megabytes() < before + 60, "less than one of the large images"
    log = "\n".join(service.lines)
    assert KEY not in log
    entries = [json.loads(line) for line in service.lines if not line.startswith("serving ")]
    others = [entry for entry in entries if "request_id" not in entry]
    assert all(entry["level"] == "info" and entry["message"].startswith("note: ") for entry in others)  # the engine


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("side", [3900, 6300])  # decoded in the service, and in a process of its own
def test_a_flood_of_requests_with_cut_images_is_bounded_in_memory(tmp_path, side):
    def peak_megabytes() -> float:
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e3

    vt.save(tiny_vit(), tmp_path / "tiny")
    running = Process("--model", tmp_path / "tiny", "--max-seconds", "3", "--engine", "torch")
    flood = {"files": [("image", ("a.jpg", encoded(Image.new("RGB", (side, side)), "JPEG")[:5000]))] * 32}
    try:
        running.client.post("/predict", files=[("image", ("a.png", photo(1)))])
        before = peak_megabytes()
        with ThreadPoolExecutor(10) as pool:
            statuses = set(pool.map(lambda _: running.client.post("/predict", **flood).status_code, range(10)))
        assert statuses <= {422, 429, 503}
        assert peak_megabytes() < before + 300, "ten requests of 32 images are far more than 10 GB"
    finally:
        running.close()
