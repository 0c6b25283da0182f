"""CIFAR-10 test accuracy against training time: our recipes beside the peers' models with their documented settings.

    .venv-peers/bin/python benchmarks/cifar10_peers.py timm FOLDER --out timm.jsonl
    .venv/bin/python benchmarks/cifar10.py FOLDER --peers timm.jsonl [--recipes cifar10,cifar10-hybrid] [--out runs]

FOLDER holds CIFAR's binary version. Each recipe is trained as `vit train FOLDER --recipe NAME` trains it, in a process
of its own; a run that is there already is continued or only read. Our seconds are wall time since the first step,
evaluations included; the peers' are without evaluations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from vitruvian.report.chart import Chart, Line
from vitruvian.report.html import write_image
from vitruvian.training import Run

Point = tuple[float, float]
"""Seconds and top-1 in percent."""
PEERS = ("timm", "vit-pytorch")


def trained(folder: Path, recipe: str, out: Path, settings: list[str]) -> Run:
    """The finished run of a recipe."""
    command = [sys.executable, "-m", "vitruvian", "train"]
    command += ["--resume", str(out)] if out.is_dir() else [str(folder), "--recipe", recipe, "--out", str(out)]
    if not out.is_dir():
        command += [word for setting in settings for word in ("--set", setting)]
    if not (out / "model").is_dir():
        subprocess.run(command, check=True)
    return Run.open(out)


def ours(run: Run) -> list[Point]:
    return [(line["seconds"], line["top1"]) for line in run.metrics("val")]


def theirs(path: Path) -> list[Point]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["seconds"], row["top1"]) for row in rows]


def when_reached(points: list[Point], top1: float) -> float | None:
    """Seconds after which an accuracy was first measured."""
    return next((seconds for seconds, measured in points if measured >= top1), None)


def report(curves: dict[str, list[Point]], peers: list[str]) -> None:
    """Accuracy against time of each, and when each recipe reached the end of a peer's curve."""
    for name, points in curves.items():
        print(f"{name:16}" + "  ".join(f"{seconds:5.0f} s {top1:5.2f}%" for seconds, top1 in points))
    for peer in peers:
        whole, goal = curves[peer][-1]
        for name, points in curves.items():
            if name not in peers:
                reached = when_reached(points, goal)
                took = "not reached" if reached is None else f"{reached:.0f} s, {reached / whole:.2f} of its time"
                print(f"{name}: {peer}'s {goal:.2f}%: {took}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", default="cifar10,cifar10-hybrid")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="what cifar10_peers.py wrote, named by it")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--also", type=Path, help="further curves, as --json writes them")
    parser.add_argument("--json", type=Path, help="write the curves here")
    parser.add_argument("--chart", type=Path, help="draw the curves into this PNG")
    arguments = parser.parse_args()
    curves = json.loads(arguments.also.read_text()) if arguments.also else {}
    curves |= {path.stem: theirs(path) for path in arguments.peers}
    for recipe in filter(None, arguments.recipes.split(",")):
        run = trained(arguments.folder, recipe, arguments.out / recipe, arguments.settings)
        curves[recipe] = ours(run)
    report(curves, [name for name in curves if name in PEERS])
    if arguments.json:
        arguments.json.write_text(json.dumps(curves, indent=1) + "\n")
    if arguments.chart:
        lines = [Line(name, points) for name, points in curves.items()]
        drawn = Chart(
            title="CIFAR-10 from scratch, accuracy in percent", lines=lines, x_label="core-seconds", log_x=True
        )
        write_image(arguments.chart, drawn.image())


if __name__ == "__main__":
    main()
