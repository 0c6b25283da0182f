"""What a training step adds to a process."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from forked import Forked
from vitruvian.catalog import resolve
from vitruvian.model.build import build
from vitruvian.training.initial_model import return_freed_memory


def peak_kilobytes():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))


def steps(checkpointed):
    """Print what a step adds to the peak of the process."""
    model = build(resolve("ViT-Ti/16").replace(image_size=32, patch_size=4, depth=4, num_classes=10)).train()
    model.grad_checkpointing = checkpointed
    if checkpointed:
        return_freed_memory()
    model(torch.zeros(1, 3, 32, 32)).sum().backward()  # imports what a step needs
    before = peak_kilobytes()
    model(torch.zeros(48, 3, 32, 32)).sum().backward()
    print(peak_kilobytes() - before)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_checkpointed_activations_take_less_than_half_the_memory():
    plain, checkpointed = (int(Forked(work=partial(steps, how)).wait().out) for how in (False, True))
    assert 0 < checkpointed < plain / 2
