"""`vit embed` over a million entries: its rate beside the bare model's, its memory, and ten kills.

python benchmarks/bulk.py data FOLDER --cifar CIFAR_TEST_SHEET [--entries 1000000]
python benchmarks/bulk.py rate FOLDER [--rounds 12] [--seconds 8]
python benchmarks/bulk.py kill FOLDER [--kills 10] [--seed 0]

`data` writes 10,000 images of 32 x 32 from a sheet of 100 x 100, a manifest that repeats them, and a tiny ViT. `rate`
compares the model in the package on pixels that are ready with the whole job on files, in turns, both on all cores:
images a second, and images a second of processor time, which depends less on what else the machine does. `kill` runs
the job with the tiny ViT by two shares at a time: once unbroken, and once with SIGKILL at random numbers of parts, and
compares the merged files byte for byte. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import vitruvian as vt
from vitruvian.bulk.job import Job, ReadImages
from vitruvian.config import ViTConfig
from vitruvian.inference import Encoder, load_batches

PIECE = 4096
MODEL = Path(vt.__file__).parent / "box"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["data", "rate", "kill"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.what == "data":
        make_data(asked.folder, asked.cifar, asked.entries)
    elif asked.what == "rate":
        print(json.dumps(rates(asked.folder, asked.rounds, asked.seconds, asked.batch)))
    else:
        print(json.dumps(killed(asked.folder, asked.kills, random.Random(asked.seed))))


def make_data(folder: Path, sheet: Path, entries: int) -> None:
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    names = []
    for number in range(10_000):
        row, column = divmod(number, 100)
        path = folder / "images" / f"{number % 10}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row * 32 : row * 32 + 32, column * 32 : column * 32 + 32]).save(path)
        names.append(f"{path.relative_to(folder)},{number % 10}\n")
    with open(folder / "manifest.csv", "w") as file:
        file.write("path,label\n")
        file.writelines(names[number % 10_000] for number in range(entries))
    torch.manual_seed(0)
    shape = ViTConfig(image_size=32, patch_size=16, width=32, depth=1, num_heads=1, num_classes=10)
    vt.save(vt.build(shape), folder / "tiny")


def rates(folder: Path, rounds: int, seconds: float, batch_size: int) -> dict[str, object]:
    """Images a second of the bare model and of the job, both on all cores, in turns of the same length."""
    encoder = Encoder(MODEL)
    bare, whole = [], []
    out = folder / "rate"
    shutil.rmtree(out, ignore_errors=True)
    data, result = folder / "manifest.csv", {"dtype": "float16"}
    job = Job(task="embed", data=data, model=encoder, out=out, result=result, piece=512, batch_size=batch_size)
    load = ReadImages(job.images, job.preprocess)
    loaded = next(load_batches(load, [range(batch_size)], ahead=batch_size))
    pixels = torch.stack([image for _, image in loaded if isinstance(image, torch.Tensor)])
    written, part = job.begin(), 0
    for turn in range(rounds + 1):  # the first to warm up
        begun, count = clocks(), 0
        while clocks()[0] - begun[0] < seconds / 2:
            encoder.features(pixels)
            count += batch_size
        bare.append(count / (clocks() - begun))
        many = max(1, round(bare[-1][0] * seconds / 2 / 512)) if turn else 1
        begun = clocks()
        count = sum(job.work(range(part, part + many), written))
        part += many
        whole.append(count / (clocks() - begun))
    ratios = np.array(whole[1:]) / np.array(bare[1:])
    return {
        "threads": torch.get_num_threads(),
        "bare": float(np.median(np.array(bare[1:])[:, 0])),
        "job": float(np.median(np.array(whole[1:])[:, 0])),
        "ratio": float(np.median(ratios[:, 0])),
        "ratios": ratios[:, 0].round(3).tolist(),
        "ratio_of_processor_time": float(np.median(ratios[:, 1])),
    }


def clocks() -> np.ndarray:
    """Seconds that have passed, and seconds of processors that this process has used."""
    return np.array([time.perf_counter(), time.process_time()])


def start(folder: Path, out: Path, share: int) -> subprocess.Popen[bytes]:
    words = ["embed", folder / "manifest.csv", "--model", folder / "tiny", "--out", out, "--shard", f"{share}/2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, "-m", "vitruvian", *map(str, words), "--batch-size", "128"]
    with open(said(out, share), "wb") as errors:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors)


def said(out: Path, share: int) -> Path:
    """What a share wrote to standard error since its last start."""
    return out.with_name(f"{out.name}-{share}.log")


def finish(folder: Path, out: Path, memory: list[float], moments: list[int], chance: random.Random) -> float:
    """Seconds until both shares are done; a SIGKILL soon after each of these numbers of parts is there."""
    begun = time.monotonic()
    running = {share: start(folder, out, share) for share in (1, 2)}
    while running:
        time.sleep(0.1)
        for share, process in list(running.items()):
            code = process.poll()
            if code is None:
                status = Path(f"/proc/{process.pid}/status").read_text()
                memory.append(int(status.partition("VmHWM:")[2].split()[0] if "VmHWM" in status else 0) / 1024)
            elif code:
                raise SystemExit(f"share {share} ended with {code}: {said(out, share).read_text()[-2000:]}")
            else:
                del running[share]
        if moments and running and len(list(out.glob("part-*"))) >= moments[0]:
            moments.pop(0)
            time.sleep(chance.uniform(0, 2))
            share = chance.choice(sorted(running))
            running[share].kill()
            running[share].wait()
            running[share] = start(folder, out, share)
    if moments:
        raise SystemExit(f"{len(moments)} kills were left when the job was done")
    return time.monotonic() - begun


def killed(folder: Path, kills: int, chance: random.Random) -> dict[str, object]:
    found: dict[str, object] = {}
    digests = []
    for name, count in (("unbroken", 0), ("killed", kills)):
        out, memory = folder / name, [0.0]
        if count:  # the unbroken one may be there from an earlier call
            shutil.rmtree(out, ignore_errors=True)
        parts = (folder / "manifest.csv").read_bytes().count(b"\n") // PIECE
        moments = sorted(chance.sample(range(parts * 9 // 10), count))
        found[f"{name}_seconds"] = round(finish(folder, out, memory, moments, chance), 1)
        found[f"{name}_peak_mb"] = round(max(memory))
        merged = vt.merge(out, folder / f"{name}.parquet")
        found["images"], found["errors"] = merged.images, sum(merged.errors.values())
        with open(folder / f"{name}.parquet", "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        print(json.dumps(found), file=sys.stderr, flush=True)
    return {**found, "kills": kills, "same_bytes": digests[0] == digests[1], "sha256": digests[0]}


if __name__ == "__main__":
    main()
