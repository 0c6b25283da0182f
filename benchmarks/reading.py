"""Training images per second and core: our views against torchvision's, side by side in alternating rounds.

    make bench                                          # once: builds .venv-peers, which has torchvision
    .venv/bin/python benchmarks/reading.py IMAGES --peers .venv-peers/bin/python

IMAGES is any folder of JPEGs. Copies of them with a shorter side of 375 are read as a folder by both sides, and
by ours also as `vit pack` stores them; then the same with the images as they are. Each side is one process on one
thread; both give normalized float32 224 x 224 random resized crops, half of them mirrored. The table shows medians over
the rounds, of which the ratios compare each round with torchvision's in the same round. CPU time is counted, since
wall time would count what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from PIL import Image

Read = Callable[[int], object]
"""Reads image i, in the way that is measured."""

SIDE = 224


def torchvision_folder(folder: Path) -> tuple[int, Read]:
    """torchvision's ImageFolder with its usual training transforms."""
    from peers import declare_torchvision_operators

    declare_torchvision_operators()
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    data = ImageFolder(
        str(folder / "train"), transforms.Compose([*steps, transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
    )
    return len(data), data.__getitem__


def ours(data: Path) -> tuple[int, Read]:
    """A dataset read and viewed as our loader does it."""
    from vitruvian.data.augment import Augment, train_transform
    from vitruvian.data.formats import open_dataset
    from vitruvian.data.order import generator_for

    view = train_transform(Augment(image_size=(SIDE, SIDE), crop="resized", scale=(0.08, 1.0)))
    source = open_dataset(data).train
    return len(source), lambda i: view(source.read(i), generator_for(0, 0, i, 0))


def ours_packed(folder: Path, form: Literal["jpeg", "pixels"]) -> tuple[int, Read]:
    """The same after `vit pack --side 256`."""
    from vitruvian.data.pack import PackSettings, pack

    target = folder.with_name(f"{folder.name}-{form}")
    pack(folder, target, PackSettings(side=256, format=form))
    return ours(target)


def scaled(path: Path, side: int) -> Image.Image:
    """The image in RGB with this shorter side."""
    image = Image.open(path).convert("RGB")
    share = side / min(image.size)
    return image.resize((round(image.width * share), round(image.height * share)), Image.Resampling.BICUBIC)


SIDES: dict[str, Callable[[Path], tuple[int, Read]]] = {
    "torchvision, folder": torchvision_folder,
    "vitruvian, folder": ours,
    "vitruvian, packed as JPEG": functools.partial(ours_packed, form="jpeg"),
    "vitruvian, packed as pixels": functools.partial(ours_packed, form="pixels"),
}


def serve(name: str, folder: Path) -> None:
    """One side: for every line on stdin, read all images and print milliseconds of CPU time an image."""
    import torch

    torch.set_num_threads(1)
    count, read = SIDES[name](folder)
    read(0)
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.process_time()
        for i in range(count):
            read(i)
        print((time.process_time() - start) * 1e3 / count, flush=True)


def ask(process: subprocess.Popen[str], line: str) -> str:
    """The line that a side answers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def measure(folder: Path, peers: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds an image of every side in every round, the sides taking turns."""
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    with contextlib.ExitStack() as stack:
        running = {}
        for name in SIDES:
            python = peers if name.startswith("torchvision") else sys.executable
            command = [python, __file__, str(folder), "--side", name]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            running[name] = stack.enter_context(process)
            if ask(process, "") != "ready\n":
                raise SystemExit(f"{name} did not start")
        for turn in range(rounds + 1):
            for name, process in running.items():
                milliseconds = float(ask(process, "again\n"))
                if turn:  # the first round warms up
                    times[name].append(milliseconds)
    return times


def prepare(source: Path, space: Path, count: int) -> None:
    """`count` of the images in `space`: as they are, and as JPEGs with a shorter side of 375 and quality 90."""
    chosen = sorted(source.rglob("*.jpg"))[:count]
    if len(chosen) < 2:
        raise SystemExit(f"{source}: fewer than two .jpg files here")
    for place, path in enumerate(chosen):
        target = Path("train", f"class {place % 2}", f"{place:04}.jpg")
        for folder in ("large", "given"):
            (space / folder / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, space / "given" / target)
        scaled(path, 375).save(space / "large" / target, "JPEG", quality=90)


def report(title: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Prints one table; gives it as an object."""
    base = times["torchvision, folder"]
    rows = {}
    print(f"\n{title}\n{'':30}{'ms':>8}{'images/s':>12}{'ratio':>8}{'least':>8}{'most':>8}")
    for name, mine in times.items():
        ratios = [theirs / one for theirs, one in zip(base, mine)]
        row = {"ms": statistics.median(mine), "per_second": 1e3 / statistics.median(mine)}
        row |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        rows[name] = row
        print(
            f"{name:30}{row['ms']:8.2f}{row['per_second']:12.0f}{row['ratio']:8.2f}{min(ratios):8.2f}{max(ratios):8.2f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--peers", default=".venv-peers/bin/python", help="Python that has torchvision")
    parser.add_argument("--count", type=int, default=300, help="images in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(options.side, options.images)
    results = {}
    with tempfile.TemporaryDirectory() as space:
        prepare(options.images, Path(space), options.count)
        for folder, title in (("large", "JPEGs with a shorter side of 375"), ("given", "the images as they are")):
            results[folder] = report(title, measure(Path(space, folder), options.peers, options.rounds))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
