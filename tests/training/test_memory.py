"""What a training step adds to a process."""

import subprocess
import sys

import pytest

STEP = """
import sys
from pathlib import Path

import torch

from vitruvian.catalog import resolve
from vitruvian.model.build import build
from vitruvian.training.model import give_back_freed


def peak_kilobytes():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


torch.set_num_threads(1)
model = build(resolve("ViT-Ti/16").replace(image_size=32, patch_size=4, layers=6, classes=10)).train()
model.grad_checkpointing = sys.argv[1] == "checkpointed"
if model.grad_checkpointing:
    give_back_freed()
model(torch.zeros(1, 3, 32, 32)).sum().backward()  # imports what a step needs
before = peak_kilobytes()
for _ in range(2):
    model(torch.zeros(64, 3, 32, 32)).sum().backward()
print(peak_kilobytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_checkpointed_activations_take_less_than_half_the_memory():
    plain, checkpointed = (
        int(subprocess.run([sys.executable, "-c", STEP, how], check=True, capture_output=True, text=True).stdout)
        for how in ("plain", "checkpointed")
    )
    assert checkpointed < plain / 2
