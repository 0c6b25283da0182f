"""Images per second beside the peers, and the time of one cold prediction.

    python benchmarks/inference.py [--rounds 15] [--sizes Ti,S,B] [--batches 1,16] [--cold-python .venv/bin/python]

Every round times each library once on the same batch, one after the other, so that whatever else the
machine does falls on all of them; ratios are between medians of the same rounds. `vitruvian` is
`Classifier.logits`, the path of every prediction; `vitruvian (module)` is the bare module call.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

import vitruvian as vt
from peers import Forward, declare_torchvision_operators, peers_of
from vitruvian.config import NUMERICS

SAME_NUMBERS = ("vitruvian", "vitruvian (module)", "timm", "torchvision", "transformers")


def random_model(size: str) -> vt.ViT:
    """A ViT-*/16 with timm's numerics, whose head is not zero, so that logits can be compared."""
    model = vt.create_model(f"ViT-{size}/16", numerics=NUMERICS["timm"])
    assert isinstance(model, vt.ViT)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.05, generator=torch.Generator().manual_seed(1))
    return model.eval()


REST_SECONDS = 0.1
"""Before each is timed: the threads of a runtime go on spinning after its answer, and take a core from the next one."""


def interleaved(forwards: dict[str, Forward], pixels: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of each forward pass in each round, in an order drawn anew: what ran before decides what is cached."""
    names = list(forwards)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    calls = max(1, 6 // len(pixels))  # a single image is too short a time to read off once
    with torch.inference_mode():
        for name in names:
            forwards[name](pixels)
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                time.sleep(REST_SECONDS)
                for _ in range(calls > 1):
                    forwards[name](pixels)
                start = time.perf_counter()
                for _ in range(calls):
                    forwards[name](pixels)
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def largest_differences(forwards: dict[str, Forward], pixels: torch.Tensor) -> dict[str, float]:
    """Largest difference of any logit from ours."""
    with torch.inference_mode():
        ours = forwards["vitruvian"](pixels)
        return {name: (forwards[name](pixels) - ours).abs().max().item() for name in SAME_NUMBERS}


def throughput(size: str, batches: list[int], rounds: int) -> list[dict[str, object]]:
    model = random_model(size)
    classifier = vt.Classifier(model)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        forwards: dict[str, Forward] = {"vitruvian": classifier.logits, "vitruvian (module)": model}
        forwards |= peers_of(model, size, Path(folder))
        for batch in batches:
            pixels = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
            differences = largest_differences(forwards, pixels)
            medians = {name: statistics.median(s) for name, s in interleaved(forwards, pixels, rounds).items()}
            peers = {name: s for name, s in medians.items() if not name.startswith("vitruvian")}
            fastest = min(peers, key=lambda name: peers[name])
            for name, seconds in medians.items():
                rows.append(
                    {
                        "model": f"ViT-{size}/16",
                        "batch": batch,
                        "library": name,
                        "images_per_second": round(batch / seconds, 2),
                        "relative_to_fastest_peer": round(medians[fastest] / seconds, 3),
                        "largest_logit_difference": differences.get(name),
                    }
                )
                print(describe(rows[-1], fastest), flush=True)
    return rows


def describe(row: dict[str, object], fastest: str) -> str:
    difference = row["largest_logit_difference"]
    same = "other weights" if difference is None else f"logits within {difference:.1e}"
    return (
        f"{row['model']:<10} batch {row['batch']:>2}  {row['library']:<19}{row['images_per_second']:>8} img/s"
        f"{row['relative_to_fastest_peer']:>7} x the fastest peer ({fastest})  {same}"
    )


PIPELINE = """
import sys
from transformers import pipeline
print(pipeline("image-classification", model=sys.argv[1])(sys.argv[2])[0]["label"])
"""


def cold_start(python: str, rounds: int) -> list[dict[str, object]]:
    """Wall seconds of one prediction in a new process: `vit predict` and the transformers pipeline, same folder."""
    with tempfile.TemporaryDirectory() as name:
        folder, image = Path(name) / "model", Path(name) / "image.jpg"
        vt.save(random_model("B"), folder, family="huggingface")
        Image.linear_gradient("L").resize((500, 375)).convert("RGB").save(image)
        commands = {
            "vit predict": [python, "-m", "vitruvian", "predict", str(image), "--model", str(folder)],
            "transformers pipeline": [python, "-c", PIPELINE, str(folder), str(image)],
        }
        seconds: dict[str, list[float]] = {command: [] for command in commands}
        for _ in range(rounds + 1):  # the first round fills the page cache and is left out
            for command, arguments in commands.items():
                start = time.perf_counter()
                subprocess.run(arguments, check=True, capture_output=True)
                seconds[command].append(time.perf_counter() - start)
    medians = {command: statistics.median(values[1:]) for command, values in seconds.items()}
    rows: list[dict[str, object]] = []
    for command, median in medians.items():
        share = median / medians["transformers pipeline"]
        rows.append({"cold": command, "seconds": round(median, 2), "share_of_pipeline": round(share, 3)})
        print(f"cold start  {command:<22}{median:6.2f} s   {share:.2f} of the pipeline's time", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", default="Ti,S,B")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument(
        "--cold-python", default=sys.executable, help="Python with vitruvian and transformers; empty: skip"
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON lines")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} interleaved rounds")
    rows = cold_start(arguments.cold_python, min(arguments.rounds, 7)) if arguments.cold_python else []
    declare_torchvision_operators()
    for size in arguments.sizes.split(","):
        rows += throughput(size, [int(batch) for batch in arguments.batches.split(",")], arguments.rounds)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
