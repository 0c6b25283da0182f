"""Step time while the images come from a bucket: from the local disk, and through a slow link, in alternating rounds.

    .venv/bin/python benchmarks/network.py IMAGES [--latency-ms 50] [--mb-per-second 20]

IMAGES is any folder of JPEGs. They are put into tar shards of 64 images, which are more than the cache may keep, so
that each epoch fetches them anew. The link is a proxy on loopback that delays every byte by the latency and gives
all connections together the bandwidth; behind it an HTTP server with ranges, as object stores have them. A step is
measured from the end of the one before it, waiting included; the table has the mean over all steps but the first few,
as a median would hide the steps that wait.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import io
import itertools
import json
import multiprocessing
import re
import statistics
import tarfile
import tempfile
import time
from functools import partial
from pathlib import Path

SHARDS, SHARD_IMAGES, LANES = 20, 64, 4
BATCH, STEPS, WARM = 16, 90, 10
CHUNK = 2**16


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP/1.1, in parts where a client asks for parts."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            super().do_GET()
            return
        content = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2]) if asked and asked[2] else len(content) - 1, len(content) - 1)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(content[first : last + 1])

    def log_message(self, *_: object) -> None:
        pass


class Link:
    """A proxy that all connections share: bytes leave one after the other, and arrive a while later."""

    def __init__(self, target: int, latency: float, bytes_per_second: float) -> None:
        self.target, self.latency, self.bytes_per_second = target, latency, bytes_per_second
        self.free = 0.0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self.carry(reader, requests, 0.0), self.carry(answers, writer, self.latency))

    async def carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, latency: float) -> None:
        sent: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while (item := await sent.get())[1]:
                await asyncio.sleep(item[0] - time.monotonic())
                target.write(item[1])
                await target.drain()
            target.close()

        arriving = asyncio.create_task(deliver())
        try:
            while data := await source.read(CHUNK):
                if latency:
                    self.free = max(self.free, time.monotonic()) + len(data) / self.bytes_per_second
                await sent.put(((self.free + latency) if latency else 0.0, data))
        except ConnectionError:
            pass
        await sent.put((0.0, b""))
        await asyncio.gather(arriving, return_exceptions=True)


def serve(folder: Path, latency: float, bytes_per_second: float, ports: multiprocessing.Queue[int]) -> None:
    """The server and the link in front of it, in a process of their own."""
    import threading

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def link() -> None:
        proxy = await asyncio.start_server(
            Link(server.server_port, latency, bytes_per_second).connected, "127.0.0.1", 0
        )
        ports.put(proxy.sockets[0].getsockname()[1])
        await proxy.serve_forever()

    asyncio.run(link())


def make_shards(images: Path, folder: Path) -> int:
    """Shards of these images, again and again as far as they do not suffice; the bytes of one."""
    files = itertools.cycle(sorted(images.rglob("*.jpg"))[: SHARDS * SHARD_IMAGES])
    sizes = {}
    for split, count in (("train", SHARDS), ("val", 1)):
        for number in range(count):
            name = f"{split}-{number:03d}.tar"
            sizes[name] = SHARD_IMAGES if split == "train" else BATCH
            with tarfile.open(folder / name, "w") as tar:
                for sample in range(sizes[name]):
                    for ending, content in ((".jpg", next(files).read_bytes()), (".cls", str(sample % 10).encode())):
                        entry = tarfile.TarInfo(f"{sample:05d}{ending}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))
    (folder / "sizes.json").write_text(json.dumps(sizes))
    (folder / "classes.txt").write_text("\n".join(map(str, range(10))))
    return (folder / "train-000.tar").stat().st_size


def step_seconds(url: str, shard_bytes: int, workers: int) -> tuple[float, float]:
    """The mean time of a step, and the time until the first has ended."""
    import os

    from vitruvian.data import remote as stream
    from vitruvian.training import Listener, train

    stream.BYTES_KEPT = 4 * LANES * shard_bytes
    times = [time.perf_counter()]

    class Watch(Listener):
        def stepped(self, step: int) -> None:
            times.append(time.perf_counter())

    settings = ["image_size=64", f"steps={STEPS}", f"batch_size={BATCH}", "eval_every=0", "checkpoint_seconds=1e9"]
    with tempfile.TemporaryDirectory() as place:
        os.environ["VITRUVIAN_CACHE"] = f"{place}/cache"
        train(
            url,
            recipe="scratch",
            model="ViT-Ti/16",
            out=f"{place}/run",
            settings=[*settings, f"workers={workers}"],
            listeners=[Watch()],
            progress=False,
        )
    return (times[-1] - times[1 + WARM]) / (STEPS - WARM), times[1] - times[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--mb-per-second", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        shard_bytes = make_shards(given.images, Path(place))
        ports: multiprocessing.Queue[int] = multiprocessing.Queue()
        server = multiprocessing.Process(
            target=serve, args=(Path(place), given.latency_ms / 1000, given.mb_per_second * 1e6, ports), daemon=True
        )
        server.start()
        places = {"disk": f"file://{place}", "link": f"http://127.0.0.1:{ports.get()}"}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
        for _ in range(given.rounds):
            for name, url in places.items():
                found[name].append(step_seconds(url, shard_bytes, given.workers))
                print(f"{name}: {found[name][-1][0] * 1000:.1f} ms a step, the first after {found[name][-1][1]:.1f} s")
        server.kill()
    ratio = statistics.median(link[0] / disk[0] for link, disk in zip(found["link"], found["disk"]))
    rate = shard_bytes / SHARD_IMAGES * BATCH / statistics.median(each[0] for each in found["link"]) / 1e6
    print(f"through the link a step takes {ratio:.3f} of its time; it carries {rate:.1f} MB/s")


if __name__ == "__main__":
    main()
