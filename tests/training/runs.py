"""Tiny runs for tests: a model of a few thousand parameters on the built-in digits."""

import json
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from vitruvian.training import Listener

TINY = (
    "architecture.depth=1",
    "architecture.width=16",
    "architecture.mlp_dim=16",
    "architecture.num_heads=2",
    "architecture.patch_size=4",
    "steps=12",
    "batch_size=32",
    "warmup=0",
    "eval_every=0.2",
    "log_every=3",
)
"""44 steps an epoch, an evaluation every 9."""


STEM = (
    "architecture.patch_size=1",
    "architecture.stem.style=conv",
    "architecture.stem.stages=[1, 1]",
    "architecture.stem.width=8",
    "stem_init=whitening",
    'freeze=["embed.stem.root.weight"]',
    "optimizer=muon",
    "average=ema",
    "augment.alternate_flip=true",
)
"""A convolutional stem with BatchNorm, and an optimizer with state of its own."""


class StopAt(Listener):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def stepped(self, step):
        if step == self.step:
            signal.raise_signal(self.number)


def command(*arguments, processes=1):
    """The command line of `vit train`, under torchrun for several processes."""
    program = [sys.executable, "-m"]
    if processes > 1:
        program += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    return [*program, "vitruvian", "train", *map(str, arguments)]


def changes(*settings):
    return [word for setting in (*TINY, *settings) for word in ("--set", setting)]


def weights(run):
    """The weights of a finished run."""
    return load_file(Path(run) / "model" / "model.safetensors")


def lines(run):
    """The lines of metrics, without the times."""
    found = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_second")} for line in found]


def identical(first, second):
    """Whether two sets of tensors are equal to the bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def same_model(first, second):
    """Whether the model directories of two runs have the same files with the same bytes."""
    contents = [{path.name: path.read_bytes() for path in (Path(run) / "model").iterdir()} for run in (first, second)]
    return contents[0] == contents[1] and set(contents[0]) == {"config.json", "model.safetensors"}


def folder_of(path, **classes):
    """A folder with so many images of each class."""
    rng = np.random.default_rng(0)
    for name, count in classes.items():
        (path / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path / name / f"{number}.png")
    return path
