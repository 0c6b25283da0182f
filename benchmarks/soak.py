"""Half an hour of good and bad traffic: does `vit serve` keep memory, threads or files?

python benchmarks/soak.py --model weights.safetensors [--minutes 30] [--rate 5]

One line of JSON a minute: requests by status, resident memory, threads and open files of the server (Linux). Ends with
exit code 1 if any request was answered with 5xx, or if the median memory of the last third exceeds that of the second
by more than 5%. Each 5xx is told with its seconds.
Minutes do not count in which the machine or this job was suspended, nor does an answer that was late because of that:
the server's clock goes on, and its time limit with it.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from serving import wait_until_ready

MARK = "soak-boundary"
SUSPENDED_SECONDS = 2.0
"""Between two ticks a tenth of a second apart: longer than any load delays a thread that only sleeps."""


class Clock:
    """Seconds since the start without those in which this process was suspended."""

    def __init__(self) -> None:
        self.begun = self._last = time.monotonic()
        self.suspended = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(0.1)
            gap, self._last = time.monotonic() - self._last, time.monotonic()
            if gap > SUSPENDED_SECONDS:
                self.suspended += gap

    def seconds(self) -> float:
        return time.monotonic() - self.begun - self.suspended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vitruvian", "serve", "--model", asked.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, server)
        sys.exit(soaked(port, server.pid, asked.minutes, asked.rate))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def soaked(port: int, server: int, minutes: float, rate: float) -> int:
    chance, clock, kinds = random.Random(0), Clock(), traffic()
    statuses: Counter[str] = Counter()
    memory = [resident_megabytes(server)]
    failed = minute = sent = 0
    while (now := clock.seconds()) < 60 * minutes:
        name, before = chance.choice(list(kinds)), clock.suspended
        status = answered(port, *kinds[name])
        seconds = clock.seconds() - now
        time.sleep(0.2 if status.startswith("5") else 0)  # until the clock has ticked
        suspended = clock.suspended - before
        statuses[f"{name} {status}{' suspended' if suspended else ''}"] += 1
        if status.startswith("5"):
            failed += not suspended
            print(
                json.dumps({"failed": name, "status": status, "seconds": seconds, "suspended": suspended}), flush=True
            )
        sent += 1
        if now >= 60 * (minute + 1):
            minute += 1
            memory.append(resident_megabytes(server))
            threads, files = len(os.listdir(f"/proc/{server}/task")), len(os.listdir(f"/proc/{server}/fd"))
            row = {"minute": minute, "requests": sent, "mb": memory[-1], "threads": threads, "files": files}
            print(json.dumps(row), flush=True)
        time.sleep(max(0.0, sent / rate - clock.seconds()))
    print(json.dumps(dict(sorted(statuses.items()))))
    third = max(1, len(memory) // 3)
    middle, last = statistics.median(memory[third : 2 * third] or memory), statistics.median(memory[-third:])
    row = {"mb_second_third": middle, "mb_last_third": last, "5xx": failed, "suspended_seconds": clock.suspended}
    print(json.dumps(row))
    return int(failed > 0 or last > 1.05 * middle)


def resident_megabytes(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def traffic() -> dict[str, tuple[str, str, bytes, dict[str, str]]]:
    """Requests by name: method, path, body, headers."""
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    good = file.getvalue()
    form = {"Content-Type": f"multipart/form-data; boundary={MARK}"}
    uploads = {
        "good": good,
        "empty": b"",
        "truncated": good[: len(good) // 2],
        "text": b"hello " * 100,
        "large": os.urandom(30_000_000),
        "pickle": b"\x80\x04\x95\x0e\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94",
    }
    kinds = {
        f"{path} {name}": ("POST", path, multipart(content), form)
        for path in ("/predict", "/embed", "/explain")
        for name, content in uploads.items()
        if name in ("good", "truncated") or path == "/predict"
    }
    plain = {"Content-Type": "application/json"}
    broken = {**plain, "Host": "[::1"}
    return kinds | {
        "/predict large image": ("POST", "/predict", multipart(bomb(6000)), form),
        "/explain large image": ("POST", "/explain", multipart(bomb(6000)), form),
        "/predict bomb": ("POST", "/predict", multipart(bomb(20_000)), form),
        "/predict 200 KB of headers": ("POST", "/predict", b"{}", {**plain, "X-Long": "a" * 200_000}),
        "/predict many images": ("POST", "/predict", b'{"images": [' + b'{"data": ""},' * 50_000 + b"{}]}", plain),
        "/predict broken host": ("POST", "/predict", b"{}", broken),
        "/predict not json": ("POST", "/predict", b"{" * 1000, plain),
        "/predict foreign origin": ("POST", "/predict", multipart(good), {**form, "Origin": "http://other.example"}),
        "/nowhere": ("GET", "/../../etc/passwd", b"", {}),
        "/metrics": ("GET", "/metrics", b"", {}),
        "/": ("GET", "/", b"", {}),
    }


def bomb(side: int) -> bytes:
    """A small file of many pixels."""
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


def multipart(content: bytes) -> bytes:
    head = f'--{MARK}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    return head.encode() + content + f"\r\n--{MARK}--\r\n".encode()


def answered(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> str:
    """The status of the answer; `closed` where the server ends the connection while the body is sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.read()
        return str(response.status)
    except (OSError, http.client.HTTPException):
        return "closed"
    finally:
        connection.close()


if __name__ == "__main__":
    main()
