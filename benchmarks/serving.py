"""Requests a second with many clients: `vit serve`, one forward a request, and litserve, with the same model.

    python benchmarks/serving.py --model W.safetensors [--clients 16] [--seconds 10] [--rounds 3] [--engines torch,auto]

Each server runs alone in a process of its own, in another order each round; the clients are a process of threads that
send one JPEG again and again over kept connections. `vit bench` is the model alone at that batch size, without HTTP and
decoding, as that command measures it; of `auto` it is the fastest engine. litserve is measured where it is installed.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

BATCH = 16
SERVE = ("-m", "vitruvian", "serve", "--batch-size", str(BATCH))
PLAIN = """
import sys, torch, uvicorn
from fastapi import FastAPI, File, UploadFile
from vitruvian.inference import Classifier
classifier, app = Classifier(sys.argv[1]), FastAPI()
@app.post("/predict")
def predict(image: UploadFile = File()):
    (answers,) = classifier.predict([image.file.read()])
    return [{"label": a.label, "probability": a.probability} for a in answers]
@app.get("/ready")
def ready(): return {}
uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
LITSERVE = """
import sys, torch, litserve
from fastapi import UploadFile
from vitruvian.data.decode import decode
from vitruvian.data.preprocess import apply_preprocess
from vitruvian.inference import Classifier
class Api(litserve.LitAPI):
    def setup(self, device): self.classifier = Classifier(sys.argv[1])
    def decode_request(self, request):
        return apply_preprocess(decode(request["image"].file.read()), self.classifier.model.preprocess)
    def batch(self, inputs): return torch.stack(inputs)
    def predict(self, pixels): return self.classifier.rank(self.classifier.logits(pixels), 5)
    def unbatch(self, output): return list(output)
    def encode_response(self, answers): return [{"label": a.label, "probability": a.probability} for a in answers]
if __name__ == "__main__":
    api = Api(max_batch_size=16, batch_timeout=0.01)
    litserve.LitServer(api, accelerator="cpu", healthcheck_path="/ready").run(
        port=int(sys.argv[2]), log_level="error", generate_client_file=False
    )
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=BATCH)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="torch,auto")
    asked = parser.parse_args()
    servers = {
        **{
            f"vit serve ({engine})": [*SERVE, "--engine", engine, "--model", asked.model, "--port"]
            for engine in asked.engines.split(",")
        },
        "one forward a request": ["-c", PLAIN, asked.model],
    }
    if importlib.util.find_spec("litserve"):  # its workers import the program again, so that it has to be a file
        program = Path(tempfile.mkdtemp()) / "program.py"
        program.write_text(LITSERVE)
        servers["litserve"] = [str(program), asked.model]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    engines = asked.engines.split(",")
    alone: dict[str, list[float]] = {engine: [] for engine in engines}
    for number in range(asked.rounds):
        order = list(servers)
        random.Random(number).shuffle(order)
        speeds = bench(asked.model, engines)
        print(number, "vit bench", speeds, file=sys.stderr, flush=True)
        for engine, rates in alone.items():
            rates.append(max(speeds.values()) if engine == "auto" else speeds[engine])
        for name in order:
            found[name].append(measured(servers[name], asked.clients, asked.seconds))
            print(number, name, found[name][-1], file=sys.stderr, flush=True)
    for engine, rates in alone.items():
        print(json.dumps({"vit bench": statistics.median(rates), "engine": engine, "batch": BATCH}))
    for name, rounds in found.items():
        row = {key: round(statistics.median(each[key] for each in rounds), 4) for key in rounds[0]}
        for engine in engines:
            if name == f"vit serve ({engine})":
                row["of_vit_bench"] = round(row["images_per_second"] / statistics.median(alone[engine]), 3)
        print(json.dumps({"server": name, "clients": asked.clients, **row}))


def bench(weights: str, engines: list[str]) -> dict[str, float]:
    """Images a second by engine of the model alone, as `vit bench` tells; of all that are installed for `auto`."""
    command = [sys.executable, "-m", "vitruvian", "bench", "--model", weights, "--batches", str(BATCH), "--json"]
    command += ["--rounds", "10"] + ([] if "auto" in engines else [f"--engine={engine}" for engine in engines])
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {speed["engine"]: round(speed["images_per_second"], 2) for speed in found["speeds"]}


def measured(arguments: list[str], clients: int, seconds: float) -> dict[str, float]:
    """Images a second and latencies of one server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, *arguments, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
    )
    try:
        wait_until_ready(port, server)
        load = [sys.executable, __file__, "load", str(port), str(clients), str(seconds)]
        return json.loads(subprocess.run(load, check=True, capture_output=True, text=True).stdout)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def wait_until_ready(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).read()
            return
        except (OSError, urllib.error.HTTPError):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with {server.returncode}") from None
            time.sleep(0.1)
    raise SystemExit("the server did not get ready")


def load(port: int, clients: int, seconds: float) -> None:
    """Clients that each wait for their answer before they ask again; the first second does not count."""
    body, kind = form()
    begin = time.monotonic() + 1.0
    taken: list[list[float]] = [[] for _ in range(clients)]
    failed = [0] * clients

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while (now := time.monotonic()) < begin + seconds:
            connection.request("POST", "/predict", body, {"Content-Type": kind})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                failed[number] += 1
            elif now >= begin:
                taken[number].append(time.monotonic() - now)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(second for each in taken for second in each)
    print(
        json.dumps(
            {
                "images_per_second": len(every) / seconds,
                "median_seconds": every[len(every) // 2],
                "p99_seconds": every[int(0.99 * len(every))],
                "failed": sum(failed),
            }
        )
    )


def form(seed: int = 0) -> tuple[bytes, str]:
    """A JPEG of 256 x 256 pixels as a form."""
    import numpy as np
    from PIL import Image

    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((256, 256)).save(file, "JPEG", quality=90)
    mark = "benchmark-boundary"
    head = f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    return head.encode() + file.getvalue() + f"\r\n--{mark}--\r\n".encode(), f"multipart/form-data; boundary={mark}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
