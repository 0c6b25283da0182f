"""`vit serve` at twice its capacity: what is accepted stays quick and right, the rest gets 429, and nothing is lost.

    python benchmarks/overload.py --model W.safetensors [--seconds 10] [--queue 32] [--engine torch] [--times 2]

Capacity is measured first, with as many clients as a batch holds. Then requests leave at a fixed rate, whether or not
earlier ones are answered, from a second process; each sends one of several images whose answers are known. The bound
on the latency is what the queue and two batches take at the measured capacity.

    python benchmarks/overload.py --model W.safetensors --bad png,ppm,jpeg [--clients 4] [--seconds 10] [--rounds 3]

measures the p99 of good clients alone and beside bad ones, in turn. Twice a second, a bad client sends an image that
takes long to decode, and leaves: a PNG of 40 million pixels, a PPM of 24 MB as text, a JPEG of 90 progressive scans.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

from PIL import Image

import serving
from serving import BATCH, form, random_jpeg, wait_until_ready

IMAGES = 8


def ask(port: int, image: int) -> tuple[int, tuple[str, float] | None]:
    """Status and best answer of one request on a connection of its own."""
    body, kind = form(random_jpeg(image))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/predict", body, {"Content-Type": kind})
        response = connection.getresponse()
        content = json.loads(response.read())
        if response.status == 429:
            assert int(response.headers["retry-after"]) > 0
        if response.status != 200:
            return response.status, None
        best = content["results"][0]["predictions"][0]
        return 200, (best["label"], best["probability"])
    finally:
        connection.close()


def load(port: int, rate: float, seconds: float) -> None:
    """Requests at a fixed rate; a row of JSON on what became of them."""
    known = [ask(port, image)[1] for image in range(IMAGES)]
    counts: collections.Counter[str] = collections.Counter()
    taken: list[float] = []

    def one(image: int) -> None:
        started = time.monotonic()
        try:
            status, best = ask(port, image)
        except (OSError, http.client.HTTPException) as error:
            counts[f"lost: {type(error).__name__}"] += 1
            return
        counts[str(status)] += 1
        if best is not None:
            taken.append(time.monotonic() - started)
            expected = known[image]
            counts["wrong"] += expected is None or best[0] != expected[0] or abs(best[1] - expected[1]) > 1e-3

    threads, begin = [], time.monotonic()
    for number in range(int(rate * seconds)):
        time.sleep(max(0.0, begin + number / rate - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(number % IMAGES,)))
        threads[-1].start()
    sent = len(threads) / (time.monotonic() - begin)
    for thread in threads:
        thread.join()
    taken.sort()
    print(
        json.dumps(
            {
                "sent_per_second": sent,
                **counts,
                "answered_per_second": len(taken) / (time.monotonic() - begin),
                "median_seconds": taken[len(taken) // 2],
                "p99_seconds": taken[int(0.99 * len(taken))],
                "slowest_seconds": taken[-1],
            }
        )
    )


def costly_image(kind: str) -> bytes:
    """An image that takes long to decode."""
    if kind == "ppm":
        return b"P3 2800 2800 255\n" + b"255 " * 6_000_000
    file = io.BytesIO()
    if kind == "png":
        noise = Image.effect_noise((630, 630), 50)
        noise.resize((6300, 6300), Image.Resampling.NEAREST).save(file, "PNG", compress_level=1)
        return file.getvalue()
    Image.effect_noise((2000, 2000), 50).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * 80 + data[-2:]


def leave(port: int, kind: str, seconds: float) -> None:
    """Send a costly image twice a second, and leave before there is a response."""
    body, form_kind = form(costly_image(kind))
    head = (
        f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {form_kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.3)
        time.sleep(0.2)


def beside_bad_clients(port: int, asked: argparse.Namespace) -> None:
    """A row of JSON for each kind of bad client: the p99 of good clients alone and beside it, in seconds."""
    for kind in asked.bad.split(","):
        alone, beside = [], []
        for _ in range(asked.rounds):
            alone.append(serving.measure(port, asked.clients, asked.seconds))
            bad = [sys.executable, __file__, "leave", str(port), kind, str(asked.seconds + 3)]
            with subprocess.Popen(bad) as leaving:
                time.sleep(2)
                beside.append(serving.measure(port, asked.clients, asked.seconds))
                leaving.terminate()
        p99 = [[round(each["p99_seconds"], 4) for each in rounds] for rounds in (alone, beside)]
        ratio = statistics.median(p99[1]) / statistics.median(p99[0])
        failed = sum(each["failed"] for each in beside)
        print(
            json.dumps({"bad": kind, "alone": p99[0], "beside": p99[1], "ratio": ratio, "failed": failed}), flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--queue", type=int, default=32)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--times", type=float, default=2.0)
    parser.add_argument("--bad", default="", help="kinds of bad clients: png, ppm, jpeg")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "vitruvian", "serve", "--batch-size", str(BATCH), "--queue", str(asked.queue)]
    command += ["--engine", asked.engine, "--model", asked.model, "--port", port]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, process_group=0)
    try:
        wait_until_ready(int(port), server)
        if asked.bad:
            beside_bad_clients(int(port), asked)
            return
        closed = [sys.executable, serving.__file__, "load", port, str(BATCH), str(asked.seconds / 2), ""]
        calm = json.loads(subprocess.run(closed, check=True, capture_output=True, text=True).stdout)
        capacity = calm["images_per_second"]
        bound = (asked.queue + 2 * BATCH) / capacity
        print(json.dumps({"capacity": capacity, "queue": asked.queue, "bound_seconds": bound}), flush=True)
        opened = [sys.executable, __file__, "load", port, str(asked.times * capacity), str(asked.seconds)]
        print(subprocess.run(opened, check=True, capture_output=True, text=True).stdout, end="")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
    elif sys.argv[1:2] == ["leave"]:
        leave(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
    else:
        main()
