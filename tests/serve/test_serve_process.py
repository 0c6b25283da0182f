"""`vit serve` as users run it: real connections, slow and large bodies, signals, load."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from processes import Process
from tiny_service import photo, tiny_vit

import vitruvian as vt
from forked import patience
from vitruvian.inference import Classifier

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    vt.save(tiny_vit(), folder)
    return folder


@pytest.fixture(scope="module")
def service(weights):
    running = Process("--model", f"tiny={weights}", "--max-seconds", "1", "--max-mb", "2", "--queue", "3")
    yield running
    running.close()


def upload(content: bytes) -> dict:
    return {"files": [("image", ("a.png", content, "image/png"))]}


def raw(service: Process, head: str, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the service answers to bytes on a plain connection."""
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode())
        for piece in pieces:
            try:
                connection.sendall(piece)
            except OSError:
                break
            time.sleep(pause)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def test_a_served_model_is_named_and_answers(service, weights):
    found = service.client.post("/predict", **upload(photo(1))).json()
    expected = Classifier(weights).predict([photo(1)])[0]
    assert found["model"] == "tiny"
    assert [a["label"] for a in found["results"][0]["predictions"]] == [a.label for a in expected]


def test_adapters_are_models_beside_their_base(weights, tmp_path):
    from vitruvian.config import LoraConfig
    from vitruvian.model.lora import add_lora
    from vitruvian.weights.adapter import save_adapter

    for name in ("cats", "dogs"):
        model = vt.load(weights, num_classes=2, head="new")
        model.meta = model.meta.replace(labels=(f"a {name}", "none"))
        add_lora(model, LoraConfig(rank=2))
        save_adapter(model, tmp_path / name, base=str(weights))
    words = [word for name in ("cats", "dogs") for word in ("--adapter", f"{name}={tmp_path / name}")]
    running = Process("--model", f"base={weights}", *words)
    try:
        models = running.client.get("/models").json()["models"]
        assert [(model["name"], model["num_classes"]) for model in models[1:]] == [("cats", 2), ("dogs", 2)]
        for name in ("cats", "dogs"):
            answer = running.client.post(f"/predict?model={name}", **upload(photo(1))).json()
            assert {each["label"] for each in answer["results"][0]["predictions"]} == {f"a {name}", "none"}
    finally:
        running.close()


def test_a_body_that_comes_too_slowly_is_408(service):
    head = "POST /predict HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: 1000\n\n"
    started = time.monotonic()
    answer = raw(service, head, *[b" "] * 15, pause=0.2)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body did not arrive within 1 s" in answer
    assert time.monotonic() - started < 20
    assert service.client.post("/predict", **upload(photo(1))).status_code == 200


def test_a_hundred_megabytes_are_413_whether_announced_or_not(service):
    piece = b"x" * 2**20
    head = "POST /predict HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    announced = raw(service, f"{head}Content-Length: {100 * 2**20}\n\n", *[piece] * 100)
    assert announced.startswith(b"HTTP/1.1 413")
    assert b"the body has more than 2.0 MB" in announced
    chunk = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    assert raw(service, f"{head}Transfer-Encoding: chunked\n\n", *[chunk] * 20).startswith(b"HTTP/1.1 413")


def test_another_host_name_is_refused_on_a_loopback_address(service):
    assert raw(service, "GET /models HTTP/1.1\nHost: evil.example\nConnection: close\n\n").startswith(b"HTTP/1.1 403")


def test_a_websocket_is_no_error_of_the_service(service):
    upgrade = "Connection: Upgrade, close\nUpgrade: websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: AAAA"
    assert raw(service, f"GET /health HTTP/1.1\nHost: localhost\n{upgrade}\n\n").startswith(b"HTTP/1.1 200")


def test_clients_that_leave_are_forgotten(service):
    host, port = service.url.removeprefix("http://").split(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\nabc")
    for _ in range(100):
        if 'vit_accepted_images{model="tiny"} 0.0' in service.client.get("/metrics").text:
            break
        time.sleep(0.05)
    assert service.client.post("/predict", **upload(photo(1))).status_code == 200


def children(process: int) -> list[tuple[int, int]]:
    """The processes that a process has started: id and niceness."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, parent, *rest = file.read_text().rpartition(") ")[2].split()
            if int(parent) == process and state != "Z":
                found.append((int(file.parent.name), int(rest[14])))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from /proc")
def test_decoding_of_a_large_image_yields_to_the_model_and_ends_when_its_client_leaves(weights):
    running = Process("--model", f"tiny={weights}", "--engine", "torch")
    address = running.url.removeprefix("http://").split(":")
    body = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    body += photo(1, size=(6000, 6000)) + b"\r\n--B--\r\n"
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    try:
        with socket.create_connection((address[0], int(address[1])), timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            found = next(found for _ in patience(30) if (found := children(running.process.pid)))
            os.kill(found[0][0], signal.SIGSTOP)  # it never ends by itself, on a machine of any speed
            normal = os.getpriority(os.PRIO_PROCESS, running.process.pid)
            assert any(niceness > normal for _ in patience(5) for _, niceness in children(running.process.pid))
            assert running.client.post("/predict", **upload(photo(1))).status_code == 200
        assert any(not children(running.process.pid) for _ in patience(20))
    finally:
        running.close()


def test_bodies_that_arrive_at_the_same_time_are_bounded(service):
    host, port = service.url.removeprefix("http://").split(":")
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    slow = [socket.create_connection((host, int(port)), timeout=5) for _ in range(3)]
    for connection in slow:
        connection.sendall(head)
    time.sleep(0.2)
    assert service.client.post("/predict", **upload(photo(1))).status_code == 429
    for connection in slow:
        connection.close()
    time.sleep(0.2)
    assert service.client.post("/predict", **upload(photo(1))).status_code == 200


def test_a_refusal_reaches_a_client_that_still_sends(service):
    """Closing a connection with unread bytes resets it, and the client loses the response."""
    host, port = service.url.removeprefix("http://").split(":")
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    large = head.replace(b"Length: 9", b"Length: 1900000")
    for _ in range(3):
        slow = [socket.create_connection((host, int(port)), timeout=5) for _ in range(3)]
        for connection in slow:
            connection.sendall(head)
        time.sleep(0.1)
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(large)
            for _ in range(10):  # fails if the service closes the connection meanwhile
                time.sleep(0.02)
                connection.sendall(b"x" * 190_000)
            assert connection.recv(65536).startswith(b"HTTP/1.1 429")
        for connection in slow:
            connection.close()
        time.sleep(0.1)


def test_disconnects_and_broken_forms_log_one_line_each(service):
    host, port = service.url.removeprefix("http://").split(":")
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=B\r\n"
    image = photo(1, size=(2000, 2000), kind="JPEG")
    body = b'--B\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + image + b"\r\n--B--\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    before = len(service.lines)
    for i in range(30):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(request[: len(request) // 2] if i % 3 == 0 else request)
            time.sleep(0.01 * (i % 8))
    assert raw(service, f"{head}Connection: close\nContent-Length: 9\n\n".replace("\r", ""), b"--C\r\nabcd").startswith(
        b"HTTP/1.1 400"
    )
    assert any(len(service.lines) - before >= 31 for _ in patience(30))
    time.sleep(0.5)  # for a line too many
    lines = [json.loads(line) for line in service.lines[before:]]
    assert len(lines) == 31
    assert {line["status"] for line in lines} <= {200, 400, 429, 499}


def test_every_line_of_the_log_after_the_first_is_json(service):
    service.client.get("/health")
    time.sleep(0.1)
    assert service.lines[0] == f"serving {service.url}"
    assert all("request_id" in json.loads(line) for line in service.lines[1:])


def test_wrong_options_are_one_line(vit_serve, weights, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = vit_serve("--model", weights, "--port", port)
        assert (code, err) == (
            1,
            f"error: 127.0.0.1:{port}: Address already in use; choose another --host or --port\n",
        )
    code, _, err = vit_serve("--model", f"a={weights}", "--model", f"a={weights}")
    assert (code, err) == (1, "error: --model: two models are called 'a'; name them with NAME=MODEL\n")
    for value in ("inf", "nan", "1e30", "0", "-1"):
        code, _, err = vit_serve("--model", weights, "--max-mb", value)
        assert (code, "Invalid value for '--max-mb'" in err) == (2, True)
    monkeypatch.setenv("VITRUVIAN_API_KEY", "\n")
    code, _, err = vit_serve("--model", weights)
    assert (code, err) == (
        1,
        "error: the API key has characters that no HTTP header can contain; use letters and digits\n",
    )


@pytest.fixture
def vit_serve(monkeypatch, capsys):
    """`vit serve` in this process, for what ends before it serves."""
    from vitruvian.cli.app import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["vit", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return (ended.value.code, *capsys.readouterr())

    return run


class Client(threading.Thread):
    """Sends one image again and again until the service is gone; remembers what came back."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.url, self.image = url, photo(seed)
        self.statuses: list[int] = []
        self.answers: set[str] = set()

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while True:
                try:
                    response = client.post("/predict", **upload(self.image))
                except httpx.TransportError:
                    return
                self.statuses.append(response.status_code)
                if response.status_code == 200:
                    self.answers.add(response.json()["results"][0]["predictions"][0]["label"])


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_loses_no_accepted_request(weights, stop):
    running = Process("--model", f"tiny={weights}", "--batch-size", "4")
    clients = [Client(running.url, seed) for seed in range(8)]
    for client in clients:
        client.start()
    assert any(all(len(client.statuses) > 1 for client in clients) for _ in patience(60))
    os.kill(running.process.pid, stop)
    assert running.process.wait(30) in (0, -stop, 128 + stop)
    for client in clients:
        client.join(30)
    running.close()
    answered = sum(client.statuses.count(200) for client in clients)
    lines = [json.loads(line) for line in running.lines[1:]]
    posts = [line for line in lines if line["method"] == "POST"]
    assert answered > 8
    assert {line["status"] for line in posts} <= {200}
    assert len(posts) == answered, "a request that was accepted got no answer"
    expected = Classifier(weights).predict([client.image for client in clients], top=1)
    assert [client.answers for client in clients] == [{answers[0].label} for answers in expected]
