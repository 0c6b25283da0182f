"""How long a step waits for a checkpoint: until it is on the disk, or until its state is copied.

    .venv/bin/python benchmarks/checkpointing.py [--model ViT-B/16] [--folder FOLDER]

The state is that of AdamW: the weights and twice their number. Alternating rounds, medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from vitruvian import create_model
from vitruvian.training.checkpoint import Checkpoints
from vitruvian.training.distributed import Processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    tensors = {
        f"{kind}.{name}": torch.randn_like(parameter)
        for name, parameter in create_model(given.model).named_parameters()
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    waits: dict[bool, list[float]] = {True: [], False: []}
    whole = []
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        checkpoints = Checkpoints(Path(place), Processes())
        for number in range(2 * given.rounds):
            wait, before = number % 2 == 0, time.perf_counter()
            checkpoints.write(number, tensors, {}, wait=wait)
            waits[wait].append(time.perf_counter() - before)
            checkpoints.settle()
            if not wait:
                whole.append(time.perf_counter() - before)
    sync, copied = (statistics.median(waits[wait]) for wait in (True, False))
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    print(
        f"{given.model}, {size:.2f} GB: async_checkpoint=false stops the step for {sync:.2f} s, true for {copied:.2f}"
    )
    print(f"{copied / sync:.2f} of it; written {statistics.median(whole):.2f} s after it began")


if __name__ == "__main__":
    main()
