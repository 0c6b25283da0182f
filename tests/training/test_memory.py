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
from vitruvian.machine import tune_allocator

def peak_kilobytes():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))

model = build(resolve("ViT-Ti/16").replace(image_size=32, patch_size=4, depth=4, num_classes=10)).train()
model.grad_checkpointing = sys.argv[1] == "checkpointed"
with tune_allocator(keep_freed=not model.grad_checkpointing):
    model(torch.zeros(1, 3, 32, 32)).sum().backward()  # imports what a step needs
    before = peak_kilobytes()
    model(torch.zeros(48, 3, 32, 32)).sum().backward()
    print(peak_kilobytes() - before)
"""
"""Prints what a step adds to the peak of a new process; a fork would reuse memory that other tests have freed."""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_checkpointed_activations_take_less_than_half_the_memory():
    command = [sys.executable, "-c", STEP]
    plain, checkpointed = (
        int(subprocess.run([*command, how], stdout=subprocess.PIPE, check=True, timeout=120).stdout)
        for how in ("plain", "checkpointed")
    )
    assert 0 < checkpointed < plain / 2
