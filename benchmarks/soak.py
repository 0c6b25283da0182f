"""Half an hour of good and bad traffic: does `vit serve` keep memory, threads or files?

python benchmarks/soak.py --model weights.safetensors [--minutes 30] [--rate 5]

One line of JSON a minute: requests by status, resident memory, threads and open files of the server (Linux). Ends with
exit code 1 if any request was answered with 5xx, or if memory in the last third exceeds that of the second third by
more than 5%.
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
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from serving import wait_until_ready

MARK = "soak-boundary"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vitruvian.cli", "serve", "--model", asked.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_ready(port, server)
        sys.exit(soaked(port, server.pid, asked.minutes, asked.rate))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def soaked(port: int, server: int, minutes: float, rate: float) -> int:
    chance = random.Random(0)
    kinds = traffic()
    statuses: Counter[str] = Counter()
    memory: list[float] = []
    begun = time.monotonic()
    minute = sent = 0
    while (now := time.monotonic() - begun) < 60 * minutes:
        name = chance.choice(list(kinds))
        statuses[f"{name} {answered(port, *kinds[name])}"] += 1
        sent += 1
        if now >= 60 * (minute + 1):
            minute += 1
            memory.append(resident_megabytes(server))
            threads, files = len(os.listdir(f"/proc/{server}/task")), len(os.listdir(f"/proc/{server}/fd"))
            row = {"minute": minute, "requests": sent, "mb": memory[-1], "threads": threads, "files": files}
            print(json.dumps(row), flush=True)
        time.sleep(max(0.0, sent / rate - (time.monotonic() - begun)))
    print(json.dumps(dict(sorted(statuses.items()))))
    third = max(1, len(memory) // 3)
    middle, last = statistics.median(memory[third : 2 * third] or memory), statistics.median(memory[-third:])
    failed = sum(count for status, count in statuses.items() if " 5" in status)
    print(json.dumps({"mb_second_third": middle, "mb_last_third": last, "5xx": failed}))
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
    return kinds | {
        "/predict not json": ("POST", "/predict", b"{" * 1000, plain),
        "/predict foreign origin": ("POST", "/predict", multipart(good), {**form, "Origin": "http://other.example"}),
        "/nowhere": ("GET", "/../../etc/passwd", b"", {}),
        "/metrics": ("GET", "/metrics", b"", {}),
        "/": ("GET", "/", b"", {}),
    }


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
