"""Requests a second with many clients: `vit serve`, one forward a request, and litserve, with the same model.

    python benchmarks/serving.py --model W.safetensors [--images DIR] [--clients 1,4,16,64] [--seconds 10] [--rounds 3]

All servers run at once, and all but the measured one are paused, so that a slow minute of the machine is shared by all.
Their order differs each round. The clients are a process of threads that send JPEGs over kept connections: those of
`--images` in turn, or one of 256 x 256 pixels. A ratio is the median over the rounds of `vit serve` relative to the
other server of the same round. litserve is measured where it is installed. `--other SRC` adds the service of another
checkout.
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
        return apply_preprocess(decode(request["image"].file.read()), self.classifier.preprocess)
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


IMAGES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--images", default="")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", default="torch")
    parser.add_argument("--other", default="")
    parser.add_argument("--options", default="", help="further options of vit serve")
    asked = parser.parse_args()
    serve = [*SERVE, *asked.options.split(), "--model", asked.model]
    commands = {f"vit serve ({engine})": [*serve, "--engine", engine, "--port"] for engine in asked.engines.split(",")}
    ours = list(commands)
    if asked.other:
        commands["other checkout"] = [*SERVE, "--model", asked.model, "--engine", "torch", "--port"]
    commands["one forward a request"] = ["-c", PLAIN, asked.model]
    if importlib.util.find_spec("litserve"):  # its workers import the program again, so that it has to be a file
        program = Path(tempfile.mkdtemp()) / "program.py"
        program.write_text(LITSERVE)
        commands["litserve"] = [str(program), asked.model]
    clients = [int(number) for number in asked.clients.split(",")]
    speeds: dict[tuple[str, int], list[dict[str, float]]] = {}
    servers: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
    try:
        for name, command in commands.items():
            source = {"PYTHONPATH": asked.other} if name == "other checkout" else {}
            servers[name] = start(command, source)
            os.killpg(servers[name][0].pid, signal.SIGSTOP)
        for number in range(asked.rounds):
            for count in clients:
                order = random.Random(number * 1000 + count).sample(list(servers), len(servers))
                for name in order:
                    process, port = servers[name]
                    os.killpg(process.pid, signal.SIGCONT)
                    before = cpu_seconds(process.pid)
                    speed = measure(port, count, asked.seconds, asked.images)
                    speed["cpu_seconds_per_image"] = (cpu_seconds(process.pid) - before) / speed.pop("responses")
                    speeds.setdefault((name, count), []).append(speed)
                    os.killpg(process.pid, signal.SIGSTOP)
                    print(number, count, name, speeds[name, count][-1], file=sys.stderr, flush=True)
    finally:
        for process, _ in servers.values():
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
        for process, _ in servers.values():
            process.wait(60)
    for (name, count), rounds in speeds.items():
        row: dict[str, object] = {key: round(statistics.median(each[key] for each in rounds), 4) for key in rounds[0]}
        for first in ours:
            if name not in ours:
                ratios = [
                    one["images_per_second"] / other["images_per_second"]
                    for one, other in zip(speeds[first, count], rounds)
                ]
                row[f"ratio of {first}"] = round(statistics.median(ratios), 3)
                row[f"ratios of {first}"] = [round(ratio, 2) for ratio in ratios]
        print(json.dumps({"server": name, "clients": count, **row}))


def start(arguments: list[str], environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """A server that is ready, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *arguments, str(port)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, **environment},
    )
    wait_until_ready(port, server)
    return server, port


def cpu_seconds(group: int) -> float:
    """The time that the processes of a group have spent on the cores."""
    stats = [file.read_text().rpartition(")")[2].split() for file in Path("/proc").glob("[0-9]*/stat")]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats if int(stat[2]) == group) / os.sysconf("SC_CLK_TCK")


def measure(port: int, clients: int, seconds: float, images: str = "") -> dict[str, float]:
    """Images a second and latencies of one server."""
    load = [sys.executable, __file__, "load", str(port), str(clients), str(seconds), images]
    return json.loads(subprocess.run(load, check=True, capture_output=True, text=True).stdout)


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


def load(port: int, clients: int, seconds: float, images: str) -> None:
    """Clients that each wait for their answer before they ask again; responses of the first second do not count."""
    paths = sorted(path for path in Path(images).rglob("*.jp*g") if path.is_file()) if images else []
    files = [path.read_bytes() for path in random.Random(0).sample(paths, min(IMAGES, len(paths)))] or [random_jpeg()]
    forms = [form(file) for file in files]
    begin = time.monotonic() + 1.0
    taken: list[list[float]] = [[] for _ in range(clients)]
    failed, responses = [0] * clients, [0] * clients

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        turn = number * len(forms) // clients
        while (now := time.monotonic()) < begin + seconds:
            body, kind = forms[turn % len(forms)]
            turn += 1
            connection.request("POST", "/predict", body, {"Content-Type": kind})
            response = connection.getresponse()
            response.read()
            responses[number] += 1
            if response.status != 200:
                failed[number] += 1
            elif begin <= time.monotonic() < begin + seconds:
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
                "responses": sum(responses),
            }
        )
    )


def random_jpeg(seed: int = 0) -> bytes:
    """A JPEG of 256 x 256 pixels."""
    import numpy as np
    from PIL import Image

    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    file = io.BytesIO()
    small.resize((256, 256)).save(file, "JPEG", quality=90)
    return file.getvalue()


def form(file: bytes) -> tuple[bytes, str]:
    """A file as a form, and its content type."""
    mark = "benchmark-boundary"
    head = f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n'
    return head.encode() + file + f"\r\n--{mark}--\r\n".encode(), f"multipart/form-data; boundary={mark}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
    else:
        main()
