"""What fewer tokens save: token merging beside the whole model and timm, and time against tokens, batch and depth.

    python benchmarks/tokens.py merging [--rounds 9] [--size Ti] [--engine torch] [--counts 0,4,8,13] [--batches 1,16]
    python benchmarks/tokens.py work [--rounds 5] [--plot work.png]

Every round times each once, in an order drawn anew. `work` fits the time of a batch of ViT-Ti/16 by least squares, as
a constant and a share for each multiply-add, and says how far the fit is from what was measured.

Accuracy is measured by `vit evaluate DATA --model W --tome-r R`, of cascades and thresholds with the folders that
`vit optimize --only cascade` and `--only merge` write.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

import vitruvian as vt
from inference import interleaved, random_model
from peers import Forward, timm_model
from vitruvian.cost import multiply_adds
from vitruvian.report.chart import Chart, Line


def merging(size: str, engine: str, counts: list[int], batches: list[int], rounds: int) -> None:
    model = random_model(size)
    with tempfile.TemporaryDirectory() as folder:
        forwards: dict[str, Forward] = {"timm": timm_model(model, size, Path(folder)).eval()}
    for r in counts:
        forwards[f"r = {r}"] = vt.Classifier(model, engine=engine, tome_r=r).logits  # type: ignore[arg-type]
    whole = multiply_adds(model.config)
    work = {f"r = {r}": multiply_adds(model.config.replace(tome_r=r)) / whole for r in counts}
    for batch in batches:
        pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        medians = {name: statistics.median(s) for name, s in interleaved(forwards, pixels, rounds).items()}
        for name, seconds in medians.items():
            print(
                f"ViT-{size}/16 {engine} batch {batch:>2}  {name:<8}{batch / seconds:>8.1f} img/s"
                f"{medians['timm'] / seconds:>6.2f} x timm  multiply-adds {work.get(name, 1.0):.3f}",
                flush=True,
            )


def work(rounds: int, plot: Path | None) -> None:
    """Time against tokens (the image's side), batch and depth."""
    lines: dict[str, list[tuple[float, float]]] = {}
    rows: list[tuple[str, int, float, float]] = []
    model = random_model("Ti")
    cases = [("tokens", side, 1, 12) for side in (64, 96, 128, 160, 192, 224, 288, 384)]
    cases += [("batch", 224, batch, 12) for batch in (1, 2, 4, 8, 16)]
    cases += [("depth", 224, 1, layers) for layers in (2, 4, 8, 12)]
    for what, side, batch, layers in cases:
        config = model.config.replace(depth=layers)
        shallow = model if layers == 12 else vt.build(config).eval()
        pixels = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))
        forward = {"ours": vt.Classifier(shallow).logits}
        milliseconds = 1000 * statistics.median(interleaved(forward, pixels, rounds)["ours"])
        x = {"tokens": (side // 16) ** 2 + 1, "batch": batch, "depth": layers}[what]
        rows.append((what, x, batch * multiply_adds(config, side) / 1e9, milliseconds))
        lines.setdefault(what, []).append((rows[-1][2], milliseconds))
        print(f"{what:<7}{x:>5}  {rows[-1][2]:>7.2f} G multiply-adds  {milliseconds:>8.2f} ms", flush=True)
    for what, points in lines.items():
        gigas, times = np.array(points).T
        slope, start = np.polyfit(gigas, times, 1)
        off = np.abs(start + slope * gigas - times) / times
        fit = f"{start:.2f} ms + {slope:.2f} ms a giga multiply-add"
        print(f"{what}: {fit}; off by {off.mean():.0%}, at most {off.max():.0%}")
    if plot is not None:
        chart = Chart(
            title="milliseconds a batch of ViT-Ti/16",
            lines=[Line(what, points) for what, points in lines.items()],
            x_label="giga multiply-adds",
            y_from=0.0,
        )
        drawn = chart.image()
        assert drawn is not None
        drawn.save(plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("merging", "work"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", default="Ti")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--counts", default="0,4,8,13")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {given.rounds} interleaved rounds")
    if given.what == "work":
        work(given.rounds, given.plot)
    else:
        counts, batches = ([int(each) for each in text.split(",")] for text in (given.counts, given.batches))
        merging(given.size, given.engine, counts, batches, given.rounds)


if __name__ == "__main__":
    main()
