"""Under more load than it can take: what is accepted is quick and right, the rest is told so, and nothing piles up."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from processes import Process
from tiny_service import photo

import vitruvian as vt
from vitruvian.config import Preprocess, ViTConfig
from vitruvian.inference import Classifier
from vitruvian.model.build import build
from vitruvian.model.vit import ViT

pytestmark = pytest.mark.slow

CLIENTS = 24
QUEUE = 6
REQUESTS = int(os.environ.get("VITRUVIAN_LOAD_REQUESTS", "10"))  # of each client in a burst
BAD = [b"", b"not an image", photo(0)[:60], b"\x80\x04K\x01."]


class Client(threading.Thread):
    """One image of its own again and again, now and then a bad one."""

    def __init__(self, url: str, number: int, expected: float) -> None:
        super().__init__(daemon=True)
        self.url, self.image, self.bad = url, photo(number, size=(200, 160)), BAD[number % len(BAD)]
        self.expected = expected
        self.predicted = self.refused = self.wrong = 0

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for turn in range(REQUESTS):
                bad = turn % 5 == 4
                response = client.post("/predict", files=[("image", ("a", self.bad if bad else self.image))])
                if response.status_code == 429:
                    self.refused += 1
                    self.wrong += "retry-after" not in response.headers
                    time.sleep(0.1)  # far sooner than it was told
                elif bad:
                    self.wrong += response.status_code != 422
                else:
                    self.predicted += 1
                    found = response.json()["results"][0]["predictions"][0]["probability"]
                    self.wrong += abs(found - self.expected) > 1e-4


def slow_vit() -> ViT:
    """A model whose computing, and not the network, is what a request takes, on a machine of any speed."""
    config = ViTConfig(image_size=(64, 64), patch_size=4, num_classes=6, depth=2, width=192, mlp_dim=768, num_heads=3)
    model = build(config, seed=0)
    torch.nn.init.normal_(model.head.weight, std=0.5, generator=torch.Generator().manual_seed(0))
    model.meta = model.meta.replace(preprocess=Preprocess(image_size=(64, 64)), labels=tuple("abcdef"))
    return model.eval()


def resources(process: int) -> tuple[int, int, int]:
    """Memory in KB, threads and open files of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]), int(status["Threads"]), len(os.listdir(f"/proc/{process}/fd"))


def burst(running: Process, expected: list[float]) -> tuple[list[Client], int]:
    """The clients after a burst, and the most images that the service had accepted at a time."""
    clients = [Client(running.url, number, expected[number]) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    accepted, end = 0, time.monotonic() + 300
    while any(client.is_alive() for client in clients):
        assert time.monotonic() < end
        lines = running.client.get("/metrics").text.splitlines()
        accepted = max(accepted, *(int(float(x.split()[1])) for x in lines if x.startswith("vit_accepted_images{")))
        time.sleep(0.05)
    return clients, accepted


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_overload_is_refused_and_what_is_accepted_is_bounded_and_right(tmp_path):
    """A queue of fixed length bounds the wait of what is accepted on a machine of any speed."""
    model = slow_vit()
    vt.save(model, tmp_path / "model")
    images = [photo(number, size=(200, 160)) for number in range(CLIENTS)]
    expected = [answers[0].probability for answers in Classifier(model).predict(images, top=1)]
    running = Process("--model", f"tiny={tmp_path / 'model'}", "--batch-size", "4", "--queue", str(QUEUE))
    used = []
    try:
        for _ in range(5):  # buffers and pools reach their size, sometimes only after a few bursts; a leak always grows
            clients, accepted = burst(running, expected)
            assert sum(client.wrong for client in clients) == 0
            assert sum(client.refused for client in clients) > 0
            assert sum(client.predicted for client in clients) >= QUEUE
            assert 0 < accepted <= QUEUE
            used.append(resources(running.process.pid))
            if len(used) > 1 and has_settled(used[-2], used[-1]):
                break
        assert running.client.post("/predict", files=[("image", ("a", images[0]))]).status_code == 200
    finally:
        running.close()
    assert has_settled(used[-2], used[-1]), f"memory in KB, threads and files after each burst: {used}"


def has_settled(before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    """Whether a burst took less than 10 MB, and no thread or file per request."""
    return after[0] - before[0] < 10_000 and after[1] <= before[1] + 4 and after[2] <= before[2] + 2
