"""Table 4 of the paper on Oxford Pets: four learning rates on a dev split, then three seeds with the best of them.

    python benchmarks/table4.py PETS W.safetensors RUNS [--image-size 224] [--precision bf16] [--record FILE]

PETS has one folder per class in `train` and `test`. A trial takes an hour or more on two cores. Each finished one is
written to the record, so that the next call continues with the next trial, also on another machine; an interrupted
trial resumes from its checkpoint in RUNS. The last call prints the mean and standard deviation of the seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import vitruvian as vt
from vitruvian.machine import processor_name
from vitruvian.training.finetune import protocol_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("weights")
    parser.add_argument("runs", type=Path)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=500, help="fewer only to try this script")
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("table4.json"))
    options = parser.parse_args()
    setting = {"image_size": options.image_size, "precision": options.precision, "steps": options.steps}
    done: list[dict[str, Any]] = json.loads(options.record.read_text()) if options.record.is_file() else []
    protocol = protocol_for(
        options.data,
        options.weights,
        recipe="finetune-paper",
        settings=[f"{key}={value}" for key, value in setting.items()],
    )

    def top1(lr: float, seed: int, split: str) -> float:
        trial = {**setting, "lr": lr, "seed": seed, "split": split}
        for row in done:
            if trial.items() <= row.items():
                return row["top1"]
        recipe = protocol.recipe.replace(lr=lr, seed=seed, validation=split, eval_every=0)
        out = options.runs / f"{options.image_size}-{split}-lr-{lr:g}-seed-{seed}"
        begun = time.monotonic()
        run = vt.train(options.data, recipe=recipe, out=out, auto_resume=True)
        measured = {name: round(run.evaluation[name], 2) for name in ("top1", "mean_per_class")}
        hours = round((time.monotonic() - begun) / 3600, 2)
        row = {**trial, **measured, "hours_of_last_call": hours, "processor": processor_name() or platform.machine()}
        done.append(row)
        options.record.write_text(json.dumps(done, indent=1) + "\n")
        print(f"lr {lr:g}, seed {seed}, {split}: top-1 {row['top1']:.2f}%", flush=True)
        return row["top1"]

    best = max(protocol.lrs, key=lambda lr: top1(lr, protocol.recipe.seed, "dev"))
    accuracies = [top1(best, protocol.recipe.seed + index, "test") for index in range(protocol.seeds)]
    print(f"lr {best:g}: {statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}% of the test images")


if __name__ == "__main__":
    main()
